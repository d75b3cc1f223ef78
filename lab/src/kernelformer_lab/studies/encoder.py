"""Speed of whole encoders, and of the best that any attention allows (Performer (2009.14794), Fig. 3, 20).

The paper's two encoders, forward and forward + backward, with exact softmax attention, with FAVOR+, and with attention
that returns V ("X" or OPT in the paper): over the length, and over the number of layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn

from kernelformer.errors import choice
from kernelformer.formatting import human_bytes, human_ratio, human_time, short_names
from kernelformer.modules.spec import parse_attention
from kernelformer.settings import MAX_SECONDS, MEMORY, Settings, integers, option
from kernelformer_lab.bench.harness import fill_rows, model_step, over_limit, peak_memory, run_in_process, too_large
from kernelformer_lab.bench.settings import BOUNDS as BOUND_NAMES
from kernelformer_lab.bench.settings import HEAPS, MEMORY_HEAP, PASSES
from kernelformer_lab.bench.timing import Figures, Step, time_rounds
from kernelformer_lab.figures import drawing, table
from kernelformer_lab.studies.base import SPECS, Log, Progress, Record, Row, Study, check_named, unique, where

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


BOUNDS: dict[str, type[Values]] = dict(zip(BOUND_NAMES, (Values, ValuesAndGradients), strict=True))


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


def step(model: Any, tokens: Tensor, kind: str) -> Step:
    """One of `PASSES` of an encoder on tokens (1, L)."""
    return model_step(model, lambda: model.train(kind == PASSES[1])(tokens).last_hidden_state, kind)


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
        each: time_rounds({name: step(models[name], tokens, each) for name in some}, rounds, budget)
        for each, some in wanted.items()
    }


def measure_memory(case: Case, wanted: Mapping[str, Sequence[str]]) -> dict[str, dict[str, Figures]]:
    """Return the peak resident bytes of a step beyond the weights, of the one attention that all passes want."""
    (name,) = {name for some in wanted.values() for name in some}
    model, tokens = build(case, name), case.tokens()
    for kind in wanted:
        step(model, case.tokens(min(TINY, case.length)), kind).seconds()
    peaks = peak_memory({kind: step(model, tokens, kind) for kind in wanted})
    return {kind: {name: {"peak": count}} for kind, count in peaks.items()}


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


@dataclass(frozen=True, kw_only=True)
class EncoderSettings(Settings):
    """Settings of this study."""

    sizes: tuple[str, ...] = option(
        ("regular", "small"), "of regular, small, arena", choices=("regular", "small", "arena")
    )
    lengths: tuple[int, ...] | None = option(None, "tokens; default: each size's own", least=1)
    layers: int = option(6, "of the model", least=1)
    depths: tuple[int, ...] = option(
        (12, 20),
        "further numbers of layers; 'none' for none",
        least=1,
        parse=lambda name, text: () if text in ("", "none") else integers(name, text),
    )
    deep_lengths: tuple[int, ...] | None = option(
        None, "tokens for those; default: the shortest and the middle one", least=1
    )
    attention: tuple[str, ...] = option(
        ("softmax", "favor+:num_features=256", *BOUNDS), f"{SPECS}; opt, opt+qk are the bounds"
    )
    heap: str = option("default", "default or kept: the allocator's settings", choices=("default", "kept"))
    budget: float = option(20.0, "seconds per case and pass", least=0.01)
    limit: float = option(60.0, MAX_SECONDS, least=0.01, name="max_seconds")
    memory: bool = option(True, MEMORY)
    rounds: int = 5  # steps of each attention, interleaved; at least so many


def check(settings: EncoderSettings) -> None:
    """Raise ValueError for a size, an attention or a heap that is not known, before anything is measured."""
    for name in settings.sizes:
        choice("size", name, SIZES)
    for spec in settings.attention:
        if spec not in BOUNDS:
            parse_attention(spec)
    choice("heap", settings.heap, HEAPS)
    check_named(settings, "sizes", "attention")


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


def seconds(rows: Sequence[Row], like: Row, attention: str) -> float | None:
    """Time of another attention in the same encoder, length and pass; None if it was not measured."""
    same = {name: like[name] for name in ("size", "layers", "length", "kind")}
    return next((x["seconds"] for x in where(rows, **same, attention=attention)), None)


def refusal(rows: Sequence[Row], row: Row, limit: float) -> str:
    """Reason not to run a row, judged by smaller ones: no worse than quadratic in time, linear in memory."""
    smaller = [
        (max(1.0, row["length"] / x["length"]), max(1.0, row["layers"] / x["layers"]), x)
        for x in where(rows, **{name: row[name] for name in ("size", "kind", "attention")})
    ]
    times = [longer**2 * deeper * x["seconds"] for longer, deeper, x in smaller if x["seconds"] is not None]
    peaks = [longer * deeper * x["peak"] for longer, deeper, x in smaller if x["peak"] is not None]
    return over_limit(min(times, default=None), limit) or too_large(min(peaks, default=0)) or ""


def new_row(case: Case, kind: str, attention: str) -> Row:
    """A row: median ``seconds`` of a step, ``peak`` bytes of it beyond the weights; ``note``: why it was not run."""
    key = {"size": case.size, "layers": case.layers, "length": case.length, "kind": kind, "attention": attention}
    return {**key, "seconds": None, "rounds": 0, "peak": None, "note": ""}


def steps(settings: EncoderSettings) -> int:
    """Number of processes: for each case one of all attentions' times, and one of each one's memory."""
    check(settings)
    return len(list(cases(settings))) * _processes(settings)


def run(record: Record, log: Log, progress: Progress) -> None:
    """Measure everything; see `studies.base`.

    Figures are written after each encoder and length. A study that was stopped is resumed with the next one; one that
    was finished starts anew.
    """
    settings = record.settings
    check(settings)
    for size in settings.sizes:  # what is wrong with an attention is said before the first hour has passed
        for name in settings.attention:
            build(Case(size, SIZES[size].heads, SIZES[size].width, 1, 1, 1), name)
    kept: list[Row] = record.earlier_of_same_settings(same_machine=True).get("rows", [])
    done = set(unique(kept, "size", "layers", "length"))
    finished = len(done) == len(list(cases(settings)))
    record.figures = {"heap": settings.heap, "rows": [] if finished else kept}
    names = list(dict.fromkeys(settings.attention))
    for case in cases(settings):
        if not finished and (case.size, case.layers, case.length) in done:
            for _ in range(_processes(settings)):
                progress()
            continue
        rows = [new_row(case, kind, name) for kind in PASSES for name in names]
        for row in rows:
            row["note"] = refusal(record.rows, row, settings.limit)
        for name in names if settings.memory else ():
            log(f"{case.title}: memory of {name}")
            _measure("memory", case, where(rows, attention=name), settings)
            progress()
        log(f"{case.title}: timing")
        _measure("time", case, rows, settings)
        record.rows.extend(rows)
        record.save()
        progress()


def _processes(settings: EncoderSettings) -> int:
    """Number of processes that measure one case."""
    return 1 + settings.memory * len(set(settings.attention))


def _measure(kind: str, case: Case, rows: Sequence[Row], settings: EncoderSettings) -> None:
    """Fill in the rows that are run, by one process."""

    def measure(running: list[Row]) -> list[Figures]:
        wanted: dict[str, list[str]] = {row["kind"]: [] for row in running}
        for row in running:
            wanted[row["kind"]].append(row["attention"])
        figures = job(kind, case, wanted, settings)
        return [figures[row["kind"]][row["attention"]] for row in running]

    fill_rows(rows, measure)


def job(kind: str, case: Case, wanted: dict[str, list[str]], settings: EncoderSettings) -> dict[str, Any]:
    """Run `measure` in a process of its own: {pass: {attention: figures}}."""
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


def tables(record: Record) -> list[Table]:
    """A table for each size and pass, with ratios to softmax (above 1: faster than it) and to the bounds."""
    return [_table(where(record.rows, size=size, kind=kind)) for size, kind in unique(record.rows, "size", "kind")]


def _table(rows: Sequence[Row]) -> Table:
    names = unique(rows, "attention")
    others = [name for name in (EXACT, *BOUNDS) if name in names]
    skipped = [f"{x['attention']}, {x['layers']} layers, {x['length']} tokens: {x['note']}" for x in rows if x["note"]]
    ratios = ["faster by" if name == EXACT else f"of {name}" for name in others]
    short = short_names(names)
    cells = [
        (
            *(str(row[name]) for name in ("layers", "length")),
            short[row["attention"]],
            "not run" if row["seconds"] is None else human_time(row["seconds"]),
            *(_ratio(row, name, seconds(rows, row, name)) for name in others),
            human_bytes(row["peak"]),
            str(row["rounds"] or ""),
        )
        for row in rows
    ]
    return table(
        f"The {rows[0]['size']} encoder, {rows[0]['kind']} of one sequence",
        ("layers", "tokens", "attention", "a step", *ratios, "peak", "rounds"),
        cells,
        left=3,
        caption="\n".join(("not run:", *skipped)) if skipped else None,
    )


def _ratio(row: Row, name: str, other: float | None) -> str:
    """Ratio of times: above 1 a row is faster than softmax, or slower than a bound."""
    if row["seconds"] is None or other is None or row["attention"] == name:
        return ""
    return human_ratio(other / row["seconds"] if name == EXACT else row["seconds"] / other)


def _lines(rows: Sequence[Row], by: str) -> dict[str, list[tuple[int, float]]]:
    """Points of a field of the rows and milliseconds, by attention."""
    lines = {
        name: sorted((x[by], x["seconds"] * 1e3) for x in where(rows, attention=name) if x["seconds"] is not None)
        for name in unique(rows, "attention")
    }
    return {name: points for name, points in lines.items() if points}


def _panels(rows: Sequence[Row]) -> list[list[tuple[str, str, list[Row]]]]:
    """Panels for each size: the passes over the length, and training over the layers; (title, field, rows) each."""
    panels = []
    for size in unique(rows, "size"):
        mine = where(rows, size=size)
        base = mine[0]["layers"]
        line = [(f"{size}, {base} layers, {kind}", "length", where(mine, kind=kind, layers=base)) for kind in PASSES]
        deep = [x["length"] for x in mine if x["layers"] != base]
        if deep:
            trained = where(mine, kind=PASSES[1], length=max(deep))
            line.append((f"{size}, {max(deep)} tokens, {PASSES[1]}", "layers", trained))
        panels.append(line)
    return panels


def picture(record: Record, path: Path) -> None:
    """Draw Performer's Fig. 3 and 20: one row per size, a step's time over the length and over the layers."""
    from matplotlib.ticker import LogLocator, NullFormatter

    panels = _panels(record.rows)
    names = [x for x in unique(record.rows, "attention") if x not in BOUNDS]
    style: dict[str, dict[str, Any]] = {
        name: {"color": f"C{index % 10}", "linestyle": ("-", ":", "-.")[index // 10 % 3]}
        for index, name in enumerate(names)
    }
    style |= {"opt": {"color": "k", "linestyle": "--"}, "opt+qk": {"color": "grey", "linestyle": "--"}}
    shape = (len(panels), max(map(len, panels)))
    with drawing(path, (4.2 * shape[1] + 2.6, 3.8 * shape[0]), *shape) as (figure, axes):
        for line, row in zip(panels, axes, strict=True):
            for axis in row[len(line) :]:
                axis.set_visible(False)
            for (title, by, rows), axis in zip(line, row, strict=False):
                for name, points in _lines(rows, by).items():
                    axis.plot(*zip(*points, strict=True), marker="o", label=name, **style[name])
                axis.set_title(title, fontsize="medium")
                axis.set(xlabel="tokens" if by == "length" else by, ylabel="ms")
                axis.set_xscale("log", base=2)
                axis.set_xticks(sorted({x[by] for x in rows}))
                axis.xaxis.set_major_formatter("{x:.0f}")
                axis.set_yscale("log")
                axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
                axis.yaxis.set_major_formatter("{x:g}")
                axis.yaxis.set_minor_formatter(NullFormatter())
                axis.grid(True, which="both", alpha=0.2)
        handles = {label: x for axis in axes.flat for x, label in zip(*axis.get_legend_handles_labels(), strict=True)}
        figure.legend(handles.values(), handles.keys(), loc="outside right center", fontsize="small")


STUDY = Study(
    "encoder",
    "Performer (2009.14794), Fig. 3 and 20",
    EncoderSettings,
    steps,
    run,
    tables,
    picture,
    resumes=True,
    examples=(("--sizes small --lengths 1024,4096", "whole encoders against SDPA"),),
)
