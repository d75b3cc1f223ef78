"""Trials of attentions in a pretrained model before it is converted: their errors, a quick fit, the model's output."""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from kernelformer.conversion.losses import Batch, Figure, Reference, attention_loss
from kernelformer.conversion.measure import CEILING, CallErrors
from kernelformer.conversion.tune import Stage, start_maps
from kernelformer.hf.convert import convert, cores, undo
from kernelformer.hf.find import attention_calls, find_attentions
from kernelformer.modules import METHODS, AttentionCore, build_attention, parse_method
from kernelformer.modules.calibration import evaluating
from kernelformer.modules.spec import maps_by_head

FEATURES = (32, 64, 128, 256, 512)
WINDOWS = (32, 64, 128)
LOCAL, LEARNED = "local", "loglinear"
# Methods without maps that learn, the likeliest first.
UNTRAINED = ("wildcat", "favor+", "favor#", "skyformer:kernel=softmax", "favor+hyperbolic")
START = (64, 128)  # of the coarse grid: window and features


@dataclass(frozen=True)
class Candidate:
    """A method with its size, window and sinks.

    Args:
        method: ``method:option=value:...`` without the following.
        size: number of features or landmarks; None where the method has none.
        window: 0 for none.
        fitted: maps are fitted, see `Trials.fit`; else they are where `start_maps` puts them.
    """

    method: str
    size: int | None
    window: int = 0
    sinks: int = 0
    fitted: bool = False

    @property
    def name(self) -> str:
        """The name of the method alone."""
        return self.method.partition(":")[0]

    @property
    def learned(self) -> bool:
        """True if it has maps that learn."""
        return self.name == LEARNED

    @property
    def group(self) -> str:
        """Kind of its error: of a window alone, of random features, of landmarks, of a fit; see `LossFit`."""
        return LEARNED + ", fitted" * self.fitted if self.learned else METHODS[self.name].family

    @property
    def spec(self) -> str:
        """The attention as ``convert`` takes it, without its size."""
        near = f":window={self.window}:sinks={self.sinks}" if self.window else ""
        return self.method + near

    @property
    def options(self) -> dict[str, Any]:
        """Options of the method, all of them."""
        _, options = parse_method(self.spec)
        name = METHODS[self.name].size
        return options if name is None else {**options, name: self.size}

    def __str__(self) -> str:
        """Write it for people."""
        return self.spec if self.size is None else f"{self.spec} ({self.size})"


