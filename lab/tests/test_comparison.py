"""From one command to a compared result: train, compare, evaluate, generate, list."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from kernelformer.cli.app import app
from kernelformer.models import MODELS, KernelformerConfig
from kernelformer.settings import split_names as names
from kernelformer_lab import comparison as compare
from kernelformer_lab import jobs
from kernelformer_lab.comparison import make_plan
from kernelformer_lab.recipes.catalogue import RECIPES, change, find_recipe, recipe_name, recipes_of
from kernelformer_lab.recipes.overrides import read_settings
from kernelformer_lab.tasks import TASKS
from kernelformer_lab.training import TrainingError, train

TEXT = argparse.__file__  # real text that every machine has
SMALL = ["--data", TEXT, "--length", "32", "--steps", "4", "--threads", "1"]
for setting in (
    "model.hidden_size=16",
    "model.num_hidden_layers=1",
    "model.num_attention_heads=2",
    "batch_size=4",
    "eval_every=2",
    "log_every=1",
    "task.validation_samples=4",
    "task.test_samples=4",
):
    SMALL += ["--set", setting]


def call(*options):
    return CliRunner().invoke(app, list(map(str, options)))


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compare")
    specs = "elu,nprf:num_features=8:relative=1d:max_distance=4"
    result = call("compare", "bytes", "--attention", specs, *SMALL, "--out", folder)
    assert result.exit_code == 0, result.output
    return folder, specs, result.output


def folders(folder):
    return sorted(x for x in folder.iterdir() if x.is_dir())


def test_a_comparison_trains_each_attention_on_the_same_data_and_reports(compared):
    folder, specs, output = compared
    one, two = folders(folder)
    assert {json.loads((x / "run.json").read_text())["run"]["attention"] for x in (one, two)} == set(names(specs))
    page = (folder / "report.html").read_text()
    for run in (one, two):
        result = json.loads((run / "result.json").read_text())
        assert result["metric"] == "bits_per_byte"
        assert f"{result['value']:.3f}" in output
        assert f"{result['value']:.3f}" in page
        assert [row[0] for row in result["decode"]] == [128, 512, 2048, 8192]
        assert len({row[2] for row in result["decode"]}) == 1  # constant memory
        steps = [json.loads(x) for x in (run / "metrics.jsonl").read_text().splitlines()]
        assert [x["step"] for x in steps if "loss" in x] == [1, 2, 3, 4]
    samples = re.findall(r"<h3>([^<]*)</h3>\n<pre>\ndef ", page)
    assert sorted(samples) == sorted(names(specs))
    assert all((run / "sample.txt").read_bytes().startswith(b"def ") for run in (one, two))


def test_a_finished_comparison_is_not_trained_again(compared):
    folder, specs, output = compared
    before = {x: (x / "result.json").stat().st_mtime_ns for x in folders(folder)}
    refused = call("compare", "bytes", "--attention", specs, *SMALL, "--out", folder)
    assert refused.exit_code == 2
    assert f"compare {folder} --resume`, or take another folder" in refused.stderr
    again = call("compare", "bytes", "--attention", specs, *SMALL, "--out", folder, "--resume")
    assert again.exit_code == 0, again.output
    assert {x: (x / "result.json").stat().st_mtime_ns for x in before} == before
    assert set(re.findall(r"\d+\.\d{3} \(n=1\)", again.output)) == set(re.findall(r"\d+\.\d{3} \(n=1\)", output))
    other = call("compare", "bytes", "--attention", specs, *SMALL, "--steps", "3", "--out", folder, "--resume")
    assert other.exit_code == 2
    assert "steps 4 and 3" in other.stderr
    assert "Traceback" not in other.output


def test_a_trained_model_is_evaluated_and_writes(compared):
    run = folders(compared[0])[0]
    result = call("evaluate", run, "--split", "validation", "--threads", "1")
    assert result.exit_code == 0, result.output
    value = json.loads((run / "result.json").read_text())["value"]
    assert f"validation bits per byte: {value:.4f}" in result.output
    made = [call("generate", run, "--tokens", "20", "--prompt", "import ", "--seed", s) for s in (1, 1, 2)]
    assert made[0].stdout.startswith("import ")
    assert "20 bytes in" in made[0].stderr
    assert "20 bytes in" not in made[0].stdout
    assert made[0].stdout == made[1].stdout
    assert made[0].stdout != made[2].stdout


def test_a_trained_model_writes_without_its_data_but_is_not_evaluated(compared, tmp_path):
    run = shutil.copytree(folders(compared[0])[0], tmp_path / "run")
    record = json.loads((run / "run.json").read_text())
    record["run"]["task_options"]["data"] = "/no/such/file"
    (run / "run.json").write_text(json.dumps(record))
    assert call("generate", run, "--tokens", "3").exit_code == 0
    result = call("evaluate", run)
    assert result.exit_code == 2
    assert "there is no file or folder /no/such/file" in result.stderr


@pytest.mark.parametrize("command", ["evaluate", "translate"])
def test_of_a_comparison_its_runs_are_offered(command, compared):
    folder = compared[0]
    result = call(command, folder)
    assert result.exit_code == 2
    offered = ", ".join(str(x) for x in folders(folder))
    assert (
        f"{folder} holds several runs, as the folder of a comparison does; give one of them: {offered}."
        in result.stderr
    )
    assert "there is no such folder" in call(command, folder / "nothing").stderr


def test_runs_under_other_conditions_are_told_of_at_once_and_stand_in_the_figures(compared, tmp_path):
    folder = shutil.copytree(compared[0], tmp_path / "runs")
    plan, threads = compare.read_plan(folder)
    assert threads == 1
    assert {plan.folder_of(x) for x in plan.runs} == set(folders(folder))
    told = []
    compare._log_conditions(plan, 1, told.append)
    assert told == []
    compare._log_conditions(plan, 2, told.append)
    first = plan.folder_of(plan.runs[0])
    assert told == [f"{first} was made under other conditions (threads 1, now 2): speeds will not be compared"]
    compare.report(plan)
    assert not any("conditions" in x for x in json.loads((folder / "comparison.json").read_text())["runs"])
    file = plan.folder_of(plan.runs[1]) / "run.json"
    record = json.loads(file.read_text())
    record["resumed"] = [{"step": 2, "environment": {**record["environment"], "threads": 2}}]
    file.write_text(json.dumps(record))
    compare.report(plan)
    runs = json.loads((folder / "comparison.json").read_text())["runs"]
    assert [[x["threads"] for x in run["conditions"]] for run in runs] == [[1], [1, 2]]


def test_training_samples_are_evaluated_in_part(compared):
    result = call("evaluate", folders(compared[0])[0], "--split", "train", "--samples", "8", "--threads", "1")
    assert result.exit_code == 0, result.output
    assert "at most 8 samples, spread evenly" in result.stdout


def test_a_comparison_does_not_go_on_with_other_data(compared, tmp_path):
    folder, specs, _ = compared
    text, own = tmp_path / "text.py", tmp_path / "own"
    text.write_text(Path(TEXT).read_text() + "# and one more line\n")
    options = [str(text) if x == TEXT else x for x in SMALL]
    for run in folders(folder):
        copy = shutil.copytree(run, own / run.name)
        record = json.loads((copy / "run.json").read_text())
        record["run"]["task_options"]["data"] = str(text)
        (copy / "run.json").write_text(json.dumps(record))
    refused = call("compare", "bytes", "--attention", f"relu,{specs}", *options, "--out", own, "--resume")
    assert refused.exit_code == 2
    assert "holds a run on other data of task 'bytes': argparse.py with" in refused.stderr
    assert len(folders(own)) == 2  # nothing was trained


def test_a_folder_without_a_run_is_no_obstacle(tmp_path):
    plan = make_plan("x", replace(find_recipe("bytes").run(), attention="elu"), ["elu"], 1, tmp_path)
    plan.folder_of(plan.runs[0]).mkdir()
    compare.check(plan, resume=False)
    with pytest.raises(ValueError, match="but causal=True was asked for"):
        compare.check(make_plan("x", find_recipe("bytes").run(), ["elu", "skyformer"], 2, tmp_path), resume=False)


def small_run(steps=4, **more):
    sets = [x for x in SMALL if "=" in x]
    run = change(find_recipe("bytes").run(), read_settings(sets, data=TEXT, length=32, steps=steps, attention="elu"))
    return replace(run, **more)


def test_a_worker_trains_decodes_and_writes_with_its_threads(tmp_path, monkeypatch):
    seen = []

    def watched(kind):
        original = getattr(compare, kind)

        def call(*args, **kwargs):
            seen.append((kind, torch.get_num_threads()))
            return original(*args, **kwargs)

        monkeypatch.setattr(compare, kind, call)

    for kind in ("train", "decode_costs", "sample_bytes"):
        watched(kind)
    learned = small_run(model={**small_run().model, "positions": "learned"})  # with positions for 32 tokens
    request = {"run": learned.as_json(), "folder": str(tmp_path), "command": "", "resume": False}
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    torch.set_num_threads(2)
    name = "kernelformer_lab.comparison:train_and_decode"
    assert jobs.main(name, json.dumps(request)) == 0
    assert seen == [("train", 1), ("decode_costs", 1), ("sample_bytes", 1)]
    assert json.loads((tmp_path / "result.json").read_text())["decode"] == []
    assert (tmp_path / "sample.txt").read_bytes().startswith(b"def ")
    seen.clear()
    assert jobs.main(name, json.dumps({**request, "resume": True})) == 0
    assert seen == [("train", 1)]


def test_a_worker_that_says_much_does_not_wait_for_ever(tmp_path, monkeypatch):
    code = "import sys; sys.stderr.write('x' * 300_000 + '\\nerror: why\\nand more\\n'); print('done'); sys.exit(2)"
    monkeypatch.setattr(jobs, "COMMAND", (sys.executable, "-c", code))
    told = []
    with pytest.raises(TrainingError, match=r"^elu, seed 0: why$"):
        compare._train(small_run(), tmp_path, 1, "", "", told.append)
    assert told == ["elu, seed 0: done"]


@pytest.mark.slow
def test_ctrl_c_ends_a_comparison_with_a_checkpoint_and_it_goes_on_to_the_same_numbers(tmp_path):
    options = ["compare", "bytes", "--attention", "elu", *SMALL, "--out", str(tmp_path / "out")]
    options[options.index("--steps") + 1] = "120"
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "kernelformer", *options]
    with subprocess.Popen(command, env=env, stdout=-1, stderr=-1, text=True, start_new_session=True) as process:
        lines, limit = tmp_path / "out" / "elu-seed0" / "metrics.jsonl", time.monotonic() + 90
        while not (lines.exists() and '"step": 5,' in lines.read_text()):
            assert process.poll() is None, process.stderr.read()
            assert time.monotonic() < limit
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "stopping after this step, with a checkpoint" in err
    assert out == ""
    said = re.search(r"^stopped in (.*); go on with `(.*)`\.$", err, re.MULTILINE)
    assert said[1] == str(tmp_path / "out" / "elu-seed0")
    assert 5 <= int(next((tmp_path / "out" / "elu-seed0").glob("checkpoint-*")).name.split("-")[1]) < 120
    again = subprocess.run(said[2], shell=True, env=env, capture_output=True, text=True)  # as a user would copy it
    assert again.returncode == 0, again.stderr
    torch.set_num_threads(1)
    train(small_run(steps=120), tmp_path / "whole", quiet=True)
    found, want = (json.loads((x / "result.json").read_text()) for x in (lines.parent, tmp_path / "whole"))
    assert found["value"] == want["value"]


def test_one_run_by_train(tmp_path):
    out = tmp_path / "run"
    result = call("train", "bytes", "--attention", "elu", *SMALL, "--seed", "3", "--out", out)
    assert result.exit_code == 0, result.output
    assert "finished: bits_per_byte" in result.output
    record = json.loads((out / "run.json").read_text())
    assert record["run"]["seed"] == 3
    assert record["run"]["model"]["hidden_size"] == 16
    assert record["environment"]["torch"] == torch.__version__
    again = call("train", "bytes", "--attention", "elu", *SMALL, "--seed", "3", "--out", out)
    assert again.exit_code == 2
    assert again.stdout == ""
    assert f"error: {out} holds a run already, finished; make it longer with `" in again.stderr  # the path in one piece


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["train", "byte"], "unknown recipe 'byte'; did you mean 'bytes'?"),
        (["train", "bytes", "--attention", "favour+"], "unknown method 'favour+'; did you mean 'favor+'?"),
        (["train", "bytes", "--attention", "nystromformer"], "but causal=True was asked for"),
        (
            ["train", "bytes", "--set", "learning-rate=1"],
            "unknown setting 'learning-rate'; did you mean 'learning_rate'?",
        ),
        (["train", "bytes", "--set", "steps"], "--set takes name=value, got 'steps'"),
        (["train", "bytes", "--set", "steps=abc"], "steps must be an integer of at least 1, got 'abc'"),
        (["train", "bytes", "--set", "warmup_steps=abc"], "warmup_steps must be an integer of at least 0, got 'abc'"),
        (["train", "bytes", "--set", "seed=7", "--seed", "3"], "seed is given by --seed and by --set, 3 and 7;"),
        (["train", "bytes", "--set", "seed=7", "--set", "seed=8"], "seed is set twice, to 7 and '8'; give it once"),
        (
            ["train", "bytes", "--set", "attention=elu", "--attention", "relu"],
            "attention is given by --attention and by --set, relu and 'elu'; give it once",
        ),
        (["compare", "bytes", "--set", "attention=elu"], "got --set attention=elu; give --attention"),
        (
            ["compare", "rpe-translation", "--set", "decoder_attention=elu"],
            "got --set decoder_attention=elu; give --attention 'A > B'",
        ),
        (
            ["train", "rpe-translation", "--set", "decoder_attention=elu", "--attention", "relu > elu"],
            "decoder_attention is given by --attention and by --set, elu and 'elu'; give it once",
        ),
        (
            ["train", "rpe-translation", "--attention", "elu >"],
            "the encoder's attention and the decoder's, got 'elu >'",
        ),
        (["compare", "bytes", "--attention", "elu,skyformer"], "but causal=True was asked for"),
        (["compare", "bytes", "--data", "no/such/file"], "no/such/file"),
        (
            ["train", "bytes", "--set", "task.lenght=3"],
            "unknown option for task 'bytes', 'lenght'; did you mean 'length'?",
        ),
        (["train", "bytes", "--set", "model.hidden=3"], "unknown setting of KernelformerConfig, 'hidden'"),
        (["train", "bytes", "--data", "no/such/file"], "no/such/file"),
        (["train", "listops", "--data", "x"], "unknown option for task 'listops', 'data'"),
        (["compare", "bytes", "--attention", "elu,elu"], "attentions to compare must differ"),
        (["evaluate", "no/such/run"], "no/such/run is not the folder of a run: there is no such folder"),
        (["generate", "no/such/run"], "no/such/run holds no model: there is no config.json in it"),
        (["train", "bytes", "--set", "task.lnegth=3"], "did you mean 'length'? the nearest of"),
    ],
)
def test_bad_input_is_refused_without_a_traceback(options, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = call(*options)
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert "Traceback" not in result.output
    assert not list(tmp_path.rglob("run.json"))


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("in the way")
    result = call("train", "bytes", *SMALL, "--out", tmp_path / "file" / "run")
    assert result.exit_code == 2
    assert str(tmp_path / "file") in result.stderr


def test_list_shows_methods_tasks_and_recipes():
    result = call("list")
    assert result.exit_code == 0
    for name in ("favor+hyperbolic", "bytes", "listops", "demo"):
        assert name in result.output


def test_settings_of_a_recipe_change_by_name():
    run = find_recipe("bytes").run()
    other = change(run, {"steps": 5, "model.hidden_size": 32, "task.length": 64, "attention": "elu"})
    assert (other.steps, other.warmup_steps, other.model["hidden_size"], other.task_options["length"]) == (5, 0, 32, 64)
    assert run.model["hidden_size"] != 32
    assert all(recipe.run().attention for recipe in RECIPES.values())


def test_values_of_the_command_line_are_read_as_people_write_them():
    texts = ["a=true", "b=False", "c=none", "model.d=none", "model.e=None", "model.f=true", "g=1e-3", "h=[1, 2]", "i=x"]
    found = read_settings(texts, steps=None, length=3)
    assert found == {
        "a": True,
        "b": False,
        "c": None,
        "model.d": "none",  # a word of the model's: no positions
        "model.e": None,
        "model.f": True,
        "g": 1e-3,
        "h": [1, 2],
        "i": "x",
        "task.length": 3,
    }


@pytest.mark.parametrize(
    ("task", "text", "value"),
    [
        ("images", "task.augment=none", "none"),  # a string wins where the setting is one
        ("images", "task.augment='none'", "none"),
        ("images", "task.views=none", None),
        ("images", "task.views=NULL", None),
        ("images", "task.views=3", 3),
        ("images", "task.resize=False", False),
        ("images", "task.mean=[0.5, 0.4, 1]", [0.5, 0.4, 1]),
        ("images", "task.mean=0.5", 0.5),
        ("bytes", "task.column=1", "1"),
        ("bytes", "task.column=true", "true"),
        ("bytes", "task.column=null", None),
        ("bytes", "task.pattern=[ab]*.txt", "[ab]*.txt"),
        ("sentences", "task.labels=[no, yes]", ["no", "yes"]),
        ("sentences", "task.labels=[0, none]", ["0", "none"]),
        ("sentences", "task.labels=2", 2),
        ("sentences", "task.lowercase=TRUE", True),
        ("bytes", "model.positions=none", "none"),
        ("bytes", "model.head_dim=none", None),
        ("bytes", "model.norm_first=false", False),
        ("bytes", "model.image_size=[8, 12]", [8, 12]),
        ("bytes", "redraw=none", None),
        ("bytes", "schedule=none", "none"),
        ("bytes", "learning_rate=1e-3", 1e-3),
        ("bytes", "attention=[elu, favor+]", ["elu", "favor+"]),
        ("bytes", "attention=favor+:num_features=64", "favor+:num_features=64"),
        ("bytes", "steps=many", "many"),  # which the run refuses by name
    ],
)
def test_values_are_read_as_their_setting_is_declared(task, text, value):
    (found,) = read_settings([text], task).values()
    assert found == value
    assert type(found) is type(value)


def test_a_tasks_name_runs_its_first_recipe(tmp_path):
    means = {"bytes": "bytes", "listops": "listops", "images": "rpe-imagenet", "demo": "demo"}
    assert {x: recipe_name(x) for x in means} == means
    assert all(recipes_of(task) for task in TASKS)
    assert find_recipe("pathfinder").task == "pathfinder"
    with pytest.raises(ValueError, match=r"unknown recipe 'imags'.*images"):
        recipe_name("imags")
    result = CliRunner().invoke(app, ["train", "images", "--threads", "1", "--out", str(tmp_path / "x")])
    assert "task images: recipe rpe-imagenet" in result.output
    assert "data" in result.output  # which no machine has
    listed = CliRunner().invoke(app, ["list", "tasks"], env={"COLUMNS": "300"}).output
    assert any("images" in line and "rpe-imagenet" in line for line in listed.splitlines())


def test_data_is_found_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert read_settings(None, data=Path("a/../b"))["task.data"] == str(tmp_path / "b")
    assert read_settings(["task.data=b"])["task.data"] == str(tmp_path / "b")


def test_other_places_are_found_from_anywhere_too_and_names_of_the_hub_stay(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "local").mkdir()
    names = ("task.test_file", "task.cache", "task.tokenizer", "start")
    assert read_settings([f"{x}=b" for x in names]) == dict.fromkeys(names, str(tmp_path / "b"))
    for local in ("hub:./local", "hub:local"):
        assert read_settings(None, data=local)["task.data"] == f"hub:{tmp_path / 'local'}"
    assert read_settings(None, data="hub:nyu-mll/glue:rte")["task.data"] == "hub:nyu-mll/glue:rte"


@pytest.mark.parametrize(
    ("options", "both"),
    [
        ([], ("nprf:num_features=16:draw=iid:relative=1d", "nprf:num_features=24:draw=iid:relative=1d")),
        (["--attention", "softmax"], ("softmax", None)),  # nothing of the recipe's is left in the decoder
        (["--attention", "softmax > elu"], ("softmax", "elu")),
        (["--attention", "softmax,elu > relu,elu"], (["softmax", "elu"], ["relu", "elu"])),
        (["--attention", "softmax", "--set", "decoder_attention=elu"], ("softmax", "elu")),
    ],
)
def test_one_run_has_its_attentions_said_as_in_a_comparison(options, both, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr("kernelformer_lab.training.session.train", lambda run, *_, **__: seen.append(run))
    result = call("train", "rpe-translation", "--size", "full", *options, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    assert [(x.attention, x.decoder_attention) for x in seen] == [both]


def test_evaluation_says_what_is_to_be_known_of_the_data(compared, tmp_path):
    run = shutil.copytree(folders(compared[0])[0], tmp_path / "run")
    record = json.loads((run / "run.json").read_text())
    record["data"] = "something else [1]"
    (run / "run.json").write_text(json.dumps(record))
    result = call("evaluate", run, "--threads", "1")
    assert result.exit_code == 0, result.output
    said = re.sub(r"\s+", " ", result.output)
    assert "the data is not that of training: argparse.py" in said
    assert "in training something else [1]; the validation split may hold rows that were trained on" in said
    assert "not that of training" not in call("evaluate", folders(compared[0])[0], "--threads", "1").output


def test_places_of_runs_are_different_and_plain(tmp_path):
    specs = [
        "elu",
        "nprf:relative=1d",
        "nprf:relative=2d:grid=(2,3)",
        "nprf:relative=2d:grid=(2,4)",
        "favor+:seed=" + "1" * 90,
    ]
    plan = make_plan("x", find_recipe("bytes").run(), specs, 2, tmp_path)
    places = [plan.folder_of(run).name for run in plan.runs]
    assert len(set(places)) == 10
    assert all(re.fullmatch(r"[A-Za-z0-9+=.,_-]{1,110}", x) for x in places)
    assert names("elu,nprf:relative=2d:grid=(2,3), favor+") == ["elu", "nprf:relative=2d:grid=(2,3)", "favor+"]


def test_runs_are_shortened_to_the_time_they_may_take(monkeypatch):
    run = find_recipe("demo").run()
    run = replace(run, task_options={"data": TEXT, "length": 32, "validation_samples": 16})
    monkeypatch.setattr(compare, "_step_seconds", lambda *_: 1.0)
    assert compare.fit_steps(run, ["favor+", "softmax"], 1e6) == run
    short = compare.fit_steps(run, ["favor+", "softmax"], 200.0)
    rounds = short.steps + short.steps // short.eval_every * short.task_options["validation_samples"] / 8 / 3
    assert 150 < 2 * rounds <= 200
    assert short.warmup_steps < short.steps
    assert compare.fit_steps(run, ["favor+"], 0.0).steps == 20


def test_the_time_of_a_step_is_measured():
    run = replace(find_recipe("demo").run(), task_options={"data": TEXT, "length": 32, "validation_samples": 16})
    assert compare.fit_steps(run, ["favor+:num_features=8"], 1e-3).steps == 20


def tiny_decoder(attention, **more):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return MODELS["causal-lm"](KernelformerConfig(attention=attention, **sizes, **more))


def test_decode_costs_tell_constant_states_from_growing_ones():
    rows = compare.decode_costs(tiny_decoder("favor+:num_features=8"), (8, 40), repeats=2)
    assert [row[0] for row in rows] == [8, 40]
    assert rows[0][2] == rows[1][2]
    rows = compare.decode_costs(tiny_decoder("softmax"), (8, 40), repeats=2)
    assert rows[0][2] < rows[1][2]
    assert rows == tuple(sorted(rows))


def test_a_model_is_timed_as_far_as_it_has_positions():
    model = tiny_decoder("elu", positions="learned", max_position_embeddings=30)
    assert [row[0] for row in compare.decode_costs(model, (8, 26, 27), repeats=3)] == [8, 26]
