"""Classes, or a number, for real-valued sequences: sensors, audio, genomes as signals."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kernelformer.data.batching import Sample
from kernelformer.data.series import Float64, Series, SeriesSamples, SeriesSource
from kernelformer.errors import integer, positive_int
from kernelformer.files import read_json, write_json
from kernelformer.tasks.base import Outcome
from kernelformer.tasks.metrics import pearson
from kernelformer.tasks.options import RowOptions

ROUND = 16  # batches have a multiple of this length, so that there are few different shapes
FILE = "series.json"


@dataclass(kw_only=True, eq=False)
class RealSeries(RowOptions):
    """Tell the class of a sequence of numbers, or a number.

    A batch has values (B, L, channels), normalized by mean and standard deviation of each channel over the training
    split, labels (B), and attention_mask (B, L) where sequences are padded. Numbers to be told are normalized by the
    training split's too; ``rmse`` is in their own unit.

    Data: ``train.npz`` (``series`` (N, L, C), ``labels`` (N)) and so on, or files of the UCR archive;
    `data.series.SeriesSource` has all of it.

    Args:
        channels: C.
        classes: labels are 0 to classes - 1, or any ``classes`` different numbers, in rising order; 1: a regression.
        length: values of a sequence at most; longer ones are bad rows.

    Other options: see `tasks.options.RowOptions`.
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
