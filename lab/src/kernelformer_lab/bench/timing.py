"""Time calls in rounds, under a mark for which other processes wait."""

from __future__ import annotations

import gc
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

Figures = dict[str, Any]  # of one contender: seconds and rounds, or peak, or the problem that it had
CPU = torch.device("cpu")
MOST_ROUNDS = 100  # repeats of a step, however long the budget lasts
_NAME = "kernelformer-timing-"
BESIDE = "KERNELFORMER_BESIDE_OTHERS"  # in the environment of processes that never have the machine to themselves


@contextmanager
def taking_timings() -> Iterator[None]:
    """Mark the time in which timings are taken; `timings_under_way` is true in every process of this user.

    A job of a queue leaves no mark: its queue would wait for the job, and the job for its queue.
    """
    if BESIDE in os.environ:
        yield
        return
    mark = Path(tempfile.gettempdir()) / f"{_NAME}{os.getuid() if hasattr(os, 'getuid') else 0}-{os.getpid()}"
    mark.touch()
    try:
        yield
    finally:
        mark.unlink(missing_ok=True)


def timings_under_way() -> bool:
    """Return True if a running process is taking timings; marks of killed ones are removed."""
    user = os.getuid() if hasattr(os, "getuid") else 0
    busy = False
    for mark in Path(tempfile.gettempdir()).glob(f"{_NAME}{user}-*"):
        number = mark.name.rpartition("-")[2]
        if number.isdecimal() and _lives(int(number)):
            busy = True
        else:
            mark.unlink(missing_ok=True)
    return busy


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def synchronize(device: torch.device) -> None:
    """Wait until a device is idle."""
    torch.get_device_module(device).synchronize()


@dataclass(frozen=True)
class Step:
    """Measured call, with a clean-up that no figure includes and the device of the call."""

    run: Callable[[], Any]
    clean: Callable[[], Any] = lambda: None
    device: torch.device = CPU

    def seconds(self) -> float:
        """Run once and return the time of it, from an idle device to an idle one."""
        synchronize(self.device)
        start = time.perf_counter()
        try:
            self.run()
            synchronize(self.device)
            return time.perf_counter() - start
        finally:
            self.clean()


@contextmanager
def no_collection() -> Iterator[None]:
    """Disable garbage collection, except where a step's `clean` asks for it."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def time_rounds(steps: Mapping[str, Step], rounds: int, budget: float) -> dict[str, Figures]:
    """Time long steps: median seconds of each, in rounds of one run each after one that warms up.

    Args:
        budget: seconds for all steps together; while they last there are more rounds, up to `MOST_ROUNDS`.

    Returns:
        ``seconds`` and ``rounds`` of each step, or the ``problem`` of one that fails: the others are still timed.
    """
    problems: dict[str, Figures] = {}
    with taking_timings(), no_collection():
        for name, step in steps.items():
            try:
                step.seconds()
            except (RuntimeError, MemoryError, ValueError) as problem:  # memory that is out, or what it cannot do
                problems[name] = {"problem": str(problem).splitlines()[0]}
        times: dict[str, list[float]] = {name: [] for name in steps if name not in problems}
        begin = time.perf_counter()
        for turn in range(max(rounds, MOST_ROUNDS) if times else 0):
            if turn >= rounds and (time.perf_counter() - begin) * (turn + 1) / turn > budget:  # one more would not fit
                break
            for name, mine in times.items():
                mine.append(steps[name].seconds())
    return {**problems, **medians(times)}


def medians(times: Mapping[str, Sequence[float]]) -> dict[str, Figures]:
    """Median seconds and number of rounds of each series of times."""
    return {name: {"seconds": statistics.median(x), "rounds": len(x)} for name, x in times.items()}
