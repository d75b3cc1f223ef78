"""The study of Fig. 5 left of Performer on models of a second."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

pytest.importorskip("transformers")
from kernelformer_lab.evidence.rules import moved_values
from kernelformer_lab.records import portable
from kernelformer_lab.studies import transfer
from kernelformer_lab.studies.runs import byte_run
from kernelformer_lab.studies.transfer import TransferSettings

TINY = {"length": 16, "layers": 1, "width": 8, "heads": 2, "batch": 2, "samples": 4, "tuning": 2, "draws": 2}


@pytest.fixture
def settings(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("".join(f"line {i} of {i * i % 97} in a text\n" for i in range(200)))
    return TransferSettings(data=path, steps=20, attention=("favor+:num_features=8",), **TINY)


def test_weights_move_at_once_and_tuned(settings, tmp_path):
    figures = transfer.STUDY.measure(settings, tmp_path / "out").figures
    exact, favor = figures["moved"]
    assert exact["attention"] == "softmax"
    assert exact["at_once"] == [pytest.approx(figures["trained"][-1][1], rel=1e-6)]  # the weights as they are
    assert len(favor["at_once"]) == 2
    assert favor["at_once"][0] != favor["at_once"][1]  # draws of their own
    assert [step for step, _ in favor["tuned"]] == [1, 2]
    assert favor["tuned"][-1][1] < favor["fresh"][-1][1]  # 20 steps of training are in these weights


def test_fine_tuning_has_its_own_steps_and_rate(settings):
    run = byte_run(settings, "elu", steps=50, learning_rate=1e-3, start="somewhere")
    assert (run.steps, run.warmup_steps, run.learning_rate, run.bias_lr) == (50, 5, 1e-3, 1e-2)
    assert (run.start, run.batch_size, run.seed) == ("somewhere", 2, 0)
    assert byte_run(settings, "elu").steps == 20


def test_softmax_is_there_once_and_a_bad_rate_is_refused(settings, tmp_path):
    asked = TransferSettings(attention=("elu", "softmax"), tuning_lr=0.0)
    assert transfer.attentions(asked) == ["softmax", "elu"]
    with pytest.raises(ValueError, match="tuning_lr must be"):
        transfer.STUDY.measure(asked, tmp_path)


@pytest.mark.parametrize("attention", ["favour", "skyformer:num_landmarks=4", "nprf:num_features=4:relative=1d"])
def test_what_cannot_take_the_weights_is_said_before_anything_is_trained(settings, attention, tmp_path):
    with pytest.raises(ValueError, match=attention.split(":")[0]):
        transfer.STUDY.measure(replace(settings, attention=(attention,)), tmp_path)
    assert not (tmp_path / "transfer").exists()


def test_a_fine_tuning_that_diverges_is_on_record_as_such(settings, tmp_path, monkeypatch):
    original = transfer.train_model

    def diverges(run, *rest):
        result = original(run, *rest)
        return replace(result, diverged=True) if run.start else result

    monkeypatch.setattr(transfer, "train_model", diverges)
    result = transfer.STUDY.measure(settings, tmp_path)
    assert math.isnan(result.figures["moved"][1]["tuned"][-1][1])
    assert not math.isnan(result.figures["moved"][1]["fresh"][-1][1])
    record = json.loads(json.dumps(portable(result.figures)))
    assert math.isnan(moved_values(record)["favor+, tuned"])
    assert moved_values(record)["favor+, fresh"] > 0
