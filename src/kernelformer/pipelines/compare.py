"""Several attentions trained on the same data in the same order, and a report of what came of it."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from kernelformer.environment import environment
from kernelformer.errors import positive_int
from kernelformer.files import write_json
from kernelformer.formatting import shortened
from kernelformer.pipelines.compare_worker import ERROR, STOPPED
from kernelformer.records import PLAN, RUN, SAMPLE, part, read_head, read_object, reading
from kernelformer.reports.comparison import Comparison, conditions_of, read_run
from kernelformer.reports.comparison_page import write_report
from kernelformer.subprocesses import started
from kernelformer.tasks import make_task
from kernelformer.training.config import Run, StoppedError, TrainingError, attention_settings
from kernelformer.training.inspection import check_same
from kernelformer.training.session import build_model

REPORT = "report.html"
FIGURES = "comparison.json"
AGAIN = "the same call and resume=True"
WORKER = ("-m", "kernelformer.pipelines.compare_worker")


@dataclass(frozen=True)
class Plan:
    """The runs of a comparison, where they go, and what a reader should know of them.

    Args:
        title: of the report.
        runs: all of one task.
        folder: of everything.
        about: more for the record, by name: "recipe", "source", "note".
    """

    title: str
    runs: Sequence[Run]
    folder: Path
    about: Mapping[str, str] = field(default_factory=dict)

    def place(self, run: Run) -> Path:
        """The folder of one run: readable, and different for different attentions."""
        plain = re.sub(r"[^A-Za-z0-9+=.,-]", "_", run.label)
        if len(plain) > 80 or plain != run.label.replace(":", "_"):
            plain = f"{plain[:70]}-{hashlib.sha256(run.label.encode()).hexdigest()[:8]}"
        return self.folder / f"{plain}-seed{run.seed}"

    def save(self, threads: int) -> None:
        """Write it into its folder, where `read_plan` finds it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        runs = [run.as_json() for run in self.runs]
        write_json(
            self.folder / PLAN, {"title": self.title, "about": dict(self.about), "threads": threads, "runs": runs}
        )


def read_plan(folder: Path) -> tuple[Plan, int]:
    """The comparison that a folder holds, finished or not, and its threads."""
    record = read_object(folder / PLAN)
    with reading(folder / PLAN):
        runs = [Run.from_json(x) for x in part(record, "runs", list)]
        threads = positive_int("threads", record.get("threads"))
        return Plan(part(record, "title", str), runs, folder, part(record, "about", dict)), threads


def make_plan(
    title: str, run: Run, attentions: Sequence[str], seeds: int, folder: Path, about: Mapping[str, str] | None = None
) -> Plan:
    """Every attention with every seed, seed by seed, so that a stopped comparison has all attentions of a seed.

    Args:
        title: of the report.
        run: the settings that all share.
        attentions: specs; ``A > B`` gives an encoder-decoder A in its encoder and B in its decoder.
        seeds: how many.
        folder: of everything.
    """
    positive_int("seeds", seeds)
    if len(set(attentions)) != len(attentions):
        raise ValueError(f"attentions to compare must differ, got {', '.join(attentions)}.")
    sides: dict[str, dict[str, Any]] = {x: attention_settings(x) for x in attentions}
    runs = [replace(run, **sides[x], seed=run.seed + i) for i in range(seeds) for x in attentions]
    return Plan(title, runs, folder, about or {})


def check(plan: Plan, resume: bool, again: str = AGAIN) -> None:
    """Find what cannot work before anything is trained: data, models without their numbers, folders.

    Args:
        plan: what to train.
        resume: go on with what is in the folder.
        again: how a user does that, for the error if it was not asked for.
    """
    there = [x for x in plan.runs if (plan.place(x) / RUN).exists()]
    if there and not resume:
        raise TrainingError(f"{plan.place(there[0])} is there already; go on with {again}, or take another folder.")
    first = plan.runs[0]
    task = make_task(first.task, **first.task_options)
    for split in ("train", "validation"):
        task.split(split)
    with torch.device("meta"):
        for run in plan.runs:
            if run.seed == first.seed:
                build_model(run, task)
    data = task.fingerprint() if there else None
    for run in there:
        check_same(run, plan.place(run), data)


