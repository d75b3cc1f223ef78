"""Bytes as tokens: what is in which split, which windows, bits per byte, bad input."""

from __future__ import annotations

import csv
import json
import math
import pickle
import re

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from kernelformer_lab.tasks import SPLITS, TASKS, make_task, task_options
from kernelformer_lab.tasks.base import Outcome
from sampling import SIGMAS


@pytest.fixture
def file(tmp_path):
    """10,000 bytes of all kinds."""
    path = tmp_path / "file.bin"
    path.write_bytes(np.random.default_rng(0).integers(0, 256, 10_000, dtype=np.uint8).tobytes())
    return path


@pytest.fixture
def folder(tmp_path):
    """60 texts, in folders; every byte of one says which it is."""
    root = tmp_path / "texts"
    for i in range(60):
        path = root / f"part{i % 3}" / f"{i}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes([i + 1]) * 40)
    (root / ".hidden").write_bytes(b"\0")
    (root / ".git").mkdir()
    (root / ".git" / "index").write_bytes(b"\0")
    return root


def starts(dataset, text):
    """Starts of the windows, by looking for them."""
    return [text.index(bytes(item["input_ids"].tolist())) for item in dataset]


def test_a_file_is_split_by_position_and_bytes_are_tokens(file):
    text = file.read_bytes()
    task = make_task("bytes", data=file, length=50, samples=300, validation_share=0.1, test_share=0.2)
    assert starts(task.split("validation"), text) == list(range(7000, 8000, 50))
    assert starts(task.split("test"), text) == list(range(8000, 10_000, 50))
    train = starts(task.split("train"), text)
    assert len(train) == len(task.split("train")) == 300
    assert 0 <= min(train) < 200
    assert 6750 < max(train) <= 7000 - 50
    assert task.settings() == {"vocab_size": 256, "max_position_embeddings": 50, "pad_token_id": None}


def test_enwik8_has_the_usual_splits(tmp_path):
    path = tmp_path / "enwik8"
    with path.open("wb") as out:
        out.truncate(100_000_000)
    task = make_task("bytes", data=path)
    texts = [task.split(name).tokens for name in SPLITS]
    assert [len(text) for text in texts] == [90_000_000, 5_000_000, 5_000_000]
    assert not any(text.flags.owndata for text in texts)  # mapped, not copied
    assert len(task.split("test")) == 5_000_000 // 512


def test_few_validation_windows_are_spread_evenly(file):
    text = file.read_bytes()
    shares = {"validation_share": 0.5, "test_share": 0.25}
    task = make_task("bytes", data=file, length=60, validation_samples=4, test_samples=10**6, **shares)
    assert starts(task.split("validation"), text) == [2500 + 60 * i for i in (0, 20, 41, 62)]  # of 83
    assert len(task.split("test")) == 2500 // 60


def test_training_samples_depend_on_seed_and_index_alone(file):
    make = lambda **options: make_task("bytes", data=file, length=32, **options).split("train")  # noqa: E731
    some, more, other = make(samples=100), make(), make(seed=1)
    assert len(more) == 1_000_000
    batch = some.__getitems__([7, 3, 99])
    for index, item in zip([7, 3, 99], batch, strict=True):
        assert torch.equal(item["input_ids"], more[index]["input_ids"])
        assert torch.equal(item["labels"], item["input_ids"])
    assert some.starts(np.arange(100)).tolist() == more.starts(np.arange(10**6))[:100].tolist()
    assert some.starts(np.arange(100)).tolist() != other.starts(np.arange(100)).tolist()