def coarse_grid(*, causal: bool, length: int, first: str) -> list[Candidate]:
    """One size of each method, with and without a window, and windows alone, the widest first.

    Args:
        causal: only methods that attend token by token then, and 4 sinks instead of 1.
        first: the attention that comes before all others, see `propose`; its window is at most the widest.
    """
    windows, sinks = windows_for(length), 4 if causal else 1
    parsed = ((x, *parse_method(x)) for x in UNTRAINED)
    methods = [x for x, name, own in parsed if not causal or METHODS[name].holds(METHODS[name].causal, own)]
    local = [Candidate(LOCAL, None, w, sinks) for w in reversed(windows)]
    near = [w for w in windows if w <= START[0]][-1:]
    size = max(x for x in FEATURES if x <= max(FEATURES[0], min(START[1], length // 2)))
    name, options = parse_method(first)
    best = Candidate(name, size, min(options.get("window", 0), windows[-1]), options.get("sinks", 0))
    rest = [Candidate(x, size, w, sinks if w else 0) for w in (*near, 0) for x in methods]
    return list(dict.fromkeys([best, *local, *rest]))


def windows_for(length: int) -> list[int]:
    """Windows of at most a quarter of the length, so that half of a text is far; the smallest one in any case."""
    windows = [w for w in WINDOWS if 4 * w <= length] or [WINDOWS[0]]
    if 2 * WINDOWS[0] > length:
        raise ValueError(
            f"the texts have about {length} tokens, and the smallest window, {WINDOWS[0]} tokens to either side, "
            f"leaves nothing far in them; give longer texts, or a larger --length."
        )
    return windows


def neighbours(best: Iterable[Candidate], known: Iterable[Candidate], *, length: int) -> list[Candidate]:
    """Candidates that differ from some good ones in their window or their size, and are not known yet."""
    windows = windows_for(length)
    new: list[Candidate] = []
    for x in best:
        new += [replace(x, window=w) for w in windows if x.window]
        if x.size is not None:
            place = FEATURES.index(x.size)
            beside = FEATURES[max(0, place - 1) : place + 2]  # the sizes before and after it
            new += [replace(x, size=m) for m in beside if m != x.size and 2 * m <= max(length, 2 * FEATURES[0])]
    seen = set(known)
    return [x for x in dict.fromkeys(new) if x not in seen]


RATE = 2e-2  # of the fit: above that of `transfer`, whose steps are many


@dataclass(frozen=True)
class Errors:
    """Errors of an attention in each call of a pass, at the original's queries, keys and values.

    Args:
        heads: ``|core - exact|_F / |exact|_F`` of the outputs of real tokens, of each call and head.
        predicted: of the weights, by closed forms, of each call; None where there is none.
    """

    calls: tuple[tuple[str, int], ...]
    heads: tuple[tuple[float, ...], ...]
    layers: tuple[float, ...]
    predicted: tuple[float, ...] | None

    @property
    def mean(self) -> float:
        """Mean over the calls."""
        return sum(self.layers) / len(self.layers)


@dataclass
class Trials:
    """A pretrained model, its attention on some texts, and a copy that is converted to one candidate after another.

    Args:
        others: inputs on which maps are fitted and calibrated.
        looked: how many of the measured batches have their attentions looked at one by one.
    """

    model: Any
    measured: Sequence[Batch]
    others: Sequence[Batch]
    predicts: bool
    looked: int = 1
    states: dict[Candidate, dict[str, Any]] = field(default_factory=dict)  # of what was fitted or calibrated

    def __post_init__(self) -> None:
        names = [x.name for x in find_attentions(self.model) if not x.reason]
        self.calls = [attention_calls(self.model, x, only=names) for x in self.measured[: self.looked]]
        self.other_calls = [attention_calls(self.model, x, outputs=False, only=names) for x in self.others]
        self.reference = Reference(self.model, self.measured, predicts=self.predicts)
        self.copy = copy.deepcopy(self.model).eval()

    @contextmanager
    def converted(
        self,
        candidate: Candidate,
        layers: Sequence[int | str] | None = None,
        exact_heads: Mapping[int | str, Sequence[int]] | None = None,
    ) -> Iterator[Any]:
        """Convert the copy for a block, calibrated and as it was fitted."""
        convert(self.copy, candidate.name, layers, exact_heads=exact_heads, **candidate.options)
        try:
            self._prepare(candidate, whole=exact_heads is None)
            yield self.copy
        finally:
            undo(self.copy)

    def _prepare(self, candidate: Candidate, whole: bool) -> None:
        """Give the cores the statistics and weights that the candidate has, those of whole layers."""
        for name, core in cores(self.copy).items():
            if core.method != candidate.name:
                continue
            if candidate in self.states and whole:
                core.load_state_dict(self.states[candidate][name])
            elif core.calibrates:
                for calls in self.other_calls:
                    for call in (x for x in calls if x.name == name):
                        core.calibrate(call.query, call.key, call.visible()[0])
        if candidate.learned and not (candidate in self.states and whole):
            start_maps(cores(self.copy), self.other_calls)

    @torch.no_grad()
    def errors(self, candidate: Candidate) -> Errors:
        """Errors of a candidate in each attention."""
        with self.converted(candidate) as student:
            inside = cores(student)
            sums: dict[tuple[str, int], CallErrors] = {}
            for calls in self.calls:
                for call in calls:
                    new, key = CallErrors.of(call, inside[call.name]), (call.name, call.call)
                    sums[key] = sums[key] + new if key in sums else new
            prepared = candidate.learned or any(x.calibrates for x in inside.values())
            if prepared and candidate not in self.states:
                self.states[candidate] = {name: x.state_dict() for name, x in inside.items()}
        return _gathered(sums)

    def figure(self, candidate: Candidate, **kept: Any) -> Figure:
        """The output of the model with a candidate in it; ``kept`` are ``layers`` and ``exact_heads`` of `convert`."""
        with self.converted(candidate, **kept) as student:
            return self.reference.figure(student)

    def fit(self, candidate: Candidate, *, steps: int, seconds: float = math.inf) -> int:
        """Fit the maps of a candidate to the attention on the other texts, a text a step; see `attention_loss`.

        Args:
            seconds: at most; the learning rate falls by a cosine of whichever is over first.
        """
        with self.converted(candidate) as student, torch.enable_grad():
            inside = cores(student)
            optimizer = torch.optim.Adam([x for core in inside.values() for x in core.parameters()], lr=RATE)
            stage = Stage(optimizer, steps, seconds)
            for step in stage:
                optimizer.zero_grad()
                for call in self.other_calls[step % len(self.other_calls)]:
                    attention_loss(inside[call.name], *call.inputs, seed=step).backward()
                stage.update(0.0, 0)
            self.states[candidate] = {name: copy.deepcopy(x.state_dict()) for name, x in inside.items()}
        return len(stage.progress.losses)


def _gathered(sums: Mapping[tuple[str, int], CallErrors]) -> Errors:
    def finite(value: float) -> float:
        return min(value, CEILING) if not math.isnan(value) else CEILING

    rows = list(sums.values())
    predicted = tuple(x.predicted for x in rows)
    return Errors(
        calls=tuple(sums),
        heads=tuple(tuple(finite(x.relative(i)) for i in range(len(x.error))) for x in rows),
        layers=tuple(finite(x.relative()) for x in rows),
        predicted=None if None in predicted else predicted,  # type: ignore[arg-type]
    )


POINTS = 4  # at least
BEYOND = 1.5  # times the largest error that was measured, or less than the smallest: not predicted beyond
LEAST_SPREAD = 0.2  # of the logarithm: a few points may lie on a line by chance


@dataclass(frozen=True)
class Expected:
    """A loss that was not measured, with bounds of two standard deviations."""

    loss: float
    low: float
    high: float


@dataclass(frozen=True)
class LossFit:
    """Least squares of the logarithms of loss and error over measured models.

        log loss = a_g + b log error,     error = mean relative error of the attentions, g = group of the method

    Errors of attentions that are small and independent add up in squares, so that b is near 2. What an error costs
    depends on its kind: noise of random features, the same in all tokens, costs more than what a window leaves out.
    """

    a: Mapping[str, float]
    b: float
    spread: float
    range: Mapping[str, tuple[float, float]]

    @classmethod
    def of(cls, points: Sequence[tuple[str, float, float]]) -> LossFit | None:
        """Fit groups, errors and losses; None where they are too few for a slope and a spread."""
        groups: dict[str, list[tuple[float, float]]] = {}
        for group, error, loss in points:
            if 0 < error < math.inf and 0 < loss < math.inf:
                groups.setdefault(group, []).append((math.log(error), math.log(loss)))
        count = sum(map(len, groups.values()))
        freedom = count - len(groups) - 1
        if count < POINTS or freedom < 1:
            return None
        means = {name: tuple(sum(x[i] for x in rows) / len(rows) for i in (0, 1)) for name, rows in groups.items()}
        off = [(x - means[name][0], y - means[name][1]) for name, rows in groups.items() for x, y in rows]
        square = sum(x * x for x, _ in off)
        if square < 1e-12:
            return None
        b = sum(x * y for x, y in off) / square
        spread = max(LEAST_SPREAD, math.sqrt(sum((y - b * x) ** 2 for x, y in off) / freedom))
        ranges = {name: (math.exp(min(rows)[0]), math.exp(max(rows)[0])) for name, rows in groups.items()}
        return cls({name: y - b * x for name, (x, y) in means.items()}, b, spread, ranges)

    def expected(self, group: str, error: float) -> Expected | None:
        """The loss that goes with an error; None where nothing of its kind and size was measured."""
        low, high = self.range.get(group, (math.inf, 0.0))
        if self.b <= 0 or not low / BEYOND <= error <= high * BEYOND:
            return None
        middle = self.a[group] + self.b * math.log(error)
        return Expected(*(math.exp(middle + k * self.spread) for k in (0, -2, 2)))


@dataclass(frozen=True)
class Timing:
    """Seconds of one forward pass of an attention over one text, and of exact attention in the same rounds."""

    length: int
    seconds: float
    exact: float

    @property
    def ratio(self) -> float:
        """Of the time of exact attention; below 1 it is faster."""
        return self.seconds / self.exact


def crossover(rows: Sequence[Timing]) -> float | None:
    """The length from which an attention is faster than exact attention at all longer ones; None: not seen.

    Between two lengths the logarithm of the ratio is taken to be linear in that of the length. 0: at all of them.
    """
    slower = [i for i, x in enumerate(rows) if x.ratio >= 1]
    if not slower:
        return 0.0 if rows else None
    if slower[-1] == len(rows) - 1:
        return None
    a, b = rows[slower[-1]], rows[slower[-1] + 1]
    share = math.log(a.ratio) / (math.log(a.ratio) - math.log(b.ratio))
    return math.exp(math.log(a.length) + share * (math.log(b.length) - math.log(a.length)))


EXACT = "softmax"
ROUNDS = 2
HEADS = 4  # of a smaller shape


@dataclass(frozen=True)
class Shape:
    """Sizes of an attention to time.

    Args:
        norm: of sqrt(scale) q and k; some landmarks take longer for long vectors.
    """

    num_heads: int
    num_key_heads: int
    head_dim: int
    causal: bool
    norm: float = 1.0

    def smaller(self) -> Shape:
        """At most 4 heads, in whole groups: time is proportional to them, and ratios stay what they are."""
        groups = self.num_heads // self.num_key_heads
        keys = max(1, min(self.num_key_heads, HEADS // groups))
        return replace(self, num_heads=keys * groups, num_key_heads=keys)


def timed_core(method: str, options: Mapping[str, Any], shape: Shape) -> AttentionCore:
    """Build an attention of this shape; of grouped queries maps are by key head, as a conversion has them."""
    known = {"num_key_heads": shape.num_key_heads} if maps_by_head(method, options) else {}
    return build_attention(method, head_dim=shape.head_dim, num_heads=shape.num_heads, **{**known, **options})


@torch.no_grad()
def time_attentions(cores: Mapping[str, AttentionCore], shape: Shape, length: int) -> dict[str, Timing]:
    """Time attentions and exact attention by SDPA, in turns; one that fails is left out."""
    q, k, v = _inputs(shape, length)
    exact = build_attention(EXACT, head_dim=shape.head_dim, num_heads=shape.num_heads)
    times: dict[str, list[float]] = {}
    with evaluating(*cores.values()):
        for _ in range(1 + ROUNDS):  # the first warms up
            for name, core in {**cores, EXACT: exact}.items():
                start = time.perf_counter()
                with suppress(RuntimeError, MemoryError, ValueError):  # memory that is out, or what it cannot do
                    core(q, k, v, is_causal=shape.causal)
                    times.setdefault(name, []).append(time.perf_counter() - start)
    medians = {name: statistics.median(x[1:]) for name, x in times.items() if len(x) > ROUNDS}
    return {name: Timing(length, x, medians[EXACT]) for name, x in medians.items() if name != EXACT}


def time_curve(
    core: AttentionCore, shape: Shape, lengths: Sequence[int], seconds: float
) -> tuple[list[Timing], list[int]]:
    """Time one attention at lengths that rise, while there is time.

    Args:
        seconds: in all; a length whose expected time is above what is left is not timed.

    Returns:
        The times, and the lengths that were left out.
    """
    rows: list[Timing] = []
    end = time.monotonic() + seconds
    for place, length in enumerate(lengths):
        if rows:
            growth = length / rows[-1].length
            expected = (ROUNDS + 1) * (rows[-1].exact * growth**2 + rows[-1].seconds * growth)
            if time.monotonic() + expected > end:
                return rows, list(lengths[place:])
        rows += time_attentions({"core": core}, shape, length).values()
    return rows, []


def _inputs(shape: Shape, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Random queries, keys and values of one text; norms are as the default scale, 1 / sqrt(D), makes them."""
    gen = torch.Generator().manual_seed(0)

    def draw(heads: int, norm: float) -> Any:
        return torch.randn(1, heads, length, shape.head_dim, generator=gen) * (norm * shape.head_dim**-0.25)

    return (
        draw(shape.num_heads, shape.norm),
        draw(shape.num_key_heads, shape.norm),
        draw(shape.num_key_heads, shape.head_dim**0.25),
    )
