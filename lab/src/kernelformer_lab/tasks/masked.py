"""Masked language modelling of text: masked tokens are to be found from both sides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray

from kernelformer.errors import number
from kernelformer_lab.data.batching import IGNORED, Sample, Samples
from kernelformer_lab.data.sources import SPLITS, mix_bits, uniform
from kernelformer_lab.data.tokenization import Vocabulary
from kernelformer_lab.data.windows import Windows
from kernelformer_lab.tasks.base import Outcome
from kernelformer_lab.tasks.corpus import Corpus

MASKED, REPLACED = 0.8, 0.1  # of the chosen tokens; the rest stays as it is

Int64 = NDArray[np.int64]


class MaskedWindows(Samples):
    """Windows of tokens of which some are masked; a batch is a few operations.

    Which tokens, and what becomes of them, is a function of (seed, split, index, position).

    Args:
        windows: of the tokens of the split.
        vocabulary: of the tokens.
        share: of the tokens is chosen.
        keys: three numbers that the choices depend on.
    """

    def __init__(self, windows: Windows, vocabulary: Vocabulary, share: float, keys: list[int]) -> None:
        self.windows, self.share, self.keys = windows, share, keys
        self.mask, self.ordinary = cast(int, vocabulary.mask), vocabulary.ordinary()
        self.special = np.ones(vocabulary.size, bool)
        self.special[self.ordinary] = False

    def __len__(self) -> int:
        return len(self.windows)

    def take(self, chosen: Int64) -> list[Sample]:
        """Masked windows."""
        ids, labels = self.batch(chosen)
        rows = zip(torch.from_numpy(ids), torch.from_numpy(labels), strict=True)
        return [{"input_ids": x, "labels": y} for x, y in rows]

    def batch(self, indices: Int64) -> tuple[Int64, Int64]:
        """Tokens as the model sees them, and labels, both (B, L)."""
        numbers = indices[:, None] * self.windows.length + np.arange(self.windows.length)
        return self._masked(self.windows.gather(indices), numbers)

    def _masked(self, tokens: Int64, numbers: Int64) -> tuple[Int64, Int64]:
        """Mask tokens (B, L), each of which has a number of its own (B, L); gives inputs and labels."""
        chance = uniform(numbers, self.keys[0])
        chance[self.special[tokens]] = 2.0  # special tokens are not masked
        chosen = chance < self.share
        chosen[np.arange(len(tokens)), chance.argmin(1)] = True  # at least one: no label, no mean loss
        labels = np.where(chosen, tokens, IGNORED)
        numbers, wanted = numbers[chosen], tokens[chosen]
        fate = uniform(numbers, self.keys[1])
        seen = np.where(fate < MASKED, self.mask, wanted)
        other = (fate >= MASKED) & (fate < MASKED + REPLACED)
        seen[other] = self.ordinary[(uniform(numbers[other], self.keys[2]) * len(self.ordinary)).astype(np.int64)]
        ids = tokens.copy()
        ids[chosen] = seen
        return ids, labels


@dataclass(kw_only=True, eq=False)
class Masked(Corpus):
    """Find the masked tokens of a text; scored by perplexity, over the chosen tokens.

    Of the tokens of a window 15% are chosen; of these 80% become <mask>, 10% another token, any of the vocabulary with
    the same probability, and 10% stay. At least one is chosen in each window. Masks of validation and test are fixed.

    Data, and what it costs: see `tasks.corpus.Corpus`. Windows pay no heed to <eos>, but it is never masked.

    Departures from BERT: there is no second task beside this one, and training windows are at random places instead of
    one after the other, so that no two epochs are alike.

    Args:
        mask_share: of the tokens is chosen.

    Other options: see `Corpus`; ``tokenizer`` must have a token for masks, and ``seed`` is that of masks too.
    """

    mask_share: float = 0.15

    name = "masked"
    about = "masked language modelling; --data is a text file, a folder of .txt, rows with texts, or hub:NAME"
    model = "masked-lm"
    shortest = 1

    def __post_init__(self) -> None:
        self.mask_share = number("mask_share", self.mask_share, above=0)
        if self.mask_share >= 1:
            raise ValueError(f"mask_share must be below 1, so that something is left to see, got {self.mask_share}.")
        super().__post_init__()
        if self.special.mask is None:
            raise ValueError(f"{self.tokenizer} has no token for what is hidden; add <mask> or [MASK] to it.")

    def split(self, name: str) -> MaskedWindows:
        """Windows of the split's tokens, some of them masked."""
        windows = self.windows(name)
        seed = mix_bits(np.array([self.seed], np.uint64))
        keys = mix_bits(seed + np.arange(9).astype(np.uint64)).reshape(3, 3)
        return MaskedWindows(windows, self.vocabulary(), self.mask_share, keys[SPLITS.index(name)].tolist())

    def baselines(self, split: str) -> dict[str, dict[str, float]]:
        """Scores of guessing by frequency in the training split, each token counted once more."""
        data, words = self.split(split), self.vocabulary()
        counts = np.bincount(self.tokens("train"), minlength=words.size)[words.ordinary()] + 1
        share = np.zeros(words.size)
        share[words.ordinary()] = counts / counts.sum()
        loss = right = total = 0.0
        for first in range(0, len(data), 256):
            labels = data.batch(np.arange(first, min(first + 256, len(data))))[1]
            labels = labels[labels != IGNORED]
            loss -= float(np.log(share[labels]).sum())
            right += float((labels == share.argmax()).sum())
            total += len(labels)
        return {"frequency of tokens": self.score(Outcome(loss / total, right / total))}
