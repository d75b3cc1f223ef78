"""Vocabularies, sentences as in GLUE, masked text: by their definitions, shares by standard errors, bad input."""

from __future__ import annotations

import itertools
import math
import os
import re

import numpy as np
import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers

from kernelformer.models import MODELS, KernelformerConfig
from kernelformer_lab.data import sources, tokenization
from kernelformer_lab.data.batching import IGNORED
from kernelformer_lab.data.byte_texts import fit_pairs
from kernelformer_lab.data.tokenization import BYTE_TOKENS, SPECIAL, Vocabulary, load_vocabulary, vocabulary
from kernelformer_lab.recipes.papers.learned_kernels import GLUE
from kernelformer_lab.tasks import make_task
from kernelformer_lab.tasks.base import Outcome
from kernelformer_lab.tasks.sentences import Sentences, f1, matthews, pearson, ranks, spearman
from samples import write_rows, write_texts
from sampling import SIGMAS

SYLLABLES = ["ka", "lo", "mi", "ne", "su", "ta", "Ri", "vo"]
STRANGE = ["a <eos> b<pad>", "\n\n  two  blanks ", "naïve 中文 \U0001f600", "\x00\t", "<bos>"]
MODEL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


def prose(count, seed=0, words=12):
    """Texts of made-up words, some of them frequent."""
    rng = np.random.default_rng(seed)
    lexicon = ["".join(rng.choice(SYLLABLES, rng.integers(1, 4))) for _ in range(200)]
    return [" ".join(lexicon[i] for i in (rng.random(words) ** 3 * 200).astype(int)) + "." for _ in range(count)]


TEXTS = prose(300)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))


def made(tmp_path, texts=TEXTS, **options):
    return vocabulary(texts, cache=tmp_path / "cache", **{"vocab_size": 400, "record": "texts"} | options)


# Vocabularies


@pytest.mark.parametrize("kind", ["bpe", "bytes"])
def test_decoding_gives_the_text_back_whatever_it_is(tmp_path, kind):
    words = made(tmp_path, kind=kind, vocab_size=None)
    for text in [*STRANGE, *TEXTS[:5]]:
        ids = words.encode(text)
        assert words.decode(ids) == text
        assert ids.min() >= len(SPECIAL)  # no text gives a special token
        assert words.decode([words.bos, *ids, words.eos, words.pad]) == text
    assert (words.pad, words.bos, words.eos, words.mask, words.sep) == (0, 1, 2, 3, 4)
    assert words.ordinary().tolist() == list(range(6, words.size))


def test_special_tokens_come_first(tmp_path):
    for kind in ("bpe", "wordpiece"):
        tokenizer = made(tmp_path, kind=kind).tokenizer
        assert [tokenizer.token_to_id(x) for x in SPECIAL] == list(range(6))


def test_many_texts_are_encoded_as_each_alone(tmp_path, monkeypatch):
    words = made(tmp_path)
    monkeypatch.setattr(tokenization, "_ROUND", 100)
    texts = [*TEXTS[:30], "", *STRANGE]
    flat, offsets = words.encode_batch(texts)
    assert (flat.dtype, offsets.dtype) == (np.int32, np.int64)
    assert len(offsets) == len(texts) + 1
    for text, (a, b) in zip(texts, itertools.pairwise(offsets), strict=True):
        assert flat[a:b].tolist() == words.tokenizer.encode(text, add_special_tokens=False).ids
    assert [x.tolist() for x in words.encode_batch([])] == [[], [0]]


@pytest.mark.parametrize("kind", ["bpe", "wordpiece"])
def test_the_same_texts_train_the_same_vocabulary(tmp_path, kind):
    # Single letters: many ties between pairs, which hash tables of the library would break in any order.
    texts = ["".join(np.random.default_rng(i).choice(list("abcdefghij"), 6)) for i in range(300)]
    found = [made(tmp_path / str(i), texts, kind=kind).tokenizer.to_str() for i in range(4)]
    assert len(set(found)) == 1


def test_word_pieces_are_words_and_what_follows_in_them(tmp_path):
    words = made(tmp_path, kind="wordpiece", lowercase=True, vocab_size=300)
    tokens = words.tokenizer.encode("Kalomine sutari!", add_special_tokens=False).tokens
    assert "".join(x.removeprefix("##") for x in tokens) == "kalominesutari<unk>"
    assert not tokens[0].startswith("##")
    assert len(tokens) < 10  # pieces, not letters
    assert words.size <= 300
    assert words.decode(words.encode("KALOmine")) == "kalomine"


def test_lowercase_is_an_option_of_byte_pairs_too(tmp_path):
    assert made(tmp_path, lowercase=True).decode(made(tmp_path, lowercase=True).encode("Ab Cd")) == "ab cd"


