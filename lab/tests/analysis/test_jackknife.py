"""The jackknife: errors of means are exact, and what two models share drops out of their difference."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from kernelformer_lab.analysis.statistics import (
    FEWEST,
    deviations,
    difference,
    jackknife,
    mean_over_seeds,
    paired,
    sample_groups,
    standard_error,
)


@pytest.mark.parametrize(("size", "most"), [(2, 10), (7, 7), (7, 3), (100, 1000), (101, 20)])
def test_groups_hold_every_sample_once(size, most):
    groups = sample_groups(size, most)
    assert len(groups) == min(size, most)
    assert sorted(np.concatenate(groups).tolist()) == list(range(size))
    assert max(map(len, groups)) - min(map(len, groups)) <= 1


def test_squares_add_up_to_the_error_of_a_mean():
    x = np.random.default_rng(0).normal(size=83)
    parts = jackknife(lambda chosen: float(x[chosen].mean()), 83, 83)
    assert len(parts) == 83
    assert standard_error(parts) == pytest.approx(x.std(ddof=1) / math.sqrt(83), rel=1e-9)


def test_deviations_of_a_difference_are_the_differences_of_deviations():
    gen = np.random.default_rng(1)
    x, y, w = gen.normal(size=(3, 90))
    w = 1 + w**2
    groups = sample_groups(90, 20)

    def parts(values):
        without = [np.delete(values, g) @ np.delete(w, g) / np.delete(w, g).sum() for g in groups]
        return deviations(values @ w / w.sum(), without, groups)

    np.testing.assert_allclose(parts(x) - parts(y), parts(x - y), rtol=1e-9, atol=1e-12)


def test_what_is_hard_for_both_does_not_hide_a_difference():
    gen = np.random.default_rng(2)
    hard = gen.normal(size=400)  # what all runs share, sample by sample
    runs = [[hard + gap + 0.05 * gen.normal(size=400) for _ in range(3)] for gap in (0.0, 0.05)]
    means = [mean_over_seeds([x.mean() for x in side], [x.std() / 20 for x in side]) for side in runs]
    parts = [[jackknife(lambda c, x=x: float(x[c].mean()), 400, 100) for x in side] for side in runs]
    gaps = mean_over_seeds([x.mean() - y.mean() for x, y in zip(*runs, strict=True)])
    apart = difference(replace(gaps, of_samples=sum(x.of_samples for x in means)))
    together = difference(replace(gaps, of_samples=paired(*parts)))
    assert abs(apart.value) < apart.bound
    assert abs(together.value) > together.bound
    wanted = (np.mean(runs[0], 0) - np.mean(runs[1], 0)).std() / 20
    assert math.sqrt(paired(*parts)) == pytest.approx(wanted, rel=5 / math.sqrt(2 * 100))


def test_true_equals_are_told_apart_in_at_most_five_of_a_hundred_cases():
    gen = np.random.default_rng(4)
    tries, wrong = 2000, 0
    for _ in range(tries):
        hard, own = gen.normal(size=(1, 1, 60)), gen.normal(size=(2, 3, 60))
        runs = hard + own + 0.2 * gen.normal(size=(2, 3, 1))  # a seed shifts all samples of its run
        gaps = mean_over_seeds((runs[0] - runs[1]).mean(1).tolist())
        parts = [((side - side.mean(1, keepdims=True)) / math.sqrt(60 * 59)).tolist() for side in runs]
        gap = difference(replace(gaps, of_samples=paired(*parts)))
        wrong += abs(gap.value) > gap.bound
    assert wrong / tries < 0.05 + 5 * math.sqrt(0.05 * 0.95 / tries)


def test_other_samples_or_unknown_ones_are_not_paired():
    one, two = [1.0] * FEWEST, [2.0] * FEWEST
    assert paired([one], [[*one, 1.0]]) is None
    assert paired([one, []], [one]) is None
    assert paired([[]], [[]]) is None
    assert paired([], [one]) is None
    assert paired([[math.nan, *one[1:]]], [one]) is None
    assert paired([one[1:]], [two[1:]]) is None  # too few to know their error
    assert paired([one, two], [one]) == pytest.approx(0.25 * FEWEST)


def test_an_error_is_covered_as_often_as_it_says():
    gen = np.random.default_rng(3)
    tries, inside = 300, 0
    for _ in range(tries):  # a ratio of sums, as a loss over all labels is
        counts = gen.integers(1, 9, 120)
        losses = counts * gen.gamma(4.0, 0.5, 120)
        parts = jackknife(lambda c, a=losses, b=counts: float(a[c].sum() / b[c].sum()), 120, 40)
        inside += abs(losses.sum() / counts.sum() - 2.0) < 1.96 * standard_error(parts)
    assert abs(inside / tries - 0.95) < 5 * math.sqrt(0.95 * 0.05 / tries)
