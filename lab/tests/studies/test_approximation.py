"""The study of Skyformer's Fig. 1 on a tiny model made here, and the measures behind it."""

from __future__ import annotations

import gc
import json
import math
import weakref

import pytest
import torch
from typer.testing import CliRunner

from kernelformer.cli.app import app
from kernelformer.conversion.measure import statistical_dimension
from kernelformer.conversion.readers import each_text
from kernelformer.hf.find import attention_calls
from kernelformer.modules import build_attention
from kernelformer_lab.analysis.spectra import condition_number, score_spectrum
from kernelformer_lab.studies import approximation
from kernelformer_lab.studies.approximation import ApproximationSettings

transformers = pytest.importorskip("transformers")
WORDS = [f"word{i}" for i in range(60)]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    path = tmp_path_factory.mktemp("encoder")
    vocabulary = {w: i for i, w in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS])}
    tokenizer = transformers.BertTokenizer(vocab=vocabulary)
    tokenizer.save_pretrained(path)
    config = transformers.BertConfig(
        vocab_size=len(vocabulary), hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16
    )
    torch.manual_seed(3)
    transformers.BertModel(config).save_pretrained(path)
    return path


@pytest.fixture
def text(tmp_path):
    gen = torch.Generator().manual_seed(0)
    rows = [" ".join(WORDS[i] for i in torch.randint(60, (40,), generator=gen)) for _ in range(3)]
    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    return path


def test_captured_inputs_give_the_models_own_attention(encoder):
    model = transformers.AutoModel.from_pretrained(encoder, attn_implementation="eager").eval()
    ids = torch.arange(5, 29).view(2, 12)
    layers = attention_calls(model, {"input_ids": ids}, outputs=False)
    assert model.config._attn_implementation == "eager"
    core = build_attention("softmax", head_dim=8, num_heads=2)
    weights = model(input_ids=ids, output_attentions=True).attentions
    assert len(layers) == len(weights) == 2
    for call, want in zip(layers, weights, strict=True):
        torch.testing.assert_close(core.attention_matrix(call.query, call.key), want)


def test_captured_tensors_are_nobody_elses(encoder):
    model = transformers.AutoModel.from_pretrained(encoder).eval()
    layers = attention_calls(model, {"input_ids": torch.arange(5, 29).view(2, 12)}, outputs=False)
    seen = weakref.ref(layers[0].query)
    del layers
    gc.collect()
    assert seen() is None


def test_ridges_are_measured_at_the_longest_length_in_any_order(encoder, text):
    results = []
    for lengths in ((16, 24), (24, 16, 24)):
        settings = ApproximationSettings(encoder=str(encoder), text=text, lengths=lengths, features=(4,))
        logged, steps = [], []
        results.append(approximation.STUDY.measure(settings, text.parent, logged.append, lambda: steps.append(1)))  # noqa: B023
        assert len(logged) == len(steps) == approximation.steps(settings)
    assert results[0].figures["ridges"] == results[1].figures["ridges"]
    assert "24 tokens" in approximation.tables(results[1])[1].title


def test_the_study_measures_and_draws(encoder, text, tmp_path):
    options = ["--lengths", "16,24", "--features", "4,64", "--samples", "2", "--out", str(tmp_path)]
    done = CliRunner().invoke(app, ["study", "approximation", "--model", str(encoder), "--text", str(text), *options])
    assert done.exit_code == 0, done.output
    record = json.loads((tmp_path / "approximation.json").read_text())
    errors = {tuple(row[:4]): row[4] for row in record["errors"]}
    for name in ("pretrained", "initialized"):
        few, all_of_them = errors[name, 24, "skyformer", 4], errors[name, 24, "skyformer", 64]
        assert all_of_them < 1e-3 < few
    assert (tmp_path / "approximation.png").stat().st_size > 20000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--lengths", "16,99"], "has 0 texts of at least 99 tokens, and 2 were asked for"),
        (["--model", "."], ". is not the folder of a model"),
        (["--text", "nothing.txt"], "there is no file nothing.txt"),
    ],
)
def test_wrong_input_of_the_study_is_named(encoder, text, options, message):
    given = ["study", "approximation", "--model", str(encoder), "--text", str(text), *options]
    done = CliRunner().invoke(app, given)
    assert done.exit_code == 2
    assert message in " ".join(done.output.split())


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"texts": 1}\n', r"line 2: no text in field 'text', found \['texts'\]"),
        ("a.jsonl", b"{\n", r"line 1: not JSON"),
        ("a.txt", b"good\n\xff\n", r"line 2: not UTF-8"),
    ],
)
def test_malformed_texts_are_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        list(each_text(tmp_path / name))


def test_texts_are_read_line_by_line(tmp_path):
    (tmp_path / "a.txt").write_text("one\n\n two \n")
    assert list(each_text(tmp_path / "a.txt")) == ["one", " two "]


def test_spectra_of_scores_by_their_definition():
    q, k = torch.randn(2, 3, 7, 4, dtype=torch.float64)
    scores = torch.exp(q @ k.transpose(-1, -2) / 2)
    values = score_spectrum(q, k, "softmax")
    torch.testing.assert_close(values.square().sum(-1), scores.square().sum((-2, -1)))
    torch.testing.assert_close(condition_number(values), torch.linalg.cond(scores))
    assert (condition_number(values, 0.5) <= condition_number(values)).all()
    with pytest.raises(ValueError, match="at most 1, got 2"):
        condition_number(values, 2)
    with pytest.raises(ValueError, match="unknown kernel 'laplace'; choose from gaussian, softmax"):
        score_spectrum(q, k, "laplace")
    with pytest.raises(ValueError, match=r"needs queries and keys, got shapes \(3, 7, 4\) and \(3, 0, 4\)"):
        score_spectrum(q, k[:, :0], "softmax")


def test_the_statistical_dimension_counts_distinct_tokens():
    """Far apart, every token counts and d_stat is 2n / (1 + ridge); all alike, only one does."""
    far = 100 * torch.eye(6, dtype=torch.float64)
    apart = statistical_dimension(far, far + 50, [0.5], scale=1.0)
    norm = score_spectrum(far, far + 50, "gaussian", scale=1.0)[0]
    torch.testing.assert_close(apart[0], 12 / (1 + 0.5 * norm), rtol=1e-6, atol=0)
    same = torch.ones(6, 6, dtype=torch.float64)
    torch.testing.assert_close(
        statistical_dimension(same, same, [0.5, 0.1]), torch.tensor([12 / (12 + 3), 12 / (12 + 0.6)]).double()
    )
    q, k = torch.randn(2, 20, 6, dtype=torch.float64)
    by_ridge = statistical_dimension(q, k, [1e-1, 1e-3, 1e-6])
    assert (by_ridge.diff() > 0).all()
    assert by_ridge[-1] <= 40
    assert math.isfinite(float(by_ridge.sum()))
