"""`kf.MultiheadAttention` and `kf.replace_attention`: plain PyTorch models with another attention."""

from __future__ import annotations

import copy
import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn

import kernelformer as kf

D, H, L = 16, 4, 9
OPTIONS = [{}, {"bias": False}, {"kdim": 5, "vdim": 6}, {"add_bias_kv": True, "add_zero_attn": True}]


def tokens(length=L, seed=1, width=D, dtype=torch.float64):
    return torch.randn(2, length, width, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def padding(length=L, keep=4):
    mask = torch.zeros(2, length, dtype=torch.bool)
    mask[1, keep:] = True
    return mask


def causal(length=L, dtype=torch.float64):
    return nn.Transformer.generate_square_subsequent_mask(length, dtype=dtype)


def small(method):
    """Options that make a method small."""
    known = kf.method_options(method)
    sizes = {"num_features": 16, "num_landmarks": 4, "max_length": 12}
    return {name: n for name, n in sizes.items() if name in known}


def pair(method="softmax", dtype=torch.float64, **options):
    """Torch's module and ours with its weights, large enough to make attention far from uniform."""
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(D, H, dtype=dtype, **options)
    with torch.no_grad():
        for x in theirs.parameters():
            x.normal_(std=1.5 * D**-0.5)
    ours = kf.MultiheadAttention(D, H, dtype=dtype, method=method, **options)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def encoder_layer(method, **options):
    """A layer of torch's with our attention, in float64 and evaluation mode."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(D, H, 24, dropout=0.0, batch_first=True, **options)
    layer.self_attn = kf.MultiheadAttention(D, H, batch_first=True, method=method, **small(method))
    return layer.double().eval()


def encoder(layers=2, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says which of its kernels it will not use
        layer = nn.TransformerEncoderLayer(D, H, 24, dropout=0.0, batch_first=True, **options)
        torch.manual_seed(0)
        return nn.TransformerEncoder(layer, layers).double().eval()


def by_hand(layer, x, **call):
    """What a layer of torch's says that it computes, by the attention's own forward."""

    def feed(x):
        return layer.linear2(layer.activation(layer.linear1(x)))

    if layer.norm_first:
        y = layer.norm1(x)
        x = x + layer.self_attn(y, y, y, need_weights=False, **call)[0]
        return x + feed(layer.norm2(x))
    x = layer.norm1(x + layer.self_attn(x, x, x, need_weights=False, **call)[0])
    return layer.norm2(x + feed(x))


def calls(keys=L):
    """Keyword arguments of a call that both modules understand."""
    future, hidden = causal(keys), padding(keys)
    return [
        {},
        {"need_weights": False},
        {"average_attn_weights": False},
        {"key_padding_mask": hidden},
        {"key_padding_mask": torch.zeros(2, keys).double().masked_fill(hidden, -torch.inf)},
        {"attn_mask": future},
        {"attn_mask": future < 0},
        {"attn_mask": future, "is_causal": True, "need_weights": False},
        {"attn_mask": future.expand(2 * H, keys, keys), "average_attn_weights": False},
        {"attn_mask": future < 0, "key_padding_mask": hidden},
        {"attn_mask": torch.zeros(keys, keys, dtype=torch.bool)},
    ]


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("options", OPTIONS)
def test_with_softmax_it_is_torchs_module_gradients_and_dropout_too(options, batch_first, training):
    own_keys = "add_bias_kv" in options  # they stand elsewhere in the row, and so does what is dropped
    theirs, ours = pair(batch_first=batch_first, dropout=0.0 if own_keys else 0.25, **options)
    q = tokens()
    k, v = (tokens(L, 2, options["kdim"]), tokens(L, 3, options["vdim"])) if "kdim" in options else (q, q)
    if not batch_first:
        q, k, v = (q.transpose(0, 1),) * 3 if k is q else (x.transpose(0, 1) for x in (q, k, v))
    for call in calls():
        if own_keys and call.get("is_causal") and not call["need_weights"]:
            continue  # torch forgets the mask here, and hides its own keys from the first queries
        results = []
        for module in (theirs.train(training), ours.train(training)):
            leaves = [x.detach().requires_grad_() for x in ((q, k, v) if k is not q else (q,))]
            torch.manual_seed(5)
            out, weights = module(*(leaves if len(leaves) == 3 else leaves * 3), **call)
            leaves += module.parameters()
            results.append((out, weights, torch.autograd.grad(out.square().sum(), leaves)))
        (out, weights, grads), (want, want_weights, want_grads) = results[1], results[0]
        torch.testing.assert_close(out, want, rtol=0, atol=1e-10)
        assert (weights is None) == (want_weights is None)
        if weights is not None:
            torch.testing.assert_close(weights, want_weights, rtol=0, atol=1e-10)
        for a, b in zip(grads, want_grads, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)


def test_in_float32_it_is_torchs_module_to_a_millionth():
    theirs, ours = pair(dtype=torch.float32, batch_first=True)
    x = tokens(dtype=torch.float32)
    for call in ({}, {"key_padding_mask": padding()}, {"attn_mask": causal(dtype=torch.float32)}):
        torch.testing.assert_close(ours(x, x, x, **call)[0], theirs(x, x, x, **call)[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("options", OPTIONS)
def test_inputs_without_a_batch_and_of_other_lengths(options):
    theirs, ours = pair(**options)
    q, k, v = tokens(5)[0], tokens(7, 2, options.get("kdim", D))[0], tokens(7, 3, options.get("vdim", D))[0]
    future = torch.ones(5, 7, dtype=torch.bool).triu(1)
    for call in ({}, {"key_padding_mask": padding(7)[1]}, {"attn_mask": future}, {"attn_mask": future.expand(H, 5, 7)}):
        for a, b in zip(ours(q, k, v, **call), theirs(q, k, v, **call), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


def test_state_dicts_load_both_ways():
    theirs, ours = pair("loglinear", batch_first=True)
    before = copy.deepcopy(ours.kernel.state_dict())
    for name, x in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], x)
    missing, unexpected = theirs.load_state_dict(ours.state_dict(), strict=False)
    assert not missing
    assert {name.split(".")[0] for name in unexpected} == {"kernel"}
    other = kf.MultiheadAttention(D, H, batch_first=True, dtype=torch.float64, method="loglinear", seed=3)
    other.load_state_dict(ours.state_dict())
    x = tokens()
    assert torch.equal(other(x, x, x)[0], ours(x, x, x)[0])
    for name, tensor in ours.kernel.state_dict().items():
        assert torch.equal(tensor, before[name])
    part = ours.state_dict()
    part.pop(next(name for name in part if name.startswith("kernel.")))
    with pytest.raises(RuntimeError, match="Missing key"):
        other.load_state_dict(part)
    inside = nn.TransformerEncoderLayer(D, H, 24, batch_first=True, dtype=torch.float64)
    inside.load_state_dict(encoder_layer("softmax").state_dict())
    encoder_layer("favor+").load_state_dict(inside.state_dict())


@pytest.mark.parametrize("method", kf.list_methods())
def test_every_method_attends_in_torchs_layer_as_it_does_alone(method):
    gated = method == "rfa-gate"
    call = {"attn_mask": causal(), "is_causal": True} if gated else {}
    outer = {"src_mask": causal(), "is_causal": True} if gated else {}
    layer, x = encoder_layer(method), tokens()
    exact = nn.TransformerEncoderLayer(D, H, 24, dropout=0.0, batch_first=True).double().eval()
    exact.load_state_dict({k: v for k, v in layer.state_dict().items() if ".kernel." not in k})
    with torch.no_grad():
        want = by_hand(layer, x, **call)
        torch.testing.assert_close(layer(x, **outer), want, rtol=0, atol=1e-10)
        same = torch.allclose(exact(x, **outer), want, rtol=0, atol=1e-6)
        assert same == (method in ("softmax", "local"))  # a window is longer than this text
        hidden = padding()
        padded = layer(x, src_key_padding_mask=hidden, **outer)
        if gated:
            outer = {"src_mask": causal(4), "is_causal": True}
        torch.testing.assert_close(padded[1:, :4], layer(x[1:, :4], **outer), rtol=0, atol=1e-8)
        torch.testing.assert_close(padded[:1], want[:1], rtol=0, atol=1e-10)
    layer.train()
    inputs = x.requires_grad_()
    out = layer(inputs, src_mask=causal(), is_causal=True) if gated else layer(inputs)
    torch.testing.assert_close(out, want, rtol=0, atol=1e-10)
    out.square().sum().backward()
    assert inputs.grad.isfinite().all()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())
    assert layer.self_attn.in_proj_weight.grad.any()


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("given", ["nothing", "padding", "causal", "both", "causal without a mask"])
def test_torchs_fused_kernels_do_not_go_around_the_method(norm_first, given):
    """By hand and by the encoder, where each of torch's own conditions for a fused kernel holds."""
    model, x = encoder(norm_first=norm_first), tokens()
    for i, layer in enumerate(model.layers):  # after the encoder was built, which believes in nested tensors by then
        layer.self_attn = kf.MultiheadAttention(D, H, batch_first=True, num_features=16, seed=i).double().eval()
    inner = {"key_padding_mask": padding()} if given in ("padding", "both") else {}
    outer = {"src_key_padding_mask": padding()} if inner else {}
    if "causal" in given or given == "both":
        inner["is_causal"] = True
        outer |= {"is_causal": True} if "without" in given else {"mask": causal()}
    want = x
    for layer in model.layers:
        want = by_hand(layer, want, **inner)
    real = ~inner.get("key_padding_mask", torch.zeros(2, L, dtype=torch.bool))
    with torch.no_grad():
        torch.testing.assert_close(model(x, **outer)[real], want[real], rtol=0, atol=1e-10)
    torch.testing.assert_close(model(x, **outer)[real], want[real], rtol=0, atol=1e-10)
    model.requires_grad_(False)
    torch.testing.assert_close(model(x, **outer)[real], want[real], rtol=0, atol=1e-10)
    with torch.inference_mode():
        torch.testing.assert_close(model(x, **outer)[real], want[real], rtol=0, atol=1e-10)


def test_a_nested_tensor_attends_to_itself():
    module = kf.MultiheadAttention(D, H, batch_first=True, num_features=16).double().eval()
    rows = [tokens(n, n)[0] for n in (5, 2, 7)]
    nested = torch.nested.nested_tensor(rows)
    with torch.no_grad():
        out, weights = module(nested, nested, nested)
        for row, x in zip(out.unbind(), rows, strict=True):
            torch.testing.assert_close(row, module(x, x, x)[0], rtol=0, atol=1e-10)
        assert weights.shape == (3, 7, 7)
        with pytest.raises(ValueError, match="attends to itself"):
            module(nested, tokens(3), tokens(3))


def test_a_whole_transformer_is_torchs_with_softmax_and_causal_with_another():
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = nn.Transformer(D, H, 1, 2, 24, dropout=0.0, batch_first=True).double().eval()
    given = {
        "src": tokens(), "tgt": tokens(7, 2), "tgt_mask": causal(7), "src_key_padding_mask": padding(),
        "memory_key_padding_mask": padding(),
    }  # fmt: skip
    with torch.no_grad():
        want = model(**given)
        names = kf.replace_attention(model, "softmax")
        assert len(names) == 5
        torch.testing.assert_close(model(**given), want, rtol=0, atol=1e-10)
        assert kf.restore_attention(model) == names
        kf.replace_attention(model, "favor+", num_features=16)
        first = model(**given)
        assert not torch.allclose(first, want)
        given["tgt"] = torch.cat([given["tgt"][:, :4], tokens(3, 7)], 1)
        torch.testing.assert_close(model(**given)[:, :4], first[:, :4], rtol=0, atol=1e-10)
        given["tgt_mask"], given["tgt_is_causal"] = None, True
        torch.testing.assert_close(model(**given)[:, :4], first[:, :4], rtol=0, atol=1e-10)


def test_weights_are_those_that_made_the_output():
    for method in ("favor+", "loglinear", "skyformer", "linformer"):
        module = kf.MultiheadAttention(D, H, batch_first=True, method=method, **small(method)).double()
        x = tokens()
        out, each = module(x, x, x, key_padding_mask=padding(), average_attn_weights=False)
        values = module._project(x, x, x)[2]
        torch.testing.assert_close(module.out_proj((each @ values).transpose(1, 2).flatten(2)), out)
        mean = module(x, x, x, key_padding_mask=padding())[1]
        torch.testing.assert_close(mean, each.mean(1))
        assert not each[1, :, :, 4:].any()


def test_masks_that_kernels_cannot_do_are_refused_by_name():
    module = kf.MultiheadAttention(D, H, batch_first=True, num_features=16)
    x = tokens(4, dtype=torch.float32)
    one = torch.zeros(4, 4, dtype=torch.bool)
    one[3, 0] = True
    several = causal(4).expand(2 * H, 4, 4).clone()
    several[1] = 0
    for call, words in (
        ({"attn_mask": one}, r"attn_mask of shape \(4, 4\) is neither causal nor empty.*key_padding_mask"),
        ({"attn_mask": several}, "neither causal nor empty"),
        ({"attn_mask": torch.full((4, 4), 0.5)}, "would be a bias"),
        ({"attn_mask": torch.full((4, 4), -1e9).triu(1)}, "are to be -inf"),
        ({"attn_mask": one.int()}, "must be bool or floating point, got torch.int32"),
        ({"attn_mask": causal(5)}, r"\(4, 4\) or \(batch \* heads, queries, keys\) = \(8, 4, 4\), got \(5, 5\)"),
        ({"attn_mask": one, "is_causal": True}, "is_causal=True says that attn_mask hides key j"),
        ({"attn_mask": torch.zeros(4, 4), "is_causal": True}, "is_causal=True says that attn_mask hides key j"),
        ({"key_padding_mask": torch.zeros(4, 2).bool()}, r"key_padding_mask must be .* = \(2, 4\), got \(4, 2\)"),
        ({"key_padding_mask": torch.full((2, 4), 0.5)}, "key_padding_mask in torch.float32 must be 0 or -inf"),
        ({"key_padding_mask": [[True] * 4] * 2}, "key_padding_mask must be a tensor or None, got list"),
        ({"attn_mask": "causal"}, "attn_mask must be a tensor or None, got str 'causal'; the causal one is"),
    ):
        with pytest.raises(ValueError, match=words):
            module(x, x, x, **call)
    with pytest.raises(ValueError, match=r"key must be \(batch, length, width\).* width 16.*got \(2, 4, 5\)"):
        module(x, x[..., :5], x)
    with pytest.raises(ValueError, match="'skyformer'"):
        kf.MultiheadAttention(D, H, method="skyformer")(x[0], x[0], x[0], is_causal=True)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dropout": 0.1}, r"dropout=0.1 drops attention weights, which method 'favor\+' never forms"),
        ({"method": "softmax", "attention_dropout": 0.1}, "give dropout="),
        ({"method": "favor"}, "did you mean 'favor[+]'"),
        ({"num_feature": 3}, "option for method 'favor[+]'"),
        ({"num_heads": 3}, "num_heads must divide embed_dim, got 3 and 16"),
        ({"num_heads": 0}, "num_heads must be an integer of at least 1"),
    ],
)
def test_wrong_settings_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        kf.MultiheadAttention(D, **{"num_heads": H, **options})


