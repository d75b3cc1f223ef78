"""Translation: pairs from every place, vocabulary, batches, beam search by its definition, BLEU, runs alone."""

from __future__ import annotations

import json
import math
import os
import re
import shutil

import numpy as np
import pytest
import sacrebleu
import torch
import typer
from torch.utils.data import DataLoader, Subset
from typer.testing import CliRunner

from kernelformer.models import KernelformerConfig, KernelformerForConditionalGeneration
from kernelformer_lab.cli.translate import translate
from kernelformer_lab.data.tokenization import BOS, EOS, PAD, SPECIAL
from kernelformer_lab.tasks import make_task
from kernelformer_lab.tasks.base import Outcome
from kernelformer_lab.tasks.translation import SentenceCounts
from kernelformer_lab.training import Run, train
from kernelformer_lab.training.checkpoints import metrics
from kernelformer_lab.training.evaluation import evaluate
from kernelformer_lab.translation import load_translator, translate_texts
from samples import write_rows

WORDS = {"the": "die", "cat": "Katze", "sees": "sieht", "a": "eine", "Mouse": "Maus", "and": "und", "sleeps": "schläft"}
TINY = {"vocab_size": 330, "length": 64}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    torch.set_num_threads(1)  # sizes are tiny: a second thread would only be waited for


def pairs(count, seed=0, words=(2, 7)):
    rng = np.random.default_rng(seed)
    chosen = [rng.choice(list(WORDS), rng.integers(*words)) for _ in range(count)]
    return [{"en": " ".join(x), "de": " ".join(WORDS[w] for w in x)} for x in chosen]


