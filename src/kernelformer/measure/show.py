"""Tables and the picture of the benchmark's rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from kernelformer.formatting import human_bytes, human_ratio, human_time, short_names
from kernelformer.measure.benchmark import Row


def tables(rows: Sequence[Row], ours: str, heaps: Sequence[str]) -> list[Table]:
    """Return a table for each case, with ratios to our first method: above 1 means that ours is faster or leaner."""
    return [
        _table([row for row in rows if row.case == case], ours, heaps)
        for case in dict.fromkeys(row.case for row in rows)
    ]


def _table(rows: Sequence[Row], ours: str, heaps: Sequence[str]) -> Table:
    base = next((row for row in rows if row.name == ours and not row.note), None)
    left_out = "; ".join(f"{row.name}: {row.note}" for row in rows if row.note)
    out = Table(
        title=rows[0].case.title,
        caption=left_out or None,
        title_justify="left",
        caption_justify="left",
        box=None,
        padding=(0, 2, 0, 0),
    )
    weighed = any(row.peak is not None for row in rows)
    out.add_column("contender", no_wrap=True)
    for name in (*(f"heap {heap}" for heap in heaps), *(("peak", "beyond") if weighed else ()), "error"):
        out.add_column(name, justify="right", no_wrap=True)
    short = short_names(row.name for row in rows)
    for row in rows:
        if row.note:
            continue
        cells = [short[row.name]]
        for heap in heaps:
            ratio = "" if base is None or row is base else f" {human_ratio(row.seconds[heap] / base.seconds[heap])}"
            cells.append(human_time(row.seconds[heap]) + ratio)
        if row.peak is not None and row.results is not None:
            ratio = f" {human_ratio(row.peak / base.peak)}" if base and base.peak and row is not base else ""
            cells += [human_bytes(row.peak) + ratio, human_bytes(row.peak - row.results)]
        out.add_row(*cells, "" if row.error is None else f"{row.error:.0e}")
    return out


def plot(rows: Sequence[Row], path: Path, heap: str) -> None:
    """Draw time against length, one panel per kind of case, a line per contender."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    kinds = list(dict.fromkeys((row.case.task, row.case.backward) for row in rows))
    names = list(dict.fromkeys(row.name for row in rows))
    rows_of_panels = -(-len(kinds) // 3)
    figure, axes = plt.subplots(
        rows_of_panels,
        min(3, len(kinds)),
        figsize=(4.2 * min(3, len(kinds)), 3.8 * rows_of_panels),
        squeeze=False,
        constrained_layout=True,
    )
    for axis in axes.flat[len(kinds) :]:
        axis.set_visible(False)
    for axis, (task, backward) in zip(axes.flat, kinds, strict=False):
        for index, name in enumerate(names):
            points = [
                (row.case.length, row.seconds[heap] * 1e3)
                for row in rows
                if (row.case.task, row.case.backward, row.name) == (task, backward, name) and heap in row.seconds
            ]
            if points:
                axis.plot(*zip(*points, strict=True), marker="o", label=name, color=f"C{index}")
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.xaxis.set_major_formatter("{x:.0f}")
        axis.set_title(f"{task}{', forward + backward' if backward else ''}{rows[0].case.positions}")
        axis.set_xlabel("context" if task == "decode" else "length")
        axis.set_ylabel("ms")
        axis.grid(True, which="both", alpha=0.2)
        axis.legend(fontsize="small")
    figure.savefig(path, dpi=130)
    plt.close(figure)
