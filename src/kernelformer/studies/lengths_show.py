"""What the study of lengths has found, as tables and as a picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from kernelformer.formatting import human_bytes, human_ratio, human_time, short_names
from kernelformer.measure.lengths import BASELINES, TOKEN
from kernelformer.reports.figures import style
from kernelformer.studies.lengths import Found, Row


def tables(found: Found) -> list[Table]:
    """One for each pass, with ratios to the first baseline (above 1: better than it), and the crossovers."""
    kinds = dict.fromkeys(row.kind for row in found.rows)
    out = [_table(found, [row for row in found.rows if row.kind == kind]) for kind in kinds]
    last = Table(title="From which length on the converted model stays below the original", title_justify="left")
    for name in ("pass", "attention", "against"):
        last.add_column(name, no_wrap=True)
    for name in ("time", "memory"):
        last.add_column(name, justify="right", no_wrap=True)
    short = short_names(x["attention"] for x in found.crossovers())
    for x in found.crossovers():
        last.add_row(x["kind"], short[x["attention"]], x["against"], x["seconds in words"], x["peak in words"])
    return [*out, last]


def headline(found: Found) -> str:
    """The model in one line."""
    about = found.about
    return f"{about['model']} ({about['kind']}, {about['weights']} weights, {about['task']})"


def _table(found: Found, rows: Sequence[Row]) -> Table:
    kind, first = rows[0].kind, found.baselines[0]
    skipped = [f"not run: {row.attention}, {row.length} tokens: {row.note}" for row in rows if row.note]
    out = Table(
        title=f"{headline(found)}, {kind}",
        caption="\n".join([*found.stretched, *skipped]) or None,
        title_justify="left",
        caption_justify="left",
    )
    out.add_column("context" if kind == TOKEN else "tokens", justify="right", no_wrap=True)
    out.add_column("attention", no_wrap=True)
    for name in ("time", f"{first} / it", "cache" if kind == TOKEN else "peak", f"{first} / it", "rounds"):
        out.add_column(name, justify="right", no_wrap=True)
    rows = sorted(rows, key=lambda x: x.length)
    short = short_names(row.attention for row in rows)
    for row, after in zip(rows, [*rows[1:], None], strict=True):
        time, peak = (_ratio(found, row, what) for what in ("seconds", "peak"))
        out.add_row(
            str(row.length),
            short[row.attention],
            "not run" if row.seconds is None else human_time(row.seconds),
            time,
            human_bytes(row.peak),
            peak,
            str(row.rounds or ""),
            end_section=after is None or after.length != row.length,
        )
    return out


def _ratio(found: Found, row: Row, what: str) -> str:
    base, own = found.curve(row.kind, found.baselines[0], what).get(row.length), getattr(row, what)
    return human_ratio(base / own) if base and own and row.attention != found.baselines[0] else ""


def picture(found: Found, path: Path) -> None:
    """Time and memory over the length, one row for each pass; crossovers with the first baseline are ringed."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    kinds = list(dict.fromkeys(row.kind for row in found.rows))
    names = list(dict.fromkeys(row.attention for row in found.rows))
    looks = {name: style(index) for index, name in enumerate(names)}
    for name in (x for x in names if x in BASELINES):
        looks[name] |= {"color": "#1b1e23" if name == found.baselines[0] else "#808080"}
    with mpl.rc_context({"text.parse_math": False, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(10, 4.0 * len(kinds) + 0.4), layout="constrained")
        axes = figure.subplots(len(kinds), 2, squeeze=False)
        for line, kind in zip(axes, kinds, strict=True):
            _panel(line[0], found, kind, "seconds", looks)
            _panel(line[1], found, kind, "peak", looks)
            line[0].legend(fontsize=8, frameon=False)
        note = "; positions stretched" if found.stretched else ""
        figure.suptitle(f"{headline(found)}{note}", size=11)
        figure.savefig(path, dpi=140)


def _panel(axis: Any, found: Found, kind: str, what: str, looks: dict[str, dict[str, Any]]) -> None:
    show = human_time if what == "seconds" else human_bytes
    for name, look in looks.items():
        curve = found.curve(kind, name, what)
        if curve:
            label = f"original, {name}" if name in BASELINES else name
            axis.plot(list(curve), list(curve.values()), label=label, **look | {"markersize": 5})
    axis.set_xscale("log", base=2)
    axis.set_yscale("log", base=10 if what == "seconds" else 2)
    if what == "seconds":
        axis.yaxis.get_major_locator().set_params(subs=(1, 2, 5))
    low, high = axis.get_ylim()
    if high < 5 * low:  # else a few percent would fill the panel
        middle = math.sqrt(low * high)
        axis.set_ylim(middle / 5**0.5, middle * 5**0.5)
    lengths = sorted({row.length for row in found.rows if row.kind == kind})
    axis.set_xticks(lengths, [f"{x:,}" for x in lengths])
    axis.minorticks_off()
    axis.yaxis.set_major_formatter(lambda y, _: show(y))
    axis.set_xlabel("context, tokens" if kind == TOKEN else "tokens")
    words = {"seconds": "time", "peak": "cache" if kind == TOKEN else "peak memory beyond the weights"}
    axis.set_title(f"{words[what]}, {kind}", size=10)
    axis.grid(True, alpha=0.15)
    for x in found.crossovers():
        at = x[what]
        if (x["kind"], x["against"]) == (kind, found.baselines[0]) and at is not None:
            height = between(found.curve(kind, x["attention"], what), at)
            colour = looks[x["attention"]]["color"]
            axis.plot([at], [height], "o", mfc="none", mec=colour, markersize=13, zorder=5)
            axis.axvline(at, color=colour, linewidth=0.8, linestyle=":")
            foot = {"transform": axis.get_xaxis_transform(), "ha": "right", "va": "bottom"}
            axis.text(at, 0.02, f"{at:,.0f}", rotation=90, size=8, color=colour, **foot)


def between(curve: dict[int, float], at: float) -> float:
    """The value at a length between two measured ones, on a line on logarithmic scales."""
    first = max(n for n in curve if n <= at)
    last = min(n for n in curve if n >= at)
    share = 0.0 if first == last else math.log(at / first) / math.log(last / first)
    return float(curve[first] * (curve[last] / curve[first]) ** share)
