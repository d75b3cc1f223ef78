"""The study of redraws on trained models of a second: measures of one run, the whole study, and what it refuses."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("transformers")
from kernelformer.cli.app import app
from kernelformer.modules.schedules import random_maps
from kernelformer_lab.analysis.redraws import gradient_figures
from kernelformer_lab.analysis.spectra import spectra
from kernelformer_lab.studies import redraws
from kernelformer_lab.studies.base import Record
from kernelformer_lab.studies.redraws import RedrawsSettings as Settings
from kernelformer_lab.studies.redraws import (
    logits_over_draws,
    open_run,
    redraw_statistics,
    restored_draws,
    validation_samples,
)
from kernelformer_lab.training import Run, train

TINY = Run(
    task="sparsity",
    attention="gmm-rks:num_features=4:start=xavier",
    task_options={"length": 6, "train_samples": 24, "validation_samples": 10, "test_samples": 4, "relevance": 0.5},
    model={"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "classifier_size": 5},
    steps=3,
    batch_size=4,
    learning_rate=0.05,
    redraw=1,
    save_every=1,
    keep=3,
    eval_every=1,
    log_every=1,
)
RUNS = {"mixture": {}, "mixture-1": {"seed": 1}, "fastfood": {"attention": "fastfood-prf:num_features=4"},
        "diagonal": {"attention": "gmm-prf:num_features=4"}, "exact": {"attention": "softmax"}}  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Folders of finished runs, by name, in the folder of a comparison."""
    home = tmp_path_factory.mktemp("runs")
    for name, changes in RUNS.items():
        train(replace(TINY, **changes), home / name, quiet=True)
    return home


def test_statistics_of_a_run_are_those_of_its_logits_over_fresh_draws(runs):
    out = redraw_statistics(runs / "mixture", draws=4, samples=6)
    json.dumps(out)
    run, model, task = open_run(runs / "mixture")
    assert run == TINY
    own = [phi.draw_number for phi in random_maps(model)]
    assert out["first_draw"] == max(own) + 1 > 1  # training has redrawn
    assert (out["draws"], out["samples"], out["deterministic"], out["seed"]) == (4, 6, False, 0)
    data = validation_samples(task, 6, run)
    accuracies = []
    with torch.no_grad():
        for draw in range(out["first_draw"], out["first_draw"] + 4):
            for phi in random_maps(model):
                phi.resample(draw)
            guesses = torch.cat([model(**x).logits.argmax(-1) for x in data.batches])
            accuracies.append(float((guesses == data.labels).double().mean()))
    assert list(out["figures"]["accuracies"]) == pytest.approx(accuracies)
    assert out["figures"]["rsd"]["mean"] > 0
    assert redraw_statistics(runs / "mixture", draws=4, samples=6) == out
    assert redraw_statistics(runs / "mixture", draws=4, samples=6, first_draw=50) != out


def test_samples_are_those_of_the_split_whatever_their_order(runs):
    run, _, task = open_run(runs / "mixture")
    split = task.split("validation")
    data = validation_samples(task, 100, run)
    assert sorted(data.labels.tolist()) == sorted(int(split[i]["labels"]) for i in range(10))
    first = validation_samples(task, 3, run, first=True)
    assert sorted(first.labels.tolist()) == sorted(int(split[i]["labels"]) for i in range(3))


def test_layers_have_different_draws_and_the_model_keeps_its_own(runs):
    run, model, task = open_run(runs / "mixture")
    before = {name: x.clone() for name, x in model.state_dict().items()}
    with restored_draws(model):
        logits_over_draws(model, validation_samples(task, 4, run), [7])
        a, b = random_maps(model)
        assert a.draw_number == b.draw_number == 7
        assert not torch.equal(a.noise, b.noise)
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(x, after[name]) for name, x in before.items())
    assert any(int(x) for name, x in before.items() if name.endswith("age"))


def test_a_method_that_draws_nothing_has_no_variance_and_says_so(runs):
    out = redraw_statistics(runs / "exact", draws=4, samples=6)
    figures = out["figures"]
    assert (out["deterministic"], out["draws"], out["first_draw"]) == (True, 1, None)
    assert (figures["rsd"]["mean"], figures["pi"]["mean"], figures["accuracy_deviation"]) == (0, 0, 0)
    assert figures["accuracy"]["mean"] == figures["voting_accuracy"]["mean"] == out["own_draw"]["accuracy"]


