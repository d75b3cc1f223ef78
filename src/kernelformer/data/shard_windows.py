"""Windows of the tokens of a folder of shards, as samples for language models."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset, Sampler

from kernelformer.data.batching import IGNORED, Sample, check_indices
from kernelformer.data.permutation import PermutedOrder
from kernelformer.data.token_shards import TokenShards

Int64 = NDArray[np.int64]


class ShardWindows(Dataset[Sample]):
    """Windows of ``length`` tokens, one after the other; neighbours share one token.

    Window i has tokens i (length - 1) to i (length - 1) + length - 1. Its model predicts all but the first of them, so
    that in an epoch every token of the split but its first is predicted once; the last ones, too few for a window, are
    left out.

    Args:
        tokens: of a split.
        length: of a window, at least 2.
        count: at most so many windows, spread evenly over the split; None: all.
        documents: give segment_ids too, which tell the documents of a window apart; the first token of a document is
            no label then, as nothing of it was seen before.
    """

    def __init__(self, tokens: TokenShards, length: int, count: int | None = None, *, documents: bool = False) -> None:
        self.tokens, self.length, self.documents = tokens, length, documents
        self.whole = max(0, (len(tokens) - 1) // (length - 1))
        self.count = self.whole if count is None else min(count, self.whole)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Sample:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Sample]:
        return [self.sample(index) for index in check_indices(indices, self.count).tolist()]

    def sampler(self, count: int, seed: int) -> Sampler[int]:
        """The order of training: `PermutedOrder`, which needs no list of all windows."""
        return PermutedOrder(len(self), count, seed)

    def start(self, index: int) -> int:
        """Position in the split of a window's first token."""
        return index * self.whole // self.count * (self.length - 1)

    def sample(self, index: int, start: int = 0, stop: int | None = None) -> Sample:
        """A window, or its tokens ``start`` to ``stop`` - 1: input_ids, labels (the same tokens) and segment_ids.

        A part is read without the rest of its window, and is what it is in the whole: whoever divides a window among
        processes asks for one part each.
        """
        first = self.start(index)
        low, high = first + start, first + (self.length if stop is None else stop)
        ids = torch.from_numpy(self.tokens.read(low, high).astype(np.int64))
        if not self.documents:
            return {"input_ids": ids, "labels": ids}
        ends = self.tokens.document_ends(first, high)
        segments = np.searchsorted(ends, np.arange(low, high), side="right")
        labels = ids.clone()
        labels[torch.from_numpy(ends[ends >= low] - low)] = IGNORED
        return {"input_ids": ids, "labels": labels, "segment_ids": torch.from_numpy(segments)}
