"""Weights of a softmax model in models with random features (Performer, 2009.14794, Fig. 5 left).

A causal language model over bytes is trained with exact softmax attention. Its weights then go into models with random
features: as they are, and fine-tuned for a small part of the steps. The same part with softmax attention says what the
steps alone give, and a fresh start what the weights give. Departures from the paper, which has words of LM1B: the data,
the size, and bits per byte in place of accuracy.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from kernelformer.errors import number
from kernelformer_lab.reports.comparison import read_run
from kernelformer_lab.studies.base import Log, Progress
from kernelformer_lab.studies.normalized import reattend
from kernelformer_lab.studies.runs import METRIC, bits, byte_run, train_model, trained_model
from kernelformer_lab.studies.settings import TransferSettings as Settings
from kernelformer_lab.tasks import make_task
from kernelformer_lab.training import build_model

EXACT = "softmax"
EVALUATIONS = 10  # along a training
MODELS = "transfer"  # the folder of the trained models
Curve = list[tuple[int, float]]


@dataclass(frozen=True)
class Moved:
    """What an attention makes of the weights.

    Args:
        attention: its spec.
        at_once: bits per byte without fine-tuning, one for each draw; of softmax itself one.
        tuned: bits per byte over the steps of fine-tuning.
        fresh: the same number of steps from first weights of its own, at the learning rate of the long training.
    """

    attention: str
    at_once: list[float]
    tuned: Curve
    fresh: Curve


@dataclass(frozen=True)
class Result:
    """What the study has measured.

    Args:
        settings: of the study.
        trained: bits per byte of the softmax model over the steps of its training.
        moved: one for each attention, softmax first.
    """

    settings: Settings
    trained: Curve
    moved: list[Moved]


def attentions(settings: Settings) -> list[str]:
    """Softmax, and what the weights go into."""
    return [EXACT, *(x for x in settings.attention if x != EXACT)]


def steps(settings: Settings) -> int:
    """How often `run` calls ``progress``."""
    return 1 + 3 * len(attentions(settings))


def run(settings: Settings, folder: Path, log: Log, progress: Progress) -> Result:
    """Train what is not trained yet; goes on with the models in ``folder / "transfer"``.

    Raises:
        StoppedError: Ctrl-C or SIGTERM in a training, which was saved.
        TrainingError: the folder has models of other settings or of other data, or one does not train.
    """
    number("tuning_lr", settings.tuning_lr, above=0)
    long = byte_run(settings, EXACT, eval_every=max(1, settings.steps // EVALUATIONS))
    task = make_task(long.task, **long.task_options)
    first: Any = build_model(long, task)
    for attention in attentions(settings):
        reattend(first, attention)  # what cannot take the weights is said before anything is trained
    home, seed = folder / MODELS, f"seed{settings.seed}"
    source = (home / f"long-{seed}").resolve()
    model, _ = trained_model(EXACT, long, source, log)
    progress()
    short: dict[str, Any] = {"steps": settings.tuning, "eval_every": max(1, settings.tuning // EVALUATIONS)}
    moved = []
    for index, attention in enumerate(attentions(settings)):
        log(f"{attention}: without fine-tuning")
        draws = range(settings.draws if attention != EXACT else 1)
        at_once = [bits(reattend(model, attention, seed=draw), task) for draw in draws]
        progress()
        start = {"start": str(source), "learning_rate": settings.tuning_lr}
        curves = []
        for name, more in (("tuned", start), ("fresh", {})):
            place = home / f"{name}-{index}-{seed}"
            result = train_model(byte_run(settings, attention, **short, **more), place, f"{attention}, {name}", log)
            curves.append([*_curve(place), *([(result.steps, math.nan)] if result.diverged else [])])
            progress()
        moved.append(Moved(attention, at_once, *curves))
    return Result(settings, _curve(source), moved)


def _curve(folder: Path) -> Curve:
    """Bits per byte at each evaluation of a run."""
    return [(x.step, x.values[METRIC]) for x in read_run(folder).evaluation]


def tables(result: Result) -> list[Table]:
    """A row for each attention: at once, tuned, and from a fresh start."""
    tuning = result.settings.tuning
    out = Table(
        title=f"Bits per byte with the weights of a softmax model of {result.settings.steps} steps "
        f"({result.trained[-1][1]:.3f})",
        title_justify="left",
    )
    out.add_column("attention")
    for name in ("at once", f"after {tuning} steps", f"fresh, {tuning} steps"):
        out.add_column(name, justify="right")
    for x in result.moved:
        out.add_row(x.attention, f"{statistics.fmean(x.at_once):.3f}", f"{x.tuned[-1][1]:.3f}", f"{x.fresh[-1][1]:.3f}")
    return [out]


def record(result: Result) -> dict[str, Any]:
    """Every value, by attention."""
    return {"trained": result.trained, "moved": [asdict(x) for x in result.moved]}


def picture(result: Result, path: Path) -> None:
    """Draw the paper's figure: fine-tuning over the steps, after the training of the softmax model."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(7, 4.4), constrained_layout=True)
    axis.plot(*zip(*result.trained, strict=True), color="gray", label="softmax, training")
    end = result.settings.steps
    for index, x in enumerate(result.moved):
        points = [(0, statistics.fmean(x.at_once)), *x.tuned]
        steps_, values = zip(*points, strict=True)
        color = f"C{index}"
        axis.plot([end + s for s in steps_], values, "o-", color=color, markersize=3, label=f"{x.attention}, tuned")
        fresh = zip(*x.fresh, strict=True)
        axis.plot(*fresh, ":", color=color, label=f"{x.attention}, fresh")
    axis.set_xlabel("steps")
    axis.locator_params(axis="x", integer=True)
    axis.set_ylabel("bits per byte")
    axis.grid(True, alpha=0.2)
    figure.legend(loc="outside lower center", ncols=2, fontsize="small")
    figure.savefig(path, dpi=130)
    plt.close(figure)
