"""Multi-query associative recall: which value stood beside a key, near or far (Zoology, 2312.04927)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from kernelformer.errors import choice, integer, number, positive_int
from kernelformer_lab.data.batching import IGNORED, Sample, Samples
from kernelformer_lab.data.sources import SPLITS, uniform
from kernelformer_lab.tasks.base import Classification, MadeSamples, Outcome

Int64 = NDArray[np.int64]
Draws = NDArray[np.float64]


@dataclass(frozen=True)
class RecallRules:
    """Rules by which rows are made: options of `Recall`.

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


class RecallRows(Samples):
    """Rows by number, made on demand: row i is a function of (rules, seed, i), independent of the batch.

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

    def take(self, chosen: Int64) -> list[Sample]:
        """Rows of tokens with labels and distances."""
        rows = zip(*map(torch.from_numpy, self._make(self.numbers.start + chosen)), strict=True)
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


@dataclass(kw_only=True, eq=False)
class Recall(MadeSamples, Classification):
    """Tell the value of a key that was seen before; scored by the share of right answers, by distance too.

    A row has L / 2 slots of two tokens each. It is made so:

    1. num_pairs different keys are drawn, and for each a value; one value may stand beside several keys. The pairs
       (key, value) are the first slots, in random order.
    2. Every other slot is a query with probability query_share, and the first of them always: the key of one of the
       pairs that are at most max(distances) tokens before it, all equally likely, and a filler.
    3. All slots that are left get two fillers; fillers are drawn one by one.

    After the key of a query its value is to be predicted, and nothing else counts in loss and accuracy. The answer is
    not shown, so that a value stands in its pair alone, but where two keys have the same: what is far can be told by
    memory alone. A window of w tokens holds the answers to distances up to w, and two layers of windows reach no
    farther than 2 w - 1.

    Departures from Zoology: a key may be asked for several times, distances are not by a power law, and fillers are
    tokens of their own.

    Args:
        length: L, even.
        num_pairs: of a row.
        query_share: probability of a query in a slot without a pair.
        distances: numbers of tokens from a key to the same key in a query, the ends of the ranges that are scored:
            [64, 128] asks over 2 to 128 tokens, and scores those up to 64 and those above.
        num_keys: different keys.
        num_values: different values; guessing is right in one of so many answers.
        num_fillers: different fillers.

    Other options: see `tasks.base`. Rows are numbered, those of the test first, then validation and training, so
    that splits are disjoint; row i is a function of (seed, i) and the options above.

    Cost: nothing is kept; three million tokens a second on one core, made as they are needed.
    """

    train_samples: int = 1_000_000
    validation_samples: int = 500
    test_samples: int = 2000
    length: int = RecallRules.length
    num_pairs: int = RecallRules.num_pairs
    query_share: float = RecallRules.query_share
    distances: Sequence[int] = RecallRules.distances
    num_keys: int = RecallRules.num_keys
    num_values: int = RecallRules.num_values
    num_fillers: int = RecallRules.num_fillers

    name = "recall"
    about = "value of a key that was seen before, at several distances (multi-query associative recall)"
    model = "causal-lm"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.rules = RecallRules(**{x.name: getattr(self, x.name) for x in fields(RecallRules)})

    def settings(self) -> dict[str, Any]:
        """Keys, values and fillers are tokens, and none is padding."""
        return {"vocab_size": self.rules.vocab_size, "max_position_embeddings": self.length, "pad_token_id": None}

    def split(self, name: str) -> RecallRows:
        """Rows of a split, made when they are asked for."""
        before = itertools.takewhile(lambda split: split != choice("split", name, SPLITS), self.counts)
        first = sum(self.counts[split] for split in before)
        return RecallRows(self.rules, range(first, first + self.counts[name]), self.seed)

    def collate(self, samples: list[Sample]) -> dict[str, Tensor]:
        """input_ids and labels, both (B, L); labels are -100 but for the answers."""
        return {name: torch.stack([sample[name] for sample in samples]) for name in ("input_ids", "labels")}

    def extra_metrics(self) -> list[str]:
        """The accuracy in each range of distances, the shortest first."""
        return [f"accuracy_to_{distance}" for distance in sorted(self.distances)]

    def judge(self, model: Any, data: Dataset[Sample], batch_size: int) -> dict[str, float]:
        """The accuracy in each range of distances; a range without a query has none."""
        ends = torch.tensor([0, *sorted(self.distances)])
        counts = torch.zeros(2, len(ends), dtype=torch.int64)  # queries, right answers
        for first in range(0, len(data), batch_size):  # type: ignore[arg-type]
            last = min(first + batch_size, len(data))  # type: ignore[arg-type]
            samples = [data[i] for i in range(first, last)]
            batch = self.collate(samples)
            logits = model(batch["input_ids"].to(model.device)).logits[:, :-1]
            right = logits.argmax(-1).cpu() == batch["labels"][:, 1:]
            distances = torch.stack([sample["distances"] for sample in samples])[:, 1:]
            for row, answers in enumerate((distances, distances[right])):
                counts[row] += torch.bucketize(answers.flatten(), ends).bincount(minlength=len(ends))
        shares = zip(self.extra_metrics(), *counts[:, 1:].tolist(), strict=True)
        return {name: right / asked for name, asked, right in shares if asked}

    def baselines(self, split: str) -> dict[str, dict[str, float]]:
        """Scores of guessing among all values."""
        return {"guessing": self.score(Outcome(math.log(self.num_values), 1 / self.num_values))}
