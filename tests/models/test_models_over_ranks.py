"""Models whose sequences are split over ranks: losses and gradients are those of one process."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist

from kernelformer.models import MODELS, KernelformerConfig
from kernelformer.parallel import context_parallel, shard, sum_gradients
from rank_processes import on_ranks

LENGTHS = [13, 7]
NEAR = "favor+:num_features=8:window=4:sinks=2:rotary=True"
SIZES = {"vocab_size": 17, "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2, "dropout": 0.0}


def _model(kind, attention, **others):
    torch.manual_seed(0)
    config = KernelformerConfig(**SIZES, max_position_embeddings=64, attention=attention, num_labels=3, **others)
    return MODELS[kind](config).double().train()


def _inputs(variant, labels):
    torch.manual_seed(1)
    ids = torch.randint(0, 17, (2, sum(LENGTHS)))
    given = {"input_ids": ids, "labels": torch.tensor([2, 0]) if labels else ids}
    if variant == "mask":
        given["attention_mask"] = torch.ones_like(ids)
        given["attention_mask"][1, -5:] = 0
        given["labels"] = given["labels"] if labels else ids.masked_fill(given["attention_mask"] == 0, -100)
    if variant == "packed":
        given["segment_ids"] = (torch.arange(ids.shape[1]) // 5).expand(2, -1)
    return given


def _differences():
    rank, found = dist.get_rank(), {}
    whole = slice(sum(LENGTHS[:rank]), sum(LENGTHS[: rank + 1]))
    kinds = {"causal-lm": {}, "masked-lm": {}, "classifier": {"pooling": "cls"}, "classifier mean": {"pooling": "mean"}}
    positions = ("favor+:num_features=8", NEAR, "favor+:window=4:relative=1d:scheme=alibi")
    for (name, options), attention in itertools.product(kinds.items(), positions):
        model = _model(name.split()[0], attention, **options)
        labels = "classifier" in name
        for variant in ("plain", "mask", "packed", "checkpointed"):
            if variant == "packed" and labels:
                continue
            given = _inputs(variant, labels)
            if variant == "checkpointed":
                model.gradient_checkpointing_enable()
            model.zero_grad()
            expected = model(**given).loss
            expected.backward()
            wanted = [x.grad.clone() for x in model.parameters()]
            model.zero_grad()
            with context_parallel():
                loss = model(**{k: x[:, whole] if x.dim() > 1 else x for k, x in given.items()}).loss
                loss.backward()
            sum_gradients(model)
            parts = [(x.grad - y).abs().max() for x, y in zip(model.parameters(), wanted, strict=True)]
            found[name, attention, variant] = float(max(*parts, (loss - expected).abs()))
            model.gradient_checkpointing_disable()
    return found


def _refusals():
    said = []
    with context_parallel():
        for kind, given in {
            "seq2seq": {"input_ids": torch.ones(1, 4, dtype=torch.long), "labels": torch.ones(1, 4, dtype=torch.long)},
            "causal-lm": {"input_ids": torch.ones(1, 4, dtype=torch.long)},
        }.items():
            attention = "favor+" if kind == "seq2seq" else "softmax"
            try:
                _model(kind, attention)(**given)
            except ValueError as error:
                said.append(str(error))
        # On one rank only: all of them know, and are in step again afterwards.
        model, other = _model("causal-lm", "favor+:num_features=8"), dist.get_rank() == 1
        ids = torch.ones(2, 5, dtype=torch.long)
        for given in (
            {"input_ids": ids + 99 * other},
            {"input_ids": ids[: 2 - other], "attention_mask": ids[: 2 - other]},
            {"input_ids": ids, "attention_mask": ids if other else None},
            {"input_ids": ids.expand(-1, 5).repeat(1, 1 + 19 * other), "position_ids": None},
        ):
            try:
                model(**given)
                said.append("")
            except ValueError as error:
                said.append(str(error))
    return said


def _both():
    return _differences(), _refusals()


def test_losses_and_gradients_are_those_of_one_process():
    for result in on_ranks(2, _both):
        assert isinstance(result, tuple), result
        found, said = result
        assert len(found) == 42
        # Losses are taken in float32, whatever the model's dtype.
        assert {name: x for name, x in found.items() if not x < 2e-6} == {}
        assert len(said) == 6
        assert "cannot make this call" in said[2] or "from 0 to 16, got 100" in said[2]
        assert "2 on rank 0 and 1 on rank 1" in said[3]
        assert "is about to count" in said[4]
        assert said[5] == ""  # sinusoidal positions have no end
        assert "pairs of sequences needs whole sequences" in said[0]
        assert "'softmax' has no state of constant size" in said[1]


def test_tokens_of_one_process_are_as_ever():
    model = _model("causal-lm", NEAR)
    given = _inputs("plain", False)
    logits = model(given["input_ids"]).logits[:, :-1].flatten(0, 1)
    plain = torch.nn.functional.cross_entropy(logits, given["input_ids"][:, 1:].flatten())
    assert model(**given).loss.item() == pytest.approx(plain.item(), rel=1e-6)


def _sharded():
    """Both at once: weights over the ranks that the sequence is over."""
    given = _inputs("mask", False)
    whole, model = (_model("causal-lm", NEAR) for _ in range(2))
    whole(**given).loss.backward()
    shard(model)
    with context_parallel() as ranks:
        loss = model(**{name: ranks.part(x) for name, x in given.items()}).loss
        (loss * ranks.size).backward()  # the mean over ranks of what has to be added up
    wanted = dict(whole.named_parameters())
    parts = [(x.grad.full_tensor() - wanted[name].grad).abs().max() for name, x in model.named_parameters()]
    return float(max(parts))


def test_sharded_models_over_the_same_ranks():
    for difference in on_ranks(2, _sharded):
        assert isinstance(difference, float), difference
        assert difference < 2e-6
