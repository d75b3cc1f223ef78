"""Errors of attention by number of features, and time at equal error, of all maps that stand for softmax."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor

from kernelformer.conversion.readers import each_text
from kernelformer.feature_maps import GeneralizedMap
from kernelformer.formatting import human_time
from kernelformer.hf.find import attention_calls, find_attentions
from kernelformer.hf.load import Source, load_source
from kernelformer.modules import METHODS, AttentionCore, build_attention, method_options, parse_method
from kernelformer.page import style
from kernelformer.settings import PICKLE, SEED, Settings, numbers, option, split_names
from kernelformer_lab.analysis.statistics import mean_and_error
from kernelformer_lab.bench.timing import Step, time_rounds
from kernelformer_lab.figures import drawing, table
from kernelformer_lab.studies.base import SPECS, Log, Progress, Record, Row, Study, unique, where

SYNTHETIC = ("isotropic", "anisotropic")


def _windows(name: str, text: str) -> tuple[int, ...]:
    """Integers of at least 0 between commas."""
    parts = split_names(text)
    if not all(x.isdecimal() for x in parts):
        raise ValueError(f"{name} takes integers of at least 0, separated by commas, got {text!r}; say 0,32.")
    return tuple(int(x) for x in parts)


@dataclass(frozen=True, kw_only=True)
class FeaturesSettings(Settings):
    """Settings of this study."""

    attention: tuple[str, ...] = option((), f"{SPECS}; default: all that stand for softmax without training")
    features: tuple[int, ...] = option((16, 32, 64, 128, 256), "numbers of features or landmarks", least=2)
    norms: tuple[float, ...] = option(
        (0.5, 1.0, 2.0, 3.0, 4.0),
        "of synthetic queries and keys, times sqrt(scale); 'none' for none",
        least=0.01,
        parse=lambda name, text: () if text in ("", "none") else numbers(name, text),
    )
    model: tuple[str, ...] = option((), "pretrained models, folders or names, separated by commas", path=True)
    text: tuple[str, ...] = option((), "held-out text, a file for all models or one for each", path=True)
    texts: int = option(1, "texts of a model to measure on, and as many to calibrate on", least=1)
    length: int = option(512, "tokens, at most, of a text", least=2)
    heads: int = option(8, "heads of a model, spread over its layers, and of a timed forward", least=1)
    samples: int = option(3, "of synthetic queries, keys and values", least=1)
    head_dim: int = option(64, "of synthetic queries and keys", least=2)
    window: tuple[int, ...] = option((0, 32), "tokens nearby that are exact; 0: none", least=0, parse=_windows)
    sinks: int = option(1, "first tokens that are exact, with a window", least=0)
    draws: int = option(3, "of each map", least=3)
    errors: tuple[float, ...] = option((0.5, 0.2, 0.1), "of the output, for the time at equal error", least=1e-6)
    time_length: int = option(4096, "tokens of a timed forward", least=1)
    rounds: int = option(3, "timed forwards of each, interleaved", least=1)
    allow_pickle: bool = option(False, PICKLE, switch=True)
    seed: int = option(0, SEED, least=0)


@dataclass(frozen=True)
class About:
    """Description of a case, without its tensors.

    Args:
        kind: one of `SYNTHETIC`, or the name of a model.
        norm: of all queries and keys as the kernel sees them, times sqrt(scale); None: those of a model.
        causal: whether a token sees earlier ones only.
        query_norm: mean norm of the queries as the kernel sees them.
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


def case_names(settings: FeaturesSettings) -> list[str]:
    """The names of all cases, in their order: each kind and norm, then each model."""
    synthetic = [synthetic_name(kind, norm) for kind in SYNTHETIC for norm in settings.norms]
    return [*synthetic, *(Path(x).name for x in settings.model)]


def synthetic_name(kind: str, norm: float) -> str:
    """The name of a case of given norms."""
    return f"{kind}, norm {norm:g}"


