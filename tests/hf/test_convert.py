"""Pretrained models made linear: every kind of model, against its own exact attention."""

from __future__ import annotations

import copy
import json

import pytest
import torch
import transformers
from torch import nn

import kernelformer as kf
from kernelformer.conversion.convert import proposal, propose
from kernelformer.hf import conversion, convert, cores, undo
from kernelformer.hf.find import find_attentions, probing
from tiny_models import DECODERS, ENCODERS, HEADS, KINDS, PAIRS, distance, inputs, outputs, padded, tiny, tokens

KEEP = [11, 4]
NEEDS_LANDMARKS = {
    "skyformer": {"num_landmarks": 4},
    "nystromformer": {"num_landmarks": 4},
    "wildcat": {"num_landmarks": 4},
}
BIASED = [x for x in kf.list_methods() if x.startswith(("favor", "trig", "relu", "elu", "gmm", "fastfood", "generative",
                                                        "nprf", "loglinear", "hedgehog"))
          or x in ("rfa", "local", "wildcat")]  # fmt: skip
FEATURES = {"favor+": {"num_features": 32}, "loglinear": {"num_features": 16}, "elu": {}, "trigonometric": {}}


def options(method):
    small = {"num_features": 16} if "num_features" in kf.method_options(method) else {}
    return {**small, **NEEDS_LANDMARKS.get(method, {})}


def snapshot(model):
    state = {name: x.clone() for name, x in model.state_dict().items()}
    return type(model), [type(x) for x in model.modules()], model.config.to_dict(), state


def same(model, before):
    kind, kinds, config, state = before
    assert type(model) is kind
    assert [type(x) for x in model.modules()] == kinds
    assert model.config.to_dict() == config
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(x, state[name]) for name, x in model.state_dict().items())


@pytest.mark.parametrize("kind", KINDS)
def test_exact_attention_through_cores_gives_what_the_model_gave(kind):
    model = tiny(kind)
    given = inputs(model)
    want = outputs(model, **given)
    assert convert(model, "softmax") is model
    assert model.conversion.verified
    assert model.conversion.replaced == []
    torch.testing.assert_close(outputs(model, **given), want, rtol=0, atol=1e-10)
    outputs(convert(tiny(kind, torch.float32), "softmax"), **inputs(tiny(kind, torch.float32)))


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("kind", [*ENCODERS, *DECODERS])
def test_exact_attention_through_cores_keeps_padding_out(kind, side):
    model = tiny(kind)
    ids, mask = padded(tokens(), KEEP, side)
    real = mask.bool()
    given = inputs(model, ids, mask)
    want = outputs(model, **given)
    convert(model, "softmax")
    torch.testing.assert_close(outputs(model, **given)[real], want[real], rtol=0, atol=1e-10)


@pytest.mark.parametrize("method", FEATURES)
@pytest.mark.parametrize("kind", [*ENCODERS, "GPT2LMHeadModel", *PAIRS])
def test_a_padded_batch_gives_what_the_cut_sequence_gives(kind, method):
    if method == "elu" and kind.startswith("T5E"):
        pytest.skip("enough with one T5")
    model = convert(tiny(kind), method, **FEATURES[method])
    ids = tokens()
    short, mask = padded(ids, KEEP)
    whole = outputs(model, **inputs(model, short, mask))
    for i, n in enumerate(KEEP):
        given = {x: y[i : i + 1] for x, y in inputs(model, short).items()}
        cut = outputs(model, **{**given, "input_ids": ids[i : i + 1, :n]})
        got = whole[i : i + 1, : cut.shape[1]]
        assert distance(got, cut) < 1e-6, (kind, method)


def refuses(method, kind):
    """Facts of a method about a model: encoders, decoders, and T5, which is both and has a relative bias."""
    whole = method in ("skyformer", "wildcat", "nystromformer", "linformer")
    biased = method in ("softmax", *BIASED)
    return {
        "BertModel": "causal" if method == "rfa-gate" else None,
        "ViTModel": "causal" if method == "rfa-gate" else None,
        "GPT2LMHeadModel": "causal" if whole else None,
        "T5ForConditionalGeneration": "causal|relative bias" if whole or not biased else None,
    }[kind]


