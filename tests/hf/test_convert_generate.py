"""Generation by converted decoders: from states of constant size, and the same as from all tokens at once."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache, StaticCache

from kernelformer.hf import StateCache, convert, new_cache
from tiny_models import DECODERS, PAIRS, first_end, inputs, letters, outputs, padded, tiny, tokens

NEW = 7
WAYS = {
    "favor+": ("favor+", {"num_features": 16}),
    "loglinear": ("loglinear", {"num_features": 16}),
    "elu": ("elu", {}),
    "one layer exact": ("favor+", {"num_features": 16, "layers": [0]}),
    "some heads exact": ("favor+", {"num_features": 16, "exact_heads": {0: [1], -1: [0, 3]}}),
    "near": ("favor+", {"num_features": 16, "window": 10, "sinks": 2}),  # T5's bias has a reach of 10
    "near by loglinear": ("loglinear", {"num_features": 16, "window": 10, "sinks": 2}),
    "local": ("local", {"window": 10, "sinks": 2}),
    "rfa-gate": ("rfa-gate", {"num_features": 16}),
}
HOW = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "temperature": 1.5},
    "beams": {"num_beams": 3, "do_sample": False},
}


def converted(kind, way="favor+"):
    method, options = WAYS[way]
    return convert(tiny(kind), method, **options)


def generate(model, given, **options):
    torch.manual_seed(5)
    given = {name: x for name, x in given.items() if name != "decoder_input_ids"}
    # Any token may come, the last one too: all rows go on to the end.
    return model.generate(**given, max_new_tokens=NEW, min_new_tokens=NEW, pad_token_id=0, **options)


def left_padded(model):
    ids, mask = padded(tokens(3, 8), [8, 5, 3], "left")
    return inputs(model, ids, mask)


@pytest.mark.parametrize(
    ("way", "how"),
    [*((x, "greedy") for x in ("loglinear", "elu", "one layer exact"))]
    + [(x, how) for x in ("favor+", "some heads exact") for how in HOW],
)
@pytest.mark.parametrize("kind", ["GPT2LMHeadModel", "LlamaForCausalLM", "T5ForConditionalGeneration"])
def test_generating_from_states_is_generating_from_all_tokens(kind, way, how):
    model = converted(kind, way)
    given = left_padded(model)
    want = generate(model, given, use_cache=False, **HOW[how])
    assert torch.equal(generate(model, given, **HOW[how]), want)
    assert want.shape[1] > NEW


@pytest.mark.parametrize("how", ["greedy", "beams"])
@pytest.mark.parametrize("kind", ["BartForConditionalGeneration", "UMT5ForConditionalGeneration", "BertLMHeadModel"])
def test_other_models_generate_from_states_too(kind, how):
    model = converted(kind, "some heads exact")
    given = left_padded(model)
    if kind == "BertLMHeadModel":  # transformers does not repeat a context for beams
        how = "greedy"
    want = generate(model, given, use_cache=False, **HOW[how])
    assert torch.equal(generate(model, given, **HOW[how]), want)


@pytest.mark.parametrize("kind", ["GPT2LMHeadModel", "LlamaForCausalLM", *PAIRS])
def test_generating_stops_at_a_string(kind):
    model, tokenizer = converted(kind), letters()
    given = inputs(model, tokens(1, 8))
    whole = generate(model, given, do_sample=False)
    word = tokenizer.decode(whole[0, -3:-1])
    end = first_end(tokenizer.decode(whole[0]), word, 1 if model.config.is_encoder_decoder else 8)
    assert end < whole.shape[1]
    options = {"stop_strings": [word], "tokenizer": tokenizer, "do_sample": False}
    assert torch.equal(generate(model, given, **options), whole[:, :end])


@pytest.mark.parametrize("way", ["near by loglinear", "local"])
@pytest.mark.parametrize("kind", ["LlamaForCausalLM", "T5ForConditionalGeneration", "BartForConditionalGeneration"])
def test_windows_and_sinks_generate_by_beams(kind, way):
    model = converted(kind, way)
    given = left_padded(model)
    want = generate(model, given, use_cache=False, **HOW["beams"])
    assert torch.equal(generate(model, given, **HOW["beams"]), want)
    windows = {x.options.get("window") for x in model.conversion.layers if x.cross}
    assert windows <= {None}


def test_a_gate_that_forgets_generates_too():
    model = convert(tiny("GPT2LMHeadModel"), "rfa-gate", num_features=16)
    given = left_padded(model)
    want = generate(model, given, use_cache=False)
    assert torch.equal(generate(model, given), want)
    assert torch.equal(generate(model, given, past_key_values=DynamicCache(config=model.config)), want)


def step(model, cache, ids, at, given):
    """Logits of tokens from number ``at`` on."""
    if model.config.is_encoder_decoder:
        own = {"decoder_input_ids": ids, **{x: given[x] for x in ("input_ids", "attention_mask") if x in given}}
    else:
        own = {"input_ids": ids, **{x: y for x, y in given.items() if x.startswith("encoder_")}}
        if "attention_mask" in given:
            own["attention_mask"] = given["attention_mask"][:, : at + ids.shape[1]]
            if "position_ids" in given:
                own["position_ids"] = given["position_ids"][:, at : at + ids.shape[1]]
    return outputs(model, **own, past_key_values=cache, use_cache=True)


def dynamic(model):
    if model.config.is_encoder_decoder or getattr(model.config, "add_cross_attention", False):
        return EncoderDecoderCache(DynamicCache(config=model.config), DynamicCache(config=model.config))
    return DynamicCache(config=model.config)


@pytest.mark.parametrize(
    ("way", "make"),
    [(x, new_cache) for x in ("favor+", "some heads exact", "loglinear", "near")] + [("some heads exact", dynamic)],
)
@pytest.mark.parametrize("kind", [*DECODERS, *PAIRS])
def test_tokens_come_in_pieces_of_any_length(kind, way, make):
    model = converted(kind, way)
    if model.config.is_encoder_decoder:
        given = inputs(model, *padded(tokens(2, 9), [9, 6]))
        ids = given["decoder_input_ids"] = tokens(2, 23, seed=2)  # beyond the reach of T5's bias
    else:
        ids, mask = padded(tokens(2, 23), [23, 20], "left")
        given = {**inputs(model, ids, mask), "position_ids": (mask.cumsum(1) - 1).clamp_min(0)}
    want = outputs(model, **given, use_cache=False)
    cache, parts, at = make(model), [], 0
    for length in (8, 1, 1, 5, 1, 7):
        parts.append(step(model, cache, ids[:, at : at + length], at, given))
        at += length
    assert at == ids.shape[1]
    real = slice(None) if model.config.is_encoder_decoder else given["attention_mask"].bool()
    torch.testing.assert_close(torch.cat(parts, 1)[real], want[real], rtol=0, atol=1e-7)


@pytest.mark.parametrize("kind", [*DECODERS, "T5ForConditionalGeneration"])
def test_states_do_not_grow(kind):
    model = converted(kind)
    given = inputs(model, tokens(2, 25))
    ids, cache = given["input_ids"], new_cache(model)
    own = [cache.self_attention_cache, cache.cross_attention_cache] if hasattr(cache, "is_updated") else [cache]
    sizes = []
    for at in range(25):
        step(model, cache, ids[:, at : at + 1], at, given)
        sizes.append([x.nbytes for x in own])
    # A relative bias keeps the keys that are still within its reach, which is 10 here.
    first = 11 if model.config.is_encoder_decoder else 0
    assert all(x == sizes[-1] for x in sizes[first:]), sizes
    assert all(sizes[0])
    assert cache.get_seq_length() == 25
    with pytest.raises(ValueError, match="cannot go back"):
        own[0].layers[0].crop(1)


def test_generate_makes_a_cache_of_states():
    model = converted("GPT2LMHeadModel")
    found = model.generate(tokens(), max_new_tokens=3, return_dict_in_generate=True, pad_token_id=0)
    assert isinstance(found.past_key_values, StateCache)
    assert found.past_key_values.get_seq_length() == tokens().shape[1] + 2
    kept = StateCache()
    model.generate(tokens(), max_new_tokens=3, past_key_values=kept, pad_token_id=0)
    assert kept.nbytes == found.past_key_values.nbytes
    with pytest.raises(ValueError, match="keeps states, got cache_implementation='static'"):
        model.generate(tokens(), max_new_tokens=3, cache_implementation="static")


@pytest.mark.parametrize("layers", [1, 2])
def test_a_model_that_was_not_converted_refuses_states(layers):
    model = tiny("GPT2LMHeadModel", n_layer=layers)
    with pytest.raises(ValueError, match="did not take its state"):
        model.generate(tokens(), max_new_tokens=3, past_key_values=StateCache(), pad_token_id=0)
    with pytest.raises(ValueError, match="was not converted"):
        new_cache(model)


def test_a_cache_of_fixed_length_is_refused():
    model = converted("LlamaForCausalLM")
    with pytest.raises(ValueError, match="fixed length"):
        outputs(model, input_ids=tokens(), past_key_values=StaticCache(config=model.config, max_cache_len=32))


def test_an_attention_mask_covers_the_whole_context():
    model, cache = converted("GPT2LMHeadModel"), StateCache()
    ids = tokens()
    outputs(model, input_ids=ids, past_key_values=cache)
    with pytest.raises(ValueError, match="attention_mask covers 1 tokens, there are 12 keys"):
        outputs(model, input_ids=ids[:, :1], attention_mask=torch.ones(2, 1), past_key_values=cache)


def test_attentions_are_not_given_with_a_cache():
    model = converted("GPT2LMHeadModel")
    with pytest.raises(ValueError, match="all keys at once"):
        outputs(model, input_ids=tokens(), past_key_values=StateCache(), output_attentions=True)


def test_half_precision_generates():
    model = converted("LlamaForCausalLM").bfloat16()
    found = model.generate(tokens(), max_new_tokens=4, min_new_tokens=4, pad_token_id=0)
    assert found.shape == (2, tokens().shape[1] + 4)


@pytest.mark.parametrize("kind", ["LlamaForCausalLM", "T5ForConditionalGeneration", "BartForConditionalGeneration"])
def test_samples_of_a_cache_are_chosen_and_repeated(kind):
    model = converted(kind, "some heads exact")
    given = inputs(model, *padded(tokens(2, 9), [9, 6]) if model.config.is_encoder_decoder else (tokens(2, 9), None))
    ids = tokens(2, 5, seed=2)
    order = torch.tensor([1, 0, 1])

    def after(change, rows):
        cache = new_cache(model)
        step(model, cache, ids[:, :4], 0, given)
        for half in (
            [cache.self_attention_cache, cache.cross_attention_cache] if hasattr(cache, "is_updated") else [cache]
        ):
            change(half)
        own = {
            name: x[torch.zeros_like(rows)] for name, x in given.items()
        }  # what the cache has seen is not read again
        return step(model, cache, ids[rows, 4:], 4, own)

    want = after(lambda cache: None, torch.arange(2))
    torch.testing.assert_close(after(lambda cache: cache.reorder_cache(order), order), want[order])
    torch.testing.assert_close(after(lambda cache: cache.batch_select_indices(order[:1]), order[:1]), want[order[:1]])
    twice = torch.tensor([0, 0, 1, 1])
    torch.testing.assert_close(after(lambda cache: cache.batch_repeat_interleave(2), twice), want[twice])
    with pytest.raises(ValueError, match=r"the state has shape \(2, .* these inputs need \(3, "):
        after(lambda cache: None, order)
