"""Options of the command line: one name for one thing, and the former names for a while."""

from __future__ import annotations

import json
import os
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from kernelformer.cli.aliases import literal_text, picture_in, renamed
from kernelformer.cli.app import app

RENAMED = {
    ("bench",): {"--methods": "--attention", "--window": "--max-distance", "--tasks": "--modes"},
    ("advise",): {"--budget": "--minutes"},
    ("results",): {"--folder": "--records"},
    ("study", "approximation"): {"--encoder": "--model", "--texts": "--samples"},
    ("study", "depth"): {"--texts": "--samples"},
    ("study", "amino-acids"): {"--sequences": "--samples"},
    ("study", "positions"): {"--repeats": "--rounds"},
    ("study", "normalized"): {"--lr": "--learning-rate"},
    ("study", "encoder"): {"--limit": "--max-seconds"},
    ("study", "lengths"): {"--limit": "--max-seconds"},
    ("study", "serving"): {"--limit": "--max-seconds"},
    ("attention",): {"--layer": "--layers", "--head": "--heads"},
    ("translate",): {"--file": "--text"},
    ("study", "sparsity"): {"--methods": "--attention"},
    ("study", "conversion"): {"--methods": "--attention"},
}


def help_of(command):
    words = CliRunner().invoke(app, [*command, "--help"], env={"COLUMNS": "200"}).output
    return {word.strip("│,") for word in words.split() if word.startswith("--")}


@pytest.mark.parametrize("command", RENAMED)
def test_help_has_the_new_names_alone(command):
    shown = help_of(command)
    assert shown >= set(RENAMED[command].values())
    assert not shown & RENAMED[command].keys()


@pytest.mark.parametrize("command", RENAMED)
def test_former_names_are_known_and_refused_beside_the_new_ones(command):
    rest = {"attention": ["x"], "translate": ["x"], "conversion": ["x", "--distill", "y", "--text", "z"]}
    rest |= {"advise": ["x"], "lengths": ["x"], "depth": ["x", "--text", "y"], "amino-acids": ["x", "--text", "y"]}
    rest["approximation"] = ["--text", "y"]
    for old, new in RENAMED[command].items():
        given = [*command, *rest.get(command[-1], []), old, "7", new, "8"]
        result = CliRunner().invoke(app, given)
        assert result.exit_code == 2
        assert f"{old} is the former name of {new}; give one of them." in result.stderr


def test_the_benchmark_does_the_same_by_its_former_names(tmp_path, monkeypatch):
    from kernelformer.bench import benchmark

    def here(work, *, threads, allocator, **arguments):  # no processes: what is measured is not the point
        return work(**arguments)

    monkeypatch.setattr(benchmark, "run_in_process", here)
    small = ["--lengths", "16", "--modes", "bidirectional", "--passes", "forward", "--heaps", "kept", "--peers", "none"]
    small += [
        "--heads",
        "1",
        "--head-dim",
        "4",
        "--features",
        "4",
        "--budget",
        "0.01",
        "--no-memory",
        "--bias",
        "window",
    ]
    kept = {}
    for name, options in (
        ("old", ["--methods", "nprf", "--window", "3"]),
        ("new", ["--attention", "nprf", "--max-distance", "3"]),
    ):
        result = CliRunner().invoke(app, ["bench", *small, *options, "--out", str(tmp_path / name)])
        assert result.exit_code == 0, result.output
        assert result.stderr.count("warning: ") == (2 if name == "old" else 0)
        (row,) = json.loads((tmp_path / name / "bench.json").read_text())["rows"]
        kept[name] = row["name"], row["case"]
    assert kept["old"] == kept["new"]
    assert kept["new"][1]["window"] == 3


@pytest.mark.parametrize(
    ("words", "warnings"),
    [(["--distill", "a", "--text", "b"], 0), (["--text", "a", "--held-out", "b"], 2)],
)
def test_texts_to_learn_from_and_to_measure_on_are_named_as_in_convert(words, warnings, tmp_path, monkeypatch):
    seen = []

    def stop(settings, *_):
        seen.append((settings.text.name, settings.held_out.name))
        raise ValueError("enough")

    monkeypatch.setattr("kernelformer.studies.conversion.run", stop)
    result = CliRunner().invoke(app, ["study", "conversion", "m", *words, "--out", str(tmp_path)])
    assert "enough" in result.stderr
    assert seen == [("a", "b")]
    assert result.stderr.count("warning: ") == warnings


def test_one_of_the_two_texts_alone_is_not_enough(tmp_path):
    for words, missing in ((["--text", "b"], "--distill"), (["--held-out", "b"], "--distill"), ([], "--distill")):
        result = CliRunner().invoke(app, ["study", "conversion", "m", *words, "--out", str(tmp_path)])
        assert result.exit_code == 2
        assert f"{missing} is missing" in result.stderr


def test_a_renamed_option_keeps_its_type_and_its_bounds():
    seen = []

    @renamed(count="number")
    def command(number: Annotated[int, typer.Option(min=1)] = 3) -> None:
        seen.append(number)

    small = typer.Typer()
    small.command()(command)
    for given in (["--count", "5"], ["--number", "6"], []):
        assert CliRunner().invoke(small, given).exit_code == 0
    assert seen == [5, 6, 3]
    assert CliRunner().invoke(small, ["--count", "0"]).exit_code == 2
    assert CliRunner().invoke(small, ["--count", "x"]).exit_code == 2


def test_a_prompt_is_written_or_read_from_a_file(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("two\nlines\n")
    assert literal_text("word", None) == "word"
    assert literal_text(None, str(tmp_path / "a.txt")) == "two\nlines"
    assert literal_text(None, None) is None
    assert capsys.readouterr().err == ""
    long = "a sentence " * 1000  # longer than any name of a file
    assert literal_text(None, long) == long
    assert capsys.readouterr().err.startswith("warning: there is no file 'a sentence")
    with pytest.raises(ValueError, match="--prompt 'a' and --text 'b' both say what to read"):
        literal_text("a", "b")
    (tmp_path / "a.txt").write_bytes(b"\xff")
    with pytest.raises(ValueError, match="is not UTF-8"):
        literal_text(None, str(tmp_path / "a.txt"))


def test_a_folder_or_a_pipe_is_no_text_and_not_said_to_be_missing(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(ValueError, match="is not a regular file; --text takes one, --prompt a text"):
            literal_text(None, str(path))


def test_a_picture_goes_into_a_folder(tmp_path, capsys):
    assert picture_in(tmp_path / "new", "tour.png") == tmp_path / "new" / "tour.png"
    assert capsys.readouterr().err == ""
    assert picture_in(tmp_path / "own.png", "tour.png") == tmp_path / "own.png"
    assert "--out is a folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["study", "positions", "--lengths", "12,abc"], "--lengths takes integers of at least 1"),
        (["study", "encoder", "--depths", "1.5"], "--depths takes integers of at least 1"),
        (["study", "normalized", "--features", "16,"], "--features takes integers of at least 1"),
        (["study", "lengths", "x", "--lengths", "-1"], "--lengths takes integers of at least 1"),
        (["study", "sparsity", "--relevances", "abc"], "--relevances takes numbers separated by commas, got 'abc'"),
    ],
)
def test_a_list_that_is_none_of_numbers_is_named_with_its_option(command, said, tmp_path):
    result = CliRunner().invoke(app, [*command, "--out", str(tmp_path)])
    assert result.exit_code == 2
    assert said in result.stderr