@pytest.mark.parametrize("method", kf.list_methods())
@pytest.mark.parametrize("kind", ["BertModel", "GPT2LMHeadModel", "T5ForConditionalGeneration", "ViTModel"])
def test_every_method_converts_what_it_can_and_refuses_the_rest(kind, method):
    model = tiny(kind, torch.float32)
    before, given = snapshot(model), inputs(model)
    setting = {**options(method), **({"max_length": 32} if method == "linformer" else {})}
    if refuses(method, kind):
        with pytest.raises(ValueError, match=refuses(method, kind)):
            convert(model, method, **setting)
        same(model, before)
        assert not hasattr(model, "conversion")
        return
    convert(model, method, **setting)
    kept = [x.name for x in model.conversion.layers if method == "softmax" or (method == "local" and x.cross)]
    assert model.conversion.kept == kept
    found = outputs(model, **given)
    assert torch.isfinite(found).all()
    assert torch.equal(found, outputs(model, **given))


@pytest.mark.parametrize("kind", ["BertModel", "MPNetModel", "LlamaForCausalLM", "BartForConditionalGeneration"])
def test_the_error_falls_with_the_number_of_features(kind):
    model = tiny(kind, torch.float32, size=0.5)
    given = inputs(model)
    want = outputs(model, **given)
    errors = {}
    for count in (32, 2048):
        draws = []
        for seed in range(0, 800, 100):
            convert(model, "favor+", num_features=count, seed=seed)
            draws.append(distance(outputs(model, **given), want))
            undo(model)
        errors[count] = torch.tensor(draws)
    few, many = errors[32], errors[2048]
    # 64 times the features: an eighth of the error. Half is asked for, beyond five standard errors.
    left = few / 2 - many
    assert left.mean() > 5 * left.std() / len(few) ** 0.5, errors


@pytest.mark.parametrize("kind", DECODERS)
def test_the_future_does_not_change_the_past(kind):
    model = convert(tiny(kind), "favor+", num_features=32)
    given = inputs(model)
    want = outputs(model, **given)
    given["input_ids"] = given["input_ids"].clone()
    given["input_ids"][:, 6:] = tokens(seed=9)[:, 6:]
    found = outputs(model, **given)
    torch.testing.assert_close(found[:, :6], want[:, :6], rtol=0, atol=1e-10)
    assert distance(found[:, 6:], want[:, 6:]) > 0.01


def test_layers_are_chosen_by_number_and_by_pattern():
    names = [x.name for x in find_attentions(tiny("BartForConditionalGeneration"))]
    assert len(names) == 6
    for layers, chosen in (
        ([0], names[:1]),
        ([-1, 0], [names[0], names[-1]]),
        (-1, names[-1:]),
        (["model.decoder.*"], names[2:]),
        ("*encoder_attn", [names[3], names[5]]),
        ([], []),
    ):
        model = convert(tiny("BartForConditionalGeneration"), "favor+", layers, num_features=16)
        assert model.conversion.replaced == chosen
        assert model.conversion.kept == [x for x in names if x not in chosen]
        assert list(cores(model)) == names


def test_layers_that_are_kept_are_exact():
    model = tiny("BertModel")
    given = inputs(model)
    with torch.no_grad():
        want = model(**given, output_hidden_states=True).hidden_states
        found = convert(model, "favor+", [1], num_features=16)(**given, output_hidden_states=True).hidden_states
    torch.testing.assert_close(found[1], want[1], rtol=0, atol=1e-10)
    assert distance(found[2], want[2]) > 0.01


def test_heads_that_are_exact_weigh_as_the_model_does():
    model = tiny("BertModel")
    given = inputs(model)
    with torch.no_grad():
        exact = tiny("BertModel", attn_implementation="eager")(**given, output_attentions=True).attentions[0]
        convert(model, "favor+", exact_heads={0: [2, 0], "*layer.1.*": range(HEADS)}, num_features=16)
        found = model(**given, output_attentions=True).attentions[0]
    torch.testing.assert_close(found[:, [0, 2]], exact[:, [0, 2]], rtol=0, atol=1e-10)
    assert distance(found[:, [1, 3]], exact[:, [1, 3]]) > 0.01
    first, second = model.conversion.layers
    assert (first.method, first.exact_heads, second.method, second.exact_heads) == ("favor+", (0, 2), "softmax", ())
    assert "heads 0, 2 exact" in str(model.conversion)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"method": "performer"}, "unknown method 'performer'"),
        ({"num_feature": 3}, "unknown option .*num_features"),
        ({"method": "softmax", "scale": 1.0}, "takes no options"),
        ({"layers": [2]}, "has 2 attentions, numbered from 0, got 2"),
        ({"layers": [-3]}, "has 2 attentions"),
        ({"layers": [True]}, "got True"),
        ({"layers": ["decoder.*"]}, "unknown attention 'decoder.*encoder.layer.0"),
        ({"exact_heads": {0: [4]}}, "heads 0 to 3, got 4"),
        ({"exact_heads": {0: [-1]}}, "heads 0 to 3, got -1"),
        ({"exact_heads": {"x": [0]}}, "unknown attention 'x'"),
    ],
)
def test_what_is_not_there_is_refused_and_nothing_is_converted(arguments, words):
    model = tiny("BertModel")
    before = snapshot(model)
    with pytest.raises(ValueError, match=words):
        convert(model, **{"method": "favor+", **arguments})
    same(model, before)


