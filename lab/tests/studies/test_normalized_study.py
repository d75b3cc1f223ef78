"""The study of Fig. 2 of NPRF with RPE on models of a second, and the change of a model's attention behind it."""

from __future__ import annotations

import json
import math
import shutil
import signal

import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("transformers")
from kernelformer.cli.app import app
from kernelformer.models import (
    KernelformerConfig,
    KernelformerForCausalLM,
    KernelformerForConditionalGeneration,
    KernelformerForSequenceClassification,
)
from kernelformer_lab.studies import normalized as study
from kernelformer_lab.studies import runs as byte_models
from kernelformer_lab.studies.normalized import NormalizedSettings, kernel_norms, reattend
from kernelformer_lab.training import StoppedError, TrainingError, session

TINY = {"steps": 2, "length": 16, "layers": 1, "width": 8, "heads": 2, "batch": 2, "draws": 2, "samples": 4}
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 24}
TOKENS = torch.randint(256, (3, 24), generator=torch.Generator().manual_seed(0))


def make(attention, kind=KernelformerForCausalLM, **settings):
    """A model whose weights are all somewhere else than at their first values."""
    torch.manual_seed(1)
    model = kind(KernelformerConfig(attention=attention, **{**SIZES, **settings})).eval()
    with torch.no_grad():
        for x in model.parameters():
            x += 0.1 * torch.randn_like(x)
    return model


@torch.no_grad()
def logits(model):
    return model(input_ids=TOKENS).logits


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("".join(f"line {i} of {i * i % 97} in a text\n" for i in range(200)))
    return path


@pytest.mark.parametrize("attention", ["softmax", "softmax:relative=1d", "softmax:normalize_qk=True:relative=1d"])
@pytest.mark.parametrize("share", [False, True])
def test_the_same_attention_again_is_exact(attention, share):
    model = make(attention, share_bias=share)
    again = reattend(model, attention)
    assert again is not model
    assert torch.equal(logits(again), logits(model))


def test_a_random_or_learned_attention_again_keeps_its_draw():
    for attention in ("favor+:num_features=8", "gmm-prf:num_features=8"):
        model = make(attention)
        for block in model.stack.blocks:
            block.attention.core.resample(3)
        assert torch.equal(logits(reattend(model, attention)), logits(model))
        assert not torch.equal(logits(reattend(model, attention, seed=5)), logits(model))


def test_another_attention_has_the_same_weights_and_its_own_draws():
    model = make("softmax:relative=1d").double()
    state = torch.random.get_rng_state()
    drawn = [reattend(model, "favor+:num_features=64:relative=1d", seed=seed) for seed in (0, 1, 0)]
    assert torch.equal(torch.random.get_rng_state(), state)
    for new in drawn:
        assert new.dtype == torch.float64
        assert not new.training
        assert new.config.attention == "favor+:num_features=64:relative=1d"
        assert {name: x.shape for name, x in new.named_parameters()} == {
            name: x.shape for name, x in model.named_parameters()
        }
        for mine, x in zip(new.parameters(), model.parameters(), strict=True):
            assert torch.equal(mine, x)
    assert torch.equal(logits(drawn[0]), logits(drawn[2]))
    assert not torch.equal(logits(drawn[0]), logits(drawn[1]))
    assert model.config.attention == "softmax:relative=1d"


@pytest.mark.parametrize("relative", ["", ":relative=1d"])
def test_features_of_the_same_kernel_come_closer_the_more_there_are(relative):
    """As 1 / sqrt(M), by 8 from 16 to 1024, were the model linear in its attention; another kernel would not."""
    model = make(f"softmax:normalize_qk=True{relative}")
    want = logits(model)

    def error(features):
        spec = f"nprf:num_features={features}:draw=iid{relative}"
        return torch.stack([(logits(reattend(model, spec, seed=i)) - want).square().mean() for i in range(4)]).mean()

    assert error(1024).sqrt() < error(16).sqrt() / 4


