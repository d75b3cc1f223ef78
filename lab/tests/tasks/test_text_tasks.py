"""Text and Retrieval of Long Range Arena: bytes as tokens, batches, limits, halves, bad input."""

from __future__ import annotations

import pickle
import re

import numpy as np
import pytest
import torch

from kernelformer.models import MODELS, KernelformerConfig
from kernelformer_lab.data.byte_texts import exchange_halves, halves
from kernelformer_lab.tasks import make_task
from kernelformer_lab.tasks.base import Outcome
from samples import write_rows
from sampling import SIGMAS

TEXTS = ["Grün ist\nschön.", "no", "a" * 70, "b" * 300]


def texts(samples, name="input_ids"):
    """Texts of the tokens of a split."""
    return [bytes((x[name] - 1).tolist()).decode() for x in samples]


def documents(count, seed=0):
    """Texts of many lengths, whose words say which text they are from."""
    rng = np.random.default_rng(seed)
    return [" ".join([f"w{i}"] * int(n)) for i, n in enumerate(rng.integers(2, 200, count))]


@pytest.fixture
def reviews(tmp_path):
    """Four training texts, two of the test, sorted by label as IMDb's are."""
    write_rows(tmp_path / "train.jsonl", [{"text": x, "label": i // 2} for i, x in enumerate(TEXTS)])
    write_rows(tmp_path / "validation.jsonl", [{"text": f"text {i}", "label": i // 50} for i in range(100)])
    write_rows(tmp_path / "test.jsonl", [{"text": "good", "label": 1}, {"text": "bad", "label": 0}])
    return tmp_path


@pytest.fixture
def corpus(tmp_path):
    return write_rows(tmp_path / "corpus.jsonl", [{"text": x} for x in documents(400)])


def test_a_token_is_a_byte_and_zero_is_padding(reviews):
    task = make_task("text", data=reviews)
    train = task.split("train")
    assert train[0]["input_ids"].tolist() == [x + 1 for x in "Grün ist\nschön.".encode()]
    assert train[0]["input_ids"].dtype == torch.int64
    assert texts(train) == TEXTS
    assert [x["labels"] for x in train] == [0, 0, 1, 1]
    assert texts(task.split("test")) == ["good", "bad"]
    assert task.remarks() == []
    assert task.split("train") is train
    assert task.settings() == {
        "vocab_size": 257,
        "max_position_embeddings": 4000,
        "num_labels": 2,
        "pad_token_id": 0,
    }


def test_the_test_split_can_be_the_validation_split_and_training_keeps_all_its_texts(tmp_path):
    for split, count in (("train", 40), ("test", 6)):  # as IMDb, without a validation split
        write_rows(tmp_path / f"{split}.jsonl", [{"text": f"{split} {i}", "label": i % 2} for i in range(count)])
    held_back, whole = make_task("text", data=tmp_path), make_task("text", data=tmp_path, validation_split="test")
    assert {x.split()[0] for x in texts(held_back.split("validation"))} == {"train"}
    assert len(held_back.split("train")) + len(held_back.split("validation")) == 40
    assert texts(whole.split("validation")) == texts(whole.split("test")) == [f"test {i}" for i in range(6)]
    assert texts(whole.split("train")) == [f"train {i}" for i in range(40)]
    with pytest.raises(ValueError, match=r"has no 'exam', found test, train; name another split"):
        make_task("text", data=tmp_path, validation_split="exam").split("train")
    with pytest.raises(ValueError, match="is a split of a folder or data set, got 'test' and the file"):
        make_task("text", data=tmp_path / "train.jsonl", validation_split="test")


def test_longer_texts_are_cut_and_counted(reviews):
    task = make_task("text", data=reviews, length=70)
    assert [len(x["input_ids"]) for x in task.split("train")] == [17, 2, 70, 70]
    assert task.remarks() == ["1 of 4 train texts are longer than 70 bytes and were cut"]
    task.split("test")
    assert len(task.remarks()) == 1
    half = make_task("text", data=reviews, length=3).split("train")[0]["input_ids"]  # a character of two bytes, parted
    assert half.tolist() == [x + 1 for x in b"Gr\xc3"]


def test_a_batch_is_padded_to_its_longest_text_and_says_where(reviews):
    task = make_task("text", data=reviews)
    samples = task.split("train").__getitems__([2, 0, 1])
    batch = task.collate(samples)
    assert set(batch) == {"input_ids", "attention_mask", "labels"}
    assert {x.dtype for x in batch.values()} == {torch.int64}
    assert batch["input_ids"].shape == batch["attention_mask"].shape == (3, 128)
    for sample, ids, mask in zip(samples, batch["input_ids"], batch["attention_mask"], strict=True):
        n = len(sample["input_ids"])
        assert torch.equal(ids[:n], sample["input_ids"])
        assert not ids[n:].any()
        assert mask.tolist() == [1] * n + [0] * (128 - n)
    assert batch["labels"].tolist() == [1, 0, 0]
    assert task.collate(samples[1:])["input_ids"].shape == (2, 64)
    assert make_task("text", data=reviews, length=70).collate(samples)["input_ids"].shape == (3, 70)
    fixed = make_task("text", data=reviews, length=70, pad_to=80)
    assert fixed.collate(samples[1:])["input_ids"].shape == (2, 80)
    assert fixed.settings()["max_position_embeddings"] == 80


def test_samples_of_a_batch_are_those_taken_one_by_one_and_wrong_numbers_are_refused(reviews):
    split = make_task("text", data=reviews).split("train")
    for i, sample in zip([3, 0, 3], split.__getitems__([3, 0, 3]), strict=True):
        assert torch.equal(sample["input_ids"], split[i]["input_ids"])
        assert sample["labels"] == split[i]["labels"]
    for wrong in (4, -1):
        with pytest.raises(IndexError, match="numbered from 0 to 3"):
            split[wrong]
    again = pickle.loads(pickle.dumps(split))  # as for a loader's worker
    assert texts(again) == TEXTS


def test_limits_take_rows_spread_evenly(reviews):
    task = make_task("text", data=reviews, validation_samples=10, test_samples=5)
    found = task.split("validation")
    assert texts(found) == [f"text {i}" for i in range(0, 100, 10)]
    assert sum(x["labels"] for x in found) == 5  # of rows sorted by label
    assert len(task.split("test")) == 2
    assert len(make_task("text", data=reviews, train_samples=3).split("train")) == 3


def test_columns_and_labels_have_the_names_they_are_given(tmp_path):
    (tmp_path / "train.csv").write_text('review,stars\n"good, really",up\nbad,down\nfine,1\n')
    task = make_task("text", data=tmp_path, text="review", label="stars", labels=["down", "up"], validation_share=0)
    found = task.split("train")
    assert texts(found) == ["good, really", "bad", "fine"]
    assert [x["labels"] for x in found] == [1, 0, 1]
    assert make_task("text", labels=["a", "b", "c"]).settings()["num_labels"] == 3


def test_bad_rows_are_named_or_left_out_with_a_count(reviews):
    with (reviews / "train.jsonl").open("a") as out:
        out.write('{"text": "", "label": 1}\n{"text": "five", "label": 5}\n')
    for name in ("text", "retrieval"):
        options = {} if name == "text" else {"pairs": "halves"}
        with pytest.raises(ValueError, match=r"train\.jsonl, line 5: text must be a text that is not empty, got ''"):
            make_task(name, data=reviews, **options).split("train")
    task = make_task("text", data=reviews, skip_bad=True)
    assert texts(task.split("train")) == TEXTS
    assert re.match(r"left out 2 of 6 rows of .*train\.jsonl as bad; the first: line 5", task.remarks()[0])
    with pytest.raises(ValueError, match=r"has no column 'review', found text, label; a row must have 'review' and"):
        make_task("text", data=reviews, text="review").split("train")
    with pytest.raises(ValueError, match=r"has no column 'text1' and no 'text2', found text, label; a row must have"):
        make_task("retrieval", data=reviews).split("train")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("text", {"labels": 1}, "labels must be an integer of at least 2, got 1"),
        ("text", {"labels": ["one"]}, r"at least 2 different names, got \['one'\]"),
        ("text", {"length": 0}, "length must be an integer of at least 1, got 0"),
        ("text", {"pad_to": 100}, "pad_to must hold texts of length bytes, got pad_to=100 and length=4000"),
        ("text", {"train_samples": 0}, "train_samples must be an integer of at least 1, got 0"),
        ("text", {"label": "text"}, "text and label must be two columns, got 'text' for both"),
        ("text", {"data": "no/such/folder"}, "there is no file or folder no/such/folder"),
        ("text", {"txt": "x"}, "unknown option for task 'text', 'txt'; did you mean 'text'"),
        ("retrieval", {"pairs": "halfs"}, "unknown pairs 'halfs'; did you mean 'halves'"),
        ("retrieval", {"labels": 3}, "labels must be 2 or two names, got 3"),
        ("retrieval", {"text2": "text1"}, "must be three columns, got text1, text1, label"),
        ("retrieval", {"text": "body"}, "got text='body' and pairs='rows'; leave it out, or give pairs='halves'"),
        ("retrieval", {"pairs": "halves", "label": "y"}, "label names a column for pairs='rows', got label='y'"),
    ],
)
def test_bad_options_are_refused_before_anything_is_read(name, options, message):
    with pytest.raises(ValueError, match=message):
        make_task(name, **options)


@pytest.mark.parametrize("name", ["text", "retrieval"])
def test_a_task_without_data_tells_its_model_but_has_no_samples(name):
    task = make_task(name, length=100)
    assert task.settings()["max_position_embeddings"] == 100
    assert task.remarks() == []
    with pytest.raises(ValueError, match="this task needs data, got None; give"):
        task.split("train")
    with pytest.raises(ValueError, match="unknown split 'valid'"):
        task.split("valid")
    assert task.score(Outcome(loss=2.0, right=0.75)) == {"accuracy": 0.75}


def test_pairs_are_two_texts_each_with_its_mask(tmp_path):
    rows = [{"text1": "a" * 70, "text2": "b", "label": 1}, {"text1": "c", "text2": "dé", "label": 0}]
    write_rows(tmp_path / "train.jsonl", rows)
    task = make_task("retrieval", data=tmp_path, length=80, validation_share=0)
    split = task.split("train")
    assert texts(split) == ["a" * 70, "c"]
    assert texts(split, "other_input_ids") == ["b", "dé"]
    batch = task.collate(split.__getitems__([0, 1]))
    assert {k: tuple(x.shape) for k, x in batch.items()} == {
        "input_ids": (2, 80),
        "attention_mask": (2, 80),
        "other_input_ids": (2, 64),
        "other_attention_mask": (2, 64),
        "labels": (2,),
    }
    assert batch["attention_mask"].sum(1).tolist() == [70, 1]
    assert batch["other_attention_mask"].sum(1).tolist() == [1, 3]
    assert batch["labels"].tolist() == [1, 0]
    cut = make_task("retrieval", data=tmp_path, length=2, validation_share=0)
    cut.split("train")
    assert cut.remarks() == ["2 of 4 train texts are longer than 2 bytes and were cut"]


def test_pairs_in_long_range_arenas_files_are_read_once_they_have_a_head_line(tmp_path):
    # Labels are floats there, and quotes have no meaning.
    lines = ["label\tid1\tid2\ttext1\ttext2", '1.0\tP1\tP2\tsays "x\ty', "0.0\tP3\tP4\tz\tw"]
    (tmp_path / "validation.tsv").write_text("\n".join(lines))
    split = make_task("retrieval", data=tmp_path).split("validation")
    assert [x["labels"] for x in split] == [1, 0]
    assert texts(split) == ['says "x', "z"]
    assert texts(split, "other_input_ids") == ["y", "w"]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("one two three four", ("one two", "three four")),
        ("one  two", ("one", "two")),
        ("  ab cd\n", ("ab", "cd")),
        ("line\nanother", ("line", "another")),
        ("a bcdefghijkl", ("a bcde", "fghijkl")),  # the blank is too far from the middle
        ("日本語文", ("日本", "語文")),
        ("éé", ("é", "é")),
        ("ab", ("a", "b")),
        ("a b", ("a", "b")),
        ("a b c", ("a", "b c")),
    ],
)
def test_halves_are_cut_at_a_blank_near_the_middle(text, parts):
    assert tuple(x.decode() for x in halves(text)) == parts


def test_texts_that_have_no_halves_are_refused():
    for wrong, message in [("a", "at least two characters"), (" b ", "got 'b'"), ("", "not empty"), (7, "not empty")]:
        with pytest.raises(ValueError, match=message):
            halves(wrong)


def test_every_half_occurs_once_and_labels_say_whose_they_are(corpus):
    task = make_task("retrieval", data=corpus, pairs="halves", validation_share=0.1)
    both = texts(split := task.split("train")), texts(split, "other_input_ids")
    labels = np.array([x["labels"] for x in split])
    first, second = ([int(x.split()[0][1:]) for x in side] for side in both)
    assert len(first) > 250
    assert sorted(first) == sorted(second) == sorted(set(first))
    assert first == sorted(first)  # in the order of the rows
    assert (labels == (np.array(first) == second)).all()
    assert abs(labels.sum() - len(labels) / 2) <= 2
    whole = documents(400)
    assert all(f"{a} {b}" == whole[i] for a, b, i in zip(*both, first, strict=True) if a.split()[0] == b.split()[0])
    elsewhere = {x for name in ("validation", "test") for x in texts(task.split(name))}
    assert elsewhere.isdisjoint(both[0])


def test_halves_are_a_function_of_the_seed(corpus):
    def labels(**options):
        return [x["labels"] for x in make_task("retrieval", data=corpus, pairs="halves", **options).split("train")]

    assert labels() == labels()
    assert exchange_halves([5] * 40, 0).tolist() != exchange_halves([5] * 40, 1).tolist()
    limited = make_task("retrieval", data=corpus, pairs="halves", train_samples=100).split("train")
    assert len(limited) == 100
    assert abs(sum(x["labels"] for x in limited) - 50) <= 2


@pytest.mark.parametrize("count", [4, 5, 6, 7, 8, 101])
def test_an_exchange_is_mutual_and_leaves_half_alone(count):
    for seed in range(20):
        whose = exchange_halves(list(range(count)), seed)
        assert (whose[whose] == np.arange(count)).all()
        assert (np.abs(whose - np.arange(count)) <= 1).all()  # neighbours in length
        kept = int((whose == np.arange(count)).sum())
        assert abs(kept - count / 2) <= 2
        assert 0 < kept < count


def test_lengths_of_halves_do_not_tell_the_label():
    # Cut in the middle and exchanged at random, halves of one text would be known by their equal lengths.
    rng = np.random.default_rng(0)
    found = [halves(" ".join("x" * int(n) for n in rng.integers(1, 9, rng.integers(20, 200)))) for _ in range(4000)]
    first, second = (np.array([len(x[side]) for x in found]) for side in (0, 1))
    whose = exchange_halves(second.tolist(), 0)
    together = whose == np.arange(4000)
    for cue in (first, second[whose], first - second[whose], np.abs(first - second[whose])):
        one, other = cue[together], cue[~together]
        error = np.sqrt(one.var() / len(one) + other.var() / len(other))
        assert abs(one.mean() - other.mean()) < SIGMAS * error
    apart = np.abs(first - rng.permutation(second)).mean()
    assert apart > 20 * np.abs(first - second[whose])[~together].mean()


def test_copies_of_a_text_belong_together(tmp_path):
    path = write_rows(tmp_path / "train.jsonl", [{"text": "the same text"}] * 10)
    split = make_task("retrieval", data=tmp_path, pairs="halves", validation_share=0).split("train")
    assert [x["labels"] for x in split] == [1] * 10
    write_rows(path, [{"text": "too few"}] * 3)
    with pytest.raises(ValueError, match=r"pairs='halves' needs at least 4 texts in a split.* got 3"):
        make_task("retrieval", data=tmp_path, pairs="halves", validation_share=0).split("train")


def test_fingerprints_are_of_the_data_and_of_the_way_halves_are_paired(corpus):
    rows, paired = (make_task("retrieval", data=corpus, pairs=x).fingerprint() for x in ("rows", "halves"))
    assert paired.startswith(rows)
    assert paired != rows
    assert make_task("text", data=corpus, seed=4).fingerprint() == rows
    before = rows
    write_rows(corpus, [{"text": "another"}])
    assert make_task("text", data=corpus).fingerprint() != before


@pytest.mark.parametrize(("name", "options"), [("text", {}), ("retrieval", {"pairs": "halves"})])
def test_a_loader_and_the_models_take_the_batches(reviews, name, options):
    task = make_task(name, data=reviews, length=64, **options)
    loader = torch.utils.data.DataLoader(task.split("validation"), batch_size=40, collate_fn=task.collate)
    batches = list(loader)
    assert [len(x["labels"]) for x in batches] == [40, 40, 20]
    config = KernelformerConfig(
        **task.settings(), hidden_size=8, num_hidden_layers=1, num_attention_heads=1, attention="elu"
    )
    found = MODELS[task.model](config)(**batches[0])
    assert found.logits.shape == (40, 2)
    assert torch.isfinite(found.loss)