def test_a_model_and_a_method_in_the_wrong_order_are_refused_without_printing_the_model():
    model = tiny("BertModel")
    for call in (lambda: convert("favor+", model), lambda: convert(model, model), lambda: convert(model, "elu", model)):
        with pytest.raises(ValueError) as caught:
            call()
        assert len(str(caught.value)) < 300
    with pytest.raises(ValueError, match="a model and the name of a method, in this order, got str and BertModel"):
        convert("favor+", model)


class XAttention(nn.Module):
    """One projection, and not a known way to attend."""

    def __init__(self, width=8):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return (q @ k.mT).softmax(-1) @ v


class Both(nn.Module):
    """An attention that is covered, and one that is not."""

    def __init__(self):
        super().__init__()
        self.known, self.other = nn.MultiheadAttention(8, 2, batch_first=True), XAttention()

    def forward(self, x):
        return self.other(self.known(x, x, x, need_weights=False)[0])


def test_attention_that_is_not_covered_is_named_and_nothing_is_converted():
    kinds = {
        "DebertaV2Model": transformers.DebertaV2Config(vocab_size=61, hidden_size=16, num_hidden_layers=1,
                                                       num_attention_heads=2, intermediate_size=16,
                                                       max_position_embeddings=32),
        "XLNetModel": transformers.XLNetConfig(vocab_size=61, d_model=16, n_layer=1, n_head=2, d_inner=16),
    }  # fmt: skip
    for kind, config in kinds.items():
        model = getattr(transformers, kind)(config).eval()
        before, given = snapshot(model), {"input_ids": tokens()}
        want = outputs(model, **given)
        with pytest.raises(ValueError, match=r"no attention .*(DisentangledSelfAttention|XLNetRelativeAttention) has"):
            convert(model, "favor+")
        same(model, before)
        assert torch.equal(outputs(model, **given), want)
    for given in (None, {"x": torch.zeros(1, 3, 8)}):
        model = Both()
        with pytest.raises(ValueError, match=r"not covered.*other \(XAttention\)"):
            convert(model, "favor+", inputs=given)
        assert type(model.known) is nn.MultiheadAttention
    with pytest.raises(ValueError, match="has no attention"):
        convert(nn.Sequential(nn.Linear(2, 2)), "favor+")
    with pytest.raises(ValueError, match="convert the model of transformers inside"):
        convert(nn.ModuleList([tiny("BertModel")]), "favor+")


def test_windows_and_caps_are_refused_when_a_model_is_tried():
    config = transformers.MistralConfig(vocab_size=61, hidden_size=32, num_hidden_layers=1, num_attention_heads=4,
                                        num_key_value_heads=2, intermediate_size=40, sliding_window=16)  # fmt: skip
    model = transformers.MistralForCausalLM(config).eval()
    before = snapshot(model)
    with pytest.raises(ValueError, match="sliding window"):
        convert(model, "favor+")
    same(model, before)
    capped = transformers.Gemma2ForCausalLM(transformers.Gemma2Config(
        vocab_size=61, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        intermediate_size=40, layer_types=["full_attention"])).eval()  # fmt: skip
    before = snapshot(capped)
    with pytest.raises(ValueError, match="soft-capped logits"):
        convert(capped, "favor+")
    same(capped, before)
    config.sliding_window = None
    convert(transformers.MistralForCausalLM(config), "favor+", num_features=16)


def test_a_converted_model_is_not_converted_again():
    model = convert(tiny("BertForMaskedLM"), "favor+", num_features=16)
    with pytest.raises(ValueError, match="converted already"):
        convert(model, "loglinear")
    with pytest.raises(ValueError, match="converted already"):
        convert(nn.ModuleList([model]), "loglinear")
    part = tiny("BertForMaskedLM")
    convert(part.bert, "favor+", num_features=16)
    with pytest.raises(ValueError, match="a part of it is"):
        convert(part, "loglinear")
    with pytest.raises(ValueError, match="was not converted"):
        conversion(part)


