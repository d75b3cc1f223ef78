"""Models with attentions that no kernel can replace: those stay as they are, the others are converted."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from torch import nn
from transformers import DynamicCache, StaticCache
from transformers.models.t5gemma.configuration_t5gemma import T5GemmaModuleConfig

from kernelformer.conversion.measure import measure
from kernelformer.hf import StateCache, convert, cores, load, new_cache, undo
from kernelformer.hf import attend as pattern_mask
from kernelformer.hf.convert import Conversion
from kernelformer.hf.find import find_attentions
from kernelformer_lab.analysis.attention_pictures import attention_pairs
from tiny_models import HEADS, KINDS, VOCAB, WIDTH, outputs, padded, tiny, tokens

_MIXED = {
    "vocab_size": VOCAB, "hidden_size": WIDTH, "num_hidden_layers": 4, "num_attention_heads": HEADS,
    "num_key_value_heads": 2, "intermediate_size": 40, "max_position_embeddings": 64, "sliding_window": 4,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_TYPES = ["sliding_attention", "full_attention"] * 2
_HEAD = {"head_dim": 8, "layer_types": _TYPES}
# Configuration, settings, and the numbers of the attentions that are replaced.
MIXED = {
    "Gemma3ForCausalLM": ("Gemma3TextConfig", {**_MIXED, **_HEAD}, [1, 3]),
    "Gemma2ForCausalLM": ("Gemma2Config", {**_MIXED, **_HEAD, "attn_logit_softcapping": None}, [1, 3]),
    "Qwen2ForCausalLM": ("Qwen2Config", {**_MIXED, "use_sliding_window": True, "max_window_layers": 2}, [0, 1]),
    "Cohere2ForCausalLM": ("Cohere2Config", {**_MIXED, **_HEAD}, [1, 3]),
    "ModernBertModel": ("ModernBertConfig", {"vocab_size": VOCAB, "hidden_size": WIDTH, "num_hidden_layers": 4,
                                             "num_attention_heads": HEADS, "intermediate_size": 40, "pad_token_id": 0,
                                             "local_attention": 4, "global_attn_every_n_layers": 2}, [0, 2]),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _kinds(monkeypatch):
    for kind, (config, settings, _) in MIXED.items():
        monkeypatch.setitem(KINDS, kind, (config, settings))


def batch(model, side="right"):
    ids, mask = padded(tokens(3, 11), [11, 7, 5], side)
    given = {"input_ids": ids, "attention_mask": mask}
    if model.can_generate():
        given |= {"position_ids": (mask.cumsum(1) - 1).clamp_min(0), "use_cache": False}
    return given


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("kind", MIXED)
def test_exact_attention_changes_nothing_and_kernels_change_full_layers_only(kind, side, tmp_path):
    model = tiny(kind, dtype=torch.float32)
    given = batch(model, side)
    real, want = given["attention_mask"].bool(), outputs(model, **given)
    convert(model, "softmax")
    torch.testing.assert_close(outputs(model, **given)[real], want[real], rtol=0, atol=1e-5)
    undo(model)
    assert torch.equal(outputs(model, **given)[real], want[real])
    convert(model, "favor+", num_features=16)
    layers = model.conversion.layers
    assert [i for i, x in enumerate(layers) if x.replaced] == MIXED[kind][2]
    assert all(x.replaced != x.reason.startswith("a sliding window (sliding_window=") for x in layers)
    assert model.conversion.verified
    assert list(cores(model)) == model.conversion.replaced
    assert str(model.conversion).count("kept: a sliding window") == 2
    got = outputs(model, **given)
    model.save_pretrained(tmp_path)
    again = load(tmp_path)
    assert again.conversion == model.conversion
    assert torch.equal(outputs(again, **given)[real], got[real])


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("kind", ["Qwen2ForCausalLM", "ModernBertModel"])
def test_windows_are_computed_in_blocks_and_never_as_pairs_of_all_tokens(kind, side, monkeypatch):
    monkeypatch.setattr("kernelformer.hf.attend._BLOCK", 3)
    model, sizes = convert(tiny(kind), "softmax"), []
    make = pattern_mask.sdpa_mask
    monkeypatch.setattr(pattern_mask, "sdpa_mask", lambda **x: sizes.append(x["kv_length"]) or make(**x))
    ids, mask = padded(tokens(2, 23), [23, 9], side)
    given = {"input_ids": ids, "attention_mask": mask}
    if side == "right" and model.can_generate():  # the last part comes after a window that a cache keeps
        cache = new_cache(model)
        first = outputs(model, input_ids=ids[:, :6], attention_mask=mask[:, :6], past_key_values=cache)
        got = torch.cat([first, outputs(model, input_ids=ids[:, 6:], attention_mask=mask, past_key_values=cache)], 1)
    else:
        got = outputs(model, **given)
    assert 0 < max(sizes) < 16
    undo(model)
    real = mask.bool()
    torch.testing.assert_close(got[real], outputs(model, **given)[real], rtol=0, atol=1e-6)


def test_packed_rows_are_refused_by_mixtures_too():
    model = convert(tiny("Qwen2ForCausalLM"), "elu")
    places = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5]]).expand(2, -1)
    with pytest.raises(ValueError, match="packed into one row"):
        outputs(model, input_ids=tokens(), position_ids=places, use_cache=False)


@pytest.mark.parametrize("kind", ["Gemma3ForCausalLM", "Qwen2ForCausalLM"])  # a window first, and one last
def test_mixtures_generate_from_states_and_windows(kind):
    model = convert(tiny(kind), "favor+", num_features=16)
    given = batch(model, "left")
    prompt = {x: given[x] for x in ("input_ids", "attention_mask")}
    for more in ({}, {"num_beams": 2}):
        how = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, **more}
        want = model.generate(**prompt, use_cache=False, **how)
        assert torch.equal(model.generate(**prompt, **how), want)
    assert torch.equal(model.generate(**prompt, past_key_values=DynamicCache(config=model.config), **how), want)
    cache, sizes, parts, at = new_cache(model), [], [], 0
    for n in (6, 1, 1, 3):
        more = {"input_ids": given["input_ids"][:, at : at + n], "attention_mask": given["attention_mask"][:, : at + n]}
        more["position_ids"] = given["position_ids"][:, at : at + n]
        parts.append(outputs(model, **more, past_key_values=cache, use_cache=True))
        sizes.append(cache.nbytes)
        at += n
    real = given["attention_mask"].bool()
    torch.testing.assert_close(torch.cat(parts, 1)[real], outputs(model, **given)[real], rtol=0, atol=1e-6)
    assert isinstance(cache, StateCache)
    assert sizes[1] == sizes[2] >= sizes[3]  # a window of 4 is full, and states do not grow
    with pytest.raises(ValueError, match="cannot go back"):
        cache.crop(-1)


def test_soft_caps_in_some_layers_are_kept_exact_and_others_are_converted():
    model = tiny("Gemma2ForCausalLM", dtype=torch.float32, layer_types=["full_attention"] * 4)
    model.model.layers[2].self_attn.attn_logit_softcapping = 2.0
    given = batch(model, "left")
    real, want = given["attention_mask"].bool(), outputs(model, **given)
    convert(model, "softmax")
    torch.testing.assert_close(outputs(model, **given)[real], want[real], rtol=0, atol=1e-5)
    undo(model)
    convert(model, "elu")
    assert [x.reason[:28] for x in model.conversion.layers if not x.replaced] == ["soft-capped logits (softcap="]
    prompt = {x: given[x] for x in ("input_ids", "attention_mask")}
    how = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False}
    assert torch.equal(model.generate(**prompt, **how), model.generate(**prompt, use_cache=False, **how))
    weights = model(tokens(), output_attentions=True, use_cache=False).attentions
    assert [tuple(x.shape) for x in weights] == [(2, HEADS, 11, 11)] * 4
    torch.testing.assert_close(weights[2].sum(-1), torch.ones(2, HEADS, 11))


def test_pairs_of_encoder_and_decoder_keep_windows_and_capped_cross_attention():
    torch.manual_seed(0)
    sizes = {**_MIXED, "num_hidden_layers": 2, "head_dim": 8, "attn_logit_softcapping": None}
    halves = {x: T5GemmaModuleConfig(**sizes) for x in ("encoder", "decoder")}
    ids = {x: _MIXED[x] for x in ("bos_token_id", "eos_token_id", "pad_token_id")}
    model = transformers.T5GemmaForConditionalGeneration(transformers.T5GemmaConfig(**halves, vocab_size=VOCAB, **ids))
    model.double().eval().model.decoder.layers[1].cross_attn.attn_logit_softcapping = 2.0
    convert(model, "elu")
    assert [x.reason.split(" (")[0] for x in model.conversion.layers] == [
        "a sliding window", "", "a sliding window", "", "", "soft-capped logits",
    ]  # fmt: skip
    source, mask = padded(tokens(2, 9), [9, 6])
    how = {"attention_mask": mask, "max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    assert torch.equal(model.generate(source, **how), model.generate(source, use_cache=False, **how))


def test_what_was_kept_is_not_compared_with_the_original():
    original = tiny("Gemma3ForCausalLM", dtype=torch.float32)
    student = convert(tiny("Gemma3ForCausalLM", dtype=torch.float32), "softmax")
    given = {"input_ids": tokens(), "use_cache": False}
    assert [x.name for x in measure(original, student, [given]).rows] == list(cores(student))
    assert [x.name for x in attention_pairs(original, student, given)] == list(cores(student))


class Both(nn.Module):
    """One attention that can be converted beside DeBERTa's, which cannot."""

    def __init__(self):
        super().__init__()
        config = transformers.DebertaV2Config(
            vocab_size=VOCAB, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
            max_position_embeddings=32, relative_attention=True, pos_att_type=["p2c", "c2p"],
        )  # fmt: skip
        self.first = transformers.DebertaV2Model(config)
        self.second = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, ids):
        x = self.first(ids).last_hidden_state
        return self.second(x, x, x, need_weights=False)[0]


