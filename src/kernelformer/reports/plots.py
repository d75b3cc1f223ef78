"""Draw comparisons: learning curves, points with errors, bars, and the cost of decoding."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from kernelformer.formatting import visible
from kernelformer.reports.comparison import Comparison, Curve
from kernelformer.reports.figures import COLOURS, INK, LINES, style


def draw_curves(
    axis: Any,
    comparison: Comparison,
    curves: Mapping[int, Curve],
    x: int,
    mark: bool,
    places: Mapping[str, int] | None = None,
) -> None:
    """Means and bands of runs with a result, others alone.

    Args:
        axis: to draw on.
        comparison: of the runs.
        curves: by the place of the run.
        x: 0 for steps, 1 for seconds.
        mark: whether points are few, and have markers of their own.
        places: the style of each label; None: by their order.
    """
    alone, frame = [], []
    for place, label in enumerate(comparison.labels):
        index = place if places is None else places[label]
        mine = [i for i, run in enumerate(comparison.runs) if run.label == label and curves[i]]
        whole = [i for i in mine if comparison.runs[i].scored]
        alone += [(index, i) for i in mine if i not in whole]
        common = sorted(set.intersection(*(set(curves[i]) for i in whole))) if whole else []
        if not common:
            continue
        common = common[:: -max(1, len(common) // 400)][::-1]  # more points than pixels would only make a large file
        both = np.array([[curves[i][step] for step in common] for i in whole])  # (runs, steps, 2)
        at = both[..., 0].mean(0) if x else np.array(common)
        mean = both[..., 1].mean(0)
        spread = both[..., 1].std(0, ddof=1) if len(whole) > 1 else 0 * mean
        axis.plot(at, mean, **style(index) | {"markevery": max(1, len(at) // (10 if mark else 5))})
        axis.fill_between(at, mean - spread, mean + spread, color=COLOURS[index % 7], alpha=0.2, linewidth=0)
        late = slice(len(at) // 8, None)
        frame += [*(mean - spread)[late], *(mean + spread)[late]]
    room = 0.05 * (max(frame) - min(frame)) or 0.5 if frame else math.inf
    low, high = min(frame, default=0) - room, max(frame, default=0) + room
    for index, i in alone:
        line = [(step, *curves[i][step]) for step in sorted(curves[i])]
        thin = {"marker": "" if len(line) > 1 else "o", "linewidth": 0.8}
        axis.plot([row[x] for row in line], [row[2] for row in line], **style(index) | thin)
        if comparison.runs[i].diverged:
            end = line[-1][x], min(max(line[-1][2], low), high)
            axis.plot(*end, "X", color=COLOURS[index % 7], mec=INK, markersize=9, clip_on=False, zorder=5)
    if frame:
        axis.set_ylim(low, high)  # neither the start nor a run that blows up may flatten the rest
    axis.set_xlabel("training time, s" if x else "step")
    if not x:
        axis.locator_params(axis="x", integer=True)


def draw_points(axis: Any, rows: Sequence[tuple[int, float, float, float]], name: str) -> None:
    """Points with error bars: rows of style, x, mean and deviation; ``name`` is that of the axis."""
    for index, at, mean, spread in rows:
        marks = style(index) | {"linestyle": "none", "markersize": 6.5, "elinewidth": 1.2, "capsize": 2.5}
        axis.errorbar([at], [mean], [spread], **marks)
    axis.margins(0.08)
    axis.xaxis.set_major_formatter(lambda x, _: f"{x:,g}" if x < 1e4 else f"{x / 1e3:,g}k")
    axis.set_xlabel(name)


def draw_sizes(
    axis: Any, series: Mapping[int, Sequence[tuple[int, float, float]]], levels: Mapping[int, float], name: str
) -> None:
    """Means with error bars over the number of features.

    Args:
        axis: to draw on.
        series: by style, rows of size, mean and deviation.
        levels: by style, means of what has no such number.
        name: of the axis.
    """
    for index, level in levels.items():  # first: the frame is fitted to what comes later
        axis.axhline(level, color=COLOURS[index % 7], linestyle=LINES[index % 4], linewidth=1.2)
    for index, rows in series.items():
        at, mean, spread = zip(*rows, strict=True)
        axis.errorbar(at, mean, spread, **style(index) | {"elinewidth": 1.2, "capsize": 3})
    sizes = sorted({row[0] for rows in series.values() for row in rows})
    axis.set_xscale("log", base=2)
    axis.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axis.minorticks_off()
    axis.set_xlabel(name)


def draw_bars(axis: Any, comparison: Comparison, values: Mapping[str, float], show: Callable[[float], str]) -> None:
    """Draw one bar for each label."""
    colours = [COLOURS[comparison.labels.index(label) % 7] for label in values]
    bars = axis.barh(range(len(values)), list(values.values()), color=colours, height=0.62)
    axis.bar_label(bars, [show(value) for value in values.values()], padding=3, fontsize=10.5)
    short = [label if len(label) < 25 else label[:12] + "…" + label[-11:] for label in map(visible, values)]
    axis.set_yticks(range(len(values)), short)
    axis.set(ylim=(len(values) - 0.5, -0.5), xmargin=0.2, xticks=[])
    axis.grid(False)
    axis.spines["bottom"].set_visible(False)


def draw_decode(axis: Any, comparison: Comparison, column: int, show: Callable[[float], str]) -> None:
    """Over the context: seconds per token (``column`` 1) or bytes of state (2)."""
    for row in comparison.summary():
        points = [(r[0], r[column]) for r in row.decode if r[0] > 0 and r[column] > 0]  # both axes are logarithmic
        if points:
            axis.plot(*zip(*points, strict=True), **style(comparison.labels.index(row.label)))
    axis.set_xscale("log", base=2)
    axis.set_yscale("log", base=10 if column == 1 else 2)  # round seconds, and round numbers of bytes
    if column == 1:
        axis.yaxis.get_major_locator().set_params(subs=(1, 2, 5))
    axis.minorticks_off()
    axis.xaxis.set_major_formatter(lambda x, _: f"{x / 1024:g}k" if x >= 1024 else f"{x:g}")
    axis.yaxis.set_major_formatter(lambda y, _: show(y))
    axis.set_xlabel("context, tokens")