def carry_out(
    plan: Plan,
    *,
    resume: bool,
    threads: int,
    command: str,
    again: str = AGAIN,
    tell: Callable[[str], None] = lambda _: None,
    done: Callable[[], None] = lambda: None,
) -> Comparison:
    """Train what is not trained yet, each run in a process of its own, and write the report.

    Args:
        plan: what to train.
        resume: go on with what is in the folder; otherwise it must not hold these runs yet.
        threads: of each process.
        command: what the user typed, for the record.
        again: how to go on with a comparison that was stopped, for the message.
        tell: hears one line at a time.
        done: called after each run.
    """
    check(plan, resume, again)
    plan.save(threads)
    _tell_conditions(plan, threads, tell)
    for run in plan.runs:
        tell(_short(run))
        _train(run, plan.place(run), threads, command, again, tell)
        done()
    return report(plan)


def _tell_conditions(plan: Plan, threads: int, tell: Callable[[str], None]) -> None:
    """Say at once that speeds will not be comparable: a run that is there was made under other conditions."""
    now = conditions_of(environment(threads))
    for place in (plan.place(x) for x in plan.runs if (plan.place(x) / RUN).exists()):
        before = read_head(place)["environment"]
        other = [f"{key} {before[key]}, now {x}" for key, x in now.items() if key in before and before[key] != x]
        if other:
            tell(f"{place} was made under other conditions ({'; '.join(other)}): speeds will not be compared")
            return


def _name(run: Run) -> str:
    return f"{run.label}, seed {run.seed}"


def _short(run: Run) -> str:
    return f"{shortened(run.label)}, seed {run.seed}"


def _train(run: Run, folder: Path, threads: int, command: str, again: str, tell: Callable[[str], None]) -> None:
    request = {"run": run.as_json(), "folder": str(folder), "command": command, "threads": threads}
    request["resume"] = (folder / RUN).exists()
    env = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    order = [sys.executable, *WORKER, json.dumps(request)]
    # A file and not a pipe: nobody reads it before the end, and a full pipe would stop the worker.
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        try:
            with started(order, env, stdout=subprocess.PIPE, stderr=errors) as worker:
                assert worker.stdout is not None
                try:
                    for line in worker.stdout:
                        tell(f"{_short(run)}: {line.rstrip()}")
                except KeyboardInterrupt:
                    worker.terminate()  # from a terminal it has heard Ctrl-C too; then this one changes nothing
                    for line in worker.stdout:
                        tell(f"{_short(run)}: {line.rstrip()}")
                    raise
        except KeyboardInterrupt:
            raise StoppedError(f"stopped in {folder}; go on with {again}.") from None
        errors.seek(0)
        said = errors.read().strip().splitlines()
    if worker.returncode == STOPPED:
        raise StoppedError(f"stopped in {folder}; go on with {again}.")
    if worker.returncode:
        killed = f"its process was killed by signal {-worker.returncode}"
        last = killed if worker.returncode < 0 else " ".join(said[-1:])
        reason = next((x.removeprefix(ERROR) for x in said if x.startswith(ERROR)), last)
        raise TrainingError(f"{_name(run)}: {reason or 'it stopped without a word'}")


def report(plan: Plan) -> Comparison:
    """Write the report of what is in the folders."""
    first = plan.runs[0]
    task = make_task(first.task, **first.task_options)
    records = [replace(read_run(plan.place(run)), label=run.label) for run in plan.runs]
    comparison = Comparison(plan.title, task.metric, task.higher_is_better, task.about, records)
    plan.folder.mkdir(parents=True, exist_ok=True)
    write_report(comparison, plan.folder / REPORT, samples=_samples(plan))
    about = {**plan.about, "task": task.name, "about": task.about, "baselines": task.baselines("validation")}
    write_json(plan.folder / FIGURES, {**_figures(comparison), **about})
    return comparison


def _figures(comparison: Comparison) -> dict[str, Any]:
    """The numbers of a report, for whoever wants to go on with them."""
    runs = [
        {
            "label": run.label,
            "seed": run.seed,
            "settings": run.settings,
            "evaluation": [[p.step, p.seconds, p.values.get(comparison.curve)] for p in run.evaluation],
            "result": None if run.result is None else asdict(run.result),
            **({"conditions": run.conditions} if comparison.unequal else {}),
        }
        for run in comparison.runs
    ]
    first = comparison.runs[0]
    head = {"title": comparison.title, "metric": comparison.metric, "higher_is_better": comparison.higher_is_better}
    origin = {
        "curve": comparison.curve,
        "date": first.started,
        "command": first.command,
        "environment": first.environment,
    }
    return {**head, **origin, "runs": runs}


def _samples(plan: Plan) -> dict[str, str]:
    """What the models of the first seed have written."""
    texts = {}
    for run in plan.runs:
        file = plan.place(run) / SAMPLE
        if run.seed == plan.runs[0].seed and file.exists():
            texts[run.label] = file.read_bytes().decode(errors="replace")
    return {label: text for label, text in texts.items() if text}
