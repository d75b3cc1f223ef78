"""Short sequences packed into rows: several in each, as segments that do not see each other."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from kernelformer.errors import positive_int

Sample = dict[str, Any]  # what a model is given, by name
IGNORED = -100  # label of what is not predicted
Int64 = NDArray[np.int64]


def check_limits(limits: Mapping[str, int | None]) -> dict[str, int | None]:
    """Check the options ``..._samples``, by split: at most so many samples, or None for all."""
    return {split: None if x is None else positive_int(f"{split}_samples", x) for split, x in limits.items()}


def spread_evenly(size: int, count: int | None) -> Int64:
    """Numbers below ``size``, in order: all (None), or at most ``count``, number i being floor(i size / count)."""
    kept = size if count is None else min(count, size)
    numbers: Int64 = np.arange(kept, dtype=np.int64) * size // max(kept, 1)
    return numbers


def check_indices(indices: Sequence[int], count: int) -> Int64:
    """Numbers of samples as an array; IndexError outside of 0 to count - 1."""
    chosen = np.asarray(indices, dtype=np.int64)
    if chosen.size and not (chosen.min() >= 0 and chosen.max() < count):
        raise IndexError(f"samples are numbered from 0 to {count - 1}, got {list(indices)}.")
    return chosen


class Samples(Dataset[Sample], ABC):
    """Samples by number, of which several are taken at once."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def take(self, chosen: Int64) -> list[Sample]:
        """The samples of these numbers (B), which are from 0 to len(self) - 1."""

    def __getitem__(self, index: int) -> Sample:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Sample]:
        return self.take(check_indices(indices, len(self)))


def padded(
    rows: Sequence[Tensor], *, multiple: int, longest: int, width: int | None = None, value: int = 0
) -> tuple[Tensor, Tensor]:
    """Pad rows of different lengths to a batch.

    Args:
        rows: B times (n_i) int64.
        multiple: L is one of this, so that there are few different shapes.
        longest: L is no larger, unless a row is.
        width: L itself, at least the longest row's length.
        value: what rows are filled up with.

    Returns:
        (B, L), and (B, L) int64 with 1 where a row is.
    """
    lengths = torch.tensor([len(x) for x in rows])
    most = int(lengths.max())
    width = width or max(most, min(-(-most // multiple) * multiple, longest))
    filled = pad(pad_sequence(list(rows), batch_first=True, padding_value=value), (0, width - most), value=value)
    return filled, (torch.arange(width) < lengths[:, None]).long()


def fill_rows(lengths: Sequence[int], width: int) -> list[Int64]:
    """Divide sequences among rows: the longest first, each into the fullest row that has room (best fit decreasing).

    Args:
        lengths: N, none of them above ``width``.

    Returns:
        The numbers of the sequences of each row, in rising order; rows by their first one.

    Cost: O(N log N) comparisons.
    """
    rooms: list[int] = []  # rising, with the row of each beside it
    rows: list[list[int]] = []
    for number in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        at = bisect_left(rooms, lengths[number])
        room, row = (rooms.pop(at), rows.pop(at)) if at < len(rooms) else (width, [])
        at = bisect_left(rooms, room - lengths[number])
        rooms.insert(at, room - lengths[number])
        rows.insert(at, [*row, number])
    return sorted((np.array(sorted(row)) for row in rows), key=lambda row: int(row[0]))


class PackedRows(Samples):
    """Rows of several samples each: input_ids and labels one after another, and segment_ids from 0 in each row.

    Args:
        samples: with input_ids and labels (n_i); ``len(samples)`` is a multiple of N, one version of all after another.
        lengths: (N) tokens of each.
        width: tokens of a row, at most.
        shifted: whether labels are those of the next token, so that a sample's first one is none.
    """

    def __init__(self, samples: Dataset[Sample], lengths: Sequence[int], width: int, *, shifted: bool) -> None:
        self.samples, self.shifted, self.count = samples, shifted, len(lengths)
        self.rows = fill_rows(lengths, width)
        self.versions = len(samples) // max(self.count, 1)  # type: ignore[arg-type]  # they have a length

    def __len__(self) -> int:
        return len(self.rows) * self.versions

    def take(self, chosen: Int64) -> list[Sample]:
        """Whole rows."""
        rows = [self.rows[i % len(self.rows)] + i // len(self.rows) * self.count for i in chosen]
        samples = iter(self.samples.__getitems__(np.concatenate([np.empty(0, np.int64), *rows])))  # type: ignore[attr-defined]
        return [self._join([next(samples) for _ in row]) for row in rows]

    def _join(self, samples: list[Sample]) -> Sample:
        lengths = torch.tensor([len(x["input_ids"]) for x in samples])
        ids, labels = (torch.cat([x[name] for x in samples]) for name in ("input_ids", "labels"))
        if self.shifted:
            labels[lengths.cumsum(0) - lengths] = IGNORED
        segments = torch.arange(len(samples)).repeat_interleave(lengths)
        return {"input_ids": ids, "labels": labels, "segment_ids": segments}


def padded_segments(samples: list[Sample], *, multiple: int, longest: int) -> Tensor:
    """The segment_ids of rows as a batch (B, L), see `padded`: what a row is filled up with is a segment of its own."""
    rows = [x["segment_ids"] for x in samples]
    return padded(rows, multiple=multiple, longest=longest, value=longest)[0]
