"""Tasks as data: labels by their definition, balance, seeds, bad input."""

from __future__ import annotations

import pytest
import torch

from kernelformer_lab.tasks.sparsity import CLASSES, sparse_sums


@pytest.mark.parametrize("relevance", [0.1, 0.5, 0.9])
def test_sparse_sums_are_what_the_paper_says(relevance):
    data = sparse_sums(2000, relevance=relevance, length=60, seed=1)
    assert data.inputs.shape == (2000, 60, 3)
    assert data.inputs.dtype == torch.bool
    plus, minus, relevant = data.inputs.unbind(-1)
    assert torch.equal(plus, ~minus)
    value = plus.long() - minus.long()
    prefixes = (value * relevant).cumsum(1)
    assert prefixes.abs().max() == 4
    assert torch.equal(prefixes[:, -1] + 4, data.labels)
    counts = data.labels.bincount(minlength=CLASSES)
    assert counts.max() - counts.min() <= 1
    share = relevant.double().mean(1)
    assert abs(float(share.mean()) - relevance) < 0.02 + 5 * float(share.std()) / 2000**0.5  # balance favours a little
    assert abs(float(plus.double().mean()) - 0.5) < 0.02


def test_sparse_sums_depend_on_the_seed_alone_and_are_shuffled():
    one, same, other = (sparse_sums(500, relevance=0.5, length=20, seed=s) for s in (0, 0, 1))
    assert torch.equal(one.inputs, same.inputs)
    assert torch.equal(one.labels, same.labels)
    assert not torch.equal(one.labels, other.labels)
    first, rest = one.split(100)
    assert (len(first), len(rest)) == (100, 400)
    assert len(first.labels.unique()) == CLASSES


def test_sparse_sums_refuse_what_cannot_be():
    for options, message in [
        ({"relevance": 0.0}, "relevance is a probability between 0 and 1, got 0.0"),
        ({"relevance": 1.5}, "got 1.5"),
        ({"relevance": 0.5, "length": 3}, "sums up to 4 need a length of at least 4, got 3"),
        ({"relevance": 1e-6, "length": 4}, "hardly occur with relevance=1e-06 and length=4; raise one of them"),
    ]:
        with pytest.raises(ValueError, match=message):
            sparse_sums(9, **options)
    with pytest.raises(ValueError, match="count must be an integer of at least 1, got 0"):
        sparse_sums(0, relevance=0.5)
    with pytest.raises(ValueError, match="a split must leave samples on both sides, got 9 of 9"):
        sparse_sums(9, relevance=0.5).split(9)
