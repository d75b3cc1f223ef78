"""How fast whole encoders are, and how near to the best that any attention allows (performer Fig. 3 and 20, App. E).

The paper's two encoders, forward and forward + backward, with exact softmax attention, with FAVOR+, and with attention
that returns V ("X" or OPT in the paper): over the length, and over the number of layers.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from kernelformer.errors import choice, flag, number, positive_int
from kernelformer.formatting import human_bytes, human_ratio, human_time, short_names
from kernelformer.measure.benchmark import HEAPS, WorkerError
from kernelformer.measure.case import too_large
from kernelformer.measure.encoder import BOUNDS, PASSES, Case, build
from kernelformer.modules.spec import parse_attention
from kernelformer.studies.settings import ENCODER_ATTENTIONS as ATTENTIONS
from kernelformer.subprocesses import finished

EXACT = "softmax"
# Whatever is larger than 64 KiB goes back to the system at once, so that resident memory is what is in use.
WEIGHED = {"MALLOC_MMAP_THRESHOLD_": "65536"}


@dataclass(frozen=True)
class Size:
    """An encoder but for its layers, and the lengths that it is run at."""

    heads: int
    width: int
    feed_forward: int
    lengths: tuple[int, ...]


SIZES: dict[str, Size] = {
    "regular": Size(8, 512, 2048, (1024, 2048, 4096, 8192)),
    "small": Size(1, 64, 64, (1024, 2048, 4096, 8192, 16384)),
}


@dataclass(frozen=True)
class Setting:
    """What is measured, and how.

    Args:
        sizes: names of `SIZES`.
        lengths: tokens; None or none of them means each size's own.
        layers: of the encoders that are run at all lengths.
        depths: further numbers of layers; the paper goes to 20.
        deep_lengths: tokens of those; None means the shortest and the middle one of the lengths.
        attentions: specs, and names of `BOUNDS`.
        threads: of the measuring processes.
        heap: a name of `measure.benchmark.HEAPS`.
        rounds: steps of each attention, interleaved; at least so many.
        budget: seconds for each case and pass, while which there are more rounds.
        limit: seconds; an attention is not run where a step would take longer.
        memory: whether to weigh each attention too, in a process of its own.
    """

    sizes: Sequence[str] = tuple(SIZES)
    lengths: Sequence[int] | None = None
    layers: int = 6
    depths: Sequence[int] = (12, 20)
    deep_lengths: Sequence[int] | None = None
    attentions: Sequence[str] = ATTENTIONS
    threads: int = 1
    heap: str = "default"
    rounds: int = 5
    budget: float = 20.0
    limit: float = 60.0
    memory: bool = True

    def __post_init__(self) -> None:
        for name in self.sizes:
            choice("size", name, SIZES)
        for what in ("layers", "threads", "rounds"):
            positive_int(what, getattr(self, what))
        for what, counts in (("length", self.lengths), ("depth", self.depths), ("deep length", self.deep_lengths)):
            for count in counts or ():
                positive_int(what, count)
        for spec in self.attentions:
            if spec not in BOUNDS:
                parse_attention(spec)
        choice("heap", self.heap, HEAPS)
        flag("memory", self.memory)
        for what in ("budget", "limit"):
            number(what, getattr(self, what), above=0)
        for what in ("sizes", "attentions"):
            if not getattr(self, what):
                raise ValueError(f"{what} must name at least one, got {getattr(self, what)!r}.")

    def cases(self) -> Iterator[Case]:
        """Short ones before long ones, which are predicted from them."""
        for name in dict.fromkeys(self.sizes):
            size = SIZES[name]
            lengths = sorted(set(self.lengths or size.lengths))
            deep = sorted(set(self.deep_lengths or (lengths[0], lengths[len(lengths) // 2]))) if self.depths else []
            for layers in dict.fromkeys((self.layers, *sorted(self.depths))):
                for length in sorted({*lengths, *deep}) if layers == self.layers else deep:
                    yield Case(name, size.heads, size.width, size.feed_forward, layers, length)


@dataclass
class Row:
    """One attention in one encoder, one pass."""

    size: str
    layers: int
    length: int
    kind: str  # one of `PASSES`
    attention: str
    seconds: float | None = None  # median of a step
    rounds: int = 0
    peak: int | None = None  # bytes of a step beyond the weights
    note: str = ""  # why it was not run


@dataclass
class Found:
    """What the study has measured."""

    rows: list[Row] = field(default_factory=list)
    heap: str = "default"

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {"heap": self.heap, "rows": [asdict(row) for row in self.rows]}

    def seconds(self, like: Row, attention: str) -> float | None:
        """What another attention takes in the same place."""
        same = (like.size, like.layers, like.length, like.kind, attention)
        rows = (x for x in self.rows if (x.size, x.layers, x.length, x.kind, x.attention) == same)
        return next((x.seconds for x in rows), None)

    def refusal(self, row: Row, limit: float) -> str:
        """Why a row should not be run, judged by smaller ones: no worse than quadratic in time, linear in memory."""
        smaller = [
            (max(1.0, row.length / x.length), max(1.0, row.layers / x.layers), x)
            for x in self.rows
            if (x.size, x.kind, x.attention) == (row.size, row.kind, row.attention)
        ]
        times = [longer**2 * deeper * x.seconds for longer, deeper, x in smaller if x.seconds is not None]
        if times and min(times) > limit:
            return f"about {human_time(min(times))}, and the limit is {human_time(limit)}"
        peaks = [longer * deeper * x.peak for longer, deeper, x in smaller if x.peak is not None]
        return too_large(int(min(peaks))) or "" if peaks else ""


def job(kind: str, case: Case, wanted: dict[str, list[str]], setting: Setting) -> dict[str, Any]:
    """Run one job in a process of its own: {pass: {attention: figures}}."""
    request = {"kind": kind, "case": asdict(case), "wanted": wanted, "threads": setting.threads}
    request |= {"rounds": setting.rounds, "budget": setting.budget}
    heap = WEIGHED if kind == "memory" else HEAPS[setting.heap]
    env = {**os.environ, **heap, "OMP_NUM_THREADS": str(setting.threads)}
    done = finished([sys.executable, "-m", "kernelformer.measure.encoder"], json.dumps(request), env)
    if done.returncode:  # a system that runs out of memory leaves no last words
        last = (done.stderr.strip().splitlines() or [f"the process ended with code {done.returncode}"])[-1]
        raise WorkerError(last)
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def steps(setting: Setting) -> int:
    """How often `run` tells what it does."""
    return len(list(setting.cases())) * (1 + setting.memory * len(set(setting.attentions)))


def run(setting: Setting, tell: Callable[[str], None], keep: Callable[[Found], None] = lambda _: None) -> Found:
    """Measure everything; ``tell`` is called before each of `steps` steps, ``keep`` after each encoder and length."""
    names = list(dict.fromkeys(setting.attentions))
    for size in setting.sizes:  # says what is wrong with a spec before the first hour has passed
        for name in names:
            build(Case(size, SIZES[size].heads, SIZES[size].width, 1, 1, 1), name)
    found = Found(heap=setting.heap)
    for case in setting.cases():
        rows = [Row(case.size, case.layers, case.length, kind, name) for kind in PASSES for name in names]
        for row in rows:
            row.note = found.refusal(row, setting.limit)
        for name in names if setting.memory else ():
            tell(f"{case.title}: memory of {name}")
            _measure("memory", case, [row for row in rows if row.attention == name], setting)
        tell(f"{case.title}: timing")
        _measure("time", case, rows, setting)
        found.rows += rows
        keep(found)
    return found


def _measure(kind: str, case: Case, rows: Sequence[Row], setting: Setting) -> None:
    """Fill in the rows that are run; a failure is noted in all that shared the process."""
    running = [row for row in rows if not row.note]
    if not running:
        return
    wanted: dict[str, list[str]] = {row.kind: [] for row in running}
    for row in running:
        wanted[row.kind].append(row.attention)
    try:
        result = job(kind, case, wanted, setting)
    except WorkerError as problem:
        for row in running:
            row.note = str(problem)
        return
    for row in running:
        for name, value in result[row.kind][row.attention].items():
            setattr(row, "note" if name == "problem" else name, value)


def tables(found: Found) -> list[Table]:
    """One for each size and pass, with ratios to softmax (above 1: faster than it) and to the bounds."""
    kinds = dict.fromkeys((row.size, row.kind) for row in found.rows)
    return [_table(found, [row for row in found.rows if (row.size, row.kind) == kind]) for kind in kinds]


def _table(found: Found, rows: Sequence[Row]) -> Table:
    names = {row.attention for row in rows}
    others = [name for name in (EXACT, *BOUNDS) if name in names]
    skipped = [f"{row.attention}, {row.layers} layers, {row.length} tokens: {row.note}" for row in rows if row.note]
    out = Table(
        title=f"The {rows[0].size} encoder, {rows[0].kind} of one sequence",
        caption="\n".join(("not run:", *skipped)) if skipped else None,
        caption_justify="left",
    )
    for name in ("layers", "tokens"):
        out.add_column(name, justify="right", no_wrap=True)
    out.add_column("attention", no_wrap=True)
    ratios = ["faster by" if name == EXACT else f"of {name}" for name in others]
    for name in ("a step", *ratios, "peak", "rounds"):
        out.add_column(name, justify="right", no_wrap=True)
    short = short_names(row.attention for row in rows)
    for row, after in zip(rows, [*rows[1:], None], strict=True):
        out.add_row(
            str(row.layers),
            str(row.length),
            short[row.attention],
            "not run" if row.seconds is None else human_time(row.seconds),
            *(_ratio(row, name, found.seconds(row, name)) for name in others),
            human_bytes(row.peak),
            str(row.rounds or ""),
            end_section=after is None or (after.layers, after.length) != (row.layers, row.length),
        )
    return out


def _ratio(row: Row, name: str, other: float | None) -> str:
    """How much faster than softmax, or how much slower than a bound."""
    if row.seconds is None or other is None or row.attention == name:
        return ""
    return human_ratio(other / row.seconds if name == EXACT else row.seconds / other)


def _lines(rows: Sequence[Row], by: str) -> dict[str, list[tuple[int, float]]]:
    """Milliseconds over a field, by attention."""
    lines: dict[str, list[tuple[int, float]]] = {row.attention: [] for row in rows}
    for row in rows:
        if row.seconds is not None:
            lines[row.attention].append((getattr(row, by), row.seconds * 1e3))
    return {name: sorted(points) for name, points in lines.items() if points}


def _panels(found: Found) -> list[list[tuple[str, str, list[Row]]]]:
    """For each size: the passes over the length, and training over the layers; (title, field, rows) each."""
    panels = []
    for size in dict.fromkeys(row.size for row in found.rows):
        mine = [row for row in found.rows if row.size == size]
        base = mine[0].layers
        line = [
            (f"{size}, {base} layers, {kind}", "length", [x for x in mine if x.kind == kind and x.layers == base])
            for kind in PASSES
        ]
        deep = [row.length for row in mine if row.layers != base]
        if deep:
            trained = [row for row in mine if row.kind == PASSES[1] and row.length == max(deep)]
            line.append((f"{size}, {max(deep)} tokens, {PASSES[1]}", "layers", trained))
        panels.append(line)
    return panels


def picture(found: Found, path: Path) -> None:
    """The paper's Fig. 3 and 20: one row per size, a step's time over the length and over the layers."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    panels = _panels(found)
    names = list(dict.fromkeys(row.attention for row in found.rows if row.attention not in BOUNDS))
    style: dict[str, dict[str, Any]] = {name: {"color": f"C{index}"} for index, name in enumerate(names)}
    style |= {"opt": {"color": "k", "linestyle": "--"}, "opt+qk": {"color": "grey", "linestyle": "--"}}
    shape = (len(panels), max(map(len, panels)))
    figure, axes = plt.subplots(
        *shape, figsize=(4.2 * shape[1], 3.8 * shape[0]), squeeze=False, constrained_layout=True
    )
    for line, row in zip(panels, axes, strict=True):
        for axis in row[len(line) :]:
            axis.set_visible(False)
        for (title, by, rows), axis in zip(line, row, strict=False):
            for name, points in _lines(rows, by).items():
                axis.plot(*zip(*points, strict=True), marker="o", label=name, **style[name])
            axis.set_title(title, fontsize="medium")
            axis.set_xlabel("tokens" if by == "length" else by)
            axis.set_ylabel("ms")
            axis.set_xscale("log", base=2)
            axis.set_xticks(sorted({getattr(x, by) for x in rows}))
            axis.xaxis.set_major_formatter("{x:.0f}")
            axis.set_yscale("log")
            axis.grid(True, which="both", alpha=0.2)
        row[0].legend(fontsize="small")
    figure.savefig(path, dpi=130)
    plt.close(figure)
