"""Rotary positions are transformers', before every method's map, in streams and in models."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

import kernelformer as kf
from definition import close, inputs
from kernelformer.models import MODELS, KernelformerConfig
from kernelformer.modules import METHODS, RotaryPositions, parse_attention
from kernelformer.modules.spec import has_positions, without_positions

LONG = {"original_max_position_embeddings": 64}
SCALINGS = {
    "none": None,
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **LONG},
    "yarn": {"rope_type": "yarn", "factor": 4.0, **LONG},
    "yarn by weights": {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 1.3, **LONG},
    "yarn in full": {
        "rope_type": "yarn",
        "factor": 4.0,
        "attention_factor": 1.5,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "truncate": False,
        **LONG,
    },
}
NEEDS = {"linformer": {"max_length": 64}, "skyformer": {"landmarks": "learned"}}


def rotate(x, position, base=10000.0, dim=None):
    """The definition: pairs of dimensions as complex numbers, times exp(i p w)."""
    dim = x.shape[-1] if dim is None else dim
    n = dim // 2
    rate = base ** (-torch.arange(n, dtype=x.dtype) / n)
    angle = position.to(x.dtype).unsqueeze(-1) * rate
    pairs = torch.complex(x[..., :n], x[..., n:dim]) * torch.exp(1j * angle)
    return torch.cat([pairs.real, pairs.imag, x[..., dim:]], -1)


def layer_of(method, dtype=torch.float64, **options):
    torch.manual_seed(0)
    few = {"num_features": 8, **NEEDS.get(method, {}), **options}
    return kf.KernelAttention(32, 4, method, rotary=True, **few).to(dtype)


@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
@pytest.mark.parametrize("base", [10000.0, 500000.0])
def test_rotations_are_those_of_transformers(scaling, base):
    parameters = {"rope_type": "default", **(scaling or {}), "rope_theta": base}
    theirs = LlamaRotaryEmbedding(LlamaConfig(head_dim=32, rope_parameters=parameters, max_position_embeddings=256))
    q, k, _ = inputs(100, G=2, D=32, dtype=torch.float32)
    cos, sin = theirs(q, torch.arange(7, 107).unsqueeze(0))
    ours = RotaryPositions(32, rotary_base=base, rotary_scaling=scaling)
    for got, want in zip(ours(q, k, 7), apply_rotary_pos_emb(q, k, cos, sin), strict=True):
        close(got, want)


@pytest.mark.parametrize("dim", [2, 6, 8])
def test_rotations_are_products_of_complex_numbers(dim):
    q, k, _ = inputs(5, G=2, grad=True)
    rotary = RotaryPositions(8, rotary_dim=dim, rotary_base=100.0)
    for start in (0, 3, 1_000_000):
        turned = rotary(q, k, start)
        for x, y in zip((q, k), turned, strict=True):
            close(y, rotate(x, start + torch.arange(5), 100.0, dim))
        products = turned[0][:, :2] @ turned[1].mT
        close(products, rotary(q, k)[0][:, :2] @ rotary(q, k)[1].mT)  # differences alone count
    ids = torch.tensor([[0, 1, 0, 1, 2], [4, 4, 9, 2, 0]])
    close(rotary(q, k, position_ids=ids)[0], rotate(q, ids.unsqueeze(1), 100.0, dim))
    assert torch.autograd.gradcheck(lambda q, k: rotary(q, k, 3, ids), (q[:, :1, :, :], k[:, :1, :, :]))
    assert torch.autograd.gradgradcheck(lambda q: rotary(q, q, 3)[0], (q[:1, :1, :2],))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_half_precision_turns_in_float32(dtype):
    q, k, _ = inputs(5, dtype=dtype)
    got = RotaryPositions(8).half()(q, k, 100_000)[0]
    assert got.dtype == dtype
    want = rotate(q.double(), 100_000 + torch.arange(5))
    close(got, want.to(dtype), 1e-6 if dtype == torch.float32 else 0)


@pytest.mark.parametrize("method", METHODS)
def test_a_layer_of_any_method_turns_before_its_core_and_goes_on_in_a_stream(method):
    entry = METHODS[method]
    causal = bool(entry.holds(entry.causal, NEEDS.get(method)))
    layer = layer_of(method, causal=causal, num_kv_heads=2)
    x = torch.randn(2, 9, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    q, k, v = (f(x).view(2, 9, -1, 8).transpose(1, 2) for f in (layer.query, layer.key, layer.value))
    gate = {} if layer.gate is None else {"gate": torch.sigmoid(layer.gate(x)).transpose(1, 2)}
    turned = (rotate(t, torch.arange(9)) for t in (q, k))
    want = layer.out(layer.core(*turned, v, is_causal=causal, **gate).transpose(1, 2).flatten(2))
    close(layer(x), want)
    assert not torch.allclose(layer(x), layer(x, position_ids=2 * torch.arange(9).unsqueeze(0)))
    if not causal:
        return
    first, state = layer(x[:, :4], return_state=True)
    token, state = layer.step(x[:, 4:5], state)
    rest, _ = layer(x[:, 5:], state=state, return_state=True)
    close(torch.cat([first, token, rest], 1), want)


def test_a_bias_and_rotary_positions_go_together():
    options = {"causal": True, "relative": "1d", "max_distance": 3, "rotary_dim": 4}
    exact, layer = (layer_of(x, **options) for x in ("softmax", "nprf"))
    x = torch.randn(1, 7, 32, dtype=torch.float64)
    torch.nn.init.normal_(layer.positions.weight)
    whole, _ = layer(x, return_state=True)
    _, state = layer(x[:, :6], return_state=True)
    close(layer.step(x[:, 6:], state.detach())[0], whole[:, 6:])
    assert exact(x).isfinite().all()


def test_rotary_positions_compile():
    rotary = RotaryPositions(8)
    q, k, _ = inputs(5, grad=True)
    want = rotary(q, k, 2)
    got = torch.compile(rotary, backend="aot_eager", fullgraph=True)(q, k, 2)
    for a, b in zip(got, want, strict=True):
        close(a, b)
    grads = [torch.autograd.grad(x[0].square().sum() + x[1].sum(), (q, k)) for x in (got, want)]
    for a, b in zip(*grads, strict=True):
        close(a, b)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head_dim": 5}, "pairs of dimensions, got an odd head_dim=5; make it even, or give rotary_dim=4"),
        ({"rotary_dim": 10}, "even and at most head_dim, got 10 and 8; give rotary_dim=8"),
        ({"rotary_dim": 3}, "even and at most head_dim, got 3 and 8; give rotary_dim=2"),
        ({"rotary_dim": 0}, "rotary_dim must be an integer of at least 1, got 0"),
        ({"rotary_base": 0.0}, "rotary_base must be a finite number above 1, got 0"),
        ({"rotary": "yes"}, "rotary must be True or False, got 'yes'"),
        ({"rotary": False, "rotary_dim": 4}, "rotary_dim=4 is of rotary positions, got rotary=False"),
        ({"rotary_scaling": {"rope_type": "ntk"}}, "unknown rope_type of rotary_scaling, 'ntk'"),
        ({"rotary_scaling": {"factor": 4.0}}, "must be a dict with a rope_type"),
        ({"rotary_scaling": "linear"}, r"or a text such as 'linear\(factor=4.0\)', got 'linear'"),
        ({"rotary_scaling": "linear(factor=2, factor=3)"}, "got 'linear"),
        ({"rotary_scaling": "linear(factors=2)"}, "'factors'; did you mean 'factor'"),
        ({"rotary_scaling": "linear(factor=0.5)"}, "factor of rotary_scaling must be a finite number of at least 1"),
        ({"rotary_scaling": "yarn(factor=2)"}, "needs factor, original_max_position_embeddings, got no original"),
        (
            {"rotary_scaling": {**SCALINGS["llama3"], "low_freq_factor": 4.0}},
            "must be above low_freq_factor, got 4.0 and 4.0",
        ),
        ({"rotary_scaling": {**SCALINGS["yarn"], "beta_fast": 0.5}}, "at least beta_slow, got 0.5 and 1"),
        ({"rotary_scaling": {**SCALINGS["yarn"], "truncate": 1}}, "truncate of rotary_scaling must be True or False"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        kf.KernelAttention(32, 4, **{"rotary": True, **options})


def test_rotary_positions_are_for_self_attention():
    layer, x = layer_of("favor+", torch.float32), torch.randn(2, 5, 32)
    for call in (lambda: layer(x, x), lambda: layer.remember(x), lambda: layer.recall(x, None)):
        with pytest.raises(ValueError, match=r"got a context for a layer with rotary=True.*with rotary=False"):
            call()
    with pytest.raises(ValueError, match=r"position_ids must be \(batch or 1, length\) = \(2, 5\), got \(1, 4\)"):
        layer(x, position_ids=torch.zeros(1, 4, dtype=torch.long))
    with pytest.raises(ValueError, match=r"position_ids must be integers, got torch.float32"):
        layer(x, position_ids=torch.zeros(1, 5))
    with pytest.raises(ValueError, match="for rotary positions, this layer was built with rotary=False"):
        kf.KernelAttention(32, 4)(x, position_ids=torch.zeros(1, 5, dtype=torch.long))


def test_attention_strings_have_rotary_positions():
    text = "favor+:rotary=True:rotary_base=500000:rotary_scaling=linear(factor=4.0)"
    assert parse_attention(text) == (
        "favor+",
        {"rotary": True, "rotary_base": 500000, "rotary_scaling": "linear(factor=4.0)"},
    )
    assert has_positions(text)
    assert not has_positions("favor+:rotary=False")
    assert without_positions(text) == "favor+"
    assert without_positions("nprf:relative=1d:rotary=True:max_distance=4:seed=1") == "nprf:seed=1"
    with pytest.raises(ValueError, match="did you mean 'rotary'"):
        parse_attention("favor+:rotory=True")


ROTARY = "favor+:num_features=8:rotary=True"
SMALL = {
    "vocab_size": 13,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "pad_token_id": 0,
    "decoder_start_token_id": 1,
}


def model_of(kind, attention=ROTARY, **more):
    torch.manual_seed(0)
    return MODELS[kind](KernelformerConfig(**{**SMALL, "attention": attention, **more})).eval()


def test_models_take_rotary_positions_instead_of_absolute_ones(tmp_path):
    model = model_of("causal-lm", [ROTARY, "elu:rotary=True:rotary_dim=4"])
    assert model.embeddings.positions == "none"
    assert model.longest is None
    assert model_of("causal-lm", [ROTARY, "elu"]).embeddings.positions == "sinusoidal"
    assert not any("rotary" in name for name in model.state_dict())
    ids = torch.randint(2, 13, (2, 9), generator=torch.Generator().manual_seed(1))
    assert not torch.allclose(model(ids).logits[:, -1], model(ids[:, [1, 0, *range(2, 9)]]).logits[:, -1])
    model.save_pretrained(tmp_path)
    close(type(model).from_pretrained(tmp_path).eval()(ids).logits, model(ids).logits)
    written = model.generate(ids, max_new_tokens=4, do_sample=False)
    assert torch.equal(written[:, 9:], model(written).logits[:, 8:-1].argmax(-1))


def test_padding_on_the_left_moves_no_rotary_position():
    model = model_of("causal-lm")
    ids = torch.randint(2, 13, (1, 7), generator=torch.Generator().manual_seed(2))
    padded = torch.nn.functional.pad(ids, (3, 0))
    mask = (torch.arange(10) >= 3).long().unsqueeze(0)
    close(model(padded, attention_mask=mask).logits[:, 3:], model(ids).logits)
    options = {"max_new_tokens": 4, "do_sample": False}
    assert torch.equal(model.generate(padded, attention_mask=mask, **options)[:, 3:], model.generate(ids, **options))


@pytest.mark.parametrize("kind", ["classifier", "seq2seq", "image", "pixel-lm"])
def test_other_models_have_rotary_self_attention_and_plain_cross_attention(kind):
    model = model_of(kind, pooling="cls", image_size=[8, 8], num_channels=1, num_labels=3)
    layers = {name: x for name, x in model.named_modules() if isinstance(x, kf.KernelAttention)}
    assert all((x.rotary is None) == name.endswith("cross") for name, x in layers.items())
    ids = torch.randint(2, 13, (2, 6), generator=torch.Generator().manual_seed(3))
    given = {"pixel_values": torch.randn(2, 1, 8, 8)} if kind == "image" else {"input_ids": ids}
    more = {"labels": ids} if kind == "seq2seq" else {}
    assert model(**given, **more).logits.isfinite().all()
    with pytest.raises(ValueError, match=r"cross_attention has no relative positions.*give 'elu'"):
        KernelformerConfig(cross_attention="elu:rotary=True")


def test_a_first_token_stands_before_the_others():
    model = model_of("classifier", "softmax:rotary=True", pooling="cls", num_labels=3)
    ids = torch.randint(2, 13, (1, 6), generator=torch.Generator().manual_seed(3))
    later = torch.arange(6).unsqueeze(0) + 50
    assert not torch.allclose(model(ids, position_ids=later).logits, model(ids).logits)
    seen = []
    model.model.stack.blocks[0].attention.rotary.register_forward_pre_hook(lambda _, given: seen.append(given[-1]))
    model(ids)
    assert seen[0].tolist() == [list(range(7))]


def test_scaled_angles_are_those_of_a_stretched_text():
    plain, scaled = RotaryPositions(8), RotaryPositions(8, rotary_scaling="linear(factor=4)")
    q, k, _ = inputs(5)
    close(scaled(q, k, position_ids=4 * torch.arange(5).unsqueeze(0))[0], plain(q, k)[0])
    assert math.isclose(RotaryPositions(8, rotary_scaling=SCALINGS["yarn"]).factor, 0.1 * math.log(4) + 1)
