"""Estimators of the softmax kernel: samples, bounds and output errors against their definitions, and the study."""

from __future__ import annotations

import json
import math

import pytest
import torch

from kernelformer.feature_maps.draws import draw_frequencies, generator
from kernelformer.kernels import mse_positive, mse_trigonometric
from kernelformer.modules import build_attention
from kernelformer_lab.analysis.errors import exact_attention, feature_attention, largest_kernel_error
from kernelformer_lab.studies.estimators import (
    STUDY,
    EstimatorsSettings,
    estimate,
    positive_estimates,
    predicted_delta,
    regularized_chernoff,
    regularized_ratio,
    sample_products,
    trigonometric_estimates,
    vectors_at,
)

SMALL = {"length": 40, "head_dim": 4, "features": (4, 16), "norms": (1.0, 2.0), "samples": 3, "dims": (1, 4)}
TINY = EstimatorsSettings(**SMALL, draws=500, tokens=20)


def random_inputs(length, dim=4, seed=0):
    gen = torch.Generator().manual_seed(seed)
    return [torch.randn(length, dim, generator=gen, dtype=torch.float64) for _ in range(3)]


@pytest.mark.parametrize("length", [1, 511, 512, 513])
def test_exact_attention_in_chunks_is_softmax_attention(length):
    q, k, v = random_inputs(length)
    torch.testing.assert_close(exact_attention(q, k, v), torch.softmax(q @ k.T, -1) @ v)


@pytest.mark.parametrize(("estimator", "method"), [("positive", "favor+"), ("trigonometric, clamped", "trigonometric")])
def test_the_definition_in_float64_is_what_the_cores_compute(estimator, method):
    q, k, v = random_inputs(30)
    core = build_attention(method, head_dim=4, num_heads=1, num_features=8, scale=1.0).double()
    want = core(q[None, None], k[None, None], v[None, None])[0, 0]
    found = feature_attention(core.feature_map.omega[0], q, k, v, estimator)
    torch.testing.assert_close(found.output, want, rtol=1e-5, atol=1e-6)


def test_denominators_below_zero_are_counted_and_clamped():
    q, k, v = (4 * x for x in random_inputs(60))
    omega = draw_frequencies(4, 4, generator(0, 0))
    plain = feature_attention(omega, q, k, v, "trigonometric")
    clamped = feature_attention(omega, q, k, v, "trigonometric, clamped")
    assert 0 < plain.below_zero < 1
    assert clamped.below_zero == plain.below_zero
    assert float(clamped.output.abs().max()) <= 100 * float(v.abs().max())
    assert feature_attention(omega, q, k, v, "positive").below_zero == 0
    with pytest.raises(ValueError, match="unknown estimator 'sine'"):
        feature_attention(omega, q, k, v, "sine")


def test_the_largest_error_of_an_entry_is_that_of_the_whole_matrix():
    q, k, _ = random_inputs(600)
    omega = draw_frequencies(8, 4, generator(0, 0))
    distances = torch.cos((q @ omega.T).unsqueeze(1) - k @ omega.T).mean(-1)  # cos a cos b + sin a sin b
    norms = 0.5 * (q.square().sum(-1, keepdim=True) + k.square().sum(-1))
    want = (norms.exp() * distances - (q @ k.T).exp()).abs().max()
    assert largest_kernel_error(omega, q, k, "trigonometric") == pytest.approx(float(want))


def test_samples_of_estimates_have_the_errors_of_the_closed_forms():
    x, y = vectors_at(2.0, 0.7, 6)
    gen = torch.Generator().manual_seed(0)
    kernel = torch.exp(x @ y)
    products = sample_products(20_000, 5, 6, gen, orthogonal=False)
    for estimates, closed in (
        (positive_estimates(products, x, y), mse_positive(x, y, 5)),
        (trigonometric_estimates(products, x, y), mse_trigonometric(x, y, 5)),
    ):
        mean, error = estimate(estimates), estimate((estimates - kernel).square())
        assert abs(mean["mean"] - float(kernel)) < 5 * mean["standard_error"]
        assert abs(error["mean"] - float(closed)) < 5 * error["standard_error"]


@pytest.mark.parametrize("regularized", [False, True])
def test_orthogonal_samples_are_products_with_orthogonal_frequencies(regularized):
    """Second and mixed fourth moments of products by rotation are those of drawn matrices."""
    m, d = 3, 4
    gen = torch.Generator().manual_seed(0)
    fast = sample_products(20_000, m, d, gen, orthogonal=True, regularized=regularized)
    norms = "sqrt" if regularized else "chi"
    drawn = (draw_frequencies(m, d, gen, draw="orthogonal", norms=norms) for _ in range(400))
    slow = torch.stack([omega[:, 0] for omega in drawn])
    for moment in (lambda t: t[:, 0].square(), lambda t: (t[:, 0] * t[:, 1]).square(), lambda t: t.exp().mean(-1)):
        one, two = estimate(moment(fast)), estimate(moment(slow))
        assert abs(one["mean"] - two["mean"]) < 5 * math.hypot(one["standard_error"], two["standard_error"])
    with pytest.raises(ValueError, match="must be at most dim, got 5 and 4"):
        sample_products(2, 5, 4, gen, orthogonal=True)


