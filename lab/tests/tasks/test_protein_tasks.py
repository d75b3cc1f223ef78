"""Proteins: files of all kinds, splits that share nothing, batches, chains, masks by their shares, the baseline."""

from __future__ import annotations

import json
import math
import random
import re
from collections import Counter

import pytest
import torch
import torch.nn.functional as F

from kernelformer.models import MODELS, KernelformerConfig
from kernelformer_lab.data.batching import fill_rows
from kernelformer_lab.data.sources import divide
from kernelformer_lab.tasks import make_task
from kernelformer_lab.tasks.base import Outcome
from kernelformer_lab.tasks.proteins import AMINO_ACIDS, BOS, CHOSEN, EOS, FIRST, MASK, MASKINGS, PAD, TOKENS
from sampling import SIGMAS

BOTH = ("proteins", "proteins-masked")
SPLITS = ("train", "validation", "test")


@pytest.fixture
def _own_hub(tmp_path_factory, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("hub")))


def made(count, seed=0, shortest=5, longest=60):
    rng = random.Random(seed)
    return ["".join(rng.choices(AMINO_ACIDS, k=rng.randint(shortest, longest))) for _ in range(count)]


def written(path, sequences):
    """In the way that the name asks for."""
    if path.suffix == ".jsonl":
        lines = [json.dumps({"name": i, "sequence": x}) for i, x in enumerate(sequences)]
    elif path.suffix in (".csv", ".tsv"):
        comma = "," if path.suffix == ".csv" else "\t"
        lines = [f"name{comma}sequence", *(f"{i}{comma}{x}" for i, x in enumerate(sequences))]
    elif path.suffix == ".txt":
        lines = sequences
    else:
        lines = [y for i, x in enumerate(sequences) for y in (f">sp|{i}| J*1", *re.findall(".{1,10}", x), "")]
    path.write_text("\n".join(lines) + "\n")
    return path


def said(ids):
    return "".join(TOKENS[i] for i in ids if i not in (PAD, BOS))


def texts(task, split):
    """Whole sequences of a split, of single ones."""
    return [said(x["labels"].tolist()) for x in task.split(split)]


@pytest.mark.parametrize("kind", ["txt", "fasta", "fa", "faa", "jsonl", "csv", "tsv"])
def test_all_kinds_of_files_mean_the_same(tmp_path, kind):
    sequences = made(60)
    task = make_task("proteins", data=written(tmp_path / f"x.{kind}", sequences))
    parts = divide(60, {"validation": 0.1, "test": 0.1}, 0)
    for split in SPLITS:
        assert texts(task, split) == [sequences[i] for i in parts[split]]
    assert task.remarks() == []


@pytest.mark.usefixtures("_own_hub")
def test_folders_and_hub_data_sets_have_their_own_splits(tmp_path):
    parts = {"train": made(30, 1), "validation": made(5, 2), "test": made(6, 3)}
    for split, sequences in parts.items():
        written(tmp_path / f"{split}.jsonl", sequences)
    for place in (tmp_path, f"hub:{tmp_path}"):
        task = make_task("proteins", data=place)
        assert {split: texts(task, split) for split in SPLITS} == parts
        assert len(task.fingerprint()) > 20
    (tmp_path / "test.jsonl").unlink()
    written(tmp_path / "test.faa", parts["test"])
    (tmp_path / "validation.jsonl").rename(tmp_path / "notes.jsonl")
    task = make_task("proteins", data=tmp_path, validation_share=0.3)
    assert texts(task, "test") == parts["test"]
    assert sorted(texts(task, "train") + texts(task, "validation")) == sorted(parts["train"])
    assert len(texts(task, "validation")) > 1


def test_fasta_is_read_as_people_write_it(tmp_path):
    path = tmp_path / "x.fa"
    path.write_bytes(b"\xef\xbb\xbf>one\r\nMKv\r\n\r\n  lw \r\nA*\r\n>Caf\xe9\nACD\nEF\n*\n\n>three *J1\nwy")
    task = make_task("proteins", data=path, validation_share=0, test_share=0)
    assert texts(task, "train") == ["MKVLWA", "ACDEF", "WY"]


