"""Choice of the weights that a run keeps: the last, or those of its best evaluation, whatever happens."""

from __future__ import annotations

import json
import math
import shutil

import pytest
import torch
from test_training import Lines, Ragged, losses, same_weights, tiny

from kernelformer.models import KernelformerForCausalLM
from kernelformer.modules.schedules import random_maps
from kernelformer_lab.records import Result
from kernelformer_lab.tasks import TASKS, make_task
from kernelformer_lab.training import evaluate, train
from kernelformer_lab.training.checkpoints import metrics
from kernelformer_lab.training.inspection import DamagedError, check_checkpoint
from kernelformer_lab.training.selection import Best, prune
from kernelformer_lab.training.session import gradient_norms
from kernelformer_lab.training.trainer import RunTrainer


class Near(Ragged):
    """The best loss is the one nearest to a wanted one, so that it can be in the middle of a run."""

    name, metric = "near", "distance"

    def __init__(self, *, wanted: float = 0.0, test: int = 9):
        super().__init__()
        self.wanted, self.test = wanted, test

    def split(self, name):
        if name == "test" and not self.test:
            raise ValueError("there is no test.txt.")
        return Lines(self.test, self.length) if name == "test" else super().split(name)

    def score(self, outcome):
        return {"distance": abs(outcome.loss - self.wanted), "accuracy": outcome.right}


@pytest.fixture(autouse=True)
def _task(_threads):
    TASKS["near"] = Near
    torch.set_num_threads(1)


def best(wanted=0.0, **settings):
    return tiny(task="near", task_options={"wanted": wanted}, eval_every=2, select="best", **settings)


@pytest.fixture(scope="module")
def middle(tmp_path_factory):
    """The loss of a run in its middle, where it is the best one if that is what is wanted."""
    TASKS["near"] = Near
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("last") / "run"
    result = train(tiny(task="near", eval_every=2), folder, quiet=True)
    assert (result.best_step, result.test) == (None, {})
    assert not list(folder.glob("best-*"))
    return next(x["eval_loss"] for x in metrics(folder) if x["step"] == 6 and "eval_loss" in x)


@pytest.fixture(scope="module")
def selected(middle, tmp_path_factory):
    """A run without interruption, and its result."""
    TASKS["near"] = Near
    folder, said = tmp_path_factory.mktemp("best") / "run", []
    result = train(best(middle), folder, log=said.append)
    return folder, result, said[-1]


def test_the_best_weights_are_the_model_and_are_scored_on_the_test_split(selected):
    folder, result, said = selected
    line = next(x for x in metrics(folder) if x["step"] == 6 and "eval_loss" in x)
    assert result.best_step == 6
    assert result.steps == 12
    assert (result.value, result.loss) == (line["eval_distance"], line["eval_loss"])
    assert (result.value_error, result.loss_error) == (line["eval_distance_error"], line["eval_loss_error"])
    assert result.scores["accuracy"] == line["eval_accuracy"]
    found = evaluate(folder)
    assert found["loss"] == pytest.approx(result.loss, rel=1e-6)
    test = evaluate(folder, split="test")
    assert test.pop("distance_error") == pytest.approx(result.test_error, rel=1e-5)
    test.pop("loss_error")
    assert result.test == pytest.approx(test, rel=1e-6)
    assert result.test["loss"] != result.loss
    assert [x.name for x in folder.glob("best-*")] == ["best-6"]
    assert "the best weights are those of step 6, distance on the test split" in said


def test_draws_of_random_features_belong_to_the_best_weights(selected):
    folder, _, _ = selected
    draws = {}
    for name in ("model", "best-6", "checkpoint-12"):
        model = KernelformerForCausalLM.from_pretrained(folder / name)
        draws[name] = [phi.draw_number for phi in random_maps(model)]
    assert draws["model"] == draws["best-6"] != draws["checkpoint-12"]


@pytest.mark.parametrize("where", ["after the best weights", "while they are saved"])
def test_a_killed_run_comes_to_the_same_best_weights(selected, middle, tmp_path, monkeypatch, where):
    folder, result, _ = selected

    def killed(*args, **kwargs):
        raise KeyboardInterrupt  # which nobody in the run hears

    step = RunTrainer.training_step
    with monkeypatch.context() as patch:
        if where == "while they are saved":
            patch.setattr("kernelformer_lab.training.selection.write_hashes", killed)
        else:  # after best-6, which no checkpoint knows yet
            patch.setattr(
                RunTrainer,
                "training_step",
                lambda self, *args: killed() if self.state.global_step == 8 else step(self, *args),
            )
        with pytest.raises(KeyboardInterrupt):
            train(best(middle), tmp_path, quiet=True)
    resumed = train(best(middle), tmp_path, resume=True, quiet=True)
    assert losses(tmp_path) == losses(folder)
    assert same_weights(tmp_path, folder)
    same = ("best_step", "value", "value_error", "loss", "scores", "test", "test_error", "grad_norm")
    assert [getattr(resumed, x) for x in same] == [getattr(result, x) for x in same]
    assert [x.name for x in tmp_path.glob("*") if x.name.startswith(("best-", ".part"))] == ["best-6"]


