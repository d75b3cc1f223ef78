"""Converted models as folders: what is saved comes back, and what does not fit is refused."""

from __future__ import annotations

import json
import re
import sys

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM, pipeline

from converted_folders import change, saved
from kernelformer.hf import convert, load, save
from tiny_models import KINDS, inputs, letters, outputs, tiny, tokens


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_model_comes_back(kind, tmp_path):
    model = saved(tmp_path, kind, "favor+" if kind.startswith("Bert") else "loglinear", exact_heads={-1: [0]})
    other, given = load(tmp_path), inputs(model)
    assert not other.training
    assert type(other).__name__ == kind
    assert other.conversion == model.conversion
    assert torch.equal(outputs(other, **given), outputs(model, **given))
    assert other.dtype == model.dtype
    left, right = model.state_dict(), other.state_dict()
    assert list(left) == list(right)
    assert all(torch.equal(x, right[name]) and x.dtype == right[name].dtype for name, x in left.items())
    more = {"generation_config.json"} if model.can_generate() else set()
    assert {x.name for x in tmp_path.iterdir()} == {"config.json", "hashes.json", "model.safetensors"} | more
    other.save_pretrained(tmp_path)
    assert torch.equal(outputs(load(tmp_path), **given), outputs(model, **given))


@pytest.mark.parametrize("near", [{}, {"window": 10, "sinks": 2}])
def test_a_saved_model_generates_the_same(tmp_path, near):
    model = convert(tiny("T5ForConditionalGeneration"), "favor+", num_features=16, **near)
    for name, x in model.named_parameters():
        if name.endswith("kernel.beta"):
            torch.nn.init.normal_(x)
    model.generation_config.max_new_tokens = 5
    model.generation_config.num_beams = 2
    model.save_pretrained(tmp_path)
    other = load(tmp_path)
    assert other.generation_config.num_beams == 2
    assert len([x for x in other.state_dict() if x.endswith("kernel.beta")]) == (4 if near else 0)
    assert torch.equal(other.generate(tokens()), model.generate(tokens()))


def test_tied_weights_stay_tied_and_untied_ones_untied(tmp_path):
    model = saved(tmp_path / "a", "GPT2LMHeadModel")
    assert "lm_head.weight" not in load_file(tmp_path / "a" / "model.safetensors")
    other = load(tmp_path / "a")
    assert other.lm_head.weight is other.transformer.wte.weight
    model.lm_head.weight = nn.Parameter(model.lm_head.weight + 1)
    model.save_pretrained(tmp_path / "b")
    given = inputs(model)
    assert torch.equal(outputs(load(tmp_path / "b"), **given), outputs(model, **given))


def test_weights_that_share_memory_otherwise_are_saved_apart(tmp_path):
    model = convert(tiny("BertModel"), "favor+", num_features=16)
    first, second = model.encoder.layer
    second.output.dense.weight = first.output.dense.weight
    model.save_pretrained(tmp_path)
    assert torch.equal(outputs(load(tmp_path), input_ids=tokens()), outputs(model, input_ids=tokens()))


def test_large_weights_come_in_shards_and_go_when_they_are_written_anew(tmp_path):
    model = saved(tmp_path)
    (tmp_path / "vocab.txt").write_text("a\n")
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    assert not (tmp_path / "model.safetensors").exists()
    given = inputs(model)
    assert torch.equal(outputs(load(tmp_path), **given), outputs(model, **given))
    model.save_pretrained(tmp_path)
    names = {x.name for x in tmp_path.iterdir()}
    assert names == {"config.json", "hashes.json", "model.safetensors", "vocab.txt"}


def test_precision_is_kept_or_chosen(tmp_path):
    model = saved(tmp_path / "a", "GPT2LMHeadModel", dtype=torch.bfloat16)
    other = load(tmp_path / "a")
    assert other.dtype == torch.bfloat16
    assert torch.equal(outputs(other, input_ids=tokens()), outputs(model, input_ids=tokens()))
    chosen = load(tmp_path / "a", dtype=torch.float32, device="cpu")
    assert {x.dtype for x in chosen.parameters()} == {torch.float32}
    assert outputs(chosen, input_ids=tokens()).dtype == torch.float32
    half = load(tmp_path / "a", dtype=torch.float16)
    assert {x.dtype for name, x in half.named_parameters() if ".kernel." in name} == {torch.float32}
    assert outputs(half, input_ids=tokens()).dtype == torch.float16


