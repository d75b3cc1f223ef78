"""ListOps: values by their definition, the distribution of a plain generator, splits, cache, bad input."""

from __future__ import annotations

import os
import random
import re
import statistics

import numpy as np
import pytest
import torch

from kernelformer_lab.tasks import listops, make_task
from kernelformer_lab.tasks.base import Outcome
from kernelformer_lab.tasks.listops import TOKENS, Rules, generate
from sampling import SIGMAS

TINY = {"train_samples": 300, "validation_samples": 50, "test_samples": 40, "min_length": 10, "max_length": 80}
APPLY = {
    "[MIN": min,
    "[MAX": max,
    "[MED": lambda values: int(statistics.median(values)),
    "[SM": lambda values: sum(values) % 10,
}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))


def words(made, i):
    return [TOKENS[x] for x in made.tokens[made.offsets[i] : made.offsets[i + 1]]]


def evaluated(text):
    """By recursion over words: value, depth, and for every operator its name and how many arguments it has."""
    at, lists = 0, []

    def node():
        nonlocal at
        word, at = text[at], at + 1
        if word.isdigit():
            return int(word), 1
        arguments = []
        while text[at] != "]":
            arguments.append(node())
        at += 1
        lists.append((word, len(arguments)))
        return APPLY[word]([value for value, _ in arguments]), 1 + max(depth for _, depth in arguments)

    value, depth = node()
    assert at == len(text)
    return value, depth, lists


def plain_expression(rng, rules, depth=1):
    """Words of one tree, of any length."""
    if depth == rules.max_depth or rng.random() > 0.25:
        return [str(rng.randrange(10))]
    arguments = [plain_expression(rng, rules, depth + 1) for _ in range(rng.randint(2, rules.max_args))]
    return [rng.choice(list(APPLY)), *(word for x in arguments for word in x), "]"]


def plain_expressions(count, rules, seed=0):
    rng, found = random.Random(seed), {}
    while len(found) < count:
        text = plain_expression(rng, rules)
        if rules.min_length < len(text) < rules.max_length:
            found[tuple(text)] = None
    return list(found)


def test_labels_are_the_values_of_the_expressions_and_limits_hold():
    rules = Rules(min_length=10, max_length=200, max_depth=6, max_args=7)
    made = generate(3000, rules=rules, seed=1)
    assert made.tokens.dtype == made.labels.dtype == np.uint8
    lengths = np.diff(made.offsets)
    assert lengths.min() == 11
    assert lengths.max() == 199
    deepest, kinds, numbers = 0, set(), set()
    for i, label in enumerate(made.labels.tolist()):
        value, depth, lists = evaluated(words(made, i))
        assert value == label, " ".join(words(made, i))
        deepest = max(deepest, depth)
        kinds |= {kind for kind, _ in lists}
        numbers |= {number for _, number in lists}
    assert deepest == 6
    assert kinds == set(APPLY)
    assert numbers == set(range(2, 8))
    assert set(np.unique(made.tokens)) == set(range(1, 16))
    assert set(made.labels) == set(range(10))


def test_the_papers_size_is_evaluated_too():
    made = generate(40)
    lengths = np.diff(made.offsets)
    assert lengths.min() > 500
    assert lengths.max() < 2000
    found = [evaluated(words(made, i)) for i in range(40)]
    assert [value for value, _, _ in found] == made.labels.tolist()
    assert max(depth for _, depth, _ in found) == 10


def statistics_of(texts):
    """One row per expression: numbers whose means say what the distribution is."""
    rows = []
    for text in texts:
        value, depth, lists = evaluated(text)
        by_kind = [sum(kind == k for kind, _ in lists) for k in APPLY]
        root = lists[-1][1]
        rows.append(
            [len(text), len(text) ** 2, depth, depth**2, len(lists), root, root**2, lists[-1][0] == "[SM", *by_kind]
            + [sum(word == str(digit) for word in text) for digit in range(10)]
            + [value == digit for digit in range(10)]
        )
    return np.array(rows, float)


@pytest.mark.parametrize(
    ("rules", "plain", "ours"),
    [
        (Rules(min_length=10, max_length=60, max_depth=5, max_args=4), 4000, 8000),
        (Rules(min_length=20, max_length=400, max_depth=4, max_args=10), 2000, 4000),
        (Rules(), 200, 1000),
    ],
)
def test_samples_are_distributed_as_those_of_a_plain_generator(rules, plain, ours):
    want = statistics_of(plain_expressions(plain, rules))
    made = generate(ours, rules=rules)
    found = statistics_of([words(made, i) for i in range(ours)])
    error = np.sqrt(want.var(0) / plain + found.var(0) / ours)
    difference = np.abs(want.mean(0) - found.mean(0))
    assert (difference <= SIGMAS * error).all(), (want.mean(0), found.mean(0))


