"""--json of the laboratory's commands: JSON and nothing else on stdout."""

from __future__ import annotations

import shutil
from pathlib import Path

from typer.testing import CliRunner

from cli.commands import as_json
from kernelformer.cli.app import app
from samples import change_study

RECORDS = Path(__file__).parents[3] / "results" / "evidence"


def test_items_are_told_with_their_jobs(tmp_path):
    value, beside = as_json("reproduce", "--list", "--records", tmp_path)
    assert {"item", "jobs", "jobs_left", "missing_data"} <= value[0].keys()
    assert value[0]["item"] in beside
    assert value[0]["claims"][0]["rule"].startswith("for: ")
    assert value[0]["claims"][0]["claim"] not in beside


def test_claims_of_an_item_damage_of_its_record_and_former_jobs_are_told(tmp_path):
    records = shutil.copytree(RECORDS, tmp_path / "[red]records", ignore=shutil.ignore_patterns("*.html"))
    (records / "sparsity.json").write_text("{")
    value, beside = as_json("reproduce", "enwik8", "sparsity", "--list", "--records", records)
    told = " ".join(beside.split())
    assert [x["superseded"] for x in value] == [27, 0]
    assert "sparsity is left out: " in told
    assert "[red]records/sparsity.json" in "".join(beside.split())
    assert "sparsity.json is not JSON" in value[1]["damage"]
    assert "they stay there, and are not judged: enwik8 (27)" in told
    assert value[0]["claims"][0]["claim"] in told


def test_a_claim_that_is_measured_again_has_its_own_jobs(tmp_path):
    again = ["reproduce", "cifar", "--claim", "1", "--first-seed", "100"]
    value, _ = as_json(*again, "--list", "--records", tmp_path)
    assert (value[0]["jobs"], value[0]["jobs_left"], len(value[0]["claims"])) == (6, 6, 1)
    for wrong in (again[:4], [*again[:2], *again[4:]], [again[0], "cifar", "maps", *again[2:]]):
        result = CliRunner().invoke(app, [*wrong, "--records", str(tmp_path)])
        assert result.exit_code != 0
        assert "--claim N and --first-seed S go together, with one item" in " ".join(result.output.split())


def test_a_study_prints_its_record(tmp_path, monkeypatch):
    def run(record, log, progress):
        log("a sentence")
        progress()
        record.figures = {"error": float("nan"), "rows": [1, 2]}

    shown = {"tables": lambda _: ["a table"], "picture": lambda *_: None}
    change_study(monkeypatch, "positions", steps=lambda _: 1, run=run, **shown)
    value, beside = as_json("study", "positions", "--out", tmp_path / "out")
    assert value["command"] == "kernelformer study positions"
    assert (value["error"], value["rows"]) == (None, [1, 2])  # JSON has no word for what is no number
    assert "a sentence\n" in beside
    assert "a table\n" in beside


def test_shards_are_told(tmp_path):
    (tmp_path / "a.txt").write_text("some text, and more of it\n" * 50)
    value, beside = as_json("prepare", tmp_path / "a.txt", "--tokenizer", "bytes", "--out", tmp_path / "shards")
    assert value["splits"]["train"]["tokens"] > 100
    assert "train by: kernelformer train shards" in beside
