"""Spectra of learned kernels, as the papers print them, and kernels over distance."""

from __future__ import annotations

import math

import pytest
import torch

import kernelformer as kf
from definition import close
from kernelformer_lab.analysis.spectra import kernel_profile, spectra, squared_log_variances
from sampling import SIGMAS, within

RANDOM = ["gmm-rks", "gmm-prf", "fastfood-rks", "fastfood-prf", "generative-rks", "generative-prf"]


def test_spectra_of_a_model_are_rows_of_the_papers_tables():
    layers = [kf.KernelAttention(16, 4, m, num_features=8) for m in ("gmm-rks", "gmm-prf", "loglinear")]
    rows = spectra(torch.nn.Sequential(*layers, kf.KernelAttention(16, 4, "softmax")))
    assert [(r.layer, r.head) for r in rows] == [(f"{i}.core", h) for i in (0, 1) for h in range(4)]
    assert all(r.minimum == r.maximum == r.mean == 1 for r in rows)


def test_spectra_are_squared_singular_values_also_where_float32_would_lose_them():
    layer = kf.KernelAttention(8, 2, "gmm-rks", num_features=8, tied=True)
    small = torch.tensor([1.0, 1e-2, 1e-4, 1e-6])
    with torch.no_grad():
        layer.core.feature_map.S.copy_(torch.diag(small))
        layer.core.feature_map.S[1] *= 2
    first, second = spectra(layer)
    assert (first.minimum, first.maximum, first.mean) == pytest.approx((1e-12, 1, 0.25 * (1 + 1e-4)), rel=1e-5)
    assert (second.minimum, second.maximum) == pytest.approx((4e-12, 4), rel=1e-5)
    assert first.learned


def test_spectra_of_sampled_frequencies_are_those_of_the_core():
    for method in ("fastfood-prf", "generative-rks"):
        layer = kf.KernelAttention(8, 2, method, num_features=8)
        rows, values = spectra(layer), layer.core.eigenvalues().flatten(1)
        assert not any(x.learned for x in rows)
        close(torch.tensor([x.maximum for x in rows]), values.amax(1).detach())
        close(torch.tensor([x.mean for x in rows]), values.mean(1).detach())
    few = kf.KernelAttention(16, 2, "favor+", num_features=3)  # fewer frequencies than dimensions
    assert [x.minimum for x in spectra(few)] == [0, 0]


@pytest.mark.parametrize(("d", "ledger", "printed"), [(64, 0.0295, 0.031), (32, 0.055, 0.053)])
def test_xavier_starts_full_covariances_at_what_the_paper_prints_as_learned(d, ledger, printed):
    layers = [
        kf.KernelAttention(4 * d, 4, "gmm-rks", num_features=2, tied=True, start="xavier", seed=s) for s in range(3)
    ]
    rows = spectra(torch.nn.Sequential(*layers))  # 3 layers of 4 heads, as in Tables 9 and 11
    means = torch.tensor([x.mean for x in rows], dtype=torch.float64)
    within(means, 2 / (d + 4))
    assert float(means.mean()) == pytest.approx(ledger, rel=0.03)
    assert float(means.mean()) == pytest.approx(printed, rel=0.08)
    weights = torch.cat([layer.core.feature_map.S.detach().flatten() for layer in layers])
    assert weights.abs().max() < math.sqrt(6 / (d * d + 4 * d))
    mu = torch.cat([layer.core.feature_map.mu.detach().flatten() for layer in layers])
    assert 0.9 / d < mu.abs().max() <= 1 / d


@pytest.mark.parametrize(("d", "printed"), [(64, 0.025), (32, 0.042)])
def test_xavier_starts_diagonal_covariances_near_1_and_squared_logarithms_at_what_is_printed(d, printed):
    layers = [kf.KernelAttention(4 * d, 4, "gmm-prf", num_features=2, start="xavier", seed=s) for s in range(3)]
    model = torch.nn.Sequential(*layers)
    assert all(0.6 < x.minimum < 1 < x.maximum < 1.6 for x in spectra(model))
    rows = squared_log_variances(model)
    assert [(x.layer, x.head) for x in rows] == [(f"{i}.core", h) for i in range(3) for h in range(4)]
    within(torch.tensor([x.mean for x in rows], dtype=torch.float64), 2 / (d + 4))
    assert max(x.maximum for x in rows) == pytest.approx(6 / (d + 4), rel=0.02)
    assert 0.7 < printed / (2 / (d + 4)) < 1
    assert squared_log_variances(kf.KernelAttention(8, 2, "gmm-rks", num_features=8)) == []


@pytest.mark.parametrize("method", RANDOM)
def test_the_kernel_over_distance(method):
    core = kf.build_attention(method, head_dim=4, num_heads=2, num_features=4096)
    r = torch.linspace(0, 3, 7)
    profile = kernel_profile(core, r)
    assert profile.shape == (2, 7)
    if method.endswith("rks"):
        profile = profile - 1  # the smoothing
    close(profile[:, 0], torch.ones(2))
    if not method.startswith("generative"):
        # An entry's standard deviation is at most 1/sqrt(2M) for RKS; PRF see opposite points here, without any error.
        assert (profile - torch.exp(-0.5 * r.square())).abs().max() < SIGMAS / math.sqrt(2 * 4096)
    shifted = kernel_profile(core, r, point=torch.full((4,), 0.2))
    if method.endswith("rks"):
        close(shifted - 1, profile)


def test_inspection_keeps_its_precision_under_autocast():
    core = kf.build_attention("generative-prf", head_dim=8, num_heads=2, num_features=64)
    want = core.eigenvalues(), kernel_profile(core, [0.0, 1.0])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = core.eigenvalues(), kernel_profile(core, [0.0, 1.0])
    for a, b in zip(got, want, strict=True):
        close(a, b)


def test_profiles_refuse_what_cannot_be():
    core = kf.build_attention("gmm-rks", head_dim=4, num_heads=2, num_features=8)
    for arguments, options, message in [
        ((core, 1.0), {}, "distances must be a list of finite numbers, got 1.0"),
        ((core, [math.nan]), {}, "distances must be a list of finite numbers"),
        ((core, [1.0]), {"point": [1.0, 2.0]}, r"point must have head_dim=4 numbers, got shape \(2,\)"),
        ((core, [1.0]), {"directions": 0}, "directions must be an integer of at least 1, got 0"),
        ((kf.build_attention("softmax", head_dim=4, num_heads=2), [1.0]), {}, "needs a core with a feature map"),
    ]:
        with pytest.raises(ValueError, match=message):
            kernel_profile(*arguments, **options)
