"""Windows of tokens of which some are masked, as samples for masked language models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from kernelformer.data.batching import IGNORED, Sample, check_indices
from kernelformer.data.splits import uniform
from kernelformer.data.tokenization import Vocabulary
from kernelformer.data.windows import Windows

MASKED, REPLACED = 0.8, 0.1  # of the chosen tokens; the rest stays as it is

Int64 = NDArray[np.int64]


class MaskedWindows(Dataset[Sample]):
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

    def __getitem__(self, index: int) -> Sample:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Sample]:
        ids, labels = self.batch(indices)
        rows = zip(torch.from_numpy(ids), torch.from_numpy(labels), strict=True)
        return [{"input_ids": x, "labels": y} for x, y in rows]

    def batch(self, indices: Sequence[int]) -> tuple[Int64, Int64]:
        """Tokens as the model sees them, and labels, both (B, L)."""
        chosen = check_indices(indices, len(self))
        numbers = chosen[:, None] * self.windows.length + np.arange(self.windows.length)
        return self._masked(self.windows.gather(chosen), numbers)

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
