"""The task "shards": batches, segments, scores, the tokenizer beside a model, bad input."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

from kernelformer.models import MODELS, KernelformerConfig
from kernelformer_lab.data.tokenization import make_tokenizer
from kernelformer_lab.tasks import make_task
from kernelformer_lab.tasks.base import Outcome
from samples import sentence, write_shards, write_text, write_texts

MODEL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


@pytest.fixture
def rows(tmp_path):
    """Shards of sub-words, documents being rows."""
    rng = np.random.default_rng(0)
    texts = [sentence(rng) for _ in range(200)]
    make_tokenizer(texts, vocab_size=300, cache=tmp_path / "cache", record="x").save(str(tmp_path / "tokenizer.json"))
    rows = write_texts(tmp_path / "rows.jsonl", texts)
    return write_shards(tmp_path / "shards", rows, str(tmp_path / "tokenizer.json"), shard_tokens=99)


def test_a_batch_fits_the_model(rows):
    task = make_task("shards", data=rows, length=24)
    batch = task.collate(task.split("train").__getitems__(range(4)))
    assert {name: (tuple(x.shape), x.dtype) for name, x in batch.items()} == {
        "input_ids": ((4, 24), torch.int64),
        "labels": ((4, 24), torch.int64),
    }
    assert task.settings() == {"vocab_size": 300, "max_position_embeddings": 24, "pad_token_id": None}
    model = MODELS[task.model](KernelformerConfig(attention="elu", **task.settings(), **MODEL))
    out = model(**batch)
    each = torch.nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
    assert out.loss.item() == pytest.approx(each.item(), rel=1e-5)


def test_documents_of_a_window_do_not_see_each_other(rows):
    task = make_task("shards", data=rows, length=40, documents=True)
    torch.manual_seed(0)
    model = MODELS[task.model](KernelformerConfig(attention="elu:rotary=True", **task.settings(), **MODEL)).eval()
    sample = task.split("train")[1]
    eos = 2
    starts = (sample["input_ids"][:-1] == eos).nonzero().flatten() + 1  # after the end of a document
    assert len(starts) > 1
    assert torch.equal((sample["labels"] == -100).nonzero().flatten(), starts)
    batch = task.collate([sample])
    other = {**batch, "input_ids": batch["input_ids"].clone()}
    other["input_ids"][0, : starts[0]] = 7
    with torch.no_grad():
        one, two = (model(input_ids=x["input_ids"], segment_ids=x["segment_ids"]).logits[0] for x in (batch, other))
        alone = model(input_ids=batch["input_ids"][:, starts[0] : starts[1]]).logits[0]
    assert torch.equal(one[starts[0] :], two[starts[0] :])
    assert not torch.allclose(one[: starts[0]], two[: starts[0]])
    torch.testing.assert_close(one[starts[0] : starts[1]], alone, rtol=1e-4, atol=1e-5)
    # What evaluation counts is what training learns: the loss of the model is the mean over the labels that are left.
    wanted = batch["labels"][0, 1:]
    want = torch.nn.functional.cross_entropy(one[:-1], wanted, ignore_index=-100)
    assert model(**batch).loss.item() == pytest.approx(want.item(), rel=1e-5)


def test_scores_per_byte_are_of_the_text_that_was_tokenized(rows):
    task = make_task("shards", data=rows, length=24)
    split = task.index.splits["validation"]
    texts = [json.loads(x)["text"] for x in (rows.parent / "rows.jsonl").read_text().splitlines()]
    assert sum(x.text_bytes for x in task.index.splits.values()) == sum(len(x.encode()) for x in texts)
    scores = task.score(Outcome(math.log(8), 0.25, split="validation"))
    assert scores == pytest.approx(
        {"perplexity": 8, "accuracy": 0.25, "bits_per_token": 3, "bits_per_byte": 3 * split.tokens / split.text_bytes}
    )
    assert "bits_per_byte" not in task.score(Outcome(1.0))


def test_the_tokenizer_goes_with_a_model_and_another_is_refused(rows, tmp_path):
    task = make_task("shards", data=rows)
    model = tmp_path / "model"
    model.mkdir()
    with pytest.raises(ValueError, match=r"has another tokenizer than the shards in .*; prepare the texts with"):
        task.load_extra(model)
    task.save_extra(model)
    assert (model / "tokenizer.json").read_bytes() == (rows / "tokenizer.json").read_bytes()
    task.load_extra(model)
    plain = make_task("shards", data=write_shards(tmp_path / "plain", write_text(tmp_path / "a.txt")))
    with pytest.raises(ValueError, match="has another tokenizer"):
        plain.load_extra(model)
    (model / "tokenizer.json").unlink()
    plain.load_extra(model)
    plain.save_extra(model)
    assert not list(model.iterdir())


def test_the_fingerprint_tells_data_apart_and_finds_damage_unless_it_may_not_look(rows, tmp_path):
    task = make_task("shards", data=rows)
    assert task.fingerprint() == make_task("shards", data=rows, length=9).fingerprint()
    text = write_text(tmp_path / "a.txt")
    one, two = (make_task("shards", data=write_shards(tmp_path / x, text, seed=i)) for i, x in enumerate("ab"))
    assert one.fingerprint() != task.fingerprint()
    assert one.fingerprint().replace("a:", "b:") == two.fingerprint()  # a seed does not change a text's shards
    path = rows / "train-00002.bin"
    path.write_bytes(bytes(len(path.read_bytes())))
    with pytest.raises(ValueError, match=r"train-00002.bin cannot be used: its sha256 is"):
        task.fingerprint()
    unseen = make_task("shards", data=rows, verify=False)
    assert unseen.fingerprint().startswith("shards: ")
    path.unlink()
    with pytest.raises(ValueError, match=r"train-00002.bin cannot be used: it is missing"):
        unseen.split("train")
    make_task("shards", data=rows, length=24, verify=False).split("validation")


def test_bad_input_is_named(rows, tmp_path):
    assert make_task("shards").settings()["vocab_size"] == 256
    for options, message in [
        ({}, "this task needs data, got None; give a folder of `kernelformer prepare` by --data"),
        ({"data": tmp_path / "gone"}, "there is no file or folder .*; data must be a folder of shards"),
        ({"data": tmp_path}, "index.json cannot be used: there is no such file"),
        ({"data": rows / "train-00000.bin"}, "index.json cannot be used: there is no such file"),
        ({"data": rows, "length": 1}, "length must be an integer of at least 2, got 1"),
        ({"data": rows, "documents": 1}, "documents must be True or False, got 1"),
        ({"data": rows, "length": 100_000}, "the train split of .* has [0-9]+ tokens, less than one sample of length="),
    ]:
        with pytest.raises(ValueError, match=message):
            make_task("shards", **options).split("train")
    with pytest.raises(ValueError, match=r"prepare more text or a larger validation_share"):
        make_task("shards", data=rows, length=1000).split("validation")
    with pytest.raises(ValueError, match="unknown split 'dev'"):
        make_task("shards", data=rows).split("dev")
