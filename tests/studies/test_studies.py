"""Studies: they run, learn, keep what is finished and refuse to mix settings."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from kernelformer.cli.app import app
from kernelformer.studies import kernels, sparsity
from kernelformer.studies.sparsity import Curve, Setting

TINY = Setting(length=12, train=200, validation=50, batch=8, steps=6, check_every=3, num_features=16)


@pytest.mark.parametrize("method", sparsity.METHODS)
def test_every_method_of_the_sparsity_study_trains(method):
    curve = sparsity.train(method, 0.5, TINY)
    assert curve.steps == [3, 6]
    assert all(0 <= x <= 1 for x in curve.accuracy)


def test_a_run_depends_on_its_seed_alone():
    one, same = (sparsity.train("fastfood-prf", 0.5, TINY) for _ in range(2))
    assert one.accuracy == same.accuracy
    model, again = (sparsity.Classifier(TINY, "gmm-prf", s) for s in (0, 1))
    a, b = (x.blocks[0].attention.core.feature_map.noise for x in (model, again))
    assert not torch.equal(a, b)


def test_a_study_goes_on_where_it_was_stopped(tmp_path, monkeypatch):
    path = tmp_path / "sparsity.json"
    first = sparsity.study(["softmax"], [0.5], TINY, path)
    trained = []
    train = sparsity.train
    monkeypatch.setattr(sparsity, "train", lambda *a, **k: trained.append(a[0]) or train(*a, **k))
    curves = sparsity.study(["softmax", "gmm-prf"], [0.5], TINY, path)
    assert trained == ["gmm-prf"]
    assert curves[0] == first[0]
    assert len(json.loads(path.read_text())["curves"]) == 2
    with pytest.raises(ValueError, match=r"holds results of another setting \({'steps': 6}\); move it away"):
        sparsity.study(["softmax"], [0.5], Setting(**{**vars(TINY), "steps": 7}), path)
    with pytest.raises(ValueError, match="unknown option for method 'softmax', 'learn'"):
        sparsity.study(["softmax:learn=S"], [0.5], TINY, path)


def test_the_table_and_the_picture(tmp_path):
    curves = [Curve("a", 0.1, s, [1, 2], [0.5, x], 1.0) for s, x in enumerate((0.9, 0.85))]
    curves.append(Curve("b", 0.1, 0, [1, 2], [0.1, 0.2], 2.0))
    assert curves[0].reached(0.8) == 2
    assert curves[2].reached(0.8) is None
    assert sparsity.table(curves).row_count == 2
    sparsity.picture(curves, tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 5000


def test_the_commands(tmp_path):
    options = ["--relevances", "0.5", "--steps", "2", "--length", "8", "--features", "16", "--out", str(tmp_path)]
    run = CliRunner().invoke(app, ["study", "sparsity", "--attention", "fastfood-prf:learn=S", *options])
    assert run.exit_code == 0, run.output
    assert "fastfood-prf:learn=S" in run.output
    assert (tmp_path / "sparsity.png").exists()
    run = CliRunner().invoke(app, ["study", "sparsity", "--attention", "fastfood-prf:learn=X", *options])
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
    found = kernels.run(lambda text: None)
    assert [t.row_count for t in kernels.tables(found)] == [6, 3]
    kernels.picture(found, tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 5000


@pytest.mark.slow
@pytest.mark.parametrize("method", ["softmax", "gmm-rks", "gmm-prf", "fastfood-prf", "generative-prf"])
def test_the_sparsity_task_is_learned(method):
    setting = Setting(length=24, train=8000, validation=1000, steps=500, num_features=32)
    assert sparsity.train(method, 0.5, setting).accuracy[-1] > 0.8
