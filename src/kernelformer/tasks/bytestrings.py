"""Texts as bytes: kept in one flat array, padded to batches by few operations, classified by one label."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from kernelformer.data.batching import check_indices, check_limits, padded, spread_evenly
from kernelformer.data.sources import Rows, Source, label_names, text_value
from kernelformer.errors import choice, positive_int
from kernelformer.tasks.base import SPLITS, Outcome, Sample, Task

VOCABULARY = 257  # padding is 0, byte b is b + 1
_ROUND = 64  # batches have a multiple of this length, so that there are few different shapes

Int64 = NDArray[np.int64]


def byte_value(value: object) -> bytes:
    """A check for texts that are not empty; gives their UTF-8."""
    return text_value(value).encode()


class Texts:
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


class Samples(Dataset[Sample]):
    """Samples of one or more texts with a label.

    Args:
        columns: name in the model -> N texts.
        labels: (N).
    """

    def __init__(self, columns: Mapping[str, Texts], labels: Sequence[int]) -> None:
        self.columns, self.labels = dict(columns), np.array(labels, np.int64)

    def __len__(self) -> int:
        return len(self.labels)

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


class ByteTask(Task):
    """Classify samples of one or more texts, byte by byte.

    Args:
        source: of the rows.
        labels: their number, or their names.
        length: bytes of a text; longer ones are cut.
        pad_to: length of every batch; None: as long as its longest text asks for.
        limits: split -> at most so many rows of it, spread evenly; None: all.
    """

    metric = "accuracy"
    higher_is_better = True
    inputs: ClassVar[tuple[str, ...]] = ("input_ids",)  # names of the texts in the model

    def __init__(
        self,
        source: Source,
        *,
        labels: int | Sequence[str],
        length: int,
        pad_to: int | None,
        limits: Mapping[str, int | None],
    ) -> None:
        self.source = source
        self.classes, _ = label_names(labels, at_least=2)
        self.length = positive_int("length", length)
        self.pad_to = pad_to
        if pad_to is not None and positive_int("pad_to", pad_to) < length:
            raise ValueError(f"pad_to must hold texts of length bytes, got pad_to={pad_to} and length={length}.")
        self.limits = check_limits(limits)
        self._made: dict[str, Samples] = {}

    @abstractmethod
    def arrange(self, rows: Rows) -> tuple[list[list[bytes]], Sequence[int]]:
        """Texts for each of `inputs`, and labels, of the rows of a split."""

    def settings(self) -> dict[str, Any]:
        """A byte is a token, and 0 is padding."""
        return {
            "vocab_size": VOCABULARY,
            "max_position_embeddings": max(self.length, self.pad_to or 0),
            "num_labels": self.classes,
            "pad_token_id": 0,
        }

    def fingerprint(self) -> str:
        """Of the files, or of the hub's data set."""
        return self.source.fingerprint()

    def remarks(self) -> list[str]:
        """Rows left out, and texts cut, of the splits read so far."""
        found = list(self.source.remarks)
        for name, samples in self._made.items():
            columns = samples.columns.values()
            cut, count = sum(x.cut for x in columns), sum(map(len, columns))
            if cut:
                found.append(f"{cut:,} of {count:,} {name} texts are longer than {self.length} bytes and were cut")
        return found

    def split(self, name: str) -> Samples:
        """Samples of a split, in the order of its rows; read once."""
        if choice("split", name, SPLITS) not in self._made:
            rows = self.source.take(name)
            chosen = spread_evenly(len(next(iter(rows.values()))), self.limits[name]).tolist()
            texts, labels = self.arrange({column: [values[i] for i in chosen] for column, values in rows.items()})
            columns = {x: Texts(y, self.length) for x, y in zip(self.inputs, texts, strict=True)}
            self._made[name] = Samples(columns, labels)
        return self._made[name]

    def collate(self, samples: list[Sample]) -> dict[str, Tensor]:
        """For each of `inputs` tokens (B, L) and a mask (B, L) with 1 for real ones; labels (B)."""
        batch: dict[str, Tensor] = {}
        for name in self.inputs:
            ids, mask = padded([x[name] for x in samples], multiple=_ROUND, longest=self.length, width=self.pad_to)
            batch |= {name: ids, name.replace("input_ids", "attention_mask"): mask}
        return batch | {"labels": torch.tensor([x["labels"] for x in samples])}

    def score(self, found: Outcome) -> dict[str, float]:
        """Share of right answers."""
        return {self.metric: found.right}
