"""How `studies.features` measures one attention: which ones there are, their errors and their times."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor

from kernelformer.conversion.readers import each_text
from kernelformer.environment import environment
from kernelformer.feature_maps import GeneralizedMap
from kernelformer.formatting import human_time
from kernelformer.hf.find import attention_calls, find_attentions
from kernelformer.hf.load import Source, load_source
from kernelformer.modules import METHODS, AttentionCore, build_attention, method_options, parse_method
from kernelformer.page import style
from kernelformer.settings import plain
from kernelformer.timing import Step, time_rounds
from kernelformer_lab.studies.base import Log, Progress, read_record, write_record
from kernelformer_lab.studies.settings import FeaturesSettings as Settings

SYNTHETIC = ("isotropic", "anisotropic")


@dataclass(frozen=True)
class About:
    """What a case is, without its tensors.

    Args:
        kind: one of `SYNTHETIC`, or the name of a model.
        norm: of all queries and keys as the kernel sees them, times sqrt(scale); None: those of a model.
        tokens: L.
        head_dim: D.
        causal: whether a token sees earlier ones only.
        query_norm: mean norm of the queries as the kernel sees them.
        key_norm: the same of the keys.
    """

    kind: str
    norm: float | None
    tokens: int
    head_dim: int
    causal: bool
    query_norm: float
    key_norm: float


@dataclass(frozen=True)
class Case:
    """Queries, keys and values (B, H, L, D), and other ones (B, H, L, D) of the same kind to calibrate on.

    Vectors are such that the default scale, 1 / sqrt(D), is theirs.
    """

    about: About
    query: Tensor
    key: Tensor
    value: Tensor
    other_query: Tensor
    other_key: Tensor


def case_names(settings: Settings) -> list[str]:
    """The names of all cases, in their order: each kind and norm, then each model."""
    synthetic = [synthetic_name(kind, norm) for kind in SYNTHETIC for norm in settings.norms]
    return [*synthetic, *(Path(x).name for x in settings.model)]


def synthetic_name(kind: str, norm: float) -> str:
    """The name of a case of given norms."""
    return f"{kind}, norm {norm:g}"


def make_case(settings: Settings, name: str) -> Case:
    """Draw or capture the case of a name."""
    for kind in SYNTHETIC:
        for norm in settings.norms:
            if name == synthetic_name(kind, norm):
                return synthetic_case(settings, kind, norm)
    index = [Path(x).name for x in settings.model].index(name)
    return captured_case(settings, settings.model[index], settings.text[min(index, len(settings.text) - 1)])


def synthetic_case(settings: Settings, kind: str, norm: float) -> Case:
    """Draw queries and keys of one norm in random directions, and Gaussian values; samples take the place of heads.

    Isotropic: all directions alike. Anisotropic: variances 1 / i in D orthogonal directions, which are random, and a
    sample's own, the same for queries and keys.
    """
    samples, length, dim = settings.samples, settings.length, settings.head_dim
    gen = torch.Generator().manual_seed(settings.seed)
    basis = torch.linalg.qr(torch.randn(samples, dim, dim, generator=gen)).Q
    spread = torch.ones(dim) if kind == "isotropic" else torch.arange(1, dim + 1) ** -0.5

    def draw() -> Tensor:
        x = (torch.randn(1, samples, length, dim, generator=gen) * spread) @ basis
        return F.normalize(x, dim=-1).mul_(norm * dim**0.25)

    vectors = [draw() for _ in range(4)]
    value = torch.randn(1, samples, length, dim, generator=gen)
    about = About(kind, norm, length, dim, False, norm, norm)
    return Case(about, vectors[0], vectors[1], value, vectors[2], vectors[3])


def captured_case(settings: Settings, path: str, text: str) -> Case:
    """Take queries, keys and values of some heads of a pretrained model on texts; other texts are to calibrate on.

    Heads are spread over all layers. Texts are the first ones that fill ``length`` tokens, cut there; if those are too
    few, the longest ones, cut to the shortest of them.

    Raises:
        ValueError: too few texts, or a model whose attentions are not all alike and to their own tokens.
    """
    source = load_source(path, allow_pickle=settings.allow_pickle)
    scale, causal = _attention_of(source, path)
    ids = _token_ids(source.tokenizer, Path(text), settings.length, 2 * settings.texts)
    own, other = (_some_heads(source.model, x, settings.heads) for x in ids.split(settings.texts))
    dim = own[0].shape[-1]
    root = math.sqrt(scale * math.sqrt(dim))  # to the default scale, half of it on either side
    query, key, other_query, other_key = (x * root for x in (own[0], own[1], other[0], other[1]))
    norms = [float(x.norm(dim=-1).mean()) / dim**0.25 for x in (query, key)]
    about = About(Path(path).name, None, ids.shape[1], dim, causal, norms[0], norms[1])
    return Case(about, query, key, own[2], other_query, other_key)


def _attention_of(source: Source, path: str) -> tuple[float, bool]:
    """Scale and causality that all attentions of a model have."""
    if source.tokenizer is None:
        raise ValueError(f"{path} has no tokenizer, so that it cannot read a text; give a folder that has one.")
    attentions = find_attentions(source.model)
    if any(x.cross for x in attentions):
        raise ValueError(f"{path} attends to another sequence; give a model of one sequence, an encoder or a decoder.")
    ways = {(x.scale, x.causal) for x in attentions}
    if len(ways) > 1:
        raise ValueError(f"attentions of {path} differ in (scale, causal), got {sorted(ways)}; give another model.")
    return ways.pop()


def _token_ids(tokenizer: Any, path: Path, length: int, count: int) -> Tensor:
    """Token ids (count, L) of the first texts that fill ``length`` tokens, or of the longest ones."""

    def ids(text: str, most: int) -> list[int]:
        tokens: list[int] = tokenizer(text, truncation=True, max_length=most)["input_ids"]
        return tokens

    texts: list[tuple[int, str]] = []
    missing = count
    for text in each_text(path):
        texts.append((len(ids(text, length)), text))
        missing -= texts[-1][0] == length
        if not missing:
            break
    if len(texts) < count:
        raise ValueError(f"{path} has {len(texts)} texts, and {count} are needed: half of them to calibrate on.")
    longest = sorted(texts, key=lambda x: x[0], reverse=True)[:count]  # stable: of equal ones the first
    return torch.tensor([ids(text, longest[-1][0]) for _, text in longest])


def _some_heads(model: Any, ids: Tensor, count: int) -> list[Tensor]:
    """Queries, keys and values (B, N, L, D) of at most ``count`` heads, each of a layer, spread over all layers."""
    calls = attention_calls(model, {"input_ids": ids}, outputs=False)
    layers = [(x.query, x.key, x.value) for x in calls]
    heads = layers[0][0].shape[1]
    count = min(count, heads * len(layers))
    chosen = [(layers[j * len(layers) // count], j % heads) for j in range(count)]
    # A head of keys serves several heads of queries where those are grouped.
    return [
        torch.stack([layer[part][:, head * layer[part].shape[1] // heads] for layer, head in chosen], 1)
        for part in range(3)
    ]


EXACT, WINDOW_ALONE, UNIFORM = "softmax", "window alone", "uniform"
REFERENCES = (EXACT, WINDOW_ALONE, UNIFORM)  # what methods are compared with


@dataclass(frozen=True)
class Row:
    """Errors of one attention in one case.

    Args:
        data: name of the case.
        window: tokens nearby that were exact; 0: none.
        attention: its spec, or one of `REFERENCES`.
        size: number of features or landmarks; None: it has none to set.
        outputs: |out - exact| / |exact| in the Frobenius norm, mean over heads and texts, one for each draw.
        rows: total variation distance of the attention rows, 1/2 sum_j |a_ij - exact_ij|, mean over all rows, one for
            each draw.
    """

    data: str
    window: int
    attention: str
    size: int | None
    outputs: Sequence[float]
    rows: Sequence[float]

    @property
    def output(self) -> tuple[float, float]:
        """Mean and standard error of the output's error over the draws."""
        return spread(self.outputs)

    @property
    def row(self) -> tuple[float, float]:
        """Mean and standard error of the rows' distance over the draws."""
        return spread(self.rows)

    def as_json(self) -> dict[str, Any]:
        """The row with its means and standard errors."""
        parts = {"output": self.output, "row": self.row}
        more = {f"{name}_{what}": x for name, pair in parts.items() for what, x in zip(SPREAD, pair, strict=True)}
        return {**asdict(self), **more}