@pytest.mark.parametrize("given", [{"ids": tokens()}, None])
def test_disentangled_attention_is_named_and_kept(given):
    model = Both().eval()
    with pytest.raises(ValueError, match=r"DebertaV2Model has no .* DisentangledSelfAttention has disentangled .*BERT"):
        convert(model.first, "favor+")
    with pytest.raises(ValueError, match=r"layers=\[0\] means first.* disentangled .* have the numbers 1\."):
        convert(model, "favor+", layers=[0], inputs=given)
    want = model(tokens())
    convert(model, "softmax", inputs=given)
    torch.testing.assert_close(model(tokens()), want)
    assert [x.reason[:12] for x in model.conversion.layers] == ["disentangled", ""]


@pytest.mark.parametrize(
    ("kind", "settings", "words"),
    [
        ("Mistral", {}, "MistralAttention has a sliding window"),
        ("Gemma2", _HEAD, "Gemma2Attention has soft-capped logits"),
        ("GptOss", {**_HEAD, "num_local_experts": 2, "num_experts_per_tok": 1}, "GptOssAttention has sinks of its own"),
    ],
)
def test_a_model_in_which_nothing_can_be_converted_says_why(kind, settings, words):
    config = getattr(transformers, f"{kind}Config")(**{**_MIXED, "num_hidden_layers": 2, "layer_types": _TYPES[:2]}
                                                    | {**settings, "layer_types": _TYPES[:2]})  # fmt: skip
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    for layers in (None, [0]):
        with pytest.raises(ValueError, match=rf"no attention that a kernel could replace: {words}"):
            convert(model, "favor+", layers)
    assert not hasattr(model, "conversion")


