"""Classes, or a number, for one sentence or a pair of them, as in GLUE."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernelformer.errors import choice, integer
from kernelformer_lab.data.arrays import Tokens, cached_tokens
from kernelformer_lab.data.batching import Sample, padded, spread_evenly
from kernelformer_lab.data.byte_texts import LabelledTokens, join_sides
from kernelformer_lab.data.files import brief
from kernelformer_lab.data.sources import (
    SPLITS,
    Check,
    Rows,
    Source,
    label_names,
    label_value,
    number_value,
    optional_text,
    text_value,
)
from kernelformer_lab.tasks.base import NamedValidation, Outcome
from kernelformer_lab.tasks.kinds import VocabularyTask

METRICS = {
    "accuracy": "share of right answers",
    "f1": "harmonic mean of precision and recall of class 1, of two",
    "matthews": "correlation of answers and classes",
    "pearson": "correlation of numbers",
    "spearman": "correlation of the ranks of numbers",
}
OF_NUMBERS = ("pearson", "spearman")

Numbers = NDArray[np.float64]


def f1(predictions: NDArray[Any], labels: NDArray[Any]) -> float:
    """F1 of class 1.

        2 TP / (2 TP + FP + FN)          0 where there is no 1 at all

    Args:
        predictions: (N) classes.
        labels: (N) classes.
    """
    predicted, wanted = predictions == 1, labels == 1
    ones = int(predicted.sum() + wanted.sum())
    return 2 * int((predicted & wanted).sum()) / ones if ones else 0.0


def matthews(predictions: NDArray[Any], labels: NDArray[Any]) -> float:
    """Matthews' correlation of any number of classes; 0 where answers or labels are all the same.

        (N c - sum_k p_k t_k) / sqrt((N^2 - sum_k p_k^2) (N^2 - sum_k t_k^2))

    c right answers of N, p_k answers and t_k labels of class k. For two classes it is
    (TP TN - FP FN) / sqrt((TP + FP) (TP + FN) (TN + FP) (TN + FN)).

    Args:
        predictions: (N) classes.
        labels: (N) classes.
    """
    size = float(len(labels))
    classes = int(max(predictions.max(), labels.max())) + 1
    p, t = (np.bincount(x.astype(np.int64), minlength=classes).astype(np.float64) for x in (predictions, labels))
    below = (size**2 - p @ p) * (size**2 - t @ t)
    above = size * float((predictions == labels).sum()) - p @ t
    return float(above / np.sqrt(below)) if below > 0 else 0.0


def pearson(x: NDArray[Any], y: NDArray[Any]) -> float:
    """Correlation of numbers (N); 0 where either are all the same.

    sum_i (x_i - mean x) (y_i - mean y) / (|x - mean x| |y - mean y|)
    """
    a, b = (z.astype(np.float64) - z.astype(np.float64).mean() for z in (x, y))
    sizes = [float(np.abs(z).max()) for z in (a, b)]
    rounding = [16 * np.finfo(np.float64).eps * float(np.abs(z).max()) for z in (x, y)]
    if any(size <= limit for size, limit in zip(sizes, rounding, strict=True)):
        return 0.0
    a, b = a / sizes[0], b / sizes[1]  # squares of tiny numbers would vanish
    return float(a @ b / np.sqrt((a @ a) * (b @ b)))


def ranks(x: NDArray[Any]) -> Numbers:
    """Ranks (N) of numbers in order, from 1; equal ones share the mean of theirs."""
    _, which, counts = np.unique(x, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    shared: Numbers = (last - (counts - 1) / 2)[which]
    return shared


def spearman(x: NDArray[Any], y: NDArray[Any]) -> float:
    """Correlation of the ranks of numbers (N): `pearson` of `ranks`."""
    return pearson(ranks(x), ranks(y))


_ROUND = 16  # batches have a multiple of this length, so that there are few different shapes


@dataclass(kw_only=True, eq=False)
class Sentences(VocabularyTask, NamedValidation):
    """Classify a sentence or a pair, or give it a number, as in GLUE (`recipes.papers.learned_kernels.GLUE`).

    Data: a folder with ``train``, ``validation`` and ``test``, each ``.jsonl``, ``.csv`` or ``.tsv``, one such file, or
    ``hub:NAME[:CONFIGURATION]``; a row has a text, maybe a second one, which may be blank, as in two rows of GLUE's
    QQP, and a label: an integer from 0, a name, or a number. See `data.sources.Source` for splits.

    A sample is ``<bos> a <eos>`` or ``<bos> a <sep> b <eos>``; of a pair that is too long the longer side is cut. The
    vocabulary is trained on the training split, unless it is a user's own or that of bytes.

    Scores: accuracy, Matthews' correlation and for two classes F1 of class 1; for numbers Pearson's and Spearman's.

    Args:
        text: column of the sentence.
        other: column of the second sentence; None: there is none.
        label: column of the label.
        labels: number of classes, or their names in order; 1: numbers instead of classes (regression).
        glue: the metric: accuracy, f1, matthews, pearson or spearman; None: accuracy, pearson for numbers.
        length: tokens of a sample at most, special ones included.

    Other options: see `VocabularyTask` and `tasks.base.NamedValidation`.
    """

    text: str = "text"
    other: str | None = None
    label: str = "label"
    labels: int | list[str] = 2
    glue: str | None = None
    length: int = 128

    name = "sentences"
    about = "classes or a number for a sentence or a pair, as in GLUE; --data is a folder, a file or hub:NAME"
    model = "classifier"
    metric = "accuracy"
    higher_is_better = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.columns = [self.text] if self.other is None else [self.text, self.other]
        if len({*self.columns, self.label}) <= len(self.columns):
            raise ValueError(
                f"columns must differ, got text={self.text!r}, other={self.other!r} and label={self.label!r}."
            )
        self.classes, self.names = label_names(self.labels)
        self.regression = self.classes == 1
        # Of the options, not of the class: GLUE's tasks have different ones.
        self.metric = _metric(self.glue, self.classes)
        integer("length", self.length, at_least=2 + len(self.columns) + (self.other is not None))
        self.source = self._source()
        self._splits: dict[str, LabelledTokens] = {}
        self._cut: list[str] = []

    def settings(self) -> dict[str, Any]:
        """So many classes, or one number."""
        return {
            "vocab_size": self.vocabulary_size,
            "max_position_embeddings": self.length,
            "num_labels": self.classes,
            "pad_token_id": self.special.pad,
        }

    def fingerprint(self) -> str:
        """Hash of the rows, and of a user's vocabulary."""
        return self.with_tokenizer(self.source.fingerprint())

    def remarks(self) -> list[str]:
        """Rows left out, samples cut."""
        return [*self.source.remarks, *self._cut]

    def train_texts(self) -> Iterator[str]:
        """All sentences of the training split."""
        return (text for column in self.columns for text in self._rows("train")[column])

    def texts_record(self) -> str:
        """All that the training texts depend on."""
        return self._record(columns=self.columns)

    def load_extra(self, folder: Path) -> None:
        """Use the vocabulary of a saved model."""
        super().load_extra(folder)
        self._splits = {}

    def split(self, name: str) -> LabelledTokens:
        """Samples of a split, read and tokenized once."""
        if choice("split", name, SPLITS) not in self._splits:
            labels = np.array(self._rows(name)[self.label], np.float32 if self.regression else np.int64)
            sides = [self._encoded(name, column) for column in self.columns]
            tokens, offsets, cut = join_sides(sides, self.vocabulary(), self.length)
            if cut:
                what = "texts" if len(sides) == 1 else "pairs"
                self._cut.append(
                    f"{cut:,} of {len(labels):,} {what} of the {name} split have more than length={self.length} "
                    f"tokens, the {1 + len(sides)} special ones included, and were cut"
                )
            self._splits[name] = LabelledTokens(tokens, offsets, labels)
        return self._splits[name]

    def collate(self, samples: list[Sample]) -> dict[str, Tensor]:
        """input_ids (B, L), attention_mask (B, L) with 1 for real tokens, labels (B)."""
        rows = [sample["input_ids"] for sample in samples]
        ids, mask = padded(rows, multiple=_ROUND, longest=self.length, value=self.special.pad)
        dtype = torch.float32 if self.regression else torch.int64
        labels = torch.tensor([sample["labels"] for sample in samples], dtype=dtype)
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}

    def score(self, outcome: Outcome) -> dict[str, float]:
        """All metrics that fit."""
        x, y = outcome.predictions, outcome.labels
        if x is None or y is None or x.shape != y.shape or not y.size:
            raise ValueError(
                f"{self.metric} needs predictions (N) and labels (N), got "
                f"{None if x is None else x.shape} and {None if y is None else y.shape}; keep them during evaluation."
            )
        if self.regression:
            return {"pearson": pearson(x, y), "spearman": spearman(x, y)}
        more = {"f1": f1(x, y)} if self.classes == 2 else {}
        return {"accuracy": float((x == y).mean()), "matthews": matthews(x, y), **more}

    def baselines(self, split: str) -> dict[str, dict[str, float]]:
        """Scores of always saying the most frequent class of the training split; numbers have none."""
        if self.regression:
            return {}
        labels = np.array(self._rows(split)[self.label])
        most = np.bincount(self._rows("train")[self.label]).argmax()
        return {
            "most frequent class": self.score(Outcome(math.nan, predictions=np.full_like(labels, most), labels=labels))
        }

    def _source(self) -> Source:
        check = _single_precision if self.regression else label_value(self.names or self.classes)
        second: dict[str, Check] = {} if self.other is None else {self.other: optional_text}
        columns = {self.text: text_value, **second, self.label: check}
        return Source(self.data, columns, layout=" and ".join(f'"{x}"' for x in columns), **self.reading)

    def _rows(self, name: str) -> Rows:
        """Rows of a split, as many as are wanted."""
        rows, limit = self.source.rows(name), self.limits[name]
        size = len(rows[self.label])
        if limit is None or limit >= size:
            return rows
        chosen = spread_evenly(size, limit).tolist()
        return {column: [values[i] for i in chosen] for column, values in rows.items()}

    def _record(self, **more: Any) -> str:
        """All that texts depend on; their labels too, since these decide which rows are good."""
        source, labels = self.source, [self.label, self.names or self.classes]
        division = [source.shares, source.seed, source.skip_bad, source.names, self.limits["train"]]
        return json.dumps([self.columns, labels, division, source.fingerprint(), more], sort_keys=True)

    def _encoded(self, split: str, column: str) -> Tokens:
        words, texts = self.vocabulary(), self._rows(split)[column]
        if words.tokenizer is None:
            return words.encode_batch(texts)  # nearly as fast as a file
        key = {"vocabulary": words.fingerprint(), "split": split, "column": column, "samples": self.limits[split]}
        record = self._record(**key)
        return cached_tokens(lambda: words.encode_batch(texts), size=words.size, cache=self.cache_path, record=record)


def _single_precision(value: object) -> float:
    """Check for a number that is finite also in float32, as labels are."""
    number = number_value(value)
    if abs(number) > float(np.finfo(np.float32).max):
        raise ValueError(f"must be a number that single precision can hold, got {brief(value)}")
    return number


def _metric(name: str | None, classes: int) -> str:
    """The one that is wanted, if it is one of such labels."""
    if name is None:
        return "pearson" if classes == 1 else "accuracy"
    choice("metric, by option glue,", name, METRICS)
    if (name in OF_NUMBERS) != (classes == 1) or (name == "f1" and classes != 2):
        fits = [x for x in METRICS if (x in OF_NUMBERS) == (classes == 1) and (x != "f1" or classes == 2)]
        raise ValueError(
            f"glue={name!r} is not a metric for labels={classes} "
            f"({'numbers' if classes == 1 else 'classes'}); choose from {', '.join(fits)}, or other labels."
        )
    return name
