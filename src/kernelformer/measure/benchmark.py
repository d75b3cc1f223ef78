"""The benchmark: which cases, in which processes, and what comes of them."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from kernelformer.environment import environment
from kernelformer.errors import WorkerError
from kernelformer.measure.attention import Case, contender
from kernelformer.subprocesses import finished

__all__ = ["HEAPS", "Row", "WorkerError", "cases", "environment", "job", "run_case"]

# glibc gives large tensors back to the system at once, so every fresh one pays page faults. That is what users have by
# default, but it flatters whoever allocates least; with these settings nothing is given back.
HEAPS: dict[str, dict[str, str]] = {
    "default": {},
    "kept": {
        "MALLOC_MMAP_MAX_": "0",
        "MALLOC_TRIM_THRESHOLD_": "100000000000",
        "MALLOC_TOP_PAD_": "1000000000",
    },
}


@dataclass
class Row:
    """One contender in one case."""

    case: Case
    name: str
    error: float | None = None
    seconds: dict[str, float] = field(default_factory=dict)  # by heap
    peak: int | None = None  # bytes beyond the inputs
    results: int | None = None  # of which outputs and gradients
    note: str = ""

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def job(kind: str, case: Case, names: Sequence[str], *, heap: str, threads: int, budget: float) -> dict[str, Any]:
    """Run one job in a process of its own."""
    request = {"kind": kind, "case": asdict(case), "names": list(names), "threads": threads, "budget": budget}
    env = {**os.environ, **HEAPS[heap], "OMP_NUM_THREADS": str(threads)}
    done = finished([sys.executable, "-m", "kernelformer.measure.worker"], json.dumps(request), env)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"ended with code {done.returncode}"])[-1]
        raise WorkerError(f"{', '.join(names)} at {case.title}: {last}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def run_case(
    case: Case,
    names: Sequence[str],
    *,
    heaps: Sequence[str],
    threads: int,
    budget: float,
    memory: bool,
    tell: Callable[[str], None] = lambda _: None,
) -> list[Row]:
    """Check, time and weigh every contender that takes the case."""
    rows = []
    for name in names:
        reason = contender(name).refuses(case)
        rows.append(Row(case, name, note=reason or ""))
    running = [row for row in rows if not row.note]
    checked = Case(**{**asdict(case), "task": "causal"}) if case.task == "decode" else case
    if running:
        tell(f"{case.title}: checking")
        checks = job("check", checked, [x.name for x in running], heap="default", threads=threads, budget=budget)
        for row in running:
            found = checks[row.name]
            row.error = found.get("error")
            if row.error is None:
                row.note = found["problem"]
            elif not row.error <= found["tolerance"]:
                row.note = f"off its definition by {row.error:.1e}: not timed"
    running = [row for row in running if not row.note]
    for heap in heaps if running else ():
        tell(f"{case.title}: timing, heap {heap}")
        times = job("time", case, [row.name for row in running], heap=heap, threads=threads, budget=budget)
        for row in running:
            row.seconds[heap] = times[row.name]["seconds"]
    if memory and case.task != "decode":
        for row in running:
            tell(f"{case.title}: memory of {row.name}")
            weight = job("memory", case, [row.name], heap="default", threads=threads, budget=budget)
            row.peak, row.results = weight["peak"], weight["results"]
    return rows


def cases(lengths: Sequence[int], tasks: Sequence[str], backward: Sequence[bool], **rest: Any) -> Iterator[Case]:
    """All combinations, decoding forward only; ``rest`` are further fields of each case."""
    for task in tasks:
        for back in backward:
            if task == "decode" and back:
                continue
            for length in lengths:
                yield Case(task=task, length=length, backward=back, **rest)  # type: ignore[arg-type]
