"""How `studies.features` measures one attention: which ones there are, their errors and their times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernelformer.feature_maps import GeneralizedMap
from kernelformer.modules import METHODS, AttentionCore, build_attention, method_options, parse_method
from kernelformer.studies.features_data import Case
from kernelformer.studies.features_result import EXACT, UNIFORM, WINDOW_ALONE, Pass, Row
from kernelformer.studies.settings import FeaturesSettings as Settings
from kernelformer.timing import Step, time_rounds

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
