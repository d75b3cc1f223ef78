"""Bad input gets an error that names both values and the way out."""

from __future__ import annotations

import pytest
import torch

import kernelformer as kf
from definition import inputs
from kernelformer.errors import unknown


@pytest.fixture
def core():
    return kf.build_attention("favor+", head_dim=8, num_heads=4, num_features=16)


def raises(match):
    return pytest.raises(ValueError, match=match)


def test_wrong_rank(core):
    q, k, v = inputs(5, dtype=torch.float32)
    with raises(r"query must be \(batch, heads, length, head_dim\), got shape \(4, 5, 8\)"):
        core(q[0], k, v)
    with raises(r"value must be .* got shape \(1, 2, 4, 5, 6\)"):
        core(q, k, v[None])
    with raises(r"key must be .* got shape \(4, 5, 8\)"):
        core.attention_matrix(q, k[0])


def test_heads_that_do_not_divide(core):
    q, k, v = inputs(5, G=3, dtype=torch.float32)
    with raises(r"number of key heads must divide that of query heads, got 3 and 4 \(shapes \(2, 3, 5, 8\)"):
        core(q, k, v)


def test_head_dimensions_that_differ(core):
    q, k, v = inputs(5, dtype=torch.float32)
    with raises(r"same head dimension, got 8 and 4 \(shapes \(2, 4, 5, 8\) and \(2, 4, 5, 4\)\)"):
        core(q, k[..., :4], v)
    with raises(r"built with head_dim=8, got queries of shape \(2, 4, 5, 4\); build it with head_dim=4"):
        core(q[..., :4], k[..., :4], v)
    with raises(r"built with num_heads=4, got queries of shape \(2, 2, 5, 8\); build it with num_heads=2"):
        core(q[:, :2], k[:, :2], v[:, :2])


def test_batches_and_lengths_that_differ(core):
    q, k, v = inputs(5, dtype=torch.float32)
    with raises(r"same batch, heads and length, got shapes \(2, 4, 5, 8\) and \(2, 4, 3, 6\)"):
        core(q, k, v[:, :, :3])
    with raises("same batch size, got 1 and 2"):
        core(q[:1], k, v)


def test_masks_of_the_wrong_shape_or_dtype(core):
    q, k, v = inputs(5, dtype=torch.float32)
    with raises(r"key_mask must be \(batch, key length\) = \(2, 5\), got \(2, 4\)"):
        core(q, k, v, key_mask=torch.ones(2, 4, dtype=torch.bool))
    with raises(r"got \(2, 1, 5, 5\); causality is is_causal=True"):
        core(q, k, v, key_mask=torch.ones(2, 1, 5, 5, dtype=torch.bool))
    with raises("must be bool with True = attend, got torch.float32; an additive mask becomes one by `mask == 0`"):
        core(q, k, v, key_mask=torch.zeros(2, 5))
    with raises("got torch.int64; .* a 0/1 mask by `mask.bool"):
        core(q, k, v, key_mask=torch.ones(2, 5, dtype=torch.int64))


def test_masks_elsewhere(core):
    q, k, v = inputs(5, dtype=torch.float32)
    with raises("key_mask must be on the device of the keys, got meta and cpu"):
        core(q, k, v, key_mask=torch.ones(2, 5, dtype=torch.bool, device="meta"))
    with raises("key_mask must be a tensor, got list"):
        core(q, k, v, key_mask=[[True] * 5] * 2)


def test_dtypes(core):
    q, k, v = inputs(5, dtype=torch.float32)
    with raises(r"query must be a floating point tensor, got torch.int64; convert it with .float\(\)"):
        core(q.long(), k, v)
    with raises(r"value must be a tensor, got list; convert it with torch.as_tensor"):
        core(q, k, v.tolist())
    with raises("one dtype, got torch.float32, torch.float64 and torch.float32"):
        core(q, k.double(), v)
    with raises("one device, got cpu, meta and cpu"):
        core(q, k.to("meta"), v)


