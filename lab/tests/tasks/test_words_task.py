"""Language modelling by sub-words: windows, scores per token, word and byte by their definitions, bad input."""

from __future__ import annotations

import inspect
import math
import re
from functools import partial

import numpy as np
import pytest
import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
from transformers import TrainingArguments

from kernelformer.models import MODELS, KernelformerConfig
from kernelformer_lab.data import tokenization
from kernelformer_lab.data.tokenization import SPECIAL, Vocabulary, load_vocabulary
from kernelformer_lab.tasks import TASKS, make_task
from kernelformer_lab.tasks.base import Outcome
from kernelformer_lab.tasks.corpus import Corpus
from kernelformer_lab.tasks.words import Words
from kernelformer_lab.training import evaluate
from kernelformer_lab.training.evaluation import TaskTrainer
from samples import write_texts

LEXICON = ["ka", "lomi", "Nesu", "tarivo", "mika", "lo", "suri", "neta.", "été", "x1"]
MODEL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


def prose(count, seed=0):
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(LEXICON, rng.integers(3, 12))) for _ in range(count)]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))


def words(tmp_path, text=None, **options):
    path = tmp_path / "plain.txt"
    path.write_text("\n".join(prose(1500)) if text is None else text)
    return make_task("words", **{"data": path, "length": 32, "vocab_size": 320} | options)


def folder(tmp_path, **texts):
    place = tmp_path / "rows"
    for split, rows in texts.items():
        write_texts(place / f"{split}.jsonl", rows)
    return place


def test_training_windows_are_anywhere_and_others_side_by_side(tmp_path):
    task = words(tmp_path, samples=500)
    data, tokens = task.split("train"), task.tokens("train").astype(np.int64)
    assert len(data) == 500
    places = data.starts(np.arange(500))
    assert len(np.unique(places)) > 450
    assert len(np.unique(places % 32)) == 32
    for i in (0, 7, 499):
        assert data[i]["input_ids"].tolist() == tokens[places[i] : places[i] + 32].tolist()
        assert torch.equal(data[i]["input_ids"], words(tmp_path, samples=9000).split("train")[i]["input_ids"])
    assert not torch.equal(data[0]["input_ids"], words(tmp_path, seed=1).split("train")[0]["input_ids"])
    for split in ("validation", "test"):
        data = task.split(split)
        ids = torch.cat([x["input_ids"] for x in data.__getitems__(range(len(data)))]).tolist()
        assert ids == task.tokens(split)[: len(ids)].tolist()
        assert len(task.tokens(split)) - len(ids) < 32
    assert len(words(tmp_path, validation_samples=3).split("validation")) == 3


@pytest.mark.parametrize("kind", ["bpe", "wordpiece", "bytes"])
def test_a_batch_fits_the_model_and_the_model_predicts_the_next_token(tmp_path, kind):
    task = words(tmp_path, kind=kind, vocab_size=None if kind == "bytes" else 320)
    batch = task.collate(task.split("train").__getitems__(range(4)))
    assert {name: (tuple(x.shape), x.dtype) for name, x in batch.items()} == {
        "input_ids": ((4, 32), torch.int64),
        "labels": ((4, 32), torch.int64),
    }
    assert torch.equal(batch["input_ids"], batch["labels"])
    model = MODELS[task.model](KernelformerConfig(attention="elu", **task.settings(), **MODEL))
    out = model(**batch)
    each = torch.nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
    assert out.loss.item() == pytest.approx(each.item(), rel=1e-5)


def test_models_are_described_without_data():
    assert make_task("words").settings() == {"vocab_size": 8000, "max_position_embeddings": 512, "pad_token_id": 0}
    with pytest.raises(ValueError, match="this task needs data, got None"):
        make_task("words").split("train")
    with pytest.raises(ValueError, match="unknown split 'dev'"):
        make_task("words").split("dev")