def make_case(settings: FeaturesSettings, name: str) -> Case:
    """Draw or capture the case of a name."""
    for kind in SYNTHETIC:
        for norm in settings.norms:
            if name == synthetic_name(kind, norm):
                return synthetic_case(settings, kind, norm)
    index = [Path(x).name for x in settings.model].index(name)
    return captured_case(settings, settings.model[index], settings.text[min(index, len(settings.text) - 1)])


def synthetic_case(settings: FeaturesSettings, kind: str, norm: float) -> Case:
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


def captured_case(settings: FeaturesSettings, path: str, text: str) -> Case:
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


def new_row(data: str, window: int, attention: str, size: int | None, found: Sequence[tuple[float, float]]) -> Row:
    """Errors of one attention in one case.

    Args:
        window: tokens nearby that were exact; 0: none.
        attention: its spec, or one of `REFERENCES`.
        size: number of features or landmarks; None: it has none to set.
        found: for each draw |out - exact| / |exact| in the Frobenius norm, mean over heads and texts (``outputs``), and
            the total variation distance of the attention rows, 1/2 sum_j |a_ij - exact_ij|, mean over all (``rows``).
    """
    outputs, rows = (list(x) for x in zip(*found, strict=True))
    row = {"data": data, "window": window, "attention": attention, "size": size, "outputs": outputs, "rows": rows}
    for name, values in (("output", outputs), ("row", rows)):
        mean, error = mean_and_error(values)
        # One value was not drawn.
        row |= {f"{name}_mean": mean, f"{name}_standard_error": 0.0 if len(values) == 1 else error}
    return row


def label(record: Record, attention: str) -> str:
    """The name of an attention in tables."""
    return f"{attention} (untrained)" if attention in record.figures["untrained"] else attention


def curves(record: Record, data: str, window: int) -> dict[str, list[Row]]:
    """The rows of a case by attention, in the order of their sizes."""
    rows = record.where(data=data, window=window)
    return {x: sorted(where(rows, attention=x), key=lambda y: y["size"] or 0) for x in unique(rows, "attention")}


def seconds(record: Record, row: Row) -> float | None:
    """Time of a forward pass of the attention of a row; None: it was not measured."""
    case = record.figures["cases"][row["data"]]
    key = {name: row[name] for name in ("window", "attention", "size")}
    found = where(record.figures["times"], head_dim=case["head_dim"], causal=case["causal"], **key)
    return found[0]["seconds"] if found else None


def least_time(record: Record, curve: Sequence[Row], error: float) -> tuple[float, Row] | None:
    """The least time among the sizes of an attention whose output error is at most ``error``; None: not reached."""
    reached = [(seconds(record, row), row) for row in curve if row["output_mean"] <= error]
    timed = [(time, row) for time, row in reached if time is not None]
    return min(timed, key=lambda x: x[0], default=None)


def equal_errors(record: Record) -> list[Row]:
    """Time at equal error: of each case, window, attention and bound, None where it is not reached."""
    found = []
    for data in record.figures["cases"]:
        for window in record.settings.window:
            for name, curve in curves(record, data, window).items():
                for error in record.settings.errors if name != UNIFORM else ():
                    best = least_time(record, curve, error)
                    time, size = (None, None) if best is None else (best[0], best[1]["size"])
                    key = {"data": data, "window": window, "attention": name, "error": error}
                    found.append({**key, "seconds": time, "size": size})
    return found


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
    """Return True if an attention has weights to train."""
    return any(True for _ in Sized.of(spec, 8).build(head_dim=8, num_heads=1, length=8).parameters())


