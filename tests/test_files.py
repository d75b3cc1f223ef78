"""Files are whole or not there."""

from __future__ import annotations

import json
import os

import pytest

from kernelformer.files import replacing, write_json, write_text


def test_a_file_is_replaced_whole(tmp_path):
    path = tmp_path / "a.txt"
    write_text(path, "one\r\nä")
    assert path.read_bytes() == "one\r\nä".encode()
    write_json(path, {"x": 1.5})
    assert json.loads(path.read_text()) == {"x": 1.5}
    assert os.listdir(tmp_path) == ["a.txt"]


def test_what_fails_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "a.txt"
    write_text(path, "old")

    def interrupted():
        with replacing(path) as part:
            part.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    with pytest.raises(FileNotFoundError), replacing(path):
        pass  # nobody wrote
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_two_writers_do_not_meet(tmp_path):
    path = tmp_path / "a.txt"
    with replacing(path) as one, replacing(path) as two:
        one.write_text("one")
        two.write_text("two")
    assert path.read_text() == "one"  # the last one to end
