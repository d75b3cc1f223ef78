"""Outputs of trained classifiers over redraws of features, eigenvalues and gradients (KL-Transformer, 2110.08323)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn
from transformers import PreTrainedModel

from kernelformer.errors import TrainingError, integer, positive_int
from kernelformer.formatting import short_names
from kernelformer.modules.schedules import random_maps
from kernelformer.page import COLOURS, MARKERS
from kernelformer.settings import Settings, option
from kernelformer_lab.analysis.redraws import (
    classifier_gradients,
    gradient_figures,
    predictions,
    redraw_figures,
    squared_correlation,
)
from kernelformer_lab.analysis.spectra import Spectrum, spectra, squared_log_variances
from kernelformer_lab.data.batching import Sample, spread_evenly
from kernelformer_lab.figures import drawing, table
from kernelformer_lab.records import MODEL, RUN, read_metrics, standing
from kernelformer_lab.studies.base import Log, Progress, Record, Row, Study, unique, where
from kernelformer_lab.tasks import Task, make_task
from kernelformer_lab.training.checkpoints import checkpoints_of
from kernelformer_lab.training.config import Run
from kernelformer_lab.training.evaluation import load_model, load_run
from kernelformer_lab.training.inspection import saved_run
from kernelformer_lab.training.session import build_model, start_from, weights_hash

# Measures of a run that Fig. 9 and 10 set against each other, by the paper's names.
VARIANCE = {"RSD": "rsd", "PI": "pi", "AGV": "agv"}
PAPER = {("RSD", "AGV"): 0.95, ("RSD", "PI"): 0.98, ("PI", "AGV"): 0.89}  # R^2 of Sec. 4.1
# In a figure of a run: a mean over samples, or a number by itself.
MEASURES = ("rsd", "rsd_median", "pi", "agv", "voting_accuracy", "accuracy", "accuracy_deviation")


@dataclass(frozen=True, kw_only=True)
class RedrawsSettings(Settings):
    """Settings of this study."""

    runs: tuple[str, ...] = option(help="of finished runs, or of comparisons", argument=True, path=True, shown="FOLDER")
    draws: int = option(100, "of the random features of each model", least=2)
    samples: int = option(200, "of the validation split, at most", least=2)
    first_draw: int | None = option(None, "number of the first draw; default: after the one a model has", least=0)
    gradients: int = option(50, "draws and samples of the gradients at the classifier; 0: none", least=0)


def value(run: Row, measure: str) -> float:
    """One of `MEASURES` of a run; of a mean over samples the mean."""
    figure = run["redraws"]["figures"][measure]
    return float(figure["mean"] if isinstance(figure, dict) else figure)


def deterministic(runs: Sequence[Row]) -> bool:
    """Return True if nothing is redrawn in any of the runs."""
    return all(x["redraws"]["deterministic"] for x in runs)


@dataclass(frozen=True)
class Spread:
    """A mean over seeds and the standard deviation over them; NaN for one seed, or where a number is not finite."""

    mean: float
    deviation: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Mean and deviation of some numbers, at least one."""
        finite = all(map(math.isfinite, values))
        return cls(fmean(values), stdev(values) if len(values) > 1 and finite else math.nan)

    def text(self, digits: int, factor: float = 1.0) -> str:
        """The mean, and after ± the deviation where there is one."""
        spread = "" if math.isnan(self.deviation) else f" ± {factor * self.deviation:.{digits}f}"
        return f"{factor * self.mean:.{digits}f}{spread}"


def methods_of(runs: Sequence[Row]) -> dict[tuple[str, str], list[Row]]:
    """The runs by task and attention, one for each seed."""
    return {(x, y): where(runs, task=x, attention=y) for x, y in unique(runs, "task", "attention")}


def over_seeds(runs: Sequence[Row], measure: str) -> Spread:
    """One of `MEASURES` over the seeds of a method."""
    return Spread.of([value(x, measure) for x in runs])


def eigenvalues_over_seeds(runs: Sequence[Row], when: str, which: str, part: str | None = None) -> Spread | None:
    """Over the seeds, of a figure at ``start`` or ``end``; ``part``: squared_log_variance; None: there are none."""
    found = [x["eigenvalues"][when] for x in runs]
    found = [x if part is None or x is None else x.get(part) for x in found]
    return None if None in found else Spread.of([x[which] for x in found])


