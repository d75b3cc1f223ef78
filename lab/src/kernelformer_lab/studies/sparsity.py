"""Which kernels learn to ignore: the synthetic sparsity task at a size for a CPU (KL-Transformer, 2110.08323, Fig. 6).

Runs of the recipe ``kl-sparsity``, which says where its size differs from the paper's App. E, for each relevance. Here
the validation split is looked at more often, for the curves. All seeds of a relevance have the same samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.table import Table

from kernelformer.formatting import short_names
from kernelformer.modules import method_options, parse_method
from kernelformer_lab.comparison import Plan, check
from kernelformer_lab.recipes.catalogue import change, find_recipe
from kernelformer_lab.records import read_metrics
from kernelformer_lab.studies.base import Log, Progress
from kernelformer_lab.studies.runs import train_model
from kernelformer_lab.studies.settings import SparsitySettings as Settings
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


@dataclass
class Curve:
    """Validation accuracy of one method over the steps of its training."""

    method: str
    relevance: float
    seed: int
    steps: list[int] = field(default_factory=list)
    accuracy: list[float] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def last(self) -> float:
        """The accuracy at the end; NaN where training diverged before the first evaluation."""
        return self.accuracy[-1] if self.accuracy else math.nan

    def reached(self, accuracy: float) -> int | None:
        """The first step with at least this accuracy, or None."""
        return next((s for s, a in zip(self.steps, self.accuracy, strict=True) if a >= accuracy), None)


def methods_of(settings: Settings) -> Sequence[str]:
    """The specs that are asked for, or `METHODS`."""
    return settings.attention or METHODS


def steps(settings: Settings) -> int:
    """How often `run` calls ``progress``."""
    return len(methods_of(settings)) * len(settings.relevances) * settings.seeds


def training_of(method: str, relevance: float, seed: int, settings: Settings) -> Run:
    """The training run of one method at one relevance."""
    name, options = parse_method(method)
    if "num_features" in method_options(name) and "num_features" not in options:
        method = f"{method}:num_features={settings.features}"
    own = {"task.relevance": relevance, "task.length": settings.length, "steps": settings.steps}
    return change(
        find_recipe("kl-sparsity").run(), {**own, "attention": method, "seed": seed, "eval_every": EVAL_EVERY}
    )


def run(settings: Settings, folder: Path, log: Log, progress: Progress) -> list[Curve]:
    """Train every method at every relevance; goes on with the runs in ``folder / "sparsity"``.

    Raises:
        StoppedError: Ctrl-C or SIGTERM in a training, which was saved.
        TrainingError: the folder has runs of other settings.
    """
    methods, seeds = methods_of(settings), range(settings.seeds)
    plans = {}
    for p in settings.relevances:
        runs = [training_of(method, p, seed, settings) for method in methods for seed in seeds]
        plans[p] = Plan("sparsity", runs, folder / RUNS / f"relevance-{p:g}")
        check(plans[p], resume=True)
    curves = []
    for p, plan in plans.items():
        names = [(method, seed) for method in methods for seed in seeds]
        for (method, seed), training in zip(names, plan.runs, strict=True):
            name, run_folder = f"{method}, relevance {p:g}, seed {seed}", plan.folder_of(training)
            result = train_model(training, run_folder, name, log, ACCURACY)
            points = [x for x in read_metrics(run_folder) if ACCURACY in x]
            accuracy = [x[ACCURACY] for x in points]
            curves.append(Curve(method, p, seed, [x["step"] for x in points], accuracy, result.seconds))
            progress()
    return curves


def tables(curves: Sequence[Curve]) -> list[Table]:
    """One table: final accuracy and the step that reached 80%, by method and relevance."""
    relevances = sorted({c.relevance for c in curves})
    out = Table(title="Sparse sums: accuracy at the end, and the step that reached 80%")
    out.add_column("method", no_wrap=True)
    for p in relevances:
        out.add_column(f"relevance {p:g}", justify="right")
    out.add_column("s/run", justify="right")
    for method, short in short_names(c.method for c in curves).items():
        mine = [c for c in curves if c.method == method]
        cells = []
        for p in relevances:
            some = [c for c in mine if c.relevance == p]
            steps = [c.reached(0.8) for c in some]
            known = [s for s in steps if s is not None]
            when = f"{sum(known) / len(known):.0f}" if known and len(known) == len(steps) else "-"
            cells.append(f"{100 * sum(c.last for c in some) / len(some):.1f}% ({when})" if some else "")
        out.add_row(short, *cells, f"{sum(c.seconds for c in mine) / len(mine):.0f}")
    return [out]


def record(curves: Sequence[Curve]) -> dict[str, Any]:
    """Every learning curve."""
    return {"curves": [asdict(x) for x in curves]}


def picture(curves: Sequence[Curve], path: Path) -> None:
    """Draw learning curves, one panel per relevance."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    relevances = sorted({c.relevance for c in curves})
    figure, axes = plt.subplots(
        1, len(relevances), figsize=(4.4 * len(relevances) + 2, 4), squeeze=False, sharey=True, constrained_layout=True
    )
    for axis, p in zip(axes[0], relevances, strict=True):
        for index, method in enumerate(dict.fromkeys(c.method for c in curves)):
            mine = [c for c in curves if c.method == method and c.relevance == p]
            for c in mine:
                axis.plot(c.steps, [100 * x for x in c.accuracy], color=f"C{index}", alpha=0.25 if len(mine) > 1 else 1)
            if len(mine) > 1:
                mean = [100 * fmean(x) for x in zip(*(c.accuracy for c in mine), strict=False)]  # one may diverge
                axis.plot(mine[0].steps[: len(mean)], mean, color=f"C{index}")
            axis.plot([], [], color=f"C{index}", label=method)
        axis.axhline(100 / CLASSES, color="grey", linestyle=":", linewidth=1)
        axis.set_title(f"relevance {p:g}")
        axis.set_xlabel("step")
        axis.locator_params(axis="x", integer=True)
        axis.grid(True, alpha=0.2)
    axes[0, 0].set_ylabel("validation accuracy, %")
    axes[0, -1].legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, dpi=130)
    plt.close(figure)
