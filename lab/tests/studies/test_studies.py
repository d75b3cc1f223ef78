"""Studies: they run, learn, keep what is finished and refuse to mix settings."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from kernelformer.cli.app import app
from kernelformer.settings import given_as, options
from kernelformer_lab.cli.studies import app as study_app
from kernelformer_lab.studies import STUDIES, kernels, sparsity
from kernelformer_lab.studies.base import command, read_record
from kernelformer_lab.studies.settings import ConversionSettings, EncoderSettings, NoSettings
from kernelformer_lab.studies.settings import SparsitySettings as Settings
from kernelformer_lab.studies.sparsity import Curve
from kernelformer_lab.training import TrainingError, session

TINY = {"relevances": (0.5,), "steps": 2, "length": 8, "features": 16}


@pytest.fixture
def small(monkeypatch):
    """The recipe with a hundred samples."""
    recipe = sparsity.find_recipe("kl-sparsity").run()
    sizes = {"task.train_samples": 100, "task.validation_samples": 20, "task.test_samples": 20}
    run = sparsity.change(recipe, sizes)
    monkeypatch.setattr(sparsity, "find_recipe", lambda name: SimpleNamespace(run=lambda: run))


def test_every_method_of_the_sparsity_study_can_be_trained():
    for method in sparsity.METHODS:
        run = sparsity.training_of(method, 0.5, 3, Settings(features=32))
        assert (run.seed, run.task_options["relevance"]) == (3, 0.5)
        assert ("num_features=32" in run.attention) == (method != "softmax")
    assert sparsity.training_of("gmm-prf:num_features=8", 0.5, 0, Settings()).attention == "gmm-prf:num_features=8"


def test_a_study_goes_on_where_it_was_stopped(tmp_path, monkeypatch, small):
    def run(*attention, **options):
        settings = Settings(attention=attention, **{**TINY, **options})
        steps = []
        curves = STUDIES["sparsity"].run(settings, tmp_path, progress=lambda: steps.append(1))
        assert len(steps) == STUDIES["sparsity"].steps(settings)
        return curves

    (first,) = run("softmax")
    assert first.steps == [2]
    assert 0 <= first.accuracy[0] <= 1
    trained, trainer = [], session.RunTrainer
    monkeypatch.setattr(
        session, "RunTrainer", lambda run, *rest, **more: trained.append(run.attention) or trainer(run, *rest, **more)
    )
    curves = run("softmax", "gmm-prf")
    assert trained == ["gmm-prf:num_features=16"]
    assert curves[0] == first
    with pytest.raises(TrainingError, match="other settings, there and here: steps 2 and 1"):
        run("softmax", steps=1)
    with pytest.raises(ValueError, match="unknown option for method 'softmax', 'learn'"):
        run("softmax:learn=S")


def test_the_table_and_the_picture(tmp_path):
    curves = [Curve("a", 0.1, s, [1, 2], [0.5, x], 1.0) for s, x in enumerate((0.9, 0.85))]
    curves.append(Curve("b", 0.1, 0, [1, 2], [0.1, 0.2], 2.0))
    assert curves[0].reached(0.8) == 2
    assert curves[2].reached(0.8) is None
    (table,) = sparsity.tables(curves)
    assert table.row_count == 2
    sparsity.picture(curves, tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 5000


def test_the_command_of_sparsity(tmp_path, small):
    given = ["--relevances", "0.5", "--steps", "2", "--length", "8", "--features", "16", "--out", str(tmp_path)]
    run = CliRunner().invoke(app, ["study", "sparsity", "--attention", "fastfood-prf:learn=S", *given])
    assert run.exit_code == 0, run.output
    assert "fastfood-prf:learn=S" in run.output
    assert (tmp_path / "sparsity.png").exists()
    record = json.loads((tmp_path / "sparsity.json").read_text())
    assert [x["method"] for x in record["curves"]] == ["fastfood-prf:learn=S"]
    assert record["settings"]["steps"] == 2
    assert record["command"].startswith("kernelformer study sparsity --attention fastfood-prf:learn=S --relevances 0.5")
    run = CliRunner().invoke(app, ["study", "sparsity", "--attention", "fastfood-prf:learn=X", *given])
    assert run.exit_code == 2
    assert "unknown learn 'X'" in run.output


def test_where_kernels_start():
    near = {m: kernels.profile(m, head_dim=8, num_features=64, seeds=16) for m in ("gmm-rks", "fastfood-rks")}
    for p in near.values():
        assert p.distance < 5 * float(p.standard_error.max()) + 1e-3  # small means move the mixture by less
    assert kernels.profile("generative-rks", head_dim=8, num_features=64, seeds=8).distance > 0.3


def test_the_study_of_kernels_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(kernels, "NORMS", (0.5,))
    monkeypatch.setattr(kernels, "FEATURES", (16, 32))
    study, settings = STUDIES["kernels"], NoSettings()
    result = study.run(settings, tmp_path)
    assert [t.row_count for t in study.tables(result)] == [6, 3]
    study.save(settings, result, tmp_path)
    record = read_record(tmp_path, "kernels")
    assert len(record["errors"]) == 6
    assert record["environment"]["torch"]
    study.picture(result, tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 5000


@pytest.mark.parametrize("name", STUDIES)
def test_the_help_of_a_study_has_its_figure_and_every_setting(name):
    shown = CliRunner().invoke(app, ["study", name, "--help"], env={"COLUMNS": "200"}).output
    study = STUDIES[name]
    assert study.about in shown
    assert (study.figure or "no figure of a paper") in shown
    for each, how in options(study.settings):
        assert ((how.shown or each.name) if how.argument else f"--{given_as(each).replace('_', '-')}") in shown
    assert len(study_app.registered_commands) == len(STUDIES)


def test_the_command_of_a_record_has_what_is_not_a_default():
    assert command("encoder", EncoderSettings(lengths=(64, 128), depths=(), memory=False)) == (
        "kernelformer study encoder --lengths 64,128 --depths '' --no-memory"
    )
    paths = {"model": "/a/b/model", "text": Path("c/d.txt"), "held_out": Path("e.txt")}
    assert command("conversion", ConversionSettings(**paths, allow_pickle=True, layers=(0, "x.*"))) == (
        "kernelformer study conversion model --distill d.txt --text e.txt --layers '0,x.*' --allow-pickle"
    )


def test_settings_have_the_bounds_of_their_options():
    for wrong, message in (
        ({"steps": 0}, "steps must be an integer of at least 1, got 0"),
        ({"length": 3}, "length must be an integer of at least 4, got 3"),
        ({"seeds": 1.5}, "seeds must be an integer of at least 1, got 1.5"),
    ):
        with pytest.raises(ValueError, match=message):
            Settings(**wrong)
    with pytest.raises(ValueError, match="lengths must be an integer of at least 1, got 0"):
        EncoderSettings(lengths=(64, 0))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["softmax", "gmm-rks", "gmm-prf", "fastfood-prf", "generative-prf"])
def test_the_sparsity_task_is_learned(method, tmp_path):
    settings = Settings(attention=(method,), relevances=(0.5,), length=24, steps=500, features=32)
    (curve,) = STUDIES["sparsity"].run(settings, tmp_path)
    assert curve.accuracy[-1] > 0.8
