"""Converted models that are shared, pickled, registered again, saved over others; and what a run takes for the same."""

from __future__ import annotations

import copy
import io
import json
import os
import pickle

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from typer.testing import CliRunner

from kernelformer.cache import StateLayer
from kernelformer.cli.app import app
from kernelformer.conversion import convert as converting
from kernelformer.conversion.holdout import divide_texts
from kernelformer.conversion.losses import HiddenStateErrors
from kernelformer.conversion.settings import ConvertSettings as Setting
from kernelformer.hf import convert, register, undo
from kernelformer.hf.adapters.multihead import KernelMultiheadAttention
from kernelformer.hf.attend import CONVERTED
from kernelformer.modules.calibration import evaluating
from kernelformer_lab.studies.lengths import Subject
from samples import change_study
from tiny_models import inputs, outputs, tiny, tokens

PICKLED = ["BertForMaskedLM", "GPT2LMHeadModel", "T5ForConditionalGeneration", "MPNetModel"]


class Shared(nn.Module):
    """Two names of one attention."""

    def __init__(self):
        super().__init__()
        self.first = nn.MultiheadAttention(16, 2, batch_first=True)
        self.second = nn.ModuleList([self.first])

    def forward(self, x):
        x = self.first(x, x, x, need_weights=False)[0]
        return self.second[0](x, x, x, need_weights=False)[0]


def test_a_shared_attention_is_converted_and_restored_under_all_its_names():
    torch.manual_seed(0)
    model, x = Shared().eval(), torch.randn(2, 5, 16)
    original, want = model.first, model(x)
    convert(model, "favor+", inputs={"x": x}, num_features=16)
    assert isinstance(model.first, KernelMultiheadAttention)
    assert model.second[0] is model.first
    assert model.conversion.layers[0].calls == 2
    undo(model)
    assert model.first is original
    assert model.second[0] is original
    assert torch.equal(model(x), want)


def test_a_context_in_place_of_its_keys_does_not_keep_them():
    layer, keys = StateLayer(cross=True), torch.zeros(2, 3, 1000, 8)
    layer.remember(None, keys)
    assert layer.keys.shape == (2, 3, 0, 8)
    assert layer.keys.untyped_storage().nbytes() == 0


def test_a_model_with_soft_capped_logits_is_named_and_not_advised_to_keep_layers():
    config = transformers.Gemma2Config(
        vocab_size=61, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        intermediate_size=40, layer_types=["full_attention"] * 2,
    )  # fmt: skip
    model = transformers.Gemma2ForCausalLM(config).eval()
    for layers in (None, [0]):
        with pytest.raises(ValueError, match=r"^Gemma2.* no attention .* Gemma2Attention has soft-capped") as got:
            convert(model, "favor+", layers)
        assert "keep" not in str(got.value)


@pytest.mark.parametrize("way", ["pickle", "torch", "copy"])
@pytest.mark.parametrize("kind", PICKLED)
def test_a_converted_model_comes_back_from_a_pickle_and_a_copy(kind, way, monkeypatch):
    model = convert(tiny(kind), "favor+", num_features=8)
    given = inputs(model)
    want = outputs(model, **given)
    if way == "copy":
        other = copy.deepcopy(model)
    else:
        file = io.BytesIO()
        torch.save(model, file) if way == "torch" else pickle.dump(model, file)
        file.seek(0)
        # As in a process that has converted nothing.
        monkeypatch.delitem(AttentionInterface._global_mapping, CONVERTED)
        monkeypatch.delitem(AttentionMaskInterface._global_mapping, CONVERTED)
        other = torch.load(file, weights_only=False) if way == "torch" else pickle.load(file)
    assert [type(x) for x in other.modules()] == [type(x) for x in model.modules()]
    assert other.conversion == model.conversion
    assert torch.equal(outputs(other, **given), want)
    undo(other)
    assert type(other) is getattr(transformers, kind)
    assert torch.equal(outputs(model, **given), want)


def test_registering_again_keeps_what_was_learned_and_draws_anew():
    try:
        register(num_features=16)
        models = {name: tiny("BertModel", attn_implementation=name) for name in ("loglinear", "favor+")}
        before = {name: outputs(model, input_ids=tokens()) for name, model in models.items()}
        register(num_features=32)
        with pytest.raises(ValueError, match=r"'loglinear' with parameters.* build the model anew, or use .*convert"):
            outputs(models["loglinear"], input_ids=tokens())
        assert not torch.equal(outputs(models["favor+"], input_ids=tokens()), before["favor+"])
        register(num_features=16)
        assert torch.equal(outputs(models["loglinear"], input_ids=tokens()), before["loglinear"])
    finally:
        register()


