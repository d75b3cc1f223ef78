"""Rows of multi-query associative recall: pairs of a key and a value, and each key once more, near or far.

After the MQAR of Zoology (2312.04927), which has all pairs at the beginning and draws its gaps by a power law; here
ranges of distances are chosen, and pairs stand anywhere, so that near and far queries are asked in one row.
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
from kernelformer.errors import integer, positive_int

Int64 = NDArray[np.int64]
Draws = NDArray[np.float64]


@dataclass(frozen=True)
class RecallRules:
    """How rows are made: see `tasks.recall.Recall`, whose options these are.

    Tokens: keys from 0, then values, then fillers.
    """

    length: int = 256
    num_pairs: int = 20
    distances: Sequence[int] = (16, 32, 64, 128, 192)
    num_keys: int = 64
    num_values: int = 64
    num_fillers: int = 16

    def __post_init__(self) -> None:
        for name in ("num_pairs", "num_keys", "num_values", "num_fillers"):
            positive_int(name, getattr(self, name))
        if integer("length", self.length, at_least=4) % 2:
            raise ValueError(f"length must be even, since a pair takes two tokens, got {self.length}.")
        if self.num_keys < self.num_pairs:
            raise ValueError(
                f"the keys of a row are different ones: num_keys must be at least num_pairs, got {self.num_keys} and "
                f"{self.num_pairs}."
            )
        self._check_distances()

    def _check_distances(self) -> None:
        given = self.distances
        if isinstance(given, str) or not isinstance(given, Sequence) or not given:
            raise ValueError(f"distances must be a list of even numbers, got {given!r}.")
        for distance in given:
            if integer("distances", distance, at_least=2) % 2 or distance > self.length - 2:
                raise ValueError(
                    f"a distance must be even, since a pair takes two tokens, and at most length - 2 = "
                    f"{self.length - 2}, got {distance}."
                )
        if len(set(given)) < len(given) or len(given) > self.num_pairs:
            raise ValueError(
                f"distances must differ and be at most as many as num_pairs = {self.num_pairs}, got {list(given)}."
            )
        # A pair that was placed before takes two slots, each of which closes two places.
        for before, (_, gap) in enumerate(self.gaps):
            if self.slots - gap <= 4 * before:
                raise ValueError(
                    f"{self.num_pairs} pairs may not fit: one with its query at distance {2 * gap} has "
                    f"{self.slots - gap} places in length {self.length}, and {before} pairs before it may close "
                    f"{4 * before}; give fewer pairs, shorter distances or longer rows."
                )

    @property
    def slots(self) -> int:
        """Places for two tokens in a row."""
        return self.length // 2

    @property
    def gaps(self) -> list[tuple[int, int]]:
        """For each pair the slots to its query, more than the first and at most the second number, the farthest first.

        Pairs take turns with the distances, from the shortest on.
        """
        ends = [0, *sorted(distance // 2 for distance in self.distances)]
        turns = (i % len(self.distances) for i in range(self.num_pairs))
        return sorted(((ends[turn], ends[turn + 1]) for turn in turns), reverse=True)

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

    Cost: O(L num_pairs) a row, vectorized over the rows of a batch.
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
        rules = self.rules
        sizes = (rules.num_pairs, rules.num_pairs, rules.num_keys, rules.num_pairs, rules.length)
        each = uniform(numbers[:, None] * sum(sizes) + np.arange(sum(sizes)), self.seed)
        far, where, order, which, filler = np.split(each, np.cumsum(sizes[:-1]), axis=1)
        keys = order.argsort(1)[:, : rules.num_pairs]
        values = rules.num_keys + _below(which, rules.num_values)
        ids = rules.num_keys + rules.num_values + _below(filler, rules.num_fillers)
        labels, distances = np.full_like(ids, IGNORED), np.zeros_like(ids)
        over, most = np.array(rules.gaps).T
        gaps = over + 1 + _below(far, most - over)
        pairs = self._places(where, gaps)
        queries, rows = pairs + gaps, np.arange(len(ids))[:, None]
        ids[rows, 2 * pairs], ids[rows, 2 * pairs + 1], ids[rows, 2 * queries] = keys, values, keys
        labels[rows, 2 * queries + 1], distances[rows, 2 * queries + 1] = values, 2 * gaps
        return ids, labels, distances

    def _places(self, draws: Draws, gaps: Int64) -> Int64:
        """Slots (B, num_pairs) of the pairs: each in turn takes one of the places where it and its query are free."""
        slots, rows = np.arange(self.rules.slots), np.arange(len(draws))
        free = np.ones((len(draws), 2 * len(slots)), bool)
        free[:, len(slots) :] = False  # beyond the end
        places = np.empty_like(gaps)
        for pair, gap in enumerate(gaps.T):
            count = (free[:, : len(slots)] & free[rows[:, None], slots + gap[:, None]]).cumsum(1)
            place = (count > _below(draws[:, pair], count[:, -1])[:, None]).argmax(1)
            free[rows, place] = free[rows, place + gap] = False
            places[:, pair] = place
        return places


def _below(draws: Draws, size: int | Int64) -> Int64:
    """Whole numbers from 0 to size - 1, of draws in [0, 1)."""
    numbers: Int64 = (draws * size).astype(np.int64)
    return numbers
