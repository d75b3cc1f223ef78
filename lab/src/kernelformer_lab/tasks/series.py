"""Real-valued sequences with a label or a number each: npz files, and the text layout of the UCR archive."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kernelformer.conversion.readers import hash_files, read_bytes, unreadable
from kernelformer.errors import choice, integer, positive_int
from kernelformer.files import check_inside, read_json, write_json
from kernelformer_lab.data import images as npz
from kernelformer_lab.data.batching import Sample, Samples, spread_evenly
from kernelformer_lab.data.sources import ALIASES, SPLITS, BadRows, check_shares, divide, find_location, missing_data
from kernelformer_lab.tasks.base import Outcome, RowOptions
from kernelformer_lab.tasks.sentences import pearson

LAYOUT = "train.npz with series (N, L, C) and labels (N), or NAME_TRAIN.tsv as the UCR archive has it, and test"
ARRAYS = "npz"
TEXTS = ("tsv", "txt", "csv")
_SEPARATORS = re.compile(r"[,\s]+")
Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]


@dataclass(frozen=True)
class Series:
    """Sequences of one split.

    Args:
        values: N times (n_i, C) float32, without padding.
        labels: (N) as they are in the file.
    """

    values: list[Float32]
    labels: Float64

    def some(self, numbers: NDArray[np.int64]) -> Series:
        """Series with some numbers."""
        return Series([self.values[i] for i in numbers], self.labels[numbers])


class SeriesSamples(Samples):
    """Samples of a split: values (n, C) float32, and a label.

    Args:
        series: of the split.
        mean: (C), subtracted from each value.
        std: (C), by which it is divided then.
        labels: (N), as a model takes them.
    """

    def __init__(self, series: Series, mean: Float64, std: Float64, labels: NDArray[Any]) -> None:
        self.series, self.mean, self.std, self.labels = series, mean, std, labels

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """(N) numbers of tokens."""
        return np.array([len(x) for x in self.series.values])

    def take(self, chosen: NDArray[np.int64]) -> list[Sample]:
        """Normalized sequences with their labels."""
        values = [((self.series.values[i] - self.mean) / self.std).astype(np.float32) for i in chosen]
        labels = self.labels[chosen].tolist()
        return [{"values": torch.from_numpy(x), "labels": label} for x, label in zip(values, labels, strict=True)]


class SeriesSource:
    """Sequences by split, from a folder or one file.

    - ``train.npz``, ``test.npz`` and perhaps ``validation.npz``, each with ``series`` (N, L) or (N, L, C) and
      ``labels`` (N); sequences that are shorter than L end in NaN, or ``lengths`` (N) tells their lengths. Or one such
      file.
    - ``NAME_TRAIN.tsv`` and ``NAME_TEST.tsv`` of the UCR archive, or ``train.tsv`` and so on (``.txt``, ``.csv``): a
      line is the label and then the values of one channel, separated by tabs, commas or blanks; shorter ones end in
      NaN.

    Args:
        data: the location; None is refused when it is read, not before.
        channels: C.
        length: values of a sequence, at most.
        skip_bad: leave bad sequences out, and say how many, instead of raising at the first.
        validation_share: of the training sequences where there is no validation split, or of one file.
        test_share: of one file.
        seed: of the division.
    """

    def __init__(
        self,
        data: str | os.PathLike[str] | None,
        *,
        channels: int,
        length: int,
        skip_bad: bool = False,
        validation_share: float = 0.1,
        test_share: float = 0.1,
        seed: int = 0,
    ) -> None:
        self.location = find_location(data, LAYOUT)
        if isinstance(self.location, str):
            raise ValueError(f"series are read from local files, got {self.location!r}; data must be {LAYOUT}.")
        self.channels, self.length, self.skip_bad = channels, length, skip_bad
        self.shares, self.seed = check_shares(validation_share, test_share), seed
        self.remarks: list[str] = []
        self._read: dict[str, Series] = {}

    def split(self, name: str, limit: int | None = None) -> Series:
        """The sequences of a split, at most ``limit`` of them, spread evenly."""
        choice("split", name, SPLITS)
        if name not in self._read:
            self._read |= self._load(name)
        if name not in self._read:
            there = ", ".join(x.name for x in self.files().values())
            raise ValueError(f"{self.path} has no {name} split, found {there}; add one, or evaluate another.")
        series = self._read[name]
        if not len(series.labels):
            raise ValueError(f"the {name} split of {self.path} is empty; add sequences, or give a larger share.")
        return series.some(spread_evenly(len(series.labels), limit))

    def fingerprint(self) -> str:
        """Names and hash of all files."""
        return hash_files(list(self.files().values()))

    @property
    def path(self) -> Path:
        """The folder or file."""
        if self.location is None:
            raise missing_data(LAYOUT)
        return Path(self.location)

    def files(self) -> dict[str, Path]:
        """The file of each split that has one; of a single file it is "" alone."""
        path = self.path
        if not path.is_dir():
            return {"": path}
        try:
            everything = sorted(path.iterdir())
        except OSError as problem:
            unreadable(path, problem)
        files: dict[str, Path] = {}
        for split, names in ALIASES.items():
            fits = [x for x in everything if x.suffix[1:] in (ARRAYS, *TEXTS) and _split_word(x) in names]
            if len(fits) > 1:
                both = " and ".join(x.name for x in fits)
                raise ValueError(f"the folder {path} has {both}; keep one file for each split.")
            if fits:
                files[split] = fits[0]
        if not files:
            names_there = ", ".join(x.name for x in everything[:10]) or "nothing"
            raise ValueError(f"the folder {path} has no split of series, found {names_there}; it must hold {LAYOUT}.")
        check_inside(path, files.values())
        return files

    def _load(self, split: str) -> dict[str, Series]:
        files = self.files()
        if "" in files:
            return self._divided(self._file(files[""]), SPLITS)
        if "validation" not in files and split != "test" and "train" in files:
            return self._divided(self._file(files["train"]), ("train", "validation"))
        return {split: self._file(files[split])} if split in files else {}

    def _divided(self, series: Series, among: Sequence[str]) -> dict[str, Series]:
        shares = {name: x if name in among else 0.0 for name, x in self.shares.items()}
        chosen = divide(len(series.labels), shares, self.seed)
        return {name: series.some(chosen[name]) for name in among}

    def _file(self, path: Path) -> Series:
        bad = BadRows(path, self.skip_bad)
        rows, labels, where = _arrays(path) if path.suffix == f".{ARRAYS}" else _lines(path)
        values, kept = [], []
        for i, (row, label) in enumerate(zip(rows, labels, strict=True)):
            reason = self._wrong(row, label)
            if reason:
                bad.add(f"{where} {i + 1 if where == 'line' else i}", reason)
                continue
            values.append(np.ascontiguousarray(row, np.float32))
            kept.append(label)
        self.remarks += bad.remarks(len(kept))
        return Series(values, np.array(kept, np.float64))

    def _wrong(self, row: NDArray[Any], label: float) -> str:
        """The problem of a sequence; empty if there is none."""
        if row.shape[1] != self.channels:
            return f"has {row.shape[1]} channels, and task.channels is {self.channels}"
        if not len(row):
            return "has not one value"
        if len(row) > self.length:
            return f"has {len(row)} values, and task.length is {self.length}; give a larger one, nothing is cut"
        if not np.isfinite(row).all():
            place = int(np.flatnonzero(~np.isfinite(row).all(1))[0])
            return f"has {row[place].tolist()} at {place}, before its end; fill gaps in"
        if not np.isfinite(label):
            return f"its label is {label}"
        return ""


def _split_word(path: Path) -> str:
    """The name of a split in a file's: ``train`` of ``train.npz`` and of ``ECG200_TRAIN.tsv``."""
    return path.stem.rpartition("_")[2].lower() if "_" in path.stem else path.stem.lower()