def test_the_first_weights_are_torchs_and_can_be_drawn_again():
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(D, H, add_bias_kv=True)
    torch.manual_seed(0)
    ours = kf.MultiheadAttention(D, H, add_bias_kv=True)
    torch.manual_seed(1)
    ours._reset_parameters()
    torch.manual_seed(1)
    theirs._reset_parameters()
    for name, x in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], x), name
    assert not ours._qkv_same_embed_dim  # torch's way around the module


def test_half_precision_and_copies():
    for dtype in (torch.float16, torch.bfloat16):
        module = kf.MultiheadAttention(D, H, batch_first=True, dtype=dtype, num_features=16)
        x = tokens(dtype=torch.float32)
        out = module(x.to(dtype), x.to(dtype), x.to(dtype), need_weights=False)[0]
        assert out.dtype == dtype
        whole = copy.deepcopy(module).float()
        torch.testing.assert_close(out.float(), whole(x, x, x)[0], rtol=0.1, atol=0.05)
        assert module.kernel.feature_map.omega.dtype == torch.float32


def test_a_compiled_encoder_layer_gives_the_same():
    layer, x = encoder_layer("favor+"), tokens()
    hidden = torch.zeros(2, L).double().masked_fill(padding(), -torch.inf)
    call = {"src_mask": causal(), "is_causal": True, "src_key_padding_mask": hidden}
    with torch.no_grad():
        want = layer(x), layer(x, **call)
        torch._dynamo.reset()
        compiled = torch.compile(layer, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), want[0])
        torch.testing.assert_close(compiled(x, **call), want[1])
        with pytest.raises(RuntimeError, match="is_causal=True says"):
            compiled(x, **{**call, "src_mask": causal().mT})
        torch._dynamo.reset()
        broken = torch.compile(layer, backend="eager")  # without the hint the graph has to look at the mask
        torch.testing.assert_close(broken(x, **{**call, "is_causal": False}), want[1])
    torch._dynamo.reset()


