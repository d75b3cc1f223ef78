"""Classification of texts byte by byte: what Long Range Arena's Text and Retrieval have in common."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from numpy.typing import NDArray
from torch import Tensor

from kernelformer.conversion.readers import hash_files
from kernelformer.errors import choice, integer, positive_int
from kernelformer_lab.data.batching import Sample, padded, spread_evenly
from kernelformer_lab.data.byte_texts import VOCABULARY, ByteTexts, LabelledTexts
from kernelformer_lab.data.images import Pictures, most_frequent_accuracy
from kernelformer_lab.data.sources import SPLITS, Check, Rows, Source, label_names
from kernelformer_lab.data.tokenization import (
    Vocabulary,
    saved_options,
    special,
    tokenizer_file,
    vocabulary,
    vocabulary_size,
)
from kernelformer_lab.data.windows import ConsecutiveWindows, RandomWindows, Windows
from kernelformer_lab.tasks.base import (
    CacheOption,
    Classification,
    DataOption,
    Location,
    NamedValidation,
    Outcome,
    RowOptions,
    SampleOptions,
    ShareOptions,
)


@dataclass(kw_only=True, eq=False)
class VocabularyTask(CacheOption):
    """A task whose vocabulary is trained on the training split, a user's own, or that of bytes.

    Args:
        vocab_size: of the vocabulary at most; None: 8000, 262 for bytes, or what ``tokenizer`` has.
        kind: "bpe", "wordpiece" or "bytes".
        lowercase: whether capital letters become small, in a vocabulary that is trained.
        tokenizer: a ``tokenizer.json`` of the user's, or a folder with one, such as that of a run.

    Cost: tokenized once, 3 million characters a second on one core, and kept in the cache.
    """

    vocab_size: int | None = None
    kind: str = "bpe"
    lowercase: bool = False
    tokenizer: Location = None

    trained_size: ClassVar[int | None] = None  # of a vocabulary that is trained, where vocab_size is None

    def __post_init__(self) -> None:
        super().__post_init__()
        tokenizer = None if self.tokenizer is None else str(self.tokenizer)
        trained = tokenizer is None and self.kind != "bytes"
        size = self.trained_size if self.vocab_size is None and trained else self.vocab_size
        self.subwords: dict[str, Any] = {"tokenizer": tokenizer, "kind": self.kind}
        self.subwords |= {"vocab_size": size, "lowercase": self.lowercase}
        self.vocabulary_size = vocabulary_size(**self.subwords)
        self.special = special(tokenizer)
        self._vocabulary: Vocabulary | None = None

    @abstractmethod
    def train_texts(self) -> Iterable[str]:
        """Texts that a vocabulary is trained on; read when they are asked for."""

    @abstractmethod
    def texts_record(self) -> str:
        """All that `train_texts` depends on."""

    def vocabulary(self) -> Vocabulary:
        """The vocabulary: that of a saved model after `load_extra`, else from the cache, or trained now."""
        if self._vocabulary is None:
            trained = self.subwords["tokenizer"] is None and self.subwords["kind"] != "bytes"
            record = self.texts_record() if trained else ""
            self._vocabulary = vocabulary(self.train_texts(), **self.subwords, cache=self.cache_path, record=record)
        return self._vocabulary

    def save_extra(self, folder: Path) -> None:
        """Write the vocabulary into the folder of a saved model, which needs it to read and write."""
        self.vocabulary().save(folder)

    def load_extra(self, folder: Path) -> None:
        """Use the vocabulary of a saved model; neither the training data nor the cache need be there."""
        self.subwords, self._vocabulary = saved_options(self.subwords, folder), None

    def with_tokenizer(self, fingerprint: str) -> str:
        """A fingerprint of texts, and of a user's vocabulary."""
        tokenizer = self.subwords["tokenizer"]
        return fingerprint + ("" if tokenizer is None else f"; {hash_files([tokenizer_file(tokenizer)])}")


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

    Options of tasks with rows: see `tasks.base.NamedValidation`.
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


