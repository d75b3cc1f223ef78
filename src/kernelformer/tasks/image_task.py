"""Tasks on images: their options, and where the images come from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kernelformer.data.batching import Sample
from kernelformer.data.images import Pictures, most_frequent_accuracy
from kernelformer.tasks.base import Classification, Outcome
from kernelformer.tasks.options import CacheOption, RowOptions


@dataclass(kw_only=True, eq=False)
class ImageTask(CacheOption, RowOptions):
    """A task on images, which `data.images.Pictures` reads.

    Args:
        size: of the images, an integer or [rows, columns].
        resize: make images of another size or mode fit (scaled until they cover it, cropped in the middle); else they
            are bad.

    Options of all tasks with rows, and the cache for decoded images: see `tasks.options`.
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
