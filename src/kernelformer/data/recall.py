"""Rows of multi-query associative recall: pairs of a key and a value, and keys alone that ask for their values.

After the MQAR of Zoology (2312.04927), which asks for each key once, at a distance by a power law; here a key is asked
for any number of times, and all distances up to a largest one occur.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from kernelformer.data.batching import IGNORED, Sample, check_indices
from kernelformer.data.splits import uniform
from kernelformer.errors import integer, number, positive_int

Int64 = NDArray[np.int64]
Draws = NDArray[np.float64]


@dataclass(frozen=True)
class RecallRules:
    """How rows are made: see `tasks.recall.Recall`, whose options these are.

    Tokens: keys from 0, then values, then fillers.
    """

    length: int = 256
    num_pairs: int = 16
    query_share: float = 0.5
    distances: Sequence[int] = (32, 64, 128, 254)
    num_keys: int = 32
    num_values: int = 32
    num_fillers: int = 4

    def __post_init__(self) -> None:
        for name in ("num_pairs", "num_keys", "num_values", "num_fillers"):
            positive_int(name, getattr(self, name))
        if integer("length", self.length, at_least=4) % 2:
            raise ValueError(f"length must be even, since a pair takes two tokens, got {self.length}.")
        if self.num_pairs > min(self.num_keys, self.slots - 1):
            raise ValueError(
                f"the keys of a row differ, and a query needs room beside the pairs: num_pairs must be at most "
                f"num_keys = {self.num_keys} and length / 2 - 1 = {self.slots - 1}, got {self.num_pairs}."
            )
        if not 0 < number("query_share", self.query_share) <= 1:
            raise ValueError(f"query_share must be above 0 and at most 1, got {self.query_share}.")
        given = self.distances
        if isinstance(given, str) or not isinstance(given, Sequence) or not given:
            raise ValueError(f"distances must be a list of numbers of tokens, got {given!r}.")
        inside = [2 <= integer("distances", distance) <= self.length - 2 for distance in given]
        if not all(inside) or len(set(given)) < len(given):
            raise ValueError(
                f"distances must differ, and be from 2 to length - 2 = {self.length - 2}, got {list(given)}."
            )

    @property
    def slots(self) -> int:
        """Places for two tokens in a row."""
        return self.length // 2

    @property
    def vocab_size(self) -> int:
        """Keys, values and fillers."""
        return self.num_keys + self.num_values + self.num_fillers


class RecallRows(Dataset[Sample]):
    """Rows by number, made when they are asked for: row i is a function of (rules, seed, i), whatever the batch.

    A sample is ``input_ids`` (L), ``labels`` (L), the answers after the keys of queries and elsewhere -100, and
    ``distances`` (L), where the answers are how far their values are, and elsewhere 0.

    Args:
        rules: how rows are made.
        numbers: of the rows.
        seed: of all rows.

    Cost: O(L) a row, vectorized over the rows of a batch.
    """

    def __init__(self, rules: RecallRules, numbers: range, seed: int) -> None:
        self.rules, self.numbers, self.seed = rules, numbers, seed

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> Sample:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Sample]:
        chosen = self.numbers.start + check_indices(indices, len(self))
        rows = zip(*map(torch.from_numpy, self._make(chosen)), strict=True)
        return [{"input_ids": ids, "labels": labels, "distances": far} for ids, labels, far in rows]

    def _make(self, numbers: Int64) -> tuple[Int64, Int64, Int64]:
        """Tokens, labels and distances, all (B, L), of the rows of these numbers (B)."""
        rules, pairs, others = self.rules, self.rules.num_pairs, self.rules.slots - self.rules.num_pairs
        sizes = (rules.length, rules.num_keys, pairs, others, others)
        draws = uniform(numbers[:, None] * sum(sizes) + np.arange(sum(sizes)), self.seed)
        filler, key, value, chance, which = np.split(draws, np.cumsum(sizes[:-1]), axis=1)
        ids = rules.num_keys + rules.num_values + _below(filler, rules.num_fillers)
        keys, values = key.argsort(1)[:, :pairs], rules.num_keys + _below(value, rules.num_values)
        ids[:, : 2 * pairs : 2], ids[:, 1 : 2 * pairs : 2] = keys, values
        first = np.maximum(pairs + np.arange(others) - max(rules.distances) // 2, 0)  # pair that is near enough
        asked = (chance < rules.query_share) & (first < pairs)
        asked[:, 0] = True  # no row without a query
        row, slot = asked.nonzero()
        pair = first[slot] + _below(which[asked], pairs - first[slot])
        labels, distances = np.full_like(ids, IGNORED), np.zeros_like(ids)
        place = 2 * (pairs + slot)
        ids[row, place], labels[row, place + 1] = keys[row, pair], values[row, pair]
        distances[row, place + 1] = place - 2 * pair
        return ids, labels, distances


def _below(draws: Draws, size: int | Int64) -> Int64:
    """Whole numbers from 0 to size - 1, of draws in [0, 1)."""
    numbers: Int64 = (draws * size).astype(np.int64)
    return numbers