def test_replacing_keeps_parameters_modes_and_shared_modules():
    model = nn.ModuleDict({"a": encoder(1), "b": nn.MultiheadAttention(D, H, dtype=torch.float64, vdim=3)})
    model["c"] = model["b"]
    model["a"].layers[0].train()
    model["b"].requires_grad_(False)
    before, modes = dict(model.named_parameters()), [x.training for x in (model["a"], model["a"].layers[0])]
    optimizer = torch.optim.SGD(model["a"].parameters(), lr=0.1)
    assert kf.replace_attention(model, "favor+", num_features=16) == ["a.layers.0.self_attn", "b"]
    after = dict(model.named_parameters())
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before)
    assert model["b"] is model["c"]
    assert [x.training for x in (model["a"], model["a"].layers[0])] == modes
    assert model["a"].layers[0].self_attn.kernel.training
    assert not model["b"].training or model["b"].kernel.training
    maps = [model["a"].layers[0].self_attn.kernel.feature_map, model["b"].kernel.feature_map]
    assert [x.seed_number for x in maps] == [0, 1]
    assert all(x.omega.dtype == torch.float64 for x in maps)
    weight = before["a.layers.0.self_attn.in_proj_weight"].detach().clone()
    model["a"](tokens()).square().sum().backward()
    optimizer.step()
    assert not torch.equal(model["a"].layers[0].self_attn.in_proj_weight, weight)
    assert kf.restore_attention(model) == ["a.layers.0.self_attn", "b"]
    assert type(model["b"]) is nn.MultiheadAttention
    assert model["b"] is model["c"]
    assert all(x is before[name] for name, x in model.named_parameters())
    model["a"].eval()
    assert model["a"](tokens()).isfinite().all()


