"""--json: JSON and nothing else on stdout, for every command that prints a table."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from commands import COMMANDS
from typer.core import TyperOption
from typer.testing import CliRunner

from kernelformer.cli.app import app
from kernelformer.cli.common import console
from samples import change_study

RECORDS = Path(__file__).parents[2] / "results" / "evidence"
# Those that write a text, or a run whose folder has all figures.
WITHOUT = {"train", "generate", "translate", "continue"}


def invoke(*words):
    result = CliRunner().invoke(app, [*map(str, words), "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout), result.stderr


def test_every_command_that_prints_a_table_has_the_option():
    has = {
        name for name, x in COMMANDS.items() if any(isinstance(y, TyperOption) and "--json" in y.opts for y in x.params)
    }
    assert has == COMMANDS.keys() - WITHOUT - {"export"} | (has & {"export"})


@pytest.mark.parametrize(
    ("words", "keys"),
    [
        (["list"], {"methods", "tasks", "recipes"}),
        (["list", "tasks"], {"tasks"}),
        (["list", "favor+"], {"method", "about", "options", "positions"}),
        (["list", "sky-text"], {"recipe", "settings", "compared", "about", "source", "note"}),
        (["doctor"], {"versions", "extras", "threads", "allocator", "devices", "caches", "hub", "self_check"}),
    ],
)
def test_what_is_there_is_told_as_json_and_the_tables_go_to_stderr(words, keys):
    value, beside = invoke(*words)
    assert value.keys() == keys
    assert beside
    plain = CliRunner().invoke(app, words)
    assert plain.stdout  # the next command without --json prints to stdout again
    assert not console.stderr


def test_items_are_told_with_their_jobs(tmp_path):
    value, beside = invoke("reproduce", "--list", "--records", tmp_path)
    assert {"item", "jobs", "jobs_left", "missing_data"} <= value[0].keys()
    assert value[0]["item"] in beside
    assert value[0]["claims"][0]["rule"].startswith("for: ")
    assert value[0]["claims"][0]["claim"] not in beside


def test_claims_of_an_item_damage_of_its_record_and_former_jobs_are_told(tmp_path):
    records = shutil.copytree(RECORDS, tmp_path / "[red]records", ignore=shutil.ignore_patterns("*.html"))
    (records / "sparsity.json").write_text("{")
    value, beside = invoke("reproduce", "enwik8", "sparsity", "--list", "--records", records)
    told = " ".join(beside.split())
    assert [x["superseded"] for x in value] == [27, 0]
    assert "sparsity is left out: " in told
    assert "[red]records/sparsity.json" in "".join(beside.split())
    assert "sparsity.json is not JSON" in value[1]["damage"]
    assert "they stay there, and are not judged: enwik8 (27)" in told
    assert value[0]["claims"][0]["claim"] in told


def test_a_study_prints_its_record(tmp_path, monkeypatch):
    def run(record, log, progress):
        log("a sentence")
        progress()
        record.figures = {"error": float("nan"), "rows": [1, 2]}

    shown = {"tables": lambda _: ["a table"], "picture": lambda *_: None}
    change_study(monkeypatch, "positions", steps=lambda _: 1, run=run, **shown)
    value, beside = invoke("study", "positions", "--out", tmp_path / "out")
    assert value["command"] == "kernelformer study positions"
    assert (value["error"], value["rows"]) == (None, [1, 2])  # JSON has no word for what is no number
    assert "a sentence\n" in beside
    assert "a table\n" in beside


def test_results_of_jobs_are_printed(tmp_path, monkeypatch):
    """Jobs that take long are stood in for: what they return is printed, whatever it is."""
    made = SimpleNamespace(
        as_json=lambda: {"figure": 0.5}, texts={}, remarks=[], judged=None, trials=[], left_out=[], splits={}
    )
    monkeypatch.setattr("kernelformer.conversion.convert.run", lambda *_, **__: made)
    monkeypatch.setattr("kernelformer.conversion.judge.judge_folder", lambda *_, **__: made)
    monkeypatch.setattr("kernelformer.conversion.report.tables", lambda _: ["a table"])
    for name in ("judgement_tables", "remarks"):
        monkeypatch.setattr(f"kernelformer.conversion.report.{name}", lambda _: ["a table"])
    assert invoke("convert", "m", tmp_path / "x")[0] == {"figure": 0.5}
    assert invoke("judge", tmp_path, "--original", "m")[0] == {"figure": 0.5}

    monkeypatch.setattr("kernelformer.conversion.advise.run", lambda *_, **__: made)
    for name in ("tables", "verdict", "paste_lines"):
        monkeypatch.setattr(f"kernelformer.conversion.advice_report.{name}", lambda _: ["a line"])
    monkeypatch.setattr("kernelformer.conversion.advice_report.record", lambda _: {"verdict": ["good"]})
    assert invoke("advise", "m")[0] == {"verdict": ["good"]}

    monkeypatch.setattr(
        "kernelformer_lab.training.evaluation.evaluate",
        lambda *_, **__: {"loss": 1.5, "accuracy": 0.5, "loss_error": 0.1},
    )
    value, _ = invoke("evaluate", tmp_path)
    assert value["scores"]["accuracy"] == 0.5
    assert value["standard_errors"] == {"loss": 0.1}

    for name in ("picture", "table"):
        monkeypatch.setattr(f"kernelformer.conversion.attention_pictures.{name}", lambda *_: "a table")
    monkeypatch.setattr("kernelformer.conversion.attention_pictures.run", lambda *_, **__: made)
    monkeypatch.setattr("kernelformer.conversion.attention_pictures.record", lambda _: {"layers": []})
    assert invoke("attention", "m", "--attention", "elu", "--out", tmp_path)[0] == {"layers": []}


def test_shards_are_told(tmp_path):
    (tmp_path / "a.txt").write_text("some text, and more of it\n" * 50)
    value, beside = invoke("prepare", tmp_path / "a.txt", "--tokenizer", "bytes", "--out", tmp_path / "shards")
    assert value["splits"]["train"]["tokens"] > 100
    assert "train by: kernelformer train shards" in beside
