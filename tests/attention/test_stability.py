"""Large norms: the worst row against the same draw in float64, in log space, and no row lost."""

from __future__ import annotations

import copy

import pytest
import torch

import kernelformer as kf
from definition import attend, build, inputs
from kernelformer.attention import positive, reference, strips

pytestmark = pytest.mark.usefixtures("no_matrices")

D, L = 64, 1024


def at_norm(norm, heads=2, length=L, seed=0):
    """q, k, v whose queries and keys have that norm after scaling; "mixed" is uniform in 1..16."""
    gen = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, heads, length, D, generator=gen) for _ in range(3))

    def sized(x):
        size = 1 + 15 * torch.rand(1, heads, length, 1, generator=gen) if norm == "mixed" else norm
        return x / x.norm(dim=-1, keepdim=True) * size * D**0.25

    return sized(q), sized(k), v


def log_space(core, q, k, v, is_causal):
    phi, scale = core.feature_map, core.scale
    tensors = phi.prepare(q.double(), k.double(), None, scale)
    logs = [phi.spec.log_features(x.double(), tensors, scale, r) for x, r in ((q, "query"), (k, "key"))]
    visible = reference.visibility(q.shape[2], k.shape[2], is_causal=is_causal, key_mask=None)
    return reference.positive_attention(*logs, v.double(), visible)


def worst_row(got, want):
    return float(((got.double() - want).norm(dim=-1) / want.norm(dim=-1)).max())


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("norm", "allowed"), [(1, 2e-6), (4, 3e-5), (16, 1e-4), ("mixed", 1e-4), (64, 1e-3)])
def test_worst_row_of_favor_plus_in_float32(norm, allowed, is_causal):
    core = kf.build_attention("favor+", head_dim=D, num_heads=1, num_features=256)
    q, k, v = at_norm(norm, heads=1, length=600)
    got = core(q, k, v, is_causal=is_causal)
    assert not got.isnan().any()
    assert worst_row(got, log_space(core, q, k, v, is_causal)) < allowed


