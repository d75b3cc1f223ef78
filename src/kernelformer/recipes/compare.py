"""Several attentions trained on the same data in the same order, and a report of what came of it."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kernelformer.analysis.comparison import Comparison, read_run
from kernelformer.analysis.report import write_report
from kernelformer.errors import positive_int
from kernelformer.models import KernelformerForCausalLM
from kernelformer.recipes.decoding import decode_costs, sample_bytes
from kernelformer.tasks import TASKS
from kernelformer.training.evaluation import load_run
from kernelformer.training.run import Run, StoppedError, TrainingError

REPORT = "report.html"
PROMPT = "def "


@dataclass(frozen=True)
class Plan:
    """The runs of a comparison and where they go."""

    title: str
    runs: Sequence[Run]
    folder: Path

    def place(self, run: Run) -> Path:
        """The folder of one run: readable, and different for different attentions."""
        plain = re.sub(r"[^A-Za-z0-9+=.,-]", "_", run.label)
        if len(plain) > 80 or plain != run.label.replace(":", "_"):
            plain = f"{plain[:70]}-{hashlib.sha256(run.label.encode()).hexdigest()[:8]}"
        return self.folder / f"{plain}-seed{run.seed}"


def make_plan(title: str, run: Run, attentions: Sequence[str], seeds: int, folder: Path) -> Plan:
    """Every attention with every seed, seed by seed, so that a stopped comparison has all attentions of a seed."""
    positive_int("seeds", seeds)
    if len(set(attentions)) != len(attentions):
        raise ValueError(f"attentions to compare must differ, got {', '.join(attentions)}.")
    runs = [replace(run, attention=x, seed=run.seed + i) for i in range(seeds) for x in attentions]
    return Plan(title, runs, folder)


def carry_out(
    plan: Plan,
    *,
    resume: bool,
    threads: int,
    command: str,
    tell: Callable[[str], None] = lambda _: None,
    done: Callable[[], None] = lambda: None,
) -> Comparison:
    """Train what is not trained yet, each run in a process of its own, and write the report.

    Args:
        plan: what to train.
        resume: go on with what is in the folder; otherwise it must not hold these runs yet.
        threads: of each process.
        command: what the user typed, for the record.
        tell: hears one line at a time.
        done: called after each run.
    """
    if not resume:
        taken = [str(x) for x in map(plan.place, plan.runs) if x.exists()]
        if taken:
            raise TrainingError(f"{taken[0]} is there already; go on with --resume, or take another folder by --out.")
    for run in plan.runs:
        tell(f"{run.label}, seed {run.seed}")
        _train(run, plan.place(run), threads, command, tell)
        _measure_decoding(plan.place(run))
        done()
    return report(plan)


def _train(run: Run, folder: Path, threads: int, command: str, tell: Callable[[str], None]) -> None:
    request = {"run": run.as_json(), "folder": str(folder), "command": command, "threads": threads}
    request["resume"] = folder.exists()
    env = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    worker = subprocess.Popen(
        [sys.executable, "-m", "kernelformer.recipes.worker", json.dumps(request)],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert worker.stdout is not None
    assert worker.stderr is not None
    try:
        for line in worker.stdout:
            tell(f"{run.label}, seed {run.seed}: {line.rstrip()}")
    except KeyboardInterrupt:  # the worker has heard it too, and saves
        worker.wait()
        raise StoppedError(f"stopped in {folder}; go on with --resume.") from None
    problem = worker.stderr.read().strip().splitlines()
    if worker.wait():
        raise TrainingError(f"{run.label}, seed {run.seed}: {problem[-1] if problem else 'the process was killed'}")


def _measure_decoding(folder: Path) -> None:
    """Add decode rows to the result of a language model, once."""
    path = folder / "result.json"
    result: dict[str, Any] = json.loads(path.read_text())
    if result.get("decode") is not None or result.get("diverged"):
        return
    _, model = load_run(folder)
    if not isinstance(model, KernelformerForCausalLM):
        return
    result["decode"] = decode_costs(model)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(result, indent=1) + "\n")
    part.replace(path)


def report(plan: Plan, samples: Mapping[str, str] | None = None) -> Comparison:
    """Write the report of what is in the folders."""
    task = TASKS[plan.runs[0].task]
    records = [replace(read_run(plan.place(run)), label=run.label) for run in plan.runs]
    found = Comparison(plan.title, task.metric, task.higher_is_better, task.about, records)
    plan.folder.mkdir(parents=True, exist_ok=True)
    write_report(found, plan.folder / REPORT, samples=_samples(plan) if samples is None else samples)
    return found


def _samples(plan: Plan, tokens: int = 300) -> dict[str, str]:
    """What the models of the first seed write, where they write bytes."""
    texts = {}
    for run in plan.runs:
        folder = plan.place(run)
        if run.seed == plan.runs[0].seed and run.task == "bytes" and (folder / "model").is_dir():
            _, model = load_run(folder)
            assert isinstance(model, KernelformerForCausalLM)
            texts[run.label] = PROMPT + sample_bytes(model, PROMPT, tokens=tokens).text
    return texts
