"""Windows of equal length of one long sequence of bytes or tokens, as samples for language models."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kernelformer_lab.data.batching import Sample, Samples
from kernelformer_lab.data.sources import uniform

Int64 = NDArray[np.int64]


class Windows(Samples):
    """Windows of equal length, by index; a batch is one gather.

    Args:
        tokens: (N) integers of any width; bytes are tokens too.
    """

    def __init__(self, tokens: NDArray[Any], length: int, count: int) -> None:
        self.tokens, self.length, self.count = tokens, length, count

    @abstractmethod
    def starts(self, indices: Int64) -> Int64:
        """Starts of these windows."""

    def __len__(self) -> int:
        return self.count

    def take(self, chosen: Int64) -> list[Sample]:
        """Windows as tokens and as labels."""
        rows = torch.from_numpy(self.gather(chosen)).unbind()
        return [{"input_ids": row, "labels": row} for row in rows]

    def gather(self, indices: Int64) -> Int64:
        """Tokens of these windows, (B, length)."""
        windows: Int64 = self.tokens[self.starts(indices)[:, None] + np.arange(self.length)].astype(np.int64)
        return windows


class RandomWindows(Windows):
    """Windows at pseudo-random starts: sample i is a function of (seed, i), so no order has to be kept or restored."""

    def __init__(self, tokens: NDArray[Any], length: int, count: int, seed: int) -> None:
        super().__init__(tokens, length, count)
        self.seed = seed

    def starts(self, indices: Int64) -> Int64:
        """Uniform over all starts from which a whole window fits."""
        fits = len(self.tokens) - self.length + 1
        starts: Int64 = (uniform(indices, self.seed) * fits).astype(np.int64)
        return starts


class ConsecutiveWindows(Windows):
    """Windows side by side, or at most ``count`` of them, spread evenly; a last piece too short for one is left out."""

    def __init__(self, tokens: NDArray[Any], length: int, count: int | None) -> None:
        self.whole = len(tokens) // length
        super().__init__(tokens, length, self.whole if count is None else min(count, self.whole))

    def starts(self, indices: Int64) -> Int64:
        """Multiples of the length."""
        starts: Int64 = indices * self.whole // self.count * self.length
        return starts
