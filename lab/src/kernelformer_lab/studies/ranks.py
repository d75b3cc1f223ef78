"""One sequence over several ranks of this machine: its cost beside independent processes, and the bytes sent.

R processes of one thread hold L tokens each and attend forward and backward, in turns each by itself and to the tokens
of all. What a rank gives to the others is counted and compared with the formula of `analysis.scaling`: another number
is an error, and so is one that depends on the length.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor

from kernelformer.attention.ranks import HEADER, Ranks
from kernelformer.contract import compute_dtype
from kernelformer.formatting import human_bytes, human_time, short_names
from kernelformer.modules import AttentionCore, KernelCore, build_attention
from kernelformer.modules.context import split_over
from kernelformer.modules.spec import parse_method
from kernelformer.parallel import context_parallel
from kernelformer.settings import Settings, option
from kernelformer_lab.analysis.scaling import Exchange
from kernelformer_lab.bench.harness import peak_memory, run_together
from kernelformer_lab.bench.settings import HEAPS, MEMORY_HEAP
from kernelformer_lab.bench.timing import Figures, Step, time_rounds
from kernelformer_lab.figures import drawing, table
from kernelformer_lab.studies.base import SPECS, Log, Progress, Record, Row, Study, where


@dataclass(frozen=True)
class SplitCase:
    """An attention whose tokens are on several ranks, and the inputs of one of them.

    Args:
        causal: whether a query sees only what came before it.
        key_heads: G; 0: as many as there are heads.
        dtype: of the inputs, by torch's name.
        masked: whether some keys are hidden.
        packed: whether rows hold several sequences.
        slope: distance from which on a bias is said to be a straight line, of which it is one everywhere; 0: no bias.
    """

    attention: str
    causal: bool
    batch: int = 1
    heads: int = 8
    key_heads: int = 0
    head_dim: int = 64
    dtype: str = "float32"
    masked: bool = False
    packed: bool = False
    slope: int = 0

    @property
    def groups(self) -> int:
        """G."""
        return self.key_heads or self.heads

    def core(self) -> AttentionCore:
        """The attention."""
        method, options = parse_method(self.attention)
        core = build_attention(method, head_dim=self.head_dim, num_heads=self.heads, **options)
        return core.double() if self.dtype == "float64" else core

    def inputs(self, length: int, rank: int) -> list[Tensor]:
        """q, k and v of a rank, and a gradient of the output, (B, H or G, L, D) each."""
        gen = torch.Generator().manual_seed(rank)
        heads = (self.heads, self.groups, self.groups, self.heads)
        sizes = [(self.batch, h, length, self.head_dim) for h in heads]
        return [torch.randn(x, generator=gen, dtype=getattr(torch, self.dtype)) for x in sizes]

    def options(self, length: int, rank: int, ranks: int) -> dict[str, Any]:
        """Other arguments of a call with the tokens of so many ranks.

        Every third key is hidden, packed sequences have seven tokens and continue over ranks.
        """
        place = torch.arange(rank * length, (rank + 1) * length).expand(self.batch, -1)
        given: dict[str, Any] = {"is_causal": self.causal}
        if self.masked:
            given["key_mask"] = place % 3 > 0
        if self.packed:
            given["segment_ids"] = place // 7
        if self.slope:
            falls = torch.arange(1, self.heads + 1, dtype=getattr(torch, self.dtype)) / self.heads
            distance = torch.arange(1 - ranks * length, ranks * length).abs()
            given |= {"bias": -falls.unsqueeze(1) * distance, "max_distance": self.slope, "slope": falls}
        return given

    def exchange(self, core: AttentionCore) -> Exchange:
        """Arguments of the formula for the exchange, from the core itself."""
        phi = core.feature_map if isinstance(core, KernelCore) else None
        return Exchange(
            heads=self.heads if self.slope else self.groups if phi is None else max(self.groups, phi.heads),
            head_dim=self.head_dim,
            value_dim=self.head_dim,
            features=core.feature_dim or 0,
            facts=HEADER,
            window=getattr(core, "window", None) or self.slope,
            sinks=getattr(core, "sinks", 0),
            batch=self.batch,
            item=compute_dtype(getattr(torch, self.dtype)).itemsize,
            signed=phi is not None and phi.spec.family != "positive",
            causal=self.causal,
            masked=self.masked,
            packed=self.packed,
            slope=self.slope > 0,
        )


Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def train(attend: Attend, inputs: Sequence[Tensor]) -> None:
    """Forward, and backward to q, k and v, from these and a gradient of the output."""
    *given, grad = inputs
    leaves = [x.detach().requires_grad_() for x in given]
    attend(*leaves).backward(grad)


class LonelyRanks(Ranks):
    """One of many ranks without the others: it gets what it gave itself, so that all of its work is there to measure.

    Args:
        size: how many ranks there would be. This is one in the middle; of two the first, which has sums to make.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.rank, self.size = (size - 1) // 2, size

    def _all_gather(self, every: list[Tensor], x: Tensor) -> None:
        for copy in every:
            copy.copy_(x)

    def _sum_for_each(self, grads: Tensor) -> Tensor:
        return grads.sum(0)


