"""Attentions that a pretrained model may be converted to: a coarse grid of them, and their neighbours."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kernelformer.modules import METHODS, parse_method

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
        sinks: with a window alone.
        fitted: maps are fitted, see `fit_maps`; else they are where `start_maps` puts them.
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
        """Whether it has maps that learn."""
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
        length: tokens of the texts; see `windows_for`.
        first: the attention that comes before all others, see `propose`; its window is at most the widest.
    """
    windows, sinks = windows_for(length), 4 if causal else 1
    methods = [x for x in UNTRAINED if not causal or _streams(x)]
    local = [Candidate(LOCAL, None, w, sinks) for w in reversed(windows)]
    near = [w for w in windows if w <= START[0]][-1:]
    size = max(x for x in FEATURES if x <= max(FEATURES[0], min(START[1], length // 2)))
    name, options = parse_method(first)
    best = Candidate(name, size, min(options.get("window", 0), windows[-1]), options.get("sinks", 0))
    rest = [Candidate(x, size, w, sinks if w else 0) for w in (*near, 0) for x in methods]
    return list(dict.fromkeys([best, *local, *rest]))


def windows_for(length: int) -> list[int]:
    """Windows of at most a quarter of the length, so that half of a text is far; the smallest one in any case.

    Raises:
        ValueError: the text is not twice as long as the smallest one.
    """
    windows = [w for w in WINDOWS if 4 * w <= length] or [WINDOWS[0]]
    if 2 * WINDOWS[0] > length:
        raise ValueError(
            f"the texts have about {length} tokens, and the smallest window, {WINDOWS[0]} tokens to either side, "
            f"leaves nothing far in them; give longer texts, or a larger --length."
        )
    return windows


def neighbours(best: Iterable[Candidate], known: Iterable[Candidate], *, length: int) -> list[Candidate]:
    """Candidates that differ from some good ones in their window or their size, and are not known yet.

    Args:
        best: in this order.
        known: left out.
        length: tokens of the texts; at most half as many features.
    """
    windows = windows_for(length)
    new: list[Candidate] = []
    for x in best:
        new += [replace(x, window=w) for w in windows if x.window]
        if x.size is not None:
            new += [replace(x, size=m) for m in _beside(FEATURES, x.size) if 2 * m <= max(length, 2 * FEATURES[0])]
    seen = set(known)
    return [x for x in dict.fromkeys(new) if x not in seen]


def _beside(values: Sequence[int], value: int) -> list[int]:
    """The values before and after one of them, the smaller one first."""
    place = values.index(value)
    return [values[i] for i in (place - 1, place + 1) if 0 <= i < len(values)]


def _streams(spec: str) -> bool:
    name, options = parse_method(spec)
    method = METHODS[name]
    return method.holds(method.causal, options) and method.holds(method.streaming, options)
