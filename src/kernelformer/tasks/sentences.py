"""Classes, or a number, for one sentence or a pair of them, as in GLUE."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from kernelformer.data.batching import spread_evenly
from kernelformer.data.corpus import perhaps_text
from kernelformer.data.sources import (
    Check,
    Rows,
    Source,
    brief,
    hash_files,
    label_names,
    label_value,
    number_value,
    text_value,
)
from kernelformer.data.token_cache import Tokens, kept_tokens
from kernelformer.data.tokenization import (
    Vocabulary,
    saved_options,
    special,
    tokenizer_file,
    vocabulary,
    vocabulary_size,
)
from kernelformer.errors import choice, integer, positive_int
from kernelformer.tasks.base import SPLITS, Outcome, Sample, Task, cache_folder
from kernelformer.tasks.glue import GLUE as GLUE
from kernelformer.tasks.metrics import METRICS, OF_NUMBERS, f1, matthews, pearson, spearman

_ROUND = 16  # batches have a multiple of this length, so that there are few different shapes

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


class Split(Dataset[Sample]):
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

    def __getitem__(self, index: int) -> Sample:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Sample]:
        for i in indices:
            if not 0 <= i < len(self):
                raise IndexError(f"samples are numbered from 0 to {len(self) - 1}, got {i}.")
        bounds = [(self.offsets[i], self.offsets[i + 1]) for i in indices]
        ids = [torch.from_numpy(self.tokens[a:b].astype(np.int64)) for a, b in bounds]
        labels = self.labels[np.asarray(indices, np.int64)].tolist()
        return [{"input_ids": x, "labels": y} for x, y in zip(ids, labels, strict=True)]


class Sentences(Task):
    """Classify a sentence or a pair, or give it a number; the tasks of GLUE are in the table `GLUE`.

    Data: a folder with ``train``, ``validation`` and ``test``, each ``.jsonl``, ``.csv`` or ``.tsv``, one such file, or
    ``hub:NAME[:CONFIGURATION]``; a row has a text, maybe a second one, which may be blank, as in two rows of GLUE's
    QQP, and a label: an integer from 0, a name, or a number. See `data.sources.Source` for splits.

    A sample is ``<bos> a <eos>`` or ``<bos> a <sep> b <eos>``; of a pair that is too long the longer side is cut. The
    vocabulary is trained on the training split, unless it is a user's own or that of bytes.

    Scores: accuracy, Matthews' correlation and for two classes F1 of class 1; for numbers Pearson's and Spearman's.

    Args:
        data: the place; None is refused only when a split is asked for.
        text: column of the sentence.
        other: column of the second sentence; None: there is none.
        label: column of the label.
        labels: number of classes, or their names in order; 1: numbers instead of classes (regression).
        glue: the metric: accuracy, f1, matthews, pearson or spearman; None: accuracy, pearson for numbers.
        length: tokens of a sample at most, special ones included.
        vocab_size: of the vocabulary at most; None: 8000, 262 for bytes, or what ``tokenizer`` has.
        kind: "bpe", "wordpiece" or "bytes".
        lowercase: whether capital letters become small, in a vocabulary that is trained.
        tokenizer: a ``tokenizer.json`` of the user's, or a folder with one, such as that of a run.
        train_samples: at most so many, spread evenly over the split; None: all.
        validation_samples: the same.
        test_samples: the same.
        validation_split: name of the split to validate on, such as "validation_mismatched" of GLUE's MNLI; None: the
            usual names.
        validation_share: of the training rows where there is no validation split, or of one file.
        test_share: of one file.
        skip_bad: leave bad rows out, and say how many, instead of raising at the first.
        seed: of the division into splits.
        cache: folder for vocabularies; None: kernelformer in XDG_CACHE_HOME, or else in ~/.cache.

    Cost: tokenized once for each split, 3 million characters a second on one core.
    """

    name = "sentences"
    about = "classes or a number for a sentence or a pair, as in GLUE; --data is a folder, a file or hub:NAME"
    model = "classifier"
    metric = "accuracy"
    higher_is_better = True

    def __init__(
        self,
        *,
        data: str | os.PathLike[str] | None = None,
        text: str = "text",
        other: str | None = None,
        label: str = "label",
        labels: int | list[str] = 2,
        glue: str | None = None,
        length: int = 128,
        vocab_size: int | None = None,
        kind: str = "bpe",
        lowercase: bool = False,
        tokenizer: str | None = None,
        train_samples: int | None = None,
        validation_samples: int | None = None,
        test_samples: int | None = None,
        validation_split: str | None = None,
        validation_share: float = 0.1,
        test_share: float = 0.1,
        skip_bad: bool = False,
        seed: int = 0,
        cache: str | os.PathLike[str] | None = None,
    ) -> None:
        self.columns = [text] if other is None else [text, other]
        if len({*self.columns, label}) <= len(self.columns):
            raise ValueError(f"columns must differ, got text={text!r}, other={other!r} and label={label!r}.")
        self.label = label
        self.classes, self.names = label_names(labels)
        self.regression = self.classes == 1
        # Of the options, not of the class: GLUE's tasks have different ones.
        self.metric = _metric(glue, self.classes)
        self.length = integer("length", length, at_least=2 + len(self.columns) + (other is not None))
        self.words: dict[str, Any] = {
            "tokenizer": tokenizer,
            "kind": kind,
            "vocab_size": vocab_size,
            "lowercase": lowercase,
        }
        self.size, self.pad = vocabulary_size(**self.words), special(tokenizer).pad
        self.limits = {"train": train_samples, "validation": validation_samples, "test": test_samples}
        for split, limit in self.limits.items():
            if limit is not None:
                positive_int(f"{split}_samples", limit)
        check = _single_precision if self.regression else label_value(self.names or self.classes)
        blank: dict[str, Check] = {} if other is None else {other: perhaps_text}
        self.source = Source(
            data,
            {text: text_value, **blank, label: check},
            layout=" and ".join(f'"{x}"' for x in (*self.columns, label)),
            skip_bad=skip_bad,
            validation_share=validation_share,
            test_share=test_share,
            seed=seed,
            names=None if validation_split is None else {"validation": validation_split},
        )
        if validation_split is not None and isinstance(self.source.place, Path) and not self.source.place.is_dir():
            raise ValueError(
                f"validation_split is a split of a folder or data set, got {validation_split!r} and the file "
                f"{self.source.place}; leave it out."
            )
        self.cache = cache_folder() if cache is None else Path(os.fspath(cache)).expanduser()
        self._vocabulary: Vocabulary | None = None
        self._splits: dict[str, Split] = {}
        self._cut: list[str] = []

    def settings(self) -> dict[str, Any]:
        """So many classes, or one number."""
        return {
            "vocab_size": self.size,
            "max_position_embeddings": self.length,
            "num_labels": self.classes,
            "pad_token_id": self.pad,
        }

    def fingerprint(self) -> str:
        """Hash of the rows, and of a user's vocabulary."""
        place = self.words["tokenizer"]
        return self.source.fingerprint() + ("" if place is None else f"; {hash_files([tokenizer_file(place)])}")

    def remarks(self) -> list[str]:
        """Rows left out, samples cut."""
        return [*self.source.remarks, *self._cut]

    def vocabulary(self) -> Vocabulary:
        """From the cache, or trained now on the training split."""
        if self._vocabulary is None:
            texts = (x for column in self.columns for x in self._rows("train")[column])
            trained = self.words["tokenizer"] is None and self.words["kind"] != "bytes"
            record = self._record(columns=self.columns) if trained else ""
            self._vocabulary = vocabulary(texts, **self.words, cache=self.cache, record=record)
        return self._vocabulary

    def save_extra(self, folder: Path) -> None:
        """The vocabulary."""
        self.vocabulary().save(folder)

    def load_extra(self, folder: Path) -> None:
        """Use the vocabulary of a saved model."""
        self.words, self._vocabulary, self._splits = saved_options(self.words, folder), None, {}

    def split(self, name: str) -> Split:
        """Samples of a split, read and tokenized once."""
        if choice("split", name, SPLITS) not in self._splits:
            rows = self._rows(name)
            labels = np.array(rows[self.label], np.float32 if self.regression else np.int64)
            sides = [self._encoded(name, column) for column in self.columns]
            self._splits[name] = Split(*self._assembled(name, sides), labels)
        return self._splits[name]

    def collate(self, samples: list[Sample]) -> dict[str, Tensor]:
        """input_ids (B, L), attention_mask (B, L) with 1 for real tokens, labels (B)."""
        ids = [sample["input_ids"] for sample in samples]
        lengths = torch.tensor([len(x) for x in ids])
        padded = pad_sequence(ids, batch_first=True, padding_value=self.pad)
        width = min(-(-padded.shape[1] // _ROUND) * _ROUND, self.length)
        kind = torch.float32 if self.regression else torch.int64
        return {
            "input_ids": pad(padded, (0, width - padded.shape[1]), value=self.pad),
            "attention_mask": (torch.arange(width) < lengths[:, None]).long(),
            "labels": torch.tensor([sample["labels"] for sample in samples], dtype=kind),
        }

    def score(self, found: Outcome) -> dict[str, float]:
        """All metrics that fit."""
        x, y = found.predictions, found.labels
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
        """What comes of always saying the most frequent class of the training split; numbers have none."""
        if self.regression:
            return {}
        labels = np.array(self._rows(split)[self.label])
        most = np.bincount(self._rows("train")[self.label]).argmax()
        return {
            "most frequent class": self.score(Outcome(math.nan, predictions=np.full_like(labels, most), labels=labels))
        }

    def _rows(self, name: str) -> Rows:
        """As many as are wanted."""
        rows, limit = self.source.rows(name), self.limits[name]
        size = len(rows[self.label])
        if limit is None or limit >= size:
            return rows
        chosen = spread_evenly(size, limit).tolist()
        return {column: [values[i] for i in chosen] for column, values in rows.items()}

    def _record(self, **more: Any) -> str:
        """What texts depend on; which rows are good depends on their labels too."""
        source, labels = self.source, [self.label, self.names or self.classes]
        division = [source.shares, source.seed, source.skip_bad, source.names, self.limits["train"]]
        return json.dumps([self.columns, labels, division, source.fingerprint(), more], sort_keys=True)

    def _encoded(self, split: str, column: str) -> Tokens:
        words, texts = self.vocabulary(), self._rows(split)[column]
        if words.tokenizer is None:
            return words.encode_batch(texts)  # nearly as fast as a file
        key = {"vocabulary": words.fingerprint(), "split": split, "column": column, "samples": self.limits[split]}
        record = self._record(**key)
        return kept_tokens(lambda: words.encode_batch(texts), size=words.size, cache=self.cache, record=record)

    def _assembled(self, name: str, sides: list[Tokens]) -> tuple[Int32, Int64]:
        """Tokens and offsets of samples, from those of their sides."""
        words = self.vocabulary()
        full = [np.diff(offsets) for _, offsets in sides]
        room = self.length - 1 - len(sides)
        kept = [np.minimum(full[0], room)] if len(sides) == 1 else list(fit_pairs(full[0], full[1], room))
        cut = np.sum(full, axis=0) > room
        if cut.any():
            what = "texts" if len(sides) == 1 else "pairs"
            self._cut.append(
                f"{cut.sum():,} of {len(cut):,} {what} of the {name} split have more than length={self.length} tokens, "
                f"the {1 + len(sides)} special ones included, and were cut"
            )
        lengths = np.sum(kept, axis=0) + 1 + len(sides)
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        out = np.empty(offsets[-1], np.int32)
        at = offsets[:-1].copy()
        for mark, (flat, starts), count in zip((words.bos, words.sep), sides, kept, strict=False):
            out[at] = mark
            inside = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
            out[np.repeat(at + 1, count) + inside] = flat[np.repeat(starts[:-1], count) + inside]
            at += 1 + count
        out[at] = words.eos
        return out, offsets


def _single_precision(value: object) -> float:
    """A number that is finite also in float32, as labels are."""
    found = number_value(value)
    if abs(found) > float(np.finfo(np.float32).max):
        raise ValueError(f"must be a number that single precision can hold, got {brief(value)}")
    return found


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