def correlations(runs: Sequence[Row]) -> list[Row]:
    """R^2 of each pair of measures of variance by task, over methods as in the paper, and over all runs (Fig. 9, 10).

    Methods that draw nothing are no points.
    """
    rows = []
    for task in unique(runs, "task"):
        methods = [x for x in methods_of(where(runs, task=task)).values() if not deterministic(x)]
        points = [x for method in methods for x in method]
        for a, b in combinations(VARIANCE, 2):
            a, b = (a, b) if (a, b) in PAPER else (b, a)
            means = [[over_seeds(x, VARIANCE[name]).mean for x in methods] for name in (a, b)]
            each = [[value(x, VARIANCE[name]) for x in points] for name in (a, b)]
            rows.append(
                {
                    "task": task,
                    "measures": [a, b],
                    "methods": len(methods),
                    "r2": squared_correlation(*means),
                    "r2_of_runs": squared_correlation(*each),
                    "paper": PAPER[a, b],
                }
            )
    return rows


def summarize(runs: list[Row], left_out: dict[str, str]) -> Row:
    """The figures of the study: runs, means over their seeds, correlations and what was left out."""
    methods = [
        {
            "task": task,
            "attention": attention,
            "seeds": [run["seed"] for run in mine],
            "deterministic": deterministic(mine),
            **{name: asdict(over_seeds(mine, name)) for name in MEASURES},
            "eigenvalues": _eigenvalues(mine),
        }
        for (task, attention), mine in methods_of(runs).items()
    ]
    return {"runs": runs, "methods": methods, "correlations": correlations(runs), "left_out": left_out}


def _eigenvalues(runs: Sequence[Row]) -> dict[str, Any] | None:
    """Table 4 with both ends of training, over seeds."""
    parts: dict[str, Any] = {}
    for when in ("start", "end"):
        for which in ("minimum", "maximum", "mean"):
            spread = eigenvalues_over_seeds(runs, when, which)
            if spread is None:
                return None
            parts.setdefault(when, {})[which] = asdict(spread)
    return parts


BATCH = 50  # samples at once
ACCURACY = "eval_accuracy"  # as the trainer calls it


@dataclass(frozen=True)
class Samples:
    """Samples of the validation split in batches of similar lengths, so that little is padding.

    Args:
        labels: (N), in the order of the batches.
    """

    batches: Sequence[dict[str, Tensor]]
    labels: Tensor


def redraw_statistics(
    folder: str | Path, *, draws: int = 100, samples: int = 200, first_draw: int | None = None
) -> dict[str, Any]:
    """Variance of a trained classifier over redraws of its random features (KL-Transformer, Fig. 5 and 9).

    Draw t of a map is a function of its seed and t, and every layer has a seed of its own: all layers get number t,
    none the numbers of another, as in training. A method that draws nothing is run once, and all its measures of
    variance are 0.

    Args:
        folder: of a finished run of a classification task; its data has to be there.
        draws: how many; the paper takes 100.
        samples: of the validation split, at most so many, spread evenly.
        first_draw: number of the first one; None: after the one that the model has, so that training has seen none.

    Returns:
        Plain values: the run (``attention``, ``seed``, ``task``), ``draws``, ``first_draw``, ``samples``,
        ``deterministic``, ``own_draw`` with the accuracy of the draw that the model was saved with, ``figures``, see
        `RedrawFigures`, and ``gradients`` at the classifier over the same draws, see `GradientFigures`.

    Cost: draws times one evaluation of the samples, without gradients.
    """
    positive_int("draws", draws)
    run, model, task = open_run(Path(folder))
    data = validation_samples(task, positive_int("samples", samples), run)
    maps = random_maps(model)
    own = max((x.draw_number for x in maps), default=0)
    first = own + 1 if first_draw is None else integer("first_draw", first_draw, at_least=0)
    with restored_draws(model):
        own_logits = logits_over_draws(model, data, None)
        numbers = range(first, first + draws)
        logits = logits_over_draws(model, data, numbers) if maps else own_logits
    return {
        "attention": run.label,
        "seed": run.seed,
        "task": run.task,
        "draws": len(logits),
        "first_draw": first if maps else None,
        "samples": len(data.labels),
        "deterministic": not maps,
        "own_draw": {
            "draw": own if maps else None,
            "accuracy": float((predictions(own_logits) == data.labels).double().mean()),
        },
        "figures": asdict(redraw_figures(logits, data.labels)),
        "gradients": _gradients(model, logits, data.labels),
    }


