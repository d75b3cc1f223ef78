"""Sentences and pairs of them as one sequence of tokens each, with a label."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernelformer_lab.data.arrays import Tokens
from kernelformer_lab.data.batching import Sample, Samples
from kernelformer_lab.data.sources import text_value, uniform
from kernelformer_lab.data.tokenization import Vocabulary

VOCABULARY = 257  # padding is 0, byte b is b + 1

Int64 = NDArray[np.int64]


def byte_value(value: object) -> bytes:
    """Check for texts that are not empty; gives their UTF-8."""
    return text_value(value).encode()


class ByteTexts:
    """Texts one after the other: text i is buffer[offsets[i] : offsets[i + 1]].

    Args:
        texts: UTF-8.
        length: bytes beyond it are cut off; `cut` says of how many texts.
    """

    def __init__(self, texts: Sequence[bytes], length: int) -> None:
        lengths = np.array([len(x) for x in texts], np.int64)
        self.cut = int((lengths > length).sum())
        self.offsets = np.concatenate([[0], np.minimum(lengths, length).cumsum()])
        self.buffer = np.frombuffer(b"".join(x[:length] for x in texts), np.uint8)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def tokens(self, indices: Int64) -> tuple[Tensor, ...]:
        """Tokens of these texts, int64 of their lengths; views of one tensor."""
        starts, ends = self.offsets[indices], self.offsets[indices + 1]
        parts = [self.buffer[a:b] for a, b in zip(starts.tolist(), ends.tolist(), strict=True)]
        flat = torch.from_numpy(np.concatenate(parts)).long().add_(1)
        rows: tuple[Tensor, ...] = flat.split((ends - starts).tolist())
        return rows


class LabelledTexts(Samples):
    """Samples of one or more texts with a label.

    Args:
        columns: name in the model -> N texts.
        labels: (N).
    """

    def __init__(self, columns: Mapping[str, ByteTexts], labels: Sequence[int]) -> None:
        self.columns, self.labels = dict(columns), np.array(labels, np.int64)

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def lengths(self) -> Int64:
        """(N) numbers of tokens, of several texts those of the longest."""
        longest: Int64 = np.max([np.diff(x.offsets) for x in self.columns.values()], axis=0)
        return longest

    def take(self, chosen: Int64) -> list[Sample]:
        """Tokens of all columns, and labels."""
        columns = [x.tokens(chosen) for x in self.columns.values()]
        labels = self.labels[chosen].tolist()
        return [
            {**dict(zip(self.columns, row, strict=True)), "labels": label}
            for *row, label in zip(*columns, labels, strict=True)
        ]


FORMAT = 1  # to be raised when the same options come to mean other pairs


def halves(value: object) -> tuple[bytes, bytes]:
    """Check for texts of at least two characters; gives their halves in UTF-8.

    The cut is at the blank nearest to the middle, or in the middle itself if none is within a quarter of the text.
    """
    text = text_value(value).strip()
    if len(text) < 2:
        raise ValueError(f"must have at least two characters, one for each half, got {text!r}")
    middle = len(text) // 2
    near = (at for step in range(len(text) // 4 + 1) for at in (middle - step, middle + step))
    at = next((x for x in near if text[x].isspace()), middle)
    return text[:at].rstrip().encode(), text[at:].lstrip().encode()


def exchange_halves(lengths: Sequence[int], seed: int) -> NDArray[np.int64]:
    """Choose whose second half goes with the first half of each text: its own, or that of a text as long.

    Texts are ordered by length, equal ones by a hash of (seed, row). Two neighbours are a couple, and of two couples in
    a row one, by a hash, exchanges second halves. So every half occurs once, and half of the texts keep their own.

    Args:
        lengths: (N), of the second halves.

    Returns:
        (N) numbers of texts.
    """
    count = len(lengths)
    order = np.lexsort((uniform(np.arange(count), seed), np.asarray(lengths)))
    couples = np.arange(count // 2)
    toss = uniform(count + couples // 2, seed) < 0.5
    parted = couples[(couples + toss) % 2 == 1]
    one, other = order[2 * parted], order[2 * parted + 1]
    whose = np.arange(count)
    whose[one], whose[other] = other, one
    return whose


Int32 = NDArray[np.int32]


def fit_pairs(first: Int64, second: Int64, room: int) -> tuple[Int64, Int64]:
    """Tokens to keep of each side of pairs: the longer side is cut first.

    Args:
        first: (N) tokens of the first sides.
        second: (N) of the second ones.
    """
    a = np.minimum(first, np.maximum(room - second, room - room // 2))
    return a, np.minimum(second, room - a)


def join_sides(sides: Sequence[Tokens], vocabulary: Vocabulary, length: int) -> tuple[Int32, Int64, int]:
    """Samples ``<bos> a <eos>`` or ``<bos> a <sep> b <eos>``; what is too long is cut.

    Args:
        sides: one or two, each the tokens and offsets of N texts.
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


class LabelledTokens(Samples):
    """Samples by index: input_ids (L) int64 and a label.

    Args:
        tokens: (T) integers, of all samples one after the other.
        offsets: (N + 1) int64.
        labels: (N) integers, or float32 numbers.
    """

    def __init__(self, tokens: NDArray[Any], offsets: Int64, labels: NDArray[Any]) -> None:
        self.tokens, self.offsets, self.labels = tokens, offsets, labels

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def lengths(self) -> Int64:
        """(N) numbers of tokens."""
        return np.diff(self.offsets)

    def take(self, chosen: Int64) -> list[Sample]:
        """Tokens of all columns, and labels."""
        bounds = [(self.offsets[i], self.offsets[i + 1]) for i in chosen]
        ids = [torch.from_numpy(self.tokens[a:b].astype(np.int64)) for a, b in bounds]
        labels = self.labels[chosen].tolist()
        return [{"input_ids": x, "labels": y} for x, y in zip(ids, labels, strict=True)]
