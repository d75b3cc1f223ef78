"""Pathfinder: do two marked ends belong to the same dashed path? After Long Range Arena."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.random import SeedSequence, default_rng
from numpy.typing import NDArray
from torch import Tensor

from kernelformer.data.batching import check_limits
from kernelformer.data.dashed_paths import GREY, Drawings, Rules, draw
from kernelformer.data.images import Album, Pictures, guess, image_size
from kernelformer.errors import choice, integer, number, positive_int
from kernelformer.tasks.base import SPLITS, Outcome, Sample, Task, cache_folder, load_arrays, save_arrays

CLASSES = 2
SAMPLES = {"test": 20_000, "validation": 20_000, "train": 160_000}  # made by default
_FORMAT = 1  # of the cache; to be raised when the same options come to mean other images
_PATIENCE = 1 << 15  # drawings in a row that bring nothing new
_FIRST = 512  # drawings begun in the first round; each has twice as many as the one before, up to a limit


def _fresh(found: Drawings, seen: set[bytes], limit: int) -> Drawings:
    """The first so many of those that were not seen before; from now on they are."""
    new: list[int] = []
    for i, image in enumerate(found.images):
        digest = hashlib.blake2b(image.tobytes(), digest_size=16).digest()
        if len(new) < limit and digest not in seen:
            seen.add(digest)
            new.append(i)
    return Drawings(found.images[new], found.labels[new])


def generate(count: int, *, rules: Rules | None = None, seed: int = 0) -> Drawings:
    """Make so many different images.

    Args:
        count: N; fewer are the first ones of more.
        rules: which images; default Long Range Arena's.
        seed: same seed (and rules), same images.

    Cost: vectorized over drawings; with the defaults four are begun for one that is kept.
    """
    rules = rules or Rules()
    seen: set[bytes] = set()
    parts: list[Drawings] = []
    vain = 0
    for turn in itertools.count():
        rng = default_rng(SeedSequence(seed, spawn_key=(turn,)))
        begun = min(_FIRST << min(turn, 16), rules.attempts)
        part = _fresh(draw(rng, rules, begun), seen, count - len(seen))
        parts.append(part)
        if len(seen) == count:
            break
        vain = 0 if len(part.labels) else vain + begun
        if vain >= _PATIENCE:
            raise ValueError(
                f"found only {len(seen)} of {count} different images, and no more in {vain} drawings, with {rules}; "
                f"give a larger size, or fewer or shorter paths."
            )
    return Drawings(np.concatenate([x.images for x in parts]), np.concatenate([x.labels for x in parts]))


def _pack(made: Drawings) -> dict[str, NDArray[Any]]:
    """For the cache, two pixels to a byte."""
    levels = np.append(made.images.reshape(-1) // GREY, np.zeros(made.images.size % 2, np.uint8))
    return {"levels": levels[::2] << 4 | levels[1::2], "labels": made.labels}


def _unpack(arrays: dict[str, NDArray[Any]], shape: tuple[int, int, int]) -> Drawings:
    """From the cache, if it can be so many images."""
    levels, labels = arrays["levels"], arrays["labels"]
    size = math.prod(shape)
    if levels.dtype != np.uint8 or levels.shape != (-(-size // 2),):
        raise ValueError(f"its levels are not those of {shape[0]} images of {shape[1]} x {shape[2]}")
    if labels.dtype != np.uint8 or labels.shape != shape[:1] or labels.max() >= CLASSES:
        raise ValueError(f"its labels are not those of {shape[0]} images")
    both = np.stack([levels >> 4, levels & 15], 1).reshape(-1)[:size]
    return Drawings(both.reshape(shape) * GREY, labels)


def _refuse_drawing(data: object, **options: object) -> None:
    """Options of the drawing have no effect on given images."""
    defaults = asdict(Rules()) | {"distractors": None, "distractor_dashes": None}
    given = [f"{name}={x!r}" for name, x in options.items() if x != defaults[name]]
    if given:
        raise ValueError(
            f"with data={str(data)!r} nothing is drawn, got {', '.join(given)}; leave out the options of the drawing, "
            f"or data."
        )


class Pathfinder(Task):
    """Say whether two discs mark the ends of one path; the image comes as grey values, a token each, row by row.

    An image has two long dashed paths, shorter ones that distract, and two markers. Label 1: the markers are on both
    ends of one long path, the other has none. Label 0: each long path has one. A path is a walk of dashes which turns
    by up to ``bend`` radians in each gap. Long paths are drawn first, then each distractor where there is room, and a
    drawing without room is given up. Both classes are made of the same drawings, and
    markers that look alike in distance, place and directions (`dashed._choose`).

    The label can be seen: pixels of one path are joined by steps of at most gap + 1.5 pixels, pixels of different
    paths are further apart. Markers alone have the value 255.

    Departures: Long Range Arena uses the program of Linsley et al. (2018), of which these are the settings (14 dashes
    of 2 pixels, 5 distractors of 4, 200,000 images in parts of 8, 1 and 1 tenths), but not the drawings: there paths
    may come nearer, and markers of one path may have other distances than markers of two. Its images can be given as
    data.

    No image occurs twice, in whichever split. The first ones are the test's, then come validation and training.

    Data: instead of made images, a folder with ``train.npz``, ``validation.npz`` and ``test.npz``, each ``images``
    uint8 (N, rows, columns) and ``labels`` (N) of 0 and 1; `Pictures` has other ways. The options of the drawing,
    dashes to contrast, are then refused.

    Args:
        data: where the images are; None: they are made.
        train_samples: how many, None: 160,000, and 20,000 of the others; of data at most so many, spread evenly, None:
            all.
        validation_samples: the same for validation.
        test_samples: the same for the test.
        size: of the images, an integer or [rows, columns].
        dashes: of a long path; in Long Range Arena 6, 9 or 14.
        distractors: how many; None: 20 // distractor_dashes.
        distractor_dashes: of each; None: dashes // 3, at least 1.
        dash_length: in pixels, as the following.
        gap: between dashes.
        bend: radians, the most that a path turns from dash to dash.
        marker_radius: of the discs.
        contrast: grey of dashes, as a share of that of the markers.
        skip_bad: of data, leave bad images out and say how many.
        seed: same seed, same images.
        cache: folder for the images once made; None: kernelformer in XDG_CACHE_HOME, or else in ~/.cache.
    """

    name = "pathfinder"
    about = "are two marked ends those of one dashed path? grey pixels, after Long Range Arena"
    model = "classifier"
    metric = "accuracy"
    higher_is_better = True

    def __init__(
        self,
        *,
        data: str | os.PathLike[str] | None = None,
        train_samples: int | None = None,
        validation_samples: int | None = None,
        test_samples: int | None = None,
        size: int | Sequence[int] = 32,
        dashes: int = Rules.dashes,
        distractors: int | None = None,
        distractor_dashes: int | None = None,
        dash_length: float = Rules.dash_length,
        gap: float = Rules.gap,
        bend: float = Rules.bend,
        marker_radius: float = Rules.marker_radius,
        contrast: float = Rules.contrast,
        skip_bad: bool = False,
        seed: int = 0,
        cache: str | os.PathLike[str] | None = None,
    ) -> None:
        limits = {"test": test_samples, "validation": validation_samples, "train": train_samples}
        self.samples = {split: SAMPLES[split] if x is None else x for split, x in check_limits(limits).items()}
        short = max(positive_int("dashes", dashes) // 3, 1) if distractor_dashes is None else distractor_dashes
        many = 20 // positive_int("distractor_dashes", short) if distractors is None else distractors
        self.rules = Rules(
            *image_size(size),
            dashes=dashes,
            distractors=many,
            distractor_dashes=short,
            dash_length=number("dash_length", dash_length),  # as float: 2 and 2.0 are the same
            gap=number("gap", gap),
            bend=number("bend", bend),
            marker_radius=number("marker_radius", marker_radius),
            contrast=number("contrast", contrast),
        )
        if data is not None:
            _refuse_drawing(
                data,
                dashes=dashes,
                distractors=distractors,
                distractor_dashes=distractor_dashes,
                dash_length=dash_length,
                gap=gap,
                bend=bend,
                marker_radius=marker_radius,
                contrast=contrast,
            )
        self.seed = integer("seed", seed, at_least=0)
        self.cache = cache_folder() if cache is None else Path(str(cache)).expanduser()
        self.pictures = Pictures(
            data,
            size=size,
            channels=1,
            classes=CLASSES,
            resize=False,
            limits=limits,
            skip_bad=skip_bad,
            validation_share=0.1,
            test_share=0.1,
            seed=seed,
            cache=cache,
        )
        self._made: Drawings | None = None

    def settings(self) -> dict[str, Any]:
        """A grey value is a token, and no token is padding."""
        length = self.rules.rows * self.rules.columns
        return {"vocab_size": 256, "max_position_embeddings": length, "num_labels": CLASSES, "pad_token_id": None}

    @property
    def record(self) -> str:
        """All that made images depend on."""
        return json.dumps({"format": _FORMAT, "seed": self.seed, **self.samples, **asdict(self.rules)}, sort_keys=True)

    @property
    def path(self) -> Path:
        """Of made images in the cache."""
        return self.cache / f"pathfinder-{hashlib.sha256(self.record.encode()).hexdigest()[:16]}.npz"

    def fingerprint(self) -> str:
        """Of data a hash; made images only change with the way to make them."""
        return f"format {_FORMAT}" if self.pictures.place is None else self.pictures.fingerprint()

    def remarks(self) -> list[str]:
        """With data: that nothing was drawn, and what was left out."""
        place = self.pictures.place
        return [] if place is None else [f"the images are those of {place}", *self.pictures.remarks]

    def split(self, name: str) -> Album:
        """Images of data; or from the cache; or made now for all splits: about two minutes for 200,000."""
        choice("split", name, SPLITS)
        if self.pictures.place is not None:
            return self.pictures.split(name)
        if self._made is None:
            self._made = self._all()
        first = sum(self.samples[x] for x in itertools.takewhile(lambda x: x != name, self.samples))
        images, labels = (x[first : first + self.samples[name]] for x in self._made)
        return Album(images[..., None], np.arange(len(labels)), labels.astype(np.int64), 1)

    def _all(self) -> Drawings:
        count = sum(self.samples.values())
        if self.path.exists():
            shape = count, self.rules.rows, self.rules.columns
            return load_arrays(self.path, self.record, lambda found: _unpack(found, shape))
        made = generate(count, rules=self.rules, seed=self.seed)
        save_arrays(self.path, self.record, _pack(made))
        return made

    def collate(self, samples: list[Sample]) -> dict[str, Tensor]:
        """input_ids (B, L) and labels (B)."""
        pixels = torch.stack([sample["pixels"] for sample in samples])
        labels = torch.tensor([sample["labels"] for sample in samples])
        return {"input_ids": pixels.flatten(1).long(), "labels": labels}

    def score(self, found: Outcome) -> dict[str, float]:
        """Share of right answers."""
        return {self.metric: found.right}

    def baselines(self, split: str) -> dict[str, dict[str, float]]:
        """Always the class that training has most often."""
        return {"most frequent class": {self.metric: guess(self.split("train"), self.split(split))}}
