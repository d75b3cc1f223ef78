"""Models of the library: forward, backward, save, load and generate, on tiny sizes."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
)
from transformers.utils import logging as hf_logging

import kernelformer as kf
from kernelformer.feature_maps import FeatureMap
from kernelformer.hf import StateCache
from kernelformer.models import MODELS, KernelformerConfig, register
from kernelformer.models.blocks import Block
from kernelformer.modules import RelativePositions
from tiny_models import SMALL, first_end, letters

hf_logging.disable_progress_bar()
SHORT = {**SMALL, "max_position_embeddings": 40}
CAUSAL = ("causal-lm", "pixel-lm")
GENERATE = (*CAUSAL, "seq2seq")
NOT_CAUSAL = ("nystromformer", "linformer", "skyformer", "wildcat")
FAMILIES = ("softmax", "favor+", "trigonometric", "gmm-prf", "linformer", "skyformer")  # exact, maps, landmarks


def spec(method, **more):
    options = {"num_features": 8} if "num_features" in kf.method_options(method) else {}
    options |= {"num_landmarks": 4} if "num_landmarks" in kf.method_options(method) else {}
    return ":".join([method, *(f"{name}={x}" for name, x in {**options, **more}.items())])


def pairs():
    """Every model with a method of each family, and every method with one model."""
    for kind in MODELS:
        for method in kf.list_methods():
            fits = method not in NOT_CAUSAL if kind in CAUSAL else method != "rfa-gate"
            home = "encoder" if method in NOT_CAUSAL else "causal-lm"
            if fits and (method in FAMILIES or kind == home):
                yield kind, method


def build(kind, attention, **more):
    torch.manual_seed(0)
    return MODELS[kind](KernelformerConfig(**{**SHORT, "attention": attention, **more}))


def model_for(kind, method, **more):
    if kind == "seq2seq" and method in NOT_CAUSAL:
        cross = spec(method if method == "linformer" else "softmax")
        more = {"decoder_attention": spec("favor+"), "cross_attention": cross, **more}
    return build(kind, spec(method), **more)


def batch(kind, size=2, length=9):
    gen = torch.Generator().manual_seed(1)
    ids = torch.randint(2, 13, (size, length), generator=gen)
    if kind == "image":
        return {"pixel_values": torch.randn(size, 1, 8, 12, generator=gen), "labels": torch.tensor([0, 2])}
    if kind == "series":
        mask = (torch.arange(length) < length - torch.tensor([[0], [3]])).long()
        values = torch.randn(size, length, 1, generator=gen)
        return {"values": values, "attention_mask": mask, "labels": torch.tensor([0, 2])}
    inputs = {"input_ids": ids}
    if kind == "pixel-lm":
        return {**inputs, "labels": ids}
    mask = torch.ones(size, length, dtype=torch.long)
    mask[1, : length // 3] = 0
    inputs["attention_mask"] = mask
    if kind == "dual":
        inputs |= {"other_input_ids": ids[:, :6].flip(1), "other_attention_mask": mask[:, :6]}
    if kind in ("classifier", "dual"):
        inputs["labels"] = torch.tensor([0, 2])
    if kind in ("masked-lm", "causal-lm"):
        inputs["labels"] = ids.masked_fill(mask == 0, -100)
    if kind == "seq2seq":
        inputs["labels"] = ids[:, :7].flip(1)
    return inputs


def output(model, inputs):
    out = model(**inputs)
    return out.last_hidden_state if "last_hidden_state" in out else out.logits


@pytest.mark.parametrize(("kind", "method"), list(pairs()))
def test_every_model_and_every_method_learns_saves_and_loads(kind, method, tmp_path):
    model, inputs = model_for(kind, method), batch(kind)
    out = model(**inputs)
    loss = out.last_hidden_state.square().mean() if kind == "encoder" else out.loss
    loss.backward()
    for name, x in model.named_parameters():
        # Bias of keys moves all weights of a softmax alike, and landmarks' gates may start flat: others must learn.
        if "attention.query" in name or "wide" in name or "embeddings.tokens" in name:
            assert x.grad is not None
            assert x.grad.abs().sum() > 0, name
    for module in model.modules():
        if isinstance(module, FeatureMap) and module.is_random:
            module.resample(3)
    model.eval()
    want = output(model, inputs)
    assert want.isfinite().all()
    model.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").is_file()
    assert not list(tmp_path.glob("*.bin"))
    other = type(model).from_pretrained(tmp_path).eval()
    # Weights mapped from a file lie elsewhere in memory, and products round by that.
    torch.testing.assert_close(output(other, inputs), want, rtol=1e-5, atol=1e-6)
    for name, x in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], x), name
    for module in other.modules():
        if isinstance(module, FeatureMap) and module.is_random:
            assert module.draw_number == 3


@pytest.mark.parametrize(("kind", "method"), [x for x in pairs() if x[0] in GENERATE])
def test_generation_by_states_equals_full_recomputation(kind, method):
    model = model_for(kind, method).eval()
    prompt = batch(kind)["input_ids"]
    settings = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    if kind != "pixel-lm":
        settings["attention_mask"] = batch(kind)["attention_mask"]
    got = model.generate(prompt, **settings, return_dict_in_generate=True, output_logits=True)
    want = model.generate(prompt, **settings, return_dict_in_generate=True, output_logits=True, use_cache=False)
    assert torch.equal(got.sequences, want.sequences)
    for a, b in zip(got.logits, want.logits, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert isinstance(got.past_key_values, StateCache)


@pytest.mark.parametrize("kind", ["causal-lm", "seq2seq"])
@pytest.mark.parametrize(
    "attention",
    [
        "favor+:num_features=8",
        "softmax",
        "nprf:num_features=8:relative=1d:max_distance=3",
        "loglinear:num_features=8:window=4:sinks=2",
    ],
)
def test_beams_and_samples_by_states_equal_full_recomputation(kind, attention):
    model = build(kind, attention, eos_token_id=2).eval()
    for x in model.modules():
        if isinstance(x, RelativePositions):
            torch.nn.init.normal_(x.weight)
    inputs = {name: x for name, x in batch(kind).items() if name != "labels"}
    for settings in (
        {"num_beams": 3, "do_sample": False, "num_return_sequences": 2},
        {"do_sample": True, "top_k": 5},
        {"num_beams": 2, "do_sample": True},
    ):
        outs = []
        for use_cache in (True, False):
            torch.manual_seed(5)
            outs.append(model.generate(**inputs, max_new_tokens=8, use_cache=use_cache, **settings))
        assert torch.equal(*outs)


@pytest.mark.parametrize(
    "attention",
    ["favor+:num_features=8", "softmax", "rfa-gate:num_features=8", "favor+:num_features=8:window=3:sinks=2"],
)
@pytest.mark.parametrize("positions", ["sinusoidal", "learned", "none"])
def test_padding_on_the_left_changes_nothing(attention, positions):
    model = build("causal-lm", attention, positions=positions).eval()
    ids = batch("causal-lm")["input_ids"][:1]
    padded = torch.cat([torch.zeros(1, 5, dtype=torch.long), ids], 1)
    mask = (padded != 0).long()
    mask[:, 5:] = 1
    torch.testing.assert_close(model(padded, attention_mask=mask).logits[:, 5:], model(ids).logits)
    settings = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    alone, together = model.generate(ids, **settings), model.generate(padded, attention_mask=mask, **settings)
    assert torch.equal(together[:, 5:], alone)


def test_the_cache_of_a_feature_map_does_not_grow_and_that_of_softmax_does():
    ids = batch("causal-lm")["input_ids"]
    for attention, grows in (
        ("favor+:num_features=8", False),
        ("elu", False),
        ("nprf:num_features=8:relative=1d:max_distance=4", False),
        ("nprf:num_features=8:relative=1d", True),
        ("softmax", True),
    ):
        model = build("causal-lm", attention).eval()
        sizes = []
        for tokens in (4, 20):
            out = model.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, return_dict_in_generate=True)
            sizes.append(out.past_key_values.nbytes)
        assert (sizes[1] > sizes[0]) == grows, attention


def test_generating_stops_at_a_string():
    model, ids = build("causal-lm", "favor+:num_features=8").eval(), batch("causal-lm")["input_ids"][:1]
    tokenizer, settings = letters(SMALL["vocab_size"]), {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    whole = model.generate(ids, **settings)
    word = tokenizer.decode(whole[0, -3:-1])
    end = first_end(tokenizer.decode(whole[0]), word, ids.shape[1])
    assert end < whole.shape[1]
    assert torch.equal(model.generate(ids, **settings, stop_strings=[word], tokenizer=tokenizer), whole[:, :end])


def test_a_cache_resumes_where_it_was():
    model = build("causal-lm", "favor+:num_features=8").eval()
    ids = batch("causal-lm")["input_ids"]
    cache = model.new_cache()
    with torch.no_grad():
        parts = [model(ids[:, a:b], past_key_values=cache).logits for a, b in ((0, 4), (4, 5), (5, 9))]
        torch.testing.assert_close(torch.cat(parts, 1), model(ids).logits)
    assert cache.get_seq_length() == 9
    with pytest.raises(ValueError, match="cannot go back"):
        cache.crop(1)
    cache.batch_repeat_interleave(2)
    assert cache.layers[0].state.batch == 4
    cache.reset()
    assert cache.nbytes == 0


def test_different_methods_per_layer_and_per_part():
    model = build("causal-lm", ["softmax", "favor+:num_features=8"])
    assert [x.attention.core.method for x in model.stack.blocks] == ["softmax", "favor+"]
    model = build(
        "seq2seq",
        "skyformer:num_landmarks=4",
        decoder_attention=["elu", "favor+:num_features=8", "nprf:relative=1d:max_distance=4"],
        cross_attention="softmax",
        num_decoder_layers=3,
    )
    assert [x.attention.core.method for x in model.stack.blocks] == ["elu", "favor+", "nprf"]
    assert {x.cross.core.method for x in model.stack.blocks} == {"softmax"}
    assert {x.attention.core.method for x in model.encoder.stack.blocks} == {"skyformer"}
    model(**batch("seq2seq")).loss.backward()


def test_cross_attention_of_unit_vectors_is_by_others_unless_said_or_saved_before(tmp_path):
    attention = "nprf:num_features=8:relative=1d:max_distance=4:scale=2.0:seed=3"
    methods = {"auto": "favor+", "nprf:num_features=4": "nprf", None: "nprf"}
    for cross, method in methods.items():
        model = build("seq2seq", attention, cross_attention=cross)
        assert {x.cross.core.method for x in model.stack.blocks} == {method}
    assert build("seq2seq", attention).config.cross_specs == ["favor+:num_features=8:seed=3"] * 2
    build("seq2seq", attention).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["cross_attention"] == "auto"
    (tmp_path / "config.json").write_text(json.dumps({**config, "cross_attention": None}))  # as it was written before
    assert KernelformerConfig.from_pretrained(tmp_path).cross_specs == ["nprf:num_features=8:scale=2.0:seed=3"] * 2


def test_blocks_draw_differently_and_the_same_again():
    maps = [x for x in build("seq2seq", "favor+:num_features=8").modules() if isinstance(x, FeatureMap)]
    assert len({x.seed_number for x in maps}) == len(maps) == 6
    again = [x for x in build("seq2seq", "favor+:num_features=8").modules() if isinstance(x, FeatureMap)]
    assert all(torch.equal(a.omega, b.omega) for a, b in zip(maps, again, strict=True))
    other = [x for x in build("seq2seq", "favor+:num_features=8", seed=7).modules() if isinstance(x, FeatureMap)]
    assert not torch.equal(maps[0].omega, other[0].omega)


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("kind", ["causal-lm", "classifier", "seq2seq", "image"])
def test_a_shared_bias_is_one_table_also_after_loading(kind, tie, tmp_path):
    relative = "2d" if kind == "image" else "1d:max_distance=4"
    attention = f"nprf:num_features=8:relative={relative}"
    model = build(kind, attention, share_bias=True, tie_word_embeddings=tie, pooling="cls").eval()
    tables = {id(x): x for x in model.modules() if isinstance(x, RelativePositions)}
    assert len(tables) == (2 if kind == "seq2seq" else 1)
    for x in tables.values():
        torch.nn.init.normal_(x.weight)
    model.save_pretrained(tmp_path)
    other = type(model).from_pretrained(tmp_path).eval()
    assert len({id(x) for x in other.modules() if isinstance(x, RelativePositions)}) == len(tables)
    assert torch.equal(output(other, batch(kind)), output(model, batch(kind)))
    separate = build(kind, attention)
    assert len({id(x) for x in separate.modules() if isinstance(x, RelativePositions)}) == 2 * len(tables)


@pytest.mark.parametrize("kind", list(MODELS))
def test_activation_checkpointing_gives_the_same_gradients(kind, monkeypatch):
    model, inputs = build(kind, "favor+:num_features=8"), batch(kind)
    saved = copy.deepcopy(model)
    saved.activation_checkpointing_enable()
    calls = []
    plain = Block._attend  # within what is recomputed: transformers wraps `forward` itself
    monkeypatch.setattr(Block, "_attend", lambda self, *a, **k: (calls.append(id(self)), plain(self, *a, **k))[1])
    for x in (model, saved):
        out = x.train()(**inputs)
        (out.last_hidden_state.square().mean() if kind == "encoder" else out.loss).backward()
    for (name, a), b in zip(model.named_parameters(), saved.parameters(), strict=True):
        assert a.grad is None or torch.equal(a.grad, b.grad), name
    once = [x for x in calls if x in {id(m) for m in model.modules()}]
    assert len(calls) - len(once) == 2 * len(once)  # those that recompute run twice


@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.parametrize("kind", ["classifier", "dual"])
def test_padding_does_not_reach_a_classification(kind, pooling):
    model = build(kind, "favor+:num_features=8", pooling=pooling).eval()
    inputs = {name: x[:1] for name, x in batch(kind).items() if name != "labels"}
    longer = {}
    for name, x in inputs.items():
        filler = torch.zeros(1, 4, dtype=torch.long) if "mask" in name else torch.full((1, 4), 5)
        longer[name] = torch.cat([x, filler], 1)
    torch.testing.assert_close(model(**longer).logits, model(**inputs).logits)


def test_a_loss_over_parts_of_a_batch_adds_up_to_that_of_the_whole():
    model = build("causal-lm", "favor+:num_features=8")
    inputs = batch("causal-lm")
    wanted = int((inputs["labels"][:, 1:] != -100).sum())
    parts = [model(**{name: x[i : i + 1] for name, x in inputs.items()}, num_items_in_batch=wanted) for i in (0, 1)]
    torch.testing.assert_close(sum(x.loss for x in parts), model(**inputs).loss)


def test_the_losses_are_what_they_say():
    model = build("causal-lm", "softmax")
    inputs = batch("causal-lm")
    logits = model(**inputs).logits.log_softmax(-1)
    picked = [
        -logits[b, i, inputs["labels"][b, i + 1]] for b in (0, 1) for i in range(8) if inputs["labels"][b, i + 1] >= 0
    ]
    torch.testing.assert_close(model(**inputs).loss, torch.stack(picked).mean())
    model = build("seq2seq", "softmax")
    inputs = batch("seq2seq")
    assert model.prepare_decoder_input_ids_from_labels(torch.tensor([[5, 6, -100]])).tolist() == [[1, 5, 6]]
    assert model.prepare_decoder_input_ids_from_labels(torch.tensor([[5, -100, -100]])).tolist() == [[1, 5, 0]]
    logits = model(**inputs).logits
    torch.testing.assert_close(
        model(**inputs).loss, torch.nn.functional.cross_entropy(logits.flatten(0, 1), inputs["labels"].flatten())
    )


def test_a_causal_model_does_not_see_the_future_and_pixels_know_their_place():
    model = build("pixel-lm", "elu").eval()
    ids = batch("pixel-lm", length=40)["input_ids"]
    other = ids.clone()
    other[:, 20:] = 3
    torch.testing.assert_close(model(ids).logits[:, :20], model(other).logits[:, :20])
    row, column, channel = model.embeddings._indices(torch.tensor([0, 1, 12, 95]))
    assert (row.tolist(), column.tolist(), channel.tolist()) == ([0, 0, 1, 7], [0, 1, 0, 11], [0, 0, 0, 0])


def test_auto_classes_know_the_models_after_register(tmp_path):
    register()
    register()
    for kind, auto in (
        ("causal-lm", AutoModelForCausalLM),
        ("classifier", AutoModelForSequenceClassification),
        ("seq2seq", AutoModelForSeq2SeqLM),
        ("image", AutoModelForImageClassification),
    ):
        model = build(kind, "elu").eval()
        folder = tmp_path / kind
        model.save_pretrained(folder)
        assert AutoConfig.from_pretrained(folder).attention == "elu"
        loaded = auto.from_pretrained(folder).eval()
        assert type(loaded) is type(model)
        assert torch.equal(output(loaded, batch(kind)), output(model, batch(kind)))


@pytest.mark.parametrize("kind", list(MODELS))
def test_models_build_on_the_meta_device_and_return_tuples(kind):
    with torch.device("meta"):
        model = build(kind, "favor+:num_features=8")
    assert next(model.parameters()).is_meta
    real = build(kind, "favor+:num_features=8").eval()
    first = real(**batch(kind), return_dict=False)
    assert isinstance(first, tuple)


def test_first_weights_keep_the_size_of_signals():
    model = MODELS["causal-lm"](KernelformerConfig(hidden_size=256, num_hidden_layers=4, num_attention_heads=4))
    block = model.stack.blocks[0]
    for part, want in (
        (block.wide, 256**-0.5),
        (block.narrow, (8 * 1024) ** -0.5),
        (block.attention.out, (8 * 256) ** -0.5),
        (model.embeddings.tokens, 256**-0.5),
    ):
        assert abs(float(part.weight.detach().std()) / want - 1) < 0.05
    model = build("causal-lm", "generative-prf:num_features=8:seed=0")
    want = kf.build_attention("generative-prf", head_dim=8, num_heads=2, num_features=8)
    for a, b in zip(model.stack.blocks[0].attention.core.parameters(), want.parameters(), strict=True):
        assert torch.equal(a, b)  # a map's own first weights stay as they are


def test_configurations_travel_as_json(tmp_path):
    config = KernelformerConfig(
        **SHORT, attention=["elu", "nprf:relative=1d"], num_decoder_layers=1, decoder_attention="elu"
    )
    config.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["attention"] == ["elu", "nprf:relative=1d"]
    assert KernelformerConfig.from_pretrained(tmp_path).to_dict() == config.to_dict()


def test_a_family_of_models_shares_weights_and_others_are_refused(tmp_path):
    build("masked-lm", "elu").save_pretrained(tmp_path / "masked")
    classifier = MODELS["classifier"].from_pretrained(tmp_path / "masked")  # pretrained, then fine-tuned
    trunk = MODELS["encoder"].from_pretrained(tmp_path / "masked")
    ids = batch("encoder")["input_ids"]
    assert torch.equal(classifier.model(ids)[0], trunk(ids)[0])
    build("causal-lm", "elu").save_pretrained(tmp_path / "causal")
    with raises("weights of KernelformerForCausalLM, of the family 'decoder', which KernelformerModel"):
        MODELS["encoder"].from_pretrained(tmp_path / "causal")
    pixels = build("pixel-lm", "elu").eval()
    pixels.save_pretrained(tmp_path / "pixels")
    register()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "pixels").eval()
    assert torch.equal(loaded(ids).logits, pixels(ids).logits)


def test_a_configuration_is_not_changed_by_the_models_that_take_it():
    config = KernelformerConfig(**SHORT, attention="elu")
    before = config.to_dict()
    for model in MODELS.values():
        model(config)
    assert config.to_dict() == before


def test_tables_are_as_long_as_the_sequence_of_the_model():
    assert build("causal-lm", "elu").longest is None
    assert build("causal-lm", "elu", positions="learned").longest == 40
    assert build("causal-lm", "nprf:relative=1d").longest == 40
    assert build("causal-lm", "nprf:relative=1d:max_distance=3").longest is None
    pixels = build("pixel-lm", "nprf:relative=1d", positions="image")
    assert pixels.longest == 96
    pixels(torch.zeros(1, 96, dtype=torch.long))
    image = build("image", "linformer:rank=4", max_position_embeddings=2)
    image(**batch("image"))


def test_draws_differ_between_seeds_too():
    seeds = [
        x.seed_number
        for s in range(3)
        for x in build("seq2seq", "favor+:num_features=4", seed=s).modules()
        if isinstance(x, FeatureMap)
    ]
    assert len(set(seeds)) == len(seeds) == 18


def test_a_memory_goes_only_to_the_core_that_made_it():
    core = kf.build_attention("favor+", head_dim=4, num_heads=2, num_features=8)
    k = torch.randn(1, 2, 5, 4)
    memory = core.remember(k, k)
    core.recall(k[:, :, :1], memory)
    core.resample()
    with raises("made with another draw number"):
        core.recall(k[:, :, :1], memory)
    with raises("made by method 'favor\\+', this core is 'elu'"):
        kf.build_attention("elu", head_dim=4, num_heads=2).recall(k, memory)
    with raises("recall needs what remember"):
        core.recall(k, core.step(*(3 * [k[:, :, :1]]))[1])
    gated = kf.build_attention("rfa-gate", head_dim=4, num_heads=2, num_features=8)
    with raises("causal only"):
        gated.remember(k, k)


@pytest.mark.parametrize("method", [m for m in kf.list_methods() if m not in ("rfa-gate", "local")])
def test_a_remembered_context_gives_what_attending_to_it_gives(method):
    options = {"max_length": 20} if method == "linformer" else {}
    layer = kf.KernelAttention(32, 4, method, num_kv_heads=2, context_dim=12, **options).double()
    x, context = torch.randn(2, 5, 32).double(), torch.randn(2, 13, 12).double()
    mask = torch.ones(2, 13, dtype=torch.bool)
    mask[1, 6:] = False
    for key_mask in (None, mask):
        memory = layer.remember(context, key_mask)
        torch.testing.assert_close(layer.recall(x, memory), layer(x, context, key_mask), rtol=1e-10, atol=1e-10)


def raises(message):
    return pytest.raises(ValueError, match=message)


def test_wrong_configurations_say_what_to_change():
    for settings, message in (
        ({"attention": "favour+"}, r"unknown method 'favour\+'; did you mean 'favor\+'"),
        (
            {"attention": "favor+:features=3"},
            "unknown option for method 'favor\\+', 'features'; did you mean 'num_features'",
        ),
        ({"attention": ["elu"]}, "one for each of 4 blocks, got 1"),
        (
            {"hidden_layers": 3},
            "unknown setting of KernelformerConfig, 'hidden_layers'; did you mean 'num_hidden_layers'",
        ),
        ({"hidden_size": 30}, "must be a multiple of num_attention_heads, got 30 and 4"),
        ({"positions": "rotary"}, "unknown positions 'rotary'"),
        ({"pooling": "max"}, "unknown pooling 'max'"),
        ({"dropout": 1.0}, "dropout must be at least 0 and below 1"),
        ({"cross_attention": "nprf:relative=1d"}, "cross_attention has no relative positions.*give 'nprf'"),
        (
            {"cross_attention": "favor+:window=4:seed=1"},
            "cross_attention has no .* window or sinks.*give 'favor.:seed=1'",
        ),
        ({"cross_attention": "local"}, "cross_attention has no .* window or sinks, got 'local'; give 'softmax'"),
        ({"attention": "softmax:window=4"}, "'softmax' cannot attend to near tokens exactly"),
        ({"image_size": [3]}, "image_size must be"),
        ({"norm_first": "false"}, "norm_first must be True or False, got 'false'"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings must be True or False"),
        ({"layer_norm_eps": "x"}, "layer_norm_eps must be a finite number"),
        ({"initializer_range": "abc"}, "initializer_range must be a finite number"),
        ({"hidden_act": "gelx"}, "unknown hidden_act 'gelx'; did you mean 'gel"),
        ({"temperature": 3.0}, "unknown setting of KernelformerConfig, 'temperature'"),
        ({"num_labels": 0}, "num_labels must be an integer of at least 1, got 0"),
        ({"problem_type": "multi_label_classification"}, "or tell a number, got problem_type='multi_label"),
    ):
        with raises(message):
            KernelformerConfig(**settings)
    with raises("unknown setting of KernelformerConfig, 'output_layers'") as caught:
        KernelformerConfig(output_layers=3)
    assert "output_" not in str(caught.value).partition(";")[2]  # settings of Hugging Face's own are not offered
    with raises("but causal=True was asked for"):
        build("causal-lm", "nystromformer")
    with raises("causal only"):
        build("classifier", "rfa-gate")
    for method in ("nystromformer", "skyformer", "wildcat"):
        with raises("later ones included, which a decoder must not see"):
            build("seq2seq", "elu", cross_attention=method)
    with raises("takes no relative positions"):
        build("causal-lm", "gaussian:relative=1d")
    with raises("needs tokens on a grid"):
        build("classifier", "nprf:relative=2d")
    with raises("an image model needs image_size"):
        build("image", "elu", image_size=None)
    with raises("multiple of patch_size, got 8 x 12 and 5"):
        build("image", "elu", patch_size=5)
    with raises("learned positions or none"):
        build("image", "elu", positions="sinusoidal")
    with raises("positions='image' needs image_size"):
        build("pixel-lm", "elu", image_size=None)


def test_wrong_inputs_say_what_to_change():
    model = build("causal-lm", "favor+:num_features=8", positions="learned").eval()
    ids = batch("causal-lm")["input_ids"]
    with raises("40 learned positions, got a sequence of 45 tokens"):
        model(ids.repeat(1, 5))
    with raises("from 0 to 12, got 13"):
        model(ids + 8 * (ids == 5))
    with raises("either input_ids or inputs_embeds"):
        model()
    with raises(r"must be \(batch, tokens\) integers"):
        model(ids.float())
    for length in (4, 12):  # a longer mask would be cut without a word
        with raises(rf"a column for each of 9, got \(2, {length}\)"):
            model(ids, attention_mask=torch.ones(2, length))
        for kind in ("encoder", "masked-lm", "classifier", "seq2seq"):
            with raises(rf"a column for each of 9, got \(2, {length}\)"):
                build(kind, "elu")(ids, attention_mask=torch.ones(2, length))
    with torch.no_grad():
        cache = model(ids, use_cache=True).past_key_values
    with raises("a column for each of 9 in the cache and 2 new ones"):
        model(ids[:, :2], attention_mask=torch.ones(2, 2), past_key_values=cache)
    for kind in MODELS:
        with raises(
            "unknown argument of Kernelformer.*, 'attention_maks'; did you mean 'attention_mask'"
            if kind != "image"
            else "unknown argument"
        ):
            build(kind, "elu")(**batch(kind), attention_maks=torch.ones(2, 9))
    with raises("unknown argument of .*'output_hidden_states'"):
        model(ids, output_hidden_states=True)
    with raises("a prediction for each label"):
        model(ids, labels=ids, logits_to_keep=1)
    with raises("by layers of its own, got attn_implementation='sdpa'; leave it out, .* by attention="):
        build("causal-lm", "elu").set_attn_implementation("sdpa")
    with raises("must be a StateCache"):
        model.generate(ids, past_key_values=object(), max_new_tokens=2)
    with raises("leave it out"):
        model.generate(ids, cache_implementation="static", max_new_tokens=2)
    with raises("a pair needs"):
        build("dual", "elu")(ids)
    with raises("pixel_values must be"):
        build("image", "elu")(torch.zeros(1, 3, 8, 8))
    seq2seq = build("seq2seq", "elu", decoder_start_token_id=None)
    with raises("labels need decoder_start_token_id"):
        seq2seq(ids, labels=ids)


def test_weights_of_another_configuration_are_refused(tmp_path):
    build("causal-lm", "favor+:num_features=8").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for attention in ("favor+:num_features=16", "favor+:num_features=8:draw=iid"):
        (tmp_path / "hashes.json").unlink(missing_ok=True)
        (tmp_path / "config.json").write_text(json.dumps({**config, "attention": attention}))
        with pytest.raises((ValueError, RuntimeError), match=r"size|saved with draw"):
            MODELS["causal-lm"].from_pretrained(tmp_path)


PACKED = torch.tensor([[1] * 5 + [2] * 3 + [3] * 2, [1] * 4 + [2] * 6])


@torch.no_grad()
@pytest.mark.parametrize("positions", ["learned", "sinusoidal", "none"])
@pytest.mark.parametrize("kind", ["causal-lm", "masked-lm"])
def test_a_packed_row_is_predicted_as_its_sequences_alone(kind, positions):
    torch.manual_seed(0)
    sizes = {**SHORT, "max_position_embeddings": 6, "positions": positions}  # shorter than a row
    method = "favor+:num_features=8" if positions != "none" else "nprf:num_features=8:relative=1d:max_distance=4"
    model = MODELS[kind](KernelformerConfig(**sizes, attention=method)).double().eval()
    ids = torch.randint(13, PACKED.shape)
    out = model(ids, segment_ids=PACKED, labels=ids)
    losses = []
    for row, segments in enumerate(PACKED):
        for number in segments.unique():
            part = ids[row : row + 1, segments == number]
            alone = model(part, labels=part)
            torch.testing.assert_close(out.logits[row : row + 1, segments == number], alone.logits)
            losses += [alone.loss] * (part.shape[1] - (kind == "causal-lm"))
    torch.testing.assert_close(out.loss, torch.stack(losses).mean())
    if kind == "causal-lm":
        cache, logits = model.new_cache(), []
        for a, b in ((0, 4), (4, 5), (5, 6), (6, 10)):
            part = model(ids[:, a:b], segment_ids=PACKED[:, :b], past_key_values=cache)
            logits.append(part.logits)
        torch.testing.assert_close(torch.cat(logits, 1), out.logits)
        with pytest.raises(ValueError, match="a column for each of 10 in the cache and 1 new ones"):
            model(ids[:, :1], segment_ids=PACKED[:, :1], past_key_values=cache)


@pytest.mark.parametrize("given", [None, 40])
def test_sparse_prediction_has_the_loss_and_gradients_of_all_predictions(given):
    config = KernelformerConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    dense = MODELS["masked-lm"](config).double().train()
    sparse = copy.deepcopy(dense)
    sparse.config.sparse_prediction = True
    ids = torch.randint(50, (3, 20), generator=torch.Generator().manual_seed(0))
    labels = ids.masked_fill(torch.rand(3, 20, generator=torch.Generator().manual_seed(1)) > 0.2, -100)
    outs = [model(ids, labels=labels, num_items_in_batch=given) for model in (dense, sparse)]
    for out in outs:
        out.loss.backward()
    torch.testing.assert_close(outs[1].loss, outs[0].loss, rtol=1e-6, atol=0)  # the loss is in float32
    for (name, x), y in zip(dense.named_parameters(), sparse.parameters(), strict=True):
        torch.testing.assert_close(y.grad, x.grad, rtol=1e-5, atol=1e-8, msg=name)
    assert outs[1].logits.shape == (int((labels != -100).sum()), 50)
    assert sparse.eval()(ids, labels=labels).logits.shape == (3, 20, 50)
    assert sparse.train()(ids).logits.shape == (3, 20, 50)


@pytest.mark.parametrize("kind", ["causal-lm", "image"])
def test_learned_positions_start_where_they_are_told_to(kind):
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "positions": "learned"}
    shape = {"image_size": (64, 64), "patch_size": 2, "num_labels": 3} if kind == "image" else {"vocab_size": 1024}
    found = {}
    for given in (None, 0.02):
        model = MODELS[kind](KernelformerConfig(**sizes, **shape, position_range=given))
        tables = {x: p.std().item() for x, p in model.named_parameters() if "places" in x}
        found[given] = [*tables.values()]
        assert tables
    assert found[0.02] == pytest.approx([0.02] * len(found[0.02]), rel=0.05)
    assert found[None] == pytest.approx([0.125] * len(found[None]), rel=0.05)
    with pytest.raises(ValueError, match="position_range must be"):
        KernelformerConfig(position_range=0.0)


def test_embeddings_are_multiplied_by_what_they_are_told(tmp_path):
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "positions": "learned"}
    models = {x: MODELS["causal-lm"](KernelformerConfig(**sizes, embedding_scale=x)).eval() for x in (None, 1.0)}
    models[1.0].load_state_dict(models[None].state_dict())
    position = torch.arange(9).view(1, -1)
    whole, plain = (model.embeddings(position, position) for model in models.values())
    torch.testing.assert_close(whole, 8 * plain)
    models[1.0].save_pretrained(tmp_path)
    saved = type(models[1.0]).from_pretrained(tmp_path)
    assert torch.equal(saved.embeddings(position, position), plain)
    with pytest.raises(ValueError, match="embedding_scale must be"):
        KernelformerConfig(embedding_scale=0.0)
