"""Learning curves on the synthetic sparsity task at a size for a CPU (KL-Transformer, 2110.08323, Fig. 6).

Runs of the recipe ``kl-sparsity``, which says where its size differs from the paper's App. E, for each relevance. Here
the validation split is looked at more often, for the curves. All seeds of a relevance have the same samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from rich.table import Table

from kernelformer.formatting import short_names
from kernelformer.modules import method_options, parse_method
from kernelformer.settings import Settings, option
from kernelformer_lab.comparison import Plan, check
from kernelformer_lab.figures import drawing, table
from kernelformer_lab.recipes.catalogue import change, find_recipe
from kernelformer_lab.records import read_metrics
from kernelformer_lab.studies.base import SPECS, Log, Progress, Record, Row, Study, unique, where
from kernelformer_lab.studies.runs import train_model
from kernelformer_lab.tasks.sparsity import CLASSES
from kernelformer_lab.training import Run

METHODS = (
    "softmax",
    "gmm-rks",
    "gmm-prf",
    "generative-prf",
    "fastfood-prf:learn=none",
    "fastfood-prf:learn=S",
    "fastfood-prf:learn=SGB",
)
EVAL_EVERY = 50  # steps between two points of a curve
ACCURACY = "eval_accuracy"  # as the trainer calls it
RUNS = "sparsity"  # the folder of the runs


@dataclass(frozen=True, kw_only=True)
class SparsitySettings(Settings):
    """Settings of this study; all others are those of the recipe ``kl-sparsity``."""

    attention: tuple[str, ...] = option((), SPECS)
    relevances: tuple[float, ...] = option((0.1, 0.5, 0.9), "probabilities that a position counts")
    seeds: int = option(1, "runs of each, with as many seeds", least=1)
    steps: int = option(800, "updates", least=1)
    length: int = option(48, "tokens of a sample", least=4)
    features: int = option(64, "number of features", least=1)


def last(curve: Row) -> float:
    """The accuracy at the end; NaN where training diverged before the first evaluation."""
    return curve["accuracy"][-1] if curve["accuracy"] else math.nan


def reached(curve: Row, accuracy: float) -> int | None:
    """The first step with at least this accuracy, or None."""
    points = zip(curve["steps"], curve["accuracy"], strict=True)
    return next((step for step, value in points if value >= accuracy), None)


def methods_of(settings: SparsitySettings) -> Sequence[str]:
    """The specs that are asked for, or `METHODS`."""
    return settings.attention or METHODS


def steps(settings: SparsitySettings) -> int:
    """Number of calls of ``progress`` in `run`."""
    return len(methods_of(settings)) * len(settings.relevances) * settings.seeds


def training_of(method: str, relevance: float, seed: int, settings: SparsitySettings) -> Run:
    """The training run of one method at one relevance."""
    name, options = parse_method(method)
    if "num_features" in method_options(name) and "num_features" not in options:
        method = f"{method}:num_features={settings.features}"
    own = {"task.relevance": relevance, "task.length": settings.length, "steps": settings.steps}
    return change(
        find_recipe("kl-sparsity").run(), {**own, "attention": method, "seed": seed, "eval_every": EVAL_EVERY}
    )


def run(record: Record, log: Log, progress: Progress) -> None:
    """Train every method at every relevance; runs in the folder "sparsity" are resumed.

    Raises:
        StoppedError: Ctrl-C or SIGTERM in a training, which was saved.
        TrainingError: the folder has runs of other settings.
    """
    settings = record.settings
    names = [(method, seed) for method in methods_of(settings) for seed in range(settings.seeds)]
    plans = {}
    for p in settings.relevances:
        runs = [training_of(method, p, seed, settings) for method, seed in names]
        plans[p] = Plan("sparsity", runs, record.folder / RUNS / f"relevance-{p:g}")
        check(plans[p], resume=True)
    record.figures["curves"] = []
    for p, plan in plans.items():
        for (method, seed), training in zip(names, plan.runs, strict=True):
            name, run_folder = f"{method}, relevance {p:g}, seed {seed}", plan.folder_of(training)
            seconds = train_model(training, run_folder, name, log, ACCURACY).seconds
            points = [x for x in read_metrics(run_folder) if ACCURACY in x]
            curve = {"steps": [x["step"] for x in points], "accuracy": [x[ACCURACY] for x in points]}
            key = {"method": method, "relevance": p, "seed": seed}
            record.figures["curves"].append({**key, **curve, "seconds": seconds})
            progress()


def tables(record: Record) -> list[Table]:
    """Final accuracy and the step that reached 80%, by method and relevance."""
    curves = record.figures["curves"]
    relevances = sorted(unique(curves, "relevance"))
    rows = []
    for method, short in short_names(x["method"] for x in curves).items():
        mine = where(curves, method=method)
        cells = []
        for p in relevances:
            some = where(mine, relevance=p)
            steps = [reached(c, 0.8) for c in some]
            known = [s for s in steps if s is not None]
            when = f"{fmean(known):.0f}" if known and len(known) == len(steps) else "-"
            cells.append(f"{100 * fmean(map(last, some)):.1f}% ({when})" if some else "")
        rows.append((short, *cells, f"{fmean(c['seconds'] for c in mine):.0f}"))
    columns = ("method", *(f"relevance {p:g}" for p in relevances), "s/run")
    return [table("Sparse sums: accuracy at the end, and the step that reached 80%", columns, rows)]


def picture(record: Record, path: Path) -> None:
    """Draw learning curves, one panel per relevance."""
    curves = record.figures["curves"]
    relevances = sorted(unique(curves, "relevance"))
    size = (4.4 * len(relevances) + 2, 4)
    with drawing(path, size, columns=len(relevances), sharey=True) as (_, (axes,)):
        for axis, p in zip(axes, relevances, strict=True):
            for index, method in enumerate(unique(curves, "method")):
                mine = where(curves, method=method, relevance=p)
                for c in mine:
                    shown = [100 * x for x in c["accuracy"]]
                    axis.plot(c["steps"], shown, color=f"C{index}", alpha=0.25 if len(mine) > 1 else 1)
                if len(mine) > 1:
                    mean = [
                        100 * fmean(x) for x in zip(*(c["accuracy"] for c in mine), strict=False)
                    ]  # one may diverge
                    axis.plot(mine[0]["steps"][: len(mean)], mean, color=f"C{index}")
                axis.plot([], [], color=f"C{index}", label=method)
            axis.axhline(100 / CLASSES, color="grey", linestyle=":", linewidth=1)
            axis.set(title=f"relevance {p:g}", xlabel="step")
            axis.locator_params(axis="x", integer=True)
            axis.grid(True, alpha=0.2)
        axes[0].set_ylabel("validation accuracy, %")
        axes[-1].legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))


STUDY = Study(
    "sparsity",
    "KL-Transformer (2110.08323), App. E, Fig. 6",
    SparsitySettings,
    steps,
    run,
    tables,
    picture,
    resumes=True,
    writes="the runs",
    examples=(("--attention softmax,gmm-rks --seeds 3", "learning curves of two kernels"),),
)
