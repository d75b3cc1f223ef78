"""Options of the command line: one name for one thing."""

from __future__ import annotations

import os

import pytest
from typer.testing import CliRunner

from kernelformer.cli.app import app
from kernelformer.cli.common import literal_text, picture_in
from samples import change_study


def test_texts_to_learn_from_and_to_measure_on_are_named_as_in_convert(tmp_path, monkeypatch):
    seen = []

    def stop(record, *_):
        seen.append((record.settings.text.name, record.settings.held_out.name))
        raise ValueError("enough")

    change_study(monkeypatch, "conversion", run=stop)
    command = ["study", "conversion", "m", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, [*command, "--distill", "a", "--text", "b"])
    assert "enough" in result.stderr
    assert seen == [("a", "b")]
    result = CliRunner().invoke(app, [*command, "--text", "b"])
    assert result.exit_code == 2
    assert "missing option '--distill'" in result.stderr


def test_a_prompt_is_written_or_read_from_a_file(tmp_path):
    (tmp_path / "a.txt").write_text("two\nlines\n")
    assert literal_text("word", None) == "word"
    assert literal_text(None, str(tmp_path / "a.txt")) == "two\nlines"
    assert literal_text(None, None) is None
    for sentence in ("a sentence", "a sentence " * 1000):  # the second is longer than any name of a file
        with pytest.raises(ValueError, match=r"there is no file 'a sentence.*; --text takes a file, --prompt a text"):
            literal_text(None, sentence)
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


def test_a_picture_goes_into_a_folder_and_its_own_path_is_refused(tmp_path):
    assert picture_in(tmp_path / "new", "tour.png") == tmp_path / "new" / "tour.png"
    with pytest.raises(ValueError, match=r"--out takes a folder, in which the picture is tour\.png, got .*own\.png"):
        picture_in(tmp_path / "deep" / "own.png", "tour.png")
    assert not (tmp_path / "deep").exists()


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
