"""Tables of text and drawings by matplotlib, as studies, benchmarks and reports show them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.table import Table


def table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    left: int = 1,
    caption: str | None = None,
    **style: Any,
) -> Table:
    """A table for the terminal.

    Args:
        rows: a text for each column; missing ones at the end stay empty.
        left: number of columns with texts; all others are aligned to the right, as numbers.
    """
    out = Table(title=title, caption=caption, title_justify="left", caption_justify="left", **style)
    for index, name in enumerate(columns):
        out.add_column(name, justify="left" if index < left else "right", no_wrap=True)
    for row in rows:
        out.add_row(*row)
    return out


@contextmanager
def drawing(
    path: Path, size: tuple[float, float], lines: int = 1, columns: int = 1, *, dpi: int = 130, **options: Any
) -> Iterator[tuple[Any, Any]]:
    """A figure of matplotlib and its axes (lines, columns), written to a file at the end of the block.

    Args:
        options: of ``Figure.subplots``.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"text.parse_math": False}):
        figure = Figure(figsize=size, layout="constrained")
        yield figure, figure.subplots(lines, columns, squeeze=False, **options)
        figure.savefig(path, dpi=dpi)


def log_axis(axis: Any, base: int = 2) -> None:
    """Logarithmic scales; the numbers below the axis are written in full."""
    axis.set_xscale("log", base=base)
    axis.set_yscale("log")
    axis.xaxis.set_major_formatter("{x:.0f}")
