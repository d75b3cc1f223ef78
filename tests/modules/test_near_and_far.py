"""Windows and sinks in layers, functions and models: each says the same, and what cannot be is refused by name."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import kernelformer as kf
from definition import attend, build, close, inputs, padding
from kernelformer.modules import MixedCore
from kernelformer.modules.spec import applicable_options, for_cross_attention, parse_attention

L = 23
BIASED = ["favor+ near", "nprf near", "trigonometric near", "skyformer softmax near", "hyperbolic sinks", "local"]


def matrix(table, L, S):
    """(H, L + S - 1) over j - i as (H, L, S)."""
    return table[:, torch.arange(S) - torch.arange(L).unsqueeze(1) + L - 1]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("window", [1, 7, 8, 9, 16, 40])
def test_windows_and_lengths_around_whole_blocks_are_right(window, is_causal, small_blocks):
    core = kf.build_attention("favor+", head_dim=8, num_heads=4, num_features=16, window=window, sinks=1).double()
    for length in (1, 7, 8, 9, 37):
        qkv, how = inputs(length, G=2, grad=True), {"is_causal": is_causal, "key_mask": padding(2, length)}
        both = (core(*qkv, **how), core(*qkv, **how, algorithm="plain"))
        close(*both)
        grads = (torch.autograd.grad(x.square().sum(), qkv) for x in both)
        for got, expected in zip(*grads, strict=True):
            close(got, expected)


def clipped(reach, L=L, S=L, seed=3):
    """A bias over the distances of L queries and S keys, constant beyond ``reach``; and its free entries."""
    free = torch.randn(4, 2 * reach + 1, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    free.requires_grad_()
    return free[:, (torch.arange(1 - L, S).clamp(-reach, reach) + reach)], free


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("variant", BIASED)
def test_a_bias_that_ends_within_the_window_equals_the_definition(variant, is_causal, small_blocks):
    if is_causal and variant == "skyformer softmax near":
        return
    core, qkv = build(variant), inputs(L, G=2, grad=True)
    reach = min(3, core.window or 0)
    table, free = clipped(reach)
    how = {"is_causal": is_causal, "key_mask": padding(2, L)}
    leaves = [*qkv, free, *core.parameters()]
    out = core(*qkv, bias=table, max_distance=reach, **how)
    want = attend(variant, core, *qkv, bias=matrix(table, L, L), **how)
    close(out, want)
    both = (torch.autograd.grad(x.square().sum(), leaves, retain_graph=True) for x in (out, want))
    for got, expected in zip(*both, strict=True):
        close(got, expected)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("variant", ["favor+ near", "trigonometric near", "hyperbolic sinks", "local"])
def test_a_slope_equals_the_definition(variant, is_causal, small_blocks):
    core, qkv = build(variant), inputs(L, G=2, grad=True)
    slope = torch.tensor([0.5, 0.25, 0.125, 0.0], dtype=torch.float64)
    table = -slope.unsqueeze(1) * torch.arange(1 - L, L).abs()
    leaves, how = [*qkv, *core.parameters()], {"is_causal": is_causal, "key_mask": padding(2, L)}
    out = core(*qkv, bias=table, max_distance=2 if core.window else 0, slope=slope, **how)
    want = attend(variant, core, *qkv, bias=matrix(table, L, L), **how)
    close(out, want)
    both = (torch.autograd.grad(x.square().sum(), leaves, retain_graph=True) for x in (out, want))
    for got, expected in zip(*both, strict=True):
        close(got, expected)


@pytest.mark.parametrize("scheme", ["table", "alibi"])
@pytest.mark.parametrize("method", ["favor+", "local"])
def test_a_layer_with_relative_positions_streams(method, scheme):
    torch.manual_seed(0)
    more = {"scheme": scheme, **({"max_distance": 4} if scheme == "table" else {})}
    layer = kf.KernelAttention(32, 4, method, causal=True, num_features=16, window=5, sinks=2, relative="1d", **more)
    for x in layer.double().positions.parameters():
        nn.init.normal_(x)
    x = torch.randn(2, 19, 32, dtype=torch.float64)
    mask = padding(2, 19)
    want = layer(x, key_mask=mask)
    with torch.no_grad():
        first, state = layer(x[:, :7], key_mask=mask[:, :7], return_state=True)
        parts = [first]
        for t in range(7, 19):
            one, state = layer.step(x[:, t : t + 1], state, key_mask=mask[:, t : t + 1])
            parts.append(one)
    close(torch.cat(parts, 1), want)


@pytest.mark.parametrize("variant", ["favor+ near", "gmm-rks near", "local"])
def test_beams_go_on_from_one_state_each_in_its_own_way(variant):
    core, qkv = build(variant), inputs(20)
    with torch.no_grad():
        _, state = core(*(x[:, :, :9] for x in qkv), is_causal=True, return_state=True)
        beams = state.reorder([1, 0, 1])
        ends = []
        for chosen in ([1, 0, 1], [0, 0, 1]):  # twice from the same state
            past = [x[[1, 0, 1]][:, :, :9] for x in qkv]
            rest = [x[chosen][:, :, 9:] for x in qkv]
            after, outs = beams, []
            for t in range(11):
                out, after = core.step(*(x[:, :, t : t + 1] for x in rest), after)
                outs.append(out)
            ends.append(torch.cat(outs, 2))
            whole = [torch.cat(pair, 2) for pair in zip(past, rest, strict=True)]
            close(ends[-1], core(*whole, is_causal=True)[:, :, 9:])


@pytest.mark.parametrize("variant", ["favor+ near", "local"])
def test_compiled_checkpointed_and_under_autocast(variant):
    torch._dynamo.reset()
    core = build(variant, torch.float32)
    qkv = inputs(11, dtype=torch.float32, grad=True)
    leaves = [*qkv, *core.parameters()]

    def attend(*x):
        return core(*x, is_causal=True)

    want = attend(*qkv)
    grads = torch.autograd.grad(want.square().sum(), leaves)
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    for run in (compiled, lambda *x: checkpoint(attend, *x, use_reentrant=False)):
        out = run(*qkv)
        close(out, want)
        for a, b in zip(torch.autograd.grad(out.square().sum(), leaves), grads, strict=True):
            close(a, b)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = attend(*qkv)
    assert half.dtype == torch.bfloat16
    close(half, want.bfloat16())


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("method", ["favor+", "local"])
def test_heads_of_two_kinds(method, causal):
    exact = kf.build_attention("softmax", head_dim=8, num_heads=1)
    linear = kf.build_attention(method, head_dim=8, num_heads=3, num_features=16, window=4, sinks=2)
    core = MixedCore(exact, linear, [1]).double()
    q, k, v = inputs(13, G=2)
    how = {"is_causal": causal, "key_mask": padding(2, 13)}
    rest, groups = [0, 2, 3], [0, 1, 1]
    close(core(q, k, v, **how)[:, rest], linear(q[:, rest], k[:, groups], v[:, groups], **how))
    if causal:
        whole, _ = core(q, k, v, **how, return_state=True)
        state, parts = None, []
        for t in range(13):
            at = slice(t, t + 1)
            out, state = core.step(q[:, :, at], k[:, :, at], v[:, :, at], state, key_mask=how["key_mask"][:, at])
            parts.append(out)
        close(torch.cat(parts, 2), whole)
        core.resample()
    assert copy.deepcopy(core).has_near


def test_a_string_a_layer_a_module_and_a_function_are_the_same_attention():
    method, options = parse_attention("favor+:num_features=16:window=4:sinks=2")
    assert (method, options) == ("favor+", {"num_features": 16, "window": 4, "sinks": 2})
    core = kf.build_attention(method, head_dim=8, num_heads=4, **options)
    layer = kf.KernelAttention(32, 4, method, **options)
    assert (layer.core.window, layer.core.sinks) == (core.window, core.sinks) == (4, 2)
    q, k, v = inputs(9, dtype=torch.float32)
    want = core(q, k, v, is_causal=True)
    assert torch.equal(layer.core(q, k, v, is_causal=True), want)
    assert torch.equal(kf.kernel_attention(q, k, v, method, is_causal=True, **options), want)
    assert "window=4, sinks=2" in repr(layer)
    assert kf.kernel_attention(q, k, v, "local", window=2, sinks=0).shape == (*v.shape[:2], 9, 6)


@pytest.mark.parametrize("own", [{}, {"add_bias_kv": True}, {"add_zero_attn": True}])
@pytest.mark.parametrize("causal", [False, True])
def test_in_the_place_of_torch_s_module_a_long_window_is_exact_attention(own, causal):
    torch.manual_seed(0)
    x, hidden = torch.randn(2, 9, 32), ~padding(2, 9)
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(32, 4, batch_first=True, **own)}).eval()
    mask = torch.ones(9, 9, dtype=torch.bool).triu(1) if causal else None
    how = {"key_padding_mask": hidden, "attn_mask": mask, "is_causal": causal, "need_weights": False}
    want = model["attention"](x, x, x, **how)[0]
    kf.replace_attention(model, "favor+", num_features=16, window=9, sinks=len(own))
    got = model["attention"](x, x, x, **how)[0]
    seen = 3 if causal and not own else 0  # rows that see nothing are NaN in torch
    close(got[:, seen:], want[:, seen:])
    with pytest.raises(ValueError, match=r"queries and keys of two for .* with window=9"):
        model["attention"](x, torch.randn(2, 9, 32), x, need_weights=False)


def test_dropout_is_of_the_near_weights():
    torch.manual_seed(0)
    core = kf.build_attention("favor+", head_dim=8, num_heads=4, num_features=16, window=4, attention_dropout=0.5)
    q, k, v = inputs(9, dtype=torch.float32)
    assert not torch.equal(core(q, k, v), core(q, k, v))
    core.eval()
    assert torch.equal(core(q, k, v), core(q, k, v))
    module = kf.MultiheadAttention(32, 4, dropout=0.5, method="favor+", window=4)
    assert module.kernel.attention_dropout == 0.5


def test_of_the_options_of_several_methods_a_window_goes_to_those_that_have_one():
    options = {"num_features": 8, "window": 4, "sinks": 1, "beta": "zero", "attention_dropout": 0.1}
    assert applicable_options("favor+", options) == options
    assert applicable_options("skyformer", options) == {"num_landmarks": 8}
    assert applicable_options("local", options) == {"window": 4, "sinks": 1, "attention_dropout": 0.1}
    assert applicable_options("softmax", options) == {"attention_dropout": 0.1}
    assert applicable_options("favor+", {"num_features": 8, "attention_dropout": 0.1}) == {"num_features": 8}


def test_cross_attention_is_without_a_window():
    assert for_cross_attention("favor+:window=4:seed=1:sinks=2:beta=zero:attention_dropout=0.1") == "favor+:seed=1"
    assert for_cross_attention("nprf:relative=1d:max_distance=2:window=4") == "nprf"
    assert for_cross_attention("local:window=3:attention_dropout=0.1") == "softmax:attention_dropout=0.1"
    assert for_cross_attention("softmax:attention_dropout=0.1") == "softmax:attention_dropout=0.1"


@pytest.mark.parametrize("method", ["favor+", "local"])
def test_a_layer_with_a_window_takes_no_context(method):
    layer = kf.KernelAttention(32, 4, method, num_features=16, window=4)
    x, state = torch.randn(1, 5, 32), None
    for use in (lambda: layer(x, x), lambda: layer.remember(x), lambda: layer.recall(x, state)):
        with pytest.raises(
            ValueError, match=r"got a context for a layer of .* with window=4, sinks=.; build the layer"
        ):
            use()


@pytest.mark.parametrize(
    ("method", "options", "said"),
    [
        ("favor+", {"window": 0}, "window must be an integer of at least 1, got 0"),
        ("favor+", {"sinks": -1}, "sinks must be an integer of at least 0, got -1"),
        ("local", {"window": 0}, "window must be an integer of at least 1, got 0"),
        ("favor+", {"window": 4, "beta": "one"}, "unknown beta 'one'; choose from learned, zero"),
        ("favor+", {"beta": "zero"}, "beta='zero' is of near tokens .* 'favor.' got neither window= nor sinks="),
        ("favor+", {"window": 4, "normalize": False}, "'favor.' without normalization"),
        ("skyformer", {"window": 4}, "'skyformer' without normalization .* for skyformer kernel='softmax'"),
        ("skyformer", {"window": 4, "kernel": "softmax", "align": True}, "align=True moves the keys"),
        ("softmax", {"window": 4}, "window=4: 'softmax' cannot attend to near tokens exactly .* or 'local'"),
        ("gaussian", {"sinks": 4}, "sinks=4: 'gaussian' cannot attend to near tokens exactly .* or 'local'"),
        ("rfa-gate", {"window": 4}, "'rfa-gate' cannot attend to near tokens exactly"),
    ],
)
def test_bad_options_are_refused_by_name(method, options, said):
    with pytest.raises(ValueError, match=said):
        kf.build_attention(method, head_dim=8, num_heads=4, **options)


@pytest.mark.parametrize(
    "relative", [{"max_length": 9}, {"max_distance": 6}, {"scheme": "t5"}, {"relative": "2d", "grid": (3, 3)}]
)
def test_positions_that_the_far_part_cannot_have_are_refused(relative):
    with pytest.raises(ValueError, match=r"window=5, sinks=0 needs .* constant beyond .* max_distance=5 or less"):
        kf.KernelAttention(32, 4, "favor+", window=5, **{"relative": "1d", **relative})


def test_a_bias_that_the_far_part_cannot_have_is_refused():
    core, qkv = build("favor+ near"), inputs(9)
    table, slope = torch.randn(4, 17, dtype=torch.float64), torch.full((4,), 0.5, dtype=torch.float64)
    bent = -0.5 * torch.arange(-8, 9).abs().double().expand(4, -1).clone()
    bent[:, [2, 14]] += 1  # at distance 6, between the window and where the line begins
    for bias, how, said in (
        (table, {}, "nothing is known of it; give max_distance=5 or less"),
        (clipped(7, 9, 9)[0], {"max_distance": 7}, "got max_distance=7 and window=5; make the window at least 7"),
        (torch.zeros(4, 5, 5, dtype=torch.float64), {}, "a bias on a grid"),
        (bent, {"max_distance": 7, "slope": slope}, "falls by it per token beyond max_distance=5, and it does not"),
    ):
        with pytest.raises(ValueError, match=said):
            core(*qkv, bias=bias, **how)


@pytest.mark.parametrize("variant", ["favor+ near", "local"])
def test_a_state_of_another_window_is_refused(variant):
    one = [x[:, :, :1] for x in inputs(1)]
    other = build(variant, window=3)
    _, state = other(*inputs(9), is_causal=True, return_state=True)
    with pytest.raises(ValueError, match="window"):
        build(variant).step(*one, state)
    with pytest.raises(ValueError, match="sinks"):
        build(variant, sinks=1).step(*one, build(variant)(*inputs(9), is_causal=True, return_state=True)[1])


def test_a_stream_of_no_samples_steps_and_dropout_is_of_training_steps_too():
    core = build("favor+ near", torch.float32)
    q, k, v = inputs(9, B=0, dtype=torch.float32)
    with torch.no_grad():
        _, state = core(q, k, v, is_causal=True, return_state=True)
        out, state = core.step(*(x[:, :, :1] for x in (q, k, v)), state)
        assert out.shape == (0, 4, 1, 6)
        assert state.length == 10
        dropped = build("favor+ near", torch.float32, attention_dropout=0.5).train()
        q, k, v = inputs(9, dtype=torch.float32)
        _, state = dropped(q, k, v, is_causal=True, return_state=True)
        one = [x[:, :, :1] for x in (q, k, v)]
        assert not torch.equal(dropped.step(*one, state)[0], dropped.step(*one, state)[0])
