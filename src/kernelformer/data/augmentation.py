"""Augmentation of images: several versions of each, as a function of (seed, index)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch.utils.data import Dataset

from kernelformer.data.batching import Sample, check_indices
from kernelformer.data.image_cache import Int64, Uint8
from kernelformer.data.images import Album
from kernelformer.data.splits import uniform

AUGMENT = ("none", "flip", "crop")
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