def test_unknown_methods_and_options():
    with raises(r"unknown method 'favor'; did you mean 'favor\+'\? the nearest of \d+: favor\+,"):
        kf.build_attention("favor", head_dim=8, num_heads=4)
    with raises(r"unknown option for method 'favor\+', 'num_feature'; did you mean 'num_features'\?"):
        kf.build_attention("favor+", head_dim=8, num_heads=4, num_feature=3)
    with raises("unknown option for method 'softmax', 'num_landmarks'"):
        kf.build_attention("softmax", head_dim=8, num_heads=4, num_landmarks=3)
    with raises("unknown option for method 'elu', 'activation'"):
        kf.build_attention("elu", head_dim=8, num_heads=4, activation="relu")
    with raises("unknown activation 'rely'; did you mean 'relu'"):
        kf.build_attention("relu", head_dim=8, num_heads=4, activation="rely")
    with raises("unknown kernel 'laplace'; choose from gaussian, softmax"):
        kf.build_attention("favor+", head_dim=8, num_heads=4, kernel="laplace")
    with raises("frequencies of norm sqrt.*got norms='chi'; use favor"):
        kf.build_attention("favor+regularized", head_dim=8, num_heads=4, norms="chi")


@pytest.mark.parametrize("value", [0, -3, 2.5, True])
def test_sizes_below_one(value):
    with raises(f"num_features must be an integer of at least 1, got {value}"):
        kf.build_attention("favor+", head_dim=8, num_heads=4, num_features=value)
    with raises(f"head_dim must be an integer of at least 1, got {value}"):
        kf.build_attention("softmax", head_dim=value, num_heads=4)


def test_scales_and_eps(core):
    q, k, v = inputs(5, dtype=torch.float32)
    with raises("scale must be positive and finite, got 0"):
        core(q, k, v, scale=0.0)
    with raises("scale must be positive and finite, got -1"):
        kf.build_attention("favor+", head_dim=8, num_heads=4, scale=-1.0)
    with raises("scale must be positive and finite, got a"):
        core(q, k, v, scale="a")
    with raises("takes no eps, got 0.5; leave it out"):
        kf.build_attention("relu", head_dim=8, num_heads=4, activation="elu", eps=0.5)
    with raises("projection=False draws nothing, got draw='iid'; leave it out"):
        kf.build_attention("relu", head_dim=8, num_heads=4, projection=False, draw="iid")
    with raises("seed must be an integer, got 1.5"):
        kf.build_attention("favor+", head_dim=8, num_heads=4, seed=1.5)
    with raises("draw must be an integer of at least 0, got 1.5"):
        core.resample(1.5)
    with raises("eps must be a finite number of at least 0, got -0.5"):
        kf.build_attention("relu", head_dim=8, num_heads=4, eps=-0.5)


def test_a_bias_is_taken_or_refused_by_name():
    q, k, v = inputs(5, dtype=torch.float32)
    refuses = set()
    for method in kf.list_methods():
        needs = {"max_length": 9} if method == "linformer" else {}
        core = kf.build_attention(method, head_dim=8, num_heads=4, **needs)
        with raises("algorithm only mean something with a bias, and none was given"):
            core(q, k, v, algorithm="fft")
        if core.takes_bias:
            ends = {"max_distance": 2} if core.has_near else {}
            assert core(q, k, v, bias=torch.zeros(4, 9), **ends).isfinite().all()
            continue
        refuses.add(method)
        with raises(r"takes no relative position bias, got bias of shape \(4, 9\)"):
            core(q, k, v, bias=torch.zeros(4, 9), is_causal=method == "rfa-gate")
    assert refuses == {"gaussian", "skyformer", "nystromformer", "linformer", "rfa-gate"}