def test_a_trained_vocabulary_is_kept_and_used_again(tmp_path):
    first = made(tmp_path)
    again = made(tmp_path, (pytest.fail("read again") for _ in range(1)))
    assert again.tokenizer.to_str() == first.tokenizer.to_str()
    for options in ({"record": "others"}, {"vocab_size": 401}, {"lowercase": True}, {"kind": "wordpiece"}):
        made(tmp_path, **options)
    names = sorted(x.name for x in (tmp_path / "cache").iterdir())
    assert len(names) == 5
    assert all(re.fullmatch(r"vocabulary-\w{16}\.json", x) for x in names)


def test_damaged_vocabularies_are_named(tmp_path):
    made(tmp_path)
    [path] = (tmp_path / "cache").iterdir()
    whole = path.read_text()
    for damaged in ("", whole[:500], whole.replace("ka", "kb", 1), whole.replace("texts", "other", 1), "[]"):
        assert damaged != whole
        path.write_text(damaged)
        with pytest.raises(ValueError, match=re.escape(f"the cache file {path} cannot be used") + ".*delete it"):
            made(tmp_path)


def test_a_vocabulary_that_cannot_be_written_leaves_nothing(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("kernelformer.files.sync", full)
    with pytest.raises(ValueError, match="the disk is full; give another folder as cache"):
        made(tmp_path)
    assert list((tmp_path / "cache").iterdir()) == []


def own_tokenizer(path, names, truncate=None):
    tokens = {x: i for i, x in enumerate([*names, "ka", "lo", "mi", "[UNK]"])}
    found = Tokenizer(models.WordLevel(tokens, unk_token="[UNK]"))
    found.pre_tokenizer = pre_tokenizers.Whitespace()
    found.add_special_tokens([*names, "[UNK]"])
    if truncate:
        found.enable_truncation(truncate)
        found.enable_padding(length=truncate)
    path.parent.mkdir(parents=True, exist_ok=True)
    found.save(str(path))
    return str(path)


def test_a_users_vocabulary_has_its_own_special_tokens(tmp_path):
    bert = load_vocabulary(own_tokenizer(tmp_path / "a.json", ["[CLS]", "[SEP]", "[MASK]", "[PAD]"], truncate=2))
    assert (bert.pad, bert.bos, bert.eos, bert.mask, bert.sep, bert.size) == (3, 0, 1, 2, 1, 8)
    assert bert.encode("ka lo mi ka").tolist() == [4, 5, 6, 4]  # neither cut nor padded
    assert bert.ordinary().tolist() == [4, 5, 6]
    own_tokenizer(tmp_path / "t5" / "tokenizer.json", ["<pad>", "</s>"])
    t5 = load_vocabulary(str(tmp_path / "t5"))
    assert (t5.pad, t5.bos, t5.eos, t5.mask, t5.sep) == (0, 0, 1, None, 1)
    own_tokenizer(tmp_path / "t5" / "tokenizer.json", ["<s>", "<pad>", "</s>"])
    assert load_vocabulary(str(tmp_path / "t5")).pad == 1  # the new file


def test_vocabularies_that_cannot_be_used_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"has no token for 'pad'; add one of <pad>, \[PAD\]"):
        load_vocabulary(own_tokenizer(tmp_path / "a.json", ["</s>"]))
    with pytest.raises(ValueError, match=r"no file .*; tokenizer must be a tokenizer\.json, or a folder with one"):
        load_vocabulary(str(tmp_path))
    (tmp_path / "b.json").write_text("{}")
    with pytest.raises(ValueError, match=r"b\.json is not a tokenizer\.json"):
        load_vocabulary(str(tmp_path / "b.json"))
    place = own_tokenizer(tmp_path / "c.json", ["<pad>", "</s>", *(f"<{i}>" for i in range(300))])
    with pytest.raises(ValueError, match="has 306 tokens, more than vocab_size=300; leave vocab_size out"):
        make_task("sentences", tokenizer=place, vocab_size=300)
    with pytest.raises(ValueError, match="lowercase is for a vocabulary of sub-words, got kind='bytes'"):
        make_task("sentences", kind="bytes", lowercase=True)
    with pytest.raises(ValueError, match="no token for what is hidden; add <mask>"):
        make_task("masked", tokenizer=place)
    with pytest.raises(ValueError, match="vocab_size is 262 for kind='bytes', got 8000"):
        make_task("masked", kind="bytes", vocab_size=8000)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_says_nothing_and_can_encode(tmp_path, monkeypatch, capfd):
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    words = made(tmp_path)
    count = len(words.encode_batch(TEXTS)[0])
    child = os.fork()
    if not child:
        os._exit(0 if len(words.encode_batch(TEXTS)[0]) == count else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert capfd.readouterr().err == ""
    assert "TOKENIZERS_PARALLELISM" not in os.environ


# Sentences


def sentence_rows(count=200, seed=0):
    texts, others = prose(count, seed), prose(count, seed + 1, words=7)
    return [{"text": a, "other": b, "label": i % 2} for i, (a, b) in enumerate(zip(texts, others, strict=True))]


def sentences(tmp_path, rows=None, **options):
    place = str(write_rows(tmp_path / "rows.jsonl", sentence_rows() if rows is None else rows))
    return make_task("sentences", **{"data": place, "vocab_size": 300, "length": 64} | options)


def test_a_sentence_and_a_pair_have_their_marks(tmp_path):
    task = sentences(tmp_path)
    words, row = task.vocabulary(), task.source.rows("train")
    for i in (0, 7):
        want = [words.bos, *words.encode(row["text"][i]), words.eos]
        assert task.split("train")[i]["input_ids"].tolist() == want
        assert task.split("train")[i]["labels"] == row["label"][i]
    pair = sentences(tmp_path, other="other", length=128)
    words, row = pair.vocabulary(), pair.source.rows("train")
    want = [words.bos, *words.encode(row["text"][3]), words.sep, *words.encode(row["other"][3]), words.eos]
    assert pair.split("train")[3]["input_ids"].tolist() == want
    assert pair.remarks() == []


def test_a_pair_too_long_is_cut_from_its_longer_side(tmp_path):
    for a, b, room in itertools.product(range(8), range(8), (2, 5, 6)):
        x, y = a, b
        while x + y > room:
            x, y = (x - 1, y) if x > y else (x, y - 1)
        found = fit_pairs(np.array([a]), np.array([b]), room)
        assert (int(found[0][0]), int(found[1][0])) == (x, y), (a, b, room)
    task = sentences(tmp_path, other="other", length=20)
    words, row = task.vocabulary(), task.source.rows("train")
    sizes = [[len(words.encode(x)) for x in row[side]] for side in ("text", "other")]
    cut = sum(a + b > 17 for a, b in zip(*sizes, strict=True))
    assert cut > 100
    for i in range(len(task.split("train"))):
        ids = task.split("train")[i]["input_ids"].tolist()
        middle = ids.index(words.sep)
        assert ids[1:middle] == words.encode(row["text"][i])[: middle - 1].tolist()
        assert ids[middle + 1 : -1] == words.encode(row["other"][i])[: len(ids) - middle - 2].tolist()
        assert len(ids) == min(sizes[0][i] + sizes[1][i] + 3, 20)
    assert task.remarks() == [
        f"{cut} of {len(row['text'])} pairs of the train split have more than length=20 tokens, the 3 special ones "
        f"included, and were cut"
    ]


def test_a_batch_of_sentences_is_padded_and_fits_the_model(tmp_path):
    for options, labels in (({}, torch.int64), ({"labels": 1, "other": "other"}, torch.float32)):
        task = sentences(tmp_path, **options)
        data = task.split("train")
        loader = torch.utils.data.DataLoader(data, batch_size=9, collate_fn=task.collate)
        batch = next(iter(loader))
        lengths = [len(data[i]["input_ids"]) for i in range(9)]
        assert batch["input_ids"].shape == batch["attention_mask"].shape == (9, min(-(-max(lengths) // 16) * 16, 64))
        assert batch["attention_mask"].sum(1).tolist() == lengths
        assert not batch["input_ids"][batch["attention_mask"] == 0].any()
        assert (batch["input_ids"].dtype, batch["labels"].dtype) == (torch.int64, labels)
        model = MODELS[task.model](KernelformerConfig(attention="elu", **task.settings(), **MODEL))
        assert torch.isfinite(model(**batch).loss)
    with pytest.raises(IndexError, match="from 0 to"):
        data[len(data)]


def test_models_are_described_without_data():
    assert make_task("sentences", labels=["no", "yes", "maybe"]).settings() == {
        "vocab_size": 8000,
        "max_position_embeddings": 128,
        "num_labels": 3,
        "pad_token_id": 0,
    }
    assert make_task("sentences", kind="bytes", labels=1).settings()["vocab_size"] == BYTE_TOKENS == 262
    assert make_task("masked").settings() == {"vocab_size": 8000, "max_position_embeddings": 512, "pad_token_id": 0}
    for name in ("sentences", "masked"):
        with pytest.raises(ValueError, match="this task needs data, got None"):
            make_task(name).split("train")
        with pytest.raises(ValueError, match="unknown split 'dev'"):
            make_task(name).split("dev")


def test_limits_take_samples_from_everywhere(tmp_path):
    rows = [{"text": f"number {i}", "label": int(i >= 100)} for i in range(200)]
    for split in ("train", "validation_matched", "test"):
        write_rows(tmp_path / "d" / f"{split}.jsonl", rows)
    task = make_task("sentences", data=tmp_path / "d", train_samples=10, validation_samples=4, kind="bytes")
    assert [x["labels"] for x in task.split("train").__getitems__(range(10))] == [0] * 5 + [1] * 5
    texts = [task.vocabulary().decode(task.split("validation")[i]["input_ids"]) for i in range(4)]
    assert texts == ["number 0", "number 50", "number 100", "number 150"]
    assert len(task.split("test")) == 200


def test_tokens_are_kept_and_damaged_ones_named(tmp_path, monkeypatch):
    first = sentences(tmp_path, other="other").split("train")
    monkeypatch.setattr(Vocabulary, "encode_batch", lambda *_: pytest.fail("encoded again"))
    for options in ({}, {"length": 32}):
        again = sentences(tmp_path, other="other", **options).split("train")
        assert again[5]["input_ids"][:10].tolist() == first[5]["input_ids"][:10].tolist()
    files = list((tmp_path / "xdg" / "kernelformer").glob("tokens-*.npz"))
    assert len(files) == 2
    arrays = dict(np.load(files[0]))
    for change, message in [
        ({"tokens": arrays["tokens"] + np.uint16(300)}, "not from 0 to"),
        ({"tokens": arrays["tokens"][1:]}, "do not fit together"),
        ({"tokens": arrays["tokens"].astype(float)}, "its arrays are float64"),
    ]:
        for file in files:
            np.savez(file, **dict(np.load(file)) | change)
        with pytest.raises(ValueError, match=rf"tokens-\w+\.npz cannot be used.*{message}.*delete it"):
            sentences(tmp_path, other="other").split("train")
        for file in files:
            np.savez(file, **arrays)


def test_a_users_vocabulary_serves_sentences_and_counts_as_data(tmp_path):
    place = own_tokenizer(tmp_path / "own.json", ["[PAD]", "[CLS]", "[SEP]", "[MASK]"])
    rows = [{"text": "ka mi", "label": "a"}, {"text": "lo", "label": "b"}] * 20
    task = sentences(tmp_path, rows, tokenizer=place, vocab_size=None, labels=["a", "b"])
    assert task.settings()["vocab_size"] == 8
    assert task.split("train")[0]["input_ids"].tolist() == [1, 4, 6, 2]
    before = task.fingerprint()
    own_tokenizer(tmp_path / "own.json", ["[PAD]", "[CLS]", "[SEP]", "[MASK]", "[NEW]"])
    again = sentences(tmp_path, rows, tokenizer=place, vocab_size=None, labels=["a", "b"])
    assert again.fingerprint() != before
    assert again.split("train")[0]["input_ids"].tolist() == [1, 5, 7, 2]
    task.save_extra(tmp_path)
    assert load_vocabulary(str(tmp_path)).size == 8


def test_the_folder_of_a_run_is_a_vocabulary_whatever_a_recipe_says_of_letters(tmp_path):
    task = sentences(tmp_path, lowercase=True)
    (tmp_path / "run" / "model").mkdir(parents=True)
    task.save_extra(tmp_path / "run" / "model")
    for place in (tmp_path / "run", tmp_path / "run" / "model"):
        for lowercase in (True, False):
            again = sentences(tmp_path, tokenizer=str(place), lowercase=lowercase)
            assert again.vocabulary().fingerprint() == task.vocabulary().fingerprint()
            assert again.split("train")[0]["input_ids"].tolist() == task.split("train")[0]["input_ids"].tolist()
    assert "run" not in again.fingerprint()


def test_tokens_of_sentences_are_kept_for_the_vocabulary_itself(tmp_path, monkeypatch):
    first = sentences(tmp_path).split("train")[0]["input_ids"].tolist()
    for file in (tmp_path / "xdg").rglob("vocabulary-*"):
        file.unlink()
    monkeypatch.setattr(tokenization, "_FORMAT", 99)
    pairs = tokenization._byte_pairs
    monkeypatch.setattr(tokenization, "_byte_pairs", lambda texts, size, low: pairs(["xyz"] * 9, size, low))
    again = sentences(tmp_path)
    text = again.source.rows("train")["text"][0]
    assert again.split("train")[0]["input_ids"][1:-1].tolist() == again.vocabulary().encode(text)[:62].tolist()
    assert again.split("train")[0]["input_ids"].tolist() != first


def test_a_second_sentence_may_be_blank_and_the_first_may_not(tmp_path):
    rows = sentence_rows(40)
    rows[0] = {**rows[0], "other": ""}
    task = sentences(tmp_path, rows, other="other", validation_share=0, test_share=0)
    words = task.vocabulary()
    want = [words.bos, *words.encode(rows[0]["text"]), words.sep, words.eos]
    assert task.split("train")[0]["input_ids"].tolist() == want
    assert task.remarks() == []
    for bad in ({**rows[0], "text": ""}, {**rows[0], "other": None}):
        with pytest.raises(ValueError, match=r"line 41: (text|other) must be a text that is not empty"):
            sentences(tmp_path, [*rows, bad], other="other").split("train")


def test_another_split_can_be_the_validation_split(tmp_path, monkeypatch):
    splits = ("train", "validation_matched", "validation_mismatched")
    rows = {split: [{"text": split, "label": i % 2} for i in range(20)] for split in splits}
    for split in splits:
        write_rows(tmp_path / "d" / f"{split}.jsonl", rows[split])
    monkeypatch.setattr(sources, "hub", lambda _: {split: Dataset.from_list(rows[split]) for split in splits})
    for place in (tmp_path / "d", "hub:nyu-mll/glue:mnli"):
        for chosen, want in ((None, "matched"), ("validation_mismatched", "mismatched")):
            found = make_task("sentences", data=place, kind="bytes", validation_split=chosen)
            assert set(found.source.rows("train")["text"]) == {"train"}
            assert len(found.split("train")) == 20
            assert set(found.source.rows("validation")["text"]) == {f"validation_{want}"}
        with pytest.raises(ValueError, match=r"has no 'validation_x', found .*; name another split"):
            make_task("sentences", data=place, kind="bytes", validation_split="validation_x").split("train")
    with pytest.raises(ValueError, match=r"validation_split is a split of a folder or data set, got 'x' and the file"):
        sentences(tmp_path, validation_split="x")


def test_numbers_that_single_precision_cannot_hold_are_bad(tmp_path):
    rows = [{"text": "ka lo", "label": x} for x in (0.5, -3e38, 1e300, "-1e39")]
    with pytest.raises(ValueError, match=r"line 3: label must be a number that single precision can hold, got 1e\+300"):
        sentences(tmp_path, rows, labels=1).split("train")
    task = sentences(tmp_path, rows, labels=1, skip_bad=True, validation_share=0, test_share=0)
    assert np.isfinite(task.split("train").labels).all()
    assert "left out 2 of 4 rows" in task.remarks()[0]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"text": "ka", "label": 2}, "label must be an integer from 0 to 1, got 2"),
        ({"text": "ka", "label": -1}, "label must be an integer from 0 to 1, got -1"),
        ({"text": " ", "label": 0}, "text must be a text that is not empty"),
        ({"text": "\ud800", "label": 0}, "text is not UTF-8"),
        ({"text": "ka"}, "it has no label, found text"),
    ],
)
def test_a_bad_row_is_named_or_left_out_with_a_count(tmp_path, row, reason):
    rows = sentence_rows(40)
    rows.insert(4, row)
    with pytest.raises(ValueError, match=rf"rows\.jsonl, line 5: {reason}.*skip_bad=True"):
        sentences(tmp_path, rows).split("train")
    task = sentences(tmp_path, rows, skip_bad=True)
    task.split("train")
    assert re.search(rf"left out 1 of 41 rows of .*line 5: {reason}", task.remarks()[0])


