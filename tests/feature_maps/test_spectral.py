"""Learned kernels: where they start, what they estimate, what is redrawn, and that learning works."""

from __future__ import annotations

import copy
import itertools
import math
import pickle

import numpy as np
import pytest
import torch
from safetensors.torch import load_model, save_file
from torch.autograd import gradcheck
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import kernelformer as kf
from definition import close, inputs
from kernelformer import kernels
from kernelformer.feature_maps import FastFoodMap, GenerativeMap, MixtureMap
from kernelformer.feature_maps.fastfood import fastfood, fwht
from reference import hadamard_matrix as hadamard
from sampling import HEADS, SIGMAS, estimates, pair, within

LEARNED = ["gmm-rks", "gmm-prf", "fastfood-rks", "fastfood-prf", "generative-rks", "generative-prf", "loglinear"]
RANDOM = LEARNED[:-1]


def common(features, d=4, **more):
    smoothing = {"smoothing": 0.0} if features == "rks" else {}
    return {"head_dim": d, "num_heads": 1, "features": features, **smoothing} | more


def many(features, d=4, **more):
    return common(features, d, num_heads=HEADS, per_head=True, **more)


# Where they start


@pytest.mark.parametrize("features", ["rks", "prf"])
@pytest.mark.parametrize("options", [{"components": 1}, {"components": 3}, {"tied": True}, {"covariance": "diagonal"}])
@pytest.mark.parametrize("draw", ["iid", "orthogonal"])
def test_a_mixture_starts_as_an_unbiased_estimate_of_the_gaussian_kernel(features, options, draw):
    x, y = pair()
    sample = estimates(
        lambda: MixtureMap(**many(features, num_features=4, mean_std=0.0, draw=draw, **options)), x, y, 800
    )
    within(sample, kernels.gaussian_kernel(x[None], y[None])[0, 0])


