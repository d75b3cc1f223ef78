"""Image classification by patches, as vision transformers do it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from kernelformer.data.batching import check_indices
from kernelformer.data.image_cache import Int64, Uint8
from kernelformer.data.images import Album, Pictures, guess
from kernelformer.data.sources import spread
from kernelformer.errors import choice, integer, number, positive_int
from kernelformer.tasks.base import Outcome, Sample, Task

AUGMENT = ("none", "flip", "crop")
VIEWS = 10  # of each image, where they differ
_DRAWS = 3  # numbers that a view needs: flip, row, column
_FIRST = 1 << 48  # draws from here on: those of the division of images into splits are below


class Views(Dataset[Sample]):
    """Images in several versions: sample i is image i % N, changed by what (seed, i) says.

    Args:
        album: N images.
        views: versions of each.
        augment: "flip" (left and right, every other one), or "crop" (first moved by up to an eighth of the size in each
            direction, black coming in from outside, then flipped).
        seed: of the changes.
    """

    def __init__(self, album: Album, views: int, augment: str, seed: int) -> None:
        self.album, self.views, self.augment, self.seed = album, views, augment, seed

    def __len__(self) -> int:
        return len(self.album) * self.views

    def __getitem__(self, index: int) -> Sample:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Sample]:
        chosen = check_indices(indices, len(self))
        images = self.album.images(chosen % len(self.album))
        return self.album.samples(self._changed(images, chosen), chosen % len(self.album))

    def _changed(self, images: Uint8, indices: Int64) -> Uint8:
        draws = spread(_FIRST + _DRAWS * indices[:, None] + np.arange(_DRAWS), self.seed)
        flips = draws[:, 0] < 0.5
        if self.augment == "flip":
            images[flips] = images[flips, :, ::-1]
            return images
        _, rows, columns, _ = images.shape
        pads = np.array([rows // 8, columns // 8])
        padded = np.pad(images, ((0, 0), (pads[0],) * 2, (pads[1],) * 2, (0, 0)))
        corners = (draws[:, 1:] * (2 * pads + 1)).astype(np.int64).tolist()
        for out, source, flip, (row, column) in zip(images, padded, flips.tolist(), corners, strict=True):
            crop = source[row : row + rows, column : column + columns]
            out[:] = crop[:, ::-1] if flip else crop
        return images


class Images(Task):
    """Say what an image shows.

    A batch has pixel_values (B, channels, rows, columns) = (intensity / 255 - mean) / std, and labels (B). Metric is
    the accuracy of the first answer. The top-5 accuracy that papers give beside it is not there: evaluation keeps one
    answer for each image. Label smoothing is a setting of the run; there is no mixing of images.

    Data: a folder with ``train.npz`` and ``test.npz``, each ``images`` uint8 (N, rows, columns, channels) and
    ``labels`` (N); or ``train/CLASS/*.png``, or ``hub:NAME``. `Pictures` has all of it.

    Args:
        data: the place.
        size: of the images, an integer or [rows, columns].
        channels: 3, or 1 for grey, which colour is turned into.
        classes: labels are 0 to classes - 1.
        mean: of intensities from 0 to 1, a number or one for each channel.
        std: the same.
        augment: of training images: "none", "flip" or "crop"; `Views` says what they do.
        views: how many versions of each training image there are, so that the split has N * views samples, in any
            order: sample i is a function of (seed, i). None: 10 with augmentation, else 1.
        resize: make images of another size or mode fit (scaled until they cover it, cropped in the middle); else they
            are bad.
        train_samples: at most so many images, spread evenly; None: all.
        validation_samples: the same for validation.
        test_samples: the same for the test.
        skip_bad: leave bad images out, and say how many, instead of raising at the first.
        validation_share: of the training images, where there is no validation.
        test_share: of a single file, which is divided as a whole.
        seed: of the division and of the augmentation.
        cache: folder for decoded images; None: kernelformer in XDG_CACHE_HOME, or else in ~/.cache.
    """

    name = "images"
    about = "classes of images that are read patch by patch (CIFAR-10, ImageNet)"
    model = "image"
    metric = "accuracy"
    higher_is_better = True

    def __init__(
        self,
        *,
        data: str | os.PathLike[str] | None = None,
        size: int | Sequence[int] = 32,
        channels: int = 3,
        classes: int = 10,
        mean: float | Sequence[float] = 0.5,
        std: float | Sequence[float] = 0.25,
        augment: str = "none",
        views: int | None = None,
        resize: bool = False,
        train_samples: int | None = None,
        validation_samples: int | None = None,
        test_samples: int | None = None,
        skip_bad: bool = False,
        validation_share: float = 0.1,
        test_share: float = 0.1,
        seed: int = 0,
        cache: str | os.PathLike[str] | None = None,
    ) -> None:
        self.classes = integer("classes", classes, at_least=2)
        self.pictures = Pictures(
            data,
            size=size,
            channels=channels,
            classes=classes,
            resize=resize,
            limits={"train": train_samples, "validation": validation_samples, "test": test_samples},
            skip_bad=skip_bad,
            validation_share=validation_share,
            test_share=test_share,
            seed=seed,
            cache=cache,
        )
        means = _per_channel("mean", mean, channels)
        deviations = torch.tensor([number("std", x, above=0) for x in _per_channel("std", std, channels)])
        self.scale = (1 / (255 * deviations)).view(-1, 1, 1)  # intensity -> value: scale * intensity - shift
        self.shift = (torch.tensor(means) / deviations).view(-1, 1, 1)
        self.augment = choice("augment", augment, AUGMENT)
        self.views = (1 if augment == "none" else VIEWS) if views is None else positive_int("views", views)
        if self.views > 1 and augment == "none":
            raise ValueError(f"views={views} need augment='flip' or 'crop', got 'none': all would be the same.")

    def settings(self) -> dict[str, Any]:
        """Size and classes."""
        rows, columns, channels = self.pictures.form.shape
        return {"image_size": [rows, columns], "num_channels": channels, "num_labels": self.classes}

    def split(self, name: str) -> Album | Views:
        """Images and labels; read once. Only training images are augmented."""
        album = self.pictures.split(name)
        if name != "train" or self.augment == "none":
            return album
        return Views(album, self.views, self.augment, self.pictures.seed)

    def fingerprint(self) -> str:
        """A hash of the data."""
        return self.pictures.fingerprint()

    def remarks(self) -> list[str]:
        """Images that were left out or made to fit."""
        return list(self.pictures.remarks)

    def collate(self, samples: list[Sample]) -> dict[str, Tensor]:
        """pixel_values (B, channels, rows, columns) float32 and labels (B)."""
        pixels = torch.stack([sample["pixels"] for sample in samples]).permute(0, 3, 1, 2)
        values = pixels.to(torch.float32, memory_format=torch.contiguous_format)
        return {
            "pixel_values": values.mul_(self.scale).sub_(self.shift),
            "labels": torch.tensor([sample["labels"] for sample in samples]),
        }

    def score(self, found: Outcome) -> dict[str, float]:
        """Share of right answers."""
        return {self.metric: found.right}

    def baselines(self, split: str) -> dict[str, dict[str, float]]:
        """Always the class that training has most often."""
        return {"most frequent class": {self.metric: guess(self.pictures.split("train"), self.pictures.split(split))}}


def _per_channel(what: str, value: object, channels: int) -> list[float]:
    values = list(value) if isinstance(value, list | tuple) else [value] * channels
    if len(values) != channels:
        raise ValueError(f"{what} must be a number or one for each of {channels} channels, got {value!r}.")
    return [number(what, x) for x in values]