def test_rows_that_do_not_fit_are_refused(tmp_path):
    with pytest.raises(ValueError, match="has no column 'sentence', found text, other, label"):
        sentences(tmp_path, text="sentence").split("train")
    with pytest.raises(ValueError, match="label must be a finite number, got 'much'"):
        sentences(tmp_path, [{"text": "ka", "label": "much"}], labels=1).split("train")
    with pytest.raises(ValueError, match=r"the validation split of .* is empty"):
        sentences(tmp_path, validation_share=0).split("validation")
    (tmp_path / "x.tsv").write_bytes(b"text\tlabel\nk\xe4\t1\n")
    with pytest.raises(ValueError, match=r"x\.tsv.*line 2.*not UTF-8"):
        make_task("sentences", data=tmp_path / "x.tsv").split("train")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"other": "text"}, "columns must differ, got text='text', other='text' and label='label'"),
        ({"labels": 0}, "labels must be an integer of at least 1, got 0"),
        ({"labels": ["a", "a"]}, "different names"),
        ({"glue": "bleu"}, "unknown metric, by option glue, 'bleu'; choose from accuracy"),
        (
            {"glue": "f1", "labels": 3},
            r"glue='f1' is not a metric for labels=3 \(classes\); choose from accuracy, matt",
        ),
        ({"glue": "accuracy", "labels": 1}, r"labels=1 \(numbers\); choose from pearson, spearman"),
        ({"length": 2}, "length must be an integer of at least 3, got 2"),
        ({"length": 4, "other": "b"}, "length must be an integer of at least 5, got 4"),
        ({"vocab_size": 100}, "vocab_size must be an integer of at least 262, got 100"),
        ({"kind": "words"}, "unknown kind of vocabulary 'words'; .*choose from bpe, bytes, wordpiece"),
        ({"lowercase": 1}, "lowercase must be True or False, got 1"),
        ({"train_samples": 0}, "train_samples must be an integer of at least 1, got 0"),
        ({"data": "nowhere"}, "there is no file or folder nowhere"),
        ({"tokenizer": "nowhere"}, "there is no file nowhere"),
    ],
)
def test_bad_options_of_sentences_are_refused_before_anything_is_read(options, message):
    with pytest.raises(ValueError, match=message):
        make_task("sentences", **options)