@pytest.mark.parametrize("method", ["favor+", "favor+hyperbolic", "favor+regularized", "elu"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_gradients_at_large_norms_in_float32(method, is_causal):
    core = kf.build_attention(method, head_dim=D, num_heads=2)
    whole = copy.deepcopy(core).double()
    q, k, v = at_norm("mixed", length=300)
    g = torch.randn(v.shape, generator=torch.Generator().manual_seed(1))
    slopes = []
    for model, dtype in ((core, torch.float32), (whole, torch.float64)):
        leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        slopes.append(torch.autograd.grad(model(*leaves, is_causal=is_causal), leaves, g.to(dtype)))
    for single, double in zip(*slopes, strict=True):
        assert float((single.double() - double).norm() / double.norm()) < 1e-4


def growing(length, largest, dtype=torch.float64):
    """Norms fall, so features grow as exp(-|k|^2 / 2) lets them: a chunk's mass belongs to its last keys."""
    q, k, v = inputs(length, D=8, dtype=dtype)
    return q, k * torch.linspace(largest, 1, length, dtype=dtype).view(1, 1, -1, 1), v


@pytest.mark.parametrize(
    "method", ["favor+", "favor+hyperbolic", "elu", "trigonometric", "favor+ gaussian", "favor+ unnormalized"]
)
@pytest.mark.parametrize("masked", [False, True])
def test_rows_that_a_later_key_dwarfs_are_computed_again(method, masked, monkeypatch):
    name, _, kind = method.partition(" ")
    options = {"kernel": "gaussian", "normalize": kind == "gaussian"} if kind else {}
    core = kf.build_attention(name, head_dim=8, num_heads=4, **options)
    whole = copy.deepcopy(core).double()
    q, k, v = growing(100, 15)
    key_mask = torch.ones(2, 100, dtype=torch.bool)
    key_mask[0, :7] = False
    key_mask = key_mask if masked else None
    rescued = []
    original = positive.rescue_backward
    monkeypatch.setattr(positive, "rescue_backward", lambda *a: rescued.append(1) or original(*a))
    g = torch.randn(v.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def run(model, dtype):
        leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        out = model(*leaves, is_causal=True, key_mask=key_mask)
        return out, *torch.autograd.grad(out, leaves, g.to(dtype))

    single = run(core, torch.float32)
    if name != "elu" and name != "trigonometric":
        assert rescued, "the inputs were meant to need it"
    # One key a chunk is the definition of the running maximum: nothing can be dwarfed.
    from kernelformer.attention import blocks

    monkeypatch.setattr(blocks, "CAUSAL_CHUNK", 1)
    double = run(whole, torch.float64)
    for a, b in zip(single, double, strict=True):
        assert not a.isnan().any()
        error = float((a.detach().double() - b.detach()).norm() / b.detach().norm())
        assert error < (2e-3 if name == "trigonometric" else 2e-4), error


def test_a_future_key_cannot_overflow_an_unnormalized_past():
    core = kf.build_attention("relu", activation="exp", normalize=False, head_dim=64, num_heads=1, num_features=64)
    whole = copy.deepcopy(core).double()
    q, k, v = at_norm(1, heads=1, length=20)
    want = whole(*(x.double() for x in (q, k, v)), is_causal=True)[:, :, :10]
    for size in (32, 48):
        later = torch.cat([k[:, :, :10], size * k[:, :, 10:]], 2)
        got = core(q, later, v, is_causal=True)[:, :, :10]
        assert worst_row(got.detach(), want) < 1e-4


@pytest.mark.parametrize("way", ["bidirectional", "causal", "step"])
@pytest.mark.parametrize("variant", ["loglinear unnormalized", "exp unnormalized"])
def test_a_size_beyond_float_range_does_not_lose_a_row_that_fits(variant, way):
    core = build(variant, torch.float32)
    whole = copy.deepcopy(core).double()
    # Weights of up to 1e48 and values of 1e-12: sums of them fit into float32, the weights do not.
    q, k, v = (x.float() for x in inputs(70, B=1, size=20 if core.method == "loglinear" else 10))
    v = 1e-12 * v
    v[..., 0] = 0
    leaves, exact = ([x.detach().to(t).requires_grad_() for x in (q, k, v)] for t in (torch.float32, torch.float64))
    want = attend(variant, whole, *exact, is_causal=way != "bidirectional")
    if way == "step":
        state, rows = None, []
        for i in range(70):
            row, state = core.step(*(x[:, :, i : i + 1] for x in leaves), state)
            rows.append(row)
        got = torch.cat(rows, 2)
    else:
        got = core(*leaves, is_causal=way == "causal")
    largest = want.detach().abs().amax(-1)
    fits = largest < 1e30
    weights = attend(variant, whole, *exact[:2], torch.ones_like(exact[2]), is_causal=way != "bidirectional")
    assert ((weights.amax(-1) > 1e39) & fits).sum() > 5  # else nothing is shown
    assert worst_row(got.detach()[fits], want.detach()[fits]) < 2e-4
    ask = (fits / largest.clamp_min(1e-6)).unsqueeze(-1)  # so that every row has its say
    slopes = torch.autograd.grad((want * ask).sum(), exact)
    for a, b in zip(torch.autograd.grad((got * ask.float()).sum(), leaves), slopes, strict=True):
        assert a.isfinite().all()
        assert float((a.double() - b).norm() / b.norm()) < 1e-3


def test_a_rescued_row_is_right_to_float64(monkeypatch):
    core = kf.build_attention("favor+", head_dim=8, num_heads=4).double()
    leaves = [x.requires_grad_() for x in growing(90, 4)]
    monkeypatch.setattr(positive, "LOST", 1e-3)  # rescue what is not lost, so that both ways can be compared
    first = core(*leaves, is_causal=True)
    grads = torch.autograd.grad(first.square().sum(), leaves)
    monkeypatch.setattr(positive, "LOST", 0.0)
    second = core(*leaves, is_causal=True)
    torch.testing.assert_close(first, second, rtol=1e-9, atol=1e-9)
    for a, b in zip(grads, torch.autograd.grad(second.square().sum(), leaves), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("algorithm", ["chunked", "plain"])
def test_shares_of_a_rescued_row_add_up_to_one_in_float32(algorithm):
    core = build("favor+", dtype=torch.float32)
    q, k, v = inputs(5, dtype=torch.float32, seed=8)
    k[:, :, :3] *= (2000 * 8**0.5 / 8) ** 0.5  # so long that the first key is dwarfed by some 1000 nats
    out = core(q, k, v, is_causal=True, algorithm=algorithm)
    torch.testing.assert_close(out[:, :, 0], v[:, :, 0], rtol=0, atol=1e-6)  # the only key that it sees


def test_step_at_large_norms_agrees_with_the_definition():
    core = kf.build_attention("favor+", head_dim=D, num_heads=1)
    q, k, v = at_norm("mixed", heads=1, length=60)
    state, parts = None, []
    for t in range(60):
        out, state = core.step(q[:, :, t : t + 1], k[:, :, t : t + 1], v[:, :, t : t + 1], state)
        parts.append(out)
    assert worst_row(torch.cat(parts, 2), log_space(core, q, k, v, True)) < 1e-4


def test_a_signed_map_with_a_vanishing_denominator_stays_bounded():
    core = kf.build_attention("trigonometric", head_dim=8, num_heads=4, num_features=2).double()
    leaves = [x.requires_grad_() for x in inputs(400, size=6.0)]
    for is_causal in (False, True):
        out = core(*leaves, is_causal=is_causal)
        assert out.isfinite().all()
        assert out.abs().max() <= 100 * leaves[2].abs().max() * (1 + 1e-9)  # 1 / GUARD times the largest value
        assert all(x.isfinite().all() for x in torch.autograd.grad(out.sum(), leaves))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("method", ["favor+", "trigonometric", "relu", "elu", "softmax", "gaussian"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_nan_and_inf_stay_in_their_sample_and_head(method, is_causal, bad, which):
    core = kf.build_attention(method, head_dim=8, num_heads=4)
    leaves = inputs(200, dtype=torch.float32)
    before = core(*leaves, is_causal=is_causal)
    leaves[which][1, 2, 150] = bad
    after = core(*leaves, is_causal=is_causal)
    same = torch.ones(2, 4, dtype=torch.bool)
    same[1, 2] = False
    torch.testing.assert_close(after[same], before[same], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_far_rows_that_near_keys_dwarf_are_right_to_float64(is_causal, biased, monkeypatch):
    core = kf.build_attention("favor+", head_dim=8, num_heads=4, num_features=16, window=20, sinks=2).double()
    q, k, v = inputs(300, D=8, dtype=torch.float64)
    k = 9 * k
    k[:, :, 150:152] *= 0.05  # features fall with the norm: these two keys dwarf all others, and are near for 40 rows
    table = torch.randn(4, 19, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).requires_grad_()
    bias = table[:, torch.arange(-299, 300).clamp(-9, 9) + 9]
    how = {"bias": bias, "max_distance": 9} if biased else {}
    leaves = [x.requires_grad_() for x in (q, k, v)] + [table] * biased
    mask = torch.ones(2, 300, dtype=torch.bool)
    mask[0, 3:40:5] = False
    rescued, found = [], []
    original = strips.rescue_backward
    monkeypatch.setattr(strips, "rescue_backward", lambda *a: rescued.append(1) or original(*a))
    for lost in (1e-2, 0.0):  # rescue what is not lost, so that both ways can be compared
        monkeypatch.setattr(positive, "LOST", lost)
        out = core(*leaves[:3], is_causal=is_causal, key_mask=mask, **how)
        found.append([out, *torch.autograd.grad(out.square().sum(), leaves, retain_graph=True)])
    assert rescued
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9)
