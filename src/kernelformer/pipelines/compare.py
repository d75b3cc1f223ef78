"""Several attentions trained on the same data in the same order, and a report of what came of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from kernelformer.environment import environment
from kernelformer.errors import StoppedError, TrainingError
from kernelformer.files import write_json
from kernelformer.formatting import shortened
from kernelformer.pipelines.compare_worker import ERROR, STOPPED
from kernelformer.recipes.catalogue import change
from kernelformer.records import RUN, SAMPLE, read_head
from kernelformer.reports.comparison import Comparison, conditions_of, read_run
from kernelformer.reports.comparison_page import write_report
from kernelformer.subprocesses import started
from kernelformer.tasks import Task, make_task
from kernelformer.training.config import Run, attention_settings
from kernelformer.training.plan import AGAIN, Plan, check, make_plan, read_plan
from kernelformer.training.session import build_model

__all__ = ["Plan", "check", "fit_steps", "make_plan", "read_plan", "report", "run_comparison"]

REPORT = "report.html"
FIGURES = "comparison.json"
WORKER = ("-m", "kernelformer.pipelines.compare_worker")


def fit_steps(run: Run, attentions: Sequence[str], seconds: float, least: int = 20) -> Run:
    """Shorten runs that would take more than so many seconds on this machine, by timing their first steps.

    Args:
        run: the settings that all attentions share.
        attentions: what is compared, one after the other.
        seconds: that the runs may take together, evaluations included.
        least: the fewest steps.

    Returns:
        ``run``, or a copy with fewer steps and fewer, smaller evaluations.
    """
    task = make_task(run.task, **run.task_options)
    data: Any = task.split("train")
    validation: Any = task.split("validation")
    batch = task.collate([data[i] for i in range(run.batch_size)])
    sides: list[dict[str, Any]] = [attention_settings(x) for x in attentions]
    round_seconds = sum(_step_seconds(replace(run, **side), task, batch) for side in sides)
    # An evaluation has no backward pass, a third of a step's time.
    evaluations = run.steps // (run.eval_every or run.steps) * len(validation) / run.batch_size / 3
    if round_seconds * (run.steps + evaluations) <= seconds:
        return run
    steps = max(least, int(seconds / round_seconds * run.steps / (run.steps + evaluations)))
    if steps >= run.steps:
        return run
    samples = max(8, len(validation) * steps // run.steps)
    settings = {"steps": steps, "warmup_steps": steps // 10, "task.validation_samples": samples}
    return change(run, {**settings, "eval_every": -(-steps // 4), "save_every": -(-steps // 4)})


def _step_seconds(run: Run, task: Task, batch: dict[str, Any], repeats: int = 3) -> float:
    """Time a training step, the shortest of a few after one that warms up."""
    model, times = build_model(run, task), []
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(1 + repeats):
        start = time.perf_counter()
        model(**batch).loss.backward()
        optimizer.step()
        times.append(time.perf_counter() - start)
    return min(times[1:])


def run_comparison(
    plan: Plan,
    *,
    resume: bool,
    threads: int,
    command: str,
    again: str = AGAIN,
    log: Callable[[str], None] = lambda _: None,
    progress: Callable[[], None] = lambda: None,
) -> Comparison:
    """Train what is not trained yet, each run in a process of its own, and write the report.

    Args:
        plan: what to train.
        resume: go on with what is in the folder; otherwise it must not hold these runs yet.
        threads: of each process.
        command: what the user typed, for the record.
        again: how to go on with a comparison that was stopped, for the message.
        log: takes one line at a time.
        progress: called after each run.
    """
    check(plan, resume, again)
    plan.save(threads)
    _log_conditions(plan, threads, log)
    for run in plan.runs:
        log(_short(run))
        _train(run, plan.folder_of(run), threads, command, again, log)
        progress()
    return report(plan)


def _log_conditions(plan: Plan, threads: int, log: Callable[[str], None]) -> None:
    """Say at once that speeds will not be comparable: a run that is there was made under other conditions."""
    now = conditions_of(environment(threads))
    for folder in (plan.folder_of(x) for x in plan.runs if (plan.folder_of(x) / RUN).exists()):
        before = read_head(folder)["environment"]
        other = [f"{key} {before[key]}, now {x}" for key, x in now.items() if key in before and before[key] != x]
        if other:
            log(f"{folder} was made under other conditions ({'; '.join(other)}): speeds will not be compared")
            return


def _name(run: Run) -> str:
    return f"{run.label}, seed {run.seed}"


def _short(run: Run) -> str:
    return f"{shortened(run.label)}, seed {run.seed}"


def _train(run: Run, folder: Path, threads: int, command: str, again: str, log: Callable[[str], None]) -> None:
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
                        log(f"{_short(run)}: {line.rstrip()}")
                except KeyboardInterrupt:
                    worker.terminate()  # from a terminal it has heard Ctrl-C too; then this one changes nothing
                    for line in worker.stdout:
                        log(f"{_short(run)}: {line.rstrip()}")
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
    records = [replace(read_run(plan.folder_of(run)), label=run.label) for run in plan.runs]
    comparison = Comparison(plan.title, task.metric, task.higher_is_better, task.about, records, task.extra_metrics())
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
    extra = {"extra_metrics": list(comparison.extra_metrics)} if comparison.extra_metrics else {}
    origin = {
        "curve": comparison.curve,
        "date": first.started,
        "command": first.command,
        "environment": first.environment,
    }
    return {**head, **extra, **origin, "runs": runs}


def _samples(plan: Plan) -> dict[str, str]:
    """What the models of the first seed have written."""
    texts = {}
    for run in plan.runs:
        file = plan.folder_of(run) / SAMPLE
        if run.seed == plan.runs[0].seed and file.exists():
            texts[run.label] = file.read_bytes().decode(errors="replace")
    return {label: text for label, text in texts.items() if text}
