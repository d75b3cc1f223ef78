"""Measures over redraws of a classifier, against values computed by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from kernelformer_lab.analysis.redraws import (
    classifier_gradients,
    gradient_figures,
    inconsistencies,
    margins,
    predictions,
    redraw_figures,
    relative_deviations,
    squared_correlation,
    votes,
)


def two(*columns):
    """Logits (R, N, 2) with the differences z_1 - z_0 of each sample over the draws."""
    difference = torch.tensor(columns, dtype=torch.float64).T
    return torch.stack([torch.full_like(difference, 0.25), 0.25 + difference], -1)


# Three samples over four draws: always class 1, once class 1, and twice each.
LOGITS = two((1.0, 2.0, 3.0, 2.0), (-1.0, -1.0, -1.0, 1.0), (-3.0, 1.0, 1.0, -3.0))
LABELS = torch.tensor([1, 1, 0])


def test_the_relative_standard_deviation_is_that_of_the_argument_of_the_sigmoid():
    assert torch.equal(margins(LOGITS), torch.tensor([[1, -1, -3], [2, -1, 1], [3, -1, 1], [2, 1, -3.0]]).double())
    # std with R - 1: sqrt(2 / 3), 1 and sqrt(16 / 3); means 2, -1 / 2 and -1.
    want = [math.sqrt(2 / 3) / 2, 2.0, math.sqrt(16 / 3)]
    assert relative_deviations(margins(LOGITS)).tolist() == pytest.approx(want)
    assert relative_deviations(margins(1000 * LOGITS)).tolist() == pytest.approx(want)  # invariant to scaling
    assert relative_deviations(margins(-LOGITS)).tolist() == pytest.approx(want)  # and to the class


def test_what_does_not_vary_has_no_deviation_whatever_its_mean():
    same = torch.tensor([[0.1, 0.0, -0.3]]).expand(7, -1)
    assert relative_deviations(same).tolist() == [0, 0, 0]
    assert relative_deviations(same[:1]).tolist() == [0, 0, 0]


def test_one_logit_is_the_output_itself():
    z = LOGITS[..., 1:] - LOGITS[..., :1]
    assert torch.equal(margins(z), margins(LOGITS))
    assert redraw_figures(z, LABELS) == redraw_figures(LOGITS, LABELS)


def test_more_classes_have_the_margin_of_the_likeliest_one():
    z = torch.tensor([[[3.0, 1.0, 0.0]], [[3.0, 1.0, 5.0]], [[4.0, 1.0, 0.0]]])
    assert margins(z).flatten().tolist() == [2, -2, 3]
    third = torch.full((*LOGITS.shape[:2], 1), -1e9, dtype=torch.float64)
    more = torch.cat([LOGITS, third], 2)
    assert relative_deviations(margins(more)).tolist() == pytest.approx(relative_deviations(margins(LOGITS)).tolist())


def test_inconsistency_is_the_share_of_draws_without_the_majority_s_class():
    assert inconsistencies(predictions(LOGITS)).tolist() == [0, 25, 50]
    hundred = torch.zeros(100, 2, dtype=torch.long)
    hundred[:30, 0], hundred[:99, 1] = 1, 1
    assert inconsistencies(hundred).tolist() == pytest.approx([30, 1])  # min(x, 100 - x)
    assert inconsistencies(torch.tensor([[0], [1], [2], [2], [2]])).tolist() == pytest.approx([40])


def test_votes_are_those_of_the_majority_and_ties_go_to_the_larger_mean():
    assert votes(LOGITS).tolist() == [1, 0, 0]
    assert votes(-LOGITS).tolist() == [0, 1, 1]
    # Class 2 has the largest mean but no vote.
    z = torch.tensor([[[2.0, 0.0, 1.9]], [[0.0, 2.0, 1.9]], [[0.0, 2.1, 1.9]]])
    assert votes(z).tolist() == [1]


def test_all_figures_by_hand():
    figures = redraw_figures(LOGITS, LABELS)
    # Right by draw: 1 0 1, 1 0 0, 1 0 0, 1 1 1; votes 1 0 1.
    assert figures.accuracies == pytest.approx((2 / 3, 1 / 3, 1 / 3, 1))
    assert figures.accuracy.mean == pytest.approx(7 / 12)
    assert figures.accuracy_deviation == pytest.approx(torch.tensor(figures.accuracies).std().item())
    assert figures.voting_accuracy.mean == pytest.approx(2 / 3)
    assert figures.voting_accuracy.error == pytest.approx(math.sqrt(1 / 3) / math.sqrt(3))
    assert figures.agv.mean == pytest.approx(2 / 3 / (7 / 12))
    assert figures.pi.mean == pytest.approx(25)
    assert figures.pi.error == pytest.approx(25 / math.sqrt(3))
    assert figures.rsd.mean == pytest.approx((math.sqrt(2 / 3) / 2 + 2 + math.sqrt(16 / 3)) / 3)
    assert figures.rsd_median == pytest.approx(2)


def test_the_error_of_the_gain_is_that_of_many_sets_of_samples():
    gen = torch.Generator().manual_seed(0)
    n, sets = 300, 400
    shift = torch.randn(sets * n, generator=gen, dtype=torch.float64)
    z = shift + torch.randn(5, sets * n, generator=gen, dtype=torch.float64)
    logits = torch.stack([torch.zeros_like(z), z], -1).unflatten(1, (sets, n))
    labels = (shift + torch.randn(sets * n, generator=gen, dtype=torch.float64) > 0).long().view(sets, n)
    each = [redraw_figures(logits[:, i], labels[i]).agv for i in range(sets)]
    gains = torch.tensor([x.mean for x in each], dtype=torch.float64)
    said = sum(x.error for x in each) / sets
    assert abs(float(gains.std()) / said - 1) < 5 / math.sqrt(2 * sets)


def test_a_model_that_is_never_right_has_no_gain():
    assert math.isnan(redraw_figures(two((1.0, 1.0)), torch.tensor([0])).agv.mean)


def test_one_draw_is_a_model_without_variance():
    figures = redraw_figures(LOGITS[:1], LABELS)
    assert (figures.rsd.mean, figures.pi.mean, figures.agv.mean, figures.accuracy_deviation) == (0, 0, 1, 0)


def test_squared_correlations():
    assert squared_correlation([1, 2, 3], [-2, -4, -6]) == pytest.approx(1)
    assert squared_correlation([1, 2, 3], [1, 3, 2]) == pytest.approx(0.25)
    assert math.isnan(squared_correlation([1, 2], [1, 3]))
    assert math.isnan(squared_correlation([1, 1, 1], [1, 3, 4]))
    with pytest.raises(ValueError, match="x and y must be as many, got 1 and 2"):
        squared_correlation([1], [1, 2])


def test_gradients_at_the_classifier_are_autograd_s():
    gen = torch.Generator().manual_seed(0)
    h = torch.randn(3, 5, 7, generator=gen, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, 7, generator=gen, dtype=torch.float64)
    labels = torch.randint(4, (5,), generator=gen)
    logits = h @ weight.T
    loss = functional.cross_entropy(logits.flatten(0, 1), labels.repeat(3), reduction="sum")
    (want,) = torch.autograd.grad(loss, h)
    torch.testing.assert_close(classifier_gradients(logits.detach(), labels, weight), want)


def test_figures_of_gradients_by_hand():
    # Two draws, two samples, two units: the first unit has 1, -1, 3, -5, the second 2 everywhere.
    g = torch.tensor([[[1.0, 2.0], [-1.0, 2.0]], [[3.0, 2.0], [-5.0, 2.0]]])
    figures = gradient_figures(g)
    first = torch.tensor([1.0, -1.0, 3.0, -5.0])
    assert figures.absolute_mean == pytest.approx((2.5 + 2) / 2)
    assert figures.absolute_deviation == pytest.approx(float(first.abs().std()) / 2)
    assert figures.deviation == pytest.approx(float(first.std()) / 2)
    # Over the draws: sqrt(2) for 1, 3 and 2 sqrt(2) for -1, -5 in the first unit.
    assert figures.redraw_deviation == pytest.approx(3 * math.sqrt(2) / 4)
    single = gradient_figures(g[:1, :1])
    assert (single.absolute_mean, single.deviation, single.redraw_deviation) == (1.5, 0, 0)


def test_the_printed_ratio_of_table_14_is_that_of_uniform_weights():
    # At the start Xavier's uniform weights of (9, 64) alone would give the first row: 0.083064 and 0.144132.
    bound = math.sqrt(6 / (9 + 64))
    assert bound / math.sqrt(12) == pytest.approx(0.083064, rel=0.01)
    assert bound / 2 == pytest.approx(0.144132, rel=0.01)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: margins(torch.zeros(3, 4)), r"expected \(draws, samples, classes or units\), none of them 0, got"),
        (lambda: votes(torch.zeros(0, 4, 2)), r"none of them 0, got \(0, 4, 2\)"),
        (lambda: redraw_figures(LOGITS, LABELS[:2]), r"labels must be the classes of 3 samples, got \(2,\)"),
        (lambda: redraw_figures(LOGITS, LABELS.float()), r"got \(3,\) in torch.float32"),
        (lambda: classifier_gradients(LOGITS, LABELS, torch.zeros(3, 4)), r"weight must be \(2, units\)"),
    ],
)
def test_wrong_shapes_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
