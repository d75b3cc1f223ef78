"""Rules by ranks, for values that some runs do not have because they never came so far."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from kernelformer.analysis.differences import rank_test
from kernelformer.evidence.base import CONTRADICTS, MISSING_RESULT, OPEN, SUPPORTS, Finding
from kernelformer.evidence.rules import Above, Entry, runs_of, value_of

LEAST = 0.05  # p-value below which an order counts


@dataclass(frozen=True)
class Later(Above):
    """The first attention comes to a level later than the second; with ``below`` earlier.

    A run that never comes to it is later than all that do, which a mean cannot say: hence an exact rank test over
    seeds. With three seeds on either side nothing can be told (the smallest p-value is 0.1), with four it can.
    """

    @property
    def text(self) -> str:
        """The rule in words."""
        word, other = ("smaller", "larger") if self.below else ("larger", "smaller")
        return (
            f"for: {self.name} of {self._first} are {word} than those of {self._second} by an exact rank test over "
            f"seeds (p < {LEAST:g}), where a run that never comes so far is the last; against: {other}; else open"
        )

    def __call__(self, entries: Sequence[Entry]) -> Finding:
        """Judge by the ranks of all runs."""
        sides = ((self.part, self.first), (self.other_part or self.part, self.second))
        groups = [[value_of(x, self.path) for x in runs_of(entries, *side)] for side in sides]
        first, second = ([math.inf if math.isnan(x) else x for x in group] for group in groups)
        if not first or not second:
            return Finding(MISSING_RESULT, "")
        p = rank_test(first, second)
        ours = f"{self._first} {_shown(first)}, {self._second} {_shown(second)}; p = {p:.2g} by ranks"
        if p >= LEAST:
            return Finding(OPEN, ours)
        later = sum((a > b) - (a < b) for a in first for b in second) > 0
        return Finding(SUPPORTS if later != self.below else CONTRADICTS, ours)


def _shown(values: Sequence[float]) -> str:
    """The median, and how many runs never came so far."""
    never = sum(map(math.isinf, values))
    middle = median(values)
    told = f"median {middle:g}" if math.isfinite(middle) else "median never"
    return f"{told} ({never} of {len(values)} never)" if never else told
