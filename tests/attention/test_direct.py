"""Short sequences by the matrix of weights: the definition again, chosen by size alone."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.autograd import gradcheck

import kernelformer as kf
from definition import NEARS, VARIANTS, WHOLE, attend, build, close, inputs, padding
from kernelformer.attention import blocks, dispatch
from kernelformer.attention import short as direct_weights
from kernelformer.attention.blocks import Shapes
from kernelformer.contract import PositiveSpec

both = pytest.mark.parametrize("is_causal", [False, True], ids=["bidirectional", "causal"])


def covers(variant):
    if variant in NEARS or variant in WHOLE:
        return False
    core = build(variant)
    spec = getattr(getattr(core, "feature_map", None), "spec", None)
    return isinstance(spec, PositiveSpec) and core.normalize


COVERED = [x for x in VARIANTS if covers(x)]
# By formula, tied, per head, by a fast transform, untied, elementwise; others with `make test-all`.
QUICK = ("favor+", "favor+ per head", "favor+ hadamard", "hyperbolic", "favor#", "loglinear", "exp", "fastfood-prf")
KINDS = [pytest.param(x, marks=() if x in QUICK else pytest.mark.slow) for x in COVERED]


@pytest.fixture
def always(monkeypatch):
    """The matrix whatever it costs, in blocks of a few samples; lists the calls."""
    calls = []
    monkeypatch.setattr(dispatch, "RATES", (1e9, 1e9))
    monkeypatch.setattr(blocks, "BUFFER", 3000)
    original = dispatch.direct_attention
    monkeypatch.setattr(dispatch, "direct_attention", lambda *a, **b: calls.append(b["is_causal"]) or original(*a, **b))
    return calls


@pytest.mark.parametrize("variant", KINDS)
@both
def test_equals_the_definition_with_gradients(variant, is_causal, always):
    core = build(variant)
    learned = [x for x in core.parameters() if x.requires_grad]
    for L, S, B, G, masked in ((1, 1, 1, 4, False), (13, 13, 3, 4, True), (5, 17, 2, 2, True), (17, 5, 2, 1, False)):
        q, k, v = inputs(L, S, B=B, G=G, grad=True)
        key_mask = padding(B, S) if masked else None
        got = core(q, k, v, is_causal=is_causal, key_mask=key_mask)
        want = attend(variant, core, q, k, v, is_causal=is_causal, key_mask=key_mask)
        close(got, want)
        g = torch.randn(got.shape, generator=torch.Generator().manual_seed(1), dtype=got.dtype)
        grads = (torch.autograd.grad(x, (q, k, v, *learned), g) for x in (got, want))
        for a, b in zip(*grads, strict=True):
            close(a, b)
    assert always == [is_causal] * 4


@both
def test_gradcheck(is_causal, always):
    core = build("loglinear")
    leaves = inputs(5, B=1, G=2, grad=True)
    given = (*leaves, *core.parameters())
    assert gradcheck(lambda q, k, v, *_: core(q, k, v, is_causal=is_causal), given, fast_mode=True)


@pytest.mark.parametrize("masked", [False, True])
def test_rows_that_a_later_key_dwarfs_are_computed_again(masked, always, monkeypatch):
    core = kf.build_attention("favor+", head_dim=8, num_heads=4)
    whole = copy.deepcopy(core).double()
    q, k, v = inputs(60, G=2)
    k = k * torch.linspace(15, 1, 60, dtype=k.dtype).view(1, 1, -1, 1)  # features grow as exp(-|k|^2 / 2) lets them
    key_mask = torch.ones(2, 60, dtype=torch.bool)
    key_mask[0, :7] = False
    key_mask = key_mask if masked else None
    rescued = []
    original = direct_weights.rescue_backward
    monkeypatch.setattr(direct_weights, "rescue_backward", lambda *a: rescued.append(1) or original(*a))
    g = torch.randn(2, 4, 60, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    results = []
    for model, dtype in ((core, torch.float32), (whole, torch.float64)):
        leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        out = model(*leaves, is_causal=True, key_mask=key_mask, algorithm=None if dtype == torch.float32 else "chunked")
        results.append((out, *torch.autograd.grad(out, leaves, g.to(dtype))))
    assert rescued, "the inputs were meant to need it"
    assert always == [True]
    for a, b in zip(*results, strict=True):
        assert not a.isnan().any()
        assert float((a.detach().double() - b.detach()).norm() / b.detach().norm()) < 2e-4


def test_shares_of_a_rescued_row_add_up_to_one_in_float32(always):
    core = build("favor+", dtype=torch.float32)
    q, k, v = inputs(5, dtype=torch.float32, seed=8)
    k[:, :, :3] *= (2000 * 8**0.5 / 8) ** 0.5  # so long that the first key is dwarfed by some 1000 nats
    torch.testing.assert_close(core(q, k, v, is_causal=True)[:, :, 0], v[:, :, 0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("nats", [68, 69, 71])
def test_gradients_of_rows_just_above_the_bound_stay_finite_at_a_large_loss_scale(nats, always):
    core = build("elu", dtype=torch.float32)
    q, k, v = inputs(8, dtype=torch.float32, seed=3)
    k = k - nats
    k[:, :, -1] = 1  # features of the keys before it are e^-nats of its own
    leaves = [x.requires_grad_() for x in (q, k, 1000 * v)]
    out = core(*leaves, is_causal=True)
    assert all(x.isfinite().all() for x in torch.autograd.grad(65536 * out.sum(), leaves))


@both
def test_rows_without_a_key_are_zero_and_hidden_keys_may_hold_anything(is_causal, always):
    core = build("favor+")
    q, k, v = inputs(9)
    key_mask = torch.ones(2, 9, dtype=torch.bool)
    key_mask[0], key_mask[1, :4] = False, False
    k[~key_mask[:, None].expand(2, 4, 9)] = torch.nan
    v[~key_mask[:, None].expand(2, 4, 9)] = torch.inf
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = core(*leaves, is_causal=is_causal, key_mask=key_mask)
    assert (out[0] == 0).all()
    assert out.isfinite().all()
    assert not is_causal or bool((out[1, :, :4] == 0).all())
    for x in torch.autograd.grad(out.square().sum(), leaves):
        assert x.isfinite().all()
        assert (x[0] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_keeps_its_dtype_and_order_in_memory_changes_nothing(dtype, always):
    core = build("favor+", torch.float32)
    q, k, v = inputs(12, dtype=torch.float32)
    want = core(q, k, v, is_causal=True)
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    torch.testing.assert_close(core(*turned, is_causal=True), want)
    got = core(*(x.to(dtype) for x in (q, k, v)), is_causal=True)
    assert got.dtype == dtype
    close(got, want.to(dtype))


def test_it_is_chosen_by_size_alone(monkeypatch):
    calls = []
    original = dispatch.direct_attention
    monkeypatch.setattr(dispatch, "direct_attention", lambda *a, **b: calls.append(1) or original(*a, **b))
    core = kf.build_attention("favor+", head_dim=8, num_heads=4, num_features=32).requires_grad_(False)
    q, k, v = inputs(10, dtype=torch.float32)
    whole = core(q, k, v)
    assert calls == [1]
    core(q, k, v, algorithm="chunked")
    torch.testing.assert_close(core(q, k, v, is_causal=True, return_state=True)[0], core(q, k, v, is_causal=True))
    assert calls == [1, 1]  # the last call, without a state
    core(*inputs(200, dtype=torch.float32))
    assert calls == [1, 1]
    torch.testing.assert_close(whole, core(q, k, v, algorithm="chunked"))

    def shapes(L, S, M=64, R=1):
        return Shapes(4, 8, 8 // R, L, S, 64, 64, M)

    assert dispatch.prefers_direct(shapes(64, 64), is_causal=False)
    assert not dispatch.prefers_direct(shapes(128, 128), is_causal=False)
    assert dispatch.prefers_direct(shapes(128, 128), is_causal=True)
    assert dispatch.prefers_direct(shapes(128, 128, M=256), is_causal=False)
    assert not dispatch.prefers_direct(shapes(1, 100000), is_causal=False)  # all keys at once would not fit
    assert not dispatch.prefers_direct(shapes(0, 5), is_causal=False)


def test_it_is_traced_as_one_graph():
    core = kf.build_attention("favor+", head_dim=8, num_heads=2, num_features=16)
    leaves = inputs(9, H=2, G=2, dtype=torch.float32, grad=True)

    def run(*x):
        return core(*x, is_causal=True)

    out, want = torch.compile(run, fullgraph=True, backend="aot_eager")(*leaves), run(*leaves)
    close(out, want)
    for a, b in zip(*(torch.autograd.grad(x.square().sum(), leaves) for x in (out, want)), strict=True):
        close(a, b)
