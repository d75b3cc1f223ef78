"""Classification of texts byte by byte: what Long Range Arena's Text and Retrieval have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from kernelformer.data.batching import Sample, padded, spread_evenly
from kernelformer.data.byte_texts import VOCABULARY, ByteTexts, LabelledTexts
from kernelformer.data.sources import Rows, Source
from kernelformer.data.splits import SPLITS
from kernelformer.data.values import Check, label_names
from kernelformer.errors import choice, positive_int
from kernelformer.tasks.base import Classification
from kernelformer.tasks.options import NamedValidation

_ROUND = 64  # batches have a multiple of this length, so that there are few different shapes


@dataclass(kw_only=True, eq=False)
class ByteTask(NamedValidation, Classification):
    """Classify samples of one or more texts, byte by byte.

    Tokens: 0 is padding, byte b of the UTF-8 text is b + 1. Batches are padded to their longest text, not to
    ``length``, unless pad_to says so.

    Args:
        text: name of the column with texts.
        label: name of the column with labels.
        labels: how many there are, numbered from 0, or a list of their names.
        length: bytes of a text; longer ones are cut at the end, and `remarks` says how many.
        pad_to: length of every batch; None: the longest text's, rounded up to a multiple of 64, at most length.

    Options of tasks with rows: see `tasks.options.NamedValidation`.
    """

    text: str = "text"
    label: str = "label"
    labels: int | Sequence[str] = 2
    length: int = 4000
    pad_to: int | None = None

    inputs: ClassVar[tuple[str, ...]] = ("input_ids",)  # names of the texts in the model

    def __post_init__(self) -> None:
        super().__post_init__()
        columns = self.columns()
        self.source = Source(self.data, columns, layout=" and ".join(map(repr, columns)), **self.reading)
        self.classes, _ = label_names(self.labels, at_least=2)
        positive_int("length", self.length)
        if self.pad_to is not None and positive_int("pad_to", self.pad_to) < self.length:
            raise ValueError(
                f"pad_to must hold texts of length bytes, got pad_to={self.pad_to} and length={self.length}."
            )
        self._splits: dict[str, LabelledTexts] = {}

    @abstractmethod
    def columns(self) -> dict[str, Check]:
        """Names of the columns that are read, with the checks of their values."""

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
        """The fingerprint of the files, or of the hub's data set."""
        return self.source.fingerprint()

    def remarks(self) -> list[str]:
        """Rows left out, and texts cut, of the splits read so far."""
        remarks = list(self.source.remarks)
        for name, samples in self._splits.items():
            columns = samples.columns.values()
            cut, count = sum(x.cut for x in columns), sum(map(len, columns))
            if cut:
                remarks.append(f"{cut:,} of {count:,} {name} texts are longer than {self.length} bytes and were cut")
        return remarks

    def split(self, name: str) -> LabelledTexts:
        """Samples of a split, in the order of its rows; read once."""
        if choice("split", name, SPLITS) not in self._splits:
            rows = self.source.take(name)
            chosen = spread_evenly(len(next(iter(rows.values()))), self.limits[name]).tolist()
            texts, labels = self.arrange({column: [values[i] for i in chosen] for column, values in rows.items()})
            columns = {x: ByteTexts(y, self.length) for x, y in zip(self.inputs, texts, strict=True)}
            self._splits[name] = LabelledTexts(columns, labels)
        return self._splits[name]

    def collate(self, samples: list[Sample]) -> dict[str, Tensor]:
        """For each of `inputs` tokens (B, L) and a mask (B, L) with 1 for real ones; labels (B)."""
        batch: dict[str, Tensor] = {}
        for name in self.inputs:
            ids, mask = padded([x[name] for x in samples], multiple=_ROUND, longest=self.length, width=self.pad_to)
            batch |= {name: ids, name.replace("input_ids", "attention_mask"): mask}
        return batch | {"labels": torch.tensor([x["labels"] for x in samples])}
