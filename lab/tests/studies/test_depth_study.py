"""The study of errors over layers on a tiny model made here."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from typer.testing import CliRunner

from kernelformer.cli.app import app
from kernelformer.hf import convert
from kernelformer_lab.studies import depth
from kernelformer_lab.studies.depth import DepthSettings

transformers = pytest.importorskip("transformers")
WORDS = [f"word{i}" for i in range(40)]
METHODS = ("favor+:num_features=8", "local:window=2")


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    path = tmp_path_factory.mktemp("encoder")
    vocabulary = {w: i for i, w in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS])}
    transformers.BertTokenizer(vocab=vocabulary).save_pretrained(path)
    sizes = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 16}
    torch.manual_seed(3)
    model = transformers.BertModel(transformers.BertConfig(vocab_size=len(vocabulary), **sizes))
    with torch.no_grad():
        for x in model.encoder.parameters():
            x.mul_(10)  # so that attention is far from uniform
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    gen = torch.Generator().manual_seed(0)
    rows = [" ".join(WORDS[i] for i in torch.randint(40, (n,), generator=gen)) for n in (20, 9, 14)]
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n".join(rows))
    return path


@pytest.fixture(scope="module")
def settings(encoder, text):
    return DepthSettings(model=str(encoder), text=text, attention=METHODS, draws=2, texts=3, length=16, batch=3)


@pytest.fixture(scope="module")
def result(settings, tmp_path_factory):
    return depth.STUDY.measure(settings, tmp_path_factory.mktemp("depth"))


def test_errors_are_those_of_the_models_hidden_states(settings, result, encoder, text):
    """The last figure of both curves is the error of a model with all layers converted; that of n = 1 has one."""
    original = transformers.AutoModel.from_pretrained(encoder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(encoder)
    lines = text.read_text().split("\n")
    batch = dict(tokenizer(lines, truncation=True, max_length=16, padding=True, return_tensors="pt"))
    row = result.where(draw=1)[0]
    for count, want in ((1, row["output"][1]), (3, row["output"][3])):
        student = convert(copy.deepcopy(original), "favor+", num_features=8, seed=1000, layers=list(range(count)))
        with torch.no_grad():
            theirs, ours = (x(**batch).last_hidden_state.double() for x in (original, student))
        errors = (ours - theirs).square().sum(-1) / theirs.square().sum(-1)
        assert want == pytest.approx(float(errors[batch["attention_mask"].bool()].mean().sqrt()), rel=1e-4)
    assert row["output"][3] == row["hidden"][3]
    assert (row["output"][0], row["hidden"][0]) == (0, 0)
    assert len(row["own"]) == 3


def test_what_is_random_has_several_draws_and_the_rest_one(settings, result):
    assert [(x["method"], x["draw"]) for x in result.rows] == [(METHODS[0], 0), (METHODS[0], 1), (METHODS[1], 0)]
    assert result.rows[0]["own"] != result.rows[1]["own"]
    means, deviations = depth.spread(result.where(method=METHODS[0]), "own")
    assert means[0] == pytest.approx((result.rows[0]["own"][0] + result.rows[1]["own"][0]) / 2)
    assert min(deviations) > 0
    assert depth.spread(result.where(method=METHODS[1]), "own")[1] == [0, 0, 0]
    assert result.figures["texts"] == 3


def test_the_command_goes_on_and_draws(settings, encoder, text, tmp_path):
    given = ["--text", str(text), "--draws", "2", "--samples", "3", "--length", "16", "--batch", "3"]
    where = ["--threads", "1", "--out", str(tmp_path)]

    def call(attention, *more):
        arguments = ["study", "depth", str(encoder), *given, "--attention", attention, *where, *more]
        return CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})

    first = call(METHODS[1])
    assert first.exit_code == 0, first.output
    second = call(",".join(METHODS))
    assert second.exit_code == 0, second.output
    assert "local:window=2, draw 0" not in second.output
    assert "favor+:num_features=8, draw 1" in second.output
    record = json.loads((tmp_path / "depth.json").read_text())
    assert [x["method"] for x in record["rows"]] == [METHODS[0], METHODS[0], METHODS[1]]
    assert record["command"].startswith("kernelformer study depth encoder")
    assert str(encoder) not in json.dumps(record)
    assert (tmp_path / "depth.png").read_bytes().startswith(b"\x89PNG")
    other = call(METHODS[1], "--seed", "1")
    assert other.exit_code == 2
    assert "has figures of another seed" in other.output


def test_every_method_of_the_study_is_one_of_the_library():
    cases = depth.cases_of(DepthSettings(model="m", text="t.txt"))
    assert {x for x, _ in cases} == set(depth.METHODS)
    assert cases.count(("local:window=32:sinks=1", 0)) == 1
    assert ("favor+:num_features=64", 2) in cases