@dataclass(frozen=True)
class Sized:
    """An attention with its number of features or landmarks.

    Args:
        spec: method and options, as it was given.
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
        """Reason why it cannot be measured in a case; None where it can."""
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


def sizes_of(spec: str, settings: FeaturesSettings) -> list[Sized]:
    """An attention in all sizes that are asked for; once where it has a size of its own, or none."""
    found = [Sized.of(spec, m) for m in sorted(set(settings.features))]
    return list({x.size: x for x in found}.values())


def near_options(settings: FeaturesSettings, window: int) -> dict[str, int]:
    """Options of a core with a window; none for 0."""
    return {"window": window, "sinks": settings.sinks} if window else {}


def calibrated(core: AttentionCore, query: Tensor, key: Tensor) -> AttentionCore:
    """The core, calibrated on other queries and keys (B, H, L, D) where its map depends on their statistics."""
    if core.calibrates:
        core.calibrate(query, key)
    return core


class Target:
    """Exact attention in one case, and the distances of others from it."""

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


def reference_rows(target: Target, settings: FeaturesSettings, data: str, window: int) -> list[Row]:
    """Exact attention, uniform attention, and the window without anything else."""
    found = {EXACT: (0.0, 0.0), UNIFORM: target.of_uniform()}
    if window:
        local = build_attention("local", **target.shape, **near_options(settings, window))
        found[WINDOW_ALONE] = target.of_core(local)
    return [new_row(data, window, name, None, [x]) for name, x in found.items()]


def measured_row(target: Target, settings: FeaturesSettings, data: str, window: int, sized: Sized) -> Row:
    """Errors of one attention over independent draws."""
    case, near = target.case, near_options(settings, window)
    found = []
    for draw in range(settings.draws):
        core = sized.build(**target.shape, length=case.about.tokens, seed=settings.seed + draw, **near)
        found.append(target.of_core(calibrated(core, case.other_query, case.other_key)))
    return new_row(data, window, sized.spec, sized.size, found)


@torch.no_grad()
def measured_times(
    settings: FeaturesSettings, specs: Sequence[str], *, head_dim: int, causal: bool, window: int
) -> list[Row]:
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
    common = {"head_dim": head_dim, "causal": causal, "window": window}
    return [
        {**common, "attention": name, "size": size, "seconds": figures[str((name, size))].get("seconds")}
        for name, size in cores
    ]


NOT_REACHED = "not reached"
CELLS = "error of the output, relative, ± standard error over draws; in brackets: total variation distance of the rows"


def tables(record: Record) -> list[Table]:
    """Errors by norm at one size, errors of models by size, time at equal error, and what reaches an error first."""
    settings = record.settings
    found = []
    for window in settings.window:
        found += [_by_norm(record, kind, window) for kind in SYNTHETIC if settings.norms]
    models = [name for name, x in record.figures["cases"].items() if x["norm"] is None]
    for make in (_by_size, _times):
        found += [make(record, name, window) for name in models for window in settings.window]
    return [*found, _fastest(record)]


def markdown(record: Record) -> str:
    """All tables in Markdown."""
    parts = []
    for each in tables(record):
        rows = [[str(x.header) for x in each.columns], ["---"] * len(each.columns)]
        rows += [list(cells) for cells in zip(*([str(y) for y in x.cells] for x in each.columns), strict=True)]
        lines = [f"| {' | '.join(row)} |" for row in rows]
        parts.append("\n".join([f"**{each.title}**", "", *lines, *(["", str(each.caption)] if each.caption else [])]))
    return "\n\n".join(parts) + "\n"


def _cell(row: Row | None) -> str:
    """The errors of a row."""
    if row is None:
        return ""
    error = f" ± {row['output_standard_error']:.3f}" if len(row["outputs"]) > 1 else ""
    return f"{row['output_mean']:.3f}{error} ({row['row_mean']:.2f})"


def _near(record: Record, window: int) -> str:
    return f"window {window}, sinks {record.settings.sinks}" if window else "no window"


def _middle(sizes: Sequence[int]) -> int:
    """The size that tables of many cases show: 128 if it is there."""
    return 128 if 128 in sizes else sorted(sizes)[len(sizes) // 2]


def _by_norm(record: Record, kind: str, window: int) -> Table:
    """Errors of synthetic cases by norm, at one size."""
    settings = record.settings
    size = _middle(settings.features)
    found = [curves(record, synthetic_name(kind, norm), window) for norm in settings.norms]
    cells = []
    for name in dict.fromkeys(name for x in found for name in x):
        rows = [[row for row in x.get(name, []) if row["size"] in (size, None)] for x in found]
        cells.append((label(record, name), *(_cell(x[0] if x else None) for x in rows)))
    return table(
        f"{kind.capitalize()} queries and keys, {settings.length} tokens, {size} features or landmarks, "
        f"{_near(record, window)}",
        ("attention", *(f"norm {x:g}" for x in settings.norms)),
        cells,
        caption=CELLS,
    )


def _headline(record: Record, name: str, window: int) -> str:
    case = record.figures["cases"][name]
    way = ", causal" if case["causal"] else ""
    return (
        f"{name}, {case['tokens']} tokens{way}, norms of q and k {case['query_norm']:.1f} and {case['key_norm']:.1f}, "
        f"{_near(record, window)}"
    )


def _by_size(record: Record, name: str, window: int) -> Table:
    """Errors of a model's attention by size."""
    found, rows = curves(record, name, window), []
    sizes = sorted({row["size"] for some in found.values() for row in some if row["size"] is not None})
    for attention, some in found.items():
        by_size = {row["size"]: row for row in some}
        cells = [_cell(by_size.get(m)) for m in sizes]
        if None in by_size:
            cells[0] = _cell(by_size[None])
        rows.append((label(record, attention), *cells))
    refused = record.figures["left_out"][f"{name}, window {window}"]
    left_out = f"\nleft out: {', '.join(f'{x} ({why})' for x, why in refused.items())}" if refused else ""
    columns = ("attention", *(f"m = {x}" for x in sizes))
    return table(_headline(record, name, window), columns, rows, caption=CELLS + left_out)


