"""Sentences and pairs of them as one sequence of tokens each, with a label."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from kernelformer.data.batching import Sample, check_indices
from kernelformer.data.token_cache import Tokens
from kernelformer.data.tokenization import Vocabulary

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


def fit_pairs(first: Int64, second: Int64, room: int) -> tuple[Int64, Int64]:
    """How many tokens are kept of each of a pair: what is too long is cut from the longer side.

    Args:
        first: (N) tokens of the first sides.
        second: (N) of the second ones.
        room: for both together.
    """
    a = np.minimum(first, np.maximum(room - second, room - room // 2))
    return a, np.minimum(second, room - a)


def join_sides(sides: Sequence[Tokens], vocabulary: Vocabulary, length: int) -> tuple[Int32, Int64, int]:
    """Samples ``<bos> a <eos>`` or ``<bos> a <sep> b <eos>``; what is too long is cut.

    Args:
        sides: one or two, each the tokens and offsets of N texts.
        vocabulary: has the special tokens.
        length: tokens of a sample at most, special ones included.

    Returns:
        (T) tokens of all samples, (N + 1) offsets, and how many samples were cut.
    """
    full = [np.diff(offsets) for _, offsets in sides]
    room = length - 1 - len(sides)
    kept = [np.minimum(full[0], room)] if len(sides) == 1 else list(fit_pairs(full[0], full[1], room))
    lengths = np.sum(kept, axis=0) + 1 + len(sides)
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    tokens = np.empty(offsets[-1], np.int32)
    at = offsets[:-1].copy()
    for mark, (flat, starts), count in zip((vocabulary.bos, vocabulary.sep), sides, kept, strict=False):
        tokens[at] = mark
        inside = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
        tokens[np.repeat(at + 1, count) + inside] = flat[np.repeat(starts[:-1], count) + inside]
        at += 1 + count
    tokens[at] = vocabulary.eos
    return tokens, offsets, int((np.sum(full, axis=0) > room).sum())


class LabelledTokens(Dataset[Sample]):
    """Samples by index: input_ids (L) int64 and a label.

    Args:
        tokens: (T) int32, of all samples one after the other.
        offsets: (N + 1) int64.
        labels: (N) int64, or float32 numbers.
    """

    def __init__(self, tokens: Int32, offsets: Int64, labels: NDArray[Any]) -> None:
        self.tokens, self.offsets, self.labels = tokens, offsets, labels

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def lengths(self) -> Int64:
        """(N) numbers of tokens."""
        return np.diff(self.offsets)

    def __getitem__(self, index: int) -> Sample:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Sample]:
        chosen = check_indices(indices, len(self))
        bounds = [(self.offsets[i], self.offsets[i + 1]) for i in chosen]
        ids = [torch.from_numpy(self.tokens[a:b].astype(np.int64)) for a, b in bounds]
        labels = self.labels[chosen].tolist()
        return [{"input_ids": x, "labels": y} for x, y in zip(ids, labels, strict=True)]
