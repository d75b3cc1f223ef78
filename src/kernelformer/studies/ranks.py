"""One sequence over several ranks of this machine: what that costs beside independent processes, and what is sent.

R processes of one thread hold L tokens each and attend forward and backward, in turns each by itself and to the tokens
of all. What a rank gives to the others is counted and compared with the formula of `analysis.scaling`: another number
is an error, and so is one that depends on the length.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from kernelformer.analysis.scaling import Exchange
from kernelformer.formatting import human_bytes, human_time, short_names
from kernelformer.measure.ranks import FEW, MANY, run_memory, run_ranks
from kernelformer.measure.split_case import SplitCase
from kernelformer.modules.spec import parse_method
from kernelformer.studies.base import Log, Progress
from kernelformer.studies.settings import RanksSettings as Settings
from kernelformer.timing import Figures


@dataclass(frozen=True)
class Timed:
    """Times and bytes of one attention over so many ranks.

    Args:
        attention: its spec.
        causal: whether a query sees only what came before it.
        ranks: R.
        length: tokens of each rank that were timed.
        alone: seconds of forward and backward in independent processes at the same time, the slowest of them.
        work: seconds of what a rank has to do over ranks, without any exchange.
        split: seconds over ranks.
        merge: seconds that the state of one more rank takes.
        exchange: what the formula depends on, see `Exchange`.
        sent: bytes that a rank gave to others, forward and backward, by the tokens of a rank.
    """

    attention: str
    causal: bool
    ranks: int
    length: int
    alone: float
    work: float
    split: float
    merge: float
    exchange: dict[str, Any]
    sent: dict[str, list[int]]

    @property
    def efficiency(self) -> float:
        """Share of the time over ranks that independent processes take."""
        return self.alone / self.split

    @property
    def expected(self) -> float:
        """The efficiency if an exchange took no time."""
        return self.alone / self.work

    @property
    def formula(self) -> list[int]:
        """Bytes forward and backward by the formula."""
        traffic = Exchange(**self.exchange).traffic(self.ranks)
        return [traffic.forward, traffic.backward]


@dataclass(frozen=True)
class Peak:
    """Peak memory of one attention on the rank that takes most.

    Args:
        attention: its spec.
        causal: whether a query sees only what came before it.
        ranks: R.
        length: tokens of each rank.
        inputs: bytes of q, k, v and the gradient of the output; the results are as many.
        peak: bytes beyond the inputs: results and everything in between.
        merge: bytes that the state of one more rank takes.
    """

    attention: str
    causal: bool
    ranks: int
    length: int
    inputs: int
    peak: int
    merge: float


@dataclass
class Result:
    """What the study has measured; ``softmax`` are seconds of exact attention in each of R independent processes."""

    times: list[Timed] = field(default_factory=list)
    peaks: list[Peak] = field(default_factory=list)
    softmax: dict[str, Any] = field(default_factory=dict)


def cases(settings: Settings) -> list[SplitCase]:
    """Every attention, bidirectional and causal."""
    for spec in settings.attention:
        parse_method(spec)
    sizes: dict[str, Any] = {"batch": settings.batch, "heads": settings.heads, "head_dim": settings.head_dim}
    return [SplitCase(x, causal, **sizes) for x in settings.attention for causal in (False, True)]


def steps(settings: Settings) -> int:
    """How often `run` calls ``progress``."""
    groups = len(set(settings.ranks))
    return groups + settings.memory * (groups + 1)


def run(settings: Settings, folder: Path, log: Log, progress: Progress) -> Result:
    """Measure each number of ranks: times and bytes, then memory."""
    result, all_cases = Result(), cases(settings)
    numbers = sorted(set(settings.ranks))
    for count in numbers:
        log(f"{count} ranks: times and bytes")
        crowded = count > (os.cpu_count() or 1)
        length = min(settings.length, settings.crowded_length) if crowded else settings.length
        exact = 0 if result.softmax else settings.softmax
        lengths = sorted({max(1, length // x) for x in (32, 8, 2)})
        figures = run_ranks(count, all_cases, length=length, lengths=lengths, rounds=settings.rounds, softmax=exact)
        result.times += [_timed(case, count, length, figures, n) for n, case in enumerate(all_cases)]
        if exact:
            seconds = {name: x["seconds"] for name, x in figures[0]["softmax"].items()}
            result.softmax = {"length": exact, "ranks": count, **seconds}
        progress()
    for count in (1, *numbers) if settings.memory else ():
        log(f"{count} rank{'s' * (count > 1)}: memory")
        figures = run_memory(count, all_cases, settings.length)
        result.peaks += [_peak(case, count, settings.length, figures, n) for n, case in enumerate(all_cases)]
        progress()
    return result


def _timed(case: SplitCase, count: int, length: int, figures: Sequence[Figures], number: int) -> Timed:
    """A row of times, after a look at the bytes of all ranks and lengths."""
    every = [x["cases"][number] for x in figures]
    first = every[0]
    alone, work, split, few, many = (first[x]["seconds"] for x in ("alone", "work", "split", "few", "many"))
    merge = max(0.0, many - few) / (MANY - FEW)
    row = Timed(
        *(case.attention, case.causal, count, length, alone, work, split, merge), first["exchange"], first["sent"]
    )
    for rank, other in enumerate(every):
        for tokens, sent in other["sent"].items():
            if sent != row.formula:
                raise ValueError(
                    f"rank {rank} of {count} sent {sent[0]} bytes forward and {sent[1]} backward for {tokens} tokens "
                    f"of {case.attention!r}, causal={case.causal}, and the formula says {row.formula[0]} and "
                    f"{row.formula[1]}; `analysis.scaling.Exchange` is not what is sent."
                )
    return row


def _peak(case: SplitCase, count: int, length: int, figures: Sequence[Figures], number: int) -> Peak:
    every = [x["cases"][number] for x in figures]
    merge = max(0, *(x["many"] - x["few"] for x in every)) / (MANY - FEW)
    return Peak(case.attention, case.causal, count, length, every[0]["inputs"], max(x["split"] for x in every), merge)


def _kind(row: Timed | Peak) -> str:
    return "causal" if row.causal else "bidirectional"


def tables(result: Result) -> list[Table]:
    """Times, bytes and memory."""
    short = short_names(x.attention for x in result.times)
    time = Table("attention", "", title="Forward and backward, one thread a rank", title_justify="left")
    sent = Table("attention", "", title="Bytes that a rank sends, whatever the length", title_justify="left")
    for name in ("ranks", "tokens of each", "independent", "over ranks", "efficiency", "without exchange"):
        time.add_column(name, justify="right")
    for name in ("ranks", "forward", "backward", "formula"):
        sent.add_column(name, justify="right")
    for x in result.times:
        figures = (human_time(x.alone), human_time(x.split), f"{x.efficiency:.3f}", f"{x.expected:.3f}")
        time.add_row(short[x.attention], _kind(x), str(x.ranks), str(x.length), *figures)
        sent.add_row(short[x.attention], _kind(x), str(x.ranks), *(f"{n:,}" for n in x.formula), "the same")
    if not result.peaks:
        return [time, sent]
    memory = Table("attention", "", title="Peak memory of a rank beyond its inputs", title_justify="left")
    for name in ("ranks", "tokens of each", "peak"):
        memory.add_column(name, justify="right")
    for y in result.peaks:
        memory.add_row(short[y.attention], _kind(y), str(y.ranks), str(y.length), human_bytes(y.peak))
    return [time, sent, memory]


def record(result: Result) -> dict[str, Any]:
    """Every figure."""
    times = [
        {**asdict(x), "efficiency": x.efficiency, "expected": x.expected, "formula": x.formula} for x in result.times
    ]
    return {"times": times, "peaks": [asdict(x) for x in result.peaks], "softmax": result.softmax}


def picture(result: Result, path: Path) -> None:
    """Draw the efficiency, and the peak memory over the number of ranks."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    numbers = sorted({x.ranks for x in result.times})
    short = short_names(x.attention for x in result.times)
    labels = list(dict.fromkeys(f"{short[x.attention]}, {_kind(x)}" for x in result.times))
    places, height = np.arange(len(labels)), 0.8 / len(numbers)
    figure, axes = plt.subplots(1, 2, figsize=(14, 0.5 * len(labels) + 2), constrained_layout=True)
    for n, count in enumerate(numbers):
        values = [x.efficiency for x in result.times if x.ranks == count]
        axes[0].barh(places + (n + 0.5) * height - 0.4, values, height, label=f"{count} ranks")
    axes[0].set_yticks(places, labels)
    axes[0].invert_yaxis()
    axes[0].set_xlabel("time of independent processes over that of ranks")
    axes[0].legend(fontsize="small")
    for label in labels:
        mine = [x for x in result.peaks if f"{short[x.attention]}, {_kind(x)}" == label]
        axes[1].plot([x.ranks for x in mine], [x.peak / 2**20 for x in mine], marker="o", label=label)
    axes[1].set_xlabel("ranks, with as many tokens each")
    axes[1].set_ylabel("peak memory of a rank (MiB)")
    axes[1].set_xticks(sorted({x.ranks for x in result.peaks}))
    axes[1].set_ylim(bottom=0)
    axes[1].legend(fontsize="x-small", loc="lower center")
    for axis in axes:
        axis.grid(True, alpha=0.2)
    figure.savefig(path, dpi=130)
    plt.close(figure)