@pytest.mark.parametrize("kind", ["BertModel", "MPNetModel", "T5ForConditionalGeneration", "LlamaForCausalLM"])
def test_undoing_gives_the_model_back(kind):
    model = tiny(kind)
    before, given = snapshot(model), inputs(model)
    names = {name: sorted(vars(x)) for name, x in model.named_modules()}
    want, implementation = outputs(model, **given), model.config._attn_implementation
    convert(model, "favor+", num_features=16)
    assert distance(outputs(model, **given), want) > 0.01
    undo(model)
    same(model, before)
    assert {name: sorted(vars(x)) for name, x in model.named_modules()} == names
    assert model.config._attn_implementation == implementation
    assert torch.equal(outputs(model, **given), want)
    with pytest.raises(ValueError, match="was not converted"):
        undo(model)
    convert(model, "elu")


def test_a_model_of_the_same_configuration_goes_on_as_it_was():
    first = tiny("BertModel")
    config = first.config
    second = tiny("BertModel", config=config)
    given = inputs(first)
    want = outputs(second, **given)
    convert(first, "favor+", num_features=16)
    assert torch.equal(outputs(second, **given), want)
    assert torch.equal(outputs(tiny("BertModel", config=config), **given), want)
    assert second.config is config
    assert first.config is not config
    convert(second, "favor+", num_features=16)
    assert torch.equal(outputs(second, **given), outputs(first, **given))


@pytest.mark.parametrize("kind", ["BertModel", "MPNetModel", "T5ForConditionalGeneration"])
def test_a_copy_is_a_model_of_its_own(kind):
    model = convert(tiny(kind), "loglinear", num_features=16)
    given = inputs(model)
    want = outputs(model, **given)
    other = copy.deepcopy(model)
    assert torch.equal(outputs(other, **given), want)
    with torch.no_grad():
        for x in cores(other).values():
            for y in x.parameters():
                y.add_(0.5)
    assert not torch.equal(outputs(other, **given), want)
    undo(other)
    assert torch.equal(outputs(model, **given), want)
    assert model.conversion.verified
    assert not hasattr(other, "conversion")


@pytest.mark.parametrize("kind", ["BertForMaskedLM", "AlbertModel", "MPNetModel", "GPT2LMHeadModel", *PAIRS])
def test_gradients_reach_maps_and_backbone(kind):
    model = convert(tiny(kind), "loglinear", num_features=8).train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if hasattr(module, "dropout") and isinstance(module.dropout, float):
            module.dropout = 0.0
    found = model(**inputs(model))
    (found.logits if "logits" in found else found.last_hidden_state).square().mean().backward()
    without = [name for name, x in model.named_parameters() if x.grad is None or not bool(x.grad.abs().sum() > 0)]
    allowed = ("pooler", "position_embeddings", "token_type", ".k_proj.bias", ".key.bias", ".k.bias")
    assert [x for x in without if not any(y in x for y in allowed)] == []
    assert any(".kernel." in name for name, _ in model.named_parameters())


def test_training_warns_that_attention_dropout_is_left_out():
    model = convert(tiny("BertModel", torch.float32, attention_probs_dropout_prob=0.1), "favor+", num_features=16)
    given = inputs(model)
    with pytest.warns(UserWarning, match="BertSelfAttention asks for attention dropout of 0.1") as seen:
        model.train()(**given)
    assert {str(x.message) for x in seen} == {str(seen[0].message)}  # one text: Python shows it once


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("first", ["convert", "cast"])
def test_half_precision_keeps_draws_and_comes_near(dtype, first):
    model, given = tiny("BertModel", torch.float32, size=0.8), inputs(tiny("BertModel"))
    exact = convert(copy.deepcopy(model), "favor+", num_features=64)
    if first == "cast":
        model.to(dtype)
    convert(model, "favor+", num_features=64)
    model.to(dtype)
    found = outputs(model, **given)
    assert found.dtype == dtype
    assert distance(found.float(), outputs(exact, **given)) < 0.05
    omega = [x for name, x in model.named_buffers() if name.endswith("omega")]
    assert omega
    assert all(x.dtype == torch.float32 for x in omega)