def eigenvalue_statistics(folder: str | Path) -> dict[str, Any]:
    """Eigenvalues of the spectral density's covariances, at the start and at the end of a run (Tables 4, 9-12).

    The start is the model as the run's settings and seed make it, weights of ``start`` included.

    Returns:
        ``start`` and ``end``, each None where no map has a density, or ``learned``, the ``minimum``, ``maximum`` and
        ``mean`` over all heads (Table 4) and the rows of ``heads`` (Tables 9-12), layers and heads numbered from 1. For
        diagonal mixtures ``squared_log_variance`` has the same of what Tables 10 and 12 seem to print.
    """
    run, model, task = open_run(Path(folder))
    with torch.random.fork_rng():
        first = build_model(run, task)
    if run.start is not None:
        start_from(first, Path(run.start))
    return {"attention": run.label, "seed": run.seed, "start": _spectrum(first), "end": _spectrum(model)}


def gradient_statistics(
    folder: str | Path,
    *,
    draws: int = 50,
    samples: int = 50,
    first_draw: int | None = None,
    levels: Sequence[float] | None = None,
) -> list[dict[str, Any]]:
    """Gradients at the classifier over redraws, at every checkpoint that is left and at the end (Table 14, App. E.3).

    As the paper has it: the first validation samples, 50 times. Checkpoints are those of ``save_every`` and ``keep``.

    Args:
        folder: of a finished run of a classification task.
        samples: the first so many of the validation split.
        first_draw: number of the first draw; None: after the one that the last model has.
        levels: of accuracy, as the paper has 0.2, 0.4, 0.6 and 0.8: only the first checkpoint at each, and the end;
            None: every checkpoint.

    Returns:
        A row for each, by step: ``step``, ``accuracy`` (of the validation split, where it was measured at that step)
        and the figures of `GradientFigures`.
    """
    home = Path(folder)
    run, last, task = open_run(home)
    data = validation_samples(task, positive_int("samples", samples), run, first=True)
    own = max((x.draw_number for x in random_maps(last)), default=0)
    first = own + 1 if first_draw is None else integer("first_draw", first_draw, at_least=0)
    numbers = range(first, first + positive_int("draws", draws))
    accuracy = {int(x["step"]): float(x[ACCURACY]) for x in read_metrics(home) if ACCURACY in x}
    paths = {step: path for path, step in reversed(checkpoints_of(home)) if step != run.steps}
    if levels is not None:
        reached = [next((x for x in paths if accuracy.get(x, 0.0) >= level), None) for level in levels]
        paths = {step: path for step, path in paths.items() if step in reached}
    out = []
    for step, path in [*paths.items(), (run.steps, None)]:
        model = last if path is None else load_model(task.model, path).eval()
        logits = logits_over_draws(model, data, numbers if random_maps(model) else None)
        figures = _gradients(model, logits, data.labels)
        out.append({"step": step, "accuracy": accuracy.get(step), **(figures or {})})
    return out


def open_run(folder: Path) -> tuple[Run, PreTrainedModel, Task]:
    """A finished run, its model in evaluation mode, and its task with what was saved beside the model.

    Raises:
        TrainingError: it is not finished, or its data is not that of training.
    """
    run, model = load_run(folder)
    task = make_task(run.task, **run.task_options)
    now, before = task.fingerprint(), saved_run(folder)[1].get("data")  # older runs did not say
    if before not in (None, now):
        raise TrainingError(f"{folder} was trained on other data: {before}, now {now}; bring the data back.")
    task.load_extra(folder / MODEL)  # a vocabulary too, with which the fingerprint would be another one
    return run, model.eval(), task


def validation_samples(task: Task, count: int, run: Run, first: bool = False) -> Samples:
    """At most so many samples of the validation split, spread evenly or the first ones.

    Raises:
        ValueError: the task has no classes, one for each sample.
    """
    split: Any = task.split("validation")
    numbers = range(min(count, len(split))) if first else spread_evenly(len(split), count).tolist()
    rows = sorted((split[i] for i in numbers), key=_size, reverse=True)
    batches = [task.collate(rows[i : i + BATCH]) for i in range(0, len(rows), BATCH)]
    labels = torch.cat([x.pop("labels") for x in batches])
    if labels.dim() != 1 or labels.is_floating_point():
        raise ValueError(
            f"redraws are measured on classifiers, one class for each sample; task {run.task!r} has labels of "
            f"{labels.dtype} in {labels.dim()} dimensions."
        )
    return Samples(batches, labels)