def _without_end(row: NDArray[Any]) -> NDArray[Any]:
    """A sequence (L, C) without the NaN that it ends in."""
    real = np.flatnonzero(~np.isnan(row).all(1))
    return row[: real[-1] + 1] if len(real) else row[:0]


def _arrays(path: Path) -> tuple[list[NDArray[Any]], NDArray[Any], str]:
    """Sequences and labels of an npz file; ``targets`` is another name of the labels."""
    heads = npz.array_heads(path)
    if len(heads.keys() & {"labels", "targets"}) != 1 or "series" not in heads:
        found = ", ".join(heads) or "none"
        raise ValueError(f"{path} must have arrays series and labels (or targets, but not both), found {found}.")
    (wanted,) = heads.keys() & {"labels", "targets"}
    shape, count = heads["series"].shape, heads[wanted].shape
    kinds = {name: heads[name].dtype.kind for name in heads.keys() & {"series", wanted, "lengths"}}
    wrong = [name for name, kind in kinds.items() if kind not in "fiub"]
    if len(shape) not in (2, 3) or count != shape[:1] or wrong:
        raise ValueError(
            f"series of {path} must be numbers (N, L) or (N, L, C) and {wanted} numbers (N), got {heads['series']} and "
            f"{heads[wanted]}."
        )
    series, labels = npz.array(path, "series"), npz.array(path, wanted)
    series = series[..., None] if series.ndim == 2 else series
    if "lengths" not in heads:
        rows = [_without_end(x) if x.dtype.kind == "f" else x for x in series]
        return rows, labels.astype(np.float64), "sequence"
    lengths = npz.array(path, "lengths")
    if lengths.shape != labels.shape or lengths.dtype.kind not in "iu" or lengths.min() < 0 or lengths.max() > shape[1]:
        raise ValueError(
            f"lengths of {path} must be {labels.shape} integers from 0 to {shape[1]}, got {heads['lengths']}."
        )
    return [x[:n] for x, n in zip(series, lengths, strict=True)], labels.astype(np.float64), "sequence"