def test_the_regularized_kernel_is_its_series_and_never_above_the_softmax_kernel():
    for w in (0.5, 3.0):
        assert regularized_ratio(w, 1) == pytest.approx(math.cosh(math.sqrt(2 * w)) * math.exp(-w))
    gen = torch.Generator().manual_seed(0)
    products = sample_products(40_000, 1, 5, gen, orthogonal=False, regularized=True)
    simulated = estimate(torch.exp(products * math.sqrt(3.0) - 1.5))
    assert abs(simulated["mean"] - regularized_ratio(1.5, 5)) < 5 * simulated["standard_error"]
    assert regularized_ratio(0, 3) == 1
    ratios = [regularized_ratio(2.0, d) for d in (1, 4, 16, 64, 10**6)]
    assert ratios == sorted(ratios)
    assert ratios[-1] == pytest.approx(1, abs=1e-5)


def test_chernoffs_bound_of_a_coin_is_its_divergence():
    """In one dimension a term has two values of equal probability: the exponent is KL(p || 1/2)."""
    low, high = math.exp(-1) / math.cosh(1), math.exp(1) / math.cosh(1)
    p = 0.8
    bound = regularized_chernoff(p * high + (1 - p) * low, 1.0, 1)
    assert bound.exponent == pytest.approx(p * math.log(2 * p) + (1 - p) * math.log(2 * (1 - p)))
    assert math.isinf(regularized_chernoff(high + 0.1, 1.0, 1).exponent)
    with pytest.raises(ValueError, match="ratio must be above 1"):
        regularized_chernoff(1.0, 1.0, 3)


def test_chernoffs_bound_is_above_the_tail():
    gen = torch.Generator().manual_seed(0)
    mean = regularized_ratio(0.5, 4) * math.exp(0.5)
    estimates = sample_products(20_000, 4, 4, gen, orthogonal=False, regularized=True).exp().mean(-1) / mean
    for ratio in (1.2, 2.0):
        tail = estimate((estimates > ratio).double())
        assert tail["mean"] - 5 * tail["standard_error"] > 0
        assert tail["mean"] < math.exp(-4 * regularized_chernoff(ratio, 1.0, 4).exponent)


def test_the_predicted_error_solves_the_theorems_equation():
    delta = predicted_delta(64, 16)
    assert 16 / delta**2 * math.log(64 / delta) == pytest.approx(64)


def test_the_study_goes_on_where_it_was_stopped(tmp_path):
    first = STUDY.measure(TINY, tmp_path).figures
    kept = json.loads((tmp_path / "estimators.json").read_text())
    assert {name: kept[name] for name in first} == first
    kept["uniform"], kept["output"] = [], [x for x in kept["output"] if x["norm"] == 2.0]
    (tmp_path / "estimators.json").write_text(json.dumps(kept))
    said = []
    again = STUDY.measure(TINY, tmp_path, log=said.append).figures
    assert said == ["output at norm 1", "largest error of an entry over d"]
    assert again["uniform"] == first["uniform"]
    assert sorted(again["output"], key=repr) == sorted(first["output"], key=repr)


def test_orthogonal_and_positive_errors_are_those_of_their_samples(tmp_path):
    figures = STUDY.measure(TINY, tmp_path).figures
    rows = figures["output"]
    assert {(x["estimator"], x["draw"], x["num_features"]) for x in rows if x["norm"] == 1.0} == {
        (x, draw, m)
        for x in ("positive", "trigonometric", "trigonometric, clamped")
        for draw in ("iid", "orthogonal")
        for m in (4, 16)
    }
    assert all(len(x["values"]) == 3 and min(x["values"]) > 0 for x in rows)
    # One dimension, one feature: orthogonal is independent, and the printed bound of Theorem 3 is below the truth.
    coin = next(x for x in figures["tails"] if x["dim"] == 1)
    assert coin["orthogonal"]["mean"] - 5 * coin["orthogonal"]["standard_error"] > coin["orthogonal_bound"]
    # At x = -y positive features are exact, and the printed bound of Theorem 2 is below zero.
    for x in (x for x in figures["kernel"] if x["angle"] == math.pi):
        assert x["simulated"]["orthogonal"]["mean"] == 0
        assert x["printed_bound"] < 0 == x["mended_bound"]
