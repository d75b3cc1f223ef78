"""Times of an attention and of exact attention, and the length from which the first is faster."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


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
