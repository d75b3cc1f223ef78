"""How fast whole encoders are, and how near to the best that any attention allows (Performer (2009.14794), Fig. 3, 20).

The paper's two encoders, forward and forward + backward, with exact softmax attention, with FAVOR+, and with attention
that returns V ("X" or OPT in the paper): over the length, and over the number of layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn

from kernelformer.environment import environment
from kernelformer.errors import choice
from kernelformer.formatting import human_bytes, human_ratio, human_time, short_names
from kernelformer.modules.spec import parse_attention
from kernelformer.settings import plain
from kernelformer.timing import Figures, Step, time_rounds
from kernelformer_lab.bench import settings
from kernelformer_lab.bench.harness import (
    clean_model,
    fill_rows,
    over_limit,
    peak_memory,
    run_in_process,
    run_pass,
    too_large,
)
from kernelformer_lab.bench.settings import HEAPS, MEMORY_HEAP, PASSES
from kernelformer_lab.studies.base import Log, Progress, read_record, write_record
from kernelformer_lab.studies.settings import EncoderSettings

VOCABULARY = 256
TINY = 64  # tokens of the step after which libraries, threads and their buffers are there


@dataclass(frozen=True)
class Case:
    """One encoder and the length of the sequence that it runs on."""

    size: str  # its name
    heads: int
    width: int
    feed_forward: int
    layers: int
    length: int

    @property
    def title(self) -> str:
        """Name of the case in progress and messages."""
        return f"{self.size}, {self.layers} layers, {self.length} tokens"

    def tokens(self, length: int | None = None) -> Tensor:
        """Return random tokens (1, L), the same for every attention."""
        gen = torch.Generator().manual_seed(0)
        return torch.randint(VOCABULARY, (1, length or self.length), generator=gen)


class Values(nn.Module):
    """Attention that returns V: "X" or OPT in Performer (2009.14794), Fig. 3.

    The layer around it is that of the others: it still projects queries and keys, and merges heads. In training nothing
    comes back through q and k, so their two projections have no backward pass: less work than any attention leaves.
    """

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **_: Any) -> Tensor:
        """(B, H, L, D), (B, H, L, D), (B, H, L, E) -> (B, H, L, E)."""
        return value


class ValuesAndGradients(Values):
    """Attention that returns V and gives q and k gradients: all but the core itself is done as for a real attention.

    The output's gradient serves as that of q, k and v, so that it costs nothing to make; its value means nothing.
    """

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **_: Any) -> Tensor:
        """(B, H, L, D), (B, H, L, D), (B, H, L, D) -> (B, H, L, D)."""
        out: Tensor = _PassOn.apply(query, key, value)  # type: ignore[no-untyped-call]
        return out


class _PassOn(torch.autograd.Function):
    """Return V, and the output's gradient as that of q, k and v."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return grad, grad, grad


BOUNDS: dict[str, type[Values]] = dict(zip(settings.BOUNDS, (Values, ValuesAndGradients), strict=True))


def build(case: Case, attention: str) -> Any:
    """Build the encoder with an attention spec or a bound in every block, without positions.

    Its first weights are the same for every attention.
    """
    from kernelformer.models import KernelformerConfig, KernelformerModel  # slow to import, and only workers need it

    torch.manual_seed(0)
    model = KernelformerModel(
        KernelformerConfig(
            vocab_size=VOCABULARY,
            hidden_size=case.width,
            num_hidden_layers=case.layers,
            num_attention_heads=case.heads,
            intermediate_size=case.feed_forward,
            attention="softmax" if attention in BOUNDS else attention,
            positions="none",
            max_position_embeddings=case.length,
        )
    )
    if attention in BOUNDS:
        blocks: Any = model.stack.blocks
        for block in blocks:
            block.attention.core = BOUNDS[attention]()
    return model


def step(model: Any, tokens: Tensor, kind: str) -> None:
    """Run one of `PASSES` of an encoder on tokens (1, L)."""
    model.train(kind == PASSES[1])
    run_pass(lambda: model(tokens).last_hidden_state, kind)


def measure(
    kind: str, case: Mapping[str, Any], wanted: Mapping[str, Sequence[str]], rounds: int, budget: float
) -> dict[str, dict[str, Figures]]:
    """Measure encoders in this process: {pass: {attention: figures}}.

    Args:
        kind: ``time``, or ``memory`` of one attention.
        case: fields of `Case`.
        wanted: attentions by pass.
        rounds: at least so many steps of each are timed.
        budget: seconds for timing each pass.
    """
    this = Case(**case)
    if kind == "memory":
        return measure_memory(this, wanted)
    names = dict.fromkeys(name for some in wanted.values() for name in some)
    models, tokens = {name: build(this, name) for name in names}, this.tokens()
    return {
        each: time_rounds({name: _step(models[name], tokens, each) for name in some}, rounds, budget)
        for each, some in wanted.items()
    }


