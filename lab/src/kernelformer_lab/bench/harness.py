"""One process harness for time and memory, shared by the benchmark and the studies of speed.

`run_in_process` calls a function in a fresh process with the allocator's settings in its environment, `run_together` in
several at once. There `Step`s are measured: by `time_rounds` if they are long, by `time_bursts` if they may be short,
and by `peak_memory`. `fill_rows` brings the figures of a process, or its failure, into the rows of a table.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import torch
from torch import Tensor

from kernelformer.errors import WorkerError
from kernelformer.formatting import human_time
from kernelformer_lab.bench import devices
from kernelformer_lab.bench.devices import counts_memory
from kernelformer_lab.bench.settings import HEAPS, PASSES
from kernelformer_lab.bench.timing import Figures, Step, medians, no_collection, taking_timings
from kernelformer_lab.jobs import call_in_process, starting
from kernelformer_lab.memory import peak, reset_peak


def run_in_process(
    work: Callable[..., Figures], *, threads: int, allocator: Mapping[str, str] = HEAPS["default"], **arguments: Any
) -> Figures:
    """Call a function in a fresh process and return its result.

    Args:
        work: a function at the top of a module, which takes and returns plain JSON values.
        allocator: environment variables of glibc's malloc, as in `HEAPS` and `MEMORY_HEAP`.

    Raises:
        WorkerError: the process failed; with the reason.
    """
    figures: Figures = call_in_process(work, arguments, threads=threads, env=allocator)
    return figures


def run_together(
    work: Callable[..., Figures],
    *,
    count: int,
    threads: int,
    allocator: Mapping[str, str] = HEAPS["default"],
    **arguments: Any,
) -> list[Figures]:
    """Call a function in several fresh processes at once, and return their results in the order of their ranks.

    Args:
        work: see `run_in_process`; it is also given its ``rank``, from 0 on, and the ``count``.
        threads: of torch in each of them.
        allocator: see `run_in_process`.
        arguments: of the function, the same for all.

    Raises:
        WorkerError: one of them failed; the others are ended, since they may wait for it.
    """
    with ThreadPoolExecutor(count) as pool, starting() as start:
        given = [{**arguments, "rank": rank, "count": count} for rank in range(count)]
        workers = [start(work, x, threads=threads, env=allocator) for x in given]
        ranks = {pool.submit(worker.follow): rank for rank, worker in enumerate(workers)}
        for done in as_completed(ranks):
            if problem := done.exception():
                raise WorkerError(f"rank {ranks[done]} of {count}: {problem}")
        return [x.result() for x in ranks]


def run_pass(forward: Callable[[], Tensor], kind: str) -> None:
    """Run one of `PASSES` of a model, given the function that returns its last vectors.

    The loss of the training pass is the mean of their squares.
    """
    training = kind == PASSES[1]
    with torch.set_grad_enabled(training):
        hidden = forward()
        if training:
            hidden.square().mean().backward()


def model_step(model: Any, forward: Callable[[], Tensor], kind: str) -> Step:
    """Step of one of `PASSES` of a model; its gradients, and what only cycles keep alive, are dropped after it."""

    def clean() -> None:
        model.zero_grad(set_to_none=True)
        gc.collect()

    return Step(lambda: run_pass(forward, kind), clean)


def fill_rows(
    rows: Sequence[dict[str, Any]], measure: Callable[[list[dict[str, Any]]], Iterable[Mapping[str, Any]]]
) -> None:
    """Measure the rows that have no note yet, in one process, and write the figures into them.

    Args:
        rows: of one process; a failure of it is noted in all that it should have measured.
        measure: returns the figures of each row that it is given.
    """
    running = [row for row in rows if not row["note"]]
    if not running:
        return
    try:
        figures = list(measure(running))
    except WorkerError as problem:
        figures = [{"problem": str(problem)}] * len(running)
    for row, mine in zip(running, figures, strict=True):
        row.update({"note" if name == "problem" else name: x for name, x in mine.items()})


def time_bursts(steps: Mapping[str, Step], budget: float) -> dict[str, Figures]:
    """Time steps that may be short: median seconds of each, in 5 rounds of a burst of each; long ones in at least 3.

    A short step is run in bursts, as a decoding loop runs it: alone between two long ones it would pay for refilling
    the caches that they emptied.

    Returns:
        ``seconds`` and ``rounds``, the number of timed runs, of each step, or the ``problem`` of one that needs more
        memory than its device has: the others are still timed.
    """
    first, problems = {}, {}
    for name, step in steps.items():
        try:
            first[name] = step.seconds()  # warms up
        except torch.OutOfMemoryError as problem:
            problems[name] = {"problem": str(problem).splitlines()[0]}
    steps = {name: step for name, step in steps.items() if name in first}
    again = {name: step.seconds() if first[name] < budget else first[name] for name, step in steps.items()}
    rounds = 5
    bursts = {name: max(1, min(200, int(budget / rounds / max(again[name], 1e-9)))) for name in steps}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds):
        for name, step in steps.items():
            if turn >= 3 and again[name] * turn > budget:
                continue
            if bursts[name] > 1:
                step.seconds()
            times[name] += [step.seconds() for _ in range(bursts[name])]
    return {**problems, **medians(times)}


def peak_memory(steps: Mapping[str, Step]) -> dict[str, int]:
    """Return the peak bytes of each step, beyond what was there before the first of them.

    Resident ones of the process on the CPU, those of tensors on an accelerator. The caller has run something small
    before, so that libraries, threads and their buffers are there.
    """
    peaks = {}
    with taking_timings(), no_collection():
        before = None
        for name, step in steps.items():
            start = devices.reset_peak(step.device) if counts_memory(step.device) else reset_peak()
            before = start if before is None else before
            step.run()
            peaks[name] = (devices.peak(step.device) if counts_memory(step.device) else peak()) - before
            step.clean()  # whatever an allocator keeps of this step counts in the next one too: `before` stays
    return peaks


def too_large(count: float) -> str | None:
    """The reason not to allocate ``count`` bytes, or None: beyond the memory a figure would be that of the disk."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None if count < 0.7 * memory else f"needs about {count / 2**30:.0f} GiB"


def over_limit(seconds: float | None, limit: float) -> str | None:
    """The reason not to run a step that is expected to take ``seconds``; None to run it, also if that is unknown."""
    if seconds is None or seconds <= limit:
        return None
    return f"about {human_time(seconds)}, and the limit is {human_time(limit)}"
