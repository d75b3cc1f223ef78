"""The study of methods on a pretrained model, with a model that takes a moment."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM, BertModel, LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from kernelformer.cli.app import app
from kernelformer.hf.load import load_source
from kernelformer.studies import conversion as study
from kernelformer.studies import conversion_show as show

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
QUICK = study.Setting(length=16, batch=4, seconds=0.6, samples=12)


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
    out, told = tmp_path / "conversion.json", []
    methods = ["loglinear:num_features=8", "elu", "softmax"]
    rows = study.run(str(encoder), *files, methods, QUICK, out, tell=told.append, save=tmp_path / "saved")
    by_name = {x.method: x for x in rows}
    assert list(by_name) == ["original", *methods]
    assert by_name["original"].scores["original"]["cosine"] == pytest.approx(1, abs=1e-6)
    assert by_name["softmax"].scores["converted"]["cosine"] == pytest.approx(1, abs=1e-5)
    learned = by_name["loglinear:num_features=8"]
    assert learned.parameters == 2 * 2 * 2 * (8 * 8 + 8)  # layers, queries and keys, heads, w and b
    assert set(learned.steps) == {"transfer", "tune"}
    assert set(by_name["elu"].steps) == {"tune"}
    assert learned.scores["distilled"]["cosine"] > learned.scores["converted"]["cosine"]
    assert (tmp_path / "saved" / "elu" / "model.safetensors").is_file()
    fresh = study.run(str(encoder), *files, ["elu"], QUICK, tmp_path / "fresh.json")
    late = study.run(str(encoder), *files, [*methods, "favor+:num_features=8"], QUICK, out)[-1]
    assert fresh[1].scores["converted"] == by_name["elu"].scores["converted"]
    assert late.scores["converted"]["cosine"] < 0.999  # to the original, also where a run goes on
    rows = study.run(str(encoder), *files, methods, QUICK, out)
    told.clear()
    again = study.run(str(encoder), *files, methods, QUICK, out, tell=told.append)
    assert again == rows
    assert not told
    assert show.table(rows).row_count == 5
    show.picture(rows, tmp_path / "conversion.png")
    assert (tmp_path / "conversion.png").read_bytes().startswith(b"\x89PNG")


def test_figures_of_another_setting_are_not_mixed_in(encoder, files, tmp_path):
    out = tmp_path / "conversion.json"
    study.run(str(encoder), *files, [], QUICK, out)
    with pytest.raises(ValueError, match="figures of another setting"):
        study.run(str(encoder), *files, [], study.Setting(length=12, seconds=0.6), out)


def test_a_method_that_cannot_is_a_row_with_the_reason(files, tmp_path):
    folder = write_model(
        tmp_path / "decoder", LlamaForCausalLM(LlamaConfig(**SMALL, num_key_value_heads=1, eos_token_id=3))
    )
    setting = study.Setting(length=16, batch=2, seconds=0.0, samples=8)
    rows = study.run(str(folder), *files, ["skyformer:num_landmarks=4", "favor+:num_features=512"], setting,
                     tmp_path / "x.json", task="causal")  # fmt: skip
    original, cannot, near = rows
    assert "landmarks" in cannot.problem
    assert not cannot.scores
    # The perplexity by transformers' own loss.
    source = load_source(folder, task="causal")
    judge = study.Judge(source, files[1], files[0], setting)
    with torch.no_grad():
        losses = [source.model(**x, labels=x["input_ids"]).loss for x in judge.batches]
    assert original.scores["original"]["perplexity"] == pytest.approx(float(torch.stack(losses).mean().exp()), rel=1e-4)
    assert near.scores["converted"]["perplexity"] == pytest.approx(original.scores["original"]["perplexity"], rel=0.5)
    assert show.table(rows).row_count == 3


def test_masked_tokens_are_the_same_for_all_models(files, tmp_path):
    folder = write_model(tmp_path / "masked", BertForMaskedLM(BertConfig(**SMALL)))
    source = load_source(folder)
    judge = study.Judge(source, files[1], files[0], study.Setting(length=16, batch=4, samples=40))
    first = judge(source.model)
    assert first == judge(source.model)
    assert 0 <= first["accuracy"] <= 1
    assert first["perplexity"] > 1


def test_a_probe_learns_what_a_line_can_tell():
    gen = torch.Generator().manual_seed(0)
    x = torch.randn(200, 6, generator=gen)
    y = (x[:, 0] + 2 * x[:, 3] > 0).long()
    assert study.probe_accuracy((x[:150], y[:150]), (x[150:], y[150:])) > 0.95
    shuffled = y[torch.randperm(200, generator=gen)]
    assert study.probe_accuracy((x[:150], shuffled[:150]), (x[150:], shuffled[150:])) < 0.75


def test_a_probe_wants_labels(encoder, files, tmp_path):
    setting = study.Setting(length=16, batch=4, seconds=0.0, samples=8, probe=20)
    rows = study.run(str(encoder), *files, ["softmax"], setting, tmp_path / "a.json")
    assert rows[0].scores["original"]["probe"] == rows[1].scores["converted"]["probe"] > 0.8
    plain = tmp_path / "plain.txt"
    plain.write_text("w1 w2\nw3 w4\n")
    with pytest.raises(ValueError, match="a probe needs 'text' and 'label'"):
        study.run(str(encoder), plain, files[1], [], setting, tmp_path / "b.json")


def test_features_are_filled_into_the_methods():
    specs = study.method_specs(128)
    assert "favor+hyperbolic:num_features=64" in specs
    assert "skyformer:num_landmarks=128:kernel=softmax" in specs
    assert len(specs) == 8


def test_the_command_shows_and_writes(encoder, files, tmp_path):
    options = ["--text", str(files[0]), "--held-out", str(files[1]), "--attention", "elu", "--seconds", "0.3"]
    sizes = ["--length", "16", "--samples", "8", "--threads", "1", "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(app, ["study", "conversion", str(encoder), *options, *sizes])
    assert result.exit_code == 0, result.output
    assert "elu" in result.output
    record = json.loads((tmp_path / "out" / "conversion.json").read_text())
    assert record["model"] == "encoder"
    assert str(tmp_path) not in json.dumps(record)
    assert (tmp_path / "out" / "conversion.png").is_file()
