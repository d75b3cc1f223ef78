"""The picture of `studies.redraws`: bars as in Fig. 5 of KL-Transformer, and scatters as in Fig. 9 and 10."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from kernelformer.reports.figures import COLOURS, MARKERS
from kernelformer.studies.redraws_result import PAPER, VARIANCE, Method, Result

BARS = {
    "rsd": ("Relative Standard Deviation (RSD)", 1.0),
    "pi": ("Prediction Inconsistency (PI), %", 1.0),
    "agv": ("Accuracy Gain with Voting (AGV)", 1.0),
    "voting_accuracy": ("Voting Accuracy (VA), %; line: mean", 100.0),
}


def picture(result: Result, path: Path) -> None:
    """Draw, for each task, the four measures as bars over methods, and below each pair of measures of variance.

    Error bars and the points of a method are its seeds. Eigenvalues before and after training come last.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    tasks = list(dict.fromkeys(x.task for x in result.runs))
    with mpl.rc_context({"text.parse_math": False, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(17, 8 * len(tasks) + 0.8), layout="constrained")
        grid: Any = figure.subplots(2 * len(tasks), 4, squeeze=False)
        for index, task in enumerate(tasks):
            methods = [x for x in result.methods if x.task == task]
            bars, below = grid[2 * index], grid[2 * index + 1]
            for axis, name in zip(bars, BARS, strict=True):
                _bars(axis, methods, name)
            for axis, pair in zip(below, PAPER, strict=False):
                _scatter(axis, result, methods, task, pair)
            _eigenvalues(below[3], methods)
            bars[0].set_title(f"task {task}: {bars[0].get_title()}", fontsize="medium")
        handles, labels = grid[1, 0].get_legend_handles_labels()
        if handles:
            figure.legend(handles, labels, loc="outside lower center", ncols=min(4, len(labels)), fontsize="small")
        figure.savefig(path, dpi=110)


def _labels(methods: list[Method]) -> list[str]:
    """Names of methods, with their options, one a line, only where two have the same name; the legend has them all."""
    names = [x.attention.partition(":")[0] for x in methods]
    both = zip(names, methods, strict=True)
    return [name if names.count(name) == 1 else x.attention.replace(":", "\n") for name, x in both]


def _colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def _bars(axis: Any, methods: list[Method], name: str) -> None:
    title, factor = BARS[name]
    base = 1.0 if name == "agv" else 0.0  # a bar is the gain or the loss
    for i, x in enumerate(methods):
        spread = x.spread(name)
        error = None if math.isnan(spread.deviation) else factor * spread.deviation
        axis.bar(i, factor * spread.mean - base, bottom=base, yerr=error, capsize=3, color=_colour(i))
        if name == "voting_accuracy":
            axis.plot((i - 0.4, i + 0.4), [100 * x.spread("accuracy").mean] * 2, color="black")
    if name == "voting_accuracy":
        lowest = min(100 * run.value(which) for x in methods for run in x.runs for which in ("accuracy", name))
        axis.set_ylim(bottom=max(0.0, lowest - 5))  # below it there is nothing to see
    elif name == "agv":
        axis.axhline(1, color="grey", linewidth=1)
    else:
        axis.set_ylim(bottom=0)
    for i, x in enumerate(methods):
        if x.deterministic and name in ("rsd", "pi"):
            axis.text(i, 0, "draws\nnothing", ha="center", va="bottom", fontsize="x-small", color="grey")
    axis.set_title(title, fontsize="medium")
    axis.set_xticks(range(len(methods)), _labels(methods), fontsize="x-small", rotation=40, ha="right")
    axis.grid(True, axis="y", alpha=0.2)


def _scatter(axis: Any, result: Result, methods: list[Method], task: str, pair: tuple[str, str]) -> None:
    for i, x in enumerate(methods):
        if not x.deterministic:
            points = [[run.value(VARIANCE[name]) for run in x.runs] for name in pair]
            style = {"color": _colour(i), "marker": MARKERS[i % len(MARKERS)]}
            axis.scatter(*points, s=16, alpha=0.5, **style)
            means = [[x.spread(VARIANCE[name]).mean] for name in pair]
            axis.scatter(*means, s=64, edgecolor="black", linewidth=0.6, label=x.attention, **style)
    row = next(x for x in result.correlations() if x["task"] == task and tuple(x["measures"]) == pair)
    value = "needs three methods" if math.isnan(row["r2"]) else f"{row['r2']:.2f}"
    axis.set_title(f"R² {value}; paper {row['paper']:.2f}", fontsize="medium")
    axis.set_xlabel(pair[0] + (", %" if pair[0] == "PI" else ""))
    axis.set_ylabel(pair[1] + (", %" if pair[1] == "PI" else ""))
    axis.grid(True, alpha=0.2)


def _eigenvalues(axis: Any, methods: list[Method]) -> None:
    """Mean and largest eigenvalue from the start to the end; dotted where it is that of a sample of frequencies."""
    from matplotlib.ticker import LogLocator, NullFormatter

    for i, x in enumerate(methods):
        for which, marker in (("maximum", "^"), ("mean", "o")):
            ends = [x.eigenvalues(when, which) for when in ("start", "end")]
            values = [y.mean for y in ends if y is not None]
            if len(values) == 2:
                learned = all(run.eigenvalues["end"]["learned"] for run in x.runs)
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
