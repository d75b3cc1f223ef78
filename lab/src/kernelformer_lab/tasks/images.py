"""Image classification by patches, as vision transformers do it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernelformer.errors import choice, integer, number, positive_int
from kernelformer_lab.data.batching import Sample, Samples
from kernelformer_lab.data.image_cache import Int64, Uint8
from kernelformer_lab.data.images import Album
from kernelformer_lab.data.sources import uniform
from kernelformer_lab.tasks.base import Outcome
from kernelformer_lab.tasks.kinds import ImageClassification, ImageTask, labels_of, pixel_tokens


@dataclass(kw_only=True, eq=False)
class Grey(ImageClassification):
    """Say what an image shows; it comes as grey intensities, a token each, row by row: L = rows * columns.

    Colour is made grey by 0.299 R + 0.587 G + 0.114 B, rounded. Nothing is padded and nothing augmented.

    Data: a folder with ``train.npz`` and ``test.npz``, each ``images`` uint8 (N, rows, columns, 3), or of one channel,
    and ``labels`` (N); or ``train/CLASS/*.png``, or ``hub:NAME``. `data.images.Pictures` has all of it.

    Departures from Long Range Arena: its validation is the last tenth of the training images, here it is a tenth by a
    hash; TensorFlow weighs red by 0.2989 and rounds v to floor(1.002 v), so that intensities may differ by 1.

    Args:
        classes: labels are 0 to classes - 1.

    Other options: see `ImageTask`.
    """

    classes: int = 10

    name = "grey"
    about = "classes of images that come as a sequence of grey pixels (Long Range Arena's Image)"
    model = "classifier"

    def __post_init__(self) -> None:
        super().__post_init__()
        integer("classes", self.classes, at_least=2)
        self.pictures = self.open_pictures(channels=1, classes=self.classes)

    def settings(self) -> dict[str, Any]:
        """An intensity is a token, and no token is padding."""
        rows, columns, _ = self.pictures.form.shape
        return {
            "vocab_size": 256,
            "max_position_embeddings": rows * columns,
            "num_labels": self.classes,
            "pad_token_id": None,
        }

    def split(self, name: str) -> Album:
        """Images and labels; read once."""
        return self.pictures.split(name)

    def collate(self, samples: list[Sample]) -> dict[str, Tensor]:
        """input_ids (B, L) and labels (B)."""
        return {"input_ids": pixel_tokens(samples), "labels": labels_of(samples)}


@dataclass(kw_only=True, eq=False)
class Pixels(ImageTask):
    """Predict the next intensity of an image; scored in bits per dimension, over the predicted values.

    The tokens are the values 0 to 255, row by row, channels innermost: L = rows * columns * channels. The first value
    is given, not predicted, so an image counts L - 1 dimensions; published numbers count L, of which the first costs
    up to 8 bits: at size 32 and three channels they are higher by at most 8 / 3072 bits.

    Data: a folder with ``train.npz`` (``validation.npz``, ``test.npz``), each ``images`` uint8 (N, rows, columns, 3) or
    of one channel; or with folders ``train/`` (``validation/``, ``test/``) that hold png or jpg files, at any depth; or
    one npz file or a folder of images, divided by the shares; or ``hub:NAME``. Labels are not read.
    `data.images.Pictures` has all of it.

    Args:
        channels: 3, or 1 for grey, which colour is turned into.

    Other options: see `ImageTask`. With ``resize`` numbers depend on how images were made small: published ones are of
    files of that size.
    """

    channels: int = 3

    name = "pixels"
    about = "images as sequences of intensities, in bits per dimension (ImageNet32, ImageNet64)"
    model = "pixel-lm"
    metric = "bits_per_dimension"
    higher_is_better = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.pictures = self.open_pictures(channels=self.channels, classes=None)
        if math.prod(self.pictures.form.shape) < 2:
            raise ValueError(
                f"an image must have at least two values, got size={self.size} and channels={self.channels}."
            )

    def settings(self) -> dict[str, Any]:
        """An intensity is a token, and no token is padding."""
        rows, columns, channels = self.pictures.form.shape
        return {
            "vocab_size": 256,
            "image_size": [rows, columns],
            "num_channels": channels,
            "max_position_embeddings": rows * columns * channels,
            "pad_token_id": None,
        }

    def split(self, name: str) -> Album:
        """Images; read once."""
        return self.pictures.split(name)

    def collate(self, samples: list[Sample]) -> dict[str, Tensor]:
        """input_ids (B, L) and labels, which are the same: the model shifts them."""
        ids = pixel_tokens(samples)
        return {"input_ids": ids, "labels": ids}

    def score(self, outcome: Outcome) -> dict[str, float]:
        """Bits per dimension: the loss in bits instead of nats."""
        return {self.metric: outcome.loss / math.log(2)}


AUGMENT = ("none", "flip", "crop")
_DRAWS = 3  # numbers that a view needs: flip, row, column
_FIRST = 1 << 48  # draws from here on: those of the division of images into splits are below


class Views(Samples):
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

    def take(self, chosen: Int64) -> list[Sample]:
        """Changed images with their labels."""
        images = self.album.images(chosen % len(self.album))
        return self.album.samples(self._changed(images, chosen), chosen % len(self.album))

    def _changed(self, images: Uint8, indices: Int64) -> Uint8:
        draws = uniform(_FIRST + _DRAWS * indices[:, None] + np.arange(_DRAWS), self.seed)
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


VIEWS = 10  # of each image, where they differ


@dataclass(kw_only=True, eq=False)
class Images(ImageClassification):
    """Say what an image shows.

    A batch has pixel_values (B, channels, rows, columns) = (intensity / 255 - mean) / std, and labels (B). Metric is
    the accuracy of the first answer; of more than five classes the top-5 accuracy stands beside it. Label smoothing is
    a setting of the run; there is no mixing of images.

    Data: a folder with ``train.npz`` and ``test.npz``, each ``images`` uint8 (N, rows, columns, channels) and
    ``labels`` (N); or ``train/CLASS/*.png``, or ``hub:NAME``. `data.images.Pictures` has all of it.

    Args:
        channels: 3, or 1 for grey, which colour is turned into.
        classes: labels are 0 to classes - 1.
        mean: of intensities from 0 to 1, a number or one for each channel.
        std: the same.
        augment: of training images: "none", "flip" or "crop"; `Views` says what they do.
        views: how many versions of each training image there are, so that the split has N * views samples, in any
            order: sample i is a function of (seed, i). None: 10 with augmentation, else 1.

    Other options: see `ImageTask`; ``seed`` is that of the augmentation too.
    """

    channels: int = 3
    classes: int = 10
    mean: float | Sequence[float] = 0.5
    std: float | Sequence[float] = 0.25
    augment: str = "none"
    views: int | None = None

    name = "images"
    about = "classes of images that are read patch by patch (CIFAR-10, ImageNet)"
    model = "image"

    def __post_init__(self) -> None:
        super().__post_init__()
        integer("classes", self.classes, at_least=2)
        self.pictures = self.open_pictures(channels=self.channels, classes=self.classes)
        means = _per_channel("mean", self.mean, self.channels)
        deviations = torch.tensor([number("std", x, above=0) for x in _per_channel("std", self.std, self.channels)])
        self.scale = (1 / (255 * deviations)).view(-1, 1, 1)  # intensity -> value: scale * intensity - shift
        self.shift = (torch.tensor(means) / deviations).view(-1, 1, 1)
        plain = choice("augment", self.augment, AUGMENT) == "none"
        self._versions = (1 if plain else VIEWS) if self.views is None else positive_int("views", self.views)
        if self._versions > 1 and plain:
            raise ValueError(f"views={self.views} need augment='flip' or 'crop', got 'none': all would be the same.")

    def settings(self) -> dict[str, Any]:
        """Size and classes."""
        rows, columns, channels = self.pictures.form.shape
        return {"image_size": [rows, columns], "num_channels": channels, "num_labels": self.classes}

    def split(self, name: str) -> Album | Views:
        """Images and labels; read once. Only training images are augmented."""
        album = self.pictures.split(name)
        if name != "train" or self.augment == "none":
            return album
        return Views(album, self._versions, self.augment, self.seed)

    def collate(self, samples: list[Sample]) -> dict[str, Tensor]:
        """pixel_values (B, channels, rows, columns) float32 and labels (B)."""
        pixels = torch.stack([sample["pixels"] for sample in samples]).permute(0, 3, 1, 2)
        values = pixels.to(torch.float32, memory_format=torch.contiguous_format)
        return {"pixel_values": values.mul_(self.scale).sub_(self.shift), "labels": labels_of(samples)}


def _per_channel(what: str, value: object, channels: int) -> list[float]:
    values = list(value) if isinstance(value, list | tuple) else [value] * channels
    if len(values) != channels:
        raise ValueError(f"{what} must be a number or one for each of {channels} channels, got {value!r}.")
    return [number(what, x) for x in values]
