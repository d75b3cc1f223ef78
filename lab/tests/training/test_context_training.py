"""Training with sequences over ranks learns what one process learns, and evaluates alike."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from test_training import losses, register, tiny

from kernelformer_lab.records import read_result
from kernelformer_lab.training import train
from kernelformer_lab.training.config import Run
from rank_processes import on_ranks

NEAR = "favor+:num_features=8:window=3:sinks=1:rotary=True"
CASES = {
    "causal": ("ragged", NEAR, {"micro_batch": 2}),
    "classes": ("parity", "gmm-prf:num_features=8", {}),
}


def _run(kind, ranks, world, **others):
    task, attention, settings = CASES[kind]
    given = {"batch_size": 4, "log_every": 1, "redraw": 2, "steps": 6, "eval_every": 3, "save_every": 4} | settings
    all_ranks = kind == "classes" and ranks == world > 1
    others = {"context_parallel": 0 if all_ranks else ranks, **others}
    return tiny(attention, task, model={"dropout": 0.0}, **given | others)


def _train(folder, ranks, world, **others):
    register()
    os.environ["LOCAL_WORLD_SIZE"] = str(world)
    for kind in CASES:
        train(
            _run(kind, ranks, world, **others), Path(folder) / kind, quiet=True, resume=(Path(folder) / kind).exists()
        )


def _close(one, two):
    assert len(one) == len(two)
    for a, b in zip(one, two, strict=True):
        assert a == pytest.approx(b, rel=2e-4, abs=2e-5)


def _compare(folder, one):
    for kind in CASES:
        _close(losses(folder / kind), losses(one / kind))
        found, want = read_result(folder / kind), read_result(one / kind)
        assert found.value == pytest.approx(want.value, rel=2e-4)
        assert found.loss_error == pytest.approx(want.loss_error, rel=2e-3)


@pytest.fixture
def one(tmp_path):
    """The runs of one process."""
    torch.set_num_threads(1)
    _train(tmp_path / "one", 1, 1)
    return tmp_path / "one"


def test_two_ranks_learn_what_one_process_learns(one, tmp_path):
    assert on_ranks(2, _train, str(tmp_path / "two"), 2, 2) == [None] * 2
    _compare(tmp_path / "two", one)


@pytest.mark.slow
def test_two_replicas_of_two_ranks_and_checkpoints_on_any_number(one, tmp_path):
    four = tmp_path / "four"
    assert on_ranks(4, _train, str(four), 2, 4) == [None] * 4
    _compare(four, one)
    # More steps: from the checkpoint of four processes on by one, of one by three ranks.
    longer = {"steps": 9, "schedule": "constant"}
    for folder in (one, four):
        shutil.rmtree(folder)
    _train(one, 1, 1, schedule="constant")
    assert on_ranks(4, _train, str(four), 2, 4, schedule="constant") == [None] * 4
    shutil.copytree(one, tmp_path / "three")
    _train(four, 1, 1, **longer)
    assert on_ranks(3, _train, str(tmp_path / "three"), 3, 3, **longer) == [None] * 3
    _train(one, 1, 1, **longer)
    for folder in (four, tmp_path / "three"):
        _compare(folder, one)


def test_what_cannot_be_split_is_said_at_once():
    with pytest.raises(ValueError, match="'echo' has pairs"):
        tiny(task="echo", context_parallel=2)
    with pytest.raises(ValueError, match=r"label_smoothing=0\.1"):
        tiny(context_parallel=0, label_smoothing=0.1)
    with pytest.raises(ValueError, match="a multiple of 2"):
        train(tiny(context_parallel=2), "nowhere", quiet=True)


@pytest.mark.parametrize(("old", "now"), [(("data", 1), 1), (("data", 2), 2), (("context", 1), 0), (("context", 2), 2)])
def test_a_run_of_an_older_version_is_read_with_its_two_settings(old, now):
    record = tiny().as_json() | dict(zip(("parallel", "context_parallel"), old, strict=True))
    assert Run.from_json(record).context_parallel == now
