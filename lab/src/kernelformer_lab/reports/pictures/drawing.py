"""How pictures of the documentation look: no background, and inks that can be read on light pages and on dark ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kernelformer_lab.reports.tables.records import Records

Picture = Callable[[Records, Path], None]

INK = "#7d8590"  # contrast above 3.5 on white and on the darkest pages in use
EXACT, LINEAR, THIRD, FAINT = "#d55e00", "#1a7fc3", "#009e73", "#7d859040"


@contextmanager
def figure(path: Path, about: str, size: tuple[float, float]) -> Iterator[Any]:
    """A figure that is saved as SVG when the block ends; the same input gives the same file.

    Args:
        path: of the file.
        about: what it shows, in words, with its numbers; it is kept in the file.
        size: in inches.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    inked = ("text.color", "axes.edgecolor", "axes.labelcolor", "axes.titlecolor", "xtick.color", "ytick.color")
    rc: dict[Any, Any] = {
        **dict.fromkeys(inked, INK),
        "axes.facecolor": "none",
        "font.size": 12.5,
        "axes.titlesize": 13.5,
    }
    rc |= {"axes.spines.top": False, "axes.spines.right": False, "lines.linewidth": 2.2, "lines.markersize": 6}
    rc |= {"grid.color": INK, "grid.alpha": 0.25, "legend.frameon": False, "legend.labelcolor": INK}
    rc |= {"svg.hashsalt": path.stem, "svg.fonttype": "path"}
    with mpl.rc_context(rc):
        drawn = Figure(figsize=size, layout="constrained", facecolor="none")
        yield drawn
        about_it = {"Date": None, "Creator": "kernelformer", "Description": about}
        drawn.savefig(path, format="svg", dpi=150, metadata=about_it)


def box(axis: Any, corner: tuple[float, float], size: tuple[float, float], text: str, colour: str) -> None:
    """A rectangle with a name in it, for a matrix or a state.

    Args:
        axis: to draw on.
        corner: the lower left one.
        size: width and height.
        text: in its middle.
        colour: of the edge, and faintly of the inside.
    """
    from matplotlib.patches import Rectangle

    axis.add_patch(Rectangle(corner, *size, facecolor=f"{colour}30", edgecolor=colour, linewidth=1.6))
    middle = (corner[0] + size[0] / 2, corner[1] + size[1] / 2)
    axis.text(*middle, text, ha="center", va="center", fontsize=12)


def bare(axis: Any, width: float, height: float, title: str = "") -> None:
    """An axis without scales, for a drawing."""
    axis.set(xlim=(0, width), ylim=(0, height), xticks=[], yticks=[])
    axis.spines[:].set_visible(False)
    axis.set_aspect("equal")
    if title:
        axis.set_title(title)