def test_layers_that_are_kept_cannot_be_chosen():
    model = tiny("Gemma3ForCausalLM")
    names = [x.name for x in find_attentions(model)]
    for wrong in (0, [1, 2], names[0], [f"{names[2]}*"]):
        with pytest.raises(ValueError, match=r"means model\.layers\.[02].* sliding window .* have the numbers 1, 3\."):
            convert(model, "favor+", wrong)
    with pytest.raises(ValueError, match="sliding window"):
        convert(model, "favor+", exact_heads={0: [1]})
    convert(model, "favor+", "*", exact_heads={"*": [1]}, num_features=16)
    assert [x.exact_heads for x in model.conversion.layers] == [(), (1,), (), (1,)]


def test_caches_of_other_classes_are_named():
    model = convert(tiny("Gemma3ForCausalLM"), "elu")

    class Odd(transformers.Cache):
        pass

    static = StaticCache(config=model.config, max_cache_len=32)
    for cache, words in ((Odd(layers=[]), "Odd, a cache that"), (static, "StaticCache, a cache of fixed length that")):
        for call in (model, model.generate):
            with pytest.raises(ValueError, match=rf"Gemma3ForCausalLM got a {words} .* give .*new_cache\(model\)"):
                call(tokens(), past_key_values=cache)
    with pytest.raises(
        ValueError, match=r"cache_implementation='static'; leave it out, or give past_key_values: .*new"
    ):
        model.generate(tokens(), cache_implementation="static")
    with pytest.raises(ValueError, match=r"is kept as it was .* use the cache that kernelformer\.hf\.new_cache"):
        model(tokens(), past_key_values=StateCache())


def test_records_without_reasons_are_read_and_written_as_before():
    plan = convert(tiny("LlamaForCausalLM"), "elu", layers=[0]).conversion
    rows = json.loads(json.dumps(plan.as_json()))
    assert all("reason" not in x for x in rows)
    assert Conversion.from_json(rows) == plan