def train_split(attend: Attend, inputs: Sequence[Tensor]) -> None:
    """`train` with the tokens of all ranks."""
    with context_parallel():
        train(attend, inputs)


def train_lonely(attend: Attend, inputs: Sequence[Tensor], size: int) -> None:
    """`train` as one of so many ranks, without any exchange."""
    with split_over(LonelyRanks(size)):
        train(attend, inputs)


def sent_bytes(case: SplitCase, core: AttentionCore, length: int, rank: int) -> list[int]:
    """Bytes that a rank gives to the others, as they are counted, forward and backward."""
    *given, grad = case.inputs(length, rank)
    leaves = [x.requires_grad_() for x in given]
    with context_parallel() as ranks:
        out = core(*leaves, **case.options(length, rank, ranks.size))
        forward = ranks.sent
        out.backward(grad)
        return [forward, ranks.sent - forward]


FEW, MANY = 2, 64  # ranks between which the time and memory that each one more takes are measured
TINY = 256  # tokens of such a run, and of one that warms up
PATIENCE = timedelta(minutes=10)  # for a rank that the others wait for


class _Together(Step):
    """A step of all ranks at once; its time is that of the slowest."""

    def seconds(self) -> float:
        """Wait for the others, run once and return the longest time of all ranks."""
        dist.barrier()
        try:
            own = super().seconds()
        except (RuntimeError, MemoryError, ValueError) as problem:  # the others wait for this rank: it has to end
            raise SystemExit(str(problem)) from problem
        longest = torch.tensor([own], dtype=torch.float64)
        dist.all_reduce(longest, op=dist.ReduceOp.MAX)
        return float(longest)


@contextmanager
def _joined(rank: int, count: int, store: str) -> Iterator[None]:
    """Be one of so many local processes, which meet in a file."""
    dist.init_process_group("gloo", init_method=Path(store).as_uri(), rank=rank, world_size=count, timeout=PATIENCE)
    try:
        yield
    finally:
        dist.destroy_process_group()


def time_ranks(
    *,
    rank: int,
    count: int,
    store: str,
    cases: Sequence[dict[str, Any]],
    length: int,
    lengths: Sequence[int],
    rounds: int,
    softmax: int,
) -> Figures:
    """One rank of the times: of each case by itself and over ranks, in turns with their parts; and bytes sent.

    Args:
        cases: fields of `SplitCase`.
        length: tokens of each rank that are timed.
        lengths: of tokens for which bytes are counted.
        rounds: timed repeats, after one that warms up.
        softmax: tokens that exact attention of the first case's sizes is timed with, in each process by itself; 0: not.
    """
    result: list[Figures] = []
    with _joined(rank, count, store):
        for given in cases:
            case = SplitCase(**given)
            core = case.core()
            sent = {n: sent_bytes(case, core, n, rank) for n in lengths}
            steps = _passes(case, core, length, rank) if rounds else {}
            figures = time_rounds(steps, rounds, 0.0) if steps else {}
            result.append({"exchange": asdict(case.exchange(core)), "sent": sent, **figures})
        exact = _softmax(SplitCase(**cases[0]), softmax, rank) if softmax else {}
        return {"cases": result, "softmax": time_rounds(exact, rounds, 0.0) if exact else {}}


