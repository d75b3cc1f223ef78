"""The benchmark's rows as a table and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from kernelformer.bench.run import Row


def human_time(seconds: float) -> str:
    """Three digits and a unit."""
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def human_bytes(count: int | None) -> str:
    """Mebibytes."""
    if count is None:
        return ""
    size = count / 2**20
    return f"{size:,.0f} MiB" if size >= 9.5 else f"{size:.1f} MiB"


def table(rows: Sequence[Row], ours: str, heaps: Sequence[str]) -> Table:
    """One block of rows per case, with the ratio to our first method: above 1 means that ours is faster or leaner."""
    out = Table(title="Speed and peak memory", caption=f"ratios: against {ours}; above 1, {ours} is better")
    out.add_column("case", overflow="fold")
    out.add_column("contender")
    for heap in heaps:
        out.add_column(f"time, heap {heap}", justify="right")
        out.add_column("ratio", justify="right")
    for name in ("peak memory", "beyond results", "ratio", "error"):
        out.add_column(name, justify="right")
    last = None
    for row in rows:
        base = next((x for x in rows if x.case == row.case and x.name == ours), None)
        cells = [row.case.title if row.case != last else "", row.name]
        if row.note:
            out.add_row(*cells, row.note, end_section=_ends(rows, row))
            last = row.case
            continue
        for heap in heaps:
            mine = base.seconds.get(heap) if base else None
            cells.append(human_time(row.seconds[heap]))
            cells.append("" if mine is None or row is base else f"{row.seconds[heap] / mine:.2f}x")
        beyond = None if row.peak is None or row.results is None else row.peak - row.results
        ratio = ""
        if row.peak and base and base.peak and row is not base:
            ratio = f"{row.peak / base.peak:.1f}x"
        cells += [human_bytes(row.peak), human_bytes(beyond), ratio, "" if row.error is None else f"{row.error:.0e}"]
        out.add_row(*cells, end_section=_ends(rows, row))
        last = row.case
    return out


def _ends(rows: Sequence[Row], row: Row) -> bool:
    index = next(i for i, x in enumerate(rows) if x is row)
    return index + 1 == len(rows) or rows[index + 1].case != row.case


def plot(rows: Sequence[Row], path: Path, heap: str) -> None:
    """Time against length, one panel per kind of case, a line per contender."""
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
        axis.set_title(f"{task}{', forward + backward' if backward else ''}")
        axis.set_xlabel("context" if task == "decode" else "length")
        axis.set_ylabel("ms")
        axis.grid(True, which="both", alpha=0.2)
        axis.legend(fontsize="small")
    figure.savefig(path, dpi=130)
    plt.close(figure)
