"""Samples and batches: a subset of samples, checked numbers of samples, rows padded to a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

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