def _times(record: Record, name: str, window: int) -> Table:
    """The least time of each attention at which a model's error is small enough."""
    settings = record.settings
    return table(
        f"Time at equal error: {_headline(record, name, window)}",
        ("attention", *(f"error {x:g}" for x in settings.errors)),
        [
            (label(record, attention), *(_least(record, rows, x) for x in settings.errors))
            for attention, rows in curves(record, name, window).items()
            if attention != UNIFORM
        ],
        caption=f"of a forward over {settings.time_length} tokens, {settings.heads} heads, its m in brackets; the "
        f"largest m is {max(settings.features)}",
    )


def _least(record: Record, rows: Sequence[Row], error: float) -> str:
    best = least_time(record, rows, error)
    if best is None:
        return NOT_REACHED
    size = "" if best[1]["size"] is None else f" ({best[1]['size']})"
    return f"{human_time(best[0])}{size}"


def _fastest(record: Record) -> Table:
    """Of each case and window the attention that reaches each error first; the error of doing nothing beside it."""
    settings, rows = record.settings, []
    for name in record.figures["cases"]:
        for window in settings.window:
            found = curves(record, name, window)
            cells = [_first(record, found, error) for error in settings.errors]
            uniform = f"{found[UNIFORM][0]['output_mean']:.3f}"
            rows.append((name, str(window), uniform, *cells, _least(record, found[EXACT], 0.0)))
    return table(
        f"What reaches an error of the output in the least time, of a forward over {settings.time_length} tokens",
        ("data", "window", f"error of {UNIFORM}", *(f"error {x:g}" for x in settings.errors), "exact"),
        rows,
        left=3,
    )


def _first(record: Record, found: dict[str, list[Row]], error: float) -> str:
    """The attention that reaches an error in the least time, with its time."""
    reached = [(best[0], name) for name, rows in found.items() if (best := least_time(record, rows, error))]
    if not reached:
        return NOT_REACHED
    name = min(reached)[1]
    return f"{label(record, name)} {_least(record, found[name], error)}"


INK = {UNIFORM: "#808080", WINDOW_ALONE: "#1b1e23"}
GREYS = (14, 15)  # of the colours of matplotlib's tab20: those of a reference
TOP = 3.0
BOTTOM = 0.01  # what has as many landmarks as there are keys is exact, and would press the rest together
Panel = Callable[[Any], None]


