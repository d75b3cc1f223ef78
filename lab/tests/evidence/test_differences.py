"""Means over seeds, their standard errors, and when two of them differ."""

from __future__ import annotations

import math
import random

import pytest

from kernelformer_lab.analysis.statistics import Mean, difference, mean_over_seeds, quantile, rank_test


def test_error_has_seeds_and_samples_in_it():
    mean = mean_over_seeds([1.0, 2.0, 3.0], [0.3, 0.4, 0.5])
    assert mean.value == 2
    assert mean.of_seeds == pytest.approx(1 / 3)
    assert mean.of_samples == pytest.approx((0.09 + 0.16 + 0.25) / 3)  # the samples are the same for all seeds
    assert mean.error == pytest.approx(math.sqrt(1 / 3 + 0.5 / 3))


def test_one_seed_has_no_error_and_no_difference_can_be_told():
    gap = difference(mean_over_seeds([5.0]), mean_over_seeds([1.0, 1.1, 0.9]))
    assert math.isnan(gap.error)
    assert math.isinf(gap.needed)


def test_difference_follows_welch_and_satterthwaite():
    # Two groups of three with variances 1 and 4: error^2 = 5/3, df = (5/3)^2 / ((1/3)^2/2 + (4/3)^2/2) = 2.94.
    gap = difference(mean_over_seeds([0.0, 1.0, 2.0]), mean_over_seeds([0.0, 2.0, 4.0]))
    assert gap.value == -1
    assert gap.error == pytest.approx(math.sqrt(5 / 3))
    assert gap.needed == 4.30  # of 2 degrees of freedom, the larger one


def test_equal_groups_without_spread_need_two_errors():
    gap = difference(Mean(1.0, 3, 0.0, 0.01), Mean(0.5, 3, 0.0, 0.0))
    assert gap.needed == 2
    assert gap.bound == pytest.approx(0.2)


def test_quantiles_fall_to_two():
    assert [quantile(x) for x in (0.5, 1, 2.9, 4, 12, 25, 31, 1e9)] == [12.71, 12.71, 4.30, 2.78, 2.23, 2.09, 2.0, 2.0]


def test_a_difference_is_seen_by_chance_in_at_most_five_of_a_hundred_cases():
    draw = random.Random(0)
    tries = 4000
    wrong = 0
    for _ in range(tries):
        one, two = ([draw.gauss(0, 1) for _ in range(3)] for _ in range(2))
        gap = difference(mean_over_seeds(one), mean_over_seeds(two))
        wrong += abs(gap.value) > gap.bound
    assert wrong / tries < 0.05 + 5 * math.sqrt(0.05 * 0.95 / tries)


def test_ranks_of_separate_groups_are_as_unlikely_as_their_arrangement():
    assert rank_test([1, 2, 3, 4, 5], [6, 7, 8, 9, 10]) == pytest.approx(2 / 252)
    assert rank_test([6, 7, math.inf], [1, 2, 3]) == pytest.approx(2 / 20)
    assert rank_test([1, 1], [1, 1]) == 1
    with pytest.raises(ValueError, match="got 0 and 1"):
        rank_test([], [1.0])


def test_ranks_tell_true_equals_apart_as_seldom_as_they_say():
    draw = random.Random(0)
    told = sum(
        rank_test([draw.random() for _ in range(5)], [draw.random() for _ in range(5)]) < 0.05 for _ in range(2000)
    )
    exact = 2 * 4 / 252  # rank sums of 15 to 17, and as far above
    assert abs(told / 2000 - exact) < 5 * math.sqrt(exact * (1 - exact) / 2000)
