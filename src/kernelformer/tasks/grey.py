"""Image classification pixel by pixel, as Long Range Arena does it with CIFAR-10."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kernelformer.data.images import Album, Pictures, guess
from kernelformer.errors import integer
from kernelformer.tasks.base import Outcome, Sample, Task


class Grey(Task):
    """Say what an image shows; it comes as grey intensities, a token each, row by row: L = rows * columns.

    Colour is made grey by 0.299 R + 0.587 G + 0.114 B, rounded. Nothing is padded and nothing augmented.

    Data: a folder with ``train.npz`` and ``test.npz``, each ``images`` uint8 (N, rows, columns, 3), or of one channel,
    and ``labels`` (N); or ``train/CLASS/*.png``, or ``hub:NAME``. `Pictures` has all of it.

    Departures from Long Range Arena: its validation is the last tenth of the training images, here it is a tenth by a
    hash; TensorFlow weighs red by 0.2989 and rounds v to floor(1.002 v), so that intensities may differ by 1.

    Args:
        data: the place.
        size: of the images, an integer or [rows, columns].
        classes: labels are 0 to classes - 1.
        resize: make images of another size or mode fit; else they are bad.
        train_samples: at most so many, spread evenly; None: all.
        validation_samples: the same for validation.
        test_samples: the same for the test.
        skip_bad: leave bad images out, and say how many, instead of raising at the first.
        validation_share: of the training images, where there is no validation.
        test_share: of a single file, which is divided as a whole.
        seed: of the division.
        cache: folder for decoded images; None: kernelformer in XDG_CACHE_HOME, or else in ~/.cache.
    """

    name = "grey"
    about = "classes of images that come as a sequence of grey pixels (Long Range Arena's Image)"
    model = "classifier"
    metric = "accuracy"
    higher_is_better = True

    def __init__(
        self,
        *,
        data: str | os.PathLike[str] | None = None,
        size: int | Sequence[int] = 32,
        classes: int = 10,
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
            channels=1,
            classes=classes,
            resize=resize,
            limits={"train": train_samples, "validation": validation_samples, "test": test_samples},
            skip_bad=skip_bad,
            validation_share=validation_share,
            test_share=test_share,
            seed=seed,
            cache=cache,
        )

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

    def fingerprint(self) -> str:
        """A hash of the data."""
        return self.pictures.fingerprint()

    def remarks(self) -> list[str]:
        """Images that were left out or made to fit."""
        return list(self.pictures.remarks)

    def collate(self, samples: list[Sample]) -> dict[str, Tensor]:
        """input_ids (B, L) and labels (B)."""
        pixels = torch.stack([sample["pixels"] for sample in samples])
        return {
            "input_ids": pixels.flatten(1).long(),
            "labels": torch.tensor([sample["labels"] for sample in samples]),
        }

    def score(self, found: Outcome) -> dict[str, float]:
        """Share of right answers."""
        return {self.metric: found.right}

    def baselines(self, split: str) -> dict[str, dict[str, float]]:
        """Always the class that training has most often."""
        return {"most frequent class": {self.metric: guess(self.split("train"), self.split(split))}}
