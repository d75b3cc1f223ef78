"""Image generation: a density of images, value after value, as on ImageNet32 and ImageNet64."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kernelformer.data.batching import Sample
from kernelformer.data.images import Album
from kernelformer.tasks.base import Outcome
from kernelformer.tasks.image_task import ImageTask, pixel_tokens


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
