"""Means over seeds with their standard errors, and when two of them differ."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean, stdev, variance
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Two-sided 95% quantiles of Student's t by degrees of freedom; beyond the last one 2 is on the safe side.
_T = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26, 10: 2.23, 15: 2.13, 20: 2.09}

FEWEST = 30  # groups of samples, with which an error is uncertain by 13%


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Mean of independent values and its standard error; NaN for the error of one value."""
    return fmean(values), stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


@dataclass(frozen=True)
class Mean:
    """A mean over seeds, and the squared standard errors of its two sources of chance.

    Args:
        of_seeds: squared standard error over seeds: variance / count; NaN for one seed.
        of_samples: squared standard error over validation samples. All seeds have the same samples, so it does not fall
            with their number; 0 where it is not known.
    """

    value: float
    count: int
    of_seeds: float
    of_samples: float

    @property
    def error(self) -> float:
        """Standard error of both sources together."""
        return math.sqrt(self.of_seeds + self.of_samples)


def mean_over_seeds(values: Sequence[float], sample_errors: Sequence[float] = ()) -> Mean:
    """The mean of a value over seeds.

    Args:
        sample_errors: standard errors of each over validation samples, where they are known.
    """
    of_seeds = variance(values) / len(values) if len(values) > 1 else math.nan
    known = [x * x for x in sample_errors if math.isfinite(x)]
    return Mean(fmean(values), len(values), of_seeds, fmean(known) if known else 0.0)


@dataclass(frozen=True)
class Difference:
    """A difference of two means, its standard error, and how many of these it takes to tell it from 0.

    Args:
        error: standard error, of both means, seeds and samples.
        needed: errors that it takes: the larger of 2 and Student's 95% quantile.
    """

    value: float
    error: float
    needed: float

    @property
    def bound(self) -> float:
        """Half the width of the interval that the true difference is in, in 95 of 100 cases."""
        return self.needed * self.error


def difference(first: Mean, second: Mean, of_samples: float | None = None) -> Difference:
    """First minus second, by Welch: nothing is assumed of equal spreads.

        error^2 = s_1^2 / n_1 + s_2^2 / n_2 + e_1^2 + e_2^2          (or e_12^2, see of_samples)
        df      = error^4 / sum_i (s_i^2 / n_i)^2 / (n_i - 1)          (Satterthwaite)

    Args:
        of_samples: squared standard error over samples of the difference itself (`paired`), in the place of e_1^2 +
            e_2^2: errors of the same samples partly cancel where both find the same ones hard, and without it the
            error is then on the safe side.

    With three seeds on either side at most 5% of true equals are told apart, but up to 7% where all the spread is on
    one side: its two degrees of freedom are themselves an estimate.
    """
    of_samples = first.of_samples + second.of_samples if of_samples is None else of_samples
    squared = first.of_seeds + second.of_seeds + of_samples
    if not math.isfinite(squared):
        return Difference(first.value - second.value, math.nan, math.inf)
    below = sum(x.of_seeds**2 / (x.count - 1) for x in (first, second))
    return Difference(first.value - second.value, math.sqrt(squared), quantile(squared**2 / below if below else 1e9))


def paired(first: Sequence[Sequence[float]], second: Sequence[Sequence[float]]) -> float | None:
    """Squared standard error over samples of a difference of two means over seeds, sample by sample.

        sum_j (mean_s d_1sj - mean_s d_2sj)^2          d: `analysis.jackknife.deviations` of seed s

    Args:
        first, second: deviations of the runs of either side, all on the same samples.

    Returns:
        None where they are not known of all runs, or of fewer than `FEWEST` groups, whose error is too uncertain.
    """
    sizes = {len(x) for x in (*first, *second)}
    if not first or not second or len(sizes) != 1 or min(sizes) < FEWEST:
        return None
    means = ([fmean(x) for x in zip(*side, strict=True)] for side in (first, second))
    squared = sum((a - b) ** 2 for a, b in zip(*means, strict=True))
    return squared if math.isfinite(squared) else None


def quantile(freedom: float) -> float:
    """The larger of 2 and Student's two-sided 95% quantile; between the rows of its table the larger one."""
    known = [count for count in _T if count <= freedom]
    return max(2.0, _T[max(known)]) if known and freedom <= 30 else 2.0 if freedom > 30 else _T[1]


def rank_test(first: Sequence[float], second: Sequence[float]) -> float:
    """Two-sided p-value of Wilcoxon's rank sum, exactly, by all ways to divide the values into two such groups.

    Only the order counts, so that a value may be infinite: a run that never came to a level is later than all others.
    Equal values share the mean of their ranks.

    Cost: binomial(n, n_1) sums; for the few seeds of a comparison.
    """
    if not first or not second:
        raise ValueError(f"a rank test takes values of two groups, got {len(first)} and {len(second)}.")
    values = sorted([*first, *second])
    rank = {x: values.index(x) + (values.count(x) + 1) / 2 for x in set(values)}
    ranks = [rank[x] for x in (*first, *second)]
    middle = len(first) * (len(values) + 1) / 2
    seen = abs(sum(ranks[: len(first)]) - middle)
    sums = [abs(sum(x) - middle) for x in combinations(ranks, len(first))]
    return sum(x >= seen for x in sums) / len(sums)


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
    """Contribution of each of G groups to the standard error of a score theta (Busing et al. 1999).

        d_j = (tau_j - mean tau) / sqrt(G (h_j - 1)),   tau_j = h_j theta - (h_j - 1) theta_j,   h_j = N / m_j

    with theta_j of all N samples but the m_j of group j, and the mean weighted by m_j. The squares add up to the square
    of the standard error. They are linear in the score: of two models that have seen the same samples, the difference
    of their scores has the differences of their deviations, and what both find hard drops out.

    Args:
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

    Returns:
        (G); `UNKNOWN` of fewer than two samples.

    Cost: as many calls of ``score`` as there are groups, and one.
    """
    if size < 2:
        return UNKNOWN
    groups, numbers = sample_groups(size, most), np.arange(size)
    without = [score(np.delete(numbers, group)) for group in groups]
    return deviations(score(numbers), without, groups)