def test_the_tasks_of_glue_are_there_by_name():
    assert set(GLUE) == {"cola", "sst2", "mrpc", "qqp", "stsb", "mnli", "qnli", "rte", "wnli"}
    for name, glue in GLUE.items():
        task = make_task("sentences", **glue.options)
        assert task.source.location == f"hub:nyu-mll/glue:{name}"
        assert task.metric == glue.metric
        labels = np.array([0.0, 1.0, 1.0])
        assert task.metric in task.score(Outcome(1.0, predictions=labels, labels=labels))
    assert Sentences.metric == "accuracy"


def test_scores_of_classes_are_those_of_their_definitions():
    rng = np.random.default_rng(0)
    y = rng.integers(0, 2, 200)
    x = np.where(rng.random(200) < 0.7, y, 1 - y)
    tp, tn, fp, fn = (int(((x == a) & (y == b)).sum()) for a, b in ((1, 1), (0, 0), (1, 0), (0, 1)))
    precision, recall = tp / (tp + fp), tp / (tp + fn)
    found = make_task("sentences").score(Outcome(1.0, predictions=x, labels=y))
    assert found["accuracy"] == (tp + tn) / 200
    assert found["f1"] == pytest.approx(2 * precision * recall / (precision + recall), rel=1e-12)
    below = math.sqrt((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn))
    assert found["matthews"] == pytest.approx((tp * tn - fp * fn) / below, rel=1e-12)
    assert found["matthews"] == pytest.approx(pearson(x, y), rel=1e-12)
    # Of more classes: the covariance of indicators, summed over the classes.
    y, x = rng.integers(0, 4, 300), rng.integers(0, 4, 300)
    x[:150] = y[:150]
    a, b = (np.eye(4)[z] - np.eye(4)[z].mean(0) for z in (x, y))
    assert matthews(x, y) == pytest.approx((a * b).sum() / math.sqrt((a**2).sum() * (b**2).sum()), rel=1e-12)
    assert "f1" not in make_task("sentences", labels=4).score(Outcome(1.0, predictions=x, labels=y))
    same = np.zeros(5, int)
    assert (f1(same, same), matthews(same, same), matthews(same, np.array([0, 1, 0, 1, 0]))) == (0.0, 0.0, 0.0)