def _size(sample: Sample) -> int:
    return sum(x.numel() for x in sample.values() if isinstance(x, Tensor))


@contextmanager
def restored_draws(model: nn.Module) -> Iterator[None]:
    """All random maps have the draw afterwards that they have now, and its age."""
    kept = [(phi, phi.draw_number, int(phi.age)) for phi in random_maps(model)]
    try:
        yield
    finally:
        for phi, number, age in kept:
            phi.resample(number)
            phi.age.fill_(age)


@torch.no_grad()
def logits_over_draws(model: nn.Module, samples: Samples, draws: Iterable[int] | None) -> Tensor:
    """Logits (R, N, K) in float64, for draws of these numbers in all maps; None: once, as the model is."""

    def outputs() -> Tensor:
        return torch.cat([model(**x).logits for x in samples.batches]).double()

    if draws is None:
        return outputs().unsqueeze(0)
    rows = []
    for number in draws:
        for phi in random_maps(model):
            phi.resample(number)
        rows.append(outputs())
    return torch.stack(rows)


def _gradients(model: nn.Module, logits: Tensor, labels: Tensor) -> dict[str, float] | None:
    """Figures of the gradients at the units before the last layer; None where there is a single logit."""
    layers = [x for x in model.get_submodule("head").modules() if isinstance(x, nn.Linear)]
    if logits.shape[2] == 1:
        return None
    return asdict(gradient_figures(classifier_gradients(logits, labels, layers[-1].weight)))


def _spectrum(model: nn.Module) -> dict[str, Any] | None:
    rows = spectra(model)
    if not rows:
        return None
    logs = squared_log_variances(model)
    more = {"squared_log_variance": _summary(logs)} if logs else {}
    return {"learned": all(x.learned for x in rows), **_summary(rows), **more}


def _summary(rows: Sequence[Spectrum]) -> dict[str, Any]:
    """Over all heads, and the rows themselves."""
    layers = {name: number for number, name in enumerate(dict.fromkeys(x.layer for x in rows), 1)}
    heads = [
        {"layer": layers[x.layer], "head": x.head + 1, "minimum": x.minimum, "maximum": x.maximum, "mean": x.mean}
        for x in rows
    ]
    return {
        "minimum": min(x.minimum for x in rows),
        "maximum": max(x.maximum for x in rows),
        "mean": sum(x.mean for x in rows) / len(rows),
        "heads": heads,
    }


def tables(record: Record) -> list[Table]:
    """Variance and accuracy by method (Fig. 5), eigenvalues by method and head (Tables 4, 9-12), gradients (Table 14).

    Heads are those of the first seed of each mixture.
    """
    runs = record.figures["runs"]
    seen: dict[tuple[str, str], Table] = {}
    for x in runs:
        if _learned(x) and (x["task"], x["attention"]) not in seen:
            title = f"{x['attention']}, seed {x['seed']}"
            seen[x["task"], x["attention"]] = eigenvalue_table(x["eigenvalues"], title)
    names = _names(runs)
    return [
        _variance(record, names),
        _accuracy(runs, names),
        *_eigenvalue_tables(runs, names),
        *seen.values(),
        *_gradient_tables(runs, names),
    ]


Names = dict[tuple[str, str], str]


def _names(runs: Sequence[Row]) -> Names:
    """Short names of methods, with the task where there are several."""
    pairs, several = unique(runs, "task", "attention"), len(unique(runs, "task")) > 1
    whole = {(task, name): f"{task}: {name}" if several else name for task, name in pairs}
    short = short_names(whole.values())
    return {key: short[name] for key, name in whole.items()}


def _variance(record: Record, names: Names) -> Table:
    settings, cells = record.settings, []
    for key, runs in methods_of(record.figures["runs"]).items():
        texts = ["draws nothing", "0", "0"]
        if not deterministic(runs):
            texts = [over_seeds(runs, x).text(digits) for x, digits in (("rsd", 3), ("rsd_median", 3), ("pi", 2))]
        cells.append((names[key], str(len(runs)), *texts, over_seeds(runs, "agv").text(3)))
    notes = [
        f"{a} and {b}: {row['r2']:.2f} (paper {row['paper']:.2f})"
        for row in record.figures["correlations"]
        for a, b in [row["measures"]]
        if row["methods"] > 2
    ]
    return table(
        f"Over {settings.draws} redraws, {settings.samples} samples; mean over seeds ± standard deviation over them",
        ("method", "seeds", "RSD", "median RSD", "PI, %", "AGV"),
        cells,
        caption=f"R² over methods: {', '.join(notes)}" if notes else None,
    )


