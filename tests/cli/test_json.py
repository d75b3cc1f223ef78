"""--json: JSON and nothing else on stdout, for every command that prints a table."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from typer.core import TyperOption
from typer.testing import CliRunner

from cli.commands import COMMANDS, as_json
from kernelformer.cli.app import app
from kernelformer.cli.common import console

# Those that write a text, or a run whose folder has all figures.
WITHOUT = {"train", "generate", "translate", "continue"}


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
    value, beside = as_json(*words)
    assert value.keys() == keys
    assert beside
    plain = CliRunner().invoke(app, words)
    assert plain.stdout  # the next command without --json prints to stdout again
    assert not console.stderr


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
    assert as_json("convert", "m", tmp_path / "x")[0] == {"figure": 0.5}
    assert as_json("judge", tmp_path, "--original", "m")[0] == {"figure": 0.5}

    monkeypatch.setattr("kernelformer.conversion.advise.run", lambda *_, **__: made)
    for name in ("tables", "verdict", "paste_lines"):
        monkeypatch.setattr(f"kernelformer.conversion.advice_report.{name}", lambda _: ["a line"])
    monkeypatch.setattr("kernelformer.conversion.advice_report.record", lambda _: {"verdict": ["good"]})
    assert as_json("advise", "m")[0] == {"verdict": ["good"]}

    monkeypatch.setattr(
        "kernelformer_lab.training.evaluation.evaluate",
        lambda *_, **__: {"loss": 1.5, "accuracy": 0.5, "loss_error": 0.1},
    )
    value, _ = as_json("evaluate", tmp_path)
    assert value["scores"]["accuracy"] == 0.5
    assert value["standard_errors"] == {"loss": 0.1}

    for name in ("picture", "table"):
        monkeypatch.setattr(f"kernelformer_lab.analysis.attention_pictures.{name}", lambda *_: "a table")
    monkeypatch.setattr("kernelformer_lab.analysis.attention_pictures.run", lambda *_, **__: made)
    monkeypatch.setattr("kernelformer_lab.analysis.attention_pictures.record", lambda _: {"layers": []})
    assert as_json("attention", "m", "--attention", "elu", "--out", tmp_path)[0] == {"layers": []}
