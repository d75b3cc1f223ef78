"""Image classification pixel by pixel, as Long Range Arena does it with CIFAR-10."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kernelformer.data.batching import Sample
from kernelformer.data.images import Album
from kernelformer.errors import integer
from kernelformer.tasks.image_task import ImageClassification, labels_of, pixel_tokens


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
