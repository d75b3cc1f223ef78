"""The loss of a model's output that an error of its attentions lets expect, by those that were measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

POINTS = 4  # at least
BEYOND = 1.5  # times the largest error that was measured, or less than the smallest: nobody knows
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

    Args:
        a: by group.
        b: the same for all groups.
        spread: standard deviation of what is left.
        range: smallest and largest error that was measured, by group.
    """

    a: Mapping[str, float]
    b: float
    spread: float
    range: Mapping[str, tuple[float, float]]

    @classmethod
    def of(cls, points: Sequence[tuple[str, float, float]]) -> LossFit | None:
        """Fit groups, errors and losses; None where they are too few for a slope and a spread.

        Args:
            points: at least 4; those that are not positive and finite do not count.
        """
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
