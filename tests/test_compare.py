"""From one command to a compared result: train, compare, evaluate, generate, list."""

from __future__ import annotations

import argparse
import json
import re

import pytest
import torch
from typer.testing import CliRunner

from kernelformer.cli.app import app
from kernelformer.cli.common import names
from kernelformer.models import MODELS, KernelformerConfig
from kernelformer.recipes.catalogue import RECIPES, change, find_recipe
from kernelformer.recipes.compare import make_plan
from kernelformer.recipes.decoding import ByteStreamer, decode_costs, sample_bytes

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
    assert "def " in page  # a sample of each


def test_a_finished_comparison_is_not_trained_again(compared):
    folder, specs, output = compared
    before = {x: (x / "result.json").stat().st_mtime_ns for x in folders(folder)}
    refused = call("compare", "bytes", "--attention", specs, *SMALL, "--out", folder)
    assert refused.exit_code == 2
    assert "go on with --resume, or take another folder" in refused.output.replace("\n", " ")
    again = call("compare", "bytes", "--attention", specs, *SMALL, "--out", folder, "--resume")
    assert again.exit_code == 0, again.output
    assert {x: (x / "result.json").stat().st_mtime_ns for x in before} == before
    assert set(re.findall(r"\d+\.\d{3} \(n=1\)", again.output)) == set(re.findall(r"\d+\.\d{3} \(n=1\)", output))
    other = call("compare", "bytes", "--attention", specs, *SMALL, "--steps", "6", "--out", folder, "--resume")
    assert other.exit_code == 2
    assert "steps" in other.output
    assert "Traceback" not in other.output


def test_a_trained_model_is_evaluated_and_writes(compared):
    run = folders(compared[0])[0]
    result = call("evaluate", run, "--split", "validation", "--threads", "1")
    assert result.exit_code == 0, result.output
    value = json.loads((run / "result.json").read_text())["value"]
    assert f"validation bits per byte: {value:.4f}" in result.output
    texts = [call("generate", run, "--tokens", "20", "--prompt", "import ", "--seed", s).output for s in (1, 1, 2)]
    assert texts[0].startswith("import ")
    assert "20 bytes in" in texts[0]
    assert texts[0].splitlines()[0] == texts[1].splitlines()[0]
    assert texts[0].split("20 bytes")[0] != texts[2].split("20 bytes")[0]


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
    assert "resume" in again.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["train", "byte"], "unknown recipe 'byte'; did you mean 'bytes'?"),
        (["train", "bytes", "--attention", "favour+"], "unknown method 'favour+'; did you mean 'favor+'?"),
        (["train", "bytes", "--attention", "nystromformer"], "is_causal=True was asked for"),
        (
            ["train", "bytes", "--set", "learning-rate=1"],
            "unknown setting 'learning-rate'; did you mean 'learning_rate'?",
        ),
        (["train", "bytes", "--set", "steps"], "--set takes name=value, got 'steps'"),
        (
            ["train", "bytes", "--set", "task.lenght=3"],
            "unknown option for task 'bytes', 'lenght'; did you mean 'length'?",
        ),
        (["train", "bytes", "--set", "model.hidden=3"], "unknown setting of KernelformerConfig, 'hidden'"),
        (["train", "bytes", "--data", "no/such/file"], "no/such/file"),
        (["train", "listops", "--data", "x"], "unknown option for task 'listops', 'data'"),
        (["compare", "bytes", "--attention", "elu,elu"], "attentions to compare must differ"),
        (["evaluate", "no/such/run"], "no/such/run"),
        (["generate", "no/such/run"], "no/such/run"),
    ],
)
def test_bad_input_is_refused_without_a_traceback(options, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = call(*options)
    assert result.exit_code == 2, result.output
    assert message in re.sub(r"\s+", " ", result.output)
    assert "Traceback" not in result.output
    assert not list(tmp_path.rglob("checkpoint*"))


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("in the way")
    result = call("train", "bytes", *SMALL, "--out", tmp_path / "file" / "run")
    assert result.exit_code == 2
    assert str(tmp_path / "file")[-20:] in result.output.replace("\n", "")


def test_list_shows_methods_tasks_and_recipes():
    result = call("list")
    assert result.exit_code == 0
    for name in ("favor+hyperbolic", "bytes", "listops", "demo"):
        assert name in result.output


def test_settings_of_a_recipe_change_by_name():
    run = find_recipe("bytes").run
    other = change(run, {"steps": 5, "model.hidden_size": 32, "task.length": 64, "attention": "elu"})
    assert (other.steps, other.warmup_steps, other.model["hidden_size"], other.task_options["length"]) == (5, 0, 32, 64)
    assert run.model["hidden_size"] != 32
    assert all(recipe.run.attention for recipe in RECIPES.values())


def test_places_of_runs_are_different_and_plain(tmp_path):
    specs = [
        "elu",
        "nprf:relative=1d",
        "nprf:relative=2d:grid=(2,3)",
        "nprf:relative=2d:grid=(2,4)",
        "favor+:seed=" + "1" * 90,
    ]
    plan = make_plan("x", find_recipe("bytes").run, specs, 2, tmp_path)
    places = [plan.place(run).name for run in plan.runs]
    assert len(set(places)) == 10
    assert all(re.fullmatch(r"[A-Za-z0-9+=.,_-]{1,110}", x) for x in places)
    assert names("elu,nprf:relative=2d:grid=(2,3), favor+") == ["elu", "nprf:relative=2d:grid=(2,3)", "favor+"]


def tiny(attention, **more):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return MODELS["causal-lm"](KernelformerConfig(attention=attention, **sizes, **more))


def test_decode_costs_tell_constant_states_from_growing_ones():
    rows = decode_costs(tiny("favor+:num_features=8"), (8, 40), repeats=2)
    assert [row[0] for row in rows] == [8, 40]
    assert rows[0][2] == rows[1][2]
    rows = decode_costs(tiny("softmax"), (8, 40), repeats=2)
    assert rows[0][2] < rows[1][2]
    assert [row[0] for row in decode_costs(tiny("elu", positions="learned", max_position_embeddings=30), (8, 40))] == []


def test_sampled_text_is_streamed_and_counted():
    parts = []
    made = sample_bytes(tiny("elu"), "a", tokens=12, write=parts.append)
    assert made.tokens == 12
    assert made.state_bytes > 0
    assert "".join(parts) == made.text
    assert sample_bytes(tiny("elu"), "a", tokens=12).text == made.text
    assert sample_bytes(tiny("elu"), "a", tokens=12, temperature=0).text != made.text
    with pytest.raises(ValueError, match="at least one character"):
        sample_bytes(tiny("elu"), "", tokens=3)
    with pytest.raises(ValueError, match="over 256 bytes, this one has 16"):
        sample_bytes(tiny("elu", vocab_size=16), "a", tokens=3)


def test_a_character_in_two_tokens_is_written_when_it_is_whole():
    parts = []
    streamer = ByteStreamer(parts.append)
    streamer.put(torch.tensor([[97]]))
    for byte in "é!".encode():
        streamer.put(torch.tensor([byte]))
    streamer.put(torch.tensor([0xC3]))
    streamer.end()
    assert "".join(parts) == "é!\N{REPLACEMENT CHARACTER}"
