"""Several runs of one task in one folder: what they are, and checks before any of them is trained."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from kernelformer.errors import TrainingError, positive_int
from kernelformer.files import write_json
from kernelformer.records import PLAN, RUN, part, read_object, reading
from kernelformer.tasks import make_task
from kernelformer.training.config import Run, attention_settings
from kernelformer.training.inspection import check_same
from kernelformer.training.order import check_grouping
from kernelformer.training.selection import held_out_split
from kernelformer.training.session import build_model

AGAIN = "the same call and resume=True"


@dataclass(frozen=True)
class Plan:
    """Several runs, the folder that they go to, and what a reader should know of them.

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

    def folder_of(self, run: Run) -> Path:
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
    started = [x for x in plan.runs if (plan.folder_of(x) / RUN).exists()]
    if started and not resume:
        raise TrainingError(
            f"{plan.folder_of(started[0])} is there already; go on with {again}, or take another folder."
        )
    first = plan.runs[0]
    task = make_task(first.task, **first.task_options)
    for split in ("train", "validation"):
        task.split(split)
    if any(run.group_by_length for run in plan.runs):
        check_grouping(first.task, task.split("train"))
    if any(run.select == "best" for run in plan.runs):
        held_out_split(task)
    with torch.device("meta"):
        for run in plan.runs:
            if run.seed == first.seed:
                build_model(run, task)
    data = task.fingerprint() if started else None
    for run in started:
        check_same(run, plan.folder_of(run), data)
