"""Texts to token shards: what is written, in which splits, by which tokenizer; and what cannot be."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer
from typer.testing import CliRunner

from kernelformer.cli.app import app
from kernelformer.errors import TrainingError
from kernelformer_lab import preparation as preparing
from kernelformer_lab.data import text_files as text_stream
from kernelformer_lab.data.shards import INDEX, TokenShards, read_index
from kernelformer_lab.data.sources import SPLITS, divide
from kernelformer_lab.data.text_files import TextStream
from kernelformer_lab.data.tokenization import make_tokenizer
from kernelformer_lab.memory import peak, reset_peak
from kernelformer_lab.preparation import UNFINISHED, PrepareSettings, prepare
from kernelformer_lab.tasks import make_task
from kernelformer_lab.training.checkpoints import locked
from samples import sentence, write_text, write_texts


def settings(tmp_path, *texts, tokenizer="bytes", **more):
    given = {"out": tmp_path / "shards", "shard_tokens": 1000, **more}
    return PrepareSettings(texts=tuple(map(str, texts)), tokenizer=str(tokenizer), **given)


def tokens(folder, split):
    index = read_index(folder)
    data = TokenShards(folder, index, split)
    return data.read(0, len(data))


def ends(folder, split):
    index = read_index(folder)
    return [*TokenShards(folder, index, split).document_ends(0, index.splits[split].tokens)]


@pytest.fixture
def vocabulary(tmp_path):
    """A small tokenizer.json; it has <eos>."""
    rng = np.random.default_rng(0)
    texts = [sentence(rng) for _ in range(200)]
    made = make_tokenizer(texts, vocab_size=300, cache=tmp_path / "cache", record="test")
    made.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def test_bytes_of_a_file_are_its_shards_and_its_splits_those_of_the_task(tmp_path):
    text = tmp_path / "a.txt"
    text.write_bytes(bytes(range(256)) * 40)  # not UTF-8, and with zeros
    heard = []
    index = prepare(settings(tmp_path, text), log=heard.append, command="kernelformer prepare ...")
    task = make_task("bytes", data=text, length=8)
    for split in SPLITS:
        want = task.files.text(split)
        assert tokens(tmp_path / "shards", split).tolist() == want.tolist()
        assert index.splits[split].text_bytes == len(want)
    names = [x.file for x in index.splits["train"].shards]
    assert names == [f"train-{i:05d}.bin" for i in range(10)]
    for shard in index.splits["train"].shards:
        content = (tmp_path / "shards" / shard.file).read_bytes()
        assert (len(content), hashlib.sha256(content).hexdigest()) == (shard.tokens, shard.sha256)
    record = json.loads((tmp_path / "shards" / INDEX).read_text())
    assert (record["format"], record["dtype"], record["vocabulary_size"]) == (1, "uint8", 256)
    assert record["splits"]["train"]["tokens"] == 9216
    assert record["made"]["texts"] == [{"name": "a.txt", "bytes": 10240}]
    assert record["made"]["command"] == "kernelformer prepare ..."
    assert str(tmp_path) not in json.dumps(record)
    assert any(x.startswith("train-00009.bin: 216 tokens") for x in heard)
    there = {x.name for x in (tmp_path / "shards").iterdir()}
    assert UNFINISHED not in there
    assert not [x for x in there if x.endswith(".partial")]


def test_rows_are_documents_divided_as_tasks_divide_them_and_end_with_a_token(tmp_path, vocabulary):
    rng = np.random.default_rng(1)
    texts = [sentence(rng) if i % 7 else " " for i in range(300)]
    rows = write_texts(tmp_path / "rows.jsonl", texts)
    index = prepare(settings(tmp_path, rows, tokenizer=vocabulary, validation_share=0.2))
    tokenizer = Tokenizer.from_file(str(vocabulary))
    eos = tokenizer.token_to_id("<eos>")
    assert index.tokenizer["end"] == eos
    assert (index.dtype, index.vocabulary_size) == ("uint16", tokenizer.get_vocab_size())
    parts = divide(300, {"validation": 0.2, "test": 0.05}, 0)
    for split in SPLITS:
        said = [texts[i] for i in parts[split] if texts[i].strip()]
        want = [[*tokenizer.encode(x, add_special_tokens=False).ids, eos] for x in said]
        assert tokens(tmp_path / "shards", split).tolist() == list(chain(*want))
        assert ends(tmp_path / "shards", split) == np.cumsum([len(x) for x in want])[:-1].tolist()
        assert index.splits[split].documents == len(want)
        assert index.splits[split].text_bytes == sum(map(len, said))
    saved = Tokenizer.from_file(str(tmp_path / "shards" / "tokenizer.json"))
    assert saved.get_vocab() == tokenizer.get_vocab()
    again = prepare(settings(tmp_path, rows, tokenizer=tmp_path / "shards", out=tmp_path / "again"))
    assert again.tokenizer["sha256"] == index.tokenizer["sha256"]
    tokenizer.add_tokens(["cat"])
    tokenizer.save(str(vocabulary))
    with pytest.raises(ValueError, match=r"finished with other settings, there and here: tokenizer \{.*\} and \{.*\}"):
        prepare(settings(tmp_path, rows, tokenizer=vocabulary, validation_share=0.2))


def test_a_folder_with_a_bare_list_of_tokens_is_a_tokenizer(tmp_path):
    (tmp_path / "words").mkdir()
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "##s", "a"]
    (tmp_path / "words" / "vocab.txt").write_text("\n".join(names) + "\n")
    rows = write_texts(tmp_path / "a.jsonl", ["the cats", "a cat"])
    shares = {"validation_share": 0.0, "test_share": 0.0}
    index = prepare(settings(tmp_path, rows, tokenizer=tmp_path / "words", **shares))
    assert tokens(tmp_path / "shards", "train").tolist() == [5, 6, 7, 3, 8, 6, 3]
    assert (index.tokenizer["name"], index.vocabulary_size, index.dtype) == ("words", 9, "uint8")


def test_a_folder_with_named_splits_and_one_without(tmp_path, vocabulary):
    for name in ("train/b.txt", "train/a.txt", "valid/c.txt"):
        (tmp_path / "named" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "named" / name).write_text(f"the cat {name}\n")
    heard = []
    prepare(settings(tmp_path, tmp_path / "named", tokenizer=vocabulary, out=tmp_path / "one"), log=heard.append)
    tokenizer = Tokenizer.from_file(str(vocabulary))
    said = tokenizer.decode_batch([tokens(tmp_path / "one", "train")], skip_special_tokens=False)
    assert said == ["the cat train/a.txt\n<eos>the cat train/b.txt\n<eos>"]
    assert "the test split is empty: a larger test_share, or files named test, would fill it" in heard
    assert len(tokens(tmp_path / "one", "test")) == 0

    plain = tmp_path / "plain"
    plain.mkdir()
    for i in range(60):
        (plain / f"{i}.txt").write_text(f"{i:02d};")
    prepare(settings(tmp_path, plain, out=tmp_path / "two", validation_share=0.2, test_share=0.2))
    task = make_task("bytes", data=plain, length=2, validation_share=0.2, test_share=0.2)
    for split in SPLITS:
        assert tokens(tmp_path / "two", split).tobytes() == task.files.text(split).tobytes()
        assert ends(tmp_path / "two", split) == [*range(3, len(task.files.text(split)), 3)]

    rows = tmp_path / "rows"
    rows.mkdir()
    write_texts(rows / "train.jsonl", [f"{i:02d};" for i in range(50)])
    write_texts(rows / "test.jsonl", ["test"])
    prepare(settings(tmp_path, rows, out=tmp_path / "three", validation_share=0.3))
    parts = divide(50, {"validation": 0.3, "test": 0.0}, 0)
    assert tokens(tmp_path / "three", "test").tobytes() == b"test"
    for split in ("train", "validation"):
        assert tokens(tmp_path / "three", split).tobytes() == "".join(f"{i:02d};" for i in parts[split]).encode()


def test_several_texts_follow_one_another_and_do_not_continue_each_other(tmp_path):
    write_texts(tmp_path / "b.jsonl", ["BB", "CCC"])
    (tmp_path / "a.txt").write_text("aaaa")
    both = settings(tmp_path, tmp_path / "a.txt", tmp_path / "b.jsonl", validation_share=0.0, test_share=0.0)
    prepare(both)
    assert tokens(tmp_path / "shards", "train").tobytes() == b"aaaaBBCCC"
    assert ends(tmp_path / "shards", "train") == [4, 6]


@pytest.mark.parametrize("block", [5, 64, 1 << 20])
def test_a_text_is_read_in_blocks_that_break_no_character_and_no_split(tmp_path, monkeypatch, block):
    text = tmp_path / "a.txt"
    whole = ("naïve 日本語 🙂 line\n" * 9 + "ü" * 40) * 3
    text.write_text(whole)
    monkeypatch.setattr(text_stream, "_BLOCK", block)
    stream = TextStream([text], validation_share=0.21, test_share=0.13)
    pieces = list(stream.pieces())
    assert b"".join(x.content for x in pieces).decode() == whole
    parts = {split: b"".join(x.content for x in pieces if x.split == split).decode() for split in SPLITS}
    want = make_task("words", data=text, validation_share=0.21, test_share=0.13)
    assert parts == {split: "".join(x for x, _ in want.source.pieces(split)) for split in SPLITS}
    assert [x.split for x in pieces if x.ends] == list(SPLITS)
    assert stream.done == len(whole.encode())


def test_a_file_is_never_in_memory_as_a_whole(tmp_path):
    text = tmp_path / "a.txt"
    with text.open("wb") as file:
        file.truncate(1 << 33)  # 8 GiB of holes
    before = reset_peak()
    size = sum(len(x.content) for x in islice(TextStream([text], raw=True).pieces(), 64))
    assert size > 63 << 20
    assert peak() - before < 16 << 20


def test_an_unfinished_folder_is_started_anew_and_a_finished_one_left_as_it_is(tmp_path, monkeypatch):
    text = write_text(tmp_path / "a.txt")
    chosen = settings(tmp_path, text)

    def killed(self, *args, **more):
        if len(self.shards) == 2:
            raise KeyboardInterrupt
        return add(self, *args, **more)

    add = preparing.ShardWriter.add
    monkeypatch.setattr(preparing.ShardWriter, "add", killed)
    monkeypatch.setattr(text_stream, "_BLOCK", 500)
    with pytest.raises(KeyboardInterrupt):
        prepare(chosen)
    monkeypatch.undo()
    out = tmp_path / "shards"
    assert {x.name for x in out.iterdir()} == {".lock", UNFINISHED, "train-00000.bin", "train-00001.bin"}
    with pytest.raises(ValueError, match="cannot be used: there is no such file; data must be a folder that"):
        make_task("shards", data=out).split("train")
    (out / ".train-00002.bin.0123.partial").write_text("half")  # as a process leaves it that is killed at once
    heard = []
    index = prepare(replace(chosen, shard_tokens=3000), log=heard.append)
    assert heard[0] == f"{out} holds an unfinished preparation; starting anew"
    assert index.splits["train"].shards[0].tokens == 3000
    assert not list(out.glob(".*.partial"))
    assert bytes(np.concatenate([tokens(out, x) for x in SPLITS])) == text.read_bytes()

    before = {x.name: x.stat().st_mtime_ns for x in out.iterdir() if x.name != ".lock"}
    assert prepare(replace(chosen, shard_tokens=3000), log=heard.append) == index
    assert "is finished, and all its files are as they were written" in heard[-1]
    assert {x.name: x.stat().st_mtime_ns for x in out.iterdir() if x.name != ".lock"} == before
    with pytest.raises(ValueError, match="finished with other settings, there and here: shard_tokens 3000 and 1000"):
        prepare(chosen)
    text.write_text("other")
    with pytest.raises(ValueError, match=r"texts \[.*\] and \[\{'name': 'a.txt', 'bytes': 5\}\]"):
        prepare(replace(chosen, shard_tokens=3000))
    with locked(out), pytest.raises(TrainingError, match="another process prepares shards in"):
        prepare(chosen)


def test_a_folder_with_other_files_is_not_touched(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    for name in ("notes.md", "train-00000.bin"):  # the second as if ours, but nothing says so
        out = tmp_path / name.replace(".", "-")
        out.mkdir()
        (out / name).write_text("mine")
        with pytest.raises(ValueError, match=f"is not empty and holds no shards of ours, found {name}"):
            prepare(settings(tmp_path, tmp_path / "a.txt", out=out))
        assert (out / name).read_text() == "mine"


def test_what_cannot_be_written_is_said_with_the_way_out(tmp_path, monkeypatch):
    text = write_text(tmp_path / "a.txt")
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"file/shards cannot be written: Not a directory; make room or give another"):
        prepare(settings(tmp_path, text, out=tmp_path / "file" / "shards"))

    def full(self, content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        with pytest.raises(ValueError, match=r"shards cannot be written: the disk is full; make room"):
            prepare(settings(tmp_path, text))
    assert prepare(settings(tmp_path, text)).splits["train"].tokens


@pytest.mark.parametrize(
    ("content", "more", "message"),
    [
        (b"", {}, r"a.txt: no text for training, 0 bytes in 1 files; give texts that are not empty"),
        (b"a\xff\n" * 300, {"tokenizer": "VOCABULARY"}, r"a.txt is not UTF-8: invalid start byte at byte 1"),
        (b"a\0", {"tokenizer": "VOCABULARY"}, r"a.txt is not text: it has a zero byte at 1"),
        (b"abc", {"tokenizer": "nothing.json"}, r"there is no tokenizer nothing.json; give bytes, a tokenizer.json"),
        (b"abc", {"tokenizer": "no such/name of/one"}, r"there is no tokenizer no such/name of/one"),
        (
            b"abc",
            {"tokenizer": "owner/nothing"},
            r"there is no folder owner/nothing, the cache of the hub has no model",
        ),
        (b"abc", {"tokenizer": "EMPTY"}, r"has no tokenizer; give bytes"),
        (b"abc", {"tokenizer": "TEXT"}, r"a.txt is not a tokenizer.json"),
        (b"abc", {"pattern": "*.txt"}, r"pattern chooses files of a folder, got pattern='\*.txt' and files"),
        (b"abc", {"validation_share": 0.6, "test_share": 0.4}, r"must leave something to train on, got 0.6 and 0.4"),
        (b"abc", {"shard_tokens": 0}, r"shard_tokens must be an integer of at least 1, got 0"),
    ],
)
def test_bad_input_is_named(tmp_path, vocabulary, monkeypatch, content, more, message):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.txt").write_bytes(content)
    names = {"VOCABULARY": vocabulary, "EMPTY": tmp_path / "empty", "TEXT": tmp_path / "a.txt"}
    if "tokenizer" in more:
        more = {**more, "tokenizer": names.get(more["tokenizer"], more["tokenizer"])}
    with pytest.raises(ValueError, match=message):
        prepare(settings(tmp_path, tmp_path / "a.txt", **more))


def test_bad_rows_are_named_or_left_out_and_counted(tmp_path):
    rows = tmp_path / "a.jsonl"
    rows.write_text('{"text": "good"}\n{"text": 3}\nnothing\n{"other": "x"}\n{"text": "fine"}\n')
    none = {"validation_share": 0.0, "test_share": 0.0}
    with pytest.raises(ValueError, match=r"a.jsonl, line 2: text must be a text that is not empty, got 3; mend it, or"):
        prepare(settings(tmp_path, rows, **none))
    heard = []
    prepare(settings(tmp_path, rows, skip_bad=True, **none), log=heard.append)
    assert tokens(tmp_path / "shards", "train").tobytes() == b"goodfine"
    assert any("left out 3 of 5 rows" in x for x in heard)
    with pytest.raises(ValueError, match="has no column 'body', found text"):
        prepare(settings(tmp_path, rows, column="body", out=tmp_path / "two"))
    with pytest.raises(ValueError, match=r"there is no file or folder .*gone.txt; a text must be a text file, rows"):
        prepare(settings(tmp_path, tmp_path / "gone.txt"))
    with pytest.raises(ValueError, match=r"a.jsonl is given twice"):
        prepare(settings(tmp_path, rows, tmp_path / "a.jsonl"))


def test_the_command_prepares_and_says_how_to_go_on(tmp_path):
    text = write_text(tmp_path / "a.txt")
    words = ["prepare", str(text), "--tokenizer", "bytes", "--out", str(tmp_path / "out"), "--shard-tokens", "5000"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    said = " ".join(result.output.split())
    assert "train-00000.bin: 5,000 tokens" in said
    assert f"kernelformer train shards --data {tmp_path / 'out'}" in said
    wrong = CliRunner().invoke(app, [*words, "--validation-share", "0.2"])
    assert wrong.exit_code == 2
    assert "validation_share 0.05 and 0.2" in " ".join(wrong.stderr.split())
    missing = CliRunner().invoke(app, words[:2])
    assert missing.exit_code == 2
    assert "--tokenizer" in missing.stderr