def test_some_layers_are_chosen_by_number_or_name():
    model = encoder(3)
    assert kf.replace_attention(model, "favor+", -1, num_features=16) == ["layers.2.self_attn"]
    assert kf.replace_attention(model, "elu", ["layers.0.*"]) == ["layers.0.self_attn"]
    with pytest.raises(ValueError, match=r"layers\.2\.self_attn is a MultiheadAttention of 'favor\+' already"):
        kf.replace_attention(model, "elu", 2)
    assert kf.replace_attention(model, "softmax") == ["layers.1.self_attn"]
    assert [x.self_attn.kernel.method for x in model.layers] == ["elu", "softmax", "favor+"]
    with pytest.raises(ValueError, match="all 3 attentions of TransformerEncoder are replaced already"):
        kf.replace_attention(model, "softmax")
    with pytest.raises(ValueError, match=r"unknown attention 'nowhere\*'"):
        kf.replace_attention(model, "softmax", "nowhere*")
    with pytest.raises(ValueError, match="3 attentions, numbered from 0, got 3"):
        kf.replace_attention(model, "softmax", 3)


class Odd(nn.MultiheadAttention):
    """Somebody's own."""


def test_what_cannot_be_replaced_is_named_and_nothing_changes():
    model = nn.ModuleDict({"a": nn.MultiheadAttention(D, H), "b": Odd(D, H)})
    for call, words in (
        (lambda: kf.replace_attention(model, "favor+"), "b is a Odd, a kind of"),
        (lambda: kf.replace_attention(model, "favor+", "a", rank=2), "option for method"),
        (lambda: kf.replace_attention(model["a"], "favor+"), "itself an attention"),
        (lambda: kf.replace_attention(nn.Linear(2, 2), "favor+"), r"Linear has no torch.nn.MultiheadAttention.*hf.con"),
        (lambda: kf.restore_attention(model), "ModuleDict has none"),
        (lambda: kf.replace_attention(model, "favor+", "a", num_features=-1), "num_features must be"),
    ):
        with pytest.raises(ValueError, match=words):
            call()
    handle = model["a"].register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="a has hooks, which would be lost"):
        kf.replace_attention(model, "favor+", "a")
    handle.remove()
    assert [type(x) for x in model.values()] == [nn.MultiheadAttention, Odd]
    assert kf.replace_attention(model, "favor+", "a") == ["a"]