def measure_memory(case: Case, wanted: Mapping[str, Sequence[str]]) -> dict[str, dict[str, Figures]]:
    """Return the peak resident bytes of a step beyond the weights, of the one attention that all passes want."""
    (name,) = {name for some in wanted.values() for name in some}
    model, tokens = build(case, name), case.tokens()
    for kind in wanted:
        step(model, case.tokens(min(TINY, case.length)), kind)
    clean_model(model)
    peaks = peak_memory({kind: _step(model, tokens, kind) for kind in wanted})
    return {kind: {name: {"peak": count}} for kind, count in peaks.items()}


def _step(model: Any, tokens: Tensor, kind: str) -> Step:
    return Step(lambda: step(model, tokens, kind), lambda: clean_model(model))


NAME = "encoder"
EXACT = "softmax"


@dataclass(frozen=True)
class Size:
    """The dimensions of an encoder but for its layers, and the lengths that it is run at."""

    heads: int
    width: int
    feed_forward: int
    lengths: tuple[int, ...]


SIZES: dict[str, Size] = {
    "regular": Size(8, 512, 2048, (1024, 2048, 4096, 8192)),
    "small": Size(1, 64, 64, (1024, 2048, 4096, 8192, 16384)),
    "arena": Size(2, 64, 128, (1024, 4096, 16384)),  # Skyformer (2111.00035), Sec. 5, which has 2 layers
}


def check(settings: EncoderSettings) -> None:
    """Raise ValueError for a size, an attention or a heap that is not known, before anything is measured."""
    for name in settings.sizes:
        choice("size", name, SIZES)
    for spec in settings.attention:
        if spec not in BOUNDS:
            parse_attention(spec)
    choice("heap", settings.heap, HEAPS)
    for what in ("sizes", "attention"):
        if not getattr(settings, what):
            raise ValueError(f"{what} must name at least one, got {getattr(settings, what)!r}.")


def cases(settings: EncoderSettings) -> Iterator[Case]:
    """Return all encoders and lengths, short ones before long ones, which are predicted from them."""
    for name in dict.fromkeys(settings.sizes):
        size = SIZES[name]
        lengths = sorted(set(settings.lengths or size.lengths))
        middle = lengths[len(lengths) // 2]
        deep = sorted(set(settings.deep_lengths or (lengths[0], middle))) if settings.depths else []
        for layers in dict.fromkeys((settings.layers, *sorted(settings.depths))):
            for length in sorted({*lengths, *deep}) if layers == settings.layers else deep:
                yield Case(name, size.heads, size.width, size.feed_forward, layers, length)


@dataclass
class Row:
    """The figures of one attention in one encoder, length and pass."""

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
class Result:
    """The rows that the study has measured, and the heap that they were measured with."""

    rows: list[Row] = field(default_factory=list)
    heap: str = "default"

    def seconds(self, like: Row, attention: str) -> float | None:
        """Return what another attention takes in the same encoder, length and pass; None if that was not measured."""
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
        peaks = [longer * deeper * x.peak for longer, deeper, x in smaller if x.peak is not None]
        return over_limit(min(times, default=None), limit) or too_large(min(peaks, default=0)) or ""


def steps(settings: EncoderSettings) -> int:
    """Return how many processes measure: for each case one of all attentions' times, and one of each one's memory."""
    check(settings)
    return len(list(cases(settings))) * _processes(settings)


def run(
    settings: EncoderSettings, folder: Path, log: Log = lambda _: None, progress: Progress = lambda: None
) -> Result:
    """Measure everything; see `studies.base`.

    Figures are written after each encoder and length. A study that was stopped goes on with the next one; one that was
    finished starts anew.
    """
    check(settings)
    for size in settings.sizes:  # what is wrong with an attention is said before the first hour has passed
        for name in settings.attention:
            build(Case(size, SIZES[size].heads, SIZES[size].width, 1, 1, 1), name)
    result = Result(heap=settings.heap, rows=_unfinished(settings, folder))
    done = {(row.size, row.layers, row.length) for row in result.rows}
    names = list(dict.fromkeys(settings.attention))
    for case in cases(settings):
        if (case.size, case.layers, case.length) in done:
            for _ in range(_processes(settings)):
                progress()
            continue
        rows = [Row(case.size, case.layers, case.length, kind, name) for kind in PASSES for name in names]
        for row in rows:
            row.note = result.refusal(row, settings.limit)
        for name in names if settings.memory else ():
            log(f"{case.title}: memory of {name}")
            _measure("memory", case, [row for row in rows if row.attention == name], settings)
            progress()
        log(f"{case.title}: timing")
        _measure("time", case, rows, settings)
        result.rows += rows
        write_record(folder, NAME, settings, record(result))
        progress()
    return result


def _processes(settings: EncoderSettings) -> int:
    """How many processes measure one case."""
    return 1 + settings.memory * len(set(settings.attention))


def _unfinished(settings: EncoderSettings, folder: Path) -> list[Row]:
    """Rows of a study that was stopped: of the same settings and machine, and not of all cases."""
    kept = read_record(folder, NAME) or {}
    here = environment(torch.get_num_threads())
    if kept.get("settings") != plain(settings) or {**kept["environment"], "date": here["date"]} != here:
        return []
    rows = [Row(**x) for x in kept["rows"]]
    done = {(row.size, row.layers, row.length) for row in rows}
    return rows if len(done) < len(list(cases(settings))) else []


def _measure(kind: str, case: Case, rows: Sequence[Row], settings: EncoderSettings) -> None:
    """Fill in the rows that are run, by one process."""

    def measure(running: list[Row]) -> list[Figures]:
        wanted: dict[str, list[str]] = {row.kind: [] for row in running}
        for row in running:
            wanted[row.kind].append(row.attention)
        figures = job(kind, case, wanted, settings)
        return [figures[row.kind][row.attention] for row in running]

    fill_rows(rows, measure)


def job(kind: str, case: Case, wanted: dict[str, list[str]], settings: EncoderSettings) -> dict[str, Any]:
    """Run `measure.encoder.measure` in a process of its own: {pass: {attention: figures}}."""
    return run_in_process(
        measure,
        threads=torch.get_num_threads(),
        allocator=MEMORY_HEAP if kind == "memory" else HEAPS[settings.heap],
        kind=kind,
        case=asdict(case),
        wanted=wanted,
        rounds=settings.rounds,
        budget=settings.budget,
    )


def record(result: Result) -> dict[str, Any]:
    """Return the result as plain JSON."""
    return {"heap": result.heap, "rows": [asdict(row) for row in result.rows]}


def tables(result: Result) -> list[Table]:
    """Return a table for each size and pass, with ratios to softmax (above 1: faster than it) and to the bounds."""
    kinds = dict.fromkeys((row.size, row.kind) for row in result.rows)
    return [_table(result, [row for row in result.rows if (row.size, row.kind) == kind]) for kind in kinds]


def _table(result: Result, rows: Sequence[Row]) -> Table:
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
            *(_ratio(row, name, result.seconds(row, name)) for name in others),
            human_bytes(row.peak),
            str(row.rounds or ""),
            end_section=after is None or (after.layers, after.length) != (row.layers, row.length),
        )
    return out


