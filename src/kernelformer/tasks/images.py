"""Image classification by patches, as vision transformers do it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernelformer.data.augmentation import AUGMENT, Views
from kernelformer.data.batching import Sample
from kernelformer.data.images import Album
from kernelformer.errors import choice, integer, number, positive_int
from kernelformer.tasks.image_task import ImageClassification, labels_of

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
        augment: of training images: "none", "flip" or "crop"; `data.augmentation.Views` says what they do.
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
