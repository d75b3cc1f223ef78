"""The synthetic sparsity task: add up the values that are relevant (KL-Transformer, App. E)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernelformer.data.batching import Sample
from kernelformer.data.sparse_sums import CLASSES, PairTokens, check_sums, sparse_sums
from kernelformer.data.splits import SPLITS
from kernelformer.errors import choice
from kernelformer.tasks.base import Classification
from kernelformer.tasks.options import MadeSamples


@dataclass(kw_only=True, eq=False)
class Sparsity(MadeSamples, Classification):
    """Tell the sum of the relevant values as one of nine classes; samples are made, as many of each class.

    Departure: a pair is one of four tokens, 2 [v = 1] + a, with a vector of its own each; the paper adds a vector of v
    and one of a. The four are free to be such sums.

    Args:
        relevance: probability of a_i = 1; the paper: 0.1, 0.5, 0.9.
        length: L, at least 4.

    Other options: see `tasks.options`; the paper has a training and a validation split.

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

    def collate(self, samples: list[Sample]) -> dict[str, Tensor]:
        """input_ids (B, L), labels (B); all are of the same length."""
        ids, labels = [x["input_ids"] for x in samples], [x["labels"] for x in samples]
        return {"input_ids": torch.stack(ids), "labels": torch.tensor(labels)}