def test_the_configuration_of_the_original_is_left_alone(tmp_path):
    original = tiny("BertForSequenceClassification", id2label={0: "a", 1: "b", 2: "c"})
    config, before = original.config, original.config.to_json_string()
    convert(original, "favor+", num_features=16).save_pretrained(tmp_path)
    assert config.to_json_string() == before
    found = load(tmp_path)
    assert found.config.id2label == {0: "a", 1: "b", 2: "c"}
    assert found.config.to_dict() == {**original.config.to_dict(), "transformers_version": transformers.__version__}


# Those that are left out have a head, which AutoModel does not load.
AUTO = {
    "BertForMaskedLM": "AutoModelForMaskedLM",
    "BertForSequenceClassification": "AutoModelForSequenceClassification",
    "BertLMHeadModel": "AutoModelForCausalLM",
    "GPT2LMHeadModel": "AutoModelForCausalLM",
    "LlamaForCausalLM": "AutoModelForCausalLM",
    "T5ForConditionalGeneration": "AutoModelForSeq2SeqLM",
    "UMT5ForConditionalGeneration": "AutoModelForSeq2SeqLM",
    "BartForConditionalGeneration": "AutoModelForSeq2SeqLM",
}


@pytest.mark.parametrize("kind", KINDS)
def test_auto_classes_load_a_folder_as_it_was_converted(kind, tmp_path):
    model = saved(tmp_path, kind)
    name = AUTO.get(kind, "AutoModel")
    found = getattr(transformers, name).from_pretrained(tmp_path, trust_remote_code=True, device_map="cpu")
    assert found.conversion == model.conversion
    assert torch.equal(outputs(found, **inputs(model)), outputs(model, **inputs(model)))
    if name != "AutoModel":
        with pytest.raises(ValueError, match=rf"converted {kind}, which AutoModel is not for; use .*{name}.* or kern"):
            AutoModel.from_pretrained(tmp_path)


def test_auto_classes_take_a_configuration_a_precision_and_a_device(tmp_path):
    model = saved(tmp_path)
    found = AutoModelForMaskedLM.from_pretrained(tmp_path, dtype="auto")
    assert torch.equal(outputs(found, input_ids=tokens()), outputs(model, input_ids=tokens()))
    for dtype in (torch.float32, "float32"):
        assert AutoModelForMaskedLM.from_pretrained(str(tmp_path), dtype=dtype).dtype == torch.float32
    for device_map in ("meta", {"": "meta"}, torch.device("meta")):
        assert AutoModelForMaskedLM.from_pretrained(tmp_path, device_map=device_map).device.type == "meta"
    config = AutoConfig.from_pretrained(tmp_path)
    assert config.architecture == "BertForMaskedLM"
    # As sentence-transformers asks for it.
    again = AutoModelForMaskedLM.from_pretrained(tmp_path, config=config, subfolder="", token=None)
    assert again.conversion == found.conversion


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"attn_implementation": "sdpa"}, "as it was saved, its attention too, .* got attn_implementation='sdpa'"),
        ({"output_attentions": True}, "got output_attentions=True; leave it out, or set it in model.config afterwards"),
        ({"return_dict": False}, "got return_dict=False"),
        ({"novelty": 3}, "got novelty=3"),
        ({"device_map": "auto"}, "to one device, got device_map='auto'; name it"),
        ({"device_map": {"bert": "cpu"}}, "to one device, got device_map={'bert'"),
    ],
)
def test_auto_classes_refuse_what_would_be_ignored(option, words, tmp_path):
    saved(tmp_path)
    with pytest.raises(ValueError, match=words):
        AutoModelForMaskedLM.from_pretrained(tmp_path, **option)


def test_an_attention_beside_a_configuration_is_refused(tmp_path):
    saved(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="got attn_implementation='eager'"):  # as sentence-transformers hands it on
        AutoModelForMaskedLM.from_pretrained(tmp_path, config=config, attn_implementation="eager")


