"""Pathfinder: do two marked ends belong to the same dashed path? After Long Range Arena."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from kernelformer.data import pathfinder
from kernelformer.data.batching import Sample
from kernelformer.data.dashed_paths import Drawings, Rules
from kernelformer.data.images import Album, Pictures, image_size, most_frequent_accuracy
from kernelformer.data.splits import SPLITS
from kernelformer.errors import choice, number, positive_int
from kernelformer.tasks.base import Classification
from kernelformer.tasks.image_task import labels_of, pixel_tokens
from kernelformer.tasks.options import CacheOption, DataOption, FixedSamples, SkipOption

SAMPLES = {"test": 20_000, "validation": 20_000, "train": 160_000}  # made by default


@dataclass(kw_only=True, eq=False)
class Pathfinder(CacheOption, DataOption, SkipOption, FixedSamples, Classification):
    """Say whether two discs mark the ends of one path; the image comes as grey values, a token each, row by row.

    An image has two long dashed paths, shorter ones that distract, and two markers. Label 1: the markers are on both
    ends of one long path, the other has none. Label 0: each long path has one. A path is a walk of dashes which turns
    by up to ``bend`` radians in each gap. Long paths are drawn first, then each distractor where there is room, and a
    drawing without room is given up. Both classes are made of the same drawings, and
    markers that look alike in distance, place and directions (`data.dashed_paths`).

    The label can be seen: pixels of one path are joined by steps of at most gap + 1.5 pixels, pixels of different
    paths are further apart. Markers alone have the value 255.

    Departures: Long Range Arena uses the program of Linsley et al. (2018), of which these are the settings (14 dashes
    of 2 pixels, 5 distractors of 4, 200,000 images in parts of 8, 1 and 1 tenths), but not the drawings: there paths
    may come nearer, and markers of one path may have other distances than markers of two. Its images can be given as
    data.

    No image occurs twice, in whichever split. The first ones are the test's, then come validation and training.

    Data: instead of made images, a folder with ``train.npz``, ``validation.npz`` and ``test.npz``, each ``images``
    uint8 (N, rows, columns) and ``labels`` (N) of 0 and 1; `data.images.Pictures` has other ways. The options of the
    drawing, dashes to contrast, are then refused.

    Args:
        data: where the images are; None: they are made.
        train_samples: how many, None: 160,000, and 20,000 of the others; of data at most so many, spread evenly, None:
            all.
        size: of the images, an integer or [rows, columns].
        dashes: of a long path; in Long Range Arena 6, 9 or 14.
        distractors: how many; None: 20 // distractor_dashes.
        distractor_dashes: of each; None: dashes // 3, at least 1.
        dash_length: in pixels, as the following.
        gap: between dashes.
        bend: radians, the most that a path turns from dash to dash.
        marker_radius: of the discs.
        contrast: grey of dashes, as a share of that of the markers.

    Other options: see `tasks.options`.
    """

    size: int | Sequence[int] = 32
    dashes: int = Rules.dashes
    distractors: int | None = None
    distractor_dashes: int | None = None
    dash_length: float = Rules.dash_length
    gap: float = Rules.gap
    bend: float = Rules.bend
    marker_radius: float = Rules.marker_radius
    contrast: float = Rules.contrast

    name = "pathfinder"
    about = "are two marked ends those of one dashed path? grey pixels, after Long Range Arena"
    model = "classifier"

    def __post_init__(self) -> None:
        super().__post_init__()
        limits = {split: self.limits[split] for split in SAMPLES}
        self.counts = {split: SAMPLES[split] if x is None else x for split, x in limits.items()}
        self.rules = self._rules()
        if self.data is not None:
            self._refuse_drawing()
        self.pictures = Pictures(
            self.data,
            size=self.size,
            channels=1,
            classes=pathfinder.CLASSES,
            resize=False,
            limits=self.limits,
            skip_bad=self.skip_bad,
            validation_share=0.1,
            test_share=0.1,
            seed=self.seed,
            cache=self.cache,
        )
        self._drawings: Drawings | None = None

    def settings(self) -> dict[str, Any]:
        """A grey value is a token, and no token is padding."""
        return {
            "vocab_size": 256,
            "max_position_embeddings": self.rules.rows * self.rules.columns,
            "num_labels": pathfinder.CLASSES,
            "pad_token_id": None,
        }

    @property
    def path(self) -> Path:
        """The file of made images in the cache."""
        return pathfinder.cache_path(self.counts, self.rules, self.seed, self.cache_path)

    def fingerprint(self) -> str:
        """A hash of data; made images only change with the way to make them."""
        return f"format {pathfinder.FORMAT}" if self.data is None else self.pictures.fingerprint()

    def remarks(self) -> list[str]:
        """With data: that nothing was drawn, and what was left out."""
        if self.data is None:
            return []
        return [f"the images are those of {self.pictures.location}", *self.pictures.remarks]

    def split(self, name: str) -> Album:
        """Images of data; or from the cache; or made now for all splits: about two minutes for 200,000."""
        choice("split", name, SPLITS)
        if self.data is not None:
            return self.pictures.split(name)
        if self._drawings is None:
            self._drawings = pathfinder.cached_drawings(self.counts, self.rules, self.seed, self.cache_path)
        first = sum(self.counts[x] for x in itertools.takewhile(lambda x: x != name, self.counts))
        images, labels = (x[first : first + self.counts[name]] for x in self._drawings)
        return Album(images[..., None], np.arange(len(labels)), labels.astype(np.int64), 1)

    def collate(self, samples: list[Sample]) -> dict[str, Tensor]:
        """input_ids (B, L) and labels (B)."""
        return {"input_ids": pixel_tokens(samples), "labels": labels_of(samples)}

    def baselines(self, split: str) -> dict[str, dict[str, float]]:
        """Always the class that training has most often."""
        accuracy = most_frequent_accuracy(self.split("train"), self.split(split))
        return {"most frequent class": {self.metric: accuracy}}

    def _rules(self) -> Rules:
        """Rules of the drawing, checked."""
        short = self.distractor_dashes
        if short is None:
            short = max(positive_int("dashes", self.dashes) // 3, 1)
        many = 20 // positive_int("distractor_dashes", short) if self.distractors is None else self.distractors
        return Rules(
            *image_size(self.size),
            dashes=self.dashes,
            distractors=many,
            distractor_dashes=short,
            dash_length=number("dash_length", self.dash_length),  # as float: 2 and 2.0 are the same
            gap=number("gap", self.gap),
            bend=number("bend", self.bend),
            marker_radius=number("marker_radius", self.marker_radius),
            contrast=number("contrast", self.contrast),
        )

    def _refuse_drawing(self) -> None:
        """Refuse options of the drawing, which have no effect on given images."""
        defaults = asdict(Rules()) | {"distractors": None, "distractor_dashes": None}
        options = [x for x in defaults if x not in ("rows", "columns")]
        given = [f"{x}={getattr(self, x)!r}" for x in options if getattr(self, x) != defaults[x]]
        if given:
            raise ValueError(
                f"with data={str(self.data)!r} nothing is drawn, got {', '.join(given)}; leave out the options of the "
                f"drawing, or data."
            )