def test_states_that_do_not_fit(core):
    q, k, v = inputs(5, dtype=torch.float32)
    _, state = core(q, k, v, is_causal=True, return_state=True)
    relu = kf.build_attention("relu", head_dim=8, num_heads=4, num_features=16)
    with raises(r"made by method 'favor\+', this core is 'relu'; start anew with state=None"):
        relu(q, k, v, is_causal=True, state=state)
    wide = kf.build_attention("favor+", head_dim=8, num_heads=4, num_features=32)
    with raises(r"the state was made with another num_features \(16, here 32\)"):
        wide(q, k, v, is_causal=True, state=state)
    one = [x[:1, :, :1] for x in (q, k, v)]
    with raises(r"the state has shape \(2, 4, 16, 6\), these inputs need \(1, 4, 16, 6\); start anew with state=None"):
        core.step(*one, state)
    with raises("the state is torch.float32 on cpu, these inputs need torch.float64 on cpu"):
        core.double().step(*(x[:, :, :1].double() for x in (q, k, v)), state)
    core.float()
    pair = [x[:, :, :1] for x in (q, k, v)]
    with raises(r"another scale \(0.35.*, here 1.0\)"):
        core.step(*pair, state, scale=1.0)
    other = {
        "seed": "seed",
        "draw": "draw",
        "normalize": "normalize",
        "normalize_qk": "normalize_qk",
        "per_head": "per_head",
    }
    values = {"seed": 1, "draw": "iid", "normalize": False, "normalize_qk": True, "per_head": True}
    for option, name in other.items():
        changed = kf.build_attention("favor+", head_dim=8, num_heads=4, num_features=16, **{option: values[option]})
        with raises(f"the state was made with another .*{name}"):
            changed.step(*pair, state)
    core.resample()
    with raises(r"another draw number \(0, here 1\)"):
        core.step(*pair, state)
    core.resample(0)
    core.step(*pair, state)
    with raises("state must be a kernelformer State, got tuple"):
        core(q, k, v, is_causal=True, state=state.tensors)


def test_states_where_there_can_be_none(core):
    q, k, v = inputs(5, dtype=torch.float32)
    with raises("a state needs is_causal=True, got is_causal=False"):
        core(q, k, v, return_state=True)
    with raises("queries and keys are the same tokens, got 3 queries and 5 keys"):
        core(q[:, :, :3], k, v, is_causal=True, return_state=True)
    with raises("key must be a tensor, got NoneType"):
        core.step(q[:, :, :1], None, v[:, :, :1])
    with raises("step takes one token, got 5 queries and 5 keys"):
        core.step(q, k, v)
    plain = kf.build_attention("favor+", head_dim=8, num_heads=4, normalize=False)
    with raises("takes no relative position bias"):
        plain.step(q[:, :, :1], k[:, :, :1], v[:, :, :1], bias=torch.zeros(4, 3))


@pytest.mark.parametrize("method", ["softmax", "gaussian"])
def test_states_of_exact_methods_are_checked(method):
    core = kf.build_attention(method, head_dim=8, num_heads=4)
    q, k, v = inputs(1, dtype=torch.float32)
    _, state = core.step(q, k, v)
    with raises("a state needs is_causal=True"):
        core(q, k, v, return_state=True)
    with raises(f"made by method '{method}', this core is 'favor\\+'"):
        kf.build_attention("favor+", head_dim=8, num_heads=4).step(q, k, v, state)
    with raises("made with another scale"):
        core.step(q, k, v, state, scale=0.3)
    with raises("the state has shape"):
        core.step(*(x[:1] for x in (q, k, v)), state)
    with raises("step takes one token, got 3 queries"):
        core.step(*(x.expand(-1, -1, 3, -1) for x in (q, k, v)), state)
    with raises("takes no relative" if method == "gaussian" else "in step bias must be"):
        core.step(q, k, v, state, bias=torch.zeros(3, 2))
    with raises("slope goes with a bias"):
        core.step(q, k, v, state, slope=torch.zeros(4))


