"""Multi-query associative recall: which value stood beside a key, near or far (Zoology, 2312.04927)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from kernelformer.data.batching import Sample
from kernelformer.data.recall import RecallRows, RecallRules
from kernelformer.data.splits import SPLITS
from kernelformer.errors import choice
from kernelformer.tasks.base import Classification, Outcome
from kernelformer.tasks.options import MadeSamples


@dataclass(kw_only=True, eq=False)
class Recall(MadeSamples, Classification):
    """Tell the value of a key that is seen for the second time; scored by the share of right answers, by distance too.

    A row has L / 2 slots of two tokens each. It is made so:

    1. num_pairs different keys are drawn, and for each a value; one value may stand beside several keys.
    2. Pairs take turns with the distances, so that each is asked for equally often in every row, up to one query.
    3. From the longest distance to the shortest, a pair (key, value) takes one of the slots that are free together with
       the slot ``distance`` tokens after it, all equally likely. There its query stands: the same key and value again.
    4. Every slot that is left gets two fillers, drawn one by one.

    The value of each query is to be predicted from what is before it; nothing else counts in loss and accuracy. So a
    key is asked for once, ``distance`` tokens after its pair, and its value is nowhere nearer but by chance: a window
    of w tokens holds the answers to distances up to w, two layers of windows see up to 2 (w - 1) tokens back.

    Departures from Zoology: pairs stand anywhere instead of at the beginning, distances are chosen instead of drawn
    from a power law, and fillers are tokens of their own.

    Args:
        length: L, even.
        num_pairs: of a row.
        distances: even numbers of tokens from a key to the same key in its query.
        num_keys: different keys.
        num_values: different values; guessing is right in one of so many answers.
        num_fillers: different fillers.

    Other options: see `tasks.options`. Rows are numbered, those of the test first, then validation and training, so
    that splits are disjoint; row i is a function of (seed, i) and the options above.

    Cost: nothing is kept; three million tokens a second on one core, made as they are needed.
    """

    train_samples: int = 1_000_000
    validation_samples: int = 500
    test_samples: int = 2000
    length: int = RecallRules.length
    num_pairs: int = RecallRules.num_pairs
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
        return {
            "vocab_size": self.rules.vocab_size,
            "max_position_embeddings": self.length,
            "pad_token_id": None,
        }

    def split(self, name: str) -> RecallRows:
        """Rows of a split, made when they are asked for."""
        before = itertools.takewhile(lambda split: split != choice("split", name, SPLITS), self.counts)
        first = sum(self.counts[split] for split in before)
        return RecallRows(self.rules, range(first, first + self.counts[name]), self.seed)

    def collate(self, samples: list[Sample]) -> dict[str, Tensor]:
        """input_ids and labels, both (B, L); labels are -100 but for the answers."""
        return {name: torch.stack([sample[name] for sample in samples]) for name in ("input_ids", "labels")}

    def extra_metrics(self) -> list[str]:
        """The accuracy at each distance, the shortest first."""
        return [_accuracy_at(distance) for distance in sorted(self.distances)]

    def judge(self, model: Any, data: Dataset[Sample], batch_size: int) -> dict[str, float]:
        """The accuracy at each distance."""
        counts = torch.zeros(2, self.length, dtype=torch.int64)  # queries, right answers
        for first in range(0, len(data), batch_size):  # type: ignore[arg-type]
            last = min(first + batch_size, len(data))  # type: ignore[arg-type]
            samples = [data[i] for i in range(first, last)]
            batch = self.collate(samples)
            logits = model(batch["input_ids"].to(model.device)).logits[:, :-1]
            right = logits.argmax(-1).cpu() == batch["labels"][:, 1:]
            distances = torch.stack([sample["distances"] for sample in samples])[:, 1:]
            for row, answers in enumerate((distances, distances[right])):
                counts[row] += answers.flatten().bincount(minlength=self.length)
        return {_accuracy_at(x): int(counts[1, x]) / int(counts[0, x]) for x in sorted(self.distances)}

    def baselines(self, split: str) -> dict[str, dict[str, float]]:
        """Scores of guessing among all values, and among those of the row so far."""
        return {"guessing": self.score(Outcome(math.log(self.num_values), 1 / self.num_values))}


def _accuracy_at(distance: int) -> str:
    return f"accuracy_at_{distance}"