def test_scores_of_numbers_are_those_of_their_definitions():
    rng = np.random.default_rng(1)
    y = rng.integers(0, 6, 40) / 2  # many ties
    x = (y + rng.normal(size=40)).astype(np.float32)
    found = make_task("sentences", labels=1).score(Outcome(1.0, predictions=x, labels=y))
    mx, my = x.astype(float).mean(), y.mean()
    above = sum((a - mx) * (b - my) for a, b in zip(x.astype(float), y, strict=True))
    below = math.sqrt(sum((a - mx) ** 2 for a in x.astype(float)) * sum((b - my) ** 2 for b in y))
    assert found["pearson"] == pytest.approx(above / below, rel=1e-9)
    places = [[sum(b < a for b in z) + (sum(b == a for b in z) + 1) / 2 for a in z] for z in (x, y)]
    assert ranks(y).tolist() == places[1]
    assert found["spearman"] == pytest.approx(np.corrcoef(places[0], places[1])[0, 1], rel=1e-9)
    assert ranks(np.array([3.0, 1.0, 3.0, 2.0])).tolist() == [3.5, 1.0, 3.5, 2.0]
    assert spearman(y, np.exp(y)) == pytest.approx(1)
    assert pearson(x, -2 * x + 1) == pytest.approx(-1)
    assert pearson(1e-200 * y, y) == pytest.approx(1)
    assert pearson(np.full(3, 0.1), np.arange(3)) == spearman(np.full(3, 0.1), np.arange(3)) == 0
    with pytest.raises(ValueError, match=r"pearson needs predictions \(N\) and labels \(N\), got None and \(40,\)"):
        make_task("sentences", labels=1).score(Outcome(1.0, labels=y))