def test_a_longer_run_remembers_the_best_weights_that_it_had(selected, middle, tmp_path):
    folder = shutil.copytree(selected[0], tmp_path / "run")
    longer = train(best(middle, steps=14), folder, resume=True, quiet=True)
    assert (longer.best_step, longer.steps) == (6, 14)
    assert same_weights(folder, selected[0])


@pytest.mark.parametrize("damage", ["missing", "changed"])
def test_a_checkpoint_without_its_best_weights_is_damaged(selected, tmp_path, damage):
    folder = shutil.copytree(selected[0], tmp_path / "run")
    check_checkpoint(folder / "checkpoint-12", 12)
    if damage == "missing":
        shutil.rmtree(folder / "best-6")
    else:
        (folder / "best-6" / "config.json").write_text("{}")
    with pytest.raises(DamagedError, match="best weights that it names"):
        check_checkpoint(folder / "checkpoint-12", 12)


def test_weights_stay_as_long_as_a_checkpoint_calls_them_the_best(tmp_path):
    for step, known in ((10, 4), (20, 16)):
        (tmp_path / f"checkpoint-{step}").mkdir()
        state = {"stateful_callbacks": {"Best": {"args": {}, "attributes": {"step": known, "scores": {}}}}}
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text(json.dumps(state))
    for name in ("best-2", "best-4", "best-16", "best-22", "best-of-all"):
        (tmp_path / name).mkdir()
    prune(tmp_path, 22)
    assert {x.name for x in tmp_path.glob("best-*")} == {"best-4", "best-16", "best-22", "best-of-all"}
    prune(tmp_path)
    assert {x.name for x in tmp_path.glob("best-*")} == {"best-4", "best-16", "best-of-all"}


def test_the_earliest_of_equals_is_the_best_and_nan_never_is():
    lower, higher = Best(Near()), Best(make_task("listops"))
    values = [math.nan, 3.0, math.nan, 2.0, 2.0, 5.0]
    assert [lower.take(i, {"eval_distance": x}) for i, x in enumerate(values, 1)] == [
        True,
        True,
        False,
        True,
        *[False] * 2,
    ]
    assert [higher.take(i, {"eval_accuracy": x}) for i, x in enumerate(values, 1)] == [True, True, *[False] * 3, True]
    assert (lower.step, higher.step) == (4, 6)
    with pytest.raises(ValueError, match="whose 'distance' is not among them"):
        lower.take(7, {"eval_loss": 1.0})
    translation = Best(make_task("translation"))  # BLEU is measured at the end, so that the loss decides
    assert [translation.take(i, {"eval_loss": x}) for i, x in enumerate((3.0, 2.0, 5.0), 1)] == [True, True, False]


def test_what_cannot_be_selected_is_said_before_anything_is_trained(tmp_path):
    run = tiny(task="near", task_options={"test": 0}, select="best")
    with pytest.raises(ValueError, match=r"test split, which task 'near' cannot give: there is no test\.txt\. Give it"):
        train(run, tmp_path, quiet=True)
    assert not metrics(tmp_path)


def test_norms_of_gradients_are_those_of_every_step_before_they_are_shortened(tmp_path):
    results = {}
    for norm in (None, 1e-3):
        folder = tmp_path / str(norm)
        result = train(tiny(steps=3, max_grad_norm=norm), folder, quiet=True)
        norms = [line["grad_norms"] for line in metrics(folder) if "loss" in line]
        assert [len(x) for x in norms] == [2, 1]
        every = sorted(x for line in norms for x in line)
        assert result.grad_norm == pytest.approx(
            {"median": every[1], "p95": 0.9 * every[2] + 0.1 * every[1], "max": every[2]}
        )
        results[norm] = norms[0][0]
    assert results[None] == results[1e-3] > 0.1


def test_norms_that_are_not_finite_do_not_count_and_older_lines_have_one():
    lines = [{"loss": 1.0, "grad_norm": 2.0}, {"loss": 1.0, "grad_norm": 9.0, "grad_norms": [4.0, math.nan, 9.0]}]
    assert gradient_norms(lines) == {"median": 4.0, "p95": pytest.approx(8.5), "max": 9.0}
    assert gradient_norms([{"eval_loss": 1.0}]) == {}


def test_a_result_of_an_older_version_still_reads(selected):
    record = json.loads(json.dumps(selected[1].as_json()))
    assert Result.from_json(record) == selected[1]
    for name in ("value_error", "loss_error", "best_step", "test", "test_error", "grad_norm"):
        del record[name]
    older = Result.from_json(record)
    assert math.isnan(older.value_error)
    assert (older.best_step, older.test, older.grad_norm) == (None, {}, {})
