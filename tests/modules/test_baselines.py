"""Baselines: what the shared suite does not say about them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import kernelformer as kf
from definition import close, inputs

SIZES = {"head_dim": 8, "num_heads": 4}


def test_nystromformer_with_a_landmark_per_token_is_nearly_softmax():
    q, k, v = inputs(12, size=0.5)
    want = kf.build_attention("softmax", **SIZES)(q, k, v)
    errors = [
        float((kf.build_attention("nystromformer", **SIZES, num_landmarks=12, rounds=r)(q, k, v) - want).abs().max())
        for r in (4, 8, 24)
    ]
    assert errors[0] > errors[1] > errors[2]
    assert errors[2] < 1e-6


def test_nystromformer_convolves_the_values():
    plain = kf.build_attention("nystromformer", **SIZES, num_landmarks=6).double()
    core = kf.build_attention("nystromformer", **SIZES, num_landmarks=6, conv=5).double()
    leaves = inputs(17, grad=True)
    gap = core(*leaves) - plain(*leaves)
    v = leaves[2]
    weight = core.conv_weight
    want = torch.stack(
        [
            F.conv1d(v[:, h].transpose(1, 2).flatten(0, 1).unsqueeze(1), weight[h].view(1, 1, 5), padding=2)
            for h in range(4)
        ]
    )
    close(gap, want.view(4, 2, 6, 17).permute(1, 0, 3, 2))
    key_mask = torch.ones(2, 17, dtype=torch.bool)
    key_mask[:, 12:] = False
    short = [x[:, :, :12] for x in leaves]
    close(core(*leaves, key_mask=key_mask)[:, :, :12], core(*short))
    with pytest.raises(ValueError, match="as many queries as keys, got 5 and 17; build it with conv=0"):
        core(leaves[0][:, :, :5], *leaves[1:])
    with pytest.raises(ValueError, match="conv must be odd, so that it has a middle, got 4; use 5"):
        kf.build_attention("nystromformer", **SIZES, conv=4)


def test_nystromformer_counts_real_tokens_only():
    """As many segments as the fewer of real queries and real keys, sample by sample."""
    core = kf.build_attention("nystromformer", **SIZES, num_landmarks=6)
    q, k, v = inputs(10, 16)
    key_mask = torch.arange(16).expand(2, -1) < torch.tensor([[3], [16]])
    got = core(q, k, v, key_mask=key_mask)
    close(got[:1], core(q[:1], k[:1, :, :3], v[:1, :, :3]))
    close(got[1:], core(q[1:], k[1:], v[1:]))


@pytest.mark.parametrize("conv", [0, 3])
def test_a_nystromformer_layer_never_drops_queries_for_what_its_key_mask_hides(conv):
    layer = kf.KernelAttention(32, 4, "nystromformer", num_landmarks=6, dtype=torch.float64, conv=conv).double()
    x, context = torch.randn(2, 2, 12, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    key_mask = torch.arange(12).expand(2, -1) < 5
    if conv == 0:
        close(layer(x, context, key_mask), layer(x, context[:, :5]))
    close(layer(x, key_mask=key_mask)[:, :5], layer(x[:, :5]))


def test_linformer_says_how_long_it_may_be():
    core = kf.build_attention("linformer", **SIZES, max_length=10, rank=4)
    core(*inputs(10, dtype=torch.float32))
    core(*inputs(50, 10, dtype=torch.float32))  # queries may be as many as they like
    with pytest.raises(ValueError, match="built with max_length=10, got 11 keys; build it with max_length=11"):
        core(*inputs(11, dtype=torch.float32))
    with pytest.raises(ValueError, match="it needs max_length="):
        kf.build_attention("linformer", **SIZES)


@pytest.mark.parametrize("method", ["nystromformer", "linformer"])
def test_baselines_are_not_causal_and_do_not_stream(method):
    core = kf.build_attention(method, **SIZES, **({"max_length": 9} if method == "linformer" else {}))
    q, k, v = inputs(5, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"mixes tokens of the whole sequence.*is_causal=True was asked for"):
        core(q, k, v, is_causal=True)
    with pytest.raises(ValueError, match="cannot stream"):
        core.step(*(x[:, :, :1] for x in (q, k, v)))


def gated(**options):
    return kf.build_attention("rfa-gate", **SIZES, num_features=16, **options)


def test_a_gate_in_the_call_is_the_recurrence():
    core = gated().double()
    q, k, v = inputs(21)
    g = torch.rand(2, 4, 21, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).clamp(0.05, 0.95)
    phi_q, phi_k = (core.feature_map(F.normalize(x, dim=-1)) for x in (q, k))
    S, z, want = 0.0, 0.0, []
    for t in range(21):
        a = g[:, :, t, None, None]
        S = a * S + (1 - a) * phi_k[:, :, t, :, None] * v[:, :, t, None, :]
        z = a[..., 0] * z + (1 - a[..., 0]) * phi_k[:, :, t]
        den = (phi_q[:, :, t] * z).sum(-1, keepdim=True)
        weight = sum_of_weights(g, t)
        den = torch.maximum(den, 1e-2 * weight.unsqueeze(-1))  # |phi| = 1
        want.append((phi_q[:, :, t, None] @ S).squeeze(2) / den)
    close(core(q, k, v, is_causal=True, gate=g), torch.stack(want, 2))


def sum_of_weights(g, t):
    total = torch.zeros_like(g[:, :, 0])
    for u in range(t + 1):
        total = g[:, :, u] * total + (1 - g[:, :, u])
    return total


def test_a_gate_forgets_and_gradients_reach_it():
    core = gated().double()
    q, k, v = inputs(9)
    g = torch.full((2, 4, 9), 0.5, dtype=torch.float64, requires_grad=True)
    core(q, k, v, is_causal=True, gate=g).square().sum().backward()
    assert g.grad.abs().max() > 0
    forget = torch.full((2, 4, 9), 1e-6, dtype=torch.float64)
    close(core(q, k, v, is_causal=True, gate=forget), v, 1e-3)  # only the newest token is left


def test_long_gated_sequences_stay_right_in_float32():
    core = gated()
    q, k, v = inputs(1500, B=1, dtype=torch.float32)
    g = torch.rand(1, 4, 1500, generator=torch.Generator().manual_seed(0)).clamp(0.01, 0.99)
    want = gated().double()(*(x.double() for x in (q, k, v)), is_causal=True, gate=g.double())
    close(core(q, k, v, is_causal=True, gate=g), want.float(), 2e-3)
    _, state = core(q, k, v, is_causal=True, gate=g, return_state=True)
    assert state.tensors[0].abs().max() < 1e3


def test_gates_that_do_not_fit():
    core = gated()
    q, k, v = inputs(5, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"gate must be \(batch, heads, length\) = \(2, 4, 5\), got \(2, 5\)"):
        core(q, k, v, is_causal=True, gate=torch.rand(2, 5))
    for gate, message in [
        (0.5, "gate must be a tensor, got float"),
        (torch.ones(2, 4, 5, dtype=torch.int64), r"gate must be a floating point tensor in \(0, 1\), got torch.int64"),
        (torch.full((2, 4, 5), 1.5), r"gate must be in \(0, 1\), got values from 1.5 to 1.5; pass torch.sigmoid"),
        (torch.linspace(-1, 0.5, 40).view(2, 4, 5), r"got values from -1 to 0.5"),
    ]:
        with pytest.raises(ValueError, match=message):
            core(q, k, v, is_causal=True, gate=gate)
    with pytest.raises(ValueError, match=r"gate must be in \(0, 1\), got values from 2 to 2"):
        core.step(*(x[:, :, :1] for x in (q, k, v)), gate=torch.full((2, 4, 1), 2.0))
    ends = torch.tensor([0.0, 1.0, 0.5, 0.0, 1.0]).expand(2, 4, 5)  # as a sigmoid rounds
    assert core(q, k, v, is_causal=True, gate=ends).isfinite().all()
    with pytest.raises(ValueError, match="'rfa-gate' is causal only, got is_causal=False"):
        core(q, k, v)
    with pytest.raises(ValueError, match="built with own_gate=False, so it needs gate= in every call"):
        gated(own_gate=False)(q, k, v, is_causal=True)
    with pytest.raises(ValueError, match=r"'favor\+' takes no gate, got one of shape \(2, 4, 5\); use 'rfa-gate'"):
        kf.build_attention("favor+", **SIZES)(q, k, v, is_causal=True, gate=torch.rand(2, 4, 5))


def test_gates_of_hidden_tokens_may_hold_anything():
    core = gated().double()
    q, k, v = inputs(9)
    g = torch.rand(2, 4, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    key_mask = torch.ones(2, 9, dtype=torch.bool)
    key_mask[:, 3:5] = False
    want = core(q, k, v, is_causal=True, gate=g, key_mask=key_mask)
    junk = g.clone()
    junk[:, :, 3], junk[:, :, 4] = float("nan"), 7.0
    junk.requires_grad_()
    got = core(q, k, v, is_causal=True, gate=junk, key_mask=key_mask)
    assert torch.equal(got, want)
    (slope,) = torch.autograd.grad(got.sum(), junk)
    assert torch.equal(slope[:, :, 3:5], torch.zeros(2, 4, 2, dtype=torch.float64))
    assert not slope.isnan().any()


@pytest.mark.parametrize("how", ["layer", "autocast"])
def test_a_gate_keeps_its_precision_where_the_layer_does_not(how):
    """At logits of 9 the gate is 1 in 8 bits, and nothing new would ever be seen."""
    torch.manual_seed(0)
    layer = kf.KernelAttention(32, 4, "rfa-gate", num_features=16, causal=True)
    x = torch.randn(2, 40, 32).bfloat16()
    with torch.no_grad():
        layer.gate.bias.fill_(9.0)
        layer.gate.weight.mul_(3)
    layer = layer.bfloat16() if how == "layer" else layer
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        got = layer._gates(layer.gate, x if how == "layer" else x.float())
    weight, bias = layer.gate.weight.double(), layer.gate.bias.double()
    rest = torch.sigmoid(-(x.double() @ weight.T + bias)).transpose(1, 2)
    assert got.dtype == torch.float32
    assert ((1 - got.double()) / rest - 1).abs().max() < 5e-2  # float32 has 6e-8 around 1
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        y = layer(x if how == "layer" else x.float())
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert layer.gate.weight.grad.abs().max() > 0


def test_a_gated_layer_takes_its_gates_from_its_input():
    layer = kf.KernelAttention(32, 4, "rfa-gate", num_features=16, causal=True)
    x = torch.randn(2, 300, 32)
    y = layer(x)
    y.sum().backward()
    assert layer.gate.weight.grad.abs().max() > 0
    assert all(p.grad is not None for p in layer.parameters())
    own = kf.KernelAttention(32, 4, "rfa-gate", num_features=16, causal=True, own_gate=True)
    assert own.gate is None
    own(x)