def test_options_are_those_of_masked_text_but_one():
    mine, others = (inspect.signature(TASKS[x]).parameters for x in ("words", "masked"))
    assert set(others) - set(mine) == {"mask_share"}
    assert [(x.name, x.default) for x in mine.values()] == [
        (x.name, x.default) for x in others.values() if x.name != "mask_share"
    ]


# Scores


def test_scores_without_a_split_are_per_token():
    assert make_task("words").score(Outcome(math.log(8), 0.25)) == pytest.approx(
        {"perplexity": 8, "accuracy": 0.25, "bits_per_token": 3}
    )


def test_scores_per_word_and_byte_are_of_the_whole_split_that_the_outcome_names(tmp_path):
    texts = {"train": prose(300), "validation": [*prose(40, 1), "a  b\n\tc "], "test": ["long" * 30 + " x"] * 20}
    task = make_task("words", data=folder(tmp_path, **texts), length=16, vocab_size=300, validation_samples=2)
    loss, ratios = 0.7, []
    for split in texts:
        task.split(split)
    for split, rows in texts.items():
        tokens = sum(len(task.vocabulary().encode(x)) + 1 for x in rows)  # each ends with <eos>
        count, size = sum(len(re.findall(r"\S+", x)) for x in rows), sum(len(x.encode()) for x in rows)
        ratios.append(tokens / count)
        assert task.score(Outcome(loss, 0.5, split=split)) == pytest.approx(
            {
                "perplexity": math.exp(loss),
                "accuracy": 0.5,
                "bits_per_token": loss / math.log(2),
                "word_perplexity": math.exp(loss * tokens / count),
                "bits_per_byte": loss * tokens / size / math.log(2),
            }
        )
    assert ratios[2] > 5 * ratios[1]  # another split's would be far off
    assert task.score(Outcome(1e4, 0.0, split="test"))["word_perplexity"] == math.inf
    assert "word_perplexity" not in task.score(Outcome(loss, 0.5))


def test_a_run_scores_its_validation_split_whatever_was_asked_for_before(tmp_path):
    texts = {"train": prose(100), "validation": prose(40, 1), "test": ["long" * 30 + " x"] * 20}
    task = make_task("words", data=folder(tmp_path, **texts), length=16, vocab_size=300)
    model = MODELS[task.model](KernelformerConfig(attention="elu", **task.settings(), **MODEL))
    args = TrainingArguments(output_dir=str(tmp_path), report_to="none", use_cpu=True, remove_unused_columns=False)
    trainer = TaskTrainer(task, model, args, eval_dataset=task.split("validation"))
    task.split("test")
    found = trainer.evaluate()
    ratio = len(task.tokens("validation")) / sum(len(x.split()) for x in texts["validation"])
    assert math.log(found["eval_word_perplexity"]) == pytest.approx(found["eval_loss"] * ratio)


def test_evaluation_scores_the_split_it_was_told(tmp_path):
    texts = {"train": prose(100), "validation": prose(40, 1), "test": ["long" * 30 + " x"] * 20}
    task = make_task("words", data=folder(tmp_path, **texts), length=16, vocab_size=300)
    model = MODELS[task.model](KernelformerConfig(attention="elu", **task.settings(), **MODEL))
    for split in ("validation", "test", "validation"):
        found = evaluate(model, task, split=split)
        ratio = len(task.tokens(split)) / sum(len(x.split()) for x in texts[split])
        assert math.log(found["word_perplexity"]) == pytest.approx(found["loss"] * ratio)
        assert found["perplexity"] == pytest.approx(math.exp(found["loss"]))


@pytest.mark.parametrize(
    "text", ["ka lo\n" * 9000, "kalo" * 20_000, ("é" * 50 + " ") * 1000, " \n" * 20_000 + "x " * 9]
)
def test_words_that_pieces_divide_are_counted_once(tmp_path, text):
    task = words(tmp_path, text, kind="bytes", vocab_size=None, validation_share=0, test_share=0)
    assert len(list(task.pieces("train"))) > 1
    assert task.sizes("train") == (len(text.split()), len(text.encode()))
    assert task.sizes("train").size == len(task.tokens("train"))