def _lines(path: Path) -> tuple[list[NDArray[Any]], NDArray[Any], str]:
    """Sequences and labels of a file in the UCR archive's layout."""
    rows, labels = [], []
    for number, line in enumerate(read_bytes(path).decode("utf-8", "replace").splitlines(), 1):
        words = [x for x in _SEPARATORS.split(line.strip()) if x]
        if not words:
            continue
        try:
            numbers = np.array([float(x) for x in words])
        except ValueError as problem:
            raise ValueError(
                f"{path}, line {number}: {problem}; a line is a label and then values, separated by tabs, commas or "
                f"blanks, without a head line."
            ) from None
        labels.append(numbers[0])
        rows.append(_without_end(numbers[1:, None]))
    return rows, np.array(labels), "line"


ROUND = 16  # batches have a multiple of this length, so that there are few different shapes
FILE = "series.json"


@dataclass(kw_only=True, eq=False)
class RealSeries(RowOptions):
    """Tell the class of a sequence of numbers, or a number.

    A batch has values (B, L, channels), normalized by mean and standard deviation of each channel over the training
    split, labels (B), and attention_mask (B, L) where sequences are padded. Numbers to be told are normalized by the
    training split's too; ``rmse`` is in their own unit.

    Data: ``train.npz`` (``series`` (N, L, C), ``labels`` (N)) and so on, or files of the UCR archive;
    `SeriesSource` has all of it.

    Args:
        channels: C.
        classes: labels are 0 to classes - 1, or any ``classes`` different numbers, in rising order; 1: a regression.
        length: values of a sequence at most; longer ones are bad rows.

    Other options: see `tasks.base.RowOptions`.
    """

    channels: int = 1
    classes: int = 2
    length: int = 1024

    name = "series"
    about = "class or number of a real-valued sequence (UCR archive, npz); needs data"
    model = "series"
    metric = "accuracy"
    higher_is_better = True

    def __post_init__(self) -> None:
        super().__post_init__()
        positive_int("channels", self.channels)
        positive_int("length", self.length)
        integer("classes", self.classes, at_least=1)
        self.regression = self.classes == 1
        self.metric = "pearson" if self.regression else "accuracy"
        self.source = SeriesSource(self.data, channels=self.channels, length=self.length, **self.reading)
        self._numbers: dict[str, list[float]] | None = None

    def settings(self) -> dict[str, Any]:
        """Channels, classes and the longest sequence."""
        return {
            "num_channels": self.channels,
            "num_labels": self.classes,
            "max_position_embeddings": self.length,
            "vocab_size": 1,
        }

    def fingerprint(self) -> str:
        """Hash of the files."""
        return self.source.fingerprint()

    def remarks(self) -> list[str]:
        """Sequences left out."""
        return list(self.source.remarks)

    def statistics(self) -> dict[str, list[float]]:
        """Mean and std of each channel, and of the numbers or the labels themselves, over the training split."""
        if self._numbers is None:
            train = self._series("train")
            total = np.concatenate(train.values).astype(np.float64)
            labels = train.labels
            self._numbers = {
                "mean": total.mean(0).tolist(),
                "std": _sizes(total.std(0)).tolist(),
                "labels": [float(labels.mean()), float(_sizes(labels.std()[None])[0])]
                if self.regression
                else np.unique(labels).tolist(),
            }
        return self._numbers

    def _series(self, split: str) -> Series:
        return self.source.split(split, self.limits[split])

    def split(self, name: str) -> SeriesSamples:
        """Normalized sequences, with their labels as a model takes them."""
        series, known = self._series(name), self.statistics()
        mean, std = np.array(known["mean"]), np.array(known["std"])
        return SeriesSamples(series, mean, std, self._labels(series.labels, known["labels"], name))

    def _labels(self, labels: Float64, known: list[float], split: str) -> NDArray[Any]:
        if self.regression:
            mean, std = known
            return ((labels - mean) / std).astype(np.float32)
        plain = np.arange(self.classes)
        if np.isin(known, plain).all() and np.isin(labels, plain).all():
            return labels.astype(np.int64)
        if len(known) != self.classes:
            some = ", ".join(f"{x:g}" for x in known[:10])
            raise ValueError(
                f"the training split has {len(known)} different labels ({some}), and task.classes is {self.classes}; "
                f"give --set task.classes={len(known)}, or 1 for a regression."
            )
        other = np.setdiff1d(labels, known)
        if len(other):
            raise ValueError(f"the {split} split has a label {other[0]:g} that the training split has not.")
        return np.searchsorted(known, labels).astype(np.int64)

    def collate(self, samples: list[Sample]) -> dict[str, Tensor]:
        """Values (B, L, channels) float32, labels (B), and attention_mask (B, L) where lengths differ."""
        rows = [sample["values"] for sample in samples]
        lengths = torch.tensor([len(x) for x in rows])
        batch = {"values": pad_sequence(rows, batch_first=True), "labels": torch.tensor([x["labels"] for x in samples])}
        if int(lengths.min()) == int(lengths.max()):
            return batch
        most = int(lengths.max())
        width = max(most, min(-(-most // ROUND) * ROUND, self.length))
        batch["values"] = torch.nn.functional.pad(batch["values"], (0, 0, 0, width - most))
        batch["attention_mask"] = (torch.arange(width) < lengths[:, None]).long()
        return batch

    def score(self, outcome: Outcome) -> dict[str, float]:
        """Share of right answers; of numbers their correlation, and the root mean square error in their unit."""
        if not self.regression:
            return {"accuracy": outcome.right}
        assert outcome.predictions is not None
        assert outcome.labels is not None
        std = self.statistics()["labels"][1]
        off = (outcome.predictions - outcome.labels).astype(np.float64)
        return {"pearson": pearson(outcome.predictions, outcome.labels), "rmse": std * math.sqrt((off**2).mean())}

    def extra_metrics(self) -> list[str]:
        """The error in the unit of the numbers."""
        return ["rmse"] if self.regression else []

    def baselines(self, split: str) -> dict[str, dict[str, float]]:
        """Always the class that training has most often, or its mean."""
        train, other = self.split("train").labels, self.split(split).labels
        if self.regression:
            rmse = self.statistics()["labels"][1] * math.sqrt(float((other.astype(np.float64) ** 2).mean()))
            return {"mean": {"pearson": 0.0, "rmse": rmse}}
        most = np.bincount(train).argmax()
        return {"most frequent class": {"accuracy": float((other == most).mean())}}

    def save_extra(self, folder: Path) -> None:
        """Write the statistics, which a saved model's inputs are normalized by."""
        write_json(folder / FILE, self.statistics())

    def load_extra(self, folder: Path) -> None:
        """Take over the statistics of a saved model."""
        path = folder / FILE
        known = read_json(path)
        names, sizes = ("mean", "std", "labels"), {self.channels}
        good = isinstance(known, dict) and all(_all_numbers(known.get(x)) for x in names)
        if not good or {len(known[x]) for x in names[:2]} != sizes or (self.regression and len(known["labels"]) != 2):
            raise ValueError(
                f"{path} must have {', '.join(names)}, lists of numbers for {self.channels} channels; it is not what a "
                f"run of this task has written."
            )
        self._numbers = known


def _all_numbers(values: object) -> bool:
    return isinstance(values, list) and all(isinstance(x, int | float) and math.isfinite(x) for x in values)


def _sizes(std: Float64) -> Float64:
    """Standard deviations; 1 for what is constant."""
    return np.where(std > 0, std, 1.0)