def test_the_study_reads_layers_as_the_command_does(monkeypatch, tmp_path):
    seen = []

    def stop(record, *_):
        seen.append(record.settings.layers)
        raise ValueError("enough")

    change_study(monkeypatch, "conversion", run=stop)
    given = ["m", "--distill", "a", "--text", "b", "--layers", "0-2,5,x.*", "--threads", "1", "--out", str(tmp_path)]
    done = CliRunner().invoke(app, ["study", "conversion", *given])
    assert "enough" in done.output
    assert seen == [(0, 1, 2, 5, "x.*")]


def test_a_configuration_with_code_of_its_own_is_not_run_whatever_is_answered(tmp_path, monkeypatch):
    names = {"AutoConfig": "own.Own"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": names}))
    (tmp_path / "own.py").write_text("raise SystemExit('it ran')\n")
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with pytest.raises(ValueError, match="no configuration could be read"):
        Subject(str(tmp_path), random=True).build(8)


@pytest.mark.parametrize("name", ["model.safetensors", "model-00001-of-00002.safetensors"])
def test_weights_that_belong_to_no_converted_model_are_not_removed(name, tmp_path):
    model = convert(tiny("BertModel"), "favor+", num_features=16)
    save_file({"x": torch.ones(2)}, tmp_path / name)
    before = (tmp_path / name).read_bytes()
    with pytest.raises(ValueError, match=rf"has {name} and no config.json.* choose another folder"):
        model.save_pretrained(tmp_path)
    assert [x.name for x in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_bytes() == before
    (tmp_path / name).unlink()
    (tmp_path / "tokenizer.json").write_text("{}")
    model.save_pretrained(tmp_path)
    model.save_pretrained(tmp_path)


def test_another_model_of_the_same_size_is_not_taken_for_the_one_before(tmp_path):
    path, setting = tmp_path / "model.safetensors", Setting()
    found = converting.ConversionResult(setting, "m", "BertModel", 8)
    student = convert(tiny("BertModel"), "elu")
    path.write_bytes(b"one")
    os.utime(path, ns=(10**18, 10**18))
    first = converting._identity(tmp_path, setting, found, student)
    assert converting._identity(tmp_path, setting, found, student) == first
    path.write_bytes(b"two")
    os.utime(path, ns=(10**18, 10**18 + 1000))
    assert converting._identity(tmp_path, setting, found, student)["source"] != first["source"]


def test_texts_that_are_measured_on_are_not_learned_from_by_content(tmp_path):
    both, exam = tmp_path / "both.txt", tmp_path / "exam.txt"
    both.write_text("a\nb\nc\nb\n")
    exam.write_text("b\nz\n")
    texts = divide_texts(both, exam, 8, 0)
    assert (texts.training, texts.evaluation) == (["a", "c"], ["b", "z"])
    assert (texts.training_file, texts.evaluation_file, texts.available) == ("both.txt", "exam.txt", 2)
    both.write_text("a\nb\n" * 3)
    texts = divide_texts(both, None, 1, 0)
    assert len(set(texts.training)) == 1
    assert not set(texts.training) & set(texts.evaluation)
    with pytest.raises(ValueError, match=r"all texts of .* are among those to measure on"):
        divide_texts(exam, exam, 8, 0)


def test_evaluating_gives_every_part_its_mode_back():
    model, other = nn.Sequential(nn.Dropout(), nn.Linear(2, 2)).train(), nn.Dropout().train()
    model[0].eval()
    with evaluating(model, other):
        assert not any(x.training for x in (*model.modules(), other))
    assert [x.training for x in (*model.modules(), other)] == [True, False, True, True]


def test_embeddings_are_compared_by_the_mean_over_real_tokens():
    class Output:
        def __init__(self, hidden):
            self.hidden_states, self.last_hidden_state = (hidden,), hidden

    want, got = torch.randn(1, 3, 4), torch.randn(1, 3, 4)
    got[:, :2] = want[:, :2]
    for mask, same in ((torch.tensor([[1, 1, 0]]), True), (torch.ones(1, 3), False), (torch.ones(1, 2), False)):
        errors = HiddenStateErrors(pools=True)
        errors.add({"input_ids": tokens(1, 3), "attention_mask": mask}, Output(want), Output(got))
        assert (abs(errors.cosine.value - 1) < 1e-6) == same
