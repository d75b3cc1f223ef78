"""Means over seeds with their standard errors, and when two of them differ."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from statistics import fmean, stdev, variance
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
    """Difference of a mean from a level, or of two means paired by seed, with its standard error.

    Args:
        value: the difference.
        error: its standard error over seeds and samples.
        freedom: degrees of freedom of Student's t.
    """

    value: float
    error: float
    freedom: float

    @property
    def bound(self) -> float:
        """Half the width of the 95% interval, and at least two standard errors."""
        return quantile(self.freedom) * self.error

    def p(self, level: float = 0.0) -> float:
        """Two-sided p-value of the hypothesis that the true difference is ``level``."""
        return student_p(abs(self.value - level) / self.error, self.freedom)


def difference(mean: Mean, level: float = 0.0) -> Difference:
    """Mean minus a level; of two means, of which every seed has a pair, ``mean`` is that of the differences.

        error^2 = s^2 / n + e^2,    df = error^4 / ((s^2 / n)^2 / (n - 1))          (Satterthwaite)

    with the variance s^2 over the n seeds and the squared error e^2 over samples.
    """
    squared = mean.of_seeds + mean.of_samples
    if not math.isfinite(squared):
        return Difference(mean.value - level, math.nan, 1.0)
    freedom = (mean.count - 1) * (squared / mean.of_seeds) ** 2 if mean.of_seeds else math.inf
    return Difference(mean.value - level, math.sqrt(squared), freedom)


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


def student_p(t: float, freedom: float) -> float:
    """Two-sided p-value of Student's t, ``P(|T| > t) = int_0^u sin^(df - 1) / int_0^(pi / 2) sin^(df - 1)``.

    The upper limit is u = arctan(sqrt(df) / t); beyond 1000 degrees of freedom the normal distribution is taken.
    """
    if freedom > 1000:
        return math.erfc(t / math.sqrt(2))

    def integral(upper: float) -> float:
        grid = np.linspace(0.0, upper, 4001)
        return float(np.trapezoid(np.sin(grid) ** (freedom - 1), grid))

    return integral(math.atan2(math.sqrt(freedom), t)) / integral(math.pi / 2)


@cache
def quantile(freedom: float) -> float:
    """The two-sided 95% quantile of Student's t, or 2 where that is larger."""
    low, high = 2.0, 13.0
    while student_p(low, freedom) > 0.05 and high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if student_p(middle, freedom) > 0.05 else (low, middle)
    return low


def fisher_test(first: int, of_first: int, second: int, of_second: int) -> float:
    """Two-sided p-value of Fisher's exact test that two shares ``first / of_first`` and ``second / "
    "of_second`` agree."""
    both, total = first + second, of_first + of_second
    possible = range(max(0, both - of_second), min(both, of_first) + 1)
    chance = {x: math.comb(of_first, x) * math.comb(of_second, both - x) for x in possible}
    return sum(x for x in chance.values() if x <= chance[first]) / math.comb(total, both)


def holm(p: Sequence[float]) -> list[float]:
    """P-values adjusted by Holm's method, which bounds the probability of any false rejection."""
    order, adjusted, least = sorted(range(len(p)), key=lambda i: p[i]), [0.0] * len(p), 0.0
    for rank, i in enumerate(order):
        adjusted[i] = least = min(1.0, max(least, (len(p) - rank) * p[i]))
    return adjusted


def benjamini_hochberg(p: Sequence[float]) -> list[float]:
    """P-values adjusted by the method of Benjamini and Hochberg, which bounds the share of false rejections."""
    order, adjusted, most = sorted(range(len(p)), key=lambda i: -p[i]), [0.0] * len(p), 1.0
    for rank, i in enumerate(order):
        adjusted[i] = most = min(most, len(p) / (len(p) - rank) * p[i])
    return adjusted


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