def picture(record: Record, path: Path) -> None:
    """Draw one panel for each norm and for each model and window: errors over features, and over time below or beside.

    Lines across: uniform attention (dotted) and the window alone (dashed); the vertical line: the time of exact
    attention.
    """
    grid = _panels(record)
    width, height = max(len(x) for x in grid), len(grid)
    with drawing(path, (3.3 * width, 2.7 * height + 1.2), height, width, dpi=120) as (figure, axes):
        for line, panels in zip(axes, grid, strict=True):
            for axis in line[len(panels) :]:
                axis.set_visible(False)
            for axis, draw in zip(line, panels, strict=False):
                draw(axis)
                _scale(axis)
            line[0].set_ylabel("error of the output")
        _legend(figure, record)


def _panels(record: Record) -> list[list[Panel]]:
    """Panels by row: synthetic ones of the first window, over features and over time; a row for each model."""
    settings = record.settings
    first = settings.window[0]

    def panel(name: str, window: int, by_time: bool = False, rows: bool = False) -> Panel:
        return lambda axis: _panel(axis, record, name, window, by_time, rows)

    grid = [
        [panel(synthetic_name(kind, norm), first, by_time) for norm in settings.norms]
        for kind in SYNTHETIC
        for by_time in (False, True)
        if settings.norms
    ]
    for name in (name for name, x in record.figures["cases"].items() if x["norm"] is None):
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


