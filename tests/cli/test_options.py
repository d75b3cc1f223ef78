"""Options of the command line: one name for one thing."""

from __future__ import annotations

import os

import pytest

from kernelformer.cli.common import literal_text
from kernelformer_lab.cli.pictures import picture_in


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
