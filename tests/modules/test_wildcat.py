"""Attention to pivoted landmarks: exact with all keys, better with more, in the range of the values."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F

import kernelformer as kf


def build(count=16, **options):
    return kf.build_attention("wildcat", head_dim=8, num_heads=2, num_landmarks=count, **options)


def inputs(size=1.0, keys=96, seed=0):
    gen = torch.Generator().manual_seed(seed)
    shapes = ((2, 2, 96, 8), (2, 2, keys, 8), (2, 2, keys, 4))
    q, k, v = (torch.randn(x, generator=gen, dtype=torch.float64) for x in shapes)
    return size * q, size * k + 0.5, v


@pytest.mark.parametrize("options", [{}, {"pivots": "greedy"}, {"window": 7, "sinks": 1}])
@pytest.mark.parametrize("size", [0.1, 1.0, 3.0])
def test_all_keys_as_landmarks_are_exact_up_to_the_ridge(options, size):
    q, k, v = inputs(size)
    out = build(200, **options)(q, k, v)
    # Where keys are so close together that some are explained by others up to the ridge.
    assert (out - F.scaled_dot_product_attention(q, k, v)).abs().max() < (1e-4 if size < 1 else 3e-5)


def test_that_all_keys_are_landmarks_is_said_once():
    core, (q, k, v) = build(100), inputs()
    with pytest.warns(UserWarning, match="num_landmarks=100 of 96 keys"):
        core(q, k, v)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        core(q, k, v)


def test_the_error_falls_with_landmarks():
    q, k, v = inputs(1.5)
    exact = F.scaled_dot_product_attention(q, k, v)
    errors = [
        sum(float((build(r, seed=seed)(q, k, v) - exact).square().mean()) for seed in range(4)) for r in (4, 16, 64)
    ]
    assert errors[1] < 0.6 * errors[0]
    assert errors[2] < 0.3 * errors[1]


def test_keys_may_be_moved_and_outputs_stay_in_the_range_of_the_values():
    q, k, v = inputs(4.0)
    core = build(4)
    out = core(q, k, v)
    assert torch.allclose(out, core(q, k + 3.0, v), atol=1e-9)
    assert (out <= v.amax(2, keepdim=True) + 1e-12).all()
    assert (out >= v.amin(2, keepdim=True) - 1e-12).all()


def test_a_new_draw_chooses_other_landmarks_and_the_greedy_choice_has_none():
    q, k, v = inputs(1.5)
    core, greedy = build(8), build(8, pivots="greedy")
    first, same = core(q, k, v), greedy(q, k, v)
    core.resample()
    greedy.resample()
    assert not torch.allclose(first, core(q, k, v))
    assert torch.equal(same, greedy(q, k, v))
    core.resample(0)
    assert torch.equal(first, core(q, k, v))


def test_it_cannot_be_causal_and_says_what_can():
    core, (q, k, v) = build(), inputs()
    with pytest.raises(ValueError, match=r"takes its landmarks from the whole sequence.*'favor\+'"):
        core(q, k, v, is_causal=True)
    with pytest.raises(ValueError, match="whole sequence"):
        core.step(q[:, :, :1], k[:, :, :1], v[:, :, :1])
    with pytest.raises(ValueError, match="pivots"):
        build(pivots="best")
    with pytest.raises(ValueError, match="unknown option"):
        build(normalize=False)


@pytest.mark.parametrize("size", [3.0, 12.0, 100.0])
def test_large_norms_do_not_overflow_in_single_precision(size):
    q, k, v = (x.float() for x in inputs(size))
    out = build(64)(q, k, v)
    assert out.isfinite().all()
    if size == 3:  # of norm 5 as the kernel sees them; weights of longer ones span more than single precision does
        exact = build(64).double()(q.double(), k.double(), v.double())
        assert (out - exact).abs().max() < 1e-4


@pytest.mark.parametrize("size", [0.0, 1e-30, 1e-12, 1e-3])
def test_queries_of_no_length_get_the_mean_of_the_values(size):
    q, k, v = (x.float() for x in inputs())
    out = build(16)(size * q, 10 * k, v)
    exact = F.scaled_dot_product_attention(size * q, 10 * k, v)
    assert (out - exact).abs().max() < (1e-5 if size < 1e-3 else 1e-3)


def test_weights_sum_to_one_and_a_bad_query_leaves_the_others_alone():
    q, k, v = inputs()
    core = build(16)
    matrix = core.attention_matrix(q, k)
    torch.testing.assert_close(matrix.sum(-1), torch.ones_like(matrix[..., 0]))
    assert matrix.min() < 0
    want = core(q[:, :, 1:], k, v)
    for bad in (torch.nan, torch.inf):
        q[:, :, 0] = bad
        torch.testing.assert_close(core(q, k, v)[:, :, 1:], want)


@pytest.mark.parametrize(("norm", "scale"), [(30, 1.0), (100, 0.125)])
def test_gradients_of_very_long_queries_and_keys_are_finite(norm, scale):
    gen = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, 100, d, generator=gen) for d in (64, 64, 2))
    q, k = (norm * F.normalize(x, dim=-1) for x in (q, k * torch.rand(1, 1, 100, 1, generator=gen)))
    q.requires_grad_()
    core = kf.build_attention("wildcat", head_dim=64, num_heads=1, scale=scale)
    out = core(q, k * torch.rand(1, 1, 100, 1, generator=gen), v)
    assert out.isfinite().all()
    assert torch.autograd.grad(out.square().sum(), q)[0].isfinite().all()


@pytest.mark.parametrize("options", [{}, {"pivots": "greedy"}, {"window": 5}])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_bad_key_makes_its_sample_and_head_nan_and_no_other(bad, options):
    q, k, v = inputs()
    want = build(16, **options)(q, k, v)
    k[0, 0, 3] = bad
    out = build(16, **options)(q, k, v)
    assert out[0, 0].isnan().all()
    assert torch.equal(out[1], want[1])
    core = kf.build_attention("wildcat", head_dim=8, num_heads=1, num_landmarks=16, **options)
    assert core(q[:1, :1], k[:1, :1], v[:1, :1]).isnan().all()
