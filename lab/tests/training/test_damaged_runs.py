"""Folders of runs that somebody or something has damaged: one sentence with the file, the reason and the way out."""

from __future__ import annotations

import json
import os
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_training import interrupted, losses, register, tiny
from typer.testing import CliRunner

from kernelformer.cli.app import app
from kernelformer_lab.records import read_metrics, read_result, resume_command
from kernelformer_lab.training import StoppedError, TrainingError, evaluate, load_run, train
from kernelformer_lab.training.inspection import newest_whole


@pytest.fixture(autouse=True)
def _tasks(_threads):
    register()
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """One that was stopped after step 7, with a checkpoint before that, and the same one finished."""
    torch.set_num_threads(1)
    register()
    base = tmp_path_factory.mktemp("runs")
    with pytest.raises(StoppedError):
        interrupted(tiny(), base / "stopped", step=7)
    shutil.copytree(base / "stopped", base / "finished")
    train(tiny(), base / "finished", resume=True, quiet=True)
    return base


@pytest.fixture
def stopped(runs, tmp_path):
    return shutil.copytree(runs / "stopped", tmp_path / "run")


@pytest.fixture
def finished(runs, tmp_path):
    return shutil.copytree(runs / "finished", tmp_path / "run")


def cut(path, share=0.5):
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])