def _styles(attentions: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Look of each attention: there are more than a report has colours for."""
    import matplotlib as mpl

    dark_first = [mpl.colormaps["tab20"](i) for i in (*range(0, 20, 2), *range(1, 20, 2)) if i not in GREYS]
    looks = ({**style(i), "color": dark_first[i % 18], "markersize": 4} for i in range(len(attentions)))
    return dict(zip(attentions, looks, strict=True))


def _panel(axis: Any, record: Record, name: str, window: int, by_time: bool, rows: bool) -> None:
    """Draw the curves of all attentions in one case."""
    what = "row" if rows else "output"
    found = curves(record, name, window)
    for attention, look in _styles(record.figures["attentions"]).items():
        points = [
            (x, row[f"{what}_mean"], row[f"{what}_standard_error"])
            for row in found.get(attention, [])
            if (x := seconds(record, row) if by_time else row["size"]) is not None
        ]
        if points:
            places, values, errors = zip(*points, strict=True)
            axis.errorbar(places, values, yerr=errors, **look)
    for reference, colour in INK.items():
        for row in found.get(reference, []):
            axis.axhline(row[f"{what}_mean"], color=colour, linestyle=":" if reference == UNIFORM else "--")
    exact = seconds(record, found[EXACT][0])
    if by_time:
        axis.set_xscale("log", subs=[])
        axis.xaxis.set_major_locator(_ticks(1, 3))
        axis.xaxis.set_major_formatter(lambda x, _: human_time(x))
        if exact is not None:
            axis.axvline(exact, color=INK[WINDOW_ALONE], linewidth=0.8)
    else:
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter("{x:.0f}")
    axis.set_xlabel(f"time, {record.settings.time_length} tokens" if by_time else "features or landmarks")
    more = ", rows (total variation)" if rows else ""
    axis.set_title(f"{name}{f', window {window}' if window else ''}{more}", size=9)


def _legend(figure: Any, record: Record) -> None:
    from matplotlib.lines import Line2D

    looks = _styles(record.figures["attentions"])
    lines = [Line2D([], [], **look, label=label(record, name)) for name, look in looks.items()]
    lines += [
        Line2D([], [], color=colour, linestyle=":" if name == UNIFORM else "--", label=name)
        for name, colour in INK.items()
    ]
    lines.append(Line2D([], [], color=INK[WINDOW_ALONE], linewidth=0.8, label="time of exact attention"))
    figure.legend(handles=lines, loc="outside lower center", ncols=3, fontsize="small", frameon=False)


def check_settings(settings: FeaturesSettings) -> None:
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


def steps(settings: FeaturesSettings) -> int:
    """A step for each case and window, and for each window of a kind of case to be timed."""
    return len(settings.window) * (len(case_names(settings)) + len(_kinds(settings)))


PARTS: dict[str, Callable[[], Any]] = {"cases": dict, "rows": list, "times": list, "left_out": dict}


def run(record: Record, log: Log, progress: Progress) -> None:
    """Measure everything; see `studies.base`.

    Figures are written after each case and window. A study that was stopped is resumed with the next one; one that was
    finished starts anew.
    """
    check_settings(record.settings)
    attentions = list(dict.fromkeys(record.settings.attention or default_attentions()))
    record.figures = {"attentions": attentions, "untrained": [x for x in attentions if is_learned(x)]}
    kept = record.earlier_of_same_settings(same_machine=True)
    if kept.get("attentions") == attentions:
        record.figures |= {name: kept[name] for name in PARTS}
    if "rows" not in record.figures or _is_finished(record):
        record.figures |= {name: empty() for name, empty in PARTS.items()}
    for part in (_measure_errors(record, log), _measure_times(record, log)):
        for new in part:
            if new:
                record.figures["equal_errors"] = equal_errors(record)
                record.save()
            progress()
    record.figures["equal_errors"] = equal_errors(record)
    (record.folder / "features.md").write_text(markdown(record), encoding="utf-8")


def _kinds(settings: FeaturesSettings) -> list[str]:
    """One case of each kind that may have passes of its own to time."""
    names = case_names(settings)
    return [*names[: min(1, len(settings.norms))], *names[len(names) - len(settings.model) :]]


def _is_finished(record: Record) -> bool:
    windows, settings = set(record.settings.window), record.settings
    errors = set(unique(record.rows, "data", "window")) >= {(x, w) for x in case_names(settings) for w in windows}
    return errors and all(_timed(record, name, w) for name in _kinds(settings) for w in windows)


def _timed(record: Record, name: str, window: int) -> bool:
    """Return True if the passes of a case are timed."""
    case = record.figures["cases"][name]
    return bool(where(record.figures["times"], head_dim=case["head_dim"], causal=case["causal"], window=window))


def _measure_errors(record: Record, log: Log) -> Iterator[bool]:
    """Measure errors, a case and window at a time; True: anew."""
    settings = record.settings
    for name in case_names(settings):
        done = unique(record.where(data=name), "window")
        yield from (False for _ in done)
        left = [x for x in settings.window if x not in done]
        if not left:
            continue
        log(f"{name}: queries and keys")
        case = make_case(settings, name)
        target = Target(case)
        record.figures["cases"][name] = asdict(case.about)
        for window in left:
            rows = reference_rows(target, settings, name, window)
            refused: dict[str, str] = {}
            for spec in record.figures["attentions"]:
                reason = Sized.of(spec).refusal(causal=case.about.causal, window=window)
                if reason is not None:
                    refused[spec] = reason
                    continue
                log(f"{name}, window {window}: {spec}")
                rows += [measured_row(target, settings, name, window, x) for x in sizes_of(spec, settings)]
            record.rows.extend(rows)
            record.figures["left_out"][f"{name}, window {window}"] = refused
            yield True


def _measure_times(record: Record, log: Log) -> Iterator[bool]:
    """Time the passes of all cases, a head dimension, causality and window at a time; True: anew."""
    for name in _kinds(record.settings):
        case = record.figures["cases"][name]
        kind = {"head_dim": case["head_dim"], "causal": case["causal"]}
        for window in record.settings.window:
            new = not _timed(record, name, window)
            if new:
                way = "causal" if case["causal"] else "bidirectional"
                log(f"timing, {way}, {case['head_dim']} dimensions, window {window}")
                attentions = record.figures["attentions"]
                record.figures["times"] += measured_times(record.settings, attentions, **kind, window=window)
            yield new


STUDY = Study(
    "features",
    "",
    FeaturesSettings,
    steps,
    run,
    tables,
    picture,
    resumes=True,
    writes="features.md",
    examples=(
        ("--norms 1,3 --threads 1", "on synthetic queries and keys"),
        ("--model MODEL --text test.jsonl", "and on those of a pretrained model"),
    ),
)