def test_blank_lines_lower_case_and_stops_are_fine(tmp_path):
    path = tmp_path / "x.txt"
    path.write_bytes(b"\n  \nmkvBOUXZ*\r\n\nACD  \n")
    task = make_task("proteins", data=path, validation_share=0, test_share=0)
    assert texts(task, "train") == ["MKVBOUXZ", "ACD"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.txt", "ACD\n\nACJD\n", r"x\.txt, line 3: sequence has the letter 'J' at position 3, .*X stands for"),
        ("x.txt", "ACD\nAC*D\n", r"x\.txt, line 2: sequence has the letter '\*' at position 3"),
        ("x.txt", "AC D\n", r"line 1: sequence has the letter ' ' at position 3"),
        ("x.txt", "ACß\n", r"line 1: sequence has the letter 'ß' at position 3"),  # 'ß'.upper() is 'SS'
        ("x.txt", "AC\u212aD\n", "line 1: sequence has the letter '\u212a' at position 3"),  # the Kelvin sign, a K
        ("x.txt", "ACD\n*\n", "line 2: sequence has a stop '\\*' but no amino acids"),
        ("x.txt", b"ACD\nAC\xe9\n", "line 2: not UTF-8"),
        ("x.txt", ">one\nACD\n", r"line 1: it is a header; a file with headers must end in .fasta, .fa, .faa"),
        ("x.fasta", ">one\nACD\nAC1\n>two\nA\n", r"x\.fasta, record at line 1: .* letter '1' at position 6"),
        ("x.fasta", ">one\nACD\n>two\nA*\nC\n", r"record at line 3: .* letter '\*' at position 2"),
        ("x.fasta", b">one\nACD\n>two\nA\xe9\n", "record at line 3: .* letter 'é' at position 2"),
        ("x.fasta", ">one\n>two\nA\n", "record at line 1: sequence must be a text that is not empty"),
        ("x.fasta", "ACD\n>two\nA\n", "line 1: a sequence without a header"),
        ("x.jsonl", '{"sequence": "ACD"}\n{"sequence": 5}\n', "line 2: sequence must be a text .*got 5"),
        ("x.jsonl", '{"sequence": "ACD"}\n{"seq": "A"}\n', "line 2: it has no sequence, found '?seq"),
        ("x.jsonl", '{"sequence": "ACD"}\n{"sequence"\n', "line 2: not JSON"),
    ],
)
def test_bad_sequences_are_named_or_counted(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    options = {"data": path, "validation_share": 0, "test_share": 0}
    with pytest.raises(ValueError, match=message + r"(?s:.*)skip_bad=True"):
        make_task("proteins", **options).split("train")
    if b"ACD\n" in path.read_bytes() or name == "x.jsonl":
        path.write_bytes(path.read_bytes() + (b'\n{"sequence": "WWW"}\n' if name == "x.jsonl" else b"\n>\nWWW\n"))
        task = make_task("proteins", **options, skip_bad=True)
        assert "WWW" in texts(task, "train")
        assert re.search(r"left out \d of \d rows of .* as bad; the first: ", task.remarks()[0])


@pytest.mark.parametrize(
    ("files", "place", "message"),
    [
        ({}, None, "this task needs data, got None"),
        ({}, ".", "must hold train, validation and test as .txt, .fasta, .fa.*, found nothing"),
        ({"ood.txt": "ACD"}, ".", "must hold train.*found ood.txt"),
        ({"train.txt": "ACD", "train.fa": ">\nA"}, ".", r"train\.fa and train\.txt; keep one file for each split"),
        ({"train.txt": "ACD"}, ".", "has no test split, found train"),
        ({"x.dat": "ACD"}, "x.dat", r"x\.dat must end in \.txt, .*, got '\.dat'"),
        ({"x.jsonl": '{"seq": "ACD"}'}, "x.jsonl", "has no column 'sequence', found '?seq"),
        ({"x.csv": "seq,n\nACD,1\n"}, "x.csv", "has no column 'sequence', found '?seq'?, '?n"),
        ({"x.txt": "ACD"}, "x.txt", "the test split of .* has no sequences left; add sequences or enlarge its share"),
        ({"x.txt": ""}, "x.txt", "the test split of .* has no sequences left"),
    ],
)
def test_places_without_the_wanted_sequences_say_so(tmp_path, files, place, message):
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        make_task("proteins", data=place and tmp_path / place).split("test")


def test_few_sequences_are_enough_to_train(tmp_path):
    task = make_task("proteins", data=written(tmp_path / "x.txt", ["ACD"]))
    assert texts(task, "train") == ["ACD"]


def test_a_column_is_chosen_by_name(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"seq": "ACD"}\n')
    task = make_task("proteins", data=tmp_path / "x.jsonl", field="seq")
    assert texts(task, "train") == ["ACD"]


def test_no_sequence_is_in_two_splits_or_twice_in_one_file(tmp_path):
    sequences = made(200)
    path = written(tmp_path / "x.txt", sequences + [x.lower() for x in sequences[::2]] + sequences)
    task = make_task("proteins", data=path)
    found = {split: texts(task, split) for split in SPLITS}
    assert sorted(x for rows in found.values() for x in rows) == sorted(sequences)
    assert task.remarks() == [f"left out 300 of 500 sequences of {path}, which has them more than once"]
    alone = make_task("proteins", data=written(tmp_path / "y.txt", sequences))
    assert {split: texts(alone, split) for split in SPLITS} == found  # repeating sequences moves none of them
    every = make_task("proteins", data=path, deduplicate=False)
    assert sum(len(every.split(split)) for split in SPLITS) == 500
    assert every.remarks() == []


@pytest.mark.usefixtures("_own_hub")
@pytest.mark.parametrize("where", ["folder", "hub"])
def test_no_sequence_is_in_two_splits_of_a_folder(tmp_path, where):
    a, b, c, d = (made(10, seed) for seed in range(4))
    for split, rows in {"train": a + b + c + d + a[:3], "validation": b + c, "test": c + c[:1]}.items():
        written(tmp_path / f"{split}.jsonl", rows)
    task = make_task("proteins", data=tmp_path if where == "folder" else f"hub:{tmp_path}")
    assert [texts(task, split) for split in SPLITS] == [a + d, b, c]
    assert "left out 20 of 40 sequences of train, which validation or test has too" in task.remarks()
    assert "left out 10 of 20 sequences of validation, which test has too" in task.remarks()


def test_another_file_for_the_test_leaves_training_and_validation_alone(tmp_path):
    sequences, others = made(100), made(20, seed=1)
    path = written(tmp_path / "x.txt", sequences)
    plain = make_task("proteins", data=path)
    kept = {split: texts(plain, split) for split in SPLITS}
    extra = written(tmp_path / "ood.fasta", [*others, kept["train"][0], kept["validation"][0], kept["test"][0]])
    task = make_task("proteins", data=path, test_file=extra)
    assert texts(task, "test") == [*others, kept["test"][0]]
    assert "left out 2 of 23 sequences of test, which train or validation has too" in task.remarks()
    assert [texts(task, split) for split in SPLITS[:2]] == [kept["train"], kept["validation"]]
    assert task.fingerprint() != plain.fingerprint()
    no_share = make_task("proteins", data=path, test_file=extra, validation_share=0, test_share=0)
    assert texts(no_share, "test") == others
    with pytest.raises(ValueError, match=r"there is no file .*nowhere\.fa; test_file must be one"):
        make_task("proteins", data=path, test_file=tmp_path / "nowhere.fa")


def test_limits_take_sequences_that_are_spread_evenly(tmp_path):
    for split, count in zip(SPLITS, (20, 6, 3), strict=True):
        written(tmp_path / f"{split}.txt", made(count, seed=count))
    limits = {"train_samples": 4, "validation_samples": 4, "test_samples": 9}
    task = make_task("proteins", data=tmp_path, **limits)
    wanted = [[made(20, 20)[i] for i in (0, 5, 10, 15)], [made(6, 6)[i] for i in (0, 1, 3, 4)], made(3, 3)]
    assert [texts(task, split) for split in SPLITS] == wanted
    assert len(make_task("proteins-masked", data=tmp_path, **limits).split("train")) == 4 * MASKINGS
    chain = make_task("proteins", data=tmp_path, **limits, concatenate=True, length=2)
    tokens = sum(len(x) + 1 for x in wanted[0])  # with an end each
    assert len(chain.split("train")) == tokens // 2
    written(tmp_path / "train.txt", made(3, 3) + made(20, 20))  # those of the test do not count
    assert texts(make_task("proteins", data=tmp_path, **limits), "train") == wanted[0]


def test_a_fingerprint_tells_data_apart(tmp_path):
    path = written(tmp_path / "x.txt", made(10))
    before = make_task("proteins", data=path).fingerprint()
    assert make_task("proteins", data=path, length=7).fingerprint() == before
    written(path, made(11))
    assert make_task("proteins", data=path).fingerprint() != before


def test_a_batch_of_single_sequences_is_cut_padded_and_says_where(tmp_path):
    sequences = ["ACD", "W" * 70, "Y" * 200]
    path = written(tmp_path / "x.txt", sequences)
    for name, start in (("proteins", [BOS]), ("proteins-masked", [])):
        task = make_task(name, data=path, length=100, validation_share=0, test_share=0)
        samples = task.split("train").__getitems__([0, 1, 2])
        batch = task.collate(samples)
        sizes = [len(start) + 3, len(start) + 70, 100]
        assert [len(x["input_ids"]) for x in samples] == sizes
        assert batch["attention_mask"].sum(1).tolist() == sizes
        assert {x.dtype for x in batch.values()} == {torch.int64}
        assert {tuple(x.shape) for x in batch.values()} == {(3, 100)}  # not 128: there are no more positions
        assert task.collate(samples[:2])["input_ids"].shape == (2, 100)
        alone = task.collate(samples[:1])
        assert alone["labels"].shape == (1, 64)
        assert set(alone["labels"][0, sizes[0] :].tolist()) == {-100}
        assert set(alone["input_ids"][0, sizes[0] :].tolist()) == {PAD}
        for sample, ids, labels in zip(samples, batch["input_ids"], batch["labels"], strict=True):
            n = len(sample["input_ids"])
            assert torch.equal(ids[:n], sample["input_ids"])
            assert torch.equal(labels[:n], sample["labels"])
            assert set(ids[n:].tolist()) <= {PAD}
            assert set(labels[n:].tolist()) <= {-100}
        cut = 100 - len(start)
        assert task.remarks() == [f"1 of 3 sequences of train are longer than {cut} amino acids and were cut"]
        assert task.settings()["max_position_embeddings"] == 100
    causal = make_task("proteins", data=path, length=100, validation_share=0, test_share=0).split("train")
    assert causal[0]["input_ids"].tolist() == [BOS, *(TOKENS.index(x) for x in "ACD")]
    assert torch.equal(causal[0]["input_ids"], causal[0]["labels"])
    for wrong in (3, -1):
        with pytest.raises(IndexError, match="numbered from 0 to 2"):
            causal[wrong]


@pytest.mark.parametrize("name", BOTH)
def test_a_chain_read_back_gives_the_sequences(tmp_path, name):
    sequences = made(50, longest=300)
    path = written(tmp_path / "x.fasta", sequences)
    task = make_task(name, data=path, concatenate=True, length=128, validation_share=0, test_share=0)
    windows = task.split("train")
    count = sum(len(x) + 1 for x in sequences)
    assert len(windows) == count // 128 * (1 if name == "proteins" else MASKINGS)
    batch = task.collate(windows.__getitems__(range(count // 128)))
    assert set(batch) == {"input_ids", "labels"}
    assert batch["input_ids"].shape == (count // 128, 128)
    whole = torch.where(batch["labels"] == -100, batch["input_ids"], batch["labels"]).flatten().tolist()
    assert said(whole) == "".join(x + "<eos>" for x in sequences)[: len(said(whole))]
    assert len(whole) == count - count % 128
    assert task.remarks() == [f"left out the last {count % 128} tokens of 50 sequences of train, too few for a sample"]
    assert task.settings()["max_position_embeddings"] == 128
    assert make_task(name, concatenate=True).settings()["max_position_embeddings"] == 8192
    with pytest.raises(ValueError, match=rf"train split of .* has {count:,} tokens, a sample 1,000,000"):
        make_task(name, data=path, concatenate=True, length=10**6, validation_share=0, test_share=0).split("train")


def masked_tokens(tmp_path, sequences, **options):
    task = make_task("proteins-masked", data=written(tmp_path / "x.txt", sequences), **options)
    split = task.split("train")
    samples = split.__getitems__(range(len(split)))
    return [torch.cat([x[name] for x in samples]).numpy() for name in ("input_ids", "labels")]


def near(count, total, share):
    """Within standard errors of a binomial."""
    return abs(count - total * share) <= SIGMAS * math.sqrt(total * share * (1 - share))


def test_shares_of_masks_are_those_of_the_paper(tmp_path):
    options = {"deduplicate": False, "validation_share": 0, "test_share": 0}
    ids, labels = masked_tokens(tmp_path, ["A" * 1000] * 40, **options)
    a, total = TOKENS.index("A"), len(ids)
    assert total == 1000 * 40 * MASKINGS
    chosen = labels != -100
    assert set(labels[chosen]) == {a}
    assert (ids[~chosen] == a).all()
    assert near(chosen.sum(), total, 0.15)
    many = chosen.sum()
    assert near((ids[chosen] == MASK).sum(), many, 0.8)
    assert near((ids[chosen] == a).sum(), many, 0.1 + 0.1 / 25)  # kept, or replaced by itself
    other = Counter(ids[chosen & (ids != MASK) & (ids != a)].tolist())
    assert set(other) == set(range(FIRST, len(TOKENS))) - {a}
    assert all(near(count, many, 0.1 / 25) for count in other.values())
    assert near((chosen[1:] & chosen[:-1]).sum(), total - 1, CHOSEN**2)  # neighbours are independent,
    by_sample = chosen.reshape(-1, 1000)
    assert near((by_sample[1:] & by_sample[:-1]).sum(), total - 1000, CHOSEN**2)  # samples too,
    again = chosen.reshape(MASKINGS, -1)
    assert near((again[1:] & again[:-1]).sum(), total - total // MASKINGS, CHOSEN**2)  # and maskings of one sequence
    at = by_sample.sum(0)
    assert all(near(count, len(by_sample), 0.15) for count in at)


def test_every_sample_has_a_label_and_ends_have_none(tmp_path):
    options = {"deduplicate": False, "validation_share": 0, "test_share": 0}
    path = written(tmp_path / "y.txt", ["A", "AC"] * 100)
    split = make_task("proteins-masked", data=path, **options).split("train")
    counts = [(x["labels"] != -100).sum() for x in split]
    assert min(counts) == 1
    assert max(counts) == 2
    ids, labels = masked_tokens(tmp_path, ["A"] * 2000, **options)
    assert set(labels) == {FIRST}
    assert near((ids == FIRST).sum(), len(ids), CHOSEN * (0.1 + 0.1 / 25))  # chance chose it, and kept it
    ids, labels = masked_tokens(tmp_path, ["AC", "W"] * 100, concatenate=True, length=10, **options)
    assert (ids == EOS).sum() == 200 * MASKINGS
    assert set(labels) == {-100, *(TOKENS.index(x) for x in "ACW")}


def test_masks_depend_on_the_seed_and_the_index_alone(tmp_path):
    path = written(tmp_path / "x.txt", made(60))
    task, other = (make_task("proteins-masked", data=path, seed=seed) for seed in (0, 1))
    split = task.split("train")
    together = split.__getitems__([5, 3, 8])
    torch.manual_seed(7)
    for i, sample in zip([5, 3, 8], together, strict=True):
        alone = make_task("proteins-masked", data=path).split("train")[i]
        assert torch.equal(alone["input_ids"], sample["input_ids"])
        assert torch.equal(alone["labels"], sample["labels"])
    count = len(split) // MASKINGS
    seen = {tuple(split[3 + k * count]["labels"].tolist()) for k in range(MASKINGS)}
    assert len(seen) > MASKINGS // 2
    assert len(task.split("test")) == len(make_task("proteins", data=path).split("test"))
    assert any(a["labels"].tolist() != b["labels"].tolist() for a, b in zip(split, other.split("train"), strict=False))


def test_the_baseline_of_a_few_letters_by_hand(tmp_path):
    (tmp_path / "train.txt").write_text("AAAC\nAACC\nAADWWWWWW\n")
    (tmp_path / "test.txt").write_text("AC\nADAZ\n")
    # Cut to 4: A 3 + 2 + 2, C 1 + 2, D 1, W 1; one more for each of the 25.
    task = make_task("proteins", data=tmp_path, length=5, validation_share=0)
    loss = -(3 * math.log(8 / 37) + math.log(4 / 37) + math.log(2 / 37) + math.log(1 / 37)) / 6
    found = task.empirical_baseline("test")
    assert found == pytest.approx({"perplexity": math.exp(loss), "accuracy": 0.5}, rel=1e-12)
    assert task.baselines("test") == {"empirical baseline": found}
    # The chain AAAC.AACC.AADWWWWWW. has 20 tokens, AC.ADAZ. has 8, of which the first is no label; ends are.
    task = make_task("proteins", data=tmp_path, concatenate=True, length=4, validation_share=0)
    chance = {"A": 8 / 46, "C": 4 / 46, "D": 2 / 46, "Z": 1 / 46, "<eos>": 4 / 46}
    labels = ["C", "<eos>", "A", "A", "Z", "<eos>"]  # of the windows AC.A and DAZ.
    loss = -sum(math.log(chance[x]) for x in labels) / 6
    found = task.empirical_baseline("test")
    assert found == pytest.approx({"perplexity": math.exp(loss), "accuracy": 2 / 6}, rel=1e-12)


def test_rows_are_filled_with_every_sequence_once():
    lengths = [random.Random(i).randint(1, 40) for i in range(200)]
    rows = fill_rows(lengths, 40)
    assert sorted(i for row in rows for i in row) == list(range(200))
    filled = [sum(lengths[i] for i in row) for row in rows]
    assert max(filled) <= 40
    assert len(rows) <= 1.05 * sum(lengths) / 40 + 1
    assert fill_rows([], 40) == []


@pytest.mark.parametrize("name", BOTH)
def test_packed_rows_have_the_loss_of_their_sequences(tmp_path, name):
    path = written(tmp_path / "x.fasta", made(30, longest=50))
    options = {"data": path, "length": 64, "validation_share": 0, "test_share": 0}
    single, packed = (make_task(name, **options, pack=pack) for pack in (False, True))
    model = MODELS[single.model](
        KernelformerConfig(**single.settings(), hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    )
    model = model.double().eval()

    def loss(task, count):
        batch = task.collate(task.split("train").__getitems__(range(count)))
        batch["num_items_in_batch"] = 1
        with torch.no_grad():
            return float(model(**batch).loss), batch

    total, batch = loss(packed, len(packed.split("train")) // (1 if name == "proteins" else MASKINGS))
    assert batch["input_ids"].shape[0] < 20
    assert batch["segment_ids"].shape == batch["input_ids"].shape
    assert total == pytest.approx(loss(single, 30)[0])
    assert packed.empirical_baseline("train") == single.empirical_baseline("train")
    assert len(packed.split("train")[-1 + len(packed.split("train"))]["input_ids"]) <= 64


@pytest.mark.parametrize("concatenate", [False, True])
@pytest.mark.parametrize("name", BOTH)
def test_the_baseline_is_the_score_of_a_model_that_knows_frequencies_only(tmp_path, name, concatenate):
    rng = random.Random(0)
    sequences = ["".join(rng.choices(AMINO_ACIDS, range(25, 0, -1), k=rng.randint(5, 90))) for _ in range(300)]
    path = written(tmp_path / "x.txt", sequences)
    task = make_task(name, data=path, length=64, concatenate=concatenate)
    parts = divide(300, {"validation": 0.1, "test": 0.1}, 0)
    train = [sequences[i] for i in parts["train"]]
    room = 63 if name == "proteins" else 64
    text = "".join(x + ">" for x in train) if concatenate else "".join(x[:room] for x in train)
    counts = Counter(text[: len(text) // 64 * 64] if concatenate else text)
    tokens = AMINO_ACIDS + (">" if concatenate and name == "proteins" else "")
    logits = torch.full((len(TOKENS),), -math.inf, dtype=torch.float64)
    for x in tokens:
        logits[EOS if x == ">" else TOKENS.index(x)] = math.log(counts[x] + 1)
    split = task.split("test")
    labels = task.collate(split.__getitems__(range(len(split))))["labels"]
    labels = (labels[:, 1:] if name == "proteins" else labels).flatten()  # a model of the next token shifts
    each = F.cross_entropy(logits.expand(len(labels), -1), labels, ignore_index=-100)
    real = labels[labels != -100]
    want = task.score(Outcome(float(each), float((real == logits.argmax()).double().mean())))
    assert task.empirical_baseline("test") == pytest.approx(want, rel=1e-9)


def test_scores_are_perplexity_and_accuracy():
    for name in BOTH:
        task = make_task(name)
        assert task.score(Outcome(math.log(9.17), 0.3158)) == pytest.approx({"perplexity": 9.17, "accuracy": 0.3158})
        assert task.score(Outcome(1e4, 0.0))["perplexity"] == math.inf
        assert math.isnan(task.score(Outcome(math.nan, 0.0))["perplexity"])
        assert task.metric == "perplexity"
        assert not task.higher_is_better


def test_models_are_described_without_data():
    sizes = {"vocab_size": 29, "max_position_embeddings": 1024, "pad_token_id": 0}
    assert make_task("proteins").settings() == {**sizes, "bos_token_id": 1, "eos_token_id": 2}
    assert make_task("proteins-masked").settings() == sizes
    assert make_task("proteins", length=50).settings()["max_position_embeddings"] == 50


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 1}, "length must be an integer of at least 2, got 1"),
        ({"train_samples": 0}, "train_samples must be an integer of at least 1, got 0"),
        ({"length": 2.5}, "length must be an integer of at least 2, got 2.5"),
        ({"pack": "yes"}, "pack must be True or False, got 'yes'"),
        ({"pack": True, "concatenate": True}, "concatenate=True fills all rows by itself, got pack=True too"),
        ({"concatenate": "yes"}, "concatenate must be True or False, got 'yes'"),
        ({"deduplicate": 1}, "deduplicate must be True or False, got 1"),
        ({"skip_bad": None}, "skip_bad must be True or False, got None"),
        ({"seed": -1}, "seed must be an integer of at least 0, got -1"),
        ({"test_share": 0.5, "validation_share": 0.5}, "must leave something to train on, got 0.5 and 0.5"),
        ({"data": "nowhere/at.all"}, "there is no file or folder nowhere/at.all"),
        ({"lenght": 9}, "unknown option for task 'proteins.*', 'lenght'; did you mean 'length'"),
    ],
)
def test_bad_options_are_refused_before_anything_is_read(options, message):
    for name in BOTH:
        with pytest.raises(ValueError, match=message):
            make_task(name, **options)


def test_unknown_splits_are_refused():
    with pytest.raises(ValueError, match="unknown split 'valid'; did you mean 'validation'"):
        make_task("proteins").split("valid")


def test_a_loader_takes_it(tmp_path):
    task = make_task("proteins-masked", data=written(tmp_path / "x.txt", made(30)), validation_share=0, test_share=0)
    loader = torch.utils.data.DataLoader(task.split("train"), batch_size=128, collate_fn=task.collate, shuffle=True)
    assert [len(batch["labels"]) for batch in loader] == [128, 128, 44]
