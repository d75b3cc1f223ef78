"""Training runs: what they leave, and what they survive."""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from subprocess import PIPE

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import Dataset
from transformers import TrainingArguments
from typer.testing import CliRunner

from kernelformer.cli.app import app
from kernelformer.models import KernelformerForCausalLM
from kernelformer.models.blocks import Block
from kernelformer.modules.schedules import random_maps
from kernelformer_lab.records import is_finished, standing, unfinished
from kernelformer_lab.tasks import TASKS, Task, make_task
from kernelformer_lab.training import Result, Run, StoppedError, TrainingError, build_model, evaluate, train
from kernelformer_lab.training.checkpoints import checkpoint_of, locked, main_does, metrics
from kernelformer_lab.training.evaluation import contributions
from kernelformer_lab.training.session import speed
from kernelformer_lab.training.trainer import RunTrainer

TINY = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
FAVOR = "favor+:num_features=16"


class Lines(Dataset):
    """Sample i is a function of i: a sequence of its own length, with some places that do not count."""

    def __init__(self, count, length):
        self.count, self.length = count, length

    def __len__(self):
        return self.count

    @property
    def lengths(self):
        return np.array([len(self[i]["ids"]) for i in range(self.count)])

    def __getitem__(self, index):
        gen = torch.Generator().manual_seed(index)
        size = int(torch.randint(3, self.length + 1, (), generator=gen))
        ids = torch.randint(1, 11, (size,), generator=gen).cumsum(0) % 11 + 1
        return {"ids": ids, "index": index}


class Ragged(Task):
    """Sequences of unequal length, padded: batches have unequal numbers of labels."""

    name, about, model, metric, higher_is_better = "ragged", "for tests", "causal-lm", "perplexity", False
    seen: list[int] = []  # noqa: RUF012

    def __init__(self, *, length: int = 32, samples: int = 50, validation: int = 7):
        self.length, self.samples, self.validation = length, samples, validation

    def settings(self):
        return {"vocab_size": 12, "max_position_embeddings": self.length, "pad_token_id": 0}

    def split(self, name):
        return Lines(self.samples if name == "train" else self.validation, self.length)

    def collate(self, samples):
        Ragged.seen += [x["index"] for x in samples]
        ids = torch.nn.utils.rnn.pad_sequence([x["ids"] for x in samples], batch_first=True)
        return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": ids.masked_fill(ids == 0, -100)}

    def score(self, found):
        return {"perplexity": math.exp(found.loss)}


class Parity(Ragged):
    """One label for a sequence."""

    name, model, metric, higher_is_better = "parity", "classifier", "accuracy", True

    def settings(self):
        return {**super().settings(), "num_labels": 2}

    def collate(self, samples):
        batch = super().collate(samples)
        return {**batch, "labels": batch["input_ids"].sum(1) % 2}

    def score(self, found):
        assert found.right == (found.predictions == found.labels).mean()
        return {"accuracy": found.right}


class Echo(Ragged):
    """Say it again: for an encoder-decoder."""

    name, model = "echo", "seq2seq"

    def settings(self):
        return {**super().settings(), "decoder_start_token_id": 0}


OWN = {task.name: task for task in (Ragged, Parity, Echo)}


def register():
    TASKS.update(OWN)


@pytest.fixture(autouse=True)
def _tasks(_threads):
    register()
    torch.set_num_threads(1)


def tiny(attention=FAVOR, task="ragged", **settings):
    """Dropout and redraws on, lines and checkpoints at different steps."""
    register()
    given = {"steps": 12, "batch_size": 4, "redraw": 3, "log_every": 2, "save_every": 5, "eval_every": 6, "seed": 3}
    settings = given | settings
    return Run(task, attention, model=TINY | {"dropout": 0.1} | settings.pop("model", {}), **settings)


def losses(folder):
    """Everything that does not depend on the clock, numbers alone."""
    lines = [{k: v for k, v in line.items() if k != "seconds"} for line in metrics(Path(folder))]
    norms = [{f"norm {i}": x for i, x in enumerate(line.pop("grad_norms", []))} for line in lines]
    return [{**line, **own} for line, own in zip(lines, norms, strict=True)]


