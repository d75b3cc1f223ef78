"""In which order a run sees its samples: a function of the seed, and of their lengths where it groups by them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset, Sampler

_BATCHES = 50  # sorted together: enough for batches of one length, few enough that the order stays random


class Order(Sampler[int]):
    """Which samples, for a whole run: permutation after permutation of all of them, a function of the seed alone.

    It has no epochs at which a short batch would come, so it does not depend on how a batch is divided either.

    Args:
        size: number of samples.
        count: how many are wanted, with repetition.
        seed: of the permutations.
    """

    def __init__(self, size: int, count: int, seed: int) -> None:
        self.size, self.count, self.seed = size, count, seed

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        gen = torch.Generator().manual_seed(self.seed)
        for start in range(0, self.count, self.size):
            for part in torch.randperm(self.size, generator=gen)[: self.count - start].split(1024):
                yield from part.tolist()  # not all at once: a list of a million integers takes 40 MB


class GroupedOrder(Sampler[int]):
    """The samples of an order, in batches of about one length.

    The next 50 batches' samples are sorted by length, cut into batches, and the batches shuffled: every sample comes
    as often as before, at most 50 batches from where it was, beside others of its length.

    Args:
        order: of the samples.
        lengths: (N) of all samples.
        batch: samples of an update.
        seed: of the order of the batches.
    """

    def __init__(self, order: Sampler[int], lengths: NDArray[np.int64], batch: int, seed: int) -> None:
        self.order, self.lengths, self.batch, self.seed = order, lengths, batch, seed

    def __len__(self) -> int:
        return len(self.order)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[int]:
        rng = np.random.default_rng(self.seed)
        waiting: list[int] = []
        for index in self.order:
            waiting.append(index)
            if len(waiting) == _BATCHES * self.batch:
                yield from self._grouped(waiting, rng)
                waiting = []
        yield from self._grouped(waiting, rng)

    def _grouped(self, indices: list[int], rng: np.random.Generator) -> list[int]:
        by_length = np.array(indices)[np.argsort(self.lengths[indices], kind="stable")] if indices else np.zeros(0, int)
        whole = len(by_length) // self.batch * self.batch  # an incomplete batch stays last
        batches = rng.permutation(by_length[:whole].reshape(-1, self.batch))
        return [*batches.ravel().tolist(), *by_length[whole:].tolist()]


class LongestFirst(Sampler[int]):
    """All samples once, the longest first, so that a batch has little padding and the largest comes first."""

    def __init__(self, lengths: NDArray[np.int64]) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        yield from np.argsort(-self.lengths, kind="stable").tolist()


def sample_lengths(data: Dataset[Any]) -> NDArray[np.int64] | None:
    """How long the samples of a data set are, (N); None where they are all of one length, or nobody knows."""
    lengths: NDArray[np.int64] | None = getattr(data, "lengths", None)
    return lengths
