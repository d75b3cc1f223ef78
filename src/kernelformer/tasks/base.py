"""What a task offers a model, its training and a comparison."""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from kernelformer.files import replacing

SPLITS = ("train", "validation", "test")
Sample = dict[str, Any]
Data = TypeVar("Data")


@dataclass(frozen=True)
class Outcome:
    """What evaluation has seen of a split.

    Args:
        loss: mean over all labels, in nats; of a regression the mean squared error.
        right: share of the labels that were the model's likeliest class or token; nan in regression.
        predictions: (N) classes or numbers, of models with one answer per sample.
        labels: (N), of the same.
        split: its name; "" where nobody says.
    """

    loss: float
    right: float = math.nan
    predictions: NDArray[Any] | None = None
    labels: NDArray[Any] | None = None
    split: str = ""


class Task(ABC):
    """A data set with its splits, its batches and its metric.

    A constructor takes keyword options with plain values. It checks them, but reads or makes no data: that is done by
    `split`. Sample i of a split depends on the options and on what `fingerprint` tells apart, so every method sees the
    same samples in the same order.
    """

    name: ClassVar[str]
    about: ClassVar[str]  # one line
    model: ClassVar[str]  # kind of model: "causal-lm", "classifier", ...
    metric: str  # of the class, or of a task whose options choose it
    higher_is_better: ClassVar[bool]

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """What the model has to be, as fields of its configuration: vocab_size, max_position_embeddings, ..."""

    @abstractmethod
    def split(self, name: str) -> Dataset[Sample]:
        """The samples of "train", "validation" or "test", by index."""

    def fingerprint(self) -> str:
        """What samples depend on beyond the options, in a few words: the same text, the same samples."""
        return ""

    def remarks(self) -> list[str]:
        """What a user should know of the data read so far, a sentence each: rows left out, texts cut."""
        return []

    def judge(self, model: Any, data: Dataset[Sample], batch_size: int) -> dict[str, float]:
        """Scores that need more than the loss and one answer per sample: what the model writes by `generate`.

        They are made at the end of a run and by `evaluate`, not by each evaluation in between.

        Args:
            model: in evaluation mode.
            data: samples of a split.
            batch_size: samples at once.
        """
        return {}

    @abstractmethod
    def collate(self, samples: list[Sample]) -> dict[str, Tensor]:
        """A batch: input_ids (B, L) int64, labels, and where it is padded attention_mask (B, L), 1 = real."""

    @abstractmethod
    def score(self, found: Outcome) -> dict[str, float]:
        """The metric by its name, and whatever else says something; without it where `judge` gives the metric."""

    def baselines(self, split: str) -> dict[str, dict[str, float]]:
        """Scores, by name, of what needs no model, such as guessing by frequency."""
        return {}

    def save_extra(self, folder: Path) -> None:  # noqa: B027  (most tasks have nothing to write)
        """Write what a saved model needs of the task beside it, such as a vocabulary."""

    def load_extra(self, folder: Path) -> None:  # noqa: B027
        """Take over what `save_extra` wrote, so that a saved model is never read with another vocabulary."""


def cache_folder() -> Path:
    """Where made data is kept: kernelformer in XDG_CACHE_HOME, or else in ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "kernelformer"


def save_arrays(path: Path, record: str, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Write all or nothing: a killed process leaves no half file at this path, and two at once do no harm.

    Args:
        path: ``.npz``; its folder is made.
        record: what the arrays depend on, to be compared when they are loaded.
        arrays: by name.
    """
    everything: dict[str, Any] = {**arrays, "record": np.array(record)}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as part, part.open("wb") as out:
            np.savez(out, **everything)
    except OSError as problem:
        raise ValueError(
            f"{path} cannot be written: {problem.strerror}; give another folder as cache, or set XDG_CACHE_HOME."
        ) from None


def load_arrays(path: Path, record: str, make: Callable[[dict[str, NDArray[Any]]], Data]) -> Data:
    """What ``make`` makes of saved arrays; nothing in the file is run.

    Args:
        path: as saved.
        record: as saved.
        make: data from arrays by name; it raises when they are not what they should be.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = dict(file)
        if str(arrays.pop("record")) != record:
            raise ValueError("it was made with other options")
        return make(arrays)
    except Exception as problem:  # a damaged archive raises all kinds
        raise ValueError(
            f"the cache file {path} cannot be used ({problem}); delete it, and it will be made again."
        ) from problem