@pytest.mark.parametrize(
    ("kind", "task"),
    [("BertModel", "feature-extraction"), ("BertForSequenceClassification", "text-classification"),
     ("LlamaForCausalLM", "text-generation")],
)  # fmt: skip
def test_pipelines_use_a_folder_as_it_was_converted(kind, task, tmp_path):
    model = saved(tmp_path, kind)
    letters().save_pretrained(tmp_path)
    options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0} if task == "text-generation" else {}
    found = [
        pipeline(task, model=x, tokenizer=letters(), device="cpu")("9abacus", **options) for x in (str(tmp_path), model)
    ]
    assert found[0] == found[1]


def test_the_arguments_of_trainers_are_taken(tmp_path):
    model = convert(tiny("BertForMaskedLM"), "favor+", num_features=16)
    model.save_pretrained(tmp_path / "none", is_main_process=False)
    assert not (tmp_path / "none").exists()
    state = {name: x + 1 if x.is_floating_point() else x for name, x in model.state_dict().items()}
    model.save_pretrained(tmp_path / "a", state_dict=state, push_to_hub=False, save_function=torch.save, token=None)
    assert torch.equal(load(tmp_path / "a").cls.predictions.bias, model.cls.predictions.bias + 1)
    for name, value in {"push_to_hub": True, "safe_serialization": False, "variant": "fp16", "novelty": 1}.items():
        with pytest.raises(ValueError, match=f"got {name}="):
            model.save_pretrained(tmp_path / "b", **{name: value})
    assert not (tmp_path / "b").exists()


def test_an_original_is_not_overwritten(tmp_path):
    original = tiny("BertForMaskedLM")
    original.save_pretrained(tmp_path)
    before = {x.name: x.read_bytes() for x in tmp_path.iterdir()}
    model = convert(transformers.BertForMaskedLM.from_pretrained(tmp_path), "favor+", num_features=16)
    with pytest.raises(ValueError, match=r"holds a model of type 'bert'.*choose another folder"):
        model.save_pretrained(tmp_path)
    assert {x.name: x.read_bytes() for x in tmp_path.iterdir()} == before
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="holds a model of type None"):
        model.save_pretrained(tmp_path)


def test_a_save_that_fails_leaves_what_was_there(tmp_path, monkeypatch):
    model, module = saved(tmp_path), sys.modules["kernelformer.hf.save"]  # the package's own name is the function's
    before = {x.name: x.read_bytes() for x in tmp_path.iterdir()}

    def full(*_, **__):
        raise OSError("no space left")

    monkeypatch.setattr(module, "save_torch_state_dict", full)
    with pytest.raises(OSError, match="no space"):
        model.save_pretrained(tmp_path)
    assert {x.name: x.read_bytes() for x in tmp_path.iterdir()} == before
    monkeypatch.undo()
    monkeypatch.setattr(module, "write_json", full)
    with pytest.raises(OSError, match="no space"):
        model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"no config\.json"):  # no model, rather than a wrong one
        load(tmp_path)


def test_what_could_not_be_loaded_is_not_saved(tmp_path):
    layer = nn.TransformerEncoderLayer(16, 4, 24, dropout=0.0, batch_first=True)
    plain = convert(nn.TransformerEncoder(layer, 1), "elu")
    with pytest.raises(ValueError, match=r"models of transformers.*state_dict"):
        save(plain, tmp_path / "a")

    class Own(transformers.BertModel):
        """Of somebody's own."""

    model = convert(Own(tiny("BertModel").config), "elu")
    with pytest.raises(ValueError, match="models of transformers, got Own"):
        model.save_pretrained(tmp_path / "a")
    with pytest.raises(ValueError, match="was not converted"):
        save(tiny("BertModel"), tmp_path / "a")
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"format": 2}, "layout 2, this version of kernelformer reads 1"),
        ({"format": None}, "layout None"),
        ({"architecture": "BertForMagic"}, "has no model 'BertForMagic'"),
        ({"architecture": "AutoConfig"}, "has no model 'AutoConfig'"),
        ({"conversion": []}, "lacks conversion"),
        ({"source": {}}, "lacks source"),
        ({"source_type": "berta"}, "original's configuration: 'berta'"),
        ({"model_type": "bert"}, "of type 'bert', not of a converted one"),
    ],
)
def test_folders_of_other_versions_are_refused(values, words, tmp_path):
    saved(tmp_path)
    change(tmp_path, **values)
    with pytest.raises(ValueError, match=re.escape(words)):
        load(tmp_path)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("novelty", 1, "another version"),
        ("options", {"num_features": 32}, "do not fit"),
        ("options", {"novelty": 1}, "unknown option"),
        ("method", "favor+", "do not fit"),
        ("method", "favor+++", "unknown method 'favor+++'"),
        ("name", "bert.encoder.layer.7", "cannot be converted"),
        ("num_heads", 5, "do not fit"),
        ("exact_heads", [9], "exact heads must be"),
    ],
)
def test_conversions_that_do_not_fit_the_weights_are_refused(field, value, words, tmp_path):
    saved(tmp_path)
    rows = json.loads((tmp_path / "config.json").read_text())["conversion"]
    rows[1][field] = value
    change(tmp_path, conversion=rows)
    with pytest.raises(ValueError, match=re.escape(words)):
        load(tmp_path)