def test_the_most_frequent_class_is_a_baseline(tmp_path):
    rows = [{"text": f"t {i}", "label": int(i % 4 > 0)} for i in range(200)]
    task = sentences(tmp_path, rows)
    labels = task.source.rows("validation")["label"]
    assert task.baselines("validation")["most frequent class"]["accuracy"] == np.mean(labels)
    assert sentences(tmp_path, rows, labels=1).baselines("validation") == {}


# Masked text


def plain(tmp_path, text=None):
    path = tmp_path / "plain.txt"
    path.write_text("\n".join(prose(3000)) if text is None else text)
    return path


def masked(tmp_path, text=None, **options):
    return make_task("masked", **{"data": plain(tmp_path, text), "length": 64, "vocab_size": 400} | options)


def shown(data, count):
    """Inputs, labels, and the tokens that are in the text, each (count, L)."""
    samples = data.__getitems__(range(count))
    ids, labels = (torch.stack([x[name] for x in samples]).numpy() for name in ("input_ids", "labels"))
    return ids, labels, data.windows.gather(np.arange(count))


@pytest.mark.parametrize(("split", "share"), [("train", 0.15), ("train", 0.4), ("validation", 0.15)])
def test_shares_of_hidden_tokens_are_those_asked_for(tmp_path, split, share):
    task = masked(tmp_path, mask_share=share, validation_share=0.4)
    ids, labels, text = shown(task.split(split), 400 if split == "train" else len(task.split(split)))
    chosen = labels != IGNORED
    assert np.array_equal(labels[chosen], text[chosen])
    assert np.array_equal(ids[~chosen], text[~chosen])
    words = task.vocabulary()
    size = len(words.ordinary())
    seen, wanted = ids[chosen], text[chosen]

    def is_share(found, want, of):
        assert abs(found.sum() / of - want) < SIGMAS * math.sqrt(want * (1 - want) / of), (found.sum() / of, want)

    is_share(chosen, share, chosen.size)
    is_share(seen == words.mask, 0.8, len(seen))
    is_share(seen == wanted, 0.1 + 0.1 / size, len(seen))
    other = seen[(seen != words.mask) & (seen != wanted)]
    is_share(other < np.median(words.ordinary()), 0.5, len(other))
    assert np.isin(other, words.ordinary()).all()
    per_place = chosen.mean(0)
    assert np.abs(per_place - share).max() < SIGMAS * math.sqrt(share * (1 - share) / len(chosen))
    # One place says nothing of the next, and one sample nothing of the next.
    for a, b in ((chosen[:, 1:], chosen[:, :-1]), (chosen[1:], chosen[:-1])):
        is_share(a & b, share**2, a.size)


