"""The study of features on a tiny model made here and on small vectors, and the measures behind it."""

from __future__ import annotations

import json
import math
from dataclasses import asdict

import pytest
import torch
from typer.testing import CliRunner

from kernelformer.cli.app import app
from kernelformer.modules import build_attention
from kernelformer_lab.studies import features
from kernelformer_lab.studies.base import Record
from kernelformer_lab.studies.features import (
    EXACT,
    UNIFORM,
    WINDOW_ALONE,
    FeaturesSettings,
    Sized,
    Target,
    calibrated,
    captured_case,
    default_attentions,
    is_learned,
    sizes_of,
    synthetic_case,
)

transformers = pytest.importorskip("transformers")
SMALL = {"features": (4, 8), "length": 24, "heads": 3, "samples": 3, "head_dim": 8, "time_length": 16, "rounds": 1}
RESIDUES = list("ACDEFGHIKLMNPQRSTVWY")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A BERT over letters, with a tokenizer made of its vocabulary alone."""
    path = tmp_path_factory.mktemp("models") / "bert"
    config = transformers.BertConfig(
        vocab_size=25, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16
    )
    torch.manual_seed(3)
    transformers.BertForMaskedLM(config).save_pretrained(path)
    (path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *RESIDUES]))
    return path


@pytest.fixture(scope="module")
def decoder(model):
    """A Llama with two heads of queries for each of keys."""
    path = model.parent / "llama"
    config = transformers.LlamaConfig(
        vocab_size=25,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=16,
    )
    torch.manual_seed(4)
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    (path / "vocab.txt").write_text((model / "vocab.txt").read_text())
    return path


@pytest.fixture(scope="module")
def text(model):
    gen = torch.Generator().manual_seed(0)
    rows = ["".join(RESIDUES[i] for i in torch.randint(20, (n,), generator=gen)) for n in (9, 40, 12, 14)]
    path = model.parent / "text.txt"
    path.write_text("\n".join(rows))
    return path


@pytest.mark.parametrize("kind", ["isotropic", "anisotropic"])
def test_synthetic_vectors_have_their_norm_as_the_kernel_sees_them(kind):
    case = synthetic_case(FeaturesSettings(**SMALL), kind, 3.0)
    for x in (case.query, case.key, case.other_query, case.other_key):
        assert x.shape == (1, 3, 24, 8)
        torch.testing.assert_close(x.norm(dim=-1) * 8**-0.25, torch.full((1, 3, 24), 3.0))
    assert not torch.equal(case.query, case.other_query)
    many = synthetic_case(FeaturesSettings(**{**SMALL, "length": 4000}), kind, 1.0).query[0, 0] * 8**-0.25
    eigenvalues = torch.linalg.eigvalsh(many.T @ many / 4000)
    assert float(eigenvalues.sum()) == pytest.approx(1, rel=1e-4)
    assert (float(eigenvalues.max()) > 0.25) == (kind == "anisotropic")  # 1/8 of the variance in each direction


def test_attentions_are_those_that_stand_for_softmax_without_training():
    specs = default_attentions()
    assert {"favor+", "favor+:draw=simplex", "favor++", "favor#", "trigonometric", "wildcat"} <= set(specs)
    assert {"nystromformer", "skyformer:kernel=softmax:landmarks=leverage"} <= set(specs)
    assert not {"softmax", "relu", "elu", "nprf", "gmm-prf", "loglinear", "hedgehog", "linformer", "skyformer"} & set(
        specs
    )
    assert is_learned("loglinear")
    assert [x.size for x in sizes_of("favor+:num_features=5", FeaturesSettings())] == [5]
    assert [x.size for x in sizes_of("elu", FeaturesSettings())] == [None]
    assert Sized.of("nystromformer").refusal(causal=True, window=0) == "not causal"
    assert Sized.of("nystromformer").refusal(causal=False, window=4) == "takes no window"
    assert Sized.of("skyformer:kernel=softmax:align=True").refusal(causal=False, window=4) == "takes no window"
    assert Sized.of("favor+").refusal(causal=True, window=4) is None


@pytest.mark.parametrize("causal", [False, True])
def test_distances_are_those_of_their_definitions(causal, decoder, model, text):
    settings = FeaturesSettings(**SMALL)
    case = captured_case(settings, str(decoder), str(text)) if causal else synthetic_case(settings, "isotropic", 2.0)
    target = Target(case)
    scores = case.query.double() @ case.key.double().mT / math.sqrt(8)
    hidden = torch.ones(scores.shape[-2:]).triu(1).bool() if causal else torch.zeros(scores.shape[-2:]).bool()
    exact = scores.masked_fill(hidden, -math.inf).softmax(-1)
    uniform = torch.zeros_like(scores).masked_fill(hidden, -math.inf).softmax(-1)
    out, want = uniform @ case.value.double(), exact @ case.value.double()
    errors = [float((a - b).norm() / b.norm()) for a, b in zip(out.flatten(0, 1), want.flatten(0, 1), strict=True)]
    distance = float((uniform - exact).abs().sum() / 2 / exact[..., 0].numel())
    assert target.of_uniform() == pytest.approx((sum(errors) / len(errors), distance), rel=1e-5)
    assert target.of_core(build_attention(EXACT, **target.shape)) == (0, 0)


def test_captured_heads_are_the_models_own(decoder, model, text):
    """Heads 0, 1 of the first layer, then 2 of the second, with the keys that they share; texts are the longest."""
    case = captured_case(FeaturesSettings(**SMALL), str(decoder), str(text))
    assert case.about.causal
    assert case.about.tokens == 16  # 14 letters, a start and an end
    whole = transformers.AutoModelForCausalLM.from_pretrained(decoder, attn_implementation="eager").eval()
    rows = text.read_text().split()
    ids = [[2, *(5 + RESIDUES.index(x) for x in row[:14]), 3] for row in (rows[1], rows[3])]
    weights = whole(input_ids=torch.tensor(ids[:1]), output_attentions=True).attentions
    torch.testing.assert_close(
        Target(case).rows[0], torch.stack([weights[0][0, 0], weights[0][0, 1], weights[1][0, 2]])
    )
    encoder = captured_case(FeaturesSettings(**SMALL), str(model), str(text))
    assert not encoder.about.causal
    assert encoder.about.query_norm == pytest.approx(float(encoder.query.norm(dim=-1).mean()) * 8**-0.25)


def test_a_core_is_calibrated_where_it_can_be():
    case = synthetic_case(FeaturesSettings(**SMALL), "anisotropic", 2.0)

    def output(method, calibrate):
        core = build_attention(method, head_dim=8, num_heads=3, num_features=4)
        if calibrate:
            core = calibrated(core, case.other_query, case.other_key)
        return core(case.query, case.key, case.value)

    assert not torch.allclose(output("favor#", True), output("favor#", False))
    assert torch.equal(output("favor+", True), output("favor+", False))


def test_the_time_at_equal_error_is_the_least_of_the_sizes_that_are_enough(tmp_path):
    about = asdict(synthetic_case(FeaturesSettings(**SMALL), "isotropic", 1.0).about)
    record = Record(features.STUDY, FeaturesSettings(errors=(0.5, 0.2, 0.01)), tmp_path)
    record.figures = {"cases": {"x": about}, "rows": [], "times": []}
    for size, error, seconds in ((4, 0.6, 1.0), (8, 0.4, 3.0), (16, 0.1, 2.0), (32, 0.05, 4.0)):
        record.rows.append(features.new_row("x", 0, "a", size, [(error + gap, 0) for gap in (-0.01, 0, 0.01)]))
        key = {"head_dim": 8, "causal": False, "window": 0, "attention": "a", "size": size}
        record.figures["times"].append({**key, "seconds": seconds})
    curve = features.curves(record, "x", 0)["a"]
    assert features.least_time(record, curve, 0.5) == (2.0, curve[2])
    assert features.least_time(record, curve, 0.06) == (4.0, curve[3])
    assert features.least_time(record, curve, 0.01) is None
    assert [(x["seconds"], x["size"]) for x in features.equal_errors(record) if x["window"] == 0] == [
        (2.0, 16),
        (2.0, 16),
        (None, None),
    ]
    assert (curve[0]["output_mean"], curve[0]["output_standard_error"]) == pytest.approx((0.6, 0.01 / math.sqrt(3)))


def test_the_study_measures_draws_and_goes_on(model, decoder, text, tmp_path, monkeypatch):
    options = ["--norms", "1", "--length", "24", "--heads", "2", "--samples", "2", "--head-dim", "8", "--features", "4"]
    options += ["--time-length", "16", "--rounds", "1", "--window", "0,2", "--threads", "1", "--out", str(tmp_path)]
    options += ["--attention", "favor+,nystromformer,loglinear", "--model", f"{model},{decoder}", "--text", str(text)]
    original = features.make_case

    def stops(settings, name):
        if name == "llama":
            raise ValueError("stopped here")
        return original(settings, name)

    monkeypatch.setattr(features, "make_case", stops)
    done = CliRunner().invoke(app, ["study", "features", *options])
    assert "stopped here" in done.output
    made = []
    monkeypatch.setattr(features, "make_case", lambda settings, name: made.append(name) or original(settings, name))
    done = CliRunner().invoke(app, ["study", "features", *options], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    assert made == ["llama"]
    record = json.loads((tmp_path / "features.json").read_text())
    assert record["command"].startswith("kernelformer study features --attention favor+,nystromformer,loglinear")
    assert "--model bert,llama --text text.txt" in record["command"]
    assert record["untrained"] == ["loglinear"]
    assert record["left_out"]["llama, window 2"] == {"nystromformer": "not causal"}
    assert record["left_out"]["bert, window 2"] == {"nystromformer": "takes no window"}
    assert list(record["cases"]) == ["isotropic, norm 1", "anisotropic, norm 1", "bert", "llama"]
    # Of each case two references without a window, three with it, and the attentions.
    assert len(record["rows"]) == 3 * (2 + 3 + 3 + 2) + (2 + 2 + 3 + 2)
    rows = {(x["data"], x["window"], x["attention"], x["size"]): x for x in record["rows"]}
    assert rows["bert", 0, EXACT, None]["output_mean"] == 0
    assert rows["bert", 2, UNIFORM, None]["row_mean"] == rows["bert", 0, UNIFORM, None]["row_mean"]
    assert rows["bert", 2, WINDOW_ALONE, None]["row_mean"] > 0
    one = rows["isotropic, norm 1", 0, "favor+", 4]
    assert one["output_mean"] == pytest.approx(sum(one["outputs"]) / 3)
    assert len(set(one["outputs"])) == 3
    assert {(x["causal"], x["window"]) for x in record["times"]} == {(a, b) for a in (False, True) for b in (0, 2)}
    assert all(x["seconds"] > 0 for x in record["times"])
    for shown in (done.output, (tmp_path / "features.md").read_text()):
        assert "loglinear (untrained)" in shown
        assert "Time at equal error: llama, 16 tokens, causal" in shown
    assert (tmp_path / "features.png").stat().st_size > 20000


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"features": (4, 4)}, r"features must be different numbers, at least one, got \[4, 4\]"),
        ({"window": ()}, r"window must be different numbers, at least one, got \[\]"),
        ({"norms": ()}, r"norms and models must be different, .* got norms \[\] and models \[\]"),
        ({"model": ("a/x", "b/x"), "text": ("t",)}, r"models \['x', 'x'\]; models go by the last part"),
        ({"model": ("x",)}, "text must be one file for all models or one for each, got 0 for 1 models"),
        ({"text": ("t",)}, "text must be one file for all models or one for each, got 1 for 0 models"),
        ({"model": ("x",), "text": ("nothing.txt",)}, r"there is no file nothing\.txt to read text from"),
        ({"draws": 2}, "draws must be an integer of at least 3, got 2"),
    ],
)
def test_wrong_settings_are_named(wrong, message):
    with pytest.raises(ValueError, match=message):
        features.check_settings(FeaturesSettings(**wrong))


def test_texts_that_are_too_few_are_named(model, text):
    with pytest.raises(ValueError, match=r"text\.txt has 4 texts, and 6 are needed"):
        captured_case(FeaturesSettings(texts=3), str(model), str(text))
    assert features.steps(FeaturesSettings(norms=(1.0,), model=("x",))) == 2 * (3 + 2)
