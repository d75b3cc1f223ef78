"""ListOps: the value of a nested expression of lists, as Long Range Arena makes them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernelformer.data import listops
from kernelformer.data.batching import Sample, padded
from kernelformer.data.listops import Expressions, ExpressionSamples, Rules
from kernelformer.data.splits import SPLITS
from kernelformer.errors import choice, positive_int
from kernelformer.tasks.base import Classification
from kernelformer.tasks.options import CacheOption, MadeSamples

_ROUND = 16  # batches have a multiple of this length, so that there are few different shapes


@dataclass(kw_only=True, eq=False)
class ListOps(CacheOption, MadeSamples, Classification):
    """Compute the value of an expression such as ``[MAX 4 [SM 7 8 ] 0 [MED 1 9 2 ] ]``, here 5, a digit.

    Operators: MIN, MAX, MED (median, of an even number the mean of the middle two, rounded down), SM (sum modulo 10).
    A node above max_depth is an operator with probability 1/4, else a digit; an operator has 2 to max_args arguments;
    kinds, numbers of arguments and digits are all equally likely. Whole trees are drawn until one has more than
    min_length and less than max_length tokens, and none occurs twice, in whichever split. So says the code of Long
    Range Arena, whose constant for the probability of a value is that of an operator.

    Departures: Long Range Arena writes every list as nested pairs, in parentheses that its tokenizer drops; here they
    are not written. The first release of its tokenizer dropped "]" too; here it is a token, as in the later one.
    Batches are padded to their longest sample, not to max_length, unless pad_to says so.

    Tokens: `data.listops.TOKENS`, 0 is padding. Other sizes of the training set leave the test as it is, and a smaller
    one is the beginning of a larger one.

    Args:
        min_length: samples are longer.
        max_length: samples are shorter.
        max_depth: of the deepest node, the root's being 1.
        max_args: of an operator.
        pad_to: length of every batch; None: the longest sample's, rounded up to a multiple of 16, at most max_length.

    Other options: see `tasks.options`.
    """

    train_samples: int = 96_000
    validation_samples: int = 2000
    test_samples: int = 2000
    min_length: int = Rules.min_length
    max_length: int = Rules.max_length
    max_depth: int = Rules.max_depth
    max_args: int = Rules.max_args
    pad_to: int | None = None

    name = "listops"
    about = "value of nested MIN, MAX, MED and SM of digits, as Long Range Arena makes them"
    model = "classifier"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.rules = Rules(self.min_length, self.max_length, self.max_depth, self.max_args)
        longest = self.max_length - 1
        if self.pad_to is not None and positive_int("pad_to", self.pad_to) < longest:
            raise ValueError(f"pad_to must hold samples of up to max_length - 1 = {longest}, got {self.pad_to}.")
        self._expressions: Expressions | None = None

    def settings(self) -> dict[str, Any]:
        """Ten classes, and room for the longest batch."""
        return {
            "vocab_size": len(listops.TOKENS),
            "max_position_embeddings": max(self.max_length, self.pad_to or 0),
            "num_labels": listops.CLASSES,
            "pad_token_id": 0,
        }

    @property
    def path(self) -> Path:
        """The file of the samples in the cache."""
        return listops.cache_path(self.counts, self.rules, self.seed, self.cache_path)

    def fingerprint(self) -> str:
        """The format: samples are made from the options, and only another way to make them would change them."""
        return f"format {listops.FORMAT}"

    def split(self, name: str) -> ExpressionSamples:
        """Samples from the cache, or made now for all splits: five seconds for 100,000."""
        choice("split", name, SPLITS)
        if self._expressions is None:
            self._expressions = listops.cached_expressions(self.counts, self.rules, self.seed, self.cache_path)
        before = itertools.takewhile(lambda split: split != name, self.counts)
        first = sum(self.counts[split] for split in before)
        return ExpressionSamples(self._expressions, range(first, first + self.counts[name]))

    def collate(self, samples: list[Sample]) -> dict[str, Tensor]:
        """input_ids (B, L), attention_mask (B, L) with 1 for real tokens, labels (B)."""
        rows = [sample["input_ids"] for sample in samples]
        ids, mask = padded(rows, multiple=_ROUND, longest=self.max_length, width=self.pad_to)
        labels = torch.tensor([sample["labels"] for sample in samples])
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}