def _accuracy(runs: Sequence[Row], names: Names) -> Table:
    cells = []
    for key, mine in methods_of(runs).items():
        own = Spread.of([x["redraws"]["own_draw"]["accuracy"] for x in mine])
        values = [over_seeds(mine, name) for name in ("voting_accuracy", "accuracy", "accuracy_deviation")]
        cells.append((names[key], *(x.text(1, 100) for x in (*values, own))))
    columns = ("method", "voting (VA)", "mean over draws", "deviation over draws", "own draw")
    return table("Accuracy, %", columns, cells, caption="own draw: the one that the model was saved with")


def _learned(run: Row) -> bool:
    end = run["eigenvalues"]["end"]
    return end is not None and bool(end["learned"])


def _eigenvalue_tables(runs: Sequence[Row], names: Names) -> list[Table]:
    cells = []
    for key, mine in methods_of(runs).items():
        sample = "" if all(map(_learned, mine)) else " (sample)"
        for more, part in ((sample, None), (": (log S²)²", "squared_log_variance")):
            ends = [(w, k) for k in ("maximum", "mean", "minimum") for w in ("start", "end")]
            found = [eigenvalues_over_seeds(mine, w, k, part) for w, k in ends]
            if None not in found:
                cells.append((f"{names[key]}{more}", *(f"{x.mean:.3g}" for x in found if x is not None)))
    heads = [f"{which}, {when}" for which in ("max", "mean", "min") for when in ("start", "end")]
    out = table(
        "Eigenvalues of the covariance of the frequencies, over all heads (Table 4)",
        ("method", *heads),
        cells,
        caption="sample: of the frequencies of one draw; (log S²)²: what the paper's tables of GMM-PRF seem to print",
    )
    return [out] if cells else []


def eigenvalue_table(eigenvalues: dict[str, Any], title: str) -> Table:
    """Eigenvalues of one run head by head, in the form of Tables 9-12, at the start and at the end.

    Args:
        eigenvalues: of `eigenvalue_statistics`.
    """
    start, end = (eigenvalues[x]["heads"] for x in ("start", "end"))
    rows = [
        (
            str(a["layer"]) if a["head"] == 1 else "",
            str(a["head"]),
            *(f"{x[name]:.3e}" for x in (a, b) for name in ("minimum", "maximum", "mean")),
        )
        for a, b in zip(start, end, strict=True)
    ]
    heads = (f"{x}, {when}" for when in ("start", "end") for x in ("Min.", "Max.", "Mean"))
    whole = f"Eigenvalues by head at the start and the end of training: {title}"
    return table(whole, ("Layer", "Head", *heads), rows, left=0)


def _gradient_tables(runs: Sequence[Row], names: Names) -> list[Table]:
    cells = []
    for x in runs:
        for row in x["gradients"]:
            if "absolute_mean" in row:
                accuracy = "" if row["accuracy"] is None else f"{100 * row['accuracy']:.1f}"
                values = [f"{row[k]:.4g}" for k in ("absolute_mean", "absolute_deviation", "redraw_deviation")]
                name = names[x["task"], x["attention"]]
                cells.append((name, str(x["seed"]), str(row["step"]), accuracy, *values))
    heads = ("seed", "step", "accuracy, %", "mean of |g|", "std of |g|", "std over draws")
    out = table("Gradients at the classifier's units (Table 14)", ("method", *heads), cells)
    return [out] if cells else []


BARS = {
    "rsd": ("Relative Standard Deviation (RSD)", 1.0),
    "pi": ("Prediction Inconsistency (PI), %", 1.0),
    "agv": ("Accuracy Gain with Voting (AGV)", 1.0),
    "voting_accuracy": ("Voting Accuracy (VA), %; line: mean", 100.0),
}


