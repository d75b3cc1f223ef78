"""Every method as an attention implementation of transformers."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import transformers
from transformers import DynamicCache, StaticCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import kernelformer as kf
from kernelformer.hf import StateCache, convert, register
from kernelformer.hf.attend import CORE, attend, bias_table, make_mask, read_mask
from kernelformer.hf.register import Registered
from tiny_models import HEADS, PAIRS, distance, inputs, outputs, padded, tiny, tokens

NAMES = list(kf.list_methods())
WHOLE = ["skyformer", "wildcat", "nystromformer", "linformer"]  # see the whole sequence at once
CAUSAL = [x for x in NAMES if x not in WHOLE]


@pytest.fixture(autouse=True)
def _names():
    assert register(num_features=16, num_landmarks=4) == NAMES
    yield
    register()


@pytest.mark.parametrize("method", [x for x in NAMES if x != "rfa-gate"])
def test_every_method_is_an_implementation_of_encoders(method):
    model = tiny("BertModel", attn_implementation=method)
    ids, mask = padded(tokens(), [11, 4])
    whole, cut = outputs(model, input_ids=ids, attention_mask=mask), outputs(model, input_ids=ids[1:, :4])
    if method != "linformer":  # mixes keys by their place, and over all of them
        torch.testing.assert_close(whole[1:, :4], cut, rtol=0, atol=1e-7)
    kernels = [x for name, x in model.named_modules() if name.endswith(".kernel")]
    assert [x.method for x in kernels] == [method] * 2
    assert torch.isfinite(whole).all()


@pytest.mark.parametrize("method", CAUSAL)
@pytest.mark.parametrize("kind", ["GPT2LMHeadModel", "LlamaForCausalLM"])
def test_every_causal_method_keeps_the_future_out_of_decoders(kind, method):
    model = tiny(kind, attn_implementation=method)
    ids, mask = padded(tokens(), [11, 8], "left")
    given = {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp_min(0)}
    want = outputs(model, input_ids=ids, **given)
    other = ids.clone()
    other[:, 6:] = tokens(seed=9)[:, 6:]
    found = outputs(model, input_ids=other, **given)
    real = mask.bool()[:, :6]
    torch.testing.assert_close(found[:, :6][real], want[:, :6][real], rtol=0, atol=1e-9)
    assert distance(found[:, 6:], want[:, 6:]) > 0.01
    cut = outputs(model, input_ids=ids[1:, 3:])
    torch.testing.assert_close(want[1:, 3:], cut, rtol=0, atol=1e-6)


def as_many(model):
    """Inputs of an encoder-decoder with as many queries as keys in cross-attention, and padded keys."""
    ids, mask = padded(tokens(2, 7), [7, 4])
    return {**inputs(model, ids, mask), "decoder_input_ids": tokens(2, 7, seed=2)}


@pytest.mark.parametrize("method", ["wildcat", "skyformer", "nystromformer"])
def test_landmarks_across_do_not_take_the_mask_of_the_keys_for_the_queries(method):
    model = tiny("BartForConditionalGeneration")
    other = copy.deepcopy(model.config)  # decoders attend to themselves by something causal
    other._attn_implementation_internal = method
    for layer in model.model.decoder.layers:
        layer.encoder_attn.config = other
    given = as_many(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole = outputs(model, **given)
        cut = outputs(model, input_ids=given["input_ids"][1:, :4], decoder_input_ids=given["decoder_input_ids"][1:])
    torch.testing.assert_close(whole[1:], cut, rtol=0, atol=1e-8)


@pytest.mark.parametrize("kind", ["BartForConditionalGeneration", "BertLMHeadModel"])
def test_windows_are_left_out_across(kind):
    model = tiny(kind, attn_implementation="local")  # its window is longer than the texts: all of it is exact
    given = as_many(model) if model.config.is_encoder_decoder else inputs(model)
    torch.testing.assert_close(outputs(model, **given), outputs(tiny(kind), **given), rtol=0, atol=1e-6)
    near = {name: x.has_near for name, x in model.named_modules() if name.endswith(f".{CORE}")}
    assert {name for name, x in near.items() if not x} == {x for x in near if "encoder_attn" in x or "cross" in x}
    assert len(set(near.values())) == 2


def test_an_attention_that_does_not_say_what_it_is_gets_no_window_and_no_landmarks():
    query = torch.zeros(2, HEADS, 5, 8)
    module = Module()
    module.is_causal, module.config = False, transformers.BartConfig()
    mask = torch.ones(2, 1, 1, 5, dtype=torch.bool)
    mask[0, ..., 3:] = False
    for method, words in (("local", r"window=64, sinks=4.*'local'; use .*convert"), ("nystromformer", "mask of the")):
        with pytest.raises(ValueError, match=words):
            Registered(method, {})(module, query, query, query, mask)
        module._modules.clear()


@pytest.mark.parametrize("method", WHOLE)
def test_methods_that_need_the_whole_sequence_refuse_decoders(method):
    with pytest.raises(ValueError, match="causal"):
        outputs(tiny("GPT2LMHeadModel", attn_implementation=method), input_ids=tokens())


@pytest.mark.parametrize("kind", ["BertModel", "LlamaForCausalLM", *PAIRS])
def test_softmax_is_the_models_own_attention(kind):
    own, ours = tiny(kind), tiny(kind, attn_implementation="softmax")
    ids, mask = padded(tokens(), [11, 7])
    given = inputs(own, ids, mask)
    want, found = outputs(own, **given), outputs(ours, **given)
    real = slice(None) if own.config.is_encoder_decoder else mask.bool()
    torch.testing.assert_close(found[real], want[real], rtol=0, atol=1e-10)


def test_a_registered_method_is_what_a_conversion_gives():
    for kind in ("BertModel", "LlamaForCausalLM"):
        model = convert(tiny(kind), "favor+", num_features=16)
        given = inputs(model)
        torch.testing.assert_close(
            outputs(tiny(kind, attn_implementation="favor+"), **given), outputs(model, **given), rtol=0, atol=1e-12
        )


def test_the_relative_bias_of_t5_stays_one():
    model = tiny("T5ForConditionalGeneration", attn_implementation="favor+")
    given = inputs(model)
    with_bias = outputs(model, **given)
    with torch.no_grad():
        for name, x in model.named_parameters():
            if "relative_attention_bias" in name:
                x.zero_()
    assert distance(outputs(model, **given), with_bias) > 0.01
    with pytest.raises(ValueError, match="takes no relative position bias"):
        outputs(tiny("T5ForConditionalGeneration", attn_implementation="gaussian"), **given)


@pytest.mark.parametrize("kind", ["LlamaForCausalLM", "T5ForConditionalGeneration"])
def test_registered_models_generate(kind):
    model = tiny(kind, attn_implementation="favor+")
    ids, mask = padded(tokens(), [11, 7], "left")
    given = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 6, "min_new_tokens": 6, "pad_token_id": 0}
    want = model.generate(**given, use_cache=False)
    assert torch.equal(model.generate(**given), want)
    if kind == "LlamaForCausalLM":
        assert torch.equal(model.generate(**given, past_key_values=StateCache()), want)


def test_attentions_are_given_on_request():
    for kind in ("BertModel", "GPT2LMHeadModel"):
        found = tiny(kind, attn_implementation="elu")(tokens(), output_attentions=True)
        assert [tuple(x.shape) for x in found.attentions] == [(2, HEADS, 11, 11)] * 2


class Module(torch.nn.Module):
    is_causal = True


@pytest.fixture
def call():
    core = kf.build_attention("favor+", head_dim=8, num_heads=HEADS, num_features=16)
    q = torch.randn(2, HEADS, 5, 8, generator=torch.Generator().manual_seed(0))

    def attending(mask=None, **keywords):
        return attend(core, Module(), q, q, q, mask, scaling=8**-0.5, **keywords)

    return attending


@pytest.mark.parametrize(
    ("keyword", "value", "words"),
    [
        ("softcap", 30.0, "soft-capped logits"),
        ("sliding_window", 4, "a sliding window"),
        ("s_aux", torch.zeros(HEADS), "attention sinks"),
        ("cu_seq_lens_q", torch.tensor([0, 5]), "packed sequences"),
        ("cache", object(), "a paged cache"),
        ("head_mask", torch.ones(HEADS), "a mask of heads"),
        ("novelty", torch.zeros(3), r"gets a tensor novelty \(3,\), which 'favor\+' does not know"),
    ],
)
def test_keywords_that_cannot_be_honoured_are_refused(call, keyword, value, words):
    with pytest.raises(ValueError, match=words):
        call(**{keyword: value})
    call(**{keyword: None})


def test_keywords_that_are_no_tensors_and_no_switch_of_attention_pass(call):
    want = call()[0]
    assert torch.equal(call(tokenizer=object(), output_router_logits=True, position_embeddings=(want, want))[0], want)


def test_packed_sequences_are_refused():
    model = tiny("LlamaForCausalLM", attn_implementation="favor+")
    places = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5]]).expand(2, -1)
    with pytest.raises(ValueError, match="packed into one row"):
        outputs(model, input_ids=tokens(), position_ids=places, use_cache=False)
    outputs(model, input_ids=tokens(), position_ids=places, attention_mask=torch.ones(2, 11))


def test_windows_are_refused():
    config = transformers.MistralConfig(vocab_size=61, hidden_size=32, num_hidden_layers=1, num_attention_heads=4,
                                        num_key_value_heads=2, intermediate_size=40, sliding_window=4)  # fmt: skip
    model = transformers.MistralForCausalLM._from_config(config, attn_implementation="favor+")
    with pytest.raises(ValueError, match="sliding window"):
        model(tokens())


def test_caches_of_fixed_length_are_refused():
    model = tiny("LlamaForCausalLM", attn_implementation="favor+")
    with pytest.raises(ValueError, match="fixed length"):
        outputs(model, input_ids=tokens(), past_key_values=StaticCache(config=model.config, max_cache_len=32))


def test_states_and_a_bias_as_a_matrix_do_not_go_together():
    model = tiny("T5ForConditionalGeneration", attn_implementation="favor+")
    cache = transformers.EncoderDecoderCache(StateCache(), StateCache(cross=True))
    with pytest.raises(ValueError, match="for converted models"):
        outputs(model, **inputs(model), past_key_values=cache)


def test_masks_of_the_callers_own_hide_keys_and_the_future_and_nothing_else(call):
    causal = torch.ones(5, 5, dtype=torch.bool).tril().expand(2, 1, 5, 5)
    keys = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]).bool()
    want = call()[0]
    torch.testing.assert_close(call(causal)[0], want)
    least = torch.finfo(torch.float32).min
    torch.testing.assert_close(call(torch.zeros(2, 1, 5, 5).masked_fill(~causal, least))[0], want)
    torch.testing.assert_close(call(torch.zeros(2, 1, 5, 5).masked_fill(~causal, -torch.inf))[0], want)
    both = causal & keys[:, None, None]
    torch.testing.assert_close(call(both)[0][1, :3], want[1, :3])
    everything = call(is_causal=False)[0]
    assert not torch.allclose(everything, want)
    torch.testing.assert_close(call(torch.ones(2, 1, 1, 5, dtype=torch.bool))[0], everything)
    nothing = torch.zeros(1, 1, 1, 1, dtype=torch.bool).expand(2, 1, 1, 5)
    assert not call(nothing)[0].any()
    one = causal.clone()
    one[0, 0, 4, 0] = False
    for wrong, words in (
        (one, "cannot hide single pairs"),
        (torch.full((2, 1, 5, 5), 0.5), "must be 0 or the smallest number"),
        (torch.ones(2, HEADS, 5, 5, dtype=torch.bool), "one for all heads"),
    ):
        with pytest.raises(ValueError, match=words):
            call(wrong)


def test_masks_take_no_memory_of_the_square():
    for causal in (True, False):
        function = transformers.masking_utils.causal_mask_function if causal else (
            transformers.masking_utils.bidirectional_mask_function)  # fmt: skip
        mask = make_mask(2, 9, 9, mask_function=function, attention_mask=torch.ones(2, 9).bool())
        assert mask.untyped_storage().nbytes() == 1
        mask = make_mask(2, 9, 9, mask_function=function, attention_mask=torch.eye(2, 9).bool())
        assert mask.numel() == 18
        query = torch.zeros(2, 1, 9, 1)
        found, order = read_mask(mask, query, query, not causal)
        assert torch.equal(found, torch.eye(2, 9).bool())
        assert order is causal


def test_a_bias_must_be_one_of_distances():
    L, S = 3, 5
    table = torch.randn(2, L + S - 1)
    matrix = table[:, torch.arange(S) - torch.arange(L)[:, None] + L - 1].unsqueeze(0)
    assert torch.equal(bias_table(matrix), table)
    assert bias_table(torch.zeros(1, 2, 3, 3)) is None
    with pytest.raises(ValueError, match="more than the distance"):
        bias_table(torch.randn(1, 2, 3, 3))
    with pytest.raises(ValueError, match="the same for all samples"):
        bias_table(torch.randn(2, 2, 3, 3))
    learned = torch.zeros(1, 2, 3, 3, requires_grad=True) * 1
    assert bias_table(learned) is not None


def test_dropout_warns_once_in_a_run():
    model = tiny("BertModel", attn_implementation="favor+").train()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")
        for _ in range(3):
            model(tokens())
    assert len([x for x in seen if "attention dropout" in str(x.message)]) == 1


def test_registering_again_changes_the_options():
    model = tiny("BertModel", attn_implementation="favor+")
    first = outputs(model, input_ids=tokens())
    core = model.encoder.layer[0].attention.self.kernel
    assert core.feature_dim == 16
    assert torch.equal(outputs(copy.deepcopy(model), input_ids=tokens()), first)
    register(num_features=32)
    outputs(model, input_ids=tokens())
    assert model.encoder.layer[0].attention.self.kernel.feature_dim == 32
    model.set_attn_implementation("elu")
    outputs(model, input_ids=tokens())
    assert model.encoder.layer[0].attention.self.kernel.method == "elu"
    with pytest.raises(ValueError, match="unknown option of the methods, 'num_feature'"):
        register(num_feature=3)


def test_a_core_built_without_gradients_can_be_trained():
    model = tiny("BertModel", attn_implementation="loglinear")
    with torch.inference_mode():
        model(tokens())
    model(tokens()).last_hidden_state.square().sum().backward()
    grads = [x.grad for name, x in model.named_parameters() if ".kernel." in name]
    assert grads
    assert all(x is not None and bool(x.any()) for x in grads)


def test_the_implementation_of_converted_models_is_not_for_others():
    convert(tiny("BertModel"), "elu")
    assert "kernelformer" in ALL_ATTENTION_FUNCTIONS.valid_keys()
    with pytest.raises(ValueError, match=r"set by kernelformer\.hf\.convert"):
        outputs(tiny("BertModel", attn_implementation="kernelformer"), input_ids=tokens())


def test_a_model_with_registered_cores_can_be_converted():
    model = tiny("GPT2LMHeadModel", attn_implementation="elu")
    outputs(model, input_ids=tokens())
    convert(model, "favor+", num_features=16)
    want = outputs(convert(tiny("GPT2LMHeadModel"), "favor+", num_features=16), input_ids=tokens())
    assert torch.equal(outputs(model, input_ids=tokens()), want)


def test_kept_keys_and_values_go_on_in_pieces():
    model, ids = tiny("GPT2LMHeadModel", attn_implementation="favor+"), tokens()
    want, cache = outputs(model, input_ids=ids), DynamicCache(config=model.config)
    parts = [outputs(model, input_ids=x, past_key_values=cache) for x in ids.split([4, 1, 6], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), want, rtol=0, atol=1e-9)