def _passes(case: SplitCase, core: AttentionCore, length: int, rank: int) -> dict[str, Step]:
    """Forward and backward without ranks; as one of them without any exchange; and over ranks."""
    inputs, count = case.inputs(length, rank), dist.get_world_size()
    alone, split = (partial(core, **case.options(length, rank, n)) for n in (1, count))
    runs = {
        "alone": partial(train, alone, inputs),
        "work": partial(train_lonely, split, inputs, count),
        "split": partial(train_split, split, inputs),
    }
    return {name: _Together(run) for name, run in (runs | _lonely(case, core, rank)).items()}


def _lonely(case: SplitCase, core: AttentionCore, rank: int) -> dict[str, Callable[[], None]]:
    """A few tokens as one of few and of many ranks, which differ in what has to be done with the others' states."""
    inputs = case.inputs(TINY, rank)
    return {
        name: partial(train_lonely, partial(core, **case.options(TINY, rank, n)), inputs, n)
        for name, n in (("few", FEW), ("many", MANY))
    }


def _softmax(case: SplitCase, length: int, rank: int) -> dict[str, Step]:
    inputs = case.inputs(length, rank)
    return {
        name: _Together(partial(train, partial(F.scaled_dot_product_attention, is_causal=causal), inputs))
        for name, causal in (("bidirectional", False), ("causal", True))
    }


def memory_of_ranks(*, rank: int, count: int, store: str, cases: Sequence[dict[str, Any]], length: int) -> Figures:
    """One rank of the peak memory, see `time_ranks`.

    Returns:
        of each case the peak over ranks (``split``) beyond the inputs, which are as many bytes (``inputs``) as its
        results, the output and three gradients; and of a few tokens as one of ``few`` and of ``many`` ranks.
    """
    peaks: list[Figures] = []
    with _joined(rank, count, store):
        for given in cases:
            case = SplitCase(**given)
            core = case.core()
            lonely = _lonely(case, core, rank)
            lonely["few"]()  # warms up
            inputs = case.inputs(length, rank)
            attend = partial(core, **case.options(length, rank, count))
            runs: dict[str, Callable[[], None]] = {**lonely, "split": partial(train_split, attend, inputs)}
            each = {name: peak_memory({name: Step(run)})[name] for name, run in runs.items()}
            peaks.append({**each, "inputs": sum(x.nbytes for x in inputs)})
    return {"cases": peaks}


def run_ranks(count: int, cases: Sequence[SplitCase], **arguments: Any) -> list[Figures]:
    """Start so many ranks, one thread each, and return what each has measured; see `time_ranks`."""
    return _run(time_ranks, count, cases, HEAPS["default"], arguments)


def run_memory(count: int, cases: Sequence[SplitCase], length: int) -> list[Figures]:
    """Start so many ranks, and return the peaks of each; see `memory_of_ranks`."""
    return _run(memory_of_ranks, count, cases, MEMORY_HEAP, {"length": length})


def _run(
    work: Callable[..., Figures],
    count: int,
    cases: Sequence[SplitCase],
    heap: dict[str, str],
    arguments: dict[str, Any],
) -> list[Figures]:
    with tempfile.TemporaryDirectory() as folder:
        return run_together(
            work,
            count=count,
            threads=1,
            allocator=heap,
            store=str(Path(folder) / "ranks"),
            cases=[asdict(x) for x in cases],
            **arguments,
        )


@dataclass(frozen=True, kw_only=True)
class RanksSettings(Settings):
    """Settings of this study."""

    attention: tuple[str, ...] = option(("favor+:num_features=64", "favor+:num_features=64:window=64:sinks=4"), SPECS)
    ranks: tuple[int, ...] = option((2, 4), "numbers of ranks, a process of one thread each", least=2)
    length: int = option(32768, "tokens of each rank", least=1)
    crowded_length: int = option(4096, "tokens of each rank that are timed where ranks outnumber the cores", least=1)
    batch: int = option(1, "sequences at once", least=1)
    heads: int = option(8, "of the attention", least=1)
    head_dim: int = option(64, "width of a head", least=1)
    rounds: int = option(5, "timed repeats of each, interleaved, after one that warms up", least=1)
    softmax: int = option(4096, "tokens that exact attention is timed with, for the plan", least=1)
    memory: bool = option(True, "measure peak memory too, of one rank alone as well")


