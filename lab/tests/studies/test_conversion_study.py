"""The study of methods on a pretrained model, with a model that takes a moment."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM, BertModel, LlamaConfig, LlamaForCausalLM

from kernelformer.hf.load import load_source
from kernelformer_lab.studies import conversion as study
from kernelformer_lab.studies.conversion import ConversionSettings, Quality, probe_right

WORDS = [f"w{i}" for i in range(40)]
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
SMALL = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "vocab_size": len(VOCABULARY),
    "max_position_embeddings": 32,
}
QUICK = {"length": 16, "batch": 4, "seconds": 0.6, "samples": 12}


def settings_of(model, files, methods=("softmax",), **options):
    text, held_out = files
    return ConversionSettings(
        model=str(model), text=text, held_out=held_out, attention=tuple(methods), **{**QUICK, **options}
    )


def rows_of(model, files, methods, folder, log=lambda _: None, **options):
    return study.STUDY.measure(settings_of(model, files, methods, **options), folder, log).rows


def write_model(folder, model):
    torch.manual_seed(0)
    for x in model.parameters():
        if x.dim() > 1:
            x.data.normal_(0, 0.3)
    model.save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(VOCABULARY))
    return folder


@pytest.fixture
def files(tmp_path):
    gen = torch.Generator().manual_seed(0)
    for name in ("train", "test"):
        rows = []
        for _ in range(40):
            label = int(torch.randint(2, (1,), generator=gen))
            picked = torch.randint(20, (10,), generator=gen) + 20 * label
            rows.append(json.dumps({"text": " ".join(WORDS[i] for i in picked), "label": label}))
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    return tmp_path / "train.jsonl", tmp_path / "test.jsonl"


@pytest.fixture
def encoder(tmp_path):
    return write_model(tmp_path / "encoder", BertModel(BertConfig(**SMALL), add_pooling_layer=False))


def test_methods_are_measured_before_and_after_and_not_twice(encoder, files, tmp_path):
    logged = []
    methods = ["loglinear:num_features=8", "elu", "softmax"]
    rows = rows_of(encoder, files, methods, tmp_path, save=tmp_path / "saved")
    by_name = {x["method"]: x for x in rows}
    assert list(by_name) == ["original", *methods]
    assert by_name["original"]["scores"]["original"]["cosine"] == pytest.approx(1, abs=1e-6)
    assert by_name["softmax"]["scores"]["converted"]["cosine"] == pytest.approx(1, abs=1e-5)
    learned = by_name["loglinear:num_features=8"]
    assert learned["parameters"] == 2 * 2 * 2 * (8 * 8 + 8)  # layers, queries and keys, heads, w and b
    assert set(learned["steps"]) == {"transfer", "tune"}
    assert set(by_name["elu"]["steps"]) == {"tune"}
    assert learned["scores"]["distilled"]["cosine"] > learned["scores"]["converted"]["cosine"]
    assert (tmp_path / "saved" / "elu" / "model.safetensors").is_file()
    fresh = rows_of(encoder, files, ["elu"], tmp_path / "fresh")
    late = rows_of(encoder, files, [*methods, "favor+:num_features=8"], tmp_path)[-1]
    assert fresh[1]["scores"]["converted"] == by_name["elu"]["scores"]["converted"]
    assert late["scores"]["converted"]["cosine"] < 0.999  # to the original, also where a run goes on
    result = study.STUDY.measure(settings_of(encoder, files, methods), tmp_path, logged.append)
    assert result.rows[: len(rows)] == rows
    assert not logged


def test_figures_of_another_setting_are_not_mixed_in(encoder, files, tmp_path):
    rows_of(encoder, files, ["softmax"], tmp_path, seconds=0.0)
    with pytest.raises(ValueError, match=r"conversion.json has figures of another setting"):
        rows_of(encoder, files, ["softmax"], tmp_path, length=12)


def test_a_method_that_cannot_is_a_row_with_the_reason(files, tmp_path):
    folder = write_model(
        tmp_path / "decoder", LlamaForCausalLM(LlamaConfig(**SMALL, num_key_value_heads=1, eos_token_id=3))
    )
    methods = ["skyformer:num_landmarks=4", "favor+:num_features=512"]
    settings = settings_of(folder, files, methods, batch=2, seconds=0.0, samples=8, task="causal")
    result = study.STUDY.measure(settings, tmp_path)
    original, cannot, near = result.rows
    assert "landmarks" in cannot["problem"]
    assert not cannot["scores"]
    # The perplexity by transformers' own loss.
    source = load_source(folder, task="causal")
    quality = Quality(source, settings)
    with torch.no_grad():
        losses = [source.model(**x, labels=x["input_ids"]).loss for x in quality.batches]
    assert original["scores"]["original"]["perplexity"] == pytest.approx(
        float(torch.stack(losses).mean().exp()), rel=1e-4
    )
    assert near["scores"]["converted"]["perplexity"] == pytest.approx(
        original["scores"]["original"]["perplexity"], rel=0.5
    )
    assert study.tables(result)[0].row_count == 3


def test_masked_tokens_are_the_same_for_all_models(files, tmp_path):
    folder = write_model(tmp_path / "masked", BertForMaskedLM(BertConfig(**SMALL)))
    source = load_source(folder)
    quality = Quality(source, settings_of(folder, files, samples=40))
    first = quality(source.model)
    assert first == quality(source.model)
    assert 0 <= first["accuracy"] <= 1
    assert first["perplexity"] > 1


def test_a_probe_learns_what_a_line_can_tell():
    gen = torch.Generator().manual_seed(0)
    x = torch.randn(200, 6, generator=gen)
    y = (x[:, 0] + 2 * x[:, 3] > 0).long()
    assert probe_right((x[:150], y[:150]), (x[150:], y[150:])).double().mean() > 0.95
    shuffled = y[torch.randperm(200, generator=gen)]
    assert probe_right((x[:150], shuffled[:150]), (x[150:], shuffled[150:])).double().mean() < 0.75


def test_a_probe_wants_labels(encoder, files, tmp_path):
    few = {"seconds": 0.0, "samples": 8, "probe": 20}
    rows = rows_of(encoder, files, ["softmax"], tmp_path, **few)
    assert rows[0]["scores"]["original"]["probe"] == rows[1]["scores"]["converted"]["probe"] > 0.8
    plain = tmp_path / "plain.txt"
    plain.write_text("w1 w2\nw3 w4\n")
    with pytest.raises(ValueError, match="a probe needs 'text' and 'label'"):
        rows_of(encoder, (plain, files[1]), ["softmax"], tmp_path / "other", **few)


def test_features_are_filled_into_the_methods():
    specs = study.method_specs(128)
    assert "favor+hyperbolic:num_features=64" in specs
    assert "skyformer:num_landmarks=128:kernel=softmax" in specs
    assert len(specs) == 14