def same_weights(one, two):
    a, b = (load_file(Path(x) / "model" / "model.safetensors") for x in (one, two))
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run without interruption."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("whole") / "run"
    train(tiny(), folder, quiet=True, command="typed")
    return folder


# What other processes do; they start together, for most of their time goes into imports.
KILLED = """
def log(text):
    if text.startswith("step 8/"):
        time.sleep(600)  # until somebody kills it, between two checkpoints
train(tiny(), folder, log=log)
"""
KILLED_SAVING = """
save = RunTrainer._save_rng_state
def die(self, *args):
    os.kill(os.getpid(), signal.SIGKILL) if self.state.global_step == 10 else save(self, *args)
RunTrainer._save_rng_state = die
train(tiny(), folder, quiet=True)
"""
FULL_DISK = """
def log(text):
    if text.startswith("step 6/"):
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
try:
    train(tiny(), folder, log=log)
except TrainingError as problem:
    print(problem)
"""


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    """The processes and their folders, by what happens to them."""
    base = tmp_path_factory.mktemp("others")
    setup = "import os, resource, signal, sys, time, torch\ntorch.set_num_threads(1)\nfrom test_training import *\n"
    paths = os.pathsep.join([*map(str, Path(__file__).parents[:2]), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    started = {}
    for name, code in (("killed", KILLED), ("killed saving", KILLED_SAVING), ("full disk", FULL_DISK)):
        command = [sys.executable, "-c", f"{setup}folder = {str(base / name)!r}\n{code}"]
        started[name] = base / name, subprocess.Popen(command, env=env, text=True, stdout=PIPE, stderr=PIPE)
    yield started
    for _, process in started.values():
        process.kill()
        process.communicate()


def test_a_run_leaves_its_settings_lines_checkpoints_model_and_result(whole):
    names = {x.name for x in whole.iterdir() if not x.name.startswith(".")}
    assert names == {
        "run.json",
        "metrics.jsonl",
        "result.json",
        "model",
        "tensorboard",
        "checkpoint-10",
        "checkpoint-12",
    }
    record = json.loads((whole / "run.json").read_text())
    assert Run.from_json(record["run"]) == tiny()
    assert record["command"] == "typed"
    assert record["environment"]["torch"] == torch.__version__
    lines = metrics(whole)
    assert [x["step"] for x in lines if "loss" in x] == [2, 4, 6, 8, 10, 12]
    assert [x["step"] for x in lines if "eval_loss" in x] == [6, 12]
    assert all(x["learning_rate"] > 0 and x["grad_norm"] > 0 for x in lines if "loss" in x)
    assert all(len(x["grad_norms"]) == 2 for x in lines if "loss" in x)  # one of every step
    assert [x["seconds"] for x in lines] == sorted(x["seconds"] for x in lines)
    result = json.loads((whole / "result.json").read_text())
    assert result["metric"] == "perplexity"
    assert result["value"] == lines[-1]["eval_perplexity"] == math.exp(result["loss"])
    assert result["steps"] == 12
    assert result["tokens_per_second"] > 0
    assert result["peak_bytes"] > 0
    assert result["decode"] is None
    assert result["diverged"] is False
    assert result["parameters"] == build_model(tiny(), make_task("ragged")).num_parameters()


def test_the_final_model_loads_and_evaluates_to_the_same(whole):
    found = evaluate(whole, batch_size=3)
    assert found["perplexity"] == pytest.approx(json.loads((whole / "result.json").read_text())["value"], rel=1e-6)
    model = KernelformerForCausalLM.from_pretrained(whole / "model")
    assert model.config.use_cache
    assert evaluate(model, make_task("ragged"), batch_size=7) == pytest.approx(found, rel=1e-6)
    assert evaluate(whole / "model", split="test") == pytest.approx(found, rel=1e-6)
    with pytest.raises(ValueError, match="task=None"):
        evaluate(model)


def test_a_run_says_where_it_writes_how_large_it_is_and_nothing_when_quiet(tmp_path, capfd):
    told = []
    result = train(tiny(steps=2), tmp_path / "a", log=told.append)
    assert told[0] == f"writing to {tmp_path / 'a'}"
    assert told[1] == f"model: {result.parameters:,} parameters, attention {tiny().label}"
    assert [x.split(":")[0] for x in told[2:]] == ["step 2/2", "step 2/2", "finished"]
    train(tiny(steps=2), tmp_path / "b", quiet=True)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("attention", [FAVOR, "gmm-prf:num_features=8:components=2", "softmax"])
def test_a_resumed_run_gives_the_same_numbers_to_the_last_bit(tmp_path, attention):
    run = tiny(attention)
    train(run, tmp_path / "whole", quiet=True)
    cut = tmp_path / "cut"
    with pytest.raises(StoppedError, match=r"after step 7 of 12.*resume"):
        interrupted(run, cut, step=7)  # between two lines, in the life of a draw
    assert (cut / "checkpoint-7").is_dir()
    train(run, cut, resume=True, quiet=True)
    assert losses(cut) == losses(tmp_path / "whole")
    assert same_weights(cut, tmp_path / "whole")


def test_a_run_does_not_go_on_with_other_data(tmp_path):
    text, folder = tmp_path / "text.txt", tmp_path / "run"
    text.write_bytes(b"a text of some length. " * 100)
    run = tiny(task="bytes", task_options={"data": str(text), "length": 8, "validation_samples": 2}, steps=4)
    with pytest.raises(StoppedError):
        interrupted(run, folder, step=2)
    before = text.read_bytes()
    text.write_bytes(b"b" + before[1:])  # one letter, the size is the same
    message = r"on other data of task 'bytes': text.txt with 2300 bytes, blake2b \w+, now text.txt with 2300 bytes"
    with pytest.raises(TrainingError, match=message):
        train(run, folder, resume=True, quiet=True)
    text.write_bytes(before)
    train(run, folder, resume=True, quiet=True, command="again")
    record = json.loads((folder / "run.json").read_text())
    (resumed,) = record["resumed"]
    assert (resumed["step"], resumed["command"], record["command"]) == (2, "again", "")
    assert resumed["environment"]["threads"] == 1
    assert record["data"].startswith("text.txt with 2300 bytes")
    text.unlink()
    assert train(run, folder, resume=True, quiet=True).steps == 4  # a finished run needs no data


def interrupted(run, folder, *, step, number=signal.SIGINT, times=1):
    """Train, and have the signal come in the midst of step number ``step``."""
    original = RunTrainer.training_step

    def told(self, *args, **kwargs):
        if self.state.global_step == step - 1:
            for _ in range(times):
                os.kill(os.getpid(), number)
        return original(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunTrainer, "training_step", told)
        train(run, folder, quiet=True)


def test_signals_mean_after_a_run_what_they_did_before(tmp_path):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.raises(StoppedError):
        interrupted(tiny(), tmp_path / "a", step=2, number=signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        interrupted(tiny(), tmp_path / "b", step=2, times=2)
    assert before == (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))
    assert checkpoint_of(tmp_path / "a")[1] == 2
    assert checkpoint_of(tmp_path / "b")[1] == 0


def test_a_finished_run_can_be_told_from_a_stopped_one(tmp_path, whole):
    stopped = tmp_path / "stopped"
    with pytest.raises(StoppedError):
        interrupted(tiny(), stopped, step=7)
    assert (is_finished(whole), is_finished(stopped)) == (True, False)
    assert standing(whole).startswith("finished after 12 steps, perplexity ")
    assert standing(stopped) == "unfinished, saved at step 7 of 12"
    assert [json.loads((x / "run.json").read_text())["finished"] for x in (whole, stopped)] == [True, False]
    with pytest.raises(TrainingError, match=r"no model/: the run is unfinished, saved at step 7 of 12; go on with"):
        evaluate(stopped)
    told = []
    evaluate(whole, log=told.append)
    evaluate(whole / "model", log=told.append)
    assert told == []
    evaluate(stopped / "checkpoint-7", log=told.append)
    assert told == [f"{stopped / 'checkpoint-7'} is a checkpoint after step 7 of 12, not the model of a finished run"]
    assert unfinished(whole / "checkpoint-12") is None  # the last one is the model
    shown = CliRunner().invoke(app, ["list", str(stopped)]).stdout
    assert "ragged" in shown
    assert "unfinished, saved at step 7 of 12" in " ".join(shown.split())
    train(tiny(), stopped, resume=True, quiet=True)
    assert standing(stopped) == standing(whole)


def test_a_run_that_was_made_longer_and_stopped_is_unfinished_though_it_has_a_model(tmp_path, whole):
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    record = json.loads((folder / "run.json").read_text())
    record["run"]["steps"], record["finished"] = 20, False
    (folder / "run.json").write_text(json.dumps(record))
    told = []
    evaluate(folder, log=told.append)
    assert told == ["this is the model after 12 steps; the run was made longer since, to 20, and is unfinished"]
    del record["finished"]  # as older versions wrote it
    (folder / "run.json").write_text(json.dumps(record))
    assert is_finished(folder)


def test_a_killed_run_resumes_to_the_same_numbers_and_says_each_step_once(others, whole):
    folder, process = others["killed"]
    file = folder / "metrics.jsonl"
    limit = time.monotonic() + 60
    while not (file.exists() and '"step": 8' in file.read_text()):
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < limit
        time.sleep(0.02)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert checkpoint_of(folder)[1] == 5
    with file.open("a") as lines:
        lines.write('{"step": 9, "lo')  # as if it had died in the midst of a line
    train(tiny(), folder, resume=True, quiet=True)
    assert losses(folder) == losses(whole)
    assert same_weights(folder, whole)
    assert len(metrics(folder)) == len({(x["step"], "loss" in x) for x in metrics(folder)})


def test_a_run_killed_while_saving_goes_on_from_the_checkpoint_before(others, whole):
    folder, process = others["killed saving"]
    assert process.wait(60) == -signal.SIGKILL
    assert (folder / ".partial" / "checkpoint-10" / "model.safetensors").exists()
    assert checkpoint_of(folder)[1] == 5
    train(tiny(), folder, resume=True, quiet=True)
    assert losses(folder) == losses(whole)
    assert not (folder / ".partial").exists()


def test_a_full_disk_ends_a_run_with_a_sentence_and_leaves_what_was_saved(others, whole):
    folder, process = others["full disk"]
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert f"cannot save the run in {folder}" in out
    assert "resume" in out
    assert err == ""
    assert checkpoint_of(folder)[1] == 5
    assert not (folder / ".partial").exists()
    train(tiny(), folder, resume=True, quiet=True)
    assert losses(folder) == losses(whole)


def test_a_disk_that_fills_at_the_very_end_costs_no_training(tmp_path, whole):
    def full(*paths):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kernelformer_lab.training.session.publish", full)
        with pytest.raises(TrainingError, match=f"cannot save the run in {tmp_path}: the disk is full"):
            train(tiny(), tmp_path, quiet=True)
    assert not (tmp_path / ".partial").exists()
    assert checkpoint_of(tmp_path)[1] == 12
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunTrainer, "training_step", None)  # nothing is left to learn
        train(tiny(), tmp_path, resume=True, quiet=True)
        (tmp_path / "result.json").unlink()  # or killed between the model and the result
        train(tiny(), tmp_path, resume=True, quiet=True)
    assert losses(tmp_path) == losses(whole)
    assert same_weights(tmp_path, whole)


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(TrainingError, match=r"cannot write to .*file/run: Not a directory; nothing was saved") as found:
        train(tiny(), tmp_path / "file" / "run", quiet=True)
    assert "resume" not in str(found.value)  # there is nothing to go on with


def test_a_start_that_fails_leaves_no_lock_and_no_folder(tmp_path):
    missing = tiny(task="bytes", task_options={"data": str(tmp_path / "missing"), "length": 8})
    (tmp_path / "given").mkdir()
    for folder in (tmp_path / "given", tmp_path / "a" / "b"):
        with pytest.raises(ValueError, match="missing"):
            train(missing, folder, quiet=True)
    assert [x.name for x in tmp_path.rglob("*")] == ["given"]


def test_a_lock_that_was_removed_is_none(tmp_path, monkeypatch):
    """A process that has opened the file before another one removed it does not take it for its own."""
    flock = fcntl.flock

    def removed(handle, how):
        flock(handle, how)
        (tmp_path / ".lock").unlink()

    monkeypatch.setattr(fcntl, "flock", removed)
    with pytest.raises(TrainingError, match="another process"), locked(tmp_path):
        pass


def test_nothing_is_overwritten(tmp_path, whole):
    before = {x: x.read_bytes() for x in whole.rglob("*") if x.is_file()}
    with pytest.raises(
        TrainingError, match=r"holds a run already, finished; make it longer with `.* --resume --steps MORE`, or"
    ):
        train(tiny(), whole, quiet=True)
    with pytest.raises(TrainingError, match=r"other settings, there and here: learning_rate 0.001 and 0.01"):
        train(tiny(steps=20, learning_rate=0.01), whole, resume=True, quiet=True)
    assert {x: x.read_bytes() for x in whole.rglob("*") if x.is_file()} == before


def test_a_finished_run_gives_its_result_again(whole):
    told = []
    result = train(tiny(keep=1, log_every=7), whole, resume=True, log=told.append)
    assert result == Result.from_json(json.loads((whole / "result.json").read_text()))
    assert len(told) == 1


def test_an_error_of_the_main_process_is_known_to_be_that_of_all(tmp_path):
    def fails(problem):
        raise problem

    for problem in (ValueError("x"), TrainingError("x"), OSError(errno.ENOSPC, "full")):
        with pytest.raises((ValueError, TrainingError)) as found:
            main_does(True, tmp_path, lambda problem=problem: fails(problem))
        assert pickle.loads(pickle.dumps(found.value)).everywhere  # also after its way to the others


def test_two_processes_do_not_write_to_one_folder(tmp_path):
    with locked(tmp_path), pytest.raises(TrainingError, match="another process"):
        train(tiny(), tmp_path, quiet=True)


def test_resuming_nothing_starts_from_the_beginning_and_says_so(tmp_path):
    told = []
    train(tiny(steps=2), tmp_path, resume=True, log=told.append)
    assert told[0] == "there is no checkpoint yet: starting from step 0"


def test_how_often_one_looks_or_saves_does_not_change_the_result(tmp_path, whole):
    run = tiny(eval_every=1, eval_batch_size=2, save_every=3, keep=1, log_every=3)
    train(run, tmp_path, quiet=True)
    assert same_weights(tmp_path, whole)
    assert [x.name for x in tmp_path.glob("checkpoint-*")] == ["checkpoint-12"]
    assert checkpoint_of(tmp_path)[1] == 12
    first, second = ([x for x in losses(f) if "eval_loss" in x][-1] for f in (tmp_path, whole))
    assert first == pytest.approx(second, rel=1e-6)


def test_a_resumed_run_may_look_and_save_at_other_steps(tmp_path, whole):
    with pytest.raises(StoppedError):
        interrupted(tiny(), tmp_path, step=7)
    train(tiny(log_every=3, eval_every=4, save_every=4, keep=9), tmp_path, resume=True, quiet=True)
    assert [x["step"] for x in metrics(tmp_path) if "loss" in x] == [2, 4, 6, 9, 12]
    assert [x["step"] for x in metrics(tmp_path) if "eval_loss" in x] == [6, 8, 12]
    assert (tmp_path / "checkpoint-8").exists()
    assert json.loads((tmp_path / "run.json").read_text())["run"]["log_every"] == 3
    assert same_weights(tmp_path, whole)


def test_a_run_that_diverges_ends_there_and_says_so(tmp_path):
    told = []
    run = tiny(
        learning_rate=1e30, max_grad_norm=None, steps=200, log_every=100, save_every=1, keep=200, eval_every=1000
    )
    result = train(run, tmp_path, log=told.append)
    assert result.diverged
    assert math.isnan(result.value)
    assert result.grad_norm["max"] > 0  # of the steps before
    assert result.steps < 100  # seen when it was to be saved
    assert "learning_rate" in told[-1]
    assert json.loads((tmp_path / "result.json").read_text())["diverged"] is True
    saved = [json.loads(x.read_text()) for x in tmp_path.glob("checkpoint-*/trainer_state.json")]
    assert all(math.isfinite(x["stateful_callbacks"]["Meter"]["attributes"]["loss"]) for x in saved)
    assert train(run, tmp_path, resume=True, quiet=True).diverged
    assert standing(tmp_path) == f"diverged at step {result.steps} of 200"
    with pytest.raises(TrainingError, match=r"no model/: the run is diverged at step \d+ of 200; train anew"):
        evaluate(tmp_path)


def test_all_methods_see_the_same_samples_in_the_same_order(tmp_path):
    seen = []
    for index, attention in enumerate(("softmax", FAVOR, "gmm-rks:num_features=8")):
        Ragged.seen.clear()
        train(tiny(attention, steps=30, eval_every=100, log_every=30), tmp_path / str(index), quiet=True)
        seen.append(list(Ragged.seen[:120]))
    assert seen[0] == seen[1] == seen[2]
    assert sorted(seen[0][:50]) == list(range(50))
    assert seen[0][:50] != seen[0][50:100]
    assert sorted(seen[0][50:100]) == list(range(50))


@pytest.mark.parametrize("task", OWN)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_accumulated_gradients_equal_those_of_the_whole_batch(tmp_path, task, smoothing):
    run = tiny(task=task, model={"dropout": 0.0}, batch_size=6, log_every=1, redraw=2, label_smoothing=smoothing)
    train(run, tmp_path / "whole", quiet=True)
    train(replace(run, micro_batch=2), tmp_path / "parts", quiet=True)
    for a, b in zip(losses(tmp_path / "whole"), losses(tmp_path / "parts"), strict=True):
        assert a == pytest.approx(b, rel=2e-4)
    one, two = (load_file(tmp_path / x / "model" / "model.safetensors") for x in ("whole", "parts"))
    for name in one:
        if name.endswith((".draw", ".omega")):
            assert torch.equal(one[name], two[name])


def test_the_loss_of_an_evaluation_is_a_mean_over_all_labels(whole):
    model = KernelformerForCausalLM.from_pretrained(whole / "model").eval()
    task = make_task("ragged")
    split = task.split("validation")
    batch = task.collate([split[i] for i in range(len(split))])
    with torch.no_grad():
        out = model(**batch)
    sums, counts, right = contributions(out.logits, batch["labels"], shifted=True)
    wanted = batch["labels"][:, 1:]
    assert int(right.sum()) == int((out.logits[:, :-1].argmax(-1) == wanted)[wanted != -100].sum())
    assert float(sums.sum() / counts.sum()) == pytest.approx(float(out.loss), rel=1e-6)
    assert evaluate(model, task, batch_size=2)["loss"] == pytest.approx(float(out.loss), rel=1e-6)


def test_some_samples_of_a_split_are_spread_evenly_over_it(whole):
    Ragged.seen.clear()
    found = evaluate(whole, split="train", samples=10)
    assert sorted(Ragged.seen) == list(range(0, 50, 5))  # the longest first
    assert found != evaluate(whole, split="train")
    assert evaluate(whole, samples=100) == pytest.approx(evaluate(whole), rel=1e-6)  # there are only seven
    with pytest.raises(ValueError, match="samples must be an integer of at least 1, got 0"):
        evaluate(whole, samples=0)


def test_smoothing_changes_the_training_loss_only(tmp_path):
    train(tiny(steps=1, learning_rate=1e-12, log_every=1), tmp_path / "a", quiet=True)
    train(tiny(steps=1, learning_rate=1e-12, log_every=1, label_smoothing=0.3), tmp_path / "b", quiet=True)
    (a, plain), (b, smooth) = losses(tmp_path / "a"), losses(tmp_path / "b")
    assert abs(a["loss"] - b["loss"]) > 1e-3
    assert smooth["eval_loss"] == pytest.approx(plain["eval_loss"], rel=1e-6)


def test_learned_kernels_have_their_own_rate_and_no_decay_unless_asked(tmp_path):
    optimizers = []
    original = RunTrainer.create_optimizer

    def kept(self, *args):
        optimizers.append(original(self, *args))
        return optimizers[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunTrainer, "create_optimizer", kept)
        train(tiny("gmm-prf:num_features=8", steps=1, kernel_lr=0.5), tmp_path / "a", quiet=True)
        train(tiny("softmax", steps=1, kernel_lr=0.5), tmp_path / "b", quiet=True)
        train(tiny("gmm-prf:num_features=8", steps=1, decay_kernels=True), tmp_path / "c", quiet=True)
    learned, fixed, decayed = optimizers
    assert [x["weight_decay"] for x in decayed.param_groups] == [0.01, 0, 0.01]
    assert [(x["initial_lr"], x["weight_decay"]) for x in learned.param_groups] == [(1e-3, 0.01), (1e-3, 0), (0.5, 0)]
    assert len(fixed.param_groups) == 2
    groups = [{id(x) for x in group["params"]} for group in learned.param_groups]
    assert len(set.union(*groups)) == sum(map(len, groups))


def test_draws_change_by_steps_not_by_forwards(tmp_path):
    for name, micro in (("a", None), ("b", 1)):
        train(tiny(steps=7, redraw=2, micro_batch=micro, schedule="constant"), tmp_path / name, quiet=True)
        model = KernelformerForCausalLM.from_pretrained(tmp_path / name / "model")
        assert [phi.draw_number for phi in random_maps(model)] == [3]


@pytest.mark.parametrize("settings", [{"precision": "bf16"}, {"gradient_checkpointing": True}])
def test_other_ways_to_compute_learn_alike(tmp_path, settings, whole):
    run = tiny(**settings)
    train(run, tmp_path, quiet=True)
    for a, b in zip(losses(tmp_path), losses(whole), strict=True):
        key = "loss" if "loss" in a else "eval_loss"
        assert a[key] == pytest.approx(b[key], rel=2e-2 if "precision" in settings else 1e-5)
        assert a[key] != b[key] or "precision" not in settings  # half precision rounds otherwise


def test_checkpointed_blocks_are_computed_once_more_in_every_step(tmp_path):
    calls = []
    attend = Block._attend  # within what is recomputed: transformers wraps `forward` itself

    def counted(self, *args, **kwargs):
        calls.append(self.training)
        return attend(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Block, "_attend", counted)
        for name, checkpointing in (("plain", False), ("again", True)):
            calls.clear()
            train(tiny(steps=3, gradient_checkpointing=checkpointing), tmp_path / name, quiet=True)
            assert sum(calls) == (6 if checkpointing else 3)


def test_a_classifier_is_scored_by_its_predictions(tmp_path):
    result = train(tiny(task="parity"), tmp_path, quiet=True)
    assert result.metric == "accuracy"
    assert result.value * 7 == pytest.approx(round(result.value * 7))
    assert evaluate(tmp_path)["accuracy"] == result.value


def test_the_learning_rate_warms_up_also_before_a_constant_one(tmp_path):
    train(tiny(schedule="constant", warmup_steps=4, learning_rate=0.4, steps=6, log_every=1), tmp_path, quiet=True)
    rates = [x["learning_rate"] for x in metrics(tmp_path) if "loss" in x]
    assert rates == pytest.approx([0, 0.1, 0.2, 0.3, 0.4, 0.4])


def test_a_batch_must_be_divisible_among_the_processes(tmp_path, monkeypatch):
    monkeypatch.setattr(TrainingArguments, "world_size", 3)
    with pytest.raises(ValueError, match="batch_size=4 must be a multiple of the 3 processes"):
        train(tiny(), tmp_path / "run", quiet=True)
    with pytest.raises(ValueError, match="of the 3 processes times micro_batch=4"):
        train(tiny(batch_size=8, micro_batch=4), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


def test_speed_is_the_median_after_the_first_interval():
    lines = [{"seconds": s, "tokens": t, "loss": 1.0} for s, t in ((5, 10), (6, 110), (7, 310), (8, 610))]
    assert speed(lines) == 200
    assert speed(lines[:1]) == 2
    assert speed([]) == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": 0}, "steps must be an integer of at least 1"),
        ({"batch_size": 2.5}, "batch_size must be an integer"),
        ({"micro_batch": 3}, "multiple of micro_batch, got 4 and 3"),
        ({"learning_rate": 0}, "learning_rate must be a finite number above 0"),
        ({"learning_rate": math.nan}, "learning_rate must be a finite number"),
        ({"kernel_lr": -1}, "kernel_lr must be a finite number above 0"),
        ({"weight_decay": -1}, "weight_decay must be a finite number of at least 0"),
        ({"beta2": 1}, "beta2 must be at least 0 and below 1, got 1"),
        ({"label_smoothing": 1}, "label_smoothing must be at least 0 and below 1"),
        ({"warmup_steps": 13}, "warmup_steps must be at most steps, got 13 and 12"),
        ({"schedule": "linaer"}, "did you mean 'linear'"),
        ({"precision": "fp16"}, "unknown precision 'fp16'"),
        ({"gradient_checkpointing": "no"}, "gradient_checkpointing must be True or False"),
        ({"seed": -1}, "seed must be an integer of at least 0"),
        ({"redraw": 0}, "redraw must be an integer of at least 1"),
        ({"redraw_to_end": 1}, "redraw_to_end must be True or False"),
        ({"redraw": None, "redraw_to_end": True}, "redraw_to_end=True needs redraw"),
        ({"select": "first"}, "unknown select 'first'; choose from best, last"),
        ({"task": "bites"}, "did you mean 'bytes'"),
        ({"task_options": {"lenght": 3}}, "did you mean 'length'"),
        ({"task_options": {"length": object()}}, "task_options must hold plain values"),
        ({"model": {"seed": 3}}, "seed is not a setting of model"),
        ({"attention": "favro+"}, "did you mean 'favor\\+'"),
        ({"attention": []}, "attention must be a spec or a list"),
        ({"attention": ["favor+", "softmax:rank=3"]}, "option for method 'softmax'"),
    ],
)
def test_settings_are_checked_before_anything_starts(settings, message):
    with pytest.raises(ValueError, match=message):
        tiny(**settings)