def test_a_seed_means_the_same_samples_and_fewer_are_the_first_of_more():
    rules = Rules(min_length=10, max_length=80)
    some, more, other = generate(500, rules=rules), generate(6000, rules=rules), generate(500, rules=rules, seed=1)
    assert np.array_equal(some.labels, more.labels[:500])
    assert np.array_equal(some.offsets, more.offsets[:501])
    assert np.array_equal(some.tokens, more.tokens[: some.offsets[-1]])
    assert not np.array_equal(some.labels, other.labels)


def test_no_expression_occurs_twice_even_where_there_are_few():
    # Trees of depth 2 with 2 arguments: four operators, ten by ten digits.
    rules = Rules(min_length=1, max_length=10, max_depth=2, max_args=2)
    made = generate(400, rules=rules)
    assert len({tuple(words(made, i)) for i in range(400)}) == 400
    with pytest.raises(ValueError, match=r"found only 400 of 401 different expressions.*max_args=2.*ask for fewer"):
        generate(401, rules=rules)
    with pytest.raises(ValueError, match="found only 0 of 1 different"):  # no expression has 2 or 3 tokens
        generate(1, rules=Rules(min_length=1, max_length=4))


def test_a_digit_alone_is_an_expression_where_the_limits_let_it():
    made = generate(10, rules=Rules(min_length=0, max_length=2))
    assert sorted(words(made, i)[0] for i in range(10)) == list("0123456789")
    assert [int(words(made, i)[0]) for i in range(10)] == made.labels.tolist()


def test_splits_have_their_sizes_share_nothing_and_the_test_stays():
    task, other = make_task("listops", **TINY), make_task("listops", **TINY | {"train_samples": 200})
    sizes = {name: len(task.split(name)) for name in ("train", "validation", "test")}
    assert sizes == {"train": 300, "validation": 50, "test": 40}
    texts = [tuple(x["input_ids"].tolist()) for name in sizes for x in task.split(name)]
    assert len(set(texts)) == 390
    for name, count in [("test", 40), ("validation", 50), ("train", 200)]:
        for i in range(count):
            assert torch.equal(task.split(name)[i]["input_ids"], other.split(name)[i]["input_ids"])
    with pytest.raises(IndexError):
        task.split("test")[40]


def test_a_fingerprint_is_about_the_way_samples_are_made(monkeypatch):
    before = make_task("listops").fingerprint()
    assert make_task("listops", **TINY, seed=3).fingerprint() == before
    monkeypatch.setattr(listops, "FORMAT", 2)
    assert make_task("listops").fingerprint() != before


def test_a_batch_is_padded_and_says_where():
    task = make_task("listops", **TINY | {"max_length": 150})
    samples = task.split("train").__getitems__(range(16))
    samples[3]["input_ids"] = torch.full((64,), 7)
    batch = task.collate(samples)
    longest = max(len(x["input_ids"]) for x in samples)
    assert longest > 64
    assert batch["input_ids"].shape == batch["attention_mask"].shape == (16, 128 if longest <= 128 else 150)
    assert {x.dtype for x in batch.values()} == {torch.int64}
    for sample, ids, mask in zip(samples, batch["input_ids"], batch["attention_mask"], strict=True):
        n = len(sample["input_ids"])
        assert torch.equal(ids[:n], sample["input_ids"])
        assert not ids[n:].any()
        assert mask.tolist() == [1] * n + [0] * (len(mask) - n)
    assert batch["labels"].tolist() == [x["labels"] for x in samples]
    assert task.collate(samples[3:4])["input_ids"].shape == (1, 64)  # a multiple of 64 stays as it is
    fixed = make_task("listops", **TINY, pad_to=96)
    assert fixed.collate(samples[3:4])["input_ids"].shape == (1, 96)
    assert fixed.settings()["max_position_embeddings"] == 96


def test_batches_never_exceed_the_positions_of_the_model():
    task = make_task("listops")
    longest = [{"input_ids": torch.ones(1999, dtype=torch.int64), "labels": 3}]
    assert task.collate(longest)["input_ids"].shape == (1, 2000)
    assert task.settings() == {
        "vocab_size": 16,
        "max_position_embeddings": 2000,
        "num_labels": 10,
        "pad_token_id": 0,
    }


def test_a_loader_takes_it():
    task = make_task("listops", **TINY)
    loader = torch.utils.data.DataLoader(task.split("validation"), batch_size=20, collate_fn=task.collate)
    assert [len(batch["labels"]) for batch in loader] == [20, 20, 10]