def test_bytes_have_as_many_bits_per_byte_as_per_token(tmp_path):
    task = words(tmp_path, kind="bytes", vocab_size=None)
    found = task.score(Outcome(1.3, 0.5, split="validation"))
    assert found["bits_per_byte"] == pytest.approx(found["bits_per_token"])


def test_documents_of_a_folder_do_not_share_words(tmp_path):
    place = tmp_path / "texts"
    place.mkdir()
    for i in range(5):
        (place / f"{i}.txt").write_text("ab" * 10_000)
    task = make_task("words", data=place, kind="bytes", validation_share=0, test_share=0)
    assert task.sizes("train") == (5, 100_000)
    assert (task.tokens("train") == task.vocabulary().eos).sum() == 5


def test_guessing_by_frequency_is_the_baseline(tmp_path):
    task = words(tmp_path, validation_share=0.1)
    data = words(tmp_path, validation_share=0.1).split("validation")
    labels = torch.cat([x["labels"][1:] for x in data.__getitems__(range(len(data)))]).numpy()  # the first is not told
    counts = np.bincount(task.tokens("train"), minlength=task.vocabulary().size) + 1
    loss = -np.mean(np.log(counts[labels] / counts.sum()))
    want = task.score(Outcome(loss, (labels == counts.argmax()).mean(), split="validation"))
    assert task.baselines("validation") == {"frequency of tokens": pytest.approx(want)}


# What is kept


def test_tokens_and_counts_are_kept_and_told_apart(tmp_path, monkeypatch):
    first = words(tmp_path)
    first.split("train")
    first.split("validation")
    assert not list((tmp_path / "xdg").rglob("sizes-*"))[1:]  # training text is not counted without need
    found = Outcome(1.0, 0.5, split="validation")
    want, known = first.score(found), first.fingerprint()
    monkeypatch.setattr(Vocabulary, "encode_batch", lambda *_: pytest.fail("encoded again"))
    monkeypatch.setattr(Words, "_counted", lambda *_: pytest.fail("counted again"))
    again = words(tmp_path, length=16, seed=3)
    again.split("validation")
    assert again.score(found) == want
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    other = words(tmp_path, "\n".join(prose(1500, 5)))
    assert other.score(found) != want
    assert other.fingerprint() != known
    for file in (tmp_path / "xdg").rglob("sizes-*"):
        file.write_bytes(b"PK")
    with pytest.raises(ValueError, match=r"the cache file .*sizes-\w+\.npz cannot be used .*delete it"):
        words(tmp_path).split("validation")


def test_the_vocabulary_is_saved_beside_the_model(tmp_path):
    task = words(tmp_path)
    task.save_extra(tmp_path)
    assert load_vocabulary(str(tmp_path)).encode("ka lomi").tolist() == task.vocabulary().encode("ka lomi").tolist()


