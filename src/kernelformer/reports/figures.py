"""Figures of a report as elements of its page, which follow its colours."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any
from xml.etree import ElementTree

import numpy as np

from kernelformer.formatting import visible
from kernelformer.reports.comparison import Comparison, Curve

INK = "#1b1e23"  # becomes the page's own text colour, so that figures follow light and dark
COLOURS = ("#1a7fc3", "#d55e00", "#009e73", "#c2679a", "#b87d00", "#8a63c9", "#808080")  # 3:1 on light and dark cards
MARKERS = "osD^vP<*"
STYLES = len(COLOURS) * len(MARKERS)  # 7 and 8 have no common divisor, so that all pairs come
LINES = ("-", "--", "-.", ":")


def style(index: int) -> dict[str, Any]:
    """Colour, marker and line of a label by its place."""
    return {"color": COLOURS[index % 7], "marker": MARKERS[index % 8], "linestyle": LINES[index % 4]}


def svg(name: str, alt: str, draw: Callable[[Any], None], size: tuple[float, float]) -> str:
    """A figure as an element of the page; ``name`` keeps its references apart from those of other figures."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    inked = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color", "grid.color")
    rc: dict[Any, Any] = {**dict.fromkeys(inked, INK), "axes.facecolor": "none", "axes.grid": True, "grid.alpha": 0.14}
    rc |= {"axes.spines.top": False, "axes.spines.right": False, "lines.markersize": 4.5, "lines.linewidth": 1.7}
    rc |= {"font.size": 11.5}  # on a narrow screen a figure is shown smaller than it is drawn
    rc |= {"text.parse_math": False, "svg.fonttype": "none", "svg.hashsalt": name}  # a $ in a label is a $
    buffer = io.BytesIO()
    with mpl.rc_context(rc), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # the browser's font has it, or shows a box
        figure = Figure(figsize=size, layout="constrained", facecolor="none")
        axes = figure.subplots()
        draw(axes)
        _plain_numbers(axes.xaxis, axes.get_xlim())
        _plain_numbers(axes.yaxis, axes.get_ylim())
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})

    def own(key: str, value: str) -> str:
        if key in ("id", "href"):
            return f"{name}-{value}" if key == "id" else f"#{name}-{value[1:]}"
        return value.replace("url(#", f"url(#{name}-").replace(INK, "currentColor")

    root = ElementTree.fromstring(buffer.getvalue())
    for node in root.iter():
        for child in [c for c in node if c.tag.endswith(("}metadata", "}style"))]:
            node.remove(child)
        plain = ((key.rpartition("}")[2], value) for key, value in node.attrib.items())  # without their name spaces
        node.tag, node.attrib = node.tag.rpartition("}")[2], {key: own(key, value) for key, value in plain}
    root.attrib = {"viewBox": root.attrib["viewBox"], "role": "img", "aria-label": visible(alt)}
    return ElementTree.tostring(root, encoding="unicode")


def _plain_numbers(axis: Any, limits: tuple[float, float]) -> None:
    """Write the numbers of a logarithmic axis as numbers: by default they are formulas, which pages do not read."""
    from matplotlib.ticker import LogFormatter

    if axis.get_scale() == "log":
        low, high = sorted(limits)
        narrow = low > 0 and high / low < 100  # fewer than two powers of ten: those between them are needed too
        if isinstance(axis.get_major_formatter(), LogFormatter):
            axis.set_major_formatter(lambda x, _: f"{x:,g}")
            axis.set_minor_formatter(lambda x, _: f"{x:,g}" if narrow and f"{x:.0e}"[0] in "25" else "")


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


def legend_key(name: str, index: int) -> str:
    """The line and the marker of a label, for legends."""
    return _key(index).replace("@-", f"{name}-")


@cache
def _key(index: int) -> str:
    def draw(axis: Any) -> None:
        axis.plot([0, 1, 2], [0, 0, 0], markevery=[1], **style(index))
        axis.axis("off")

    return svg("@", "", draw, (0.6, 0.2)).replace('role="img" aria-label=""', 'class="key" aria-hidden="true"', 1)
