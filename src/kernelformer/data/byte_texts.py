"""Texts as bytes: kept in one flat array, a token a byte, with a label for each sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from kernelformer.data.batching import Sample, check_indices
from kernelformer.data.values import text_value

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


class LabelledTexts(Dataset[Sample]):
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

    def __getitem__(self, index: int) -> Sample:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Sample]:
        chosen = check_indices(indices, len(self))
        columns = [x.tokens(chosen) for x in self.columns.values()]
        labels = self.labels[chosen].tolist()
        return [
            {**dict(zip(self.columns, row, strict=True)), "labels": label}
            for *row, label in zip(*columns, labels, strict=True)
        ]