def test_weights_that_do_not_fit_are_refused(tmp_path):
    saved(tmp_path)
    (tmp_path / "hashes.json").unlink()
    path, name = tmp_path / "model.safetensors", "bert.encoder.layer.0.attention.self.query.weight"
    whole = load_file(path)
    for change_of, words in (
        (lambda x: x.pop(name), f"missing ['{name}']"),
        (lambda x: x.update(novelty=torch.zeros(1)), "not known ['novelty']"),
        (lambda x: x.update({name: torch.zeros(3, 3)}), f"{name} of shape (32, 32), model.safetensors has (3, 3)"),
        (lambda x: [x.pop(y) for y in list(x) if ".kernel." in y], "missing"),
    ):
        weights = dict(whole)
        change_of(weights)
        save_file(weights, path)
        with pytest.raises(ValueError, match=re.escape(words)):
            load(tmp_path)
    path.write_bytes(b"nothing")
    with pytest.raises(ValueError, match="cannot be read"):
        load(tmp_path)
    path.unlink()
    with pytest.raises(ValueError, match=r"there is no model\.safetensors"):
        load(tmp_path)
    with pytest.raises(ValueError, match=r"no config\.json"):
        load(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text("nothing")
    with pytest.raises(ValueError, match="not JSON"):
        load(tmp_path)


def test_a_folder_is_not_taken_for_one_of_the_original(tmp_path):
    saved(tmp_path)
    # Transformers finds no configuration of BERT there, so that weights do not fit what it takes instead.
    assert transformers.BertConfig.from_pretrained(tmp_path).hidden_size != load(tmp_path).config.hidden_size
    record = json.loads((tmp_path / "config.json").read_text())
    assert record["model_type"] == "kernelformer-converted"
    assert record["format"] == 1
    assert not list(tmp_path.glob("*.bin"))


def test_a_loaded_model_trains_on(tmp_path):
    saved(tmp_path)
    model = load(tmp_path)
    assert all(x.requires_grad for x in model.parameters())
    model(**inputs(model)).logits.square().mean().backward()
    assert all(x.grad is not None for name, x in model.named_parameters() if ".kernel." in name)


def test_a_model_without_a_pooler_comes_back_without(tmp_path):
    config = tiny("BertModel", torch.float32).config
    model = convert(transformers.BertModel(config, add_pooling_layer=False).eval(), "elu")
    model.save_pretrained(tmp_path / "x")
    again = load(tmp_path / "x")
    ids = torch.tensor([[5, 6, 7]])
    assert again.pooler is None
    assert torch.equal(again(ids)[0], model(ids)[0])


@pytest.mark.parametrize("file", ["model.safetensors", "config.json"])
def test_a_byte_that_has_changed_is_found_and_named(file, tmp_path):
    saved(tmp_path)
    content = bytearray((tmp_path / file).read_bytes())
    place = content.index(b"0.02") + 3 if file == "config.json" else len(content) // 2
    content[place] ^= 1  # of a number: the file stays well-formed
    (tmp_path / file).write_bytes(content)
    expected = json.loads((tmp_path / "hashes.json").read_text())["blake2b"][file]
    words = rf"{file} has changed since it was saved: its blake2b hash is \w{{32}}, it was saved with {expected}; .*"
    for use in (load, AutoModelForMaskedLM.from_pretrained):
        with pytest.raises(ValueError, match=words + r"remove .*hashes\.json if you changed it on purpose"):
            use(tmp_path)
    (tmp_path / "hashes.json").unlink()
    load(tmp_path)
