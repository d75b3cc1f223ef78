"""How the study of methods on a pretrained model is shown."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from kernelformer.formatting import short_names
from kernelformer.studies.conversion import Row


def table(rows: Sequence[Row]) -> Table:
    """For the terminal."""
    first = next(x for x in rows if x.method == "original")
    names = list(first.scores["original"])
    out = Table(title="Quality of converted models, held-out text: as converted, and distilled")
    out.add_column("method", no_wrap=True)
    for name in names:
        for stage in ("converted", "distilled"):
            out.add_column(f"{name}, {stage}", justify="right")
    out.add_column("steps", justify="right")
    out.add_row("original", *(f"{first.scores['original'][x]:.4f}" for x in names for _ in range(2)), "")
    short = short_names(row.method for row in rows)
    for row in rows:
        if row is first:
            continue
        if row.problem:
            out.add_row(short[row.method], row.problem[:60])
            continue
        cells = [
            f"{row.scores[stage][x]:.4f}" if stage in row.scores else ""
            for x in names
            for stage in ("converted", "distilled")
        ]
        out.add_row(short[row.method], *cells, " + ".join(str(x) for x in row.steps.values()))
    return out


def picture(rows: Sequence[Row], path: Path) -> None:
    """The first score of each method, as converted and distilled, against the original's."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    first = next(x for x in rows if x.method == "original")
    name, best = next(iter(first.scores["original"].items()))
    shown = [x for x in rows if x is not first and not x.problem]
    figure, axis = plt.subplots(figsize=(7, 0.45 * len(shown) + 1.6), constrained_layout=True)
    for place, row in enumerate(shown):
        values = [row.scores[x][name] for x in ("converted", "distilled") if x in row.scores]
        axis.plot(values, [place] * len(values), color="0.7", zorder=1)
        for value, colour in zip(values, ("C1", "C0"), strict=False):
            axis.scatter([value], [place], color=colour, zorder=2)
    axis.axvline(best, color="0.4", linestyle=":")
    for label, colour in (("as converted", "C1"), ("distilled", "C0")):
        axis.scatter([], [], color=colour, label=label)
    axis.plot([], [], color="0.4", linestyle=":", label="original")
    axis.set_yticks(range(len(shown)), [x.method for x in shown])
    axis.invert_yaxis()
    if name == "perplexity":
        axis.set_xscale("log")
    axis.set_xlabel(name)
    axis.grid(True, axis="x", alpha=0.2)
    figure.legend(loc="outside upper center", ncols=3, fontsize="small")
    figure.savefig(path, dpi=130)
    plt.close(figure)