def _ratio(row: Row, name: str, other: float | None) -> str:
    """How much faster than softmax a row is, or how much slower than a bound."""
    if row.seconds is None or other is None or row.attention == name:
        return ""
    return human_ratio(other / row.seconds if name == EXACT else row.seconds / other)


def _lines(rows: Sequence[Row], by: str) -> dict[str, list[tuple[int, float]]]:
    """Points of a field of the rows and milliseconds, by attention."""
    lines: dict[str, list[tuple[int, float]]] = {row.attention: [] for row in rows}
    for row in rows:
        if row.seconds is not None:
            lines[row.attention].append((getattr(row, by), row.seconds * 1e3))
    return {name: sorted(points) for name, points in lines.items() if points}


def _panels(result: Result) -> list[list[tuple[str, str, list[Row]]]]:
    """Panels for each size: the passes over the length, and training over the layers; (title, field, rows) each."""
    panels = []
    for size in dict.fromkeys(row.size for row in result.rows):
        mine = [row for row in result.rows if row.size == size]
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


def picture(result: Result, path: Path) -> None:
    """Draw Performer's Fig. 3 and 20: one row per size, a step's time over the length and over the layers."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator, NullFormatter

    panels = _panels(result)
    names = list(dict.fromkeys(row.attention for row in result.rows if row.attention not in BOUNDS))
    style: dict[str, dict[str, Any]] = {
        name: {"color": f"C{index % 10}", "linestyle": ("-", ":", "-.")[index // 10 % 3]}
        for index, name in enumerate(names)
    }
    style |= {"opt": {"color": "k", "linestyle": "--"}, "opt+qk": {"color": "grey", "linestyle": "--"}}
    shape = (len(panels), max(map(len, panels)))
    figure, axes = plt.subplots(
        *shape, figsize=(4.2 * shape[1] + 2.6, 3.8 * shape[0]), squeeze=False, constrained_layout=True
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
            axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.yaxis.set_major_formatter("{x:g}")
            axis.yaxis.set_minor_formatter(NullFormatter())
            axis.grid(True, which="both", alpha=0.2)
    handles = {label: x for axis in axes.flat for x, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside right center", fontsize="small")
    figure.savefig(path, dpi=130)
    plt.close(figure)
