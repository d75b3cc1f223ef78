"""`kernelformer export`: graphs that equal torch, a script that runs without it, and nothing left behind where not."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

from kernelformer import lazy
from kernelformer.cli.app import app
from kernelformer.conversion.settings import ExportSettings
from kernelformer.export import job as exporting
from kernelformer.export.job import export_folder, longest_of
from kernelformer.export.onnx_files import Differences, run_graph, session
from kernelformer.hf import convert
from kernelformer.models import (
    KernelformerConfig,
    KernelformerForCausalLM,
    KernelformerForImageClassification,
    KernelformerForSequenceClassification,
)
from tiny_models import tiny

SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 64}
QUIET = "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__'); "
QUIET += "assert not {'torch', 'transformers', 'kernelformer'} & sys.modules.keys()"


def own(kind, attention, **more):
    torch.manual_seed(0)
    return kind(KernelformerConfig(**{"vocab_size": 256, **SIZES, **more}, attention=attention)).eval()


def written(path, *words):
    """Output of the script of an export, in a process that imports no torch."""
    done = subprocess.run([sys.executable, "-c", QUIET, str(path), *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_decoder_is_exported_and_generates_without_torch(tmp_path):
    model = own(KernelformerForCausalLM, "favor+:num_features=8:rotary=True")
    model.save_pretrained(tmp_path / "run" / "model")
    done = CliRunner().invoke(app, ["export", str(tmp_path / "run"), str(tmp_path / "out"), "--threads", "1"])
    assert done.exit_code == 0, done.output
    assert "opset 20" in done.output
    record = json.loads((tmp_path / "out" / "export.json").read_text())
    assert record["growing_layers"] == []
    assert record["longest"] is None
    assert {x: y <= 1e-5 for x, y in record["largest_difference"].items()} == dict.fromkeys(
        ("sequences", "padded", "steps"), True
    )
    assert str(tmp_path).encode() not in (tmp_path / "out" / "model.onnx").read_bytes()
    text = "a text in bytes, "
    out = model.generate(torch.tensor([list(text.encode())]), max_new_tokens=12, min_new_tokens=12, do_sample=False)
    want = bytes(out[0].tolist()).decode(errors="replace")
    assert written(tmp_path / "out" / "generate.py", text, "12") == want + "\n"
    assert sorted(x.name for x in tmp_path.iterdir()) == ["out", "run"]


@pytest.mark.slow
def test_a_classifier_with_learned_positions_says_how_long_its_texts_may_be(tmp_path):
    model = own(KernelformerForSequenceClassification, "elu", positions="learned", pooling="cls")
    model.save_pretrained(tmp_path / "model")
    result = export_folder(tmp_path / "model", tmp_path / "out")
    assert (result.longest, result.differences.steps) == (64, None)
    with torch.no_grad():
        logits = model(torch.tensor([list(b"some text")])).logits[0]
    said = written(tmp_path / "out" / "run.py", "some text").replace("[", " ").replace("]", " ").split()
    torch.testing.assert_close(torch.tensor([float(x) for x in said[1:]]), logits, rtol=1e-4, atol=1e-4)
    with pytest.raises(AssertionError, match="positions for 64 tokens, got 65"):
        written(tmp_path / "out" / "run.py", "x" * 65)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("BertForSequenceClassification", {"num_features": 8, "window": 4, "sinks": 2}),
        ("DistilBertModel", {"num_features": 8}),
        ("RobertaModel", {"num_features": 8}),
        ("LlamaForCausalLM", {"num_features": 8, "window": 4, "sinks": 2}),
        ("GPT2LMHeadModel", {"num_features": 8}),
        ("LlamaForCausalLM", {"num_features": 8, "exact_heads": {0: (0, 2)}}),
    ],
)
def test_a_converted_model_is_exported(kind, options, tmp_path):
    model = tiny(kind, torch.float32)
    convert(model, "loglinear", **options).save_pretrained(tmp_path / "model")
    result = export_folder(tmp_path / "model", tmp_path / "out", ExportSettings(steps=20, growing=True))
    assert max(x for x in vars(result.differences).values() if x is not None) < 1e-5
    assert result.longest == (63 if kind == "RobertaModel" else None if kind == "LlamaForCausalLM" else 64)
    assert result.grows == ([0] if "exact_heads" in options else [])


@pytest.mark.slow
def test_a_converted_decoder_with_a_tokenizer_generates_without_torch_up_to_its_last_position(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    model = convert(tiny("GPT2LMHeadModel", torch.float32), "loglinear", num_features=8)
    words = {f"w{i}": i for i in range(model.config.vocab_size)}
    inner = Tokenizer(models.WordLevel(words, unk_token="w0"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=inner).save_pretrained(tmp_path / "model")
    model.save_pretrained(tmp_path / "model")
    export_folder(tmp_path / "model", tmp_path / "out", ExportSettings(steps=5))
    ids = [5, 7, 11]
    out = model.eval().generate(torch.tensor([ids]), max_new_tokens=9, min_new_tokens=9, do_sample=False)
    script = tmp_path / "out" / "generate.py"
    assert "tokenizers" in script.read_text()
    assert written(script, "w5 w7 w11", "9") == " ".join(f"w{x}" for x in out[0].tolist()) + "\n"
    with pytest.raises(AssertionError, match="positions for 64 tokens, got 65"):
        written(script, "w5 w7 w11", "63")
    graph = session(tmp_path / "out" / "model.onnx", 1)
    with pytest.raises(Exception, match=r"out of (data )?bounds"):
        run_graph(graph, [torch.ones(1, 65, dtype=torch.long).numpy()] * 2)


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["softmax", "gaussian", "local:window=4:sinks=1", "trigonometric:num_features=8"])
def test_decoders_of_other_methods_are_exported_too(attention, tmp_path):
    own(KernelformerForCausalLM, attention).save_pretrained(tmp_path / "model")
    result = export_folder(tmp_path / "model", tmp_path / "out", ExportSettings(steps=30, logits="all", growing=True))
    assert result.grows == ([0] if attention in ("softmax", "gaussian") else [])


def test_what_cannot_be_exported_is_named_and_leaves_nothing(tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"empty holds no model: there is no config\.json"):
        export_folder(tmp_path / "empty", tmp_path / "out")
    with pytest.raises(ValueError, match="empty is there already"):
        export_folder(tmp_path / "empty", tmp_path / "empty")
    tiny("BertModel", torch.float32).save_pretrained(tmp_path / "bert")
    with pytest.raises(ValueError, match="type 'bert', neither one of ours nor a converted one; convert it first"):
        export_folder(tmp_path / "bert", tmp_path / "out")
    own(KernelformerForImageClassification, "elu", image_size=(8, 8), patch_size=4).save_pretrained(tmp_path / "image")
    with pytest.raises(ValueError, match="KernelformerForImageClassification cannot be exported"):
        export_folder(tmp_path / "image", tmp_path / "out")
    own(KernelformerForSequenceClassification, "skyformer:num_landmarks=8").save_pretrained(tmp_path / "landmarks")
    with pytest.raises(ValueError, match="'skyformer' takes its landmarks from the tokens"):
        export_folder(tmp_path / "landmarks", tmp_path / "out")
    own(KernelformerForCausalLM, "softmax").save_pretrained(tmp_path / "softmax")
    with pytest.raises(ValueError, match=r"keeps every key in 1 of its layers: 0 \(softmax\).*--growing.*--prompt"):
        export_folder(tmp_path / "softmax", tmp_path / "out")
    own(KernelformerForCausalLM, "elu").save_pretrained(tmp_path / "lm")
    monkeypatch.setattr(exporting, "_write", lambda *_: Differences(1e-7, 0.5).check())
    with pytest.raises(ValueError, match=r"differs from the model in torch by 0\.5 .*padded.*nothing was written"):
        export_folder(tmp_path / "lm", tmp_path / "out")
    assert sorted(x.name for x in tmp_path.iterdir()) == ["bert", "empty", "image", "landmarks", "lm", "softmax"]


def test_missing_packages_are_named_with_the_command_that_brings_them(tmp_path, monkeypatch):
    monkeypatch.setattr(lazy, "_installed", lambda name: name != "onnxruntime")
    done = CliRunner().invoke(app, ["export", str(tmp_path), str(tmp_path / "out")])
    assert done.exit_code == 2
    assert "needs onnxruntime: pip install 'kernelformer[export]'" in done.output + done.stderr


def test_nan_is_a_difference():
    with pytest.raises(ValueError, match="differs from the model in torch by nan"):
        Differences(float("nan"), 0.0).check()
    Differences(0.0, 1e-6, None).check()


def test_settings_are_checked():
    with pytest.raises(ValueError, match="logits"):
        ExportSettings(logits="first")


def test_models_know_how_many_positions_they_have():
    assert longest_of(tiny("LlamaForCausalLM")) is None
    assert longest_of(tiny("GPT2LMHeadModel")) == 64
    assert longest_of(tiny("RobertaModel")) == 63  # its padding token has a row
    assert longest_of(own(KernelformerForSequenceClassification, "elu")) is None