def cases(settings: RanksSettings) -> list[SplitCase]:
    """Every attention, bidirectional and causal."""
    for spec in settings.attention:
        parse_method(spec)
    sizes: dict[str, Any] = {"batch": settings.batch, "heads": settings.heads, "head_dim": settings.head_dim}
    return [SplitCase(x, causal, **sizes) for x in settings.attention for causal in (False, True)]


def steps(settings: RanksSettings) -> int:
    """Number of calls of ``progress`` in `run`."""
    groups = len(set(settings.ranks))
    return groups + settings.memory * (groups + 1)


def run(record: Record, log: Log, progress: Progress) -> None:
    """Measure each number of ranks: times and bytes, then memory.

    ``softmax`` are seconds of exact attention in each of R independent processes.
    """
    settings, all_cases = record.settings, cases(record.settings)
    times, peaks = list[Row](), list[Row]()
    record.figures = {"times": times, "peaks": peaks, "softmax": {}}
    numbers = sorted(set(settings.ranks))
    for count in numbers:
        log(f"{count} ranks: times and bytes")
        crowded = count > (os.cpu_count() or 1)
        length = min(settings.length, settings.crowded_length) if crowded else settings.length
        exact = 0 if record.figures["softmax"] else settings.softmax
        lengths = sorted({max(1, length // x) for x in (32, 8, 2)})
        figures = run_ranks(count, all_cases, length=length, lengths=lengths, rounds=settings.rounds, softmax=exact)
        times += [_timed(case, count, length, figures, n) for n, case in enumerate(all_cases)]
        if exact:
            seconds = {name: x["seconds"] for name, x in figures[0]["softmax"].items()}
            record.figures["softmax"] = {"length": exact, "ranks": count, **seconds}
        progress()
    for count in (1, *numbers) if settings.memory else ():
        log(f"{count} rank{'s' * (count > 1)}: memory")
        figures = run_memory(count, all_cases, settings.length)
        peaks += [_peak(case, count, settings.length, figures, n) for n, case in enumerate(all_cases)]
        progress()


def _timed(case: SplitCase, count: int, length: int, figures: Sequence[Figures], number: int) -> Row:
    """Times and bytes of one attention over so many ranks, after a look at the bytes of all ranks and lengths.

    ``length`` is of each rank. Seconds of forward and backward: ``alone`` in independent processes at the same time,
    the slowest of them; ``work`` of what a rank has to do over ranks, without any exchange; ``split`` over ranks;
    ``merge`` of the state of one more rank. ``exchange`` is what the formula depends on, ``formula`` its bytes forward
    and backward, ``sent`` those that a rank gave to others, by its tokens. ``efficiency`` is the share of the time over
    ranks that independent processes take, ``expected`` the same if an exchange took no time.
    """
    every = [x["cases"][number] for x in figures]
    first = every[0]
    seconds = {x: first[x]["seconds"] for x in ("alone", "work", "split", "few", "many")}
    merge = max(0.0, seconds.pop("many") - seconds.pop("few")) / (MANY - FEW)
    traffic = Exchange(**first["exchange"]).traffic(count)
    formula = [traffic.forward, traffic.backward]
    for rank, other in enumerate(every):
        for tokens, sent in other["sent"].items():
            if sent != formula:
                raise ValueError(
                    f"rank {rank} of {count} sent {sent[0]} bytes forward and {sent[1]} backward for {tokens} tokens "
                    f"of {case.attention!r}, causal={case.causal}, and the formula says {formula[0]} and {formula[1]}; "
                    f"`analysis.scaling.Exchange` is not what is sent."
                )
    return {
        **{"attention": case.attention, "causal": case.causal, "ranks": count, "length": length},
        **{**seconds, "merge": merge, "exchange": first["exchange"], "sent": first["sent"]},
        "efficiency": seconds["alone"] / seconds["split"],
        "expected": seconds["alone"] / seconds["work"],
        "formula": formula,
    }


def _peak(case: SplitCase, count: int, length: int, figures: Sequence[Figures], number: int) -> Row:
    """Peak memory of one attention on the rank that takes most.

    Bytes of ``inputs`` (q, k, v and the gradient of the output; the results are as many), of the ``peak`` beyond them
    (results and everything in between), and of the state of one more rank (``merge``).
    """
    every = [x["cases"][number] for x in figures]
    merge = max(0, *(x["many"] - x["few"] for x in every)) / (MANY - FEW)
    sizes = {"inputs": every[0]["inputs"], "peak": max(x["split"] for x in every), "merge": merge}
    return {"attention": case.attention, "causal": case.causal, "ranks": count, "length": length, **sizes}


def _kind(row: Row) -> str:
    return "causal" if row["causal"] else "bidirectional"


def tables(record: Record) -> list[Table]:
    """Times, bytes and memory."""
    short = short_names(x["attention"] for x in record.figures["times"])
    time, sent = [], []
    for x in record.figures["times"]:
        head = (short[x["attention"]], _kind(x), str(x["ranks"]))
        shares = (f"{x['efficiency']:.3f}", f"{x['expected']:.3f}")
        time.append((*head, str(x["length"]), human_time(x["alone"]), human_time(x["split"]), *shares))
        sent.append((*head, *(f"{n:,}" for n in x["formula"]), "the same"))
    memory = [
        (short[x["attention"]], _kind(x), str(x["ranks"]), str(x["length"]), human_bytes(x["peak"]))
        for x in record.figures["peaks"]
    ]
    head = ("attention", "", "ranks")
    heads = (*head, "tokens of each", "independent", "over ranks", "efficiency", "without exchange")
    out = [
        table("Forward and backward, one thread a rank", heads, time, left=2),
        table("Bytes that a rank sends, whatever the length", (*head, "forward", "backward", "formula"), sent, left=2),
    ]
    if memory:
        title = "Peak memory of a rank beyond its inputs"
        out.append(table(title, (*head, "tokens of each", "peak"), memory, left=2))
    return out


def picture(record: Record, path: Path) -> None:
    """Draw the efficiency, and the peak memory over the number of ranks."""
    times, peaks = record.figures["times"], record.figures["peaks"]
    numbers = sorted({x["ranks"] for x in times})
    short = short_names(x["attention"] for x in times)
    labels = {(x["attention"], x["causal"]): f"{short[x['attention']]}, {_kind(x)}" for x in times}
    places, height = np.arange(len(labels)), 0.8 / len(numbers)
    with drawing(path, (14, 0.5 * len(labels) + 2), columns=2) as (_, ((left, right),)):
        for n, count in enumerate(numbers):
            values = [x["efficiency"] for x in where(times, ranks=count)]
            left.barh(places + (n + 0.5) * height - 0.4, values, height, label=f"{count} ranks")
        left.set_yticks(places, list(labels.values()))
        left.invert_yaxis()
        left.set_xlabel("time of independent processes over that of ranks")
        left.legend(fontsize="small")
        for (attention, causal), label in labels.items():
            mine = where(peaks, attention=attention, causal=causal)
            right.plot([x["ranks"] for x in mine], [x["peak"] / 2**20 for x in mine], marker="o", label=label)
        right.set(xlabel="ranks, with as many tokens each", ylabel="peak memory of a rank (MiB)")
        right.set_xticks(sorted({x["ranks"] for x in peaks}))
        right.set_ylim(bottom=0)
        right.legend(fontsize="x-small", loc="lower center")
        for axis in (left, right):
            axis.grid(True, alpha=0.2)


STUDY = Study(
    "ranks",
    "",
    RanksSettings,
    steps,
    run,
    tables,
    picture,
    examples=(("--ranks 2 --length 8192", "two processes of one thread each"),),
)
