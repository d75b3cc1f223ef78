"""Real-valued sequences with a label or a number each: npz files, and the text layout of the UCR archive."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from kernelformer.data import npz
from kernelformer.data.bad_rows import BadRows
from kernelformer.data.batching import Sample, check_indices, spread_evenly
from kernelformer.data.local_files import check_inside
from kernelformer.data.readers import hash_files, read_bytes, unreadable
from kernelformer.data.sources import find_location, missing_data
from kernelformer.data.splits import ALIASES, SPLITS, check_shares, divide
from kernelformer.errors import choice

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
        """Those with some numbers."""
        return Series([self.values[i] for i in numbers], self.labels[numbers])


class SeriesSamples(Dataset[Sample]):
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

    def __getitem__(self, index: int) -> Sample:
        (number,) = check_indices([index], len(self))
        values = (self.series.values[number] - self.mean) / self.std
        return {"values": torch.from_numpy(values.astype(np.float32)), "labels": self.labels[number].item()}


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
        """What is wrong with a sequence, or nothing."""
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
    heads = npz.heads(path)
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