@pytest.mark.parametrize("features", ["rks", "prf"])
@pytest.mark.parametrize("d", [4, 6])
@pytest.mark.parametrize("learn", ["none", "S", "SGB"])
@pytest.mark.parametrize("transform", ["dense", "fwht"])
def test_fastfood_starts_as_an_unbiased_estimate_of_the_gaussian_kernel(features, d, learn, transform):
    x, y = pair(d=d)
    want = kernels.gaussian_kernel(x[None], y[None])[0, 0]
    options = many(features, d, num_features=8, learn=learn, transform=transform)
    points = torch.stack([x, y]).expand(1, HEADS, 2, -1)
    for draw in (0, 1):  # what is learned starts at draw 0; the rest may have gone on
        products = []
        for seed in range(250 // HEADS):
            phi = FastFoodMap(**options, seed=seed).double()
            if draw:
                phi.resample(draw)
            a, b = phi(points)[0].detach().unbind(1)
            products.append((a * b).sum(-1))
        within(torch.cat(products), want)


def test_rows_of_fastfood_are_gaussian():
    made = [FastFoodMap(**many("prf", 6, num_features=8, seed=s)) for s in range(600 // HEADS)]
    rows = torch.cat([phi.frequencies().flatten(0, 1) for phi in made])
    rows = rows.detach().double()  # (4800, 6)
    n = len(rows)
    within(rows.square().mean(1), 1.0)
    covariance = rows.T @ rows / n
    assert (covariance - torch.eye(6, dtype=torch.float64)).abs().max() < SIGMAS * math.sqrt(2 / n) * 2
    fourth = rows.pow(4).mean(1)
    within(fourth, 3.0)


def test_a_wider_kernel_by_sigma():
    x, y = pair(1.5)
    sample = estimates(lambda: FastFoodMap(**many("rks", num_features=4, learn="none", sigma=2.0)), x, y, 800)
    within(sample, kernels.gaussian_kernel(x[None] / 2, y[None] / 2)[0, 0])


def test_a_generator_cannot_start_at_the_gaussian_kernel_but_gives_a_kernel():
    x, y = pair(1.5)
    phi = GenerativeMap(**common("rks", num_features=64))
    assert phi.frequencies().abs().max() < 1
    sample = estimates(lambda: phi, x, y, 50)
    want = kernels.gaussian_kernel(x[None], y[None])[0, 0]
    assert sample.mean() - want > SIGMAS * sample.std() / math.sqrt(len(sample))  # smoother: frequencies are small
    feature = phi.double()(x.view(1, 1, 1, -1))[0, 0, 0]
    close(feature @ feature, torch.tensor(1.0, dtype=torch.float64))


# What they estimate


def mixture(d, components, seed=0, size=0.5):
    gen = torch.Generator().manual_seed(seed)
    mu = size * torch.randn(components, d, generator=gen, dtype=torch.float64)
    S = torch.eye(d, dtype=torch.float64) + size * torch.randn(components, d, d, generator=gen, dtype=torch.float64)
    return mu, S


def mixture_map(features, mu, S, m, **options):
    phi = MixtureMap(**many(features, num_features=m, components=len(mu), covariance="full", draw="iid", **options))
    with torch.no_grad():
        own = len(mu) // 2 if options.get("tied") else len(mu)
        phi.mu.copy_(mu[None, :own])
        phi.S.copy_(S[None, :own])
    return phi


@pytest.mark.parametrize(
    ("features", "kernel", "mse"),
    [
        ("rks", kernels.mixture_fourier, kernels.mse_mixture_fourier),
        ("prf", kernels.mixture_positive, kernels.mse_mixture_positive),
    ],
)
@pytest.mark.parametrize("components", [1, 2, 3])
def test_kernels_and_errors_of_mixtures_are_those_of_the_closed_forms(features, kernel, mse, components):
    x, y = pair(0.4)
    mu, S = (z.float().double() for z in mixture(4, components))
    m = 5
    sample = estimates(lambda: mixture_map(features, mu, S, m), x, y, 3000)
    exact = kernel(x, y, mu, S)
    within(sample, exact)
    within((sample - exact).square(), mse(x, y, mu, S, m))


def test_theorem_3_of_the_paper_as_corrected():
    x, y = pair(0.4)
    mu, S = mixture(4, 1)
    m = 5
    o, p = x + y, x - y
    spread = (S[0].T @ o).square().sum()
    corrected = torch.exp(-2 * (x @ x + y @ y - mu[0] @ o)) * (torch.exp(2 * spread) - torch.exp(spread)) / m
    close(kernels.mse_mixture_positive(x, y, mu, S, m), corrected)
    printed = (
        torch.exp(-2 * (x @ x + y @ y - mu[0] @ o)) * (torch.exp(2 * spread.sqrt()) - torch.exp(spread.sqrt())) / m
    )
    assert (printed - corrected).abs() > 0.1 * corrected  # without the squares it is another number

    tied_mu, tied_S = torch.cat([mu, -mu]), torch.cat([S, S])
    of_the_sum = 2 / m * torch.cos(mu[0] @ p) ** 2 * (1 - torch.exp(-(S[0].T @ p).square().sum())) ** 2
    close(kernels.mse_mixture_fourier(x, y, tied_mu, tied_S, m), of_the_sum / 4)
    sample = estimates(lambda: mixture_map("rks", tied_mu, tied_S, m, tied=True), x, y, 3000)
    exact = kernels.mixture_fourier(x, y, tied_mu, tied_S)
    within(sample, exact)
    within((sample - exact).square(), of_the_sum / 4)


def test_errors_of_near_points_keep_their_digits_in_float32():
    mu, S = mixture(4, 2)
    for size in (0.3, 0.03, 0.003):
        x, y = pair(size)
        for mse in (kernels.mse_mixture_fourier, kernels.mse_mixture_positive):
            want = mse(x, y, mu, S, 5)
            got = mse(x.float(), y.float(), mu.float(), S.float(), 5).double()
            assert (got - want).abs() < 1e-3 * want


# The fast transform


@pytest.mark.parametrize("d", [1, 2, 4, 8, 16, 32, 64, 128, 512, 1024])
def test_the_fast_transform_is_the_hadamard_matrix(d):
    x = torch.randn(3, d, 5, dtype=torch.float64)
    close(fwht(x), hadamard(d) @ x)
    close(fwht(fwht(x)), d * x)


def test_the_fast_transform_differentiates_and_refuses_other_lengths():
    x = torch.randn(2, 8, 3, dtype=torch.float64, requires_grad=True)
    assert gradcheck(fwht, (x,))
    with pytest.raises(ValueError, match=r"needs a power of two, got 6 \(shape \(2, 6, 3\)\); pad with zeros"):
        fwht(torch.zeros(2, 6, 3))
    gen = torch.Generator().manual_seed(0)
    S, G, B = (torch.randn(2, 3, 8, generator=gen, dtype=torch.float64, requires_grad=True) for _ in range(3))
    P = torch.rand(2, 3, 8, generator=gen).argsort(-1)
    rows = torch.randn(2, 6, 4, generator=gen, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda *x: fastfood(*x, P), (rows, S, G, B))


@pytest.mark.parametrize("method", ["fastfood-rks", "fastfood-prf"])
@pytest.mark.parametrize("d", [6, 8, 40])
@pytest.mark.parametrize("is_causal", [False, True])
def test_rows_through_the_fast_transform_equal_the_matrix_multiplied_out(method, d, is_causal, small_blocks):
    results = []
    for transform in ("dense", "fwht"):
        core = kf.build_attention(
            method, head_dim=d, num_heads=4, num_features=128, transform=transform, per_head=False
        ).double()
        leaves = inputs(19, G=2, D=d, grad=True, size=0.5)
        out, state = core(*leaves, is_causal=True, return_state=True) if is_causal else (core(*leaves), None)
        results.append([out, *torch.autograd.grad(out.square().sum(), [*leaves, *core.parameters()])])
        if state is not None:
            results[-1].append(core.step(*inputs(1, G=2, D=d, seed=5), state)[0])
    for a, b in zip(*results, strict=True):
        close(a, b)


# What is redrawn


@pytest.mark.parametrize(("learn", "kept"), [("none", ""), ("S", "S"), ("SGB", "SGB")])
def test_fastfood_redraws_what_it_does_not_learn(learn, kept):
    phi = FastFoodMap(**common("prf", 6, num_features=16, learn=learn))
    before = {name: getattr(phi, name).clone() for name in "SGBP"}
    assert {name for name, _ in phi.named_parameters()} == set(kept)
    phi.resample()
    for name, x in before.items():
        assert torch.equal(getattr(phi, name), x) == (name in kept), name
    if learn == "S":
        close(phi.G.norm(dim=-1), before["G"].norm(dim=-1))
    phi.resample(0)
    for name, x in before.items():
        assert torch.equal(getattr(phi, name), x)


@pytest.mark.parametrize("method", RANDOM)
def test_redrawing_changes_the_estimate_and_nothing_that_is_learned(method):
    core = kf.build_attention(method, head_dim=8, num_heads=4, num_features=16)
    q, k, v = inputs(9, dtype=torch.float32)
    before, learned = core(q, k, v), [x.clone() for x in core.parameters()]
    core.resample()
    assert (core(q, k, v) - before).abs().max() > 1e-4
    assert all(torch.equal(a, b) for a, b in zip(learned, core.parameters(), strict=True))
    core.eval()
    assert torch.equal(core(q, k, v), core(q, k, v))


def test_training_and_evaluation_see_the_same_kernel():
    core = kf.build_attention("generative-prf", head_dim=8, num_heads=4, num_features=16)
    q, k, v = inputs(9, dtype=torch.float32)
    assert torch.equal(core.train()(q, k, v), core.eval()(q, k, v))


@pytest.mark.parametrize("method", LEARNED)
def test_an_emptied_map_starts_again(method):
    want = kf.build_attention(method, head_dim=8, num_heads=4, num_features=16, seed=5)
    core = kf.build_attention(method, head_dim=8, num_heads=4, num_features=16, seed=5).to_empty(device="cpu")
    for x in core.parameters():
        x.data.fill_(float("nan"))
    core.feature_map.reset_parameters()
    for (name, a), (_, b) in zip(core.state_dict().items(), want.state_dict().items(), strict=True):
        assert torch.equal(a, b), name


# Guards


@pytest.mark.parametrize("smoothing", [0.0, 1.0, "noise"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_denominators_made_to_vanish_and_to_turn_negative(smoothing, is_causal):
    """One frequency w = 1: K(q, k) = cos(q - k). Keys a quarter turn away sum to zero, half a turn away to -S."""
    core = kf.build_attention(
        "gmm-rks", head_dim=1, num_heads=1, num_features=1, components=1, mean_std=0.0, smoothing=smoothing, scale=1.0
    ).double()
    with torch.no_grad():
        core.feature_map.S.zero_()
        core.feature_map.mu.fill_(1.0)
    S, quarter = 16, math.pi / 2
    for gap in (quarter, math.pi, math.pi - 1e-9, quarter + 1e-12):
        q = torch.zeros(1, 1, S, 1, dtype=torch.float64, requires_grad=True)
        k = torch.full((1, 1, S, 1), gap, dtype=torch.float64, requires_grad=True)
        v = torch.randn(1, 1, S, 3, dtype=torch.float64, requires_grad=True)
        out = core(q, k, v, is_causal=is_causal)
        ones = core(q, k, torch.ones_like(v), is_causal=is_causal)
        # The denominator is positive whatever the sum of the weights is, so their total never exceeds 1, and no row
        # is larger than 1 / guard times the largest value.
        assert ones.max() <= 1 + 1e-12
        assert out.abs().max() <= 100 * v.abs().max() + 1e-9
        assert all(x.isfinite().all() for x in torch.autograd.grad(out.sum(), (q, k, v)))
        state, parts = None, []
        for t in range(S):
            row, state = core.step(*(x[:, :, t : t + 1].detach() for x in (q, k, v)), state)
            parts.append(row)
        close(torch.cat(parts, 2), core(q, k, v, is_causal=True))


def test_with_smoothing_one_no_weight_is_negative():
    core = kf.build_attention("gmm-rks", head_dim=8, num_heads=4, num_features=4)
    q, k, _ = inputs(30, dtype=torch.float32, size=4.0)
    assert core.attention_matrix(q, k).min() >= -1e-6
    bare = kf.build_attention("gmm-rks", head_dim=8, num_heads=4, num_features=4, smoothing=0.0)
    assert bare.attention_matrix(q, k).min() < -1e-3


# Inspection


def test_covariances_of_mixtures_and_samples():
    core = kf.build_attention("gmm-rks", head_dim=4, num_heads=2, num_features=8)
    with torch.no_grad():
        core.feature_map.S.copy_(torch.randn(2, 2, 4, 4))
    S = core.feature_map.S
    close(core.covariances(), S @ S.transpose(-1, -2))
    values = core.eigenvalues()
    assert values.shape == (2, 2, 4)
    close(values.sum(-1), core.covariances().diagonal(dim1=-2, dim2=-1).sum(-1))
    diagonal = kf.build_attention("gmm-prf", head_dim=4, num_heads=2, num_features=8, tied=True, per_head=False)
    with torch.no_grad():
        diagonal.feature_map.S.copy_(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert diagonal.covariances().shape == (2, 2, 4, 4)
    close(diagonal.eigenvalues()[1, 0], torch.tensor([1.0, 4.0, 9.0, 16.0]))
    sampled = kf.build_attention("fastfood-prf", head_dim=4, num_heads=2, num_features=8192)
    assert (sampled.covariances() - torch.eye(4)).abs().max() < 0.1
    assert kf.build_attention("favor+", head_dim=4, num_heads=2).eigenvalues().shape == (2, 1, 4)
    with pytest.raises(ValueError, match="LogLinearMap has no frequencies, and so no spectral density"):
        kf.build_attention("loglinear", head_dim=4, num_heads=2).covariances()


# The start of the authors' code


def test_xavier_counts_the_fans_as_torch_does():
    for covariance, size in (("full", (5, 6, 6)), ("diagonal", (5, 6))):
        phi = MixtureMap(head_dim=6, num_heads=5, features="rks", num_features=2, covariance=covariance, start="xavier")
        assert phi._fans == torch.nn.init._calculate_fan_in_and_fan_out(torch.empty(size))


def test_the_start_changes_first_values_alone(tmp_path):
    options = {"head_dim": 4, "num_heads": 2, "num_features": 8}
    plain, xavier = (kf.build_attention("gmm-rks", **options, start=x) for x in ("identity", "xavier"))
    default = kf.build_attention("gmm-rks", **options)
    for name, x in default.state_dict().items():
        assert torch.equal(x, plain.state_dict()[name])
    assert {name: x.shape for name, x in xavier.state_dict().items()} == {
        name: x.shape for name, x in default.state_dict().items()
    }
    assert torch.equal(xavier.feature_map.noise, default.feature_map.noise)
    save_file(xavier.state_dict(), tmp_path / "x.safetensors")  # weights say where they are, whatever the start was
    load_model(default, tmp_path / "x.safetensors")
    assert torch.equal(default.feature_map.S, xavier.feature_map.S)
    again = kf.build_attention("gmm-rks", **options, start="xavier")
    assert torch.equal(again.feature_map.S, xavier.feature_map.S)
    other = kf.build_attention("gmm-rks", **options, start="xavier", mean_std=0.0)
    assert not other.feature_map.mu.any()
    with pytest.raises(ValueError, match=r"unknown start 'ones'; .*choose from identity, xavier"):
        kf.build_attention("gmm-rks", **options, start="ones")


# Learning


def fit(core, target, *, steps, lr, redraw=10, d=2, size=1.0, batch=64):
    """Train the kernel of an unnormalized core on ``target(x, y)``, through attention itself, with new draws."""
    optimizer = torch.optim.Adam(core.parameters(), lr=lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    gen = torch.Generator().manual_seed(0)
    for step in range(steps):
        x, y = (size * torch.randn(1, 1, batch, d, generator=gen, dtype=torch.float64) for _ in range(2))
        got = core.attention_matrix(x, y)
        loss = (got - target(x[0, 0], y[0, 0])).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % redraw == redraw - 1:
            core.resample()


def grid(kernel, mu, S):
    return lambda x, y: kernel(x[:, None].expand(-1, len(y), -1), y[None].expand(len(x), -1, -1), mu, S)


def recovered(core, target, d, size=1.0, draws=32):
    """Relative error of the learned kernel on new points: the mean over draws stands for the kernel itself."""
    gen = torch.Generator().manual_seed(9)
    x, y = (size * torch.randn(1, 1, 128, d, generator=gen, dtype=torch.float64) for _ in range(2))
    want = target(x[0, 0], y[0, 0])
    total = 0
    with torch.no_grad():
        for draw in range(1000, 1000 + draws):
            core.resample(draw)
            total = total + core.attention_matrix(x, y)[0, 0]
    return float((total / draws - want).norm() / want.norm())


def unnormalized(method, d, **options):
    return kf.build_attention(method, head_dim=d, num_heads=1, normalize=False, scale=1.0, **options).double()


def test_a_mixture_recovers_a_kernel_of_known_frequencies():
    mu = torch.tensor([[1.5, 0.5], [-1.5, -0.5]], dtype=torch.float64)
    S = torch.tensor([[0.6, 0.0], [0.3, 0.4]], dtype=torch.float64).expand(2, 2, 2)
    target = grid(kernels.mixture_fourier, mu, S)
    core = unnormalized("gmm-rks", 2, num_features=128, tied=True, smoothing=0, mean_std=0.3)
    assert recovered(core, target, 2) > 0.5
    fit(core, target, steps=400, lr=0.05)
    assert recovered(core, target, 2) < 0.05
    phi = core.feature_map
    learned = phi.mu[0, 0] * phi.mu[0, 0, 0].sign()
    assert (learned - mu[0]).abs().max() < 0.1
    assert (core.covariances()[0, 0] - S[0] @ S[0].T).abs().max() < 0.1


@pytest.mark.slow
def test_positive_features_recover_a_density_of_their_own():
    mu = torch.tensor([[0.8, -0.4], [-0.3, 0.9]], dtype=torch.float64)
    S = torch.diag_embed(torch.tensor([[0.3, 0.6], [0.5, 0.2]], dtype=torch.float64))
    target = grid(kernels.mixture_positive, mu, S)
    # Least squares also rewards a small variance, so that with few features S would come out too small.
    core = unnormalized("gmm-prf", 2, num_features=1024, mean_std=0.3)
    assert recovered(core, target, 2, size=0.5) > 0.15
    fit(core, target, steps=400, lr=0.05, size=0.5)
    assert recovered(core, target, 2, size=0.5) < 0.05


@pytest.mark.parametrize("method", ["fastfood-rks", "generative-rks"])
def test_the_others_recover_a_narrower_kernel(method):
    def target(x, y):
        return kernels.gaussian_kernel(0.3 * x, 0.3 * y)

    core = unnormalized(method, 4, num_features=64, smoothing=0)
    before = recovered(core, target, 4)
    fit(core, target, steps=400, lr=0.02, d=4)
    assert before > 0.1
    assert recovered(core, target, 4) < 0.05


def test_loglinear_learns_another_map_for_keys_than_for_queries():
    torch.manual_seed(0)
    teacher = kf.build_attention("softmax", head_dim=4, num_heads=2)
    turn = torch.linalg.qr(torch.randn(4, 4))[0]
    core = kf.build_attention("loglinear", head_dim=4, num_heads=2, num_features=32)
    optimizer = torch.optim.Adam(core.parameters(), lr=0.02)
    losses = []
    for _ in range(250):
        q, k = torch.randn(2, 1, 2, 64, 4)
        want = teacher.attention_matrix(q @ turn, k)
        got = core.attention_matrix(q, k)
        loss = (want * (want.log() - got.log())).sum(-1).mean()  # KL of the attention rows
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert sum(losses[-10:]) < 0.1 * sum(losses[:10])


# Composition


@pytest.mark.parametrize("method", LEARNED)
def test_a_stream_makes_its_frequencies_once_and_keeps_them(method, monkeypatch):
    core = kf.build_attention(method, head_dim=8, num_heads=4, num_features=16)
    made = []
    prepare = core.feature_map.prepare
    monkeypatch.setattr(core.feature_map, "prepare", lambda *x: made.append(1) or prepare(*x))
    q, k, v = inputs(12, dtype=torch.float32)

    def cut(a, b):
        return q[:, :, a:b], k[:, :, a:b], v[:, :, a:b]

    want = core(q, k, v, is_causal=True)
    made.clear()
    with torch.no_grad():
        out, state = core(*cut(0, 5), is_causal=True, return_state=True)
        parts = [out]
        for t in range(5, 12):
            out, state = core.step(*cut(t, t + 1), state.reorder([0, 1]) if t == 8 else state)
            parts.append(out)
    close(torch.cat(parts, 2), want)
    assert len(made) == 1
    with torch.no_grad():  # weights that change, or a core with other ones, are looked at again
        other = kf.build_attention(method, head_dim=8, num_heads=4, num_features=16)
        for x in other.parameters():
            x.mul_(1.5)
        one = cut(11, 12)
        forgotten = pickle.loads(pickle.dumps(state))
        assert torch.equal(other.step(*one, state)[0], other.step(*one, forgotten)[0])
        assert (other.step(*one, state)[0] - core.step(*one, state)[0]).abs().max() > 1e-4
        for x in core.parameters():
            x.mul_(1.5)
        assert torch.equal(core.step(*one, state)[0], other.step(*one, forgotten)[0])
    out, _ = core.step(*one, state)  # with gradients the parameters are asked again
    grads = torch.autograd.grad(out.sum(), list(core.parameters()), allow_unused=True)
    assert any(g is not None and g.abs().max() > 0 for g in grads)


def by_optimizer(core):
    for x in core.parameters():
        x.grad = -x
    torch.optim.SGD(core.parameters(), lr=0.5, foreach=True).step()


def by_safetensors(core, folder):
    path = folder / "core.safetensors"
    save_file({name: 1.5 * x if x.is_floating_point() else x for name, x in core.state_dict().items()}, path)
    load_model(core, path)


def by_dict(core, assign):
    weights = {name: x.clone() for name, x in core.state_dict().items()}
    for name, _ in core.named_parameters():
        weights[name] *= 1.5
    core.load_state_dict(weights, assign=assign)


WRITES = {
    "in place": lambda core, _: [x.mul_(1.5) for x in core.parameters()],
    "data set": lambda core, _: [setattr(x, "data", 1.5 * x) for x in core.parameters()],
    "turned around": lambda core, _: [x.copy_(x.flip(-1)) for x in core.parameters()],  # of the same sum
    "vector": lambda core, _: vector_to_parameters(1.5 * parameters_to_vector(core.parameters()), core.parameters()),
    "optimizer": lambda core, _: by_optimizer(core),
    "dict": lambda core, _: by_dict(core, False),
    "dict assigned": lambda core, _: by_dict(core, True),
    "safetensors": by_safetensors,
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("method", ["gmm-rks", "fastfood-prf", "loglinear", "rfa-gate"])
def test_a_stream_goes_on_with_the_weights_of_now_however_they_were_written(method, write, tmp_path):
    core = kf.build_attention(method, head_dim=8, num_heads=4, num_features=16).eval()
    q, k, v = inputs(6, dtype=torch.float32)
    with torch.no_grad():
        for x in core.parameters():  # so that no two entries are alike
            x.mul_(1 + 0.5 * torch.rand(x.shape, generator=torch.Generator().manual_seed(0)))
        _, state = core(q, k, v, is_causal=True, return_state=True)
        one = q[:, :, :1], k[:, :, :1], v[:, :, :1]
        before, state = core.step(*one, state)
        assert core._prepared is not None
        before, _ = core.step(*one, state)
        WRITES[write](core, tmp_path)
        out, after = core.step(*one, state)
        assert torch.equal(out, copy.deepcopy(core).step(*one, state)[0])  # a copy makes its frequencies anew
        assert (out - before).abs().max() > 1e-4
        assert torch.equal(core.step(*one, after)[0], copy.deepcopy(core).step(*one, after)[0])


DRAW_WRITES = {
    "in place": lambda core, name: core.get_buffer(name).mul_(1.5),
    "dict": lambda core, name: core.load_state_dict({**core.state_dict(), name: 1.5 * core.get_buffer(name)}),
    "dict assigned": lambda core, name: core.load_state_dict(
        {**core.state_dict(), name: 1.5 * core.get_buffer(name)}, assign=True
    ),
}


@pytest.mark.parametrize("write", DRAW_WRITES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("method", ["favor+", "gmm-rks", "rfa-gate"])
def test_a_stream_goes_on_with_the_draw_of_now_however_it_was_written(method, dtype, write):
    core = kf.build_attention(method, head_dim=8, num_heads=4, num_features=16).eval()
    q, k, v = inputs(6, dtype=dtype)
    name = next(n for n, x in core.named_buffers() if x.is_floating_point() and x.numel() > 1)
    with torch.no_grad():
        for x in core.parameters():  # so that the draw has a say in all maps
            x.add_(0.3)
        _, state = core(q, k, v, is_causal=True, return_state=True)
        one = q[:, :, :1], k[:, :, :1], v[:, :, :1]
        _, state = core.step(*one, state)
        before, _ = core.step(*one, state)
        DRAW_WRITES[write](core, name)
        out, _ = core.step(*one, state)
        assert torch.equal(out, copy.deepcopy(core).step(*one, state)[0])
        assert (out - before).abs().max() > 1e-5


@pytest.mark.parametrize("method", LEARNED)
def test_maps_are_built_on_the_meta_device_and_in_any_default_dtype(method):
    with torch.device("meta"):
        layer = kf.KernelAttention(32, 4, method, num_features=16)
    want = kf.KernelAttention(32, 4, method, num_features=16).core.state_dict()
    weights = layer.core.state_dict()
    assert all(torch.equal(weights[name], want[name]) for name in want)
    torch.set_default_dtype(torch.float64)
    try:
        weights = kf.build_attention(method, head_dim=8, num_heads=4, num_features=16).state_dict()
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(weights[name], want[name]) for name in want)


@pytest.mark.parametrize("method", ["favor+", "fastfood-prf"])
def test_averaged_and_cast_weights_load(method):
    model = kf.KernelAttention(32, 4, method, num_features=16, seed=5)
    averaged = torch.optim.swa_utils.AveragedModel(
        model, use_buffers=True, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    for _ in range(3):
        averaged.update_parameters(model)
    fresh = kf.KernelAttention(32, 4, method, num_features=16)
    fresh.load_state_dict(averaged.module.state_dict())
    assert fresh.core.feature_map.seed_number == 5
    fresh.load_state_dict({name: x.to(torch.bfloat16) for name, x in model.state_dict().items()})
    broken = model.state_dict()
    broken["core.feature_map.settings"] = broken["core.feature_map.settings"][:-3]
    with pytest.raises(RuntimeError, match=r"core\.feature_map: its saved settings cannot be read"):
        fresh.load_state_dict(broken)


def test_exporting_leaves_nothing_behind():
    core = kf.build_attention("fastfood-prf", head_dim=8, num_heads=2, num_features=16).double()
    q, k, v = inputs(5, H=2, G=2)
    torch.export.export(core, (q, k, v), strict=False)
    other = kf.build_attention("fastfood-prf", head_dim=8, num_heads=2, num_features=16, seed=1).double()
    assert type(other(q, k, v)) is torch.Tensor


def test_kernels_get_a_learning_rate_of_their_own():
    model = torch.nn.Sequential(kf.KernelAttention(16, 2, "gmm-prf", num_features=8), torch.nn.Linear(16, 16))
    groups = kf.parameter_groups(model, lr=0.5, weight_decay=0.0)
    assert [g["name"] for g in groups] == ["model", "kernel"]
    kernel = {id(x) for x in model[0].core.parameters()}
    assert {id(x) for x in groups[1]["params"]} == kernel
    assert {id(x) for x in groups[0]["params"]} == {id(x) for x in model.parameters()} - kernel
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    assert [g["lr"] for g in optimizer.param_groups] == [1e-3, 0.5]
    model[0].core.requires_grad_(False)
    assert [g["name"] for g in kf.parameter_groups(model)] == ["model"]


@pytest.mark.parametrize("method", ["softmax", "favor+", "elu", "skyformer"])
def test_a_model_whose_kernels_learn_nothing_has_one_group(method):
    model = torch.nn.Sequential(kf.KernelAttention(16, 2, method), torch.nn.Linear(16, 16))
    groups = kf.parameter_groups(model, lr=0.5, weight_decay=0.0)
    assert [group["name"] for group in groups] == ["model"]
    assert [id(x) for x in groups[0]["params"]] == [id(x) for x in model.parameters()]
    assert torch.optim.AdamW(groups, lr=1e-3).param_groups[0]["lr"] == 1e-3
    assert kf.parameter_groups(torch.nn.Identity(), lr=0.5) == []


@pytest.mark.parametrize("method", LEARNED)
def test_a_layer_trains_every_parameter_with_redraws(method):
    torch.manual_seed(0)
    layer = kf.KernelAttention(16, 2, method, num_features=16, causal=True)
    if layer.core.feature_map.is_random:
        kf.redraw(layer, every=3)
    optimizer = torch.optim.AdamW(kf.parameter_groups(layer, lr=0.01), lr=1e-3)
    before = {name: x.clone() for name, x in layer.named_parameters()}
    x = torch.randn(4, 11, 16)
    losses = []
    for _ in range(30):
        loss = (layer(x) - x.roll(1, 1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    still = [name for name, x in layer.named_parameters() if torch.equal(x, before[name])]
    assert still in ([], ["key.bias"]), still  # what all keys share may cancel


# Bad input


def test_sizes_and_choices_that_cannot_be():
    sizes = {"head_dim": 48, "num_heads": 2}
    for what, options, message in [
        (
            "fastfood-prf",
            {"num_features": 100},
            "in blocks of 64 (head_dim=48, padded to 64), got num_features=100; use 64 or 128",
        ),
        ("fastfood-rks", {"num_features": 32}, "got num_features=32; use 64."),
        ("fastfood-prf", {"learn": "GB"}, "unknown learn 'GB'; did you mean 'SGB'? choose from S, SGB, none"),
        ("fastfood-prf", {"sigma": 0.0}, "sigma must be a finite number above 0, got 0.0"),
        ("fastfood-prf", {"transform": "fft"}, "unknown transform 'fft'"),
        ("fastfood-prf", {"smoothing": 1.0}, "unknown option for method 'fastfood-prf', 'smoothing'"),
        ("gmm-rks", {"components": 0}, "components must be an integer of at least 1, got 0"),
        ("gmm-rks", {"components": 3, "tied": True}, "tied components come in pairs, got components=3"),
        ("gmm-rks", {"covariance": "low-rank"}, "unknown covariance 'low-rank'; choose from diagonal, full"),
        ("gmm-rks", {"smoothing": -1}, "smoothing must be a finite number of at least 0, got -1"),
        ("gmm-rks", {"smoothing": "much"}, "unknown smoothing 'much'"),
        ("gmm-prf", {"mean_std": -1.0}, "mean_std must be a finite number of at least 0, got -1.0"),
        ("generative-prf", {"num_features": 1}, "takes more than one sample, got num_features=1; use at least 2"),
        ("generative-prf", {"depth": 0}, "depth must be an integer of at least 1, got 0"),
        ("gmm-rks", {"smoothing": 1e9}, "smoothing must be at most 1e6, got 1e+09"),
        ("gmm-rks", {"tied": "no"}, "tied must be True or False, got 'no'"),
        ("gmm-rks", {"per_head": 1}, "per_head must be True or False, got 1"),
        ("gmm-rks", {"normalize": "no"}, "normalize must be True or False, got 'no'"),
        ("gmm-rks", {"normalize_qk": "no"}, "normalize_qk must be True or False, got 'no'"),
        ("gmm-rks", {"mean_std": True}, "mean_std must be a finite number of at least 0, got True"),
        ("gmm-rks", {"norms": ""}, "unknown norms ''"),
        ("gmm-rks", {"seed": 2**63}, "seed must fit into 64 bits"),
        ("fastfood-prf", {"sigma": "2"}, "sigma must be a finite number above 0, got '2'"),
        ("fastfood-prf", {"transform": ""}, "unknown transform ''"),
        ("loglinear", {"num_features": 0}, "num_features must be an integer of at least 1, got 0"),
    ]:
        with pytest.raises(ValueError) as problem:
            kf.build_attention(what, **sizes, **options)
        assert message in str(problem.value), str(problem.value)


def test_numbers_of_any_library_are_taken():
    core = kf.build_attention(
        "gmm-prf", head_dim=np.int64(8), num_heads=np.int32(4), num_features=np.int64(16), components=np.int64(2),
        mean_std=np.float32(0.5), seed=np.int64(3),
    )  # fmt: skip
    fast = kf.build_attention("fastfood-prf", head_dim=np.int64(8), num_heads=4, sigma=torch.tensor(2.0))
    for x in (core, fast):
        x.load_state_dict(x.state_dict())


@pytest.mark.parametrize(
    ("method", "saved", "here", "message"),
    [
        ("fastfood-prf", {"learn": "S"}, {"learn": "SGB"}, "was saved with learn='S', this one has learn='SGB'"),
        ("fastfood-prf", {"num_features": 16}, {}, "was saved with num_features=16, this one has num_features=32"),
        ("gmm-rks", {"smoothing": 0.5}, {}, "was saved with smoothing=0.5, this one has smoothing=1.0"),
        (
            "gmm-rks",
            {"tied": True, "components": 4},
            {"tied": False},
            "components=4, tied=True, this one has components=2",
        ),
        ("gmm-prf", {"covariance": "full"}, {}, "was saved with covariance='full', this one has covariance='diagonal'"),
        ("generative-prf", {"depth": 2}, {"depth": 3}, "was saved with depth=2, this one has depth=3"),
        ("loglinear", {"per_head": False}, {}, "was saved with per_head=False, this one has per_head=True"),
        ("fastfood-prf", {"head_dim": 5}, {}, "was saved with head_dim=5, this one has head_dim=8"),
        ("favor+", {"kernel": "gaussian"}, {}, "was saved with kernel='gaussian', this one has kernel='softmax'"),
        ("favor+", {"draw": "iid"}, {}, "was saved with draw='iid', this one has draw='orthogonal'"),
    ],
)
def test_a_state_dict_of_another_configuration_is_refused(method, saved, here, message):
    sizes = {"head_dim": 8, "num_heads": 4, "num_features": 32}
    other = kf.build_attention(method, **{**sizes, **saved})
    core = kf.build_attention(method, **{**sizes, **here})
    before = {name: x.clone() for name, x in core.state_dict().items()}
    with pytest.raises(RuntimeError) as problem:
        core.load_state_dict(other.state_dict())
    assert message in str(problem.value)
    assert "build it with the saved settings" in str(problem.value)
    assert all(torch.equal(x, before[name]) for name, x in core.state_dict().items()), "nothing may be half loaded"


def test_how_rows_are_transformed_is_not_part_of_the_weights():
    sizes = {"head_dim": 8, "num_heads": 4, "num_features": 32}
    a, b = (kf.build_attention("fastfood-prf", **sizes, transform=t, seed=i) for i, t in enumerate(("dense", "fwht")))
    b.load_state_dict(a.state_dict())
    q, k, v = inputs(9, dtype=torch.float32)
    close(a(q, k, v), b(q, k, v))


def test_seeds_give_independent_maps_and_the_same_seed_the_same():
    for method in LEARNED:
        one, same, other = (
            kf.build_attention(method, head_dim=8, num_heads=2, num_features=16, seed=s).state_dict() for s in (0, 0, 1)
        )
        assert all(torch.equal(one[name], same[name]) for name in one)
        changed = [name for name in one if not torch.equal(one[name], other[name])]
        assert len(changed) > 1, method
    for a, b in itertools.pairwise(kf.build_attention("fastfood-prf", head_dim=8, num_heads=3).feature_map.S):
        assert not torch.equal(a, b)