def test_a_state_dict_goes_round(tmp_path):
    model = convert(tiny("GPT2LMHeadModel"), "loglinear", num_features=16, seed=3)
    other = convert(tiny("GPT2LMHeadModel", size=1.0), "loglinear", num_features=16, seed=4)
    with torch.no_grad():
        for x in model.parameters():
            x.add_(0.01)
    torch.save(model.state_dict(), tmp_path / "x.pt")
    other.load_state_dict(torch.load(tmp_path / "x.pt", weights_only=True))
    assert torch.equal(outputs(other, **inputs(model)), outputs(model, **inputs(model)))


def test_conversions_are_described_as_plain_values():
    model = convert(tiny("AlbertModel"), "favor+", num_features=16)
    (layer,) = model.conversion.layers
    assert (layer.calls, layer.num_heads, layer.head_dim, layer.causal) == (2, HEADS, 8, False)
    assert str(model.conversion).endswith("favor+:num_features=16 (called 2x)")
    plain = json.loads(json.dumps(model.conversion.as_json()))
    assert type(model.conversion).from_json(plain) == model.conversion


def test_scales_are_those_of_each_layer():
    assert [x.scale for x in find_attentions(tiny("GPT2LMHeadModel"))] == [8**-0.5, 8**-0.5 / 2]
    model = convert(tiny("GPT2LMHeadModel"), "favor+", num_features=16)
    assert [x.scale for x in cores(model).values()] == [8**-0.5, 8**-0.5 / 2]
    assert [x.scale for x in cores(convert(tiny("GPT2LMHeadModel"), "elu")).values()] == [1.0, 1.0]


def test_layers_have_draws_of_their_own():
    first, second = cores(convert(tiny("BertModel"), "favor+", num_features=16)).values()
    assert not torch.equal(first.state_dict()["feature_map.omega"], second.state_dict()["feature_map.omega"])


@pytest.mark.parametrize("kind", ["BertModel", "GPT2LMHeadModel", "MPNetModel", "T5EncoderModel"])
def test_attentions_are_given_on_request(kind):
    model = convert(tiny(kind), "favor+", num_features=16)
    ids, mask = padded(tokens(), KEEP)
    found = model(input_ids=ids, attention_mask=mask, output_attentions=True)
    assert len(found.attentions) == 2
    for weights in found.attentions:
        assert weights.shape == (2, HEADS, 11, 11)
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, HEADS, 11, dtype=torch.float64))
        assert not weights[1, :, :, KEEP[1] :].any()


@pytest.mark.parametrize("kind", ["MPNetModel", "T5ForConditionalGeneration"])
def test_probing_leaves_a_converted_model_as_it_is(kind):
    model = convert(tiny(kind), "favor+", num_features=16)
    given, seen = inputs(model), []
    want = outputs(model, **given)

    def look(module, query, key, value, mask, **given):
        seen.append(module)
        return query.transpose(1, 2), None

    with probing(model, look):
        outputs(model, **given)
    assert len(seen) == len(model.conversion.layers)
    assert torch.equal(outputs(model, **given), want)


def test_landmarks_across_do_not_take_the_mask_of_the_keys_for_the_queries():
    model = convert(tiny("BartForConditionalGeneration"), "nystromformer", "*encoder_attn", num_landmarks=3)
    assert [x.cross for x in model.conversion.layers] == [False, False, False, True, False, True]
    ids, mask = padded(tokens(2, 7), [7, 4])
    given = inputs(model, ids, mask)
    whole = outputs(model, **given)
    cut = outputs(model, input_ids=ids[1:, :4], decoder_input_ids=given["decoder_input_ids"][1:])
    torch.testing.assert_close(whole[1:], cut, rtol=0, atol=1e-8)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_proposed_can_be_done(kind):
    model = tiny(kind)
    for distilled in (False, True):
        method, options = kf.modules.parse_method(propose(model, distilled=distilled))
        convert(model, method, **options)
        outputs(model, **inputs(model))
        undo(model)
        pair = any(x.cross for x in find_attentions(model))
        assert method == ("loglinear" if distilled or pair else "local" if kind in DECODERS else "wildcat")


def test_a_reason_leaves_the_number_of_features_to_the_settings():
    found = proposal(tiny("GPT2LMHeadModel"), distilled=True)
    assert found.features == 64
    assert "features" not in found.why  # others may be asked for


def test_a_decoder_without_training_takes_what_measures_better():
    found = proposal(tiny("GPT2LMHeadModel"), distilled=False, compare=lambda specs: {x: -len(x) for x in specs})
    assert found.attention == "loglinear:window=64:sinks=4"
    assert "local:window=64:sinks=4 -23" in found.why
    assert "no texts" in proposal(tiny("GPT2LMHeadModel"), distilled=False).why