def test_tokens_are_kept_for_the_vocabulary_itself(tmp_path, monkeypatch):
    task = words(tmp_path)
    before = task.tokens("train").tolist()
    task.save_extra(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(Vocabulary, "encode_batch", lambda *_: pytest.fail("encoded again"))
        assert words(tmp_path, tokenizer=str(tmp_path)).tokens("train").tolist() == before  # the same, from elsewhere
    for file in (tmp_path / "xdg").rglob("vocabulary-*"):
        file.unlink()
    monkeypatch.setattr(tokenization, "_byte_pairs", lambda texts, size, low: _single_letters(texts))
    other = words(tmp_path)  # the same data and options, but they come to mean another vocabulary
    assert (
        other.tokens("train").tolist()
        == other.vocabulary().encode("".join(x for x, _ in other.pieces("train"))).tolist()
    )
    assert other.tokens("train").tolist() != before


def _single_letters(texts):
    found = Tokenizer(models.BPE())
    found.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    letters = sorted({x for text in texts for x in text})
    found.train_from_iterator([], trainers.BpeTrainer(special_tokens=list(SPECIAL), initial_alphabet=letters))
    return found


# Folders


def write(place, **texts):
    for name, text in texts.items():
        path = place / f"{name.replace('_', '/')}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return place


def in_splits(task, splits=("train", "validation", "test")):
    return {split: "|".join(text for text, _ in task.pieces(split)) for split in splits}


CORPORA = sorted(name for name, task in TASKS.items() if issubclass(task, Corpus))


@pytest.mark.parametrize("name", CORPORA)
def test_folders_and_files_named_as_splits_are_the_splits(tmp_path, name):
    many = {f"train_{i}": f"train {i}" for i in range(20)} | {"valid_0": "held", "test_0": "out", "test_1": "side"}
    make = partial(make_task, name, vocab_size=300, length=2)
    task = make(data=write(tmp_path / "pg19", **many))
    found = in_splits(task)
    assert sorted(found["train"].split("|")) == sorted(x for x in many.values() if x.startswith("train"))
    assert (found["validation"], found["test"], task.remarks()) == ("held", "out|side", [])
    assert (task.tokens("test") == task.vocabulary().eos).sum() == 2
    single = write(tmp_path / "single", train="learn", validation="held", test="out", readme="of it all")
    task = make(data=single)
    assert in_splits(task) == {"train": "learn", "validation": "held", "test": "out"}
    for task in (make(data=single), make(data=single)):  # made, and kept
        task.split("train")
        assert task.remarks() == [f"left out 1 of 4 files of {single}: splits are test.txt, train.txt, validation.txt"]
    before = task.fingerprint()
    (single / "readme.txt").write_text("of nothing")
    assert task.fingerprint() == before
    (single / "test.txt").write_text("another")
    assert task.fingerprint() != before


def test_training_files_are_validated_on_where_no_others_are_for_it(tmp_path):
    many = write(tmp_path / "many", **{f"train_{i}": f"<{i}>" for i in range(60)}, test="out")
    task = make_task("words", data=many, validation_share=0.3, test_share=0.4)
    found = in_splits(task)
    parts = [set(found[x].split("|")) for x in ("train", "validation")]
    assert parts[0] | parts[1] == {f"<{i}>" for i in range(60)}
    assert not parts[0] & parts[1]
    assert 5 <= len(parts[1]) <= 32
    assert found["test"] == "out"
    one = write(tmp_path / "one", train="é" * 50 + "k" * 100, test="out")
    task = make_task("words", data=one, validation_share=0.25)
    assert in_splits(task) == {"train": "é" * 50 + "k" * 50, "validation": "k" * 50, "test": "out"}
    assert [[end for _, end in task.pieces(x)] for x in ("train", "validation")] == [[False], [True]]
    (one / "test.txt").unlink()
    with pytest.raises(ValueError, match=r"one has no test split, found train\.txt; add one, evaluate another"):
        task.split("test")


def test_two_names_for_a_split_are_refused(tmp_path):
    place = write(tmp_path / "two", train="a", dev="b", valid_1="c")
    with pytest.raises(ValueError, match=r"two has dev\.txt and valid; keep one for each split"):
        make_task("words", data=place).split("train")
    chosen = make_task("words", data=place, pattern="*.txt")
    assert in_splits(chosen, ("train", "validation")) == {"train": "a", "validation": "b"}


def test_bytes_of_named_splits_are_told_apart_too(tmp_path):
    place = write(tmp_path / "named", train_1="abc", train_2="def", validation_1="ghi", test="jkl", notes="zzz")
    task = make_task("bytes", data=place, length=2)
    assert [bytes(task.split(x).tokens) for x in ("train", "validation", "test")] == [b"abcdef", b"ghi", b"jkl"]
    assert task.remarks() == [f"left out 1 of 5 files of {place}: splits are test.txt, train, validation"]
    (place / "validation" / "1.txt").unlink()
    (place / "train" / "2.txt").unlink()
    task = make_task("bytes", data=place, length=1 + 1, validation_share=0.67)
    assert [bytes(task.files.text(x)) for x in ("train", "validation", "test")] == [b"a", b"bc", b"jkl"]


@pytest.mark.parametrize("name", CORPORA)
def test_bad_files_of_a_folder_are_left_out_with_a_count(tmp_path, name):
    place = write(tmp_path / "bad", train_0="ka lo", train_1="mi", train_3="su", validation="held", test="out")
    (place / "train" / "2.txt").write_bytes(b"ab \xff")
    (place / "train" / "4.txt").write_bytes(b"ab \0")
    options = {"data": place, "length": 2, "vocab_size": 300}
    with pytest.raises(ValueError, match=r"2\.txt is not UTF-8: invalid start byte at byte 3"):
        make_task(name, **options).split("train")
    for _ in range(2):  # made, and kept
        task = make_task(name, skip_bad=True, **options)
        task.split("train")
        [said] = task.remarks()
        first = f"{place / 'train' / '2.txt'} is not UTF-8"
        assert f"left out 2 of 5 files of the train split of {place} as bad; the first: {first}" in said
        assert (task.tokens("train") == task.vocabulary().eos).sum() == 3
    with pytest.raises(
        ValueError, match=r"skip_bad leaves out rows, or files of a folder, and .*test\.txt is one text"
    ):
        make_task(name, data=place / "test.txt", skip_bad=True)


# Bad input


@pytest.mark.parametrize("name", CORPORA)
def test_rows_without_text_are_passed_over_and_other_bad_ones_are_not(tmp_path, name):
    rows = prose(100)
    blank = ["", *(x for text in rows for x in (text, "", " \n"))]
    plain = make_task(name, data=folder(tmp_path, train=rows, validation=rows), length=16, vocab_size=300)
    want = plain.tokens("train").tolist()
    task = make_task(name, data=folder(tmp_path, train=blank, validation=blank), length=16, vocab_size=300)
    assert task.tokens("train").tolist() == want
    assert len(task.split("validation")) == len(plain.split("validation"))
    assert task.remarks() == []
    if name == "words":
        assert task.sizes("validation") == plain.sizes("validation")
    for bad, reason in ((5, "must be a text"), (None, "must be a text"), ("\ud800", "is not UTF-8")):
        place = folder(tmp_path, train=[*rows, bad])
        with pytest.raises(ValueError, match=rf"train\.jsonl, line 101: text {reason}"):
            make_task(name, data=place, vocab_size=300).split("train")
        for _ in range(2):  # made, and kept
            task = make_task(name, data=place, vocab_size=300, length=16, skip_bad=True)
            task.split("train")
            assert "left out 1 of 101 rows" in task.remarks()[0]


def test_bad_input_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"the validation split of .*plain\.txt has \d+ tokens, less than .*length=32"):
        words(tmp_path, "ka lo mi " * 30, kind="bytes", vocab_size=None).split("validation")
    (tmp_path / "bad.txt").write_bytes(b"x" * 50_000 + b"\xff")
    with pytest.raises(ValueError, match=r"bad\.txt is not UTF-8"):
        make_task("words", data=tmp_path / "bad.txt", test_share=0, validation_share=0).split("train")
    for options, message in [
        ({"length": 1}, "length must be an integer of at least 2, got 1"),
        ({"samples": 0}, "samples must be an integer of at least 1"),
        ({"kind": "unigram"}, "unknown kind of vocabulary 'unigram'"),
        ({"data": "nowhere"}, "there is no file or folder nowhere"),
        ({"mask_share": 0.1}, "unknown option for task 'words', 'mask_share'"),
    ]:
        with pytest.raises(ValueError, match=message):
            make_task("words", **options)
