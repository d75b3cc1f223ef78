"""The result of the study of lengths: curves, crossovers, tables and the picture."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from kernelformer.formatting import human_bytes, human_ratio, human_time, short_names
from kernelformer.measure.harness import over_limit, too_large
from kernelformer.measure.lengths import BASELINES, TOKEN
from kernelformer.reports.figures import style
from kernelformer.studies.base import read_record


@dataclass
class Row:
    """The figures of one contender at one length, in one pass."""

    kind: str  # one of `PASSES`, or `TOKEN` after a context
    length: int
    attention: str
    seconds: float | None = None  # median
    rounds: int = 0
    peak: int | None = None  # bytes of a pass beyond the weights; of the cache after a context
    note: str = ""  # why it was not run


@dataclass
class Result:
    """The rows that the study has measured, as curves over the length.

    Args:
        about: the model, and all that its figures depend on.
        baselines: contenders that are the original; ratios and marks in the picture refer to the first.
        rows: of all contenders, passes and lengths.
        stretched: a line for each table of positions that was, for the longest length.
    """

    about: dict[str, Any]
    baselines: Sequence[str] = BASELINES
    rows: list[Row] = field(default_factory=list)
    stretched: list[str] = field(default_factory=list)

    def row(self, kind: str, length: int, name: str) -> Row:
        """Return the row of a contender, a new one where there is none."""
        for row in self.rows:
            if (row.kind, row.length, row.attention) == (kind, length, name):
                return row
        self.rows.append(Row(kind, length, name))
        return self.rows[-1]

    def curve(self, kind: str, name: str, what: str) -> dict[int, float]:
        """Return ``seconds`` or ``peak`` over the length, where there is a figure."""
        rows = [x for x in self.rows if (x.kind, x.attention) == (kind, name) and (getattr(x, what) or 0) > 0]
        return {x.length: getattr(x, what) for x in sorted(rows, key=lambda x: x.length)}

    def crossovers(self) -> list[dict[str, Any]]:
        """Return from which length on each attention is below each baseline."""
        lines = []
        for kind in dict.fromkeys(x.kind for x in self.rows):
            names = list(dict.fromkeys(x.attention for x in self.rows if x.kind == kind))
            for name in (x for x in names if x not in BASELINES):
                for base in (x for x in self.baselines if x in names):
                    line: dict[str, Any] = {"kind": kind, "attention": name, "against": base}
                    for what in ("seconds", "peak"):
                        at, words = crossover(self.curve(kind, base, what), self.curve(kind, name, what))
                        line |= {what: at, f"{what} in words": words}
                    lines.append(line)
        return lines

    def refusal(self, row: Row, limit: float) -> str:
        """Why a row should not be run, judged by shorter ones."""
        seconds, peak = (
            predicted(self.curve(row.kind, row.attention, what), row.length) for what in ("seconds", "peak")
        )
        return over_limit(seconds, limit) or too_large(peak or 0) or ""


def read_rows(folder: Path, name: str, about: Mapping[str, Any]) -> list[Row]:
    """Read the rows with a figure that a study has written, of the same model on the same machine.

    Args:
        folder: of the record.
        name: of the study.
        about: what the figures depend on.

    Raises:
        ValueError: a record of something else is there.
    """
    path = folder / f"{name}.json"
    fields = [x.name for x in dataclasses.fields(Row)]
    try:
        kept = read_record(folder, name)
        if kept is None:
            return []
        rows = [Row(**{key: x[key] for key in fields}) for x in kept["rows"]]
        other = {key: x for key, x in kept["about"].items() if about.get(key) != x}
    except (ValueError, KeyError, TypeError, AttributeError) as problem:
        raise ValueError(f"{path} is not of this study ({problem!r}); move it away, or choose another --out.") from None
    if other:
        raise ValueError(f"{path} holds figures of another model or machine ({other}); choose another --out.")
    return [dataclasses.replace(x, note="") for x in rows if x.seconds is not None or x.peak is not None]


def predicted(curve: Mapping[int, float], length: int) -> float | None:
    """Extend a curve to a longer input: the last growth goes on, as a power between 1 and 2; 2 where it is not known.

    None where nothing shorter was measured.
    """
    points = [(n, x) for n, x in sorted(curve.items()) if n < length]
    if not points:
        return None
    power = 2.0
    if len(points) > 1:
        (m, y), (n, x) = points[-2:]
        power = min(2.0, max(1.0, math.log(x / y) / math.log(n / m)))
    n, x = points[-1]
    return float(x * (length / n) ** power)


def crossover(base: Mapping[int, float], ours: Mapping[int, float]) -> tuple[float | None, str]:
    """Return the length from which on ours stays below the base, between two points on log scales; and it in words.

    None where it is not reached, or where ours is below at the shortest length already.
    """
    lengths = sorted(set(base) & set(ours))
    if not lengths:
        return None, "not measured"
    gaps = [math.log(ours[n] / base[n]) for n in lengths]
    if gaps[-1] >= 0:
        return None, f"none up to {lengths[-1]}"
    above = [i for i, gap in enumerate(gaps) if gap >= 0]
    if not above:
        return None, f"below at {lengths[0]} already"
    i = above[-1]
    share = gaps[i] / (gaps[i] - gaps[i + 1])
    at = lengths[i] * (lengths[i + 1] / lengths[i]) ** share
    return at, f"{at:.0f}"


def tables(result: Result) -> list[Table]:
    """Return a table for each pass, with ratios to the first baseline (above 1: better than it), and the crossovers."""
    kinds = dict.fromkeys(row.kind for row in result.rows)
    out = [_table(result, [row for row in result.rows if row.kind == kind]) for kind in kinds]
    last = Table(title="From which length on the converted model stays below the original", title_justify="left")
    for name in ("pass", "attention", "against"):
        last.add_column(name, no_wrap=True)
    for name in ("time", "memory"):
        last.add_column(name, justify="right", no_wrap=True)
    short = short_names(x["attention"] for x in result.crossovers())
    for x in result.crossovers():
        last.add_row(x["kind"], short[x["attention"]], x["against"], x["seconds in words"], x["peak in words"])
    return [*out, last]


def headline(result: Result) -> str:
    """Describe the model in one line."""
    about = result.about
    return f"{about['model']} ({about['kind']}, {about['weights']} weights, {about['task']})"


def _table(result: Result, rows: Sequence[Row]) -> Table:
    kind, first = rows[0].kind, result.baselines[0]
    skipped = [f"not run: {row.attention}, {row.length} tokens: {row.note}" for row in rows if row.note]
    out = Table(
        title=f"{headline(result)}, {kind}",
        caption="\n".join([*result.stretched, *skipped]) or None,
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
        time, peak = (_ratio(result, row, what) for what in ("seconds", "peak"))
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


def _ratio(result: Result, row: Row, what: str) -> str:
    base, own = result.curve(row.kind, result.baselines[0], what).get(row.length), getattr(row, what)
    return human_ratio(base / own) if base and own and row.attention != result.baselines[0] else ""


def picture(result: Result, path: Path) -> None:
    """Draw time and memory over the length, one row for each pass; crossovers with the first baseline are ringed."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    kinds = list(dict.fromkeys(row.kind for row in result.rows))
    names = list(dict.fromkeys(row.attention for row in result.rows))
    styles = {name: style(index) for index, name in enumerate(names)}
    for name in (x for x in names if x in BASELINES):
        styles[name] |= {"color": "#1b1e23" if name == result.baselines[0] else "#808080"}
    with mpl.rc_context({"text.parse_math": False, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(10, 4.0 * len(kinds) + 0.4), layout="constrained")
        axes = figure.subplots(len(kinds), 2, squeeze=False)
        for line, kind in zip(axes, kinds, strict=True):
            _panel(line[0], result, kind, "seconds", styles)
            _panel(line[1], result, kind, "peak", styles)
            line[0].legend(fontsize=8, frameon=False)
        note = "; positions stretched" if result.stretched else ""
        figure.suptitle(f"{headline(result)}{note}", size=11)
        figure.savefig(path, dpi=140)


def _panel(axis: Any, result: Result, kind: str, what: str, styles: dict[str, dict[str, Any]]) -> None:
    show = human_time if what == "seconds" else human_bytes
    words = {"seconds": "time", "peak": "cache" if kind == TOKEN else "peak memory beyond the weights"}
    axis.set_title(f"{words[what]}, {kind}", size=10)
    if not any(result.curve(kind, name, what) for name in styles):
        axis.axis("off")
        axis.text(0.5, 0.5, "not measured", ha="center", color="grey", transform=axis.transAxes)
        return
    for name, style_of_line in styles.items():
        curve = result.curve(kind, name, what)
        if curve:
            label = f"original, {name}" if name in BASELINES else name
            axis.plot(list(curve), list(curve.values()), label=label, **style_of_line | {"markersize": 5})
    axis.set_xscale("log", base=2)
    axis.set_yscale("log", base=10 if what == "seconds" else 2)
    if what == "seconds":
        axis.yaxis.get_major_locator().set_params(subs=(1, 2, 5))
    low, high = axis.get_ylim()
    if high < 5 * low:  # else a few percent would fill the panel
        middle = math.sqrt(low * high)
        axis.set_ylim(middle / 5**0.5, middle * 5**0.5)
    lengths = sorted({row.length for row in result.rows if row.kind == kind})
    axis.set_xticks(lengths, [f"{x:,}" for x in lengths])
    axis.minorticks_off()
    axis.yaxis.set_major_formatter(lambda y, _: show(y))
    axis.set_xlabel("context, tokens" if kind == TOKEN else "tokens")
    axis.grid(True, alpha=0.15)
    for x in result.crossovers():
        at = x[what]
        if (x["kind"], x["against"]) == (kind, result.baselines[0]) and at is not None:
            height = between(result.curve(kind, x["attention"], what), at)
            colour = styles[x["attention"]]["color"]
            axis.plot([at], [height], "o", mfc="none", mec=colour, markersize=13, zorder=5)
            axis.axvline(at, color=colour, linewidth=0.8, linestyle=":")
            foot = {"transform": axis.get_xaxis_transform(), "ha": "right", "va": "bottom"}
            axis.text(at, 0.02, f"{at:,.0f}", rotation=90, size=8, color=colour, **foot)


def between(curve: dict[int, float], at: float) -> float:
    """Return the value at a length between two measured ones, on a line on logarithmic scales."""
    first = max(n for n in curve if n <= at)
    last = min(n for n in curve if n >= at)
    share = 0.0 if first == last else math.log(at / first) / math.log(last / first)
    return float(curve[first] * (curve[last] / curve[first]) ** share)