def picture(record: Record, path: Path) -> None:
    """Draw, for each task, the four measures as bars over methods, and below each pair of measures of variance.

    Error bars and the points of a method are its seeds. Eigenvalues before and after training come last.
    """
    runs = record.figures["runs"]
    tasks = unique(runs, "task")
    with drawing(path, (17, 8 * len(tasks) + 0.8), 2 * len(tasks), 4, dpi=110) as (figure, grid):
        for index, task in enumerate(tasks):
            methods = {name: x for (_, name), x in methods_of(where(runs, task=task)).items()}
            bars, below = grid[2 * index], grid[2 * index + 1]
            for axis, name in zip(bars, BARS, strict=True):
                _bars(axis, methods, name)
            found = where(record.figures["correlations"], task=task)
            for axis, pair in zip(below, PAPER, strict=False):
                _scatter(axis, methods, where(found, measures=list(pair))[0])
            _draw_eigenvalues(below[3], methods)
            bars[0].set_title(f"task {task}: {bars[0].get_title()}", fontsize="medium")
        handles, labels = grid[1, 0].get_legend_handles_labels()
        if handles:
            figure.legend(handles, labels, loc="outside lower center", ncols=min(4, len(labels)), fontsize="small")


Methods = dict[str, list[Row]]  # runs by attention


def _labels(methods: Methods) -> list[str]:
    """Names of methods, with their options, one a line, only where two have the same name; the legend has them all."""
    names = [x.partition(":")[0] for x in methods]
    both = zip(names, methods, strict=True)
    return [name if names.count(name) == 1 else whole.replace(":", "\n") for name, whole in both]


def _colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def _bars(axis: Any, methods: Methods, name: str) -> None:
    title, factor = BARS[name]
    base = 1.0 if name == "agv" else 0.0  # a bar is the gain or the loss
    for i, runs in enumerate(methods.values()):
        spread = over_seeds(runs, name)
        error = None if math.isnan(spread.deviation) else factor * spread.deviation
        axis.bar(i, factor * spread.mean - base, bottom=base, yerr=error, capsize=3, color=_colour(i))
        if name == "voting_accuracy":
            axis.plot((i - 0.4, i + 0.4), [100 * over_seeds(runs, "accuracy").mean] * 2, color="black")
    if name == "voting_accuracy":
        lowest = min(100 * value(x, y) for runs in methods.values() for x in runs for y in ("accuracy", name))
        axis.set_ylim(bottom=max(0.0, lowest - 5))  # below it there is nothing to see
    elif name == "agv":
        axis.axhline(1, color="grey", linewidth=1)
    else:
        axis.set_ylim(bottom=0)
    for i, runs in enumerate(methods.values()):
        if deterministic(runs) and name in ("rsd", "pi"):
            axis.text(i, 0, "draws\nnothing", ha="center", va="bottom", fontsize="x-small", color="grey")
    axis.set_title(title, fontsize="medium")
    axis.set_xticks(range(len(methods)), _labels(methods), fontsize="x-small", rotation=40, ha="right")
    axis.grid(True, axis="y", alpha=0.2)


def _scatter(axis: Any, methods: Methods, row: Row) -> None:
    pair = row["measures"]
    for i, (label, runs) in enumerate(methods.items()):
        if not deterministic(runs):
            points = [[value(run, VARIANCE[name]) for run in runs] for name in pair]
            style = {"color": _colour(i), "marker": MARKERS[i % len(MARKERS)]}
            axis.scatter(*points, s=16, alpha=0.5, **style)
            means = [[over_seeds(runs, VARIANCE[name]).mean] for name in pair]
            axis.scatter(*means, s=64, edgecolor="black", linewidth=0.6, label=label, **style)
    found = "needs three methods" if math.isnan(row["r2"]) else f"{row['r2']:.2f}"
    axis.set_title(f"R² {found}; paper {row['paper']:.2f}", fontsize="medium")
    axis.set_xlabel(pair[0] + (", %" if pair[0] == "PI" else ""))
    axis.set_ylabel(pair[1] + (", %" if pair[1] == "PI" else ""))
    axis.grid(True, alpha=0.2)


def _draw_eigenvalues(axis: Any, methods: Methods) -> None:
    """Mean and largest eigenvalue from the start to the end; dotted where it is that of a sample of frequencies."""
    from matplotlib.ticker import LogLocator, NullFormatter

    for i, runs in enumerate(methods.values()):
        for which, marker in (("maximum", "^"), ("mean", "o")):
            ends = [eigenvalues_over_seeds(runs, when, which) for when in ("start", "end")]
            values = [y.mean for y in ends if y is not None]
            if len(values) == 2:
                learned = all(map(_learned, runs))
                axis.plot((0, 1), values, color=_colour(i), marker=marker, linestyle="-" if learned else ":")
    axis.set_title("eigenvalues: largest (triangle), mean", fontsize="medium")
    axis.set_xlabel("dotted: covariance of the frequencies of a draw")
    axis.set_xticks((0, 1), ("start", "end of training"))
    axis.set_xlim(-0.2, 1.2)
    axis.set_yscale("log")
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter("{x:g}")  # labels are plain text here, and log scales write mathematics
    axis.yaxis.set_minor_formatter(NullFormatter())
    axis.grid(True, alpha=0.2)