def test_layers():
    with raises("num_heads must divide embed_dim, got 5 and 32"):
        kf.KernelAttention(32, 5)
    with raises("num_kv_heads must divide num_heads, got 3 and 4"):
        kf.KernelAttention(32, 4, num_kv_heads=3)
    with raises(r"takes no relative positions, got relative='1d'"):
        kf.KernelAttention(32, 4, "gaussian", relative="1d", max_distance=3)
    with raises("unknown option for method 'softmax', 'num_landmarks'"):
        kf.KernelAttention(32, 4, "softmax", num_landmarks=8)
    with raises("scheme='t5' is of relative positions, got relative=None; give relative='1d'"):
        kf.KernelAttention(32, 4, scheme="t5")
    with raises("but causal=True was asked for; use landmarks='learned'"):
        kf.KernelAttention(32, 4, "skyformer", causal=True)
    layer = kf.KernelAttention(32, 4)
    with raises(r"x must be \(batch, length, embed_dim=32\) in floating point, got \(2, 5, 16\) in torch.float32"):
        layer(torch.zeros(2, 5, 16))
    with raises(r"context must be \(batch, length, context_dim=32\) in floating point, got \(5, 32\)"):
        layer(torch.zeros(2, 5, 32), torch.zeros(5, 32))
    with raises("step needs a causal layer, this one was built with causal=False"):
        layer.step(torch.zeros(2, 1, 32))


def test_redraw():
    with raises("Linear has no random feature map to redraw"):
        kf.redraw(torch.nn.Linear(2, 2))
    with raises("has no random feature map to redraw"):
        kf.redraw(kf.KernelAttention(32, 4, "elu"))
    layer = kf.KernelAttention(32, 4)
    kf.redraw(layer, every=5)
    with raises("has a redraw schedule already, got another with every=7"):
        kf.redraw(layer, every=7)
    with raises("every must be an integer of at least 1, got 0"):
        kf.redraw(kf.KernelAttention(32, 4), every=0)


def test_a_layer_speaks_of_its_own_arguments():
    x = torch.randn(2, 5, 32)
    layer, causal = kf.KernelAttention(32, 4, num_features=8), kf.KernelAttention(32, 4, num_features=8, causal=True)
    cross = kf.KernelAttention(32, 4, num_features=8, context_dim=16)
    with raises(r"context must be \(batch, length, context_dim=32\) .* got \(2, 5, 16\) .*with context_dim=16"):
        layer(x, torch.randn(2, 5, 16))
    with raises(r"context must be \(batch, length, context_dim=16\) .*with context_dim=32"):
        cross.remember(x)
    with raises("needs a context, got none: it was built with context_dim=16 and embed_dim=32"):
        cross(x)
    with raises(r"x must be \(batch, length, embed_dim=32\) .*; build the layer with embed_dim=8"):
        causal.step(torch.randn(2, 1, 8))
    with raises("x must be a tensor, got list"):
        layer(x.tolist())
    with raises("x and context must have the same batch size, got 2 and 3"):
        layer(x, torch.randn(3, 5, 32))
    with raises(r"key_mask must be \(batch, length\) of context, \(2, 7\), got \(2, 5\); .*causal=True of the layer"):
        layer(x, torch.randn(2, 7, 32), torch.ones(2, 5, dtype=torch.bool))
    with raises("a state needs a causal layer, this one was built with causal=False"):
        layer(x, return_state=True)
    with raises("with a state x and context are the same tokens, got lengths 5 and 6"):
        causal(x, torch.randn(2, 6, 32), return_state=True)
    with raises(r"step takes one token, got x of shape \(2, 5, 32\); for more, call the layer"):
        causal.step(x)
    gated = kf.KernelAttention(32, 4, "rfa-gate", num_features=8, causal=True)
    with raises("embed_dim=32"):
        gated.step(torch.randn(2, 1, 16))


def test_of_many_names_the_nearest_five_are_listed_and_of_few_all():
    many = [f"name{i}" for i in range(40)] + ["favor", "favour"]
    text = str(unknown("thing", "favr", many))
    assert text.startswith("unknown thing 'favr'; did you mean 'favor'? the nearest of 42: favor, favour, ")
    assert text.count(",") == 4
    assert str(unknown("thing", "x", ["a", "b"])) == "unknown thing 'x'; choose from a, b."


def test_no_error_prints_a_whole_object():
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(300)))
    for call in (
        lambda: kf.build_attention(model, head_dim=8, num_heads=2),
        lambda: kf.KernelAttention(8, 2, method=model),
        lambda: kf.method_options(model),
    ):
        with raises("unknown method") as caught:
            call()
        assert len(str(caught.value)) < 400
