"""Weights of a softmax model in models with random features (Performer, 2009.14794, Fig. 5 left).

A causal language model over bytes is trained with exact softmax attention. Its weights then go into models with random
features: as they are, and fine-tuned for a small part of the steps. The same part with softmax attention says what the
steps alone give, and a fresh start what the weights give; optionally a training of all steps from first weights of its
own, the ceiling of an attention. Departures from the paper, which has words of LM1B: the data,
the size, and bits per byte in place of accuracy.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from kernelformer.errors import number
from kernelformer.settings import option
from kernelformer_lab.figures import drawing, table
from kernelformer_lab.reports.comparison import read_run
from kernelformer_lab.studies.base import SPECS, Log, Progress, Record, Study
from kernelformer_lab.studies.normalized import reattend
from kernelformer_lab.studies.runs import METRIC, ByteModelSettings, bits, byte_run, train_model, trained_model
from kernelformer_lab.tasks import make_task
from kernelformer_lab.training import build_model

EXACT = "softmax"
EVALUATIONS = 10  # along a training
MODELS = "transfer"  # the folder of the trained models
Curve = list[tuple[int, float]]


@dataclass(frozen=True, kw_only=True)
class TransferSettings(ByteModelSettings):
    """Settings of this study."""

    attention: tuple[str, ...] = option(("favor+:num_features=64", "trigonometric:num_features=32"), SPECS)
    tuning: int = option(100, "steps of fine-tuning", least=1)
    tuning_lr: float = option(1e-3, "the largest one of fine-tuning", name="tuning_learning_rate")
    draws: int = option(3, "of the features, without fine-tuning", least=1)
    ceiling: bool = option(False, "also train every attention from scratch for all steps")


def attentions(settings: TransferSettings) -> list[str]:
    """Softmax, and what the weights go into."""
    return [EXACT, *(x for x in settings.attention if x != EXACT)]


def steps(settings: TransferSettings) -> int:
    """Number of calls of ``progress`` in `run`."""
    return 1 + (4 if settings.ceiling else 3) * len(attentions(settings))


def run(record: Record, log: Log, progress: Progress) -> None:
    """Train what is not trained yet; models in the folder "transfer" are resumed.

    Each attention has bits per byte ``at_once``, without fine-tuning and one for each draw (of softmax one), over the
    steps of fine-tuning (``tuned``), and over as many steps from first weights of its own at the learning rate of the
    long training (``fresh``), and with ``ceiling`` over the steps of the long training from its first weights.

    Raises:
        StoppedError: Ctrl-C or SIGTERM in a training, which was saved.
        TrainingError: the folder has models of other settings or of other data, or one does not train.
    """
    settings = record.settings
    number("tuning_lr", settings.tuning_lr, above=0)
    long = byte_run(settings, EXACT, eval_every=max(1, settings.steps // EVALUATIONS))
    task = make_task(long.task, **long.task_options)
    first: Any = build_model(long, task)
    for attention in attentions(settings):
        reattend(first, attention)  # what cannot take the weights is said before anything is trained
    home, seed = record.folder / MODELS, f"seed{settings.seed}"
    source = (home / f"long-{seed}").resolve()
    model, _ = trained_model(EXACT, long, source, log)
    progress()
    short: dict[str, Any] = {"steps": settings.tuning, "eval_every": max(1, settings.tuning // EVALUATIONS)}
    moved = []
    for index, attention in enumerate(attentions(settings)):
        log(f"{attention}: without fine-tuning")
        draws = range(settings.draws if attention != EXACT else 1)
        row: dict[str, Any] = {"attention": attention}
        row["at_once"] = [bits(reattend(model, attention, seed=draw), task) for draw in draws]
        progress()
        start = {"start": str(source), "learning_rate": settings.tuning_lr}
        whole = [("ceiling", {"eval_every": long.eval_every})] if settings.ceiling else []
        for name, more in (("tuned", {**short, **start}), ("fresh", short), *whole):
            place = home / f"{name}-{index}-{seed}"
            result = train_model(byte_run(settings, attention, **more), place, f"{attention}, {name}", log)
            row[name] = [*_curve(place), *([(result.steps, math.nan)] if result.diverged else [])]
            progress()
        moved.append(row)
    record.figures = {"trained": _curve(source), "moved": moved}


def _curve(folder: Path) -> Curve:
    """Bits per byte at each evaluation of a run."""
    return [(x.step, x.values[METRIC]) for x in read_run(folder).evaluation]


def tables(record: Record) -> list[Table]:
    """A row for each attention: at once, tuned, and from a fresh start."""
    settings, tuning = record.settings, record.settings.tuning
    trained = record.figures["trained"][-1][1]
    rows = [
        (x["attention"], *(f"{y:.3f}" for y in (statistics.fmean(x["at_once"]), x["tuned"][-1][1], x["fresh"][-1][1])))
        for x in record.figures["moved"]
    ]
    title = f"Bits per byte with the weights of a softmax model of {settings.steps} steps ({trained:.3f})"
    return [table(title, ("attention", "at once", f"after {tuning} steps", f"fresh, {tuning} steps"), rows)]


def picture(record: Record, path: Path) -> None:
    """Draw the paper's figure: fine-tuning over the steps, after the training of the softmax model."""
    end = record.settings.steps
    with drawing(path, (7, 4.4)) as (figure, ((axis,),)):
        axis.plot(*zip(*record.figures["trained"], strict=True), color="gray", label="softmax, training")
        for index, x in enumerate(record.figures["moved"]):
            name, color = x["attention"], f"C{index}"
            at, values = zip((0, statistics.fmean(x["at_once"])), *x["tuned"], strict=True)
            axis.plot([end + s for s in at], values, "o-", color=color, markersize=3, label=f"{name}, tuned")
            axis.plot(*zip(*x["fresh"], strict=True), ":", color=color, label=f"{name}, fresh")
        axis.set(xlabel="steps", ylabel="bits per byte")
        axis.locator_params(axis="x", integer=True)
        axis.grid(True, alpha=0.2)
        figure.legend(loc="outside lower center", ncols=2, fontsize="small")


STUDY = Study(
    "transfer",
    "Performer (2009.14794), Fig. 5 left",
    TransferSettings,
    steps,
    run,
    tables,
    picture,
    resumes=True,
    writes="the models",
    examples=(("--data enwik8 --steps 800 --tuning 100", "a small model, moved to random features"),),
)