def test_absolute_positions_stay_what_they_were_trained_with():
    model = make("softmax")
    model.config.positions = "auto"
    assert reattend(model, "favor+").embeddings.positions == "sinusoidal"
    fixed = make("softmax:relative=1d:scheme=alibi")
    assert fixed.embeddings.positions == "none"
    assert reattend(fixed, "softmax").embeddings.positions == "none"


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("softmax:relative=1d", "favor+", r"positions.weight of a model with 'softmax:relative=1d' would be lost"),
        ("softmax", "nprf:relative=1d", r"positions.weight of a model with 'nprf:relative=1d' would not be trained"),
        ("softmax", "rfa-gate", r"gate.weight of a model with 'rfa-gate' would not be trained"),
        ("softmax:relative=1d", "nprf:relative=1d:max_distance=4", r"is \(2, 24\), of one with .* \(2, 5\)"),
        ("gmm-prf", "favor+", r"core.* of a model with 'gmm-prf' would be lost"),
        ("softmax", "favour+", "unknown method 'favour\\+'; did you mean 'favor\\+'"),
    ],
)
def test_a_weight_without_a_place_is_named(before, after, message):
    with pytest.raises(ValueError, match=message):
        reattend(make(before), after)


def test_models_with_several_attentions_are_refused_and_classifiers_are_not():
    with pytest.raises(ValueError, match="got KernelformerForConditionalGeneration, which has three"):
        reattend(make("softmax", KernelformerForConditionalGeneration), "favor+")
    classifier = make("softmax", KernelformerForSequenceClassification, num_labels=3)
    assert torch.equal(logits(reattend(classifier, "softmax")), logits(classifier))


def test_norms_are_those_that_the_kernel_sees():
    model = make("softmax", num_hidden_layers=1)
    block = model.stack.blocks[0]
    with torch.no_grad():
        x = block.attention_norm(model.embeddings(TOKENS, torch.arange(24).unsqueeze(0)))
        q, k = (f(x).unflatten(-1, (2, 16)).norm(dim=-1) / 2 for f in (block.attention.query, block.attention.key))
    found = kernel_norms(model, TOKENS)
    want = [float(q.mean()), float(k.mean()), max(float(q.max()), float(k.max())), 0.0]
    assert list(found.values()) == pytest.approx(want, rel=1e-5)
    unit = kernel_norms(make("softmax:normalize_qk=True:scale=4.0:relative=1d"), TOKENS)
    assert [unit[x] for x in ("query", "key", "largest")] == pytest.approx([2, 2, 2], rel=1e-5)
    assert unit["bias"] > 0


@pytest.mark.slow
def test_what_is_trained_is_not_trained_again(text, tmp_path, monkeypatch):
    settings, folder = NormalizedSettings(data=text, features=(4,), **TINY), tmp_path / "out"
    run = study.STUDY.measure
    first = run(settings, folder)
    models = first.figures["models"]
    assert list(models) == [x.name for x in study.VARIANTS]
    shutil.rmtree(folder / "normalized" / "softmax-seed0")
    made, trainer = [], session.RunTrainer
    monkeypatch.setattr(
        session, "RunTrainer", lambda run, *rest, **more: made.append(run) or trainer(run, *rest, **more)
    )
    stages = []
    again = run(settings, folder, progress=lambda: stages.append(1))
    assert [run.attention for run in made] == ["softmax"]
    assert len(stages) == study.steps(settings)
    for name, x in again.figures["models"].items():
        assert {**x, "seconds": 0} == {**models[name], "seconds": 0}
    more = run(NormalizedSettings(data=text, features=(4, 2), **{**TINY, "draws": 3}), folder)
    assert len(made) == 1
    two, four = more.figures["models"]["standard"]["converted"]
    assert (two["features"], four["features"]) == (2, 4)
    assert four["draws"][:2] == models["standard"]["converted"][0]["draws"]
    with pytest.raises(TrainingError, match="other settings, there and here: steps 2 and 1"):
        run(NormalizedSettings(data=text, **{**TINY, "steps": 1}), folder)
    text.write_text(text.read_text().upper())
    with pytest.raises(TrainingError, match="a run on other data of task 'bytes'"):
        run(settings, folder)


