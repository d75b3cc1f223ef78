"""A process that measures: it is started anew for every case, with the allocator's settings in its environment.

python -m kernelformer.measure.worker < job.json > result.json
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from kernelformer.environment import peak, reset_peak
from kernelformer.measure.attention import Case, contender
from kernelformer.subprocesses import end_with_parent


def check(case: Case, names: list[str]) -> dict[str, Any]:
    """Each contender's error against its definition, or what went wrong with it."""
    found: dict[str, Any] = {}
    for name in names:
        try:
            one = contender(name)
            found[name] = {"error": one.error(case), "tolerance": one.tolerance}
        except Exception as problem:  # a peer may fail in any way, and the others should still run
            found[name] = {"problem": f"{type(problem).__name__}: {problem}"}
    return found


def measure_time(case: Case, names: list[str], budget: float) -> dict[str, Any]:
    """Seconds per call of each contender, interleaved; about ``budget`` seconds each, at least 3 calls."""
    runners = {name: contender(name).runner(case) for name in names}
    first = {name: _timed(run) for name, run in runners.items()}  # the first call warms up
    again = {name: _timed(run) if first[name] < budget else first[name] for name, run in runners.items()}
    # A short call is timed in bursts, as a decoding loop makes them: alone between two long ones it would pay for
    # refilling the caches that they emptied.
    rounds = 5
    bursts = {name: max(1, min(200, int(budget / rounds / max(again[name], 1e-9)))) for name in names}
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        for name, run in runners.items():
            if turn >= 3 and again[name] * turn > budget:
                continue
            if bursts[name] > 1:
                run()
            times[name] += [_timed(run) for _ in range(bursts[name])]
    return {name: {"seconds": statistics.median(x), "calls": len(x)} for name, x in times.items()}


def measure_memory(case: Case, name: str) -> dict[str, Any]:
    """Peak resident memory of one call beyond what was there before it, and how much of it are its results."""
    one = contender(name)
    tiny = Case(**{**vars(case), "length": 128})
    one.runner(tiny)()  # libraries, threads and their buffers are there before we look
    run = one.runner(case)
    gc.collect()
    before = reset_peak()
    result = run()
    held = peak() - before
    outputs = [x for x in (result if isinstance(result, tuple) else (result,)) if isinstance(x, torch.Tensor)]
    return {"peak": held, "results": sum(x.numel() * x.element_size() for x in outputs)}


def _timed(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def main() -> None:
    """Do one job."""
    end_with_parent()
    job = json.load(sys.stdin)
    torch.set_num_threads(job["threads"])
    case = Case(**job["case"])
    kind = job["kind"]
    if kind == "check":
        result = check(case, job["names"])
    elif kind == "time":
        result = measure_time(case, job["names"], job["budget"])
    else:
        result = measure_memory(case, job["names"][0])
    json.dump(result, sys.stdout)


if __name__ == "__main__":
    main()
