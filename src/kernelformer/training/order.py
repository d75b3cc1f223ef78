"""In which order a run sees its samples: a function of the seed, and of their lengths where it groups by them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset, Sampler, Subset

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

    The samples of the next 50 batches, of small data those of one pass over it, are sorted by length, cut into batches,
    and the batches shuffled: every sample comes about where it came before, beside others of its length. More steps do
    not change the order of the first ones.

    Args:
        make: the order of so many samples.
        lengths: (N) of all samples.
        batch: samples of an update.
        count: how many are wanted.
        seed: of the order of the batches.
    """

    def __init__(
        self, make: Callable[[int], Sampler[int]], lengths: NDArray[np.int64], batch: int, count: int, seed: int
    ) -> None:
        self.lengths, self.batch, self.count, self.seed = lengths, batch, count, seed
        self.chunk = max(1, min(_BATCHES, len(lengths) // batch)) * batch
        self.order = make(-(-count // self.chunk) * self.chunk)  # whole chunks, whatever the count

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        return islice(self._all(), self.count)

    def _all(self) -> Iterator[int]:
        rng, order = np.random.default_rng(self.seed), iter(self.order)
        while chunk := list(islice(order, self.chunk)):
            by_length = np.array(chunk)[np.argsort(self.lengths[chunk], kind="stable")]
            yield from rng.permutation(by_length.reshape(-1, self.batch)).ravel().tolist()


def training_order(data: Dataset[Any], *, count: int, batch: int, seed: int, grouped: bool) -> Sampler[int]:
    """The order in which a run sees its samples.

    Args:
        data: to learn from; its own ``sampler(count, seed)`` counts where it has one, being too large for a
            permutation.
        count: samples of all updates.
        batch: samples of an update.
        seed: of the order.
        grouped: whether batches are of samples of about one length (`check_grouping`).
    """
    own = getattr(data, "sampler", None)

    def make(size: int) -> Sampler[int]:
        order: Sampler[int] = Order(len(data), size, seed) if own is None else own(size, seed)  # type: ignore[arg-type]
        return order

    lengths = sample_lengths(data) if grouped else None
    return make(count) if lengths is None else GroupedOrder(make, lengths, batch, count, seed)


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
    if isinstance(data, Subset):
        whole = sample_lengths(data.dataset)
        return None if whole is None else whole[list(data.indices)]
    given = getattr(data, "lengths", None)
    if given is None:
        return None
    lengths: NDArray[np.int64] = np.asarray(given)
    if lengths.shape != (len(data),):  # type: ignore[arg-type]
        raise ValueError(
            f"lengths of {type(data).__name__} must be one number for each of its {len(data)} samples, got shape "  # type: ignore[arg-type]
            f"{lengths.shape}; name it otherwise if it is something else."
        )
    return lengths


def check_grouping(task: str, data: Dataset[Any]) -> None:
    """Raise where the samples of a task cannot be grouped by length."""
    if sample_lengths(data) is None:
        raise ValueError(
            f"group_by_length needs samples of different lengths, got task {task!r}, whose samples do not tell theirs; "
            f"leave it out."
        )