def test_eigenvalues_at_both_ends_are_those_of_the_models(runs):
    state = torch.random.get_rng_state()
    out = redraws.eigenvalue_statistics(runs / "mixture")
    assert torch.equal(torch.random.get_rng_state(), state)
    _, model, _ = open_run(runs / "mixture")
    rows = spectra(model)
    assert [(x["layer"], x["head"]) for x in out["end"]["heads"]] == [(1, 1), (1, 2), (2, 1), (2, 2)]
    assert [x["maximum"] for x in out["end"]["heads"]] == [x.maximum for x in rows]
    assert out["end"]["maximum"] == max(x.maximum for x in rows)
    assert out["start"]["mean"] != out["end"]["mean"]
    assert out["start"]["maximum"] < 4 * 2 / (4 + 2) * 4  # Xavier's, heads of 4: S S^T is at most its trace
    table = redraws.eigenvalue_table(out, "x")
    assert table.row_count == 4
    assert redraws.eigenvalue_statistics(runs / "exact")["end"] is None
    assert not redraws.eigenvalue_statistics(runs / "fastfood")["end"]["learned"]
    diagonal = redraws.eigenvalue_statistics(runs / "diagonal")
    assert diagonal["start"]["mean"] == 1
    assert diagonal["start"]["squared_log_variance"]["maximum"] == 0
    assert 0 < diagonal["end"]["squared_log_variance"]["mean"] < 1


def test_gradients_over_training_are_those_of_every_checkpoint(runs):
    rows = redraws.gradient_statistics(runs / "mixture", draws=3, samples=4)
    assert [x["step"] for x in rows] == [1, 2, 3]
    assert all(0 <= x["accuracy"] <= 1 for x in rows)
    run, model, task = open_run(runs / "mixture")
    data = validation_samples(task, 4, run, first=True)
    seen = []
    for draw in range(random_maps(model)[0].draw_number + 1, random_maps(model)[0].draw_number + 4):
        for phi in random_maps(model):
            phi.resample(draw)
        units = []
        hook = model.head[-1].register_forward_pre_hook(lambda _, inputs, units=units: units.append(inputs[0]))
        losses = [model(**x, labels=data.labels[:4]).loss * 4 for x in data.batches]
        seen.append(torch.autograd.grad(losses[0], units[0])[0])
        hook.remove()
    want = gradient_figures(torch.stack(seen))
    assert rows[-1]["absolute_mean"] == pytest.approx(want.absolute_mean, rel=1e-4)
    assert rows[-1]["redraw_deviation"] == pytest.approx(want.redraw_deviation, rel=1e-3)
    first = rows[0]["accuracy"]
    assert redraws.gradient_statistics(runs / "mixture", draws=3, samples=4, levels=[first]) == [rows[0], rows[-1]]
    assert redraws.gradient_statistics(runs / "mixture", draws=3, samples=4, levels=[2]) == rows[-1:]
    exact = redraws.gradient_statistics(runs / "exact", draws=3, samples=4)
    assert [x["redraw_deviation"] for x in exact] == [0, 0, 0]


def test_the_command_measures_a_comparison_and_goes_on(runs, tmp_path, monkeypatch):
    given = ["study", "redraws", str(runs / "exact"), str(runs), "--draws", "3", "--samples", "6", "--gradients", "2"]
    done = CliRunner().invoke(app, [*given, "--out", str(tmp_path)], env={"COLUMNS": "250"})
    assert done.exit_code == 0, done.output
    assert "draws nothing" in done.output
    assert "gmm-rks:num_features=4:start=xavier, seed 0" in " ".join(done.output.split())
    record = json.loads((tmp_path / "redraws.json").read_text())
    assert record["command"].startswith(f"kernelformer study redraws exact {runs.name} --draws 3")
    assert {x["folder"] for x in record["runs"]} == set(RUNS)
    mixture = next(x for x in record["methods"] if x["attention"] == TINY.attention)
    assert mixture["seeds"] == [0, 1]
    values = [x["redraws"]["figures"]["pi"]["mean"] for x in record["runs"] if x["attention"] == TINY.attention]
    assert mixture["pi"]["mean"] == pytest.approx(sum(values) / 2)
    assert mixture["pi"]["deviation"] == pytest.approx(abs(values[0] - values[1]) / math.sqrt(2))
    assert [x["methods"] for x in record["correlations"]] == [3, 3, 3]
    assert (tmp_path / "redraws.png").stat().st_size > 20000

    measured = []
    original = redraws.measure_run
    monkeypatch.setattr(redraws, "measure_run", lambda path, *rest: measured.append(path.name) or original(path, *rest))
    settings = {"draws": 3, "samples": 6, "gradients": 2}
    few = Settings(runs=(str(runs / "mixture"), str(runs / "exact")), **settings)
    again = redraws.STUDY.measure(few, tmp_path)
    assert measured == []
    assert [x["redraws"] for x in again.figures["runs"]] == [
        x["redraws"] for name in ("mixture", "exact") for x in record["runs"] if x["folder"] == name
    ]
    redraws.STUDY.measure(Settings(runs=(str(runs / "exact"),), **{**settings, "draws": 2}), tmp_path)
    assert measured == ["exact"]