def test_a_stopped_study_goes_on_where_it_was(text, tmp_path, monkeypatch):
    monkeypatch.setattr(study, "VARIANTS", study.VARIANTS[1:2])
    settings = NormalizedSettings(data=text, features=(4,), **{**TINY, "steps": 27})
    run = study.STUDY.measure

    def stop(text):
        if text.startswith("standard, relative: step 25 of 27"):
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(StoppedError, match=r"the training of the standard, relative model; the same call goes on"):
        run(settings, tmp_path / "models", stop)
    logged = []
    result = run(settings, tmp_path / "models", logged.append)
    assert not any("step 25" in x for x in logged)
    assert any("step 27 of 27" in x for x in logged)
    whole = run(settings, tmp_path / "whole")
    drawn = [[x["converted"] for x in y.figures["models"].values()] for y in (result, whole)]
    assert drawn[0] == drawn[1]


def test_the_study_measures_and_draws(text, tmp_path):
    sizes = [y for name, x in TINY.items() for y in (f"--{name}", str(x))]
    options = ["--features", "64,2", "--draw", "orthogonal", "--scale", "4", "--out", str(tmp_path)]
    done = CliRunner().invoke(app, ["study", "normalized", "--data", str(text), *sizes, *options])
    assert done.exit_code == 0, done.output
    record = json.loads((tmp_path / "normalized.json").read_text())
    assert record["setting"]["data"] == "text.txt"
    assert record["models"]["standard"]["attention"] == "softmax"
    one = record["models"]["normalized, relative"]
    assert one["attention"] == "softmax:normalize_qk=True:scale=4:relative=1d"
    assert one["norms"]["query"] == pytest.approx(2, rel=1e-5)
    assert [x["features"] for x in one["converted"]] == [2, 64]
    for model in record["models"].values():
        for part in model["converted"]:
            a, b = part["draws"]
            assert a != b
            assert part["mean"] == pytest.approx((a + b) / 2)
            assert part["standard_error"] == pytest.approx(abs(a - b) / 2)
            assert abs(part["mean"] - model["bits_per_byte"]) < 1
    assert "normalized, relative" in done.output
    assert (tmp_path / "normalized.png").stat().st_size > 20000


def test_a_model_that_diverges_is_named(text, tmp_path, monkeypatch):
    original = byte_models.train_model

    def diverges(*args, **kwargs):
        result = original(*args, **kwargs)
        return type(result)(**{**vars(result), "value": math.nan, "diverged": True})

    monkeypatch.setattr(byte_models, "train_model", diverges)
    with pytest.raises(TrainingError, match=r"the standard model diverged at step 2 with lr=0.005; take a smaller one"):
        study.STUDY.measure(NormalizedSettings(data=text, **TINY), tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"features": ()}, r"features must be different numbers, at least one, got \[\]"),
        ({"features": (4, 4)}, r"features must be different numbers, at least one, got \[4, 4\]"),
        ({"features": (4, 0)}, "features must be an integer of at least 1, got 0"),
        ({"draws": 1}, "draws must be an integer of at least 2, got 1"),
        ({"draw": "dice"}, "unknown draw 'dice'; .*choose from"),
        ({"scale": 0.0}, "scale must be a finite number above 0, got 0.0"),
        ({"lr": -1.0}, "lr must be a finite number above 0, got -1.0"),
        ({"width": 30, "heads": 4}, "width must be a multiple of heads, got 30 and 4"),
    ],
)
def test_wrong_settings_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        study.check_settings(NormalizedSettings(**options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--data", "nothing.txt"], "there is no file or folder nothing.txt"),
        (["--length", "9999"], "bytes, less than one sample of length=9999"),
        (["--features", "some"], "--features takes integers of at least 1"),
    ],
)
def test_wrong_input_of_the_command_is_said_before_anything_is_trained(text, tmp_path, monkeypatch, options, message):
    monkeypatch.setattr(byte_models, "train_model", lambda *_, **__: pytest.fail("trained first"))
    given = ["study", "normalized", "--data", str(text), "--out", str(tmp_path), *options]
    done = CliRunner().invoke(app, given)
    assert done.exit_code == 2
    assert message in " ".join(done.output.split())