def test_a_run_survives_json_and_knows_its_label():
    run = tiny(["softmax", "softmax", FAVOR], redraw=torch.tensor(4), model={"num_hidden_layers": 3})
    assert Run.from_json(json.loads(json.dumps(run.as_json()))) == run
    assert run.label == f"2 x softmax, 1 x {FAVOR}"
    assert tiny().label == FAVOR
    with pytest.raises(ValueError, match="did you mean 'steps'"):
        Run.from_json({**run.as_json(), "stepps": 3})
    with pytest.raises(ValueError, match="a run needs the setting 'attention', got task"):
        Run.from_json({"task": "bytes"})


def test_settings_of_older_runs_mean_the_last_weights_and_a_last_draw_in_time():
    settings = tiny().as_json()
    del settings["select"], settings["redraw_to_end"]
    older = Run.from_json(settings)
    assert (older.select, older.redraw_to_end) == ("last", False)
    assert older == tiny()


def test_evaluations_change_a_result_only_where_the_best_is_selected():
    last, best = tiny(eval_every=6), tiny(eval_every=6, select="best")
    assert not last.differences(tiny(eval_every=4))
    assert last.differences(best) == ["select 'last' and 'best'"]
    assert best.differences(tiny(eval_every=4, select="best")) == ["eval_every 6 and 4"]
    assert not best.differences(tiny(eval_every=6, select="best", save_every=4))


@pytest.mark.parametrize(("to_end", "draw"), [(False, 4), (True, 5)])
def test_the_last_draw_comes_in_time_to_be_learned_or_redraws_go_on_to_the_end(tmp_path, to_end, draw):
    train(tiny(steps=11, redraw=2, redraw_to_end=to_end, eval_every=None), tmp_path, quiet=True)
    model = KernelformerForCausalLM.from_pretrained(tmp_path / "model")
    assert [phi.draw_number for phi in random_maps(model)] == [draw]


def test_a_wrong_setting_of_the_model_leaves_no_run_behind(tmp_path):
    with pytest.raises(ValueError, match="hidden_sizes"):
        train(tiny(model={"hidden_sizes": 3}), tmp_path, quiet=True)
    assert not metrics(tmp_path)
    train(tiny(steps=1), tmp_path, quiet=True)