def test_runs_that_cannot_be_measured_are_named_and_left_out(runs, tmp_path):
    shutil.copytree(runs / "exact", tmp_path / "a" / "exact")
    shutil.copytree(runs / "mixture", tmp_path / "a" / "cut")
    shutil.rmtree(tmp_path / "a" / "cut" / "model")
    (tmp_path / "x.txt").write_text("a short text of a few words\n" * 20)
    texts = Run(
        task="bytes",
        attention="softmax",
        task_options={"data": str(tmp_path / "x.txt"), "length": 8, "validation_samples": 2},
        model={"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1},
        steps=1,
        batch_size=2,
        learning_rate=0.01,
    )
    train(texts, tmp_path / "a" / "texts", quiet=True)
    said = []
    settings = Settings(runs=(str(tmp_path / "a"),), draws=2, samples=4, gradients=0)
    result = redraws.STUDY.measure(settings, tmp_path / "out", said.append)
    assert [x["folder"] for x in result.figures["runs"]] == ["exact"]
    assert set(result.figures["left_out"]) == {"cut", "texts"}
    assert "task 'bytes' has labels" in result.figures["left_out"]["texts"]
    assert any("cut is left out: it is finished" in x for x in said)
    with pytest.raises(ValueError, match="no run could be measured: it is finished"):
        redraws.STUDY.measure(replace(settings, runs=(str(tmp_path / "a" / "cut"),)), tmp_path / "out2")


def test_wrong_folders_and_two_of_the_same_are_refused(runs, tmp_path):
    with pytest.raises(ValueError, match="is no folder; give the folder of a run or of a comparison"):
        redraws.steps(Settings(runs=(str(tmp_path / "nothing"),)))
    with pytest.raises(ValueError, match=r"has no run\.json, nor has a folder in it"):
        redraws.steps(Settings(runs=(str(tmp_path),)))
    with pytest.raises(ValueError, match="there is nothing to measure"):
        redraws.steps(Settings(runs=()))
    shutil.copytree(runs / "exact", tmp_path / "again")
    settings = Settings(runs=(str(runs / "exact"), str(tmp_path / "again")), draws=2, samples=2, gradients=0)
    with pytest.raises(ValueError, match="exact and again are both of task 'sparsity', attention 'softmax' and seed 0"):
        redraws.STUDY.measure(settings, tmp_path / "out")
    with pytest.raises(ValueError, match="draws must be an integer of at least 2, got 1"):
        Settings(runs=("x",), draws=1)


def made(attention, seed, rsd, task="text", learned=True):
    """A run with made-up figures, whose PI and AGV follow its RSD."""
    mean = {"rsd": rsd, "pi": 20 * rsd, "agv": 1 + rsd / 10, "voting_accuracy": 0.7, "accuracy": 0.65}
    figures = {name: {"mean": x, "error": 0.01} for name, x in mean.items()}
    figures |= {"rsd_median": rsd / 2, "accuracy_deviation": 0.02, "accuracies": [0.6, 0.7]}
    heads = [{"layer": 1, "head": 1, "minimum": 0.1, "maximum": 2.0, "mean": 0.5}]
    ends = {"learned": learned, "minimum": 0.1, "maximum": 2.0, "mean": 0.5, "heads": heads}
    both = {"start": ends, "end": {**ends, "mean": 0.4}}
    statistics = {"figures": figures, "deterministic": rsd == 0, "own_draw": {"draw": 1, "accuracy": 0.66}}
    key = {"folder": f"{attention}-{seed}", "task": task, "attention": attention, "seed": seed, "weights": "x"}
    return {**key, "redraws": statistics, "eigenvalues": both, "gradients": []}


def test_correlations_leave_out_what_draws_nothing_and_tasks_stay_apart(tmp_path):
    runs = []
    for name, rsd in (("a:b=1", 0.2), ("b", 0.5), ("c", 1.1), ("softmax", 0.0)):
        for seed in (0, 1):
            runs.append(made(name, seed, rsd * (1 + 0.1 * seed)))
    runs.append(made("a:b=1", 0, 0.3, task="retrieval", learned=False))
    runs[-1]["redraws"]["figures"]["agv"]["mean"] = math.nan  # of a model that is never right
    result = Record(redraws.STUDY, Settings(runs=("x",)), tmp_path, redraws.summarize(runs, {}))
    rows = result.figures["correlations"]
    assert [(x["task"], x["methods"]) for x in rows] == [("text", 3)] * 3 + [("retrieval", 1)] * 3
    assert all(x["r2"] == pytest.approx(1) and x["r2_of_runs"] == pytest.approx(1) for x in rows[:3])
    assert all(math.isnan(x["r2"]) for x in rows[3:])
    assert {tuple(x["measures"]): x["paper"] for x in rows}[("PI", "AGV")] == 0.89
    shown = redraws.tables(result)
    assert [x.row_count for x in shown] == [5, 5, 5, 1, 1, 1, 1]
    redraws.picture(result, tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 40000


def test_a_command_has_a_word_for_each_folder():
    command = redraws.STUDY.command(Settings(runs=("/a/b", "c,d"), draws=7))
    assert command == "kernelformer study redraws b c,d --draws 7"
