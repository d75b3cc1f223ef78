"""One process harness for time and memory, shared by the benchmark and the studies of speed.

`run_in_process` calls a function in a fresh process with the allocator's settings in its environment, `run_together` in
several at once. There `Step`s are measured: by `time_rounds` if they are long, by `time_bursts` if they may be short,
and by `peak_memory`. `fill_rows` brings the figures of a process, or its failure, into the rows of a table.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from kernelformer.environment import peak, reset_peak
from kernelformer.errors import WorkerError
from kernelformer.formatting import human_time
from kernelformer.timing import Figures, Step, medians, no_collection, taking_timings
from kernelformer_lab.bench import devices
from kernelformer_lab.bench.devices import counts_memory
from kernelformer_lab.bench.settings import HEAPS, PASSES
from kernelformer_lab.subprocesses import finished, started

COMMAND = [sys.executable, "-m", "kernelformer_lab.bench.worker"]


def run_in_process(
    work: Callable[..., Figures], *, threads: int, allocator: Mapping[str, str] = HEAPS["default"], **arguments: Any
) -> Figures:
    """Call a function in a fresh process and return its result.

    Args:
        work: a function at the top of a module, which takes and returns plain JSON values.
        threads: of torch in that process.
        allocator: environment variables of glibc's malloc, as in `HEAPS` and `MEMORY_HEAP`.
        arguments: of the function.

    Raises:
        WorkerError: the process failed; with its last line of stderr, or with its code where it left none, as a process
            that the system ends for want of memory.
    """
    done = finished(COMMAND, _job(work, threads, arguments), _environment(threads, allocator))
    if done.returncode:
        raise WorkerError(_last_words(done.stderr, done.returncode))
    return _figures(done.stdout)


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
        count: number of processes.
        threads: of torch in each of them.
        allocator: see `run_in_process`.
        arguments: of the function, the same for all.

    Raises:
        WorkerError: one of them failed; the others are ended, since they may wait for it.
    """
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    problem, results = "", [""] * count
    with ExitStack() as stack:
        env = _environment(threads, allocator)
        workers = [stack.enter_context(started(COMMAND, env, **pipes)) for _ in range(count)]
        pool = stack.enter_context(ThreadPoolExecutor(count))
        jobs = [_job(work, threads, {**arguments, "rank": rank, "count": count}) for rank in range(count)]
        ranks = {pool.submit(x.communicate, job): n for n, (x, job) in enumerate(zip(workers, jobs, strict=True))}
        for done in as_completed(ranks):
            rank = ranks[done]
            results[rank], errors = done.result()
            if workers[rank].returncode and not problem:
                problem = f"rank {rank} of {count}: {_last_words(errors, workers[rank].returncode)}"
                for other in workers:
                    other.kill()
    if problem:
        raise WorkerError(problem)
    return [_figures(x) for x in results]


def _job(work: Callable[..., Figures], threads: int, arguments: Mapping[str, Any]) -> str:
    """What a worker reads."""
    return json.dumps(
        {"module": work.__module__, "function": work.__name__, "threads": threads, "arguments": arguments}
    )


def _environment(threads: int, allocator: Mapping[str, str]) -> dict[str, str]:
    return {**os.environ, **allocator, "OMP_NUM_THREADS": str(threads)}


def _last_words(errors: str, code: int) -> str:
    return (errors.strip().splitlines() or [f"the process ended with code {code}"])[-1]


def _figures(output: str) -> Figures:
    result: Figures = json.loads(output.strip().splitlines()[-1])
    return result


def run_pass(forward: Callable[[], Tensor], kind: str) -> None:
    """Run one of `PASSES` of a model, given the function that returns its last vectors.

    The loss of the training pass is the mean of their squares.
    """
    training = kind == PASSES[1]
    with torch.set_grad_enabled(training):
        hidden = forward()
        if training:
            hidden.square().mean().backward()


def clean_model(model: Any) -> None:
    """Drop a model's gradients and what only cycles keep alive, which are not the next step's to carry."""
    model.zero_grad(set_to_none=True)
    gc.collect()


def time_bursts(steps: Mapping[str, Step], budget: float) -> dict[str, Figures]:
    """Time steps that may be short: median seconds of each, in 5 rounds of a burst of each; long ones in at least 3.

    A short step is run in bursts, as a decoding loop runs it: alone between two long ones it would pay for refilling
    the caches that they emptied.

    Args:
        steps: by name.
        budget: seconds for each step.

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
    """Why ``count`` bytes at once are no use here, or None: beyond the memory a figure would be that of the disk."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None if count < 0.7 * memory else f"needs about {count / 2**30:.0f} GiB"


def over_limit(seconds: float | None, limit: float) -> str | None:
    """Why a step that is expected to take ``seconds`` is not run, or None; so where nothing is known of it."""
    if seconds is None or seconds <= limit:
        return None
    return f"about {human_time(seconds)}, and the limit is {human_time(limit)}"
