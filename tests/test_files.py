"""Files are whole or not there."""

from __future__ import annotations

import errno
import json
import os
from types import SimpleNamespace

import pytest
from safetensors import SafetensorError

from kernelformer import files
from kernelformer.files import naming_full_disk, replacing, write_json, write_text


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


# What writers raised on a disk of 500 KiB; of torch it is one error of three.
FULL = {
    "the system": OSError(errno.ENOSPC, "No space left on device"),
    "a quota": OSError(errno.EDQUOT, "Disk quota exceeded"),
    "safetensors": SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
    "torch": RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 470144 vs 470032"),
    "a stream of torch": RuntimeError("basic_ios::clear: iostream error"),
}


@pytest.mark.parametrize("writer", FULL)
def test_a_full_disk_is_called_so_whatever_the_writer_says(writer, tmp_path, monkeypatch):
    path, free = tmp_path / "not" / "yet" / "there", {tmp_path: 0}
    monkeypatch.setattr(files.shutil, "disk_usage", lambda place: SimpleNamespace(free=free[place]))
    with pytest.raises(OSError, match=f"the disk is full: '{path}'") as problem, naming_full_disk(path):
        raise FULL[writer]
    assert problem.value.errno == errno.ENOSPC
    free[tmp_path] = 1 << 30
    if "torch" in writer:  # which then has failed for another reason
        with pytest.raises(RuntimeError) as problem, naming_full_disk(path):
            raise FULL[writer]
        assert problem.value is FULL[writer]


def test_other_errors_of_a_writer_stay_what_they_are(tmp_path):
    for other in (ValueError("x"), OSError(errno.EACCES, "x")):
        with pytest.raises(type(other)) as problem, naming_full_disk(tmp_path):
            raise other
        assert problem.value is other


def test_a_write_that_finds_the_disk_full_names_the_file(tmp_path):
    def fill():
        with replacing(tmp_path / "a.txt"), open("/dev/full", "wb", buffering=0) as file:
            file.write(b"x")

    with pytest.raises(OSError, match=r"the disk is full: '.*a\.txt'"):
        fill()
    assert os.listdir(tmp_path) == []
