"""Calibrated positive features: unbiased, of the variance that their closed form says, and favor+ at the start."""

from __future__ import annotations

import pytest
import torch

import kernelformer as kf
from kernelformer.feature_maps import OptimalMap
from kernelformer.feature_maps.statistics import Statistics, moments_of, optimal_exponents

D = 4
SIZES = {"head_dim": D, "num_heads": 1}


def tokens(count=50):
    """Queries and keys of unlike sizes in unlike directions, with means, (count, D) each."""
    gen = torch.Generator().manual_seed(3)
    mix = torch.randn(2, D, D, generator=gen, dtype=torch.float64) * torch.tensor([0.9, 0.5, 0.2, 0.1])
    query, key = torch.randn(2, count, D, generator=gen, dtype=torch.float64) @ mix + 0.1
    return query, key


def matrices(query, key, scale, dense, balance):
    """t and A from all pairs of a query and a key, as the papers write them."""
    t = (key.square().mean(0) / query.square().mean(0)) ** 0.25 if balance else torch.ones_like(query[0])
    pairs = ((query * t)[:, None] + (key / t)[None]).flatten(0, 1)
    M = scale * pairs.T @ pairs / len(pairs)
    M = M if dense else torch.eye(D, dtype=M.dtype) * M.trace() / D
    values, U = torch.linalg.eigh(M)
    return t, U @ torch.diag(optimal_exponents(values)) @ U.T


def second_moment(x, y, A):
    """E Z^2 of one draw's estimate Z of exp(x . y):

    det(I - 4A) det(I - 8A)^(-1/2) exp(2 o^T (I - 4A) (I - 8A)^-1 o - |x|^2 - |y|^2),  o = x + y;  A = 0: favor+.
    """
    eye = torch.eye(D, dtype=A.dtype)
    quadratic = ((x + y) @ (eye - 4 * A) @ (eye - 8 * A).inverse() * (x + y)).sum(-1)
    logs = torch.logdet(eye - 4 * A) - 0.5 * torch.logdet(eye - 8 * A) + 2 * quadratic
    return (logs - x.square().sum(-1) - y.square().sum(-1)).exp()


@pytest.mark.parametrize(("dense", "balance"), [(False, False), (False, True), (True, True)])
def test_estimates_are_unbiased_and_have_the_variance_of_the_closed_form(dense, balance):
    m, scale = 100_000, 0.5
    phi = OptimalMap(**SIZES, num_features=m, dense=dense, balance=balance, draw="iid", seed=1)
    query, key = tokens()
    phi.calibrate(moments_of(query[None], key[None]), scale)
    t, A = matrices(query, key, scale, dense, balance)
    q, k = query[:6], key[:6]
    single = (
        m * phi(q[None, None], "query", scale)[0, 0] * phi(k[None, None], "key", scale)[0, 0]
    )  # (6, m), each of one draw
    kernel, x, y = (scale * (q * k).sum(-1)).exp(), q * t * scale**0.5, k / t * scale**0.5
    variance = second_moment(x, y, A) - kernel.square()
    assert ((single.mean(1) - kernel) / (variance / m).sqrt()).abs().max() < 4
    assert ((single.var(1) - variance) / variance).abs().max() < 0.1
    q, k = (a * scale**0.5 for a in (query[:, None], key[None]))
    ours = second_moment(q * t, k / t, A).log().mean()
    assert ours < second_moment(q, k, torch.zeros_like(A)).log().mean() - 0.3  # favor+


def test_the_exponents_are_the_best_ones_and_zero_where_nothing_is():
    spread = torch.cat([torch.zeros(1), torch.logspace(-6, 3, 40)]).double()
    a = optimal_exponents(spread)

    def logs(a):
        return (1 - 4 * a).log() - 0.5 * (1 - 8 * a).log() + 2 * spread * (1 - 4 * a) / (1 - 8 * a)

    for step in (1e-2, -1e-2):
        assert (logs(a) <= logs(a + step * (a.abs() + 1e-3)) + 1e-12).all()
    assert a[0] == 0
    assert (a[1:] < 0).all()


@pytest.mark.parametrize("method", ["favor++", "favor#"])
def test_without_calibration_it_is_favor_plus_of_each_head(method):
    q, k, v = torch.randn(3, 2, 2, 9, D, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ours, plus = (
        kf.build_attention(name, head_dim=D, num_heads=2, num_features=8, seed=2, **more).double()
        for name, more in ((method, {}), ("favor+", {"per_head": True}))
    )
    for draw in (0, 3):
        ours.resample(draw)
        plus.resample(draw)
        assert torch.equal(ours.feature_map.omega, plus.feature_map.omega)
        torch.testing.assert_close(ours(q, k, v), plus(q, k, v), rtol=0, atol=1e-13)


def test_a_coordinate_that_is_always_zero_is_not_balanced():
    statistics = Statistics(1, D, dense=True, balance=True)
    query, key = tokens()
    query[:, 0] = 0
    statistics.add(moments_of(query[None], key[None]))
    assert statistics.balance[0, 0] == 1
    assert statistics.balance.isfinite().all()


def test_sums_stay_in_float64_whatever_the_dtype_of_the_model():
    core = kf.build_attention("favor#", **SIZES, num_features=8)
    query, key = (x[None, None] for x in tokens())
    core.calibrate(query, key)
    before = core.state_dict()["feature_map.statistics.moments"].clone()
    for change in (torch.nn.Module.half, torch.nn.Module.float, torch.nn.Module.bfloat16, torch.nn.Module.double):
        change(core)
        for x in core.feature_map.statistics.buffers():
            assert x.dtype == torch.float64
        assert torch.equal(core.feature_map.statistics.moments, before)