def write_plain(path, texts, end="\n"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes("".join(text + end for text in texts).encode())


@pytest.fixture
def folder(tmp_path):
    for seed, (name, count) in enumerate([("train", 60), ("validation", 8), ("test", 12)]):
        write_rows(tmp_path / "data" / f"{name}.jsonl", pairs(count, seed))
    return tmp_path / "data"


def same(one, other):
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        assert torch.equal(a["input_ids"], b["input_ids"])
        assert torch.equal(a["labels"], b["labels"])
        assert a["reference"] == b["reference"]


def test_a_sample_is_both_texts_as_tokens_with_their_ends(folder):
    task = make_task("translation", data=folder, **TINY)
    words = task.vocabulary()
    for split, seed, count in [("train", 0, 60), ("validation", 1, 8), ("test", 2, 12)]:
        for sample, row in zip(task.split(split), pairs(count, seed), strict=True):
            assert sample["input_ids"].dtype == sample["labels"].dtype == torch.int64
            assert sample["input_ids"][-1] == sample["labels"][-1] == EOS
            assert words.decode(sample["input_ids"][:-1]) == row["en"]
            assert words.decode(sample["labels"][:-1]) == row["de"] == sample["reference"]
            assert not {PAD, BOS, EOS} & {*sample["input_ids"][:-1].tolist(), *sample["labels"][:-1].tolist()}
    assert task.remarks() == []
    with pytest.raises(IndexError, match=r"from 0 to 11, got \[12\]"):
        task.split("test")[12]


def test_a_vocabulary_is_of_both_languages_of_the_training_split_alone(folder):
    def vocabulary(**options):
        return make_task("translation", data=folder, **{**TINY, **options}).vocabulary().tokenizer.to_str()

    before, tokens = vocabulary(), make_task("translation", data=folder, **TINY).vocabulary().tokenizer.get_vocab()
    assert {"\u0120cat", "\u0120sees", "\u0120Katze", "\u0120sieht"} <= set(tokens)  # blank and word
    assert vocabulary(source="de", target="en") == before
    rows = pairs(8, 1)
    write_rows(folder / "test.jsonl", [{"en": "dog dog dog dog", "de": "Hund Hund Hund Hund"} for _ in range(500)])
    assert vocabulary() == before
    write_rows(folder / "train.jsonl", [{"en": "dog dog dog dog", "de": "Hund Hund Hund Hund"}, *rows])
    assert vocabulary() != before


def test_two_plain_files_are_the_same_as_a_table_of_two_columns(folder, tmp_path):
    plain = tmp_path / "plain"
    for split, end in [("train", "\n"), ("validation", "\r\n"), ("test", "\n")]:
        rows = [json.loads(line) for line in (folder / f"{split}.jsonl").read_text().splitlines()]
        for side in ("en", "de"):
            texts = [row[side] for row in rows]
            texts[3:3] = ["", " "]  # blank on both sides
            write_plain(plain / f"{split}.{side}", texts, end)
    with (plain / "train.de").open("rb+") as file:
        file.truncate(len((plain / "train.de").read_bytes()) - 1)  # the last line does not end
    task, want = (make_task("translation", data=x, **TINY) for x in (plain, folder))
    for split in ("train", "validation", "test"):
        same(task.split(split), want.split(split))
    before = task.fingerprint()
    assert "test.en, test.de, train.en" in before
    write_plain(plain / "test.de", ["x"] * 14)
    assert make_task("translation", data=plain, **TINY).fingerprint() != before


def test_a_line_ends_at_a_line_feed_alone(tmp_path):
    texts = ["one\u2028two", "three\x0bfour", "five\x85six"]
    write_plain(tmp_path / "d" / "test.en", texts)
    write_plain(tmp_path / "d" / "test.de", ["\ufeffeins", "zwei", "drei"])
    task = make_task("translation", data=tmp_path / "d", kind="bytes")
    assert [x["reference"] for x in task.split("test")] == ["eins", "zwei", "drei"]
    assert task.vocabulary().decode(task.split("test")[0]["input_ids"]) == texts[0]


def test_plain_files_that_do_not_fit_are_named(tmp_path):
    place = tmp_path / "d"
    write_plain(place / "train.en", ["a", "b", "c"])
    with pytest.raises(ValueError, match=r"has train\.en but no train\.de"):
        make_task("translation", data=place).split("train")
    write_plain(place / "train.de", ["a", "b"])
    named = re.escape(f"{place / 'train.en'} has 3 lines and {place / 'train.de'} has 2; line i")
    with pytest.raises(ValueError, match=named):
        make_task("translation", data=place).split("train")
    write_plain(place / "train.de", ["a", "", "c"])
    with pytest.raises(ValueError, match=r"train\.en and train\.de, line 2: de must be a text that is not empty"):
        make_task("translation", data=place).split("train")
    task = make_task("translation", data=place, skip_bad=True, validation_share=0, kind="bytes")
    assert [x["reference"] for x in task.split("train")] == ["a", "c"]
    assert [x.split(" as bad")[0] for x in task.remarks()] == [
        f"left out 1 of 3 rows of {place / 'train.en'} and train.de"
    ]
    (place / "train.de").write_bytes(b"a\nb\n\xffc\n")
    with pytest.raises(ValueError, match=r"line 3: not UTF-8: invalid start byte"):
        make_task("translation", data=place).split("train")
    write_rows(place / "test.jsonl", pairs(2))
    with pytest.raises(ValueError, match=r"has plain files, such as train\.en, and test\.jsonl; keep one kind"):
        make_task("translation", data=place).split("test")


def test_the_hubs_column_of_translations_counts_as_two(folder, tmp_path):
    nested = tmp_path / "nested"
    for path in folder.iterdir():
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        write_rows(nested / path.name, [{"id": i, "translation": row} for i, row in enumerate(rows)])
    want = make_task("translation", data=folder, **TINY)
    for place in (nested, f"hub:{nested}"):
        task = make_task("translation", data=place, **TINY)
        for split in ("train", "test"):
            same(task.split(split), want.split(split))
        with pytest.raises(ValueError, match="no column 'fr', found en, de"):
            make_task("translation", data=place, target="fr").split("test")
    same(make_task("translation", data=f"hub:{folder}", **TINY).split("test"), want.split("test"))


def test_bad_rows_and_columns_are_named(folder):
    write_rows(folder / "test.jsonl", [{"en": "a", "de": "b"}, {"en": "a", "de": ["b"]}, {"en": "c", "de": "d"}])
    with pytest.raises(ValueError, match=r"test\.jsonl, line 2: de must be a text"):
        make_task("translation", data=folder, **TINY).split("test")
    task = make_task("translation", data=folder, skip_bad=True, **TINY)
    assert len(task.split("test")) == 2
    assert "left out 1 of 3 rows" in task.remarks()[0]
    with pytest.raises(ValueError, match=r"no column 'fr', found en, de; a row must have \"en\" and \"fr\""):
        make_task("translation", data=folder, target="fr").split("train")
    (folder / "test.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"the test split of .* is empty"):
        make_task("translation", data=folder, **TINY).split("test")


def test_long_pairs_are_left_out_of_training_and_cut_elsewhere(folder):
    long = {"en": "the cat " * 30, "de": "die Katze " * 40}
    for split in ("train", "test"):
        with (folder / f"{split}.jsonl").open("a") as file:
            file.write(json.dumps(long) + "\n")
    task = make_task("translation", data=folder, vocab_size=300, length=20)
    assert len(task.split("train")) == 60
    last = task.split("test")[12]
    assert len(last["input_ids"]) == len(last["labels"]) == 20
    assert last["input_ids"][-1] == EOS
    assert last["labels"][-1] != EOS  # the translation goes on
    assert last["reference"] == long["de"].strip()
    assert long["en"].startswith(task.vocabulary().decode(last["input_ids"][:-1]))
    assert task.remarks() == [
        "1 of 61 pairs of the train split have more than 20 tokens on either side and were left out",
        "1 of 13 pairs of the test split have more than 20 tokens on either side and were cut, but not the references "
        "of BLEU",
    ]
    with pytest.raises(ValueError, match=r"all 61 training pairs .* more than length=2 tokens.*give a larger length"):
        make_task("translation", data=folder, vocab_size=300, length=2).split("train")


def test_limits_take_pairs_that_are_spread_evenly_also_for_vocabulary_and_baseline(folder):
    rows = pairs(60)
    limits = {"train_samples": 4, "validation_samples": 99, "test_samples": 5}
    task = make_task("translation", data=folder, **limits, **TINY)
    assert [x["reference"] for x in task.split("train")] == [rows[i]["de"] for i in (0, 15, 30, 45)]
    assert [x["reference"] for x in task.split("test")] == [pairs(12, 2)[i]["de"] for i in (0, 2, 4, 7, 9)]
    assert len(task.split("validation")) == 8
    write_rows(folder.parent / "few" / "train.jsonl", [rows[i] for i in (0, 15, 30, 45)])
    few = make_task("translation", data=folder.parent / "few", validation_share=0, **TINY)
    every = make_task("translation", data=folder, **TINY)
    mine, theirs, full = (x.vocabulary().tokenizer.to_str() for x in (task, few, every))  # also with one cache
    assert mine == theirs != full
    task.baselines("test")
    assert task.remarks()[0].startswith("BLEU by sacrebleu of 5 sentences")
    alone = make_task("translation", data=folder / "train.jsonl", **limits, **TINY)
    kept = make_task("translation", data=folder / "train.jsonl", **TINY).pairs.rows("test")["de"]
    assert {x["reference"] for x in alone.split("test")} <= set(kept)  # limits come after the division


def test_a_length_is_that_of_the_text_and_its_end(tmp_path):
    write_rows(tmp_path / "d" / "train.jsonl", [{"en": "abcd", "de": "abc"}, {"en": "abc", "de": "abc"}] * 20)
    task = make_task("translation", data=tmp_path / "d", kind="bytes", length=4, validation_share=0)
    assert len(task.split("train")) == 20
    assert {len(x["labels"]) for x in task.split("train")} == {4}


def test_a_batch_is_padded_and_says_where(folder):
    task = make_task("translation", data=folder, **TINY)
    samples = task.split("train").__getitems__(range(10))
    batch = task.collate(samples)
    assert {x.dtype for x in batch.values()} == {torch.int64}
    assert batch["input_ids"].shape == batch["attention_mask"].shape
    assert all(x.shape[1] % 8 == 0 for x in batch.values())
    for i, sample in enumerate(samples):
        n, m = len(sample["input_ids"]), len(sample["labels"])
        assert torch.equal(batch["input_ids"][i, :n], sample["input_ids"])
        assert batch["input_ids"][i, n:].eq(PAD).all()
        assert batch["attention_mask"][i].tolist() == [1] * n + [0] * (batch["attention_mask"].shape[1] - n)
        assert torch.equal(batch["labels"][i, :m], sample["labels"])
        assert batch["labels"][i, m:].eq(-100).all()
    odd = make_task("translation", data=folder, vocab_size=300, length=21)
    full = {"input_ids": torch.full((21,), 9), "labels": torch.full((21,), 9)}
    assert odd.collate([full])["input_ids"].shape == (1, 21)  # the model has no more positions
    loader = DataLoader(task.split("validation"), batch_size=5, collate_fn=task.collate)
    assert [len(x["labels"]) for x in loader] == [5, 3]


def test_settings_need_no_data():
    task = make_task("translation")
    assert task.settings() == {
        "vocab_size": 10_000,
        "max_position_embeddings": 256,
        "pad_token_id": PAD,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "decoder_start_token_id": BOS,
    }
    assert make_task("translation", kind="bytes").settings()["vocab_size"] == len(SPECIAL) + 256
    with pytest.raises(ValueError, match=r"needs data, got None; give .*train\.en and train\.de"):
        task.split("train")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"source": "de"}, "source and target must be different columns, got 'de' for both"),
        ({"target": ""}, "target must be the name of a column, such as 'en', got ''"),
        ({"length": 1}, "length must be an integer of at least 2, got 1"),
        ({"vocab_size": 100}, "vocab_size must be an integer of at least 262, got 100"),
        ({"kind": "words"}, "unknown kind of vocabulary 'words'; .*choose from bpe, bytes, wordpiece"),
        ({"test_samples": 0}, "test_samples must be an integer of at least 1, got 0"),
        ({"beams": 0}, "beams must be an integer of at least 1, got 0"),
        ({"length_penalty": 0}, "length_penalty must be a finite number above 0, got 0"),
        ({"bleu_samples": 0}, "bleu_samples must be an integer of at least 1, got 0"),
        ({"tokenizer": "no/such"}, "there is no file no/such"),
        ({"data": "no/such"}, "there is no file or folder no/such"),
        ({"skip_bad": "yes"}, "skip_bad must be True or False, got 'yes'"),
        ({"beam": 3}, "unknown option for task 'translation', 'beam'; did you mean 'beams'"),
    ],
)
def test_bad_options_are_refused_before_anything_is_read(options, message):
    with pytest.raises(ValueError, match=message):
        make_task("translation", **options)