SPREAD = ("mean", "standard_error")


def spread(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard error; 0 for one value, which was not drawn."""
    if len(values) == 1:
        return values[0], 0.0
    return statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))


@dataclass(frozen=True)
class Pass:
    """A forward pass: all that its time depends on."""

    head_dim: int
    causal: bool
    window: int
    attention: str
    size: int | None


@dataclass
class Result:
    """What the study has measured.

    Args:
        settings: of the study.
        attentions: specs that were measured, with or without a window.
        untrained: those of them that have weights to train, and were measured as they start.
        cases: by their names.
        rows: errors.
        times: median seconds of forward passes; None: it failed.
        left_out: by "case, window", then by attention: why it was not measured there.
    """

    settings: Settings
    attentions: list[str]
    untrained: list[str]
    cases: dict[str, About] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    times: dict[Pass, float | None] = field(default_factory=dict)
    left_out: dict[str, dict[str, str]] = field(default_factory=dict)

    def label(self, attention: str) -> str:
        """The name of an attention for people."""
        return f"{attention} (untrained)" if attention in self.untrained else attention

    def curves(self, data: str, window: int) -> dict[str, list[Row]]:
        """The rows of a case by attention, in the order of their sizes."""
        found: dict[str, list[Row]] = {}
        for row in self.rows:
            if (row.data, row.window) == (data, window):
                found.setdefault(row.attention, []).append(row)
        return {name: sorted(rows, key=lambda x: x.size or 0) for name, rows in found.items()}

    def seconds(self, row: Row) -> float | None:
        """Time of a forward pass of the attention of a row; None: it was not measured."""
        case = self.cases[row.data]
        return self.times.get(Pass(case.head_dim, case.causal, row.window, row.attention, row.size))

    def least_time(self, curve: Sequence[Row], error: float) -> tuple[float, Row] | None:
        """The least time among the sizes of an attention whose output error is at most ``error``; None: not reached."""
        reached = [(self.seconds(row), row) for row in curve if row.output[0] <= error]
        timed = [(seconds, row) for seconds, row in reached if seconds is not None]
        return min(timed, key=lambda x: x[0], default=None)

    def equal_errors(self) -> list[dict[str, Any]]:
        """Time at equal error: of each case, window, attention and bound, None where it is not reached."""
        found = []
        for data in self.cases:
            for window in self.settings.window:
                for name, curve in self.curves(data, window).items():
                    for error in self.settings.errors if name != UNIFORM else ():
                        best = self.least_time(curve, error)
                        seconds, size = (None, None) if best is None else (best[0], best[1].size)
                        key = {"data": data, "window": window, "attention": name, "error": error}
                        found.append({**key, "seconds": seconds, "size": size})
        return found


def record(result: Result) -> dict[str, Any]:
    """The result as plain JSON."""
    return {
        "attentions": result.attentions,
        "untrained": result.untrained,
        "cases": {name: asdict(x) for name, x in result.cases.items()},
        "rows": [x.as_json() for x in result.rows],
        "times": [{**asdict(x), "seconds": seconds} for x, seconds in result.times.items()],
        "left_out": result.left_out,
        "equal_errors": result.equal_errors(),
    }


def restore(result: Result, kept: Mapping[str, Any]) -> None:
    """Take what a `record` of the same settings holds."""
    result.cases = {name: About(**x) for name, x in kept["cases"].items()}
    result.rows = [Row(**{each.name: x[each.name] for each in fields(Row)}) for x in kept["rows"]]
    result.times = {Pass(**{each.name: x[each.name] for each in fields(Pass)}): x["seconds"] for x in kept["times"]}
    result.left_out = kept["left_out"]


# Options that make another map of a method; one that is not here is measured with its defaults.
VARIANTS: dict[str, tuple[str, ...]] = {
    "favor+": ("", "draw=simplex"),
    "skyformer": (
        "kernel=softmax:landmarks=uniform",
        "kernel=softmax:landmarks=segments",
        "kernel=softmax:landmarks=leverage",
        "kernel=softmax:landmarks=leverage:align=True",
        "kernel=softmax:landmarks=pivoted",
    ),
    "wildcat": ("", "pivots=greedy"),
}


def default_attentions() -> list[str]:
    """Specs of all methods that stand for softmax attention in linear time, without training.

    They have a number of features or landmarks, take the softmax's own scale, estimate its kernel, and have no weights
    to train.
    """
    names = [
        name
        for name, method in METHODS.items()
        if method.size is not None
        and not (method.quadratic or method.own_scale or issubclass(method.make, GeneralizedMap))
        and not is_learned(name)
    ]
    return [":".join(filter(None, (name, options))) for name in names for options in VARIANTS.get(name, ("",))]


def is_learned(spec: str) -> bool:
    """Whether an attention has weights to train."""
    return any(True for _ in Sized.of(spec, 8).build(head_dim=8, num_heads=1, length=8).parameters())


@dataclass(frozen=True)
class Sized:
    """An attention with its number of features or landmarks.

    Args:
        spec: method and options, as it was given.
        method: its name.
        options: of `build_attention`.
        size: number of features or landmarks; None: the method has none to set.
    """

    spec: str
    method: str
    options: dict[str, Any]
    size: int | None

    @staticmethod
    def of(spec: str, size: int | None = None) -> Sized:
        """Read a spec; a size that it has itself goes before the given one, a method without sizes takes none."""
        method, options = parse_method(spec)
        name = METHODS[method].size
        if name is None:
            return Sized(spec, method, options, None)
        own = options.get(name, size)
        return Sized(spec, method, options if own is None else {**options, name: own}, own)

    def refusal(self, *, causal: bool, window: int) -> str | None:
        """Why it cannot be measured in a case; None where it can."""
        method = METHODS[self.method]
        if causal and not method.holds(method.causal, self.options):
            return "not causal"
        if not causal and not method.cross:
            return "causal only"
        return "takes no window" if window and not self._takes_window() else None

    def _takes_window(self) -> bool:
        method = METHODS[self.method]
        if not method.holds(method.window, self.options):
            return False
        try:
            Sized.of(self.spec, 8).build(head_dim=8, num_heads=1, length=8, window=2)
        except ValueError:  # an option that stands against it
            return False
        return True

    def build(self, *, head_dim: int, num_heads: int, length: int, seed: int = 0, **near: int) -> AttentionCore:
        """Build the core; ``near`` are window and sinks."""
        known = method_options(self.method)
        given = {"seed": seed, "max_length": length}
        more = {name: x for name, x in given.items() if name in known and name not in self.options}
        return build_attention(self.method, head_dim=head_dim, num_heads=num_heads, **more, **near, **self.options)


def sizes_of(spec: str, settings: Settings) -> list[Sized]:
    """An attention in all sizes that are asked for; once where it has a size of its own, or none."""
    found = [Sized.of(spec, m) for m in sorted(set(settings.features))]
    return list({x.size: x for x in found}.values())


def near_options(settings: Settings, window: int) -> dict[str, int]:
    """Options of a core with a window; none for 0."""
    return {"window": window, "sinks": settings.sinks} if window else {}


def calibrated(core: AttentionCore, query: Tensor, key: Tensor) -> AttentionCore:
    """The core, calibrated on other queries and keys (B, H, L, D) where its map depends on their statistics."""
    if core.calibrates:
        core.calibrate(query, key)
    return core


class Target:
    """Exact attention in one case, and the distances of others from it.

    Args:
        case: queries, keys and values.
    """

    def __init__(self, case: Case) -> None:
        self.case = case
        self.shape = {"head_dim": case.about.head_dim, "num_heads": case.query.shape[1]}
        self.output, self.rows = self._attend(build_attention(EXACT, **self.shape))

    @torch.no_grad()
    def _attend(self, core: AttentionCore) -> tuple[Tensor, Tensor]:
        """Output (B, H, L, D) and rows (B, H, L, L)."""
        case, causal = self.case, self.case.about.causal
        output = core(case.query, case.key, case.value, is_causal=causal)
        return output, core.attention_matrix(case.query, case.key, is_causal=causal)

    def distances(self, output: Tensor, rows: Tensor) -> tuple[float, float]:
        """Relative Frobenius error of the output, mean over heads, and total variation distance of the rows, mean."""
        error = (output - self.output).double().norm(dim=(-2, -1)) / self.output.double().norm(dim=(-2, -1))
        return float(error.mean()), float(0.5 * (rows - self.rows).double().abs().sum(-1).mean())

    def of_core(self, core: AttentionCore) -> tuple[float, float]:
        """The distances of a core."""
        return self.distances(*self._attend(core))

    def of_uniform(self) -> tuple[float, float]:
        """The distances of attention that gives all visible keys the same weight."""
        weights = torch.ones_like(self.rows)
        weights = weights.tril() if self.case.about.causal else weights
        weights = weights / weights.sum(-1, keepdim=True)
        return self.distances(weights @ self.case.value, weights)


def reference_rows(target: Target, settings: Settings, data: str, window: int) -> list[Row]:
    """Exact attention, uniform attention, and the window without anything else."""
    found = {EXACT: (0.0, 0.0), UNIFORM: target.of_uniform()}
    if window:
        local = build_attention("local", **target.shape, **near_options(settings, window))
        found[WINDOW_ALONE] = target.of_core(local)
    return [Row(data, window, name, None, [output], [rows]) for name, (output, rows) in found.items()]


def measured_row(target: Target, settings: Settings, data: str, window: int, sized: Sized) -> Row:
    """Errors of one attention over independent draws."""
    case, near = target.case, near_options(settings, window)
    found = []
    for draw in range(settings.draws):
        core = sized.build(**target.shape, length=case.about.tokens, seed=settings.seed + draw, **near)
        found.append(target.of_core(calibrated(core, case.other_query, case.other_key)))
    outputs, rows = zip(*found, strict=True)
    return Row(data, window, sized.spec, sized.size, outputs, rows)


@torch.no_grad()
def measured_times(
    settings: Settings, specs: Sequence[str], *, head_dim: int, causal: bool, window: int
) -> dict[Pass, float | None]:
    """Median seconds of forward passes of all attentions and sizes, interleaved, over ``time_length`` tokens.

    Queries and keys have norms of about 1 as the kernel sees them; the time of hardly any method depends on them.
    """
    gen = torch.Generator().manual_seed(settings.seed)
    shape = (1, settings.heads, settings.time_length, head_dim)
    q, k, v = (torch.randn(shape, generator=gen) * s for s in (head_dim**-0.25, head_dim**-0.25, 1.0))
    sizes: dict[str, int] = {"head_dim": head_dim, "num_heads": settings.heads}
    near = near_options(settings, window)
    cores: dict[tuple[str, int | None], AttentionCore] = {(EXACT, None): build_attention(EXACT, **sizes)}
    if window:
        cores[WINDOW_ALONE, None] = build_attention("local", **sizes, **near)
    for spec in specs:
        if Sized.of(spec).refusal(causal=causal, window=window) is not None:
            continue
        for sized in sizes_of(spec, settings):
            core = sized.build(**sizes, length=settings.time_length, **near)
            cores[spec, sized.size] = calibrated(core, q[:, :, :256], k[:, :, :256])
    steps = {str(key): Step(partial(core, q, k, v, is_causal=causal)) for key, core in cores.items()}
    figures = time_rounds(steps, settings.rounds, 0.0)
    return {Pass(head_dim, causal, window, *key): figures[str(key)].get("seconds") for key in cores}


NOT_REACHED = "not reached"
CELLS = "error of the output, relative, ± standard error over draws; in brackets: total variation distance of the rows"


def tables(result: Result) -> list[Table]:
    """Errors by norm at one size, errors of models by size, time at equal error, and what reaches an error first."""
    settings = result.settings
    found = []
    for window in settings.window:
        found += [_by_norm(result, kind, window) for kind in SYNTHETIC if settings.norms]
    models = [name for name, x in result.cases.items() if x.norm is None]
    for name in models:
        found += [_by_size(result, name, window) for window in settings.window]
    for name in models:
        found += [_times(result, name, window) for window in settings.window]
    return [*found, _fastest(result)]


def markdown(result: Result) -> str:
    """All tables in Markdown."""
    parts = []
    for table in tables(result):
        rows = [[str(x.header) for x in table.columns], ["---"] * len(table.columns)]
        rows += [list(cells) for cells in zip(*([str(y) for y in x.cells] for x in table.columns), strict=True)]
        lines = [f"| {' | '.join(row)} |" for row in rows]
        parts.append(
            "\n".join([f"**{table.title}**", "", *lines, *(["", str(table.caption)] if table.caption else [])])
        )
    return "\n\n".join(parts) + "\n"


def _grid(title: str, left: Sequence[str], columns: Sequence[str], caption: str | None = None) -> Table:
    table = Table(title=title, caption=caption, title_justify="left", caption_justify="left")
    for name in left:
        table.add_column(name, no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _cell(row: Row | None) -> str:
    """The errors of a row."""
    if row is None:
        return ""
    mean, error = row.output
    return f"{mean:.3f} ± {error:.3f} ({row.row[0]:.2f})" if len(row.outputs) > 1 else f"{mean:.3f} ({row.row[0]:.2f})"


def _near(result: Result, window: int) -> str:
    return f"window {window}, sinks {result.settings.sinks}" if window else "no window"


def _middle(sizes: Sequence[int]) -> int:
    """The size that tables of many cases show: 128 if it is there."""
    return 128 if 128 in sizes else sorted(sizes)[len(sizes) // 2]


def _by_norm(result: Result, kind: str, window: int) -> Table:
    """Errors of synthetic cases by norm, at one size."""
    settings = result.settings
    size = _middle(settings.features)
    curves = {norm: result.curves(synthetic_name(kind, norm), window) for norm in settings.norms}
    table = _grid(
        f"{kind.capitalize()} queries and keys, {settings.length} tokens, {size} features or landmarks, "
        f"{_near(result, window)}",
        ("attention",),
        [f"norm {x:g}" for x in settings.norms],
        CELLS,
    )
    for name in dict.fromkeys(name for x in curves.values() for name in x):
        rows = [[row for row in x.get(name, []) if row.size in (size, None)] for x in curves.values()]
        table.add_row(result.label(name), *(_cell(x[0] if x else None) for x in rows))
    return table


def _headline(result: Result, name: str, window: int) -> str:
    case = result.cases[name]
    way = ", causal" if case.causal else ""
    return (
        f"{name}, {case.tokens} tokens{way}, norms of q and k {case.query_norm:.1f} and {case.key_norm:.1f}, "
        f"{_near(result, window)}"
    )


def _left_out(result: Result, name: str, window: int) -> str:
    refused = result.left_out[f"{name}, window {window}"]
    return f"\nleft out: {', '.join(f'{x} ({why})' for x, why in refused.items())}" if refused else ""


def _by_size(result: Result, name: str, window: int) -> Table:
    """Errors of a model's attention by size."""
    curves = result.curves(name, window)
    sizes = sorted({row.size for rows in curves.values() for row in rows if row.size is not None})
    caption = CELLS + _left_out(result, name, window)
    table = _grid(_headline(result, name, window), ("attention",), [f"m = {x}" for x in sizes], caption)
    for attention, rows in curves.items():
        by_size = {row.size: row for row in rows}
        cells = [_cell(by_size.get(m)) for m in sizes]
        if None in by_size:
            cells[0] = _cell(by_size[None])
        table.add_row(result.label(attention), *cells)
    return table


def _times(result: Result, name: str, window: int) -> Table:
    """The least time of each attention at which a model's error is small enough."""
    settings = result.settings
    table = _grid(
        f"Time at equal error: {_headline(result, name, window)}",
        ("attention",),
        [f"error {x:g}" for x in settings.errors],
        f"of a forward over {settings.time_length} tokens, {settings.heads} heads, its m in brackets; the largest m is "
        f"{max(settings.features)}",
    )
    for attention, rows in result.curves(name, window).items():
        if attention != UNIFORM:
            table.add_row(result.label(attention), *(_least(result, rows, x) for x in settings.errors))
    return table


def _least(result: Result, rows: Sequence[Row], error: float) -> str:
    best = result.least_time(rows, error)
    if best is None:
        return NOT_REACHED
    size = "" if best[1].size is None else f" ({best[1].size})"
    return f"{human_time(best[0])}{size}"


def _fastest(result: Result) -> Table:
    """Of each case and window the attention that reaches each error first; the error of doing nothing beside it."""
    settings = result.settings
    table = _grid(
        f"What reaches an error of the output in the least time, of a forward over {settings.time_length} tokens",
        ("data", "window", f"error of {UNIFORM}"),
        [*(f"error {x:g}" for x in settings.errors), "exact"],
    )
    for name in result.cases:
        for window in settings.window:
            curves = result.curves(name, window)
            cells = [_first(result, curves, error) for error in settings.errors]
            uniform = f"{curves[UNIFORM][0].output[0]:.3f}"
            table.add_row(name, str(window), uniform, *cells, _least(result, curves[EXACT], 0.0))
    return table


def _first(result: Result, curves: Mapping[str, Sequence[Row]], error: float) -> str:
    """The attention that reaches an error in the least time, with its time."""
    reached = [(best[0], name) for name, rows in curves.items() if (best := result.least_time(rows, error))]
    if not reached:
        return NOT_REACHED
    name = min(reached)[1]
    return f"{result.label(name)} {_least(result, curves[name], error)}"


INK = {UNIFORM: "#808080", WINDOW_ALONE: "#1b1e23"}
GREYS = (14, 15)  # of the colours of matplotlib's tab20: those of a reference
TOP = 3.0
BOTTOM = 0.01  # what has as many landmarks as there are keys is exact, and would press the rest together
Panel = Callable[[Any], None]


def picture(result: Result, path: Path) -> None:
    """Draw one panel for each norm and for each model and window: errors over features, and over time below or beside.

    Lines across: uniform attention (dotted) and the window alone (dashed); the vertical line: the time of exact
    attention.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    grid = _panels(result)
    width, height = max(len(x) for x in grid), len(grid)
    with mpl.rc_context({"text.parse_math": False, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(3.3 * width, 2.7 * height + 1.2), layout="constrained")
        axes = figure.subplots(height, width, squeeze=False)
        for line, panels in zip(axes, grid, strict=True):
            for axis in line[len(panels) :]:
                axis.set_visible(False)
            for axis, draw in zip(line, panels, strict=False):
                draw(axis)
                _scale(axis)
            line[0].set_ylabel("error of the output")
        _legend(figure, result)
        figure.savefig(path, dpi=120)


def _panels(result: Result) -> list[list[Panel]]:
    """Panels by row: synthetic ones of the first window, over features and over time; a row for each model."""
    settings = result.settings
    first = settings.window[0]

    def panel(name: str, window: int, by_time: bool = False, rows: bool = False) -> Panel:
        return lambda axis: _panel(axis, result, name, window, by_time, rows)

    grid = [
        [panel(synthetic_name(kind, norm), first, by_time) for norm in settings.norms]
        for kind in SYNTHETIC
        for by_time in (False, True)
        if settings.norms
    ]
    for name in (name for name, x in result.cases.items() if x.norm is None):
        pairs = [panel(name, window, by_time) for window in settings.window for by_time in (False, True)]
        grid.append([*pairs, panel(name, first, rows=True)])
    return grid


def _scale(axis: Any) -> None:
    """Logarithmic errors with plain numbers; what is above `TOP` is of no use, and would press the rest together."""
    axis.set_yscale("log", subs=[])
    axis.yaxis.set_major_locator(_ticks(1, 2, 5))
    axis.yaxis.set_major_formatter("{x:g}")
    low, high = axis.get_ylim()
    axis.set_ylim(max(min(low, TOP / 10), BOTTOM), min(high, TOP))
    axis.grid(True, alpha=0.15)


def _ticks(*digits: int) -> Any:
    """Ticks of a logarithmic axis at these digits; matplotlib's own crowd where the range is small."""
    from matplotlib.ticker import FixedLocator

    return FixedLocator([x * 10.0**power for power in range(-8, 5) for x in digits])


def _styles(result: Result) -> dict[str, dict[str, Any]]:
    """Look of each attention: there are more than a report has colours for."""
    import matplotlib as mpl

    dark_first = [mpl.colormaps["tab20"](i) for i in (*range(0, 20, 2), *range(1, 20, 2)) if i not in GREYS]
    looks = ({**style(i), "color": dark_first[i % 18], "markersize": 4} for i in range(len(result.attentions)))
    return dict(zip(result.attentions, looks, strict=True))


def _panel(axis: Any, result: Result, name: str, window: int, by_time: bool, rows: bool) -> None:
    """Draw the curves of all attentions in one case."""

    def value(row: Row) -> tuple[float, float]:
        return row.row if rows else row.output

    curves = result.curves(name, window)
    for attention, look in _styles(result).items():
        points = [
            (x, *value(row))
            for row in curves.get(attention, [])
            if (x := result.seconds(row) if by_time else row.size) is not None
        ]
        if points:
            places, values, spread = zip(*points, strict=True)
            axis.errorbar(places, values, yerr=spread, **look)
    for reference, colour in INK.items():
        if reference in curves:
            axis.axhline(value(curves[reference][0])[0], color=colour, linestyle=":" if reference == UNIFORM else "--")
    exact = result.seconds(curves[EXACT][0])
    if by_time:
        axis.set_xscale("log", subs=[])
        axis.xaxis.set_major_locator(_ticks(1, 3))
        axis.xaxis.set_major_formatter(lambda x, _: human_time(x))
        if exact is not None:
            axis.axvline(exact, color=INK[WINDOW_ALONE], linewidth=0.8)
    else:
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter("{x:.0f}")
    axis.set_xlabel(f"time, {result.settings.time_length} tokens" if by_time else "features or landmarks")
    what = ", rows (total variation)" if rows else ""
    axis.set_title(f"{name}{f', window {window}' if window else ''}{what}", size=9)


def _legend(figure: Any, result: Result) -> None:
    from matplotlib.lines import Line2D

    lines = [Line2D([], [], **look, label=result.label(name)) for name, look in _styles(result).items()]
    lines += [
        Line2D([], [], color=colour, linestyle=":" if name == UNIFORM else "--", label=name)
        for name, colour in INK.items()
    ]
    lines.append(Line2D([], [], color=INK[WINDOW_ALONE], linewidth=0.8, label="time of exact attention"))
    figure.legend(handles=lines, loc="outside lower center", ncols=3, fontsize="small", frameon=False)


__all__ = ["check_settings", "picture", "record", "run", "steps", "tables"]
NAME = "features"


def check_settings(settings: Settings) -> None:
    """Raise for settings that cannot be measured, before anything is."""
    for name in ("features", "window", "errors"):
        values = getattr(settings, name)
        if not values or len(set(values)) != len(values):
            raise ValueError(f"{name} must be different numbers, at least one, got {list(values)}.")
    names = case_names(settings)
    if not names or len(set(names)) != len(names):
        raise ValueError(
            f"norms and models must be different, at least one of either, got norms {list(settings.norms)} and models "
            f"{[Path(x).name for x in settings.model]}; models go by the last part of their paths."
        )
    if len(settings.text) not in {min(1, len(settings.model)), len(settings.model)}:
        raise ValueError(
            f"text must be one file for all models or one for each, got {len(settings.text)} for "
            f"{len(settings.model)} models."
        )
    for path in settings.text:
        if not Path(path).exists():
            raise ValueError(f"there is no file {path} to read text from.")


def steps(settings: Settings) -> int:
    """How often `run` calls ``progress``: for each case and window, and each window of a kind of case to be timed."""
    return len(settings.window) * (len(case_names(settings)) + len(_kinds(settings)))


def run(settings: Settings, folder: Path, log: Log, progress: Progress) -> Result:
    """Measure everything; see `studies.base`.

    Figures are written after each case and window. A study that was stopped goes on with the next one; one that was
    finished starts anew.
    """
    check_settings(settings)
    attentions = list(dict.fromkeys(settings.attention or default_attentions()))
    result = Result(settings, attentions, [x for x in attentions if is_learned(x)])
    _restore(result, folder)
    for part in (_measure_errors(result, log), _measure_times(result, log)):
        for new in part:
            if new:
                write_record(folder, NAME, settings, record(result))
            progress()
    (folder / f"{NAME}.md").write_text(markdown(result), encoding="utf-8")
    return result


def _kinds(settings: Settings) -> list[str]:
    """One case of each kind that may have passes of its own to time."""
    names = case_names(settings)
    return [*names[: min(1, len(settings.norms))], *names[len(names) - len(settings.model) :]]


def _restore(result: Result, folder: Path) -> None:
    """Take what a study of the same settings, attentions and machine has measured, if it was stopped."""
    kept = read_record(folder, NAME) or {}
    here = environment(torch.get_num_threads())
    same = kept.get("settings") == plain(result.settings) and kept["attentions"] == result.attentions
    if same and {**kept["environment"], "date": here["date"]} == here:
        before = Result(result.settings, result.attentions, result.untrained)
        restore(before, kept)
        if not _is_finished(before):
            restore(result, kept)


def _is_finished(result: Result) -> bool:
    windows = set(result.settings.window)
    errors = {(x.data, x.window) for x in result.rows} >= {(x, w) for x in case_names(result.settings) for w in windows}
    return errors and all(_timed(result, name, w) for name in _kinds(result.settings) for w in windows)


def _timed(result: Result, name: str, window: int) -> bool:
    """Whether the passes of a case are timed."""
    case = result.cases[name]
    return any((x.head_dim, x.causal, x.window) == (case.head_dim, case.causal, window) for x in result.times)


def _measure_errors(result: Result, log: Log) -> Iterator[bool]:
    """Measure errors, a case and window at a time; True: anew."""
    settings = result.settings
    for name in case_names(settings):
        done = {x.window for x in result.rows if x.data == name}
        yield from (False for _ in done)
        left = [x for x in settings.window if x not in done]
        if not left:
            continue
        log(f"{name}: queries and keys")
        case = make_case(settings, name)
        target = Target(case)
        result.cases[name] = case.about
        for window in left:
            rows = reference_rows(target, settings, name, window)
            refused: dict[str, str] = {}
            for spec in result.attentions:
                reason = Sized.of(spec).refusal(causal=case.about.causal, window=window)
                if reason is not None:
                    refused[spec] = reason
                    continue
                log(f"{name}, window {window}: {spec}")
                rows += [measured_row(target, settings, name, window, x) for x in sizes_of(spec, settings)]
            result.rows += rows
            result.left_out[f"{name}, window {window}"] = refused
            yield True


def _measure_times(result: Result, log: Log) -> Iterator[bool]:
    """Time the passes of all cases, a head dimension, causality and window at a time; True: anew."""
    for name in _kinds(result.settings):
        case = result.cases[name]
        for window in result.settings.window:
            new = not _timed(result, name, window)
            if new:
                way = "causal" if case.causal else "bidirectional"
                log(f"timing, {way}, {case.head_dim} dimensions, window {window}")
                result.times |= measured_times(
                    result.settings, result.attentions, head_dim=case.head_dim, causal=case.causal, window=window
                )
            yield new