def flip(path):
    """Change one byte of the data."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 255
    path.write_bytes(bytes(content))


def other_weights(path):
    weights = load_file(path)
    name = next(x for x in weights if x.endswith("wide.weight"))
    save_file({**weights, name: weights[name][:5].clone()}, path)


class Code:
    """Code that unpickling would run."""

    def __reduce__(self):
        return print, ("this must not be run",)


def code(path):
    torch.save({"state": Code()}, path)


def garbage(path):
    path.write_bytes(b"not what it was")


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        ("model.safetensors", cut, "model.safetensors is damaged: "),
        ("model.safetensors", garbage, "model.safetensors is damaged: "),
        (
            "model.safetensors",
            other_weights,
            "model.safetensors is damaged: its blake2b hash is",
        ),
        ("model.safetensors", flip, r"model.safetensors is damaged: its blake2b hash is \w+, it was saved with \w+"),
        ("optimizer.pt", garbage, "optimizer.pt is damaged: File is not a zip file"),
        ("optimizer.pt", cut, "optimizer.pt is damaged: File is not a zip file"),
        ("optimizer.pt", flip, "optimizer.pt is damaged: .* has another checksum"),
        ("optimizer.pt", lambda path: torch.save({}, path), "optimizer.pt is damaged: its blake2b hash is"),
        ("optimizer.pt", code, r"optimizer.pt is damaged: it asks for builtins\.print, which no state of a run needs"),
        ("scheduler.pt", code, r"scheduler.pt is damaged: it asks for builtins\.print"),
        ("rng_state.pth", code, r"rng_state.pth is damaged: it asks for builtins\.print"),
        ("trainer_state.json", lambda path: path.write_text("[" * 100_000), "its brackets are nested too deeply"),
        ("hashes.json", cut, "hashes.json is damaged: "),
        ("scheduler.pt", lambda path: path.unlink(), "scheduler.pt is damaged: it is missing"),
        ("rng_state.pth", cut, "rng_state.pth is damaged: "),
        ("trainer_state.json", cut, "trainer_state.json is damaged: "),
        ("trainer_state.json", lambda path: path.write_text("{}"), "trainer_state.json is damaged: it has no 'global"),
    ],
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_serves(stopped, file, damage, message):
    damage(stopped / "checkpoint-7" / file)
    checkpoint, step, remarks = newest_whole(stopped)
    assert (checkpoint, step) == (stopped / "checkpoint-5", 5)
    (remark,) = remarks
    assert re.search(message, remark)
    assert remark.endswith("; going back to checkpoint-5; damaged-checkpoint-7 is what it is called now")
    assert "\n" not in remark


def test_a_run_goes_back_to_the_checkpoint_before_a_damaged_one_and_says_so(stopped, runs):
    flip(stopped / "checkpoint-7" / "model.safetensors")
    told = []
    train(tiny(keep=1), stopped, resume=True, log=told.append)
    assert "model.safetensors is damaged: its blake2b hash is" in told[0]
    assert told[1] == "going on from step 5"
    assert losses(stopped) == losses(runs / "finished")
    names = {x.name for x in stopped.glob("*checkpoint-*")}
    assert names == {"damaged-checkpoint-7", "checkpoint-12"}  # not the damaged one was kept as the newest


def test_a_checkpoint_without_hashes_serves_as_before(stopped, runs):
    for checkpoint in stopped.glob("checkpoint-*"):
        (checkpoint / "hashes.json").unlink()
    train(tiny(), stopped, resume=True, quiet=True)
    assert losses(stopped) == losses(runs / "finished")


def test_weights_of_another_model_in_a_checkpoint_without_hashes_are_named(stopped):
    (stopped / "checkpoint-7" / "hashes.json").unlink()
    other_weights(stopped / "checkpoint-7" / "model.safetensors")
    with pytest.raises(
        TrainingError, match=r"model.safetensors is damaged: .*wide.weight.*; remove .*checkpoint-7, and"
    ):
        train(tiny(), stopped, resume=True, quiet=True)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("optimizer.pt", None, "it holds a value of type NoneType, not a dict with state, param_groups"),
        ("optimizer.pt", {"state": {}}, "it has no 'param_groups'"),
        ("scheduler.pt", 5, "it holds a value of type int, not a dict with last_epoch"),
        ("scheduler.pt", {"last_epoch": "x"}, "its 'last_epoch' must be of type int, got str"),
        ("rng_state.pth", [1, 2], "it holds a value of type list, not a dict with python, numpy, cpu"),
        ("rng_state.pth", {}, "it has no 'python'"),
        ("rng_state.pth", {"python": 1, "numpy": 2, "cpu": 3}, "its 'python' must be of type tuple, got int"),
    ],
)
def test_states_of_another_kind_in_a_checkpoint_without_hashes_are_named(stopped, file, content, message):
    (stopped / "checkpoint-7" / "hashes.json").unlink()
    torch.save(content, stopped / "checkpoint-7" / file)
    checkpoint, _, (remark,) = newest_whole(stopped)
    assert checkpoint == stopped / "checkpoint-5"
    assert f"checkpoint-7/{file} is damaged: {message}; going back" in remark


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.pt", "trainer_state.json", "rng_state.pth"])
def test_a_pipe_in_a_checkpoint_is_not_waited_for(stopped, file):
    (stopped / "checkpoint-7" / file).unlink()
    os.mkfifo(stopped / "checkpoint-7" / file)
    checkpoint, _, (remark,) = newest_whole(stopped)
    assert checkpoint == stopped / "checkpoint-5"
    assert f"checkpoint-7/{file} is a named pipe (FIFO)" in remark


@pytest.mark.parametrize("file", ["run.json", "result.json", "metrics.jsonl", "model/model.safetensors"])
def test_a_pipe_in_a_run_is_not_waited_for(finished, file):
    (finished / file).unlink()
    os.mkfifo(finished / file)
    read = {
        "result.json": lambda: read_result(finished),
        "metrics.jsonl": lambda: list(read_metrics(finished)),
    }.get(file, lambda: load_run(finished))
    with pytest.raises((ValueError, TrainingError), match=rf"{file} is a named pipe \(FIFO\), and data is read from"):
        read()


def test_random_numbers_that_no_generator_takes_are_named(stopped):
    (stopped / "checkpoint-7" / "hashes.json").unlink()
    state = {"python": (1, 2), "numpy": ("x",), "cpu": torch.zeros(3)}
    torch.save(state, stopped / "checkpoint-7" / "rng_state.pth")
    with pytest.raises(TrainingError, match=r"rng_state.pth is damaged: .*; remove .*checkpoint-7, and the run goes"):
        train(tiny(), stopped, resume=True, quiet=True)


def test_a_run_without_a_whole_checkpoint_is_not_started_again_by_itself(stopped):
    for checkpoint in stopped.glob("checkpoint-*"):
        cut(checkpoint / "model.safetensors")
    with pytest.raises(TrainingError, match=r"checkpoint-7/model.* is damaged: .*remove all, and the run starts again"):
        train(tiny(), stopped, resume=True, quiet=True)
    shutil.rmtree(stopped / "checkpoint-5")
    with pytest.raises(TrainingError, match=r"remove .*checkpoint-7, and the run starts again"):
        train(tiny(), stopped, resume=True, quiet=True)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("run.json", "{}", "run.json: 'run' must be of type dict, got None; put it right, or train anew"),
        ("run.json", '{"run": {"task": "ragged"}, "environment": {}, "command": ""}', "needs the setting 'attention'"),
        ("run.json", "{", "run.json: not JSON: .*; put it right"),
        ("metrics.jsonl", '{"step": 1}\n', r"metrics.jsonl, line 1: seconds must be .*; remove that line"),
        ("metrics.jsonl", "{}\n", r"metrics.jsonl, line 1: step must be .*; remove that line"),
        ("metrics.jsonl", "xyz\n", r"metrics.jsonl, line 1: not JSON: .*; remove that line"),
    ],
)
def test_a_damaged_record_is_named_by_resume(stopped, file, content, message):
    (stopped / file).write_text(content)
    with pytest.raises(ValueError, match=message):
        train(tiny(), stopped, resume=True, quiet=True)


def test_a_damaged_result_is_named_and_made_again(finished, runs):
    (finished / "result.json").write_text("{}")
    with pytest.raises(ValueError, match=r"result.json: 'metric' .*; remove the file, and resuming the run makes it"):
        train(tiny(), finished, resume=True, quiet=True)
    (finished / "result.json").unlink()
    train(tiny(), finished, resume=True, quiet=True)
    found, want = (json.loads((x / "result.json").read_text()) for x in (finished, runs / "finished"))
    assert found["value"] == want["value"]


def more_blocks(path):
    (path.parent / "hashes.json").unlink(missing_ok=True)  # as somebody who changes it on purpose
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "num_hidden_layers": 2}))


def wider(path):
    (path.parent / "hashes.json").unlink(missing_ok=True)  # as somebody who changes it on purpose
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "hidden_size": 32}))


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        ("model/model.safetensors", cut, "model.safetensors cannot be used: "),
        (
            "model/model.safetensors",
            flip,
            r"model.safetensors has changed since it was saved: its blake2b hash is \w+, it was saved with \w+; "
            r"bring the file back, or remove .*hashes.json if you changed it on purpose; or",
        ),
        ("model/model.safetensors", lambda path: path.unlink(), "model.safetensors cannot be used: "),
        ("model/config.json", cut, "config.json has changed since it was saved: "),
        (
            "model/config.json",
            wider,
            r"config.json cannot be used: it asks for .* of shape \(.*, model.safetensors has \(",
        ),
        ("model/config.json", more_blocks, r"config.json cannot be used: it asks for stack.blocks.1.*has not"),
    ],
)
def test_a_damaged_model_is_named_and_made_again(finished, file, damage, message):
    damage(finished / file)
    for use in (load_run, evaluate):
        with pytest.raises(TrainingError, match=message) as problem:
            use(finished)
        assert f"remove {finished / 'result.json'}, and {resume_command(finished)} makes it again" in str(problem.value)
        assert "\n" not in str(problem.value)
    if damage is cut:
        (finished / "result.json").unlink()
        train(tiny(), finished, resume=True, quiet=True)
        load_run(finished)


@pytest.mark.parametrize("content", ["{}", '{"run": {"task": "ragged"}, "environment": {}, "command": ""}', "nothing"])
def test_the_command_says_it_without_a_traceback(finished, content):
    (finished / "run.json").write_text(content)
    result = CliRunner().invoke(app, ["evaluate", str(finished), "--threads", "1"])
    assert result.exit_code == 2
    assert isinstance(result.exception, SystemExit)
    assert f"error: {finished / 'run.json'}: " in result.stderr
    assert len(result.stderr.splitlines()) == 1
