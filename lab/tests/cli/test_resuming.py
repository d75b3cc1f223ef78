"""Going on with a run, a comparison or the demo by the command that was advised, and making a finished run longer."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback
from typer.testing import CliRunner

from kernelformer import commands as advice
from kernelformer import files as limits
from kernelformer.cli.app import app
from kernelformer.cli.common import Following
from kernelformer_lab.recipes import catalogue
from kernelformer_lab.recipes.papers.base import CPU, Recipe
from kernelformer_lab.records import resume_command
from kernelformer_lab.reports.comparison import read_run
from kernelformer_lab.training import Run, StoppedError, TrainingError, load_run, train
from kernelformer_lab.training.config import extension
from samples import change_study

RUN = Run(
    task="bytes",
    attention="favor+:num_features=8",
    task_options={"data": argparse.__file__, "length": 32, "validation_samples": 4, "test_samples": 4},
    model={"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "dropout": 0.1},
    steps=4,
    batch_size=4,
    learning_rate=1e-2,
    redraw=3,
    log_every=1,
)


class StopAt(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            signal.raise_signal(signal.SIGINT)


class Rates(TrainerCallback):
    def __init__(self):
        self.seen = {}

    def on_step_begin(self, args, state, control, **kwargs):
        self.seen[state.global_step] = kwargs["optimizer"].param_groups[0]["lr"]


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def call(*options):
    return CliRunner().invoke(app, list(map(str, options)))


def advised(text):
    """The options of the command in a message."""
    command = shlex.split(re.search(r"`([^`]*)`", text)[1])
    return command[command.index("kernelformer") + 1 :] if "kernelformer" in command else command[1:]


def lines(folder, name):
    rows = [json.loads(x) for x in (folder / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row[name] for row in rows if name in row}


def same_weights(one, other):
    a, b = (load_file(x / "model" / "model.safetensors") for x in (one, other))
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def finished(folder):
    return json.loads((folder / "result.json").read_text())


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("runs") / "short"
    train(RUN, folder, quiet=True)
    return folder


def test_a_stopped_run_goes_on_by_the_command_that_it_names(tmp_path):
    with pytest.raises(StoppedError, match="stopped after step 3 of 6") as stopped:
        train(replace(RUN, steps=6), tmp_path / "a b", quiet=True, callbacks=[StopAt(2)])
    with pytest.raises(TrainingError, match="has no model/: the run is unfinished, saved at step 3 of 6") as unfinished:
        load_run(tmp_path / "a b")
    options = advised(str(stopped.value))
    assert options == advised(str(unfinished.value)) == ["train", str(tmp_path / "a b"), "--resume"]
    result = call(*options)
    assert result.exit_code == 0, result.output
    assert "going on from step 3" in result.output
    train(replace(RUN, steps=6), tmp_path / "whole", quiet=True)
    assert same_weights(tmp_path / "a b", tmp_path / "whole")
    assert json.loads((tmp_path / "a b" / "run.json").read_text())["resumed"][0]["environment"]["threads"] == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--attention", "elu"], "other settings, there and here: attention 'favor+:num_features=8' and 'elu'"),
        (["--set", "learning_rate=1"], "learning_rate 0.01 and 1"),
        (["--seed", "3"], "seed 0 and 3"),
        (["--steps", "3"], "steps 4 and 3"),
        (["--size", "full"], "has its settings, got --size full too"),
        (["--out", "elsewhere"], "has its settings, got --out elsewhere too"),
    ],
)
def test_options_that_contradict_the_run_in_the_folder_are_refused(options, said, short):
    before = (short / "run.json").read_bytes()
    result = call("train", short, "--resume", *options)
    assert result.exit_code == 2
    assert said in result.stderr
    assert (short / "run.json").read_bytes() == before


def test_a_folder_where_a_recipe_stands_is_seen_for_what_it_holds(short, tmp_path, monkeypatch):
    assert f"holds a run already; go on with `{advice.program()} train {short} --resume`" in call("train", short).stderr
    (tmp_path / "empty").mkdir()
    for folder, lacks in ((tmp_path / "empty", "it has no run.json"), (tmp_path / "none", "there is no such folder")):
        assert (
            f"{folder} is neither a recipe nor the folder of a run: {lacks}" in call("train", folder, "--resume").stderr
        )
    assert f"holds a run; go on with `{advice.program()} train {short}" in call("compare", short, "--resume").stderr
    monkeypatch.chdir(short.parent)
    assert (
        f"short holds a run already; go on with `{advice.program()} train short --resume`"
        in call("train", "short").stderr
    )
    assert "unknown recipe 'nothing'" in call("train", "nothing", "--resume").stderr
    said = f"{short} is finished, after 4 steps; nothing is left to do unless --steps says more\n"
    assert said in call("train", short, "--resume").output  # in one line, however long the path is


@pytest.mark.parametrize("schedule", ["constant", "inverse_sqrt"])
def test_a_run_made_longer_is_the_longer_run_where_the_rate_does_not_fall_to_nothing(schedule, tmp_path):
    run = replace(RUN, schedule=schedule, warmup_steps=2)
    train(run, tmp_path / "x", quiet=True)
    result = call("train", tmp_path / "x", "--resume", "--steps", "7")
    assert result.exit_code == 0, result.output
    said = " ".join(result.output.split())
    assert f"7 steps instead of 4; from here on the learning rate is what it was: the {schedule} schedule" in said
    train(replace(run, steps=7), tmp_path / "whole", quiet=True)
    assert same_weights(tmp_path / "x", tmp_path / "whole")
    assert lines(tmp_path / "x", "loss") == lines(tmp_path / "whole", "loss")
    assert finished(tmp_path / "x")["value"] == finished(tmp_path / "whole")["value"]
    record = json.loads((tmp_path / "x" / "run.json").read_text())
    assert (record["run"]["steps"], record["resumed"][0]["step"], record["resumed"][0]["steps"]) == (7, 4, 7)


def test_a_falling_rate_is_laid_out_anew_over_all_steps_and_that_is_said(tmp_path):
    run, longer = replace(RUN, schedule="linear"), replace(RUN, schedule="linear", steps=8)
    train(run, tmp_path / "x", quiet=True)
    told, rates = [], Rates()
    train(longer, tmp_path / "x", resume=True, log=told.append, callbacks=[rates])
    rule = "8 steps instead of 4; from here on the learning rate is that of a run of 8 steps: the linear schedule is"
    assert any(x.startswith(rule) for x in told)
    train(longer, tmp_path / "whole", quiet=True)
    mine, whole = (lines(tmp_path / x, "learning_rate") for x in ("x", "whole"))
    assert {step: mine[step] for step in range(5, 9)} == {step: whole[step] for step in range(5, 9)}
    assert mine[4] < whole[4]
    assert rates.seen == {4: 0.5e-2, 5: 0.375e-2, 6: 0.25e-2, 7: 0.125e-2}  # of the optimizer itself
    losses = lines(tmp_path / "x", "loss")
    assert list(losses) == list(range(1, 9))
    assert finished(tmp_path / "x")["steps"] == 8


def test_a_longer_run_that_is_stopped_keeps_the_model_it_had_and_goes_on(tmp_path):
    folder, longer = tmp_path / "x-seed0", replace(RUN, steps=8)
    train(RUN, folder, quiet=True)
    before = (folder / "model" / "model.safetensors").read_bytes()
    with pytest.raises(StoppedError, match="stopped after step 6 of 8") as stopped:
        train(longer, folder, resume=True, quiet=True, callbacks=[StopAt(5)])
    assert (folder / "model" / "model.safetensors").read_bytes() == before
    assert read_run(folder).state == "unfinished"
    result = call("evaluate", folder, "--threads", "1")
    assert result.exit_code == 0, result.output
    said = " ".join(result.output.split())
    assert "this is the model after 4 steps; the run was made longer since, to 8" in said
    assert re.search(r"test loss: \d\.\d{4} ± \d\.\d{4} .*± is the standard error over the samples", said)
    assert call(*advised(str(stopped.value))).exit_code == 0
    assert finished(folder)["steps"] == 8
    train(RUN, tmp_path / "y", quiet=True)
    train(longer, tmp_path / "y", resume=True, quiet=True)
    assert same_weights(folder, tmp_path / "y")


def test_without_a_checkpoint_a_finished_run_cannot_be_made_longer(short, tmp_path):
    folder = shutil.copytree(short, tmp_path / "x")
    shutil.rmtree(folder / "checkpoint-4")
    result = call("train", folder, "--resume", "--steps", "6")
    assert result.exit_code == 2
    assert "is finished after 4 steps, and no checkpoint is left to go on from to 6" in result.stderr
    assert extension(RUN, RUN) is None


@pytest.mark.slow
def test_ctrl_c_in_the_demo_names_a_command_that_goes_on(tmp_path, monkeypatch):
    tiny = Recipe("x", "y", {CPU: partial(Run, **{**RUN.as_json(), "attention": "elu", "steps": 40})}, {CPU: ("elu",)})
    monkeypatch.setitem(catalogue.RECIPES, "demo", tiny)
    out = tmp_path / "demo"
    monkeypatch.setattr(sys, "argv", ["kernelformer", "demo", "--threads", "1", "--out", str(out)])
    log = Following.log

    def interrupted(job, text):
        log(job, text)
        if "step 3/40" in text:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Following, "log", interrupted)
        stopped = call(*sys.argv[1:])
    assert stopped.exit_code == 130, stopped.output
    options = advised(stopped.stderr)
    assert options == sys.argv[1:]
    again = call(*options)
    assert again.exit_code == 0, again.output
    assert "going on from step" in again.output
    longer = call("compare", out, "--resume", "--steps", "42")  # a comparison goes on by its folder alone, too
    assert longer.exit_code == 0, longer.output
    assert "42 steps instead of 40" in longer.output
    assert finished(out / "elu-seed0")["steps"] == 42
    refused = call("compare", out, "--resume", "--attention", "relu")
    assert "has its settings, got --attention relu too; leave it out" in refused.stderr


@pytest.mark.parametrize(
    ("options", "work", "then"),
    [
        (["bench", "--attention", "elu"], "kernelformer_lab.bench.benchmark.run_case", "starts anew"),
        (["study", "sparsity"], "sparsity", "goes on from there"),
        (["study", "lengths", "x"], "lengths", "goes on from there"),
        (
            ["study", "conversion", "x", "--distill", "y", "--text", "z"],
            "conversion",
            "goes on",
        ),
        (["study", "normalized"], "normalized", "goes on from there"),
        (["study", "positions"], "positions", "starts anew"),
        (["convert", "x", "y"], "kernelformer.conversion.convert.run", "starts anew"),
        (["evaluate", "x"], "kernelformer_lab.training.evaluation.evaluate", "starts anew"),
    ],
)
def test_ctrl_c_elsewhere_names_the_command_itself_and_what_it_does(options, work, then, tmp_path, monkeypatch):
    def stop(*_, **__):
        raise KeyboardInterrupt

    if options[0] == "study":
        change_study(monkeypatch, work, run=stop)
    else:
        monkeypatch.setattr(work, stop)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["kernelformer", *options])
    result = call(*options)
    assert result.exit_code == 130, result.output
    assert f"stopped at once; `{advice.program()} {shlex.join(options)}` {then}" in result.stderr


def test_what_is_advised_is_how_the_program_is_called_here(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert subprocess.run([*shlex.split(advice.program()), "--version"], capture_output=True).returncode == 0
    monkeypatch.setattr(sys, "argv", ["my env/bin/kernelformer", "demo"])
    assert advice.typed() == "`'my env/bin/kernelformer' demo`"
    (tmp_path / "kernelformer").touch(mode=0o755)
    assert resume_command("a b") == "`kernelformer train 'a b' --resume`"


def test_what_is_advised_raises_the_bounds_that_options_have_raised(monkeypatch, tmp_path, short):
    for name in ("max_layers", "follow_links", "max_tensors"):  # given back after the test
        monkeypatch.setenv(limits.environment_variable(name), str(limits.LIMITS[name]))
    monkeypatch.setattr(limits, "_given", {})
    assert call("--follow-links", "--limit", "max_layers=5000", "train", "bytes", "--out", short).exit_code == 2
    options = ["--limit", "max_layers=5000", "--follow-links"]
    assert advised(resume_command("x")) == [*options, "train", "x", "--resume"]
    assert advised(resume_command("x", "compare")) == [*options, "compare", "x", "--resume"]


def test_a_run_on_links_that_was_stopped_goes_on_by_the_command_that_it_names(monkeypatch, tmp_path):
    monkeypatch.setenv(limits.environment_variable("follow_links"), "0")
    monkeypatch.setattr(limits, "_given", {})
    (tmp_path / "data").mkdir()
    for split in ("train", "validation", "test"):
        (tmp_path / "data" / f"{split}.txt").symlink_to(argparse.__file__)
    limits.set_limit("follow_links", 1)
    run = replace(RUN, task_options={**RUN.task_options, "data": str(tmp_path / "data"), "pattern": "*.txt"})
    with pytest.raises(StoppedError) as stopped:
        train(run, tmp_path / "x", quiet=True, callbacks=[StopAt(2)])
    monkeypatch.setenv(limits.environment_variable("follow_links"), "0")  # another process
    result = call(*advised(str(stopped.value)))
    assert result.exit_code == 0, result.output
    assert finished(tmp_path / "x")["steps"] == 4