def test_an_evaluation_gives_perplexity_and_accuracy_and_leaves_bleu_to_the_judge():
    task = make_task("translation")
    assert task.score(Outcome(math.log(7), 0.25)) == pytest.approx({"perplexity": 7.0, "accuracy": 0.25})
    assert task.score(Outcome(1e6, 0.0))["perplexity"] == math.inf


def make_model(task, attention, *, eos=0.0, seed=0, **settings):
    """Random weights, large enough that each source has its own translation; ``eos`` makes ends more likely."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    config = KernelformerConfig(
        **task.settings(), **sizes, attention=attention, tie_word_embeddings=False, initializer_range=0.4, **settings
    )
    model = KernelformerForConditionalGeneration(config).double().eval()
    with torch.no_grad():
        model.stack.norm.weight[0], model.stack.norm.bias[0] = 0.0, 1.0
        model.lm_head.weight[EOS, 0] += eos
    return model


@torch.no_grad()
def plain_search(task, model, source):
    """Beam search by its definition: whole forward passes of one sentence, without a cache and without padding."""
    vocabulary, limit, beams = task.vocabulary(), min(2 * len(source) + 10, task.length), task.beams
    never = sorted(set(range(task.vocabulary_size)) - {EOS, *vocabulary.ordinary().tolist()})
    running, finished = [(0.0, [BOS])], []
    while len(finished) < beams and running:
        found = []
        whole = torch.tensor([row for _, row in running])
        out = model(input_ids=source.expand(len(running), -1), decoder_input_ids=whole).logits[:, -1].log_softmax(-1)
        for (score, row), logits in zip(running, out, strict=True):
            logits[never] = -math.inf
            if len(row) == limit:
                logits[:] = -math.inf
                logits[EOS] = 0.0
            best = logits.topk(2 * beams)
            found += [(score + x, [*row, i]) for x, i in zip(*(y.tolist() for y in best), strict=True) if x > -math.inf]
        found = sorted(found, reverse=True)[: 2 * beams]
        finished += [(x / (len(row) - 1) ** task.length_penalty, row) for x, row in found[:beams] if row[-1] == EOS]
        running = [x for x in found if x[1][-1] != EOS][:beams]
    return max(finished)[1]


@pytest.mark.parametrize(
    ("attention", "beams"),
    [
        ("softmax", 4),
        ("favor+:num_features=16", 1),
        ("favor+:num_features=16", 4),
        ("nprf:num_features=16:relative=1d", 4),
        ("nprf:num_features=16:relative=1d:max_distance=4", 3),
    ],
)
def test_batches_of_any_size_give_the_translations_that_beam_search_of_one_sentence_defines(folder, attention, beams):
    task = make_task("translation", data=folder, beams=beams, vocab_size=300, length=18)
    model = make_model(task, attention, eos=3.6)
    sources = [x["input_ids"] for x in task.split("test")][:5]
    sources.append(torch.cat([sources[0][:-1], sources[2]])[-18:])  # as long as the model's positions
    assert len(sources[-1]) == 18
    want = [plain_search(task, model, x) for x in sources]
    lengths = [len(x) - 1 for x in want]
    assert len({tuple(x) for x in want}) > 3
    assert len(set(lengths)) > 2, lengths
    texts = [" ".join(task.vocabulary().decode(x[1:-1]).split()) for x in want]
    for batch_size in (1, 4):
        assert task.write(model, sources, batch_size) == texts
    rows = task._search(model, sources)
    assert [row[: row.index(EOS) + 1] for row in rows] == [x[1:] for x in want]


def test_a_translation_that_does_not_end_is_ended_at_its_own_limit(folder):
    task = make_task("translation", data=folder, beams=3, **TINY)
    model = make_model(task, "softmax", eos=-50.0)
    sources = [x["input_ids"] for x in task.split("test")][:4]
    rows = task._search(model, sources)
    assert [row.index(EOS) + 1 for row in rows] == [2 * len(x) + 10 for x in sources]
    assert len({len(x) for x in sources}) > 1
    assert not {x for row in rows for x in row[: row.index(EOS)]} & set(range(len(SPECIAL)))


class Reciter:
    """Writes the references of a split, as a model would: padded, whatever comes after the end."""

    device, training = torch.device("cpu"), True

    def __init__(self, samples):
        self.known = {tuple(x["input_ids"].tolist()): x["labels"].tolist() for x in samples}
        self.asked = 0

    def eval(self):
        self.training = False

    def train(self, mode):
        self.training = mode

    def generate(self, input_ids, attention_mask, **_):
        assert not torch.is_grad_enabled()
        assert not self.training
        self.asked += len(input_ids)
        rows = [
            self.known[tuple(ids[mask.bool()].tolist())] for ids, mask in zip(input_ids, attention_mask, strict=True)
        ]
        width = max(map(len, rows))
        return torch.tensor([[BOS, *row, *[EOS] * (width - len(row))] for row in rows])


def test_references_have_a_bleu_of_100_and_a_judge_says_how_it_was_made(folder):
    task = make_task("translation", data=folder, **TINY)
    data = task.split("test")
    model = Reciter(data)
    found = task.judge(model, data, 5)
    assert found == pytest.approx({"bleu": 100.0, "chrf": 100.0, "bleu_error": 0.0})
    assert model.training
    assert task.metric in found
    bleu = task.remarks()[0]
    assert bleu.startswith("BLEU by sacrebleu of 12 sentences: nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:")
    assert task.remarks()[1].startswith("chrF by sacrebleu of 12 sentences: nrefs:1|case:mixed|")
    some = make_task("translation", data=folder, bleu_samples=5, **TINY)
    model = Reciter(data)
    some.judge(model, some.split("test"), 2)
    assert model.asked == 5


def test_bleu_is_that_of_all_texts_together_as_they_were_written(folder):
    task = make_task("translation", data=folder, beams=2, **TINY)
    model = make_model(task, "favor+:num_features=16", eos=1.0, dropout=0.5)
    with torch.no_grad():  # half the words are right
        model.lm_head.weight[:] *= 0.1
    some = Subset(task.split("test"), range(1, 12, 2))
    written = task.write(model, [x["input_ids"] for x in some], 3)
    wanted = [row["de"] for row in pairs(12, 2)[1::2]]
    model.train()
    found = task.judge(model, some, 4)
    assert model.training
    assert all(x.requires_grad for x in model.parameters())
    assert found["bleu"] == pytest.approx(sacrebleu.corpus_bleu(written, [wanted]).score)
    assert found["chrf"] == pytest.approx(sacrebleu.corpus_chrf(written, [wanted]).score)
    value, parts = task.judged_deviations(model.eval(), some, 4)
    assert value == found["bleu"]
    assert found["bleu_error"] == pytest.approx(np.sqrt((parts**2).sum()))
    mixed = task._compared(["Die Katze sieht eine Maus"], ["die Katze sieht eine Maus"])
    small = make_task("translation", lowercase=True)
    assert small._compared(["Die Katze sieht eine Maus"], ["die Katze sieht eine Maus"])["bleu"] == pytest.approx(100)
    assert mixed["bleu"] < 90
    assert "case:lc" in small.remarks()[0]


def test_bleu_of_some_sentences_is_sacrebleus_of_them():
    gen = np.random.default_rng(0)
    words = np.array(["der", "die", "das", "Hund", "Katze", "sieht", "hat", ".", ",", "nicht"])
    wanted = [" ".join(gen.choice(words, gen.integers(1, 15))) for _ in range(60)]
    written = [" ".join(w if gen.random() < 0.7 else "Maus" for w in x.split()) for x in wanted]
    for lowercase in (False, True):
        counts = SentenceCounts(written, wanted, lowercase=lowercase)
        for chosen in (np.arange(60), np.array([3, 4, 50]), np.array([7])):
            some = [[side[i] for i in chosen] for side in (written, wanted)]
            want = sacrebleu.corpus_bleu(some[0], [some[1]], lowercase=lowercase).score
            assert counts.bleu(chosen) == pytest.approx(want, rel=1e-12)
    parts = make_task("translation")._deviations(written, wanted)
    without = [
        sacrebleu.corpus_bleu(written[:i] + written[i + 1 :], [wanted[:i] + wanted[i + 1 :]]).score for i in range(60)
    ]
    want = math.sqrt(59 / 60 * ((np.array(without) - np.mean(without)) ** 2).sum())  # one sentence left out each time
    assert np.sqrt((parts**2).sum()) == pytest.approx(want, rel=1e-6)


def test_bleu_of_nothing_right_and_of_nothing_written_is_certain():
    for written in (["x y z"] * 9, [""] * 9):
        counts = SentenceCounts(written, ["der Hund"] * 9)
        assert counts.bleu() == sacrebleu.corpus_bleu(written, [["der Hund"] * 9]).score
        assert not make_task("translation")._deviations(written, ["der Hund"] * 9).any()
    assert np.isnan(make_task("translation")._deviations(["der"], ["der"])).all()  # of one sentence nobody knows


def test_the_source_itself_is_a_baseline(folder):
    write_rows(folder / "test.jsonl", [{"en": "one 2 3 4 5 6", "de": "eins 2 3 4 5 6"}])
    found = make_task("translation", data=folder, **TINY).baselines("test")["the source itself"]
    assert found["bleu"] == pytest.approx(sacrebleu.corpus_bleu(["one 2 3 4 5 6"], [["eins 2 3 4 5 6"]]).score)


MODEL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


@pytest.fixture
def finished(folder, tmp_path):
    options = {**TINY, "data": str(folder), "beams": 2, "lowercase": True}
    run = Run("translation", "elu", task_options=options, model=MODEL, steps=2, batch_size=4, learning_rate=1e-2)
    result = train(run, tmp_path / "run", log=lambda _: None)
    assert result.metric == "bleu"
    assert 0 <= result.value <= 100
    assert {"chrf", "perplexity", "accuracy"} <= set(result.scores)
    want = make_task("translation", **options).vocabulary()
    shutil.rmtree(folder)
    shutil.rmtree(tmp_path / "xdg")
    return tmp_path / "run", want


def test_the_best_weights_are_those_of_the_smallest_loss_and_have_their_bleu(folder, tmp_path):
    options = {**TINY, "data": str(folder), "beams": 1}
    settings = {"steps": 4, "batch_size": 4, "learning_rate": 1.0, "eval_every": 1, "select": "best"}
    result = train(
        Run("translation", "elu", task_options=options, model=MODEL, **settings), tmp_path / "run", quiet=True
    )
    curve = {x["step"]: x["eval_loss"] for x in metrics(tmp_path / "run") if "eval_loss" in x}
    assert result.best_step == min(curve, key=curve.get) < 4
    assert result.loss == curve[result.best_step]
    assert result.value == pytest.approx(evaluate(tmp_path / "run")["bleu"])
    assert result.test["bleu"] == pytest.approx(evaluate(tmp_path / "run", split="test")["bleu"])
    assert math.isfinite(result.test_error)


def test_a_run_translates_without_its_data_and_without_the_cache(finished, tmp_path):
    run, vocabulary = finished
    translator = load_translator(run)
    text = "the cat sees a Mouse"
    assert translator.task.vocabulary().encode(text).tolist() == vocabulary.encode(text).tolist()
    texts = [text, "", "sleeps and " * 90, "a Mouse"]
    found = translate_texts(run, texts)
    assert found.cut == [2]
    assert found.texts[1] == ""
    assert all("\n" not in x for x in found.texts)
    assert [translate_texts(translator, [x], batch_size=1).texts[0] for x in texts] == found.texts
    assert not (tmp_path / "xdg").exists()
    assert load_translator(run, beams=1, length_penalty=0.5).task.beams == 1
    (run / "model" / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"model has no tokenizer\.json"):
        load_translator(run)


def test_the_command_writes_a_line_for_each_line(finished, tmp_path):
    run, _ = finished
    app = typer.Typer()
    app.command()(translate)
    lines = ["the cat", "", "a Mouse sees " * 60, "sleeps"]
    (tmp_path / "in.txt").write_text("\n".join(lines) + "\n")
    want = translate_texts(run, lines).texts
    by_file = CliRunner().invoke(app, [str(run), "--text", str(tmp_path / "in.txt"), "--threads", "1"])
    by_pipe = CliRunner().invoke(app, [str(run), "--batch", "1", "--threads", "1"], input="\r\n".join(lines))
    for found in (by_file, by_pipe):
        assert found.exit_code == 0, found.output
        assert found.stdout.split("\n") == [*want, ""]
        assert "line 3 has more than 63 tokens and was cut" in found.stderr
    (tmp_path / "in.txt").write_bytes(b"good\n\xff\n")
    bad = CliRunner().invoke(app, [str(run), "--text", str(tmp_path / "in.txt"), "--threads", "1"])
    assert bad.exit_code == 2
    assert "line 2: not UTF-8" in bad.stderr.replace("\n", " ")
    missing = CliRunner().invoke(app, [str(run), "--text", str(tmp_path / "no.txt")])
    assert "there is no file" in missing.stderr


def test_a_vocabulary_of_the_users_own_is_used_and_goes_with_the_model(folder, tmp_path):
    own = make_task("translation", data=folder, **TINY).vocabulary()
    own.save(tmp_path)
    task = make_task("translation", data=folder, tokenizer=tmp_path, length=64)
    assert task.settings()["vocab_size"] == own.size
    same(task.split("test"), make_task("translation", data=folder, **TINY).split("test"))
    assert "tokenizer.json" in task.fingerprint()
    (tmp_path / "model").mkdir()
    task.save_extra(tmp_path / "model")
    assert (tmp_path / "model" / "tokenizer.json").exists()
    plain = make_task("translation", data=folder, kind="bytes")
    (tmp_path / "bytes").mkdir()
    plain.save_extra(tmp_path / "bytes")
    assert os.listdir(tmp_path / "bytes") == []
    plain.load_extra(tmp_path / "bytes")
    assert plain.vocabulary().tokenizer is None
    plain.load_extra(tmp_path / "model")
    assert plain.vocabulary().size == own.size