def test_a_masked_sample_is_a_function_of_seed_and_index(tmp_path):
    task = masked(tmp_path)
    data, other = task.split("train"), masked(tmp_path, seed=1).split("train")
    together = data.__getitems__([5, 900_000, 5])
    assert len(data) == 1_000_000
    for i, sample in zip([5, 900_000, 5], together, strict=True):
        assert all(torch.equal(data[i][name], sample[name]) for name in ("input_ids", "labels"))
    assert not torch.equal(data[5]["labels"], other[5]["labels"])
    again, first = masked(tmp_path).split("validation"), task.split("validation")
    assert all(torch.equal(first[i]["input_ids"], again[i]["input_ids"]) for i in range(len(first)))
    assert not np.array_equal(first.batch(np.array([0]))[1] == IGNORED, data.batch(np.array([0]))[1] == IGNORED)
    with pytest.raises(IndexError, match="from 0 to 999999"):
        data[1_000_000]


def test_each_window_has_a_label_and_ends_of_documents_have_none(tmp_path):
    place = str(write_texts(tmp_path / "rows.jsonl", prose(500, words=2)))
    task = make_task("masked", data=place, length=8, vocab_size=300, mask_share=0.01)
    ids, labels, text = shown(task.split("train"), 2000)
    counts = (labels != IGNORED).sum(1)
    assert counts.min() == 1
    assert (counts == 1).mean() > 0.9
    eos = task.vocabulary().eos
    assert (text == eos).any()
    assert (ids[text == eos] == eos).all()
    assert not (labels == eos).any()


def test_validation_windows_are_the_text_side_by_side(tmp_path):
    task = masked(tmp_path)
    data = task.split("validation")
    _, _, text = shown(data, len(data))
    assert np.array_equal(text.ravel(), task.tokens("validation")[: text.size])
    assert len(masked(tmp_path, validation_samples=3).split("validation")) == 3
    batch = task.collate(data.__getitems__(range(4)))
    assert {name: (tuple(x.shape), x.dtype) for name, x in batch.items()} == {
        "input_ids": ((4, 64), torch.int64),
        "labels": ((4, 64), torch.int64),
    }
    model = MODELS[task.model](KernelformerConfig(attention="elu", **task.settings(), **MODEL))
    assert torch.isfinite(model(**batch).loss)


@pytest.mark.parametrize("kind", ["bpe", "bytes"])
@pytest.mark.parametrize("text", ["ä中\U0001f600b" * 5000, "kä\n" * 9000, "x" * 40_000])
def test_splits_of_a_file_give_its_text_whatever_characters_are_on_the_borders(tmp_path, kind, text):
    for validation in (0.1, 0.10001, 0.10003):
        task = masked(tmp_path, text, kind=kind, vocab_size=None, validation_share=validation)
        parts = [task.vocabulary().decode(task.tokens(name)) for name in ("train", "validation", "test")]
        assert "".join(parts) == text
        assert all(parts)


