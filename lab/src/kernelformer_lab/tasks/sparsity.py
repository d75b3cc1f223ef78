"""Samples of the synthetic sparsity task: add up the values that are relevant (KL-Transformer, App. E).

A sequence of pairs (v_i, a_i), v_i in {-1, 1} and a_i in {0, 1}; the answer is sum_i v_i a_i, one of -4 ... 4. The
smaller the probability of a_i = 1, the more positions have to be ignored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Generator, Tensor

from kernelformer.errors import choice, integer, number, positive_int
from kernelformer_lab.data.batching import Sample, Samples
from kernelformer_lab.data.sources import SPLITS
from kernelformer_lab.tasks.base import Classification, MadeSamples

CLASSES = 9
LARGEST = 4  # no prefix adds up to more


@dataclass(frozen=True)
class SparseSums:
    """Samples of the task.

    Args:
        inputs: (N, L, 3) bool, many-hot: v = 1, v = -1, a = 1.
        labels: (N) int64, the sum + 4.
    """

    inputs: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def split(self, first: int) -> tuple[SparseSums, SparseSums]:
        """The first so many samples, and the others; they are in random order."""
        if not 0 < integer("first", first) < len(self):
            raise ValueError(f"a split must leave samples on both sides, got {first} of {len(self)}.")
        a, b = (SparseSums(self.inputs[x], self.labels[x]) for x in (slice(first), slice(first, None)))
        return a, b


def _walks(count: int, length: int, relevance: float, gen: Generator) -> tuple[Tensor, Tensor, Tensor]:
    """v and a (count, L), and the sums (count): a fair walk that turns round at +-4."""
    a = torch.rand(count, length, generator=gen) < relevance
    v = torch.randint(0, 2, (count, length), generator=gen).mul_(2).sub_(1)
    total = torch.zeros(count, dtype=torch.int64)
    for i in range(length):
        beyond = a[:, i] & ((total + v[:, i]).abs() > LARGEST)
        v[:, i] = torch.where(beyond, -v[:, i], v[:, i])
        total += v[:, i] * a[:, i]
    return v, a, total


def check_sums(relevance: float, length: int) -> None:
    """Check the options of `sparse_sums`."""
    if positive_int("length", length) < LARGEST:
        raise ValueError(f"sums up to {LARGEST} need a length of at least {LARGEST}, got {length}.")
    if not 0 < number("relevance", relevance) < 1:
        raise ValueError(f"relevance is a probability between 0 and 1, got {relevance}.")


def sparse_sums(count: int, *, relevance: float, length: int = 200, seed: int = 0) -> SparseSums:
    """Generate balanced samples: more than needed are made, and as many of each class are kept.

    Args:
        count: N; the paper has 200,000 for each relevance, four fifths of them for training.
        relevance: probability of a_i = 1, between 0 and 1; the paper: 0.1, 0.5, 0.9 (it calls this number the
            sparsity, but its Fig. 6 says that sparsity falls as it grows).
        length: L, at least 4.
        seed: same seed, same samples.

    Cost: O(N L), vectorized over the samples.
    """
    positive_int("count", count)
    check_sums(relevance, length)
    gen = Generator().manual_seed(seed)
    wanted = torch.full((CLASSES,), count // CLASSES)
    wanted[torch.randperm(CLASSES, generator=gen)[: count % CLASSES]] += 1
    inputs, labels = [], []
    for _ in range(1000):
        v, a, total = _walks(max(1024, 2 * int(wanted.sum())), length, relevance, gen)
        for label in range(CLASSES):
            rows = (total == label - LARGEST).nonzero().squeeze(1)[: int(wanted[label])]
            wanted[label] -= len(rows)
            inputs.append(torch.stack([v[rows] == 1, v[rows] == -1, a[rows]], -1))
            labels.append(torch.full((len(rows),), label))
        if not wanted.any():
            break
    else:
        raise ValueError(
            f"sums of {LARGEST} hardly occur with relevance={relevance} and length={length}; raise one of them."
        )
    order = torch.randperm(count, generator=gen)
    return SparseSums(torch.cat(inputs)[order], torch.cat(labels)[order])


class PairTokens(Samples):
    """Samples of one split: tokens (N, L) uint8 and classes (N)."""

    def __init__(self, tokens: Tensor, labels: Tensor) -> None:
        self.tokens, self.labels = tokens, labels

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, chosen: NDArray[np.int64]) -> list[Sample]:
        """Pairs as tokens, and classes."""
        where = torch.from_numpy(chosen)
        rows = zip(self.tokens[where].long(), self.labels[where].tolist(), strict=True)
        return [{"input_ids": ids, "labels": label} for ids, label in rows]


@dataclass(kw_only=True, eq=False)
class Sparsity(MadeSamples, Classification):
    """Tell the sum of the relevant values as one of nine classes; samples are made, as many of each class.

    Departure: a pair is one of four tokens, 2 [v = 1] + a, with a vector of its own each; the paper adds a vector of v
    and one of a. The four are free to be such sums.

    Args:
        relevance: probability of a_i = 1; the paper: 0.1, 0.5, 0.9.
        length: L, at least 4.

    Other options: see `tasks.base`; the paper has a training and a validation split.

    Cost: two seconds for 20,000 samples of 48 pairs; all splits are made at once. One byte per pair is kept.
    """

    train_samples: int = 160_000
    validation_samples: int = 40_000
    test_samples: int = 10_000
    relevance: float = 0.5
    length: int = 200

    name = "sparsity"
    about = "sum of the values that are marked as relevant, nine classes"
    model = "classifier"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sums(self.relevance, self.length)
        self._splits: dict[str, PairTokens] = {}

    def settings(self) -> dict[str, Any]:
        """Four tokens, nine classes."""
        return {"vocab_size": 4, "max_position_embeddings": self.length, "num_labels": CLASSES}

    def split(self, name: str) -> PairTokens:
        """The samples of a split."""
        choice("split", name, SPLITS)
        if not self._splits:
            sizes = list(self.counts.values())
            sums = sparse_sums(sum(sizes), relevance=self.relevance, length=self.length, seed=self.seed)
            tokens = sums.inputs[..., 0].byte() * 2 + sums.inputs[..., 2].byte()
            parts = zip(self.counts, tokens.split(sizes), sums.labels.split(sizes), strict=True)
            self._splits = {split: PairTokens(x, y) for split, x, y in parts}
        return self._splits[name]
