"""Figures of a report as elements of its page, which follow its colours."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any
from xml.etree import ElementTree

from kernelformer.formatting import visible

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


def legend_key(name: str, index: int) -> str:
    """The line and the marker of a label, for legends."""
    return _key(index).replace("@-", f"{name}-")


@cache
def _key(index: int) -> str:
    def draw(axis: Any) -> None:
        axis.plot([0, 1, 2], [0, 0, 0], markevery=[1], **style(index))
        axis.axis("off")

    return svg("@", "", draw, (0.6, 0.2)).replace('role="img" aria-label=""', 'class="key" aria-hidden="true"', 1)
