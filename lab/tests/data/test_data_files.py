"""Data is read from regular files within the folder that was given, and from nothing else."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from kernelformer.cli.app import app
from kernelformer.conversion.readers import read_bytes, read_lines
from kernelformer_lab.data.files import read_file_rows
from kernelformer_lab.tasks import make_task

ROWS = "text,label\n" + "".join(f"good {i},{i % 2}\n" for i in range(40))


def pipe(path):
    os.mkfifo(path)
    return path


def endless(path):
    path.symlink_to("/dev/zero")
    return path


def listening(path):
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
    return path


KINDS = [(pipe, r"is a named pipe \(FIFO\)"), (endless, "is a device"), (listening, "is a socket")]


@pytest.mark.parametrize(("make", "words"), KINDS)
@pytest.mark.parametrize("task", ["bytes", "words", "text", "images", "proteins", "translation"])
def test_what_is_no_regular_file_is_refused_by_name_and_at_once(task, make, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = make(Path("data.jsonl"))
    with pytest.raises(ValueError, match=rf"^data\.jsonl {words}, and data is read from regular files; copy"):
        make_task(task, data=path)


@pytest.mark.parametrize(("make", "words"), KINDS)
def test_it_is_not_read_within_a_folder_either(make, words, tmp_path, monkeypatch):
    monkeypatch.setenv("KERNELFORMER_FOLLOW_LINKS", "1")
    monkeypatch.chdir(tmp_path)
    for name in ("train.csv", "train.txt", "train/a/1.png"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        make(Path(name))
    for read in (lambda: next(read_lines(Path("train.txt"))), lambda: read_bytes(Path("train.txt"))):
        with pytest.raises(ValueError, match=words):
            read()
    with pytest.raises(ValueError, match=words):
        next(iter(read_file_rows(Path("train.csv"))))
    with pytest.raises(ValueError, match=words):
        make_task("text", data=tmp_path).split("train")
    with pytest.raises(ValueError, match=words):
        make_task("bytes", data=tmp_path, pattern="*.txt").split("train")
    with pytest.raises(ValueError, match=words):
        make_task("images", data=tmp_path, classes=2, cache=tmp_path / "cache").split("train")


@pytest.fixture
def folders(tmp_path):
    """Data with a link to a file and to a folder outside, for three tasks."""
    outside = tmp_path / "outside"
    for folder in ("secret/0", "rows", "texts", "images/train"):
        (tmp_path / folder).mkdir(parents=True)
    outside.mkdir()
    (outside / "rows.csv").write_text(ROWS)
    (outside / "text.txt").write_text("text " * 2000)
    Image.fromarray(np.zeros((32, 32, 3), np.uint8)).save(tmp_path / "secret" / "0" / "1.png")
    (tmp_path / "rows" / "train.csv").symlink_to(outside / "rows.csv")
    (tmp_path / "texts" / "train.txt").symlink_to("../outside/text.txt")
    (tmp_path / "images" / "train" / "0").symlink_to(tmp_path / "secret" / "0")
    return tmp_path


@pytest.mark.parametrize(
    ("task", "folder", "link", "options"),
    [
        ("text", "rows", "rows/train.csv", {}),
        ("bytes", "texts", "texts/train.txt", {"length": 16}),
        ("words", "texts", "texts/train.txt", {"length": 16, "vocab_size": 300}),
        ("images", "images", "images/train/0", {"classes": 2, "validation_share": 0}),
    ],
)
def test_links_that_lead_out_of_the_folder_are_named_and_refused_unless_allowed(
    task, folder, link, options, folders, monkeypatch
):
    cache = {"cache": folders / "cache"} if task in ("words", "images") else {}
    made = make_task(task, data=folders / folder, **options, **cache)
    words = (
        rf"{folders / link} leads out of {folders / folder}, by a link to {folders}/(outside|secret)/.*--follow-links"
    )
    for use in (made.fingerprint, lambda: made.split("train")):
        with pytest.raises(ValueError, match=words):
            use()
    monkeypatch.setenv("KERNELFORMER_FOLLOW_LINKS", "1")
    assert made.fingerprint()
    assert len(made.split("train")) > 0


def test_links_within_the_folder_and_to_the_folder_are_followed(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "all.txt").write_text("text " * 2000)
    (tmp_path / "real" / "train.txt").symlink_to("all.txt")
    (tmp_path / "data").symlink_to("real")
    assert len(make_task("bytes", data=tmp_path / "data", length=16, pattern="train.txt").split("train")) > 0
    (tmp_path / "file.txt").symlink_to(tmp_path / "real" / "all.txt")  # one that was given itself
    assert len(make_task("bytes", data=tmp_path / "file.txt", length=16).split("train")) > 0


def test_a_folder_of_images_that_links_to_itself_is_walked_once(tmp_path):
    for name in ("a", "b"):
        (tmp_path / "train" / name).mkdir(parents=True)
        Image.fromarray(np.zeros((32, 32, 3), np.uint8)).save(tmp_path / "train" / name / "1.png")
    (tmp_path / "train" / "a" / "up").symlink_to("..")
    (tmp_path / "train" / "b" / "other").symlink_to("../a")
    made = make_task("images", data=tmp_path, classes=2, validation_share=0.0, cache=tmp_path / "cache")
    assert len(made.split("train")) == 3  # a/1, b/1, b/other/1


@pytest.mark.parametrize("task", ["bytes", "text", "images", "words"])
def test_a_path_of_5000_characters_is_one_sentence(task):
    with pytest.raises(ValueError, match=r"^there is no file or folder /a+\.\.\. of 5,001 characters \(File name"):
        make_task(task, data="/" + "a" * 5000)
    with pytest.raises(ValueError, match=r"^there is no file or folder a.b \(embedded null byte\)"):
        make_task(task, data="a\0b")


@pytest.mark.parametrize("command", [["train", "bytes", "--data"], ["evaluate"], ["convert", "--force"]])
def test_commands_say_it_too(command):
    rest = ["out"] if command[0] == "convert" else []
    result = CliRunner().invoke(app, [*command, "/" + "a" * 5000, *rest])
    assert result.exit_code == 2
    assert isinstance(result.exception, SystemExit)
    assert "/aaa" in result.stderr
    assert len(result.stderr) < 1000
