"""Attention over several ranks of this machine against as many processes that attend by themselves at the same time.

Both ways are measured in the same processes, one thread each, so that cores share their bandwidth in both. Each repeat
begins at a barrier and ends with the slowest rank.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from kernelformer.measure.harness import peak_memory, run_together
from kernelformer.measure.settings import HEAPS, MEMORY_HEAP
from kernelformer.measure.split_case import SplitCase, sent_bytes, train, train_lonely, train_split
from kernelformer.modules import AttentionCore
from kernelformer.timing import Figures, Step, time_rounds

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
        rank: of this process.
        count: number of ranks.
        store: file that they meet in.
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