def test_made_samples_are_kept_and_used_again(tmp_path, monkeypatch):
    task = make_task("listops", **TINY)
    first = [x["labels"] for x in task.split("train")]
    assert task.path.parent == tmp_path / "xdg" / "kernelformer"
    assert [x.name for x in task.path.parent.iterdir()] == [task.path.name]
    before = os.stat(task.path)
    monkeypatch.setattr(listops, "generate", lambda *_, **__: pytest.fail("made again"))
    again = make_task("listops", **TINY)
    assert [x["labels"] for x in again.split("train")] == first
    assert os.stat(task.path).st_mtime_ns == before.st_mtime_ns
    assert make_task("listops", **TINY, seed=1).path != task.path
    assert make_task("listops", **TINY | {"max_args": 9}).path != task.path
    assert make_task("listops", **TINY, pad_to=100).path == task.path


def test_the_cache_is_where_it_is_wanted(tmp_path, monkeypatch):
    task = make_task("listops", **TINY, cache=str(tmp_path / "mine"))
    task.split("test")
    assert list((tmp_path / "mine").iterdir()) == [task.path]
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert make_task("listops").path.parent == tmp_path / "home" / ".cache" / "kernelformer"
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"file/listops-\w+\.npz cannot be written.*give another folder as cache"):
        make_task("listops", **TINY, cache=tmp_path / "file").split("test")


def test_a_cache_that_cannot_be_written_leaves_nothing_behind(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(ValueError, match="the disk is full; give another folder"):
        make_task("listops", **TINY, cache=tmp_path / "c").split("test")
    assert list((tmp_path / "c").iterdir()) == []


def test_a_damaged_cache_file_is_named(tmp_path):
    task = make_task("listops", **TINY, cache=tmp_path)
    task.split("test")
    whole = task.path.read_bytes()
    named = re.escape(f"the cache file {task.path} cannot be used") + ".*delete it"
    middle = len(whole) // 2
    flipped = whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
    for damaged in (b"", b"not an archive", whole[:middle], flipped):
        task.path.write_bytes(damaged)
        with pytest.raises(ValueError, match=named):
            make_task("listops", **TINY, cache=tmp_path).split("test")
    other = make_task("listops", **TINY, seed=5, cache=tmp_path)
    other.path.write_bytes(whole)
    with pytest.raises(ValueError, match="made with other options"):
        other.split("test")


def test_arrays_that_do_not_fit_are_refused(tmp_path):
    task = make_task("listops", **TINY, cache=tmp_path)
    task.split("test")
    arrays = dict(np.load(task.path))
    for change, message in [
        ({"labels": arrays["labels"] + 10}, "unknown tokens or labels"),
        ({"labels": arrays["labels"][1:]}, "do not fit together"),
        ({"offsets": arrays["offsets"] + 1}, "do not fit together"),
        ({"offsets": arrays["offsets"][:-1]}, "not those of 390 samples"),
        ({"tokens": arrays["tokens"].astype(np.int64)}, "not those of 390 samples"),
        ({"tokens": arrays["tokens"].astype(object)}, "allow_pickle=False"),
    ]:
        np.savez(task.path, **arrays | change)
        with pytest.raises(ValueError, match=message):
            make_task("listops", **TINY, cache=tmp_path).split("test")


def test_accuracy_is_the_share_of_right_answers():
    task = make_task("listops")
    assert task.score(Outcome(2.0, right=0.75)) == {"accuracy": 0.75}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train_samples": 0}, "train_samples must be an integer of at least 1, got 0"),
        ({"test_samples": 2.5}, "test_samples must be an integer of at least 1, got 2.5"),
        ({"max_args": 1}, "max_args must be an integer of at least 2, got 1"),
        ({"max_depth": 0}, "max_depth must be an integer of at least 1, got 0"),
        ({"min_length": -1}, "min_length must be an integer of at least 0, got -1"),
        ({"min_length": 1999}, "none is, with min_length=1999 and max_length=2000"),
        ({"max_depth": 3, "max_args": 4}, "the longest expression has 26 tokens, not more than min_length=500"),
        ({"pad_to": 1998}, "up to max_length - 1 = 1999, got 1998"),
        ({"seed": -1}, "seed must be an integer of at least 0, got -1"),
        ({"max_lenght": 9}, "unknown option for task 'listops', 'max_lenght'; did you mean 'max_length'"),
    ],
)
def test_bad_options_are_refused_before_anything_is_made(options, message):
    with pytest.raises(ValueError, match=message):
        make_task("listops", **options)


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="unknown task 'listop'; did you mean 'listops'"):
        make_task("listop")
    with pytest.raises(ValueError, match="unknown split 'valid'; did you mean 'validation'"):
        make_task("listops", **TINY).split("valid")