def steps(settings: RedrawsSettings) -> int:
    """A step for each run."""
    return len(run_folders(settings))


def run_folders(settings: RedrawsSettings) -> list[Path]:
    """The folders of all runs, those of comparisons among them.

    Raises:
        ValueError: a folder that has none, or nothing at all.
    """
    folders: dict[Path, None] = {}
    for given in map(Path, settings.runs):
        inside = [given] if (given / RUN).is_file() else sorted(x.parent for x in given.glob(f"*/{RUN}"))
        if not inside:
            kind = f"has no {RUN}, nor has a folder in it" if given.is_dir() else "is no folder"
            raise ValueError(f"{given} {kind}; give the folder of a run or of a comparison.")
        folders |= dict.fromkeys(inside)
    if not folders:
        raise ValueError("there is nothing to measure, got no folder; give those of finished runs.")
    return list(folders)


def run(record: Record, log: Log, progress: Progress) -> None:
    """Measure all finished runs; what the record has of the same models and settings is taken from there.

    A run that is not finished, has diverged, has no classes or has lost its data is named and left out.

    Raises:
        ValueError: no run is left, or two of them are of the same task, attention and seed.
    """
    settings, before = record.settings, _kept(record)
    runs, left_out = list[Row](), dict[str, str]()
    for path in run_folders(settings):
        try:
            weights = _weights(path)
            measured = before.get(weights)
            if measured is None:
                log(f"{path.name}: {settings.draws} draws")
                measured = measure_run(path, settings, weights)
        except (ValueError, TrainingError, OSError) as problem:
            log(f"{path} is left out: {problem}")
            left_out[path.name] = str(problem)
        else:
            _check_new(runs, measured)
            runs.append(measured)
            record.figures = summarize(runs, left_out)
            record.save()
        progress()
    if not runs:
        raise ValueError(f"no run could be measured: {'; '.join(left_out.values())}")


def _check_new(runs: Sequence[Row], run: Row) -> None:
    """Raise ValueError if there is a run of the same task, attention and seed."""
    for x in where(runs, **{name: run[name] for name in ("task", "attention", "seed")}):
        raise ValueError(
            f"{x['folder']} and {run['folder']} are both of task {run['task']!r}, attention {run['attention']!r} and "
            f"seed {run['seed']}; give one of them, or measure them in two studies."
        )


def measure_run(folder: Path, settings: RedrawsSettings, weights: str = "") -> Row:
    """All figures of one run, of which ``weights``, the hash of the model, is part: by it a record is known again."""
    first, count = settings.first_draw, settings.gradients
    redraws = redraw_statistics(folder, draws=settings.draws, samples=settings.samples, first_draw=first)
    return {
        "folder": folder.name,
        **{name: redraws[name] for name in ("task", "attention", "seed")},
        "weights": weights,
        "redraws": redraws,
        "eigenvalues": eigenvalue_statistics(folder),
        "gradients": gradient_statistics(folder, draws=count, samples=count, first_draw=first) if count else [],
    }


def _weights(path: Path) -> str:
    if not (path / MODEL).is_dir():
        raise TrainingError(f"it is {standing(path)}")
    return weights_hash(path)


def _kept(record: Record) -> dict[str, Row]:
    """Runs that were measured before with the same settings, whichever the folders were, by the hash of the model."""
    kept = record.earlier()
    how = ("draws", "samples", "first_draw", "gradients")
    if any(kept.get("settings", {}).get(x) != getattr(record.settings, x) for x in how):
        return {}
    return {x["weights"]: x for x in kept["runs"]}


STUDY = Study(
    "redraws",
    "KL-Transformer (2110.08323), Fig. 5, 9, 10 and Tables 4, 9-12, 14",
    RedrawsSettings,
    steps,
    run,
    tables,
    picture,
    resumes=True,
    examples=(("out/sky-text --draws 100", "of all runs of a comparison"),),
)
