"""Means over seeds, their standard errors, and when two of them differ."""

from __future__ import annotations

import math
import random

import pytest

from kernelformer_lab.analysis.statistics import (
    Mean,
    benjamini_hochberg,
    difference,
    fisher_test,
    holm,
    mean_over_seeds,
    quantile,
    rank_test,
    student_p,
)


def test_error_has_seeds_and_samples_in_it():
    mean = mean_over_seeds([1.0, 2.0, 3.0], [0.3, 0.4, 0.5])
    assert mean.value == 2
    assert mean.of_seeds == pytest.approx(1 / 3)
    assert mean.of_samples == pytest.approx((0.09 + 0.16 + 0.25) / 3)  # the samples are the same for all seeds
    assert mean.error == pytest.approx(math.sqrt(1 / 3 + 0.5 / 3))


def test_one_seed_has_no_error_and_no_difference_can_be_told():
    assert math.isnan(difference(mean_over_seeds([5.0])).error)


def test_difference_of_pairs_follows_student_and_satterthwaite():
    gap = difference(mean_over_seeds([0.0, 1.0, 2.0]), 3.0)
    assert gap.value == -2
    assert gap.error == pytest.approx(math.sqrt(1 / 3))
    assert gap.freedom == pytest.approx(2)
    assert gap.p() == pytest.approx(student_p(2 * math.sqrt(3), 2))
    assert gap.p(-2.0) == 1
    # Half of the squared error is of samples, which are many: df = 2 (1 + 1)^2.
    assert difference(Mean(1.0, 3, 0.01, 0.01)).freedom == pytest.approx(8)


def test_seeds_without_spread_need_two_errors_over_samples():
    gap = difference(Mean(1.0, 3, 0.0, 0.01))
    assert gap.bound == pytest.approx(0.2)


def test_quantiles_are_those_of_tables_and_fall_to_two():
    table = {1: 12.706, 2: 4.303, 2.5: 3.575, 4: 2.776, 12: 2.179, 25: 2.060, 200: 2.0, 1e9: 2.0}
    assert {x: round(quantile(x), 3) for x in table} == table
    assert student_p(2.5706, 5) == pytest.approx(0.05, rel=1e-4)
    assert student_p(1.96, 1e9) == pytest.approx(0.05, rel=1e-3)


def test_fishers_test_sums_the_tables_that_are_no_likelier():
    assert fisher_test(2, 6, 6, 6) == pytest.approx(2 * 28 / 924)  # (6 2) (6 6) / (12 8) = 15 / 495 on either side
    assert fisher_test(3, 3, 0, 3) == pytest.approx(0.1)
    assert fisher_test(1, 4, 1, 4) == 1


def test_corrections_for_many_tests_are_those_of_textbooks():
    p = [0.01, 0.04, 0.03, 0.005]
    assert holm(p) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert benjamini_hochberg(p) == pytest.approx([0.02, 0.04, 0.04, 0.02])
    assert holm([]) == benjamini_hochberg([]) == []


def test_a_difference_is_seen_by_chance_in_at_most_five_of_a_hundred_cases():
    draw = random.Random(0)
    tries = 4000
    wrong = 0
    for _ in range(tries):
        gap = difference(mean_over_seeds([draw.gauss(0, 1) - draw.gauss(0, 1) for _ in range(3)]))
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