def test_files_of_a_folder_are_documents_of_one_split(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    for i, text in enumerate(prose(60)):
        (folder / f"{i}.txt").write_text(text)
    (folder / "note.md").write_text("\x00")
    task = make_task("masked", data=folder, length=4, vocab_size=300, validation_share=0.3, test_share=0.2)
    words, found = task.vocabulary(), []
    for split in ("train", "validation", "test"):
        tokens = task.tokens(split).tolist()
        assert tokens[-1] == words.eos
        parts = [list(x) for end, x in itertools.groupby(tokens, lambda x: x == words.eos) if not end]
        found += [words.decode(x) for x in parts]
    assert sorted(found) == sorted(prose(60))
    with pytest.raises(ValueError, match=r"note\.md is not text"):
        make_task("masked", data=folder, pattern="**/*", validation_share=0, test_share=0).split("train")
    (folder / "1.txt").write_bytes(b"ab \xff")
    with pytest.raises(ValueError, match=r"1\.txt is not UTF-8: invalid start byte at byte 3"):
        make_task("masked", data=folder, validation_share=0, test_share=0).split("train")


def test_masked_text_is_kept_and_told_apart(tmp_path, monkeypatch):
    first = masked(tmp_path)
    before = first.tokens("train")
    print_ = first.fingerprint()
    monkeypatch.setattr(Vocabulary, "encode_batch", lambda *_: pytest.fail("encoded again"))
    assert np.array_equal(masked(tmp_path, length=32, seed=3).tokens("train"), before)
    with pytest.raises(pytest.fail.Exception, match="encoded again"):
        masked(tmp_path, "\n".join(prose(3000, seed=2))).tokens("train")
    assert masked(tmp_path, "\n".join(prose(3000, seed=2))).fingerprint() != print_


def test_masked_scores_and_their_baseline(tmp_path):
    task = masked(tmp_path)
    assert task.score(Outcome(math.log(8), 0.25)) == pytest.approx(
        {"perplexity": 8, "accuracy": 0.25, "bits_per_token": 3}
    )
    assert task.score(Outcome(1e4, 0.0))["perplexity"] == math.inf
    data = task.split("validation")
    counts = np.bincount(task.tokens("train"), minlength=task.vocabulary().size)[6:] + 1
    labels = np.concatenate([x["labels"] for x in data.__getitems__(range(len(data)))])
    labels = labels[labels != IGNORED] - 6
    loss = -np.mean([math.log(counts[x] / counts.sum()) for x in labels])
    want = {"perplexity": math.exp(loss), "accuracy": (labels == counts.argmax()).mean()}
    found = task.baselines("validation")["frequency of tokens"]
    assert {name: found[name] for name in want} == pytest.approx(want)


def test_bad_input_of_masked_text_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"the validation split of .*plain\.txt has \d+ tokens, less than .*length=64"):
        masked(tmp_path, "ka lo mi " * 100, kind="bytes", vocab_size=None).split("validation")
    (tmp_path / "bad.txt").write_bytes(b"x" * 50_000 + b"\xff" + b"y" * 50_000)
    with pytest.raises(ValueError, match=r"bad\.txt is not UTF-8: invalid start byte at byte 50000; save it as UTF-8"):
        make_task("masked", data=tmp_path / "bad.txt").split("train")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"empty has no files that match pattern='\*\*/\*\.txt'"):
        make_task("masked", data=tmp_path / "empty").split("train")
    place = str(write_rows(tmp_path / "rows.jsonl", [{"body": "ka"}]))
    with pytest.raises(ValueError, match="has no column 'text', found body"):
        make_task("masked", data=place).split("train")
    with pytest.raises(ValueError, match="pattern chooses files of a folder"):
        make_task("masked", data=place, pattern="*")
    for options, message in [
        ({"mask_share": 0}, "mask_share must be a finite number above 0, got 0"),
        ({"mask_share": 1}, "mask_share must be below 1.*got 1"),
        ({"length": 0}, "length must be an integer of at least 1, got 0"),
        ({"samples": 0}, "samples must be an integer of at least 1"),
        ({"test_samples": 1.5}, "test_samples must be an integer of at least 1"),
        ({"validation_share": 0.6, "test_share": 0.5}, "must leave something to train on"),
        ({"data": "nowhere"}, "there is no file or folder nowhere"),
        ({"seed": -1}, "seed must be an integer of at least 0"),
    ]:
        with pytest.raises(ValueError, match=message):
            make_task("masked", **options)
    rows = [{"text": x} for x in prose(300)]
    rows[3] = {"text": 5}
    place = str(write_rows(tmp_path / "rows.jsonl", rows))
    task = make_task("masked", data=place, skip_bad=True, length=16, vocab_size=300)
    task.split("train")
    assert "left out 1 of 300 rows" in task.remarks()[0]
