"""The jackknife: what a score owes to each group of its samples, and so its standard error, alone or beside another."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

GROUPS = 1000  # at most, so that a score is taken so many times; their number makes the error uncertain by 2%
Numbers = NDArray[np.float64]
Groups = Sequence[NDArray[Any]]
UNKNOWN: Numbers = np.array([math.nan])  # deviations of what has too few samples for an error


def sample_groups(size: int, most: int) -> Groups:
    """At most so many groups of the samples 0 to size - 1, by chance but the same ones each time.

    Neighbours in a file are often alike, so that groups of them would differ by more than chance.
    """
    order = np.random.default_rng(0).permutation(size)
    return [order[start::most] for start in range(min(size, most))]


def deviations(whole: float, without: Sequence[float], groups: Groups) -> Numbers:
    """What each of G groups adds to the standard error of a score theta (Busing et al. 1999).

        d_j = (tau_j - mean tau) / sqrt(G (h_j - 1)),   tau_j = h_j theta - (h_j - 1) theta_j,   h_j = N / m_j

    with theta_j of all N samples but the m_j of group j, and the mean weighted by m_j. The squares add up to the square
    of the standard error. They are linear in the score: of two models that have seen the same samples, the difference
    of their scores has the differences of their deviations, and what both find hard drops out.

    Args:
        whole: the score of all samples.
        without: the score of all but those of one group, for each group.
        groups: of `sample_groups`.

    Returns:
        (G).
    """
    sizes = np.array([len(group) for group in groups])
    shares = sizes.sum() / sizes  # h
    with np.errstate(invalid="ignore", over="ignore"):
        pseudo = shares * whole - (shares - 1) * np.asarray(without, dtype=np.float64)
        mean = (pseudo / shares).sum()
        made: Numbers = (pseudo - mean) / np.sqrt(len(groups) * (shares - 1))
    return made


def standard_error(parts: NDArray[Any]) -> float:
    """The standard error of a score from its `deviations`."""
    with np.errstate(invalid="ignore", over="ignore"):
        return float(np.sqrt((parts**2).sum()))


def jackknife(score: Callable[[NDArray[Any]], float], size: int, most: int = GROUPS) -> Numbers:
    """`deviations` of a score that can be taken of any of its samples.

    Args:
        score: from the numbers of some samples, in order.
        size: of all samples.
        most: groups.

    Returns:
        (G); `UNKNOWN` of fewer than two samples.

    Cost: as many calls of ``score`` as there are groups, and one.
    """
    if size < 2:
        return UNKNOWN
    groups, numbers = sample_groups(size, most), np.arange(size)
    without = [score(np.delete(numbers, group)) for group in groups]
    return deviations(score(numbers), without, groups)
