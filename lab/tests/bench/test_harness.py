"""The process harness: jobs in fresh processes, interleaved repeats, peaks, and rows that are filled or say why not."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys

import pytest
import torch

from kernelformer.errors import WorkerError
from kernelformer_lab import jobs
from kernelformer_lab.bench import benchmark, timing
from kernelformer_lab.bench.case import Case
from kernelformer_lab.bench.harness import over_limit, run_in_process, run_pass, time_bursts, too_large
from kernelformer_lab.bench.settings import HEAPS, MEMORY_HEAP, BenchSettings
from kernelformer_lab.bench.timing import MOST_ROUNDS, Step, time_rounds


class Fake(Step):
    """A step whose seconds are the number of calls so far, of all steps."""

    def __init__(self, name, calls):
        super().__init__(lambda: calls.append(name))
        object.__setattr__(self, "calls", calls)

    def seconds(self):
        self.run()
        return float(len(self.calls))


def test_rounds_are_interleaved_and_the_first_is_not_counted():
    calls = []
    result = time_rounds({name: Fake(name, calls) for name in "ab"}, rounds=3, budget=1e-9)
    assert calls == ["a", "b"] * 4
    assert result == {"a": {"seconds": 5.0, "rounds": 3}, "b": {"seconds": 6.0, "rounds": 3}}


def test_there_are_more_rounds_while_the_budget_lasts_but_not_without_end():
    result = time_rounds({"a": Fake("a", [])}, rounds=2, budget=1e9)
    assert result["a"]["rounds"] == MOST_ROUNDS


@pytest.mark.parametrize("kind", [RuntimeError, MemoryError, ValueError])
def test_a_step_that_fails_is_noted_and_the_others_are_timed(kind):
    def fail():
        raise kind("no memory\nmore")

    cleaned = []
    result = time_rounds({"a": Step(fail, lambda: cleaned.append(1)), "b": Step(int)}, rounds=2, budget=1e-9)
    assert result["a"] == {"problem": "no memory"}
    assert result["b"]["rounds"] == 2
    assert cleaned == [1]
    assert gc.isenabled()


def test_bursts_are_interleaved_and_short_steps_are_repeated():
    calls = []
    result = time_bursts({name: Step(lambda name=name: calls.append(name)) for name in "ab"}, budget=1e-12)
    assert calls[:4] == ["a", "b", "a", "b"]
    assert result["a"]["rounds"] >= 3
    assert time_bursts({"a": Step(int)}, budget=1.0)["a"]["rounds"] == 5 * 200


def test_the_time_of_a_step_leaves_out_what_is_cleaned_up(monkeypatch):
    clock = iter([0.0, 2.0])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(clock))
    assert Step(int, lambda: None).seconds() == 2.0


PEAKS = """
import json, torch
from kernelformer_lab.bench import timing
from kernelformer_lab.bench.timing import Step
from kernelformer_lab.bench.harness import peak_memory
sizes = {"large": 2**24, "small": 2**22}  # 64 and 16 MiB in float32
for size in sizes.values():
    torch.ones(size)
print(json.dumps(peak_memory({name: Step(lambda size=size: torch.ones(size)) for name, size in sizes.items()})))
"""


def test_the_peak_of_each_step_is_beyond_what_was_there_before_the_first():
    # With the allocator's settings of all measurements, and without what other tests have left in its heap.
    env = {**os.environ, **MEMORY_HEAP, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", PEAKS], env=env, capture_output=True, text=True, check=True)
    peaks = json.loads(done.stdout)
    assert 60 < peaks["large"] / 2**20 < 80
    assert 14 < peaks["small"] / 2**20 < 40


def test_a_pass_trains_only_if_asked():
    weight = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    run_pass(lambda: weight * 1, "forward")
    assert weight.grad is None
    run_pass(lambda: weight * 1, "forward + backward")
    torch.testing.assert_close(weight.grad, weight.detach())  # of the mean of squares of two


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        ("sys.exit('Traceback\\nKeyError: no')", "^KeyError: no$"),
        ("sys.exit('a warning\\nerror: why\\nmore')", "^why$"),
        ("os.kill(os.getpid(), 9)", "^its process was killed by signal 9$"),
        ("sys.exit(3)", "^its process ended with code 3 and no message$"),
    ],
)
def test_a_process_that_fails_says_why(end, reason, monkeypatch):
    monkeypatch.setattr(jobs, "COMMAND", [sys.executable, "-S", "-c", f"import os, sys; {end}"])
    with pytest.raises(WorkerError, match=reason):
        run_in_process(benchmark.measure, threads=1)


def test_a_process_gets_its_function_its_arguments_its_heap_and_its_threads(monkeypatch):
    code = (
        "import json, os, sys\n"
        "seen = [sys.argv[1], sys.stdin.read(), os.environ['MALLOC_MMAP_MAX_'], os.environ['OMP_NUM_THREADS']]\n"
        f"print('a warning'); print({jobs.RESULT!r} + json.dumps(seen))"
    )
    monkeypatch.setattr(jobs, "COMMAND", [sys.executable, "-S", "-c", code])
    name, arguments, *env = run_in_process(benchmark.measure, threads=3, allocator=HEAPS["kept"], kind="time")
    assert name == "kernelformer_lab.bench.benchmark:measure"
    assert json.loads(arguments) == {"kind": "time"}
    assert env == ["0", "3"]


def test_a_worker_calls_the_function_and_returns_what_it_gives():
    case = {"task": "causal", "length": 8, "heads": 1, "head_dim": 4, "features": 8}
    result = run_in_process(benchmark.measure, threads=1, kind="check", case=case, names=["elu", "x"], budget=1.0)
    assert result["elu"]["error"] < result["elu"]["tolerance"]
    assert "unknown method 'x'" in result["x"]["problem"]


def test_what_is_too_long_or_too_large_is_said():
    assert over_limit(None, 10) is None
    assert over_limit(10.0, 10) is None
    assert over_limit(16.0, 10) == "about 16 s, and the limit is 10 s"
    assert too_large(0) is None
    assert too_large(2**50) == "needs about 1048576 GiB"


def test_the_cases_and_contenders_of_a_benchmark():
    settings = BenchSettings(
        lengths=(8, 16), tasks=("causal", "decode"), peers=("none",), bias="window", max_distance=3
    )
    sizes = {"bias": "window", "window": 3}
    assert list(benchmark.cases(settings)) == [
        *(Case("causal", n, backward=x, **sizes) for x in (False, True) for n in (8, 16)),
        *(Case("decode", n, **sizes) for n in (8, 16)),
    ]
    assert benchmark.contenders(settings) == ["favor+"]
    assert benchmark.contenders(BenchSettings(bias="full")) == ["favor+", "sdpa", "sdpa-fixed", "algorithm-1"]
    assert benchmark.contenders(BenchSettings(bias="full", passes=("forward",), peers=("sdpa",))) == ["favor+", "sdpa"]
    for wrong in ({"bias": "ring"}, {"passes": ("back",)}, {"tasks": ("causla",)}, {"heaps": ("big",)}):
        with pytest.raises(ValueError, match="unknown"):
            BenchSettings(**wrong)
