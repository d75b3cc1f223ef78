"""Image generation: a density of images, value after value, as on ImageNet32 and ImageNet64."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kernelformer.data.images import Album, Pictures
from kernelformer.tasks.base import Outcome, Sample, Task


class Pixels(Task):
    """Predict the next intensity of an image; scored in bits per dimension, over the predicted values.

    The tokens are the values 0 to 255, row by row, channels innermost: L = rows * columns * channels. The first value
    is given, not predicted, so an image counts L - 1 dimensions; published numbers count L, of which the first costs
    up to 8 bits: at size 32 and three channels they are higher by at most 8 / 3072 bits.

    Data: a folder with ``train.npz`` (``validation.npz``, ``test.npz``), each ``images`` uint8 (N, rows, columns, 3) or
    of one channel; or with folders ``train/`` (``validation/``, ``test/``) that hold png or jpg files, at any depth; or
    one npz file or a folder of images, divided by the shares; or ``hub:NAME``. Labels are not read. `Pictures` has all
    of it.

    Args:
        data: the place.
        size: of the images, an integer or [rows, columns].
        channels: 3, or 1 for grey, which colour is turned into.
        resize: make images of another size or mode fit; else they are bad. Numbers depend on how images were made
            small: published ones are of files of that size.
        train_samples: at most so many, spread evenly; None: all.
        validation_samples: the same for validation.
        test_samples: the same for the test.
        skip_bad: leave bad images out, and say how many, instead of raising at the first.
        validation_share: of the training images, where there is no validation, or of a whole.
        test_share: of a whole.
        seed: of the division.
        cache: folder for decoded images; None: kernelformer in XDG_CACHE_HOME, or else in ~/.cache.
    """

    name = "pixels"
    about = "images as sequences of intensities, in bits per dimension (ImageNet32, ImageNet64)"
    model = "pixel-lm"
    metric = "bits_per_dimension"
    higher_is_better = False

    def __init__(
        self,
        *,
        data: str | os.PathLike[str] | None = None,
        size: int | Sequence[int] = 32,
        channels: int = 3,
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
        self.pictures = Pictures(
            data,
            size=size,
            channels=channels,
            classes=None,
            resize=resize,
            limits={"train": train_samples, "validation": validation_samples, "test": test_samples},
            skip_bad=skip_bad,
            validation_share=validation_share,
            test_share=test_share,
            seed=seed,
            cache=cache,
        )
        if math.prod(self.pictures.form.shape) < 2:
            raise ValueError(f"an image must have at least two values, got size={size} and channels={channels}.")

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

    def fingerprint(self) -> str:
        """A hash of the data."""
        return self.pictures.fingerprint()

    def remarks(self) -> list[str]:
        """Images that were left out or made to fit."""
        return list(self.pictures.remarks)

    def collate(self, samples: list[Sample]) -> dict[str, Tensor]:
        """input_ids (B, L) and labels, which are the same: the model shifts them."""
        ids = torch.stack([sample["pixels"] for sample in samples]).flatten(1).long()
        return {"input_ids": ids, "labels": ids}

    def score(self, found: Outcome) -> dict[str, float]:
        """Bits per dimension: the loss in bits instead of nats."""
        return {self.metric: found.loss / math.log(2)}