@dataclass(kw_only=True, eq=False)
class WindowTask(DataOption, ShareOptions, SampleOptions):
    """A language model of windows of text: at random places for training, side by side for evaluation.

    Args:
        length: bytes or tokens of a sample.
        samples: training samples, at random places; sample i is a function of (seed, i).
        validation_share: of the bytes of a file, of the files of a folder, or of rows without splits.
        test_share: the same for the test; training has the rest.

    Options of all tasks, and where data is: see `tasks.base`.
    """

    length: int = 512
    samples: int = 1_000_000
    validation_share: float = 0.05
    test_share: float = 0.05

    shortest: ClassVar[int] = 2  # window from which something can be learnt: one token alone predicts none

    def __post_init__(self) -> None:
        super().__post_init__()
        self.length = integer("length", self.length, at_least=self.shortest)
        self.samples = positive_int("samples", self.samples)

    def cut(self, tokens: NDArray[Any], split: str, *, where: object, unit: str) -> Windows:
        """Windows of the tokens of a split.

        Args:
            tokens: (N), all of the split.
            split: its name.
            where: the data, for the message.
            unit: what tokens are, "bytes" or "tokens".
        """
        if len(tokens) < self.length:
            raise ValueError(
                f"the {split} split of {where} has {len(tokens)} {unit}, less than one sample of "
                f"length={self.length}; give more text, a smaller length"
                f"{'' if split == 'train' else f' or a larger {split}_share'}."
            )
        if split == "train":
            return RandomWindows(tokens, self.length, self.samples, self.seed)
        return ConsecutiveWindows(tokens, self.length, self.limits[split])


@dataclass(kw_only=True, eq=False)
class ImageTask(CacheOption, RowOptions):
    """A task on images, which `data.images.Pictures` reads.

    Args:
        size: of the images, an integer or [rows, columns].
        resize: make images of another size or mode fit (scaled until they cover it, cropped in the middle); else they
            are bad.

    Options of all tasks with rows, and the cache for decoded images: see `tasks.base`.
    """

    size: int | Sequence[int] = 32
    resize: bool = False

    pictures: Pictures = field(init=False, repr=False)

    def open_pictures(self, *, channels: int, classes: int | None) -> Pictures:
        """The images of the options, which are read when a split is asked for."""
        return Pictures(
            self.data,
            size=self.size,
            channels=channels,
            classes=classes,
            resize=self.resize,
            limits=self.limits,
            cache=self.cache,
            **self.reading,
        )

    def fingerprint(self) -> str:
        """A hash of the data."""
        return self.pictures.fingerprint()

    def remarks(self) -> list[str]:
        """Images that were left out or made to fit."""
        return list(self.pictures.remarks)


class ImageClassification(ImageTask, Classification):
    """A task with one class per image, scored by the accuracy of the first answer, and of the first five."""

    classes: int

    def score(self, outcome: Outcome) -> dict[str, float]:
        """Share of right answers; of more than five classes also the share of labels among the five likeliest."""
        more = {} if math.isnan(outcome.top5) else {"top5_accuracy": outcome.top5}
        return {**super().score(outcome), **more}

    def extra_metrics(self) -> list[str]:
        """The top-5 accuracy, where it says something."""
        return ["top5_accuracy"] if self.classes > 5 else []

    def baselines(self, split: str) -> dict[str, dict[str, float]]:
        """Always the class that training has most often."""
        accuracy = most_frequent_accuracy(self.pictures.split("train"), self.pictures.split(split))
        return {"most frequent class": {self.metric: accuracy}}


def pixel_tokens(samples: list[Sample]) -> Tensor:
    """Intensities of images as tokens, (B, L) int64, row by row, channels innermost."""
    return torch.stack([sample["pixels"] for sample in samples]).flatten(1).long()


def labels_of(samples: list[Sample]) -> Tensor:
    """Labels of a batch, (B)."""
    return torch.tensor([sample["labels"] for sample in samples])
