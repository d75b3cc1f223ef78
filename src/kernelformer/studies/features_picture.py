"""The picture of `studies.features`: error against the number of features, and against time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from kernelformer.formatting import human_time
from kernelformer.reports.figures import style
from kernelformer.studies.features_data import SYNTHETIC, synthetic_name
from kernelformer.studies.features_result import EXACT, UNIFORM, WINDOW_ALONE, Result, Row

INK = {UNIFORM: "#808080", WINDOW_ALONE: "#1b1e23"}
GREYS = (14, 15)  # of the colours of matplotlib's tab20: those of a reference
TOP = 3.0
BOTTOM = 0.01  # what has as many landmarks as there are keys is exact, and would press the rest together
Panel = Callable[[Any], None]


def picture(result: Result, path: Path) -> None:
    """Draw one panel for each norm and for each model and window: errors over features, and over time below or beside.

    Lines across: uniform attention (dotted) and the window alone (dashed); the vertical line: the time of exact
    attention.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    grid = _panels(result)
    width, height = max(len(x) for x in grid), len(grid)
    with mpl.rc_context({"text.parse_math": False, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(3.3 * width, 2.7 * height + 1.2), layout="constrained")
        axes = figure.subplots(height, width, squeeze=False)
        for line, panels in zip(axes, grid, strict=True):
            for axis in line[len(panels) :]:
                axis.set_visible(False)
            for axis, draw in zip(line, panels, strict=False):
                draw(axis)
                _scale(axis)
            line[0].set_ylabel("error of the output")
        _legend(figure, result)
        figure.savefig(path, dpi=120)


def _panels(result: Result) -> list[list[Panel]]:
    """Panels by row: synthetic ones of the first window, over features and over time; a row for each model."""
    settings = result.settings
    first = settings.window[0]

    def panel(name: str, window: int, by_time: bool = False, rows: bool = False) -> Panel:
        return lambda axis: _panel(axis, result, name, window, by_time, rows)

    grid = [
        [panel(synthetic_name(kind, norm), first, by_time) for norm in settings.norms]
        for kind in SYNTHETIC
        for by_time in (False, True)
        if settings.norms
    ]
    for name in (name for name, x in result.cases.items() if x.norm is None):
        pairs = [panel(name, window, by_time) for window in settings.window for by_time in (False, True)]
        grid.append([*pairs, panel(name, first, rows=True)])
    return grid


def _scale(axis: Any) -> None:
    """Logarithmic errors with plain numbers; what is above `TOP` is of no use, and would press the rest together."""
    axis.set_yscale("log", subs=[])
    axis.yaxis.set_major_locator(_ticks(1, 2, 5))
    axis.yaxis.set_major_formatter("{x:g}")
    low, high = axis.get_ylim()
    axis.set_ylim(max(min(low, TOP / 10), BOTTOM), min(high, TOP))
    axis.grid(True, alpha=0.15)


def _ticks(*digits: int) -> Any:
    """Ticks of a logarithmic axis at these digits; matplotlib's own crowd where the range is small."""
    from matplotlib.ticker import FixedLocator

    return FixedLocator([x * 10.0**power for power in range(-8, 5) for x in digits])


def _styles(result: Result) -> dict[str, dict[str, Any]]:
    """Look of each attention: there are more than a report has colours for."""
    import matplotlib as mpl

    dark_first = [mpl.colormaps["tab20"](i) for i in (*range(0, 20, 2), *range(1, 20, 2)) if i not in GREYS]
    looks = ({**style(i), "color": dark_first[i % 18], "markersize": 4} for i in range(len(result.attentions)))
    return dict(zip(result.attentions, looks, strict=True))


def _panel(axis: Any, result: Result, name: str, window: int, by_time: bool, rows: bool) -> None:
    """Draw the curves of all attentions in one case."""

    def value(row: Row) -> tuple[float, float]:
        return row.row if rows else row.output

    curves = result.curves(name, window)
    for attention, look in _styles(result).items():
        points = [
            (x, *value(row))
            for row in curves.get(attention, [])
            if (x := result.seconds(row) if by_time else row.size) is not None
        ]
        if points:
            places, values, spread = zip(*points, strict=True)
            axis.errorbar(places, values, yerr=spread, **look)
    for reference, colour in INK.items():
        if reference in curves:
            axis.axhline(value(curves[reference][0])[0], color=colour, linestyle=":" if reference == UNIFORM else "--")
    exact = result.seconds(curves[EXACT][0])
    if by_time:
        axis.set_xscale("log", subs=[])
        axis.xaxis.set_major_locator(_ticks(1, 3))
        axis.xaxis.set_major_formatter(lambda x, _: human_time(x))
        if exact is not None:
            axis.axvline(exact, color=INK[WINDOW_ALONE], linewidth=0.8)
    else:
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter("{x:.0f}")
    axis.set_xlabel(f"time, {result.settings.time_length} tokens" if by_time else "features or landmarks")
    what = ", rows (total variation)" if rows else ""
    axis.set_title(f"{name}{f', window {window}' if window else ''}{what}", size=9)


def _legend(figure: Any, result: Result) -> None:
    from matplotlib.lines import Line2D

    lines = [Line2D([], [], **look, label=result.label(name)) for name, look in _styles(result).items()]
    lines += [
        Line2D([], [], color=colour, linestyle=":" if name == UNIFORM else "--", label=name)
        for name, colour in INK.items()
    ]
    lines.append(Line2D([], [], color=INK[WINDOW_ALONE], linewidth=0.8, label="time of exact attention"))
    figure.legend(handles=lines, loc="outside lower center", ncols=3, fontsize="small", frameon=False)