def test_dropout_of_weights_is_left_out_with_a_warning_and_comes_back():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(D, H, 24, dropout=0.1, norm_first=True), 2, None, False)
    with pytest.warns(UserWarning, match=r"dropout of 0.1 is left out in layers.0.self_attn and 1 more of Transformer"):
        kf.replace_attention(model, "favor+")
    kf.restore_attention(model)
    assert [x.self_attn.dropout for x in model.layers] == [0.1, 0.1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kf.replace_attention(model, "softmax")
    assert [x.self_attn.kernel.attention_dropout for x in model.layers] == [0.1, 0.1]


def test_dropout_that_is_set_later_counts_as_it_does_for_torch():
    theirs, ours = pair(batch_first=True, dropout=0.5)
    theirs.dropout = ours.dropout = 0.0
    x = tokens()
    for need_weights in (False, True):
        want, found = (module.train()(x, x, x, need_weights=need_weights)[0] for module in (theirs, ours))
        torch.testing.assert_close(found, want)
    ours.dropout = 0.5
    assert not torch.equal(ours(x, x, x, need_weights=False)[0], ours(x, x, x, need_weights=False)[0])


def test_weights_are_those_that_gave_the_output_when_dropout_is_an_option_of_the_method():
    model = nn.ModuleDict({"a": nn.MultiheadAttention(D, H, batch_first=True, dtype=torch.float64)})
    kf.replace_attention(model, "softmax", attention_dropout=0.5)
    ours, x = model["a"], tokens()
    out, weights = ours(x, x, x, average_attn_weights=False)
    assert (weights == 0).any()
    value = ours._project(x, x, x)[2]
    torch.testing.assert_close(ours.out_proj((weights @ value).transpose(1, 2).flatten(2)), out)
    kf.restore_attention(model)
    assert model["a"].dropout == 0.0


def test_it_works_with_torch_alone():
    code = (
        "import sys; sys.modules.update(dict.fromkeys(('transformers', 'accelerate', 'datasets', 'safetensors')))\n"
        "import torch, kernelformer as kf\n"
        "model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(8, 2, 8, 0.0, batch_first=True), 1)\n"
        "print(kf.replace_attention(model.eval(), 'favor+', num_features=8))\n"
        "with torch.no_grad(): print(model(torch.zeros(1, 3, 8)).shape)\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert found.stdout.splitlines() == ["['layers.0.self_attn']", "torch.Size([1, 3, 8])"], found.stderr