def test_training_windows_are_spread_uniformly_and_independently(file):
    train = make_task("bytes", data=file, length=500, validation_share=0.0, test_share=0.0).split("train")
    count = 200_000
    places = train.starts(np.arange(count))
    assert places.min() == 0
    assert places.max() == 9500
    cells = np.bincount(places * 50 // 9501, minlength=50)
    spread = math.sqrt(count / 50 * (1 - 1 / 50))
    assert (np.abs(cells - count / 50) < SIGMAS * spread).all()
    other = make_task("bytes", data=file, length=500, validation_share=0.0, test_share=0.0, seed=1).split("train")
    for neighbours in (places[1:], other.starts(np.arange(count - 1))):
        assert abs(np.corrcoef(places[:-1], neighbours)[0, 1]) < SIGMAS / math.sqrt(count)


def test_a_folder_is_split_by_file(folder):
    task = make_task("bytes", data=folder, length=40, validation_share=0.2, test_share=0.2)
    whose = {name: task.split(name).tokens for name in SPLITS}
    owners = [set(np.unique(text)) for text in whose.values()]
    assert sorted(x for some in owners for x in some) == list(range(1, 61))  # each is in one split, and whole
    assert sum(len(text) for text in whose.values()) == 60 * 40
    assert min(len(some) for some in owners) >= 3
    (folder / "part0" / "new.txt").write_bytes(b"\xff" * 40)
    for name, some in zip(SPLITS, owners, strict=True):
        assert set(np.unique(task.split(name).tokens)) - {255} == some  # nobody moved
    for item in task.split("validation"):
        assert len(item["input_ids"].unique()) == 1


def test_a_pattern_chooses_files(folder):
    options = {"data": folder, "length": 10, "validation_share": 0.0, "test_share": 0.0}
    train = make_task("bytes", pattern="part1/*.txt", **options).split("train")
    assert np.array_equal(train.tokens, np.repeat(sorted(range(2, 60, 3), key=lambda i: str(i - 1)), 40))
    (folder / "picture.png").write_bytes(b"\x89PNG\0")
    with pytest.raises(ValueError, match=r"picture\.png is not text.*leave it out by pattern, which is '\*\*/\*'"):
        make_task("bytes", **options).split("train")
    assert len(make_task("bytes", pattern="**/*.txt", **options).split("train").tokens) == 60 * 40


def test_the_default_is_the_standard_library_without_its_tests():
    task = make_task("bytes", length=128, validation_samples=20)
    names = task.files.files()
    assert {"abc.py", "json/decoder.py"} <= set(names)
    assert names == sorted(names)
    assert all(name.endswith(".py") for name in names)
    assert not [name for name in names if {"test", "tests", "site-packages"} & set(name.split("/"))]
    counts = [sum(task.files.split_of(name) == split for name in names) for split in SPLITS]
    expected = 0.05 * len(names)
    assert all(abs(count - expected) < SIGMAS * math.sqrt(0.95 * expected) for count in counts[1:])
    assert len(task.split("validation")) == 20
    text = bytes(task.split("validation").tokens)
    assert b"def " in text
    assert b"import " in text


def test_a_fingerprint_tells_other_bytes_and_names_apart(file, folder):
    def of(data, **options):
        return make_task("bytes", data=data, **options).fingerprint()

    before = of(file)
    assert before.startswith("file.bin with 10000 bytes, blake2b ")
    assert of(file, length=9, seed=3) == before  # options are no part of it
    content = file.read_bytes()
    file.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    assert of(file) != before
    file.write_bytes(content)
    assert of(file) == before
    file.write_bytes(b"")
    assert of(file).startswith("file.bin with 0 bytes")

    before = of(folder)
    assert before.startswith("texts with 60 files, 2400 bytes, blake2b ")
    (folder / ".hidden").write_bytes(b"hidden files do not count")
    assert of(folder) == before
    (folder / "part0" / "0.txt").rename(folder / "part0" / "00.txt")
    assert of(folder) != before
    (folder / "part0" / "00.txt").rename(folder / "part0" / "0.txt")
    assert of(folder) == before
    one, two = folder / "part1" / "1.txt", folder / "part1" / "10.txt"
    one.write_bytes(one.read_bytes() + two.read_bytes()[:1])  # the same bytes in the same order, cut elsewhere
    two.write_bytes(two.read_bytes()[1:])
    assert of(folder) != before
    assert "files" in make_task("bytes").fingerprint()


def test_a_loader_takes_batches_in_any_order(file):
    task = make_task("bytes", data=file, length=64, samples=40)
    train = task.split("train")
    batches = list(DataLoader(train, batch_size=16, shuffle=True, collate_fn=task.collate))
    assert [tuple(x["input_ids"].shape) for x in batches] == [(16, 64), (16, 64), (8, 64)]
    assert all(x["input_ids"].dtype == torch.int64 and torch.equal(x["input_ids"], x["labels"]) for x in batches)
    rows = {tuple(row.tolist()) for x in batches for row in x["input_ids"]}
    assert rows == {tuple(item["input_ids"].tolist()) for item in train}
    assert torch.equal(pickle.loads(pickle.dumps(train))[5]["input_ids"], train[5]["input_ids"])  # for workers
    with pytest.raises(IndexError, match="numbered from 0 to 39, got"):
        train[40]


def test_bits_per_byte_are_nats_over_log_two():
    task = make_task("bytes")
    assert task.score(Outcome(math.log(256))) == {"bits_per_byte": pytest.approx(8.0)}
    assert not task.higher_is_better


def test_missing_and_empty_data_are_refused(tmp_path, folder):
    with pytest.raises(ValueError, match=r"there is no file or folder .*nowhere; data must be the path of one"):
        make_task("bytes", data=tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"the folder .*empty has no files that match pattern='\*\*/\*'"):
        make_task("bytes", data=tmp_path / "empty").split("train")
    with pytest.raises(ValueError, match=r"no files that match pattern='\*\.md'; give another pattern"):
        make_task("bytes", data=folder, pattern="*.md").split("train")
    with pytest.raises(ValueError, match=r"pattern must be a glob relative to the folder.*got '/\*'"):
        make_task("bytes", data=folder, pattern="/*").split("train")
    (tmp_path / "nothing").touch()
    with pytest.raises(ValueError, match=r"train split of .*nothing has 0 bytes, less than one sample of length=512"):
        make_task("bytes", data=tmp_path / "nothing").split("train")


def test_splits_that_are_too_short_say_both_sizes(tmp_path, file, folder):
    with pytest.raises(
        ValueError,
        match=r"the validation split of .*file\.bin has 500 bytes, less than one sample of length=501; .*"
        "a smaller length or a larger validation_share",
    ):
        make_task("bytes", data=file, length=501).split("validation")
    assert len(make_task("bytes", data=file, length=500).split("validation")) == 1
    assert len(make_task("bytes", data=file, length=9000, samples=3).split("train")) == 3
    with pytest.raises(ValueError, match="has 9000 bytes, less than one sample of length=9001"):
        make_task("bytes", data=file, length=9001).split("train")
    with pytest.raises(ValueError, match=r"none of the 1 files of .*part0 falls into the test split.*a single file"):
        make_task("bytes", data=folder / "part0", pattern="0.txt", test_share=0.0).split("test")


def test_a_file_that_cannot_be_read_is_named(folder):
    (folder / "gone.txt").symlink_to(folder / "nowhere")
    with pytest.raises(ValueError, match=r"gone\.txt cannot be read: No such file.*leave it out by pattern"):
        make_task("bytes", data=folder, validation_share=0.0, test_share=0.0).split("train")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 1}, "length must be an integer of at least 2, got 1"),
        ({"samples": 0}, "samples must be an integer of at least 1, got 0"),
        ({"validation_samples": 0}, "validation_samples must be an integer of at least 1, got 0"),
        ({"test_share": -0.1}, "test_share must be a finite number of at least 0, got -0.1"),
        ({"test_share": 0.5, "validation_share": 0.5}, "must leave something to train on, got 0.5 and 0.5"),
        ({"seed": -1}, "seed must be an integer of at least 0, got -1"),
        ({"data": __file__, "pattern": "*.py"}, "pattern chooses files of a folder, got pattern='\\*.py' and the file"),
        ({"lenght": 9}, "unknown option for task 'bytes', 'lenght'; did you mean 'length'"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        make_task("bytes", **options)


def test_every_task_says_what_it_is():
    for name, task in TASKS.items():
        assert task.name == name
        assert all(isinstance(x, str) for x in (task.about, task.model, task.metric))
        assert isinstance(task.higher_is_better, bool)
        assert not re.search("data|default", task.about.partition(";")[0]), "how it gets data comes after a semicolon"
        assert "seed" in task_options(name)
        needed = {"image_size", "num_labels"} if task.model == "image" else {"vocab_size", "max_position_embeddings"}
        assert needed <= set(make_task(name).settings())  # without data
    with pytest.raises(ValueError, match="unknown split 'dev'; choose from test, train, validation"):
        make_task("bytes").split("dev")


TEXTS = ["one, two", 'say "three"', "four\nfive"]


def table(tmp_path, kind):
    path = tmp_path / f"rows{kind}"
    if kind == ".jsonl":
        path.write_text("".join(json.dumps({"id": i, "text": x}) + "\n" for i, x in enumerate(TEXTS * 40)))
    else:
        with path.open("w", newline="") as out:
            csv.writer(out).writerows([("id", "text"), *enumerate(TEXTS * 40)])
    return path


@pytest.mark.parametrize("kind", [".jsonl", ".csv"])
def test_the_texts_of_a_column_are_modelled_without_the_syntax_of_the_table(tmp_path, kind):
    path = table(tmp_path, kind)
    task = make_task("bytes", data=path, column="text", length=8, validation_share=0.0, test_share=0.5)
    whole = "".join(f"{x}\n" for x in TEXTS * 40).encode()
    assert task.split("test").tokens.tobytes() == whole[len(whole) // 2 :]
    assert task.remarks() == []
    assert f"with {len(whole)} bytes" in task.fingerprint()
    raw = make_task("bytes", data=path, length=8, test_share=0.5)
    assert raw.split("test").tokens.tobytes() in path.read_bytes()
    (remark,) = raw.remarks()
    assert remark == f"{path.name} is modelled as it stands, with its syntax; task.column=NAME takes texts of its rows"


def test_files_of_a_folder_have_columns_too(tmp_path):
    (tmp_path / "data").mkdir()
    for name in ("train", "validation"):
        table(tmp_path, ".csv").rename(tmp_path / "data" / f"{name}.csv")
    task = make_task("bytes", data=tmp_path / "data", column="text", length=8)
    assert task.split("validation").tokens.tobytes() == "".join(f"{x}\n" for x in TEXTS * 40).encode()


def test_a_column_that_is_not_there_is_named_with_those_that_are(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("id;text\n1;hello\n")
    hint = (
        r"is not there, found columns id;text; its values seem to be separated by semicolons: write commas into a \.csv"
    )
    with pytest.raises(ValueError, match=hint):
        make_task("bytes", data=path, column="text", length=2).split("train")
    path.write_text('{"text": 3}\n')
    with pytest.raises(ValueError, match=r"line 1: column 'text' must be a text and has 3, found columns text"):
        make_task("bytes", data=path.rename(tmp_path / "rows.jsonl"), column="text", length=2).split("train")
    with pytest.raises(ValueError, match=r"column='text' is of the rows of a table .* got the file"):
        make_task("bytes", data=__file__, column="text")
