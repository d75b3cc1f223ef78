"""Images of Pathfinder: drawn until there are enough different ones, and kept in the cache, two pixels to a byte."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import numpy as np
from numpy.random import SeedSequence, default_rng

from kernelformer.data.array_cache import Arrays, cache_file, cached_arrays
from kernelformer.data.dashed_paths import GREY, Drawings, Rules, draw

CLASSES = 2
FORMAT = 1  # of the cache; to be raised when the same options come to mean other images
_PATIENCE = 1 << 15  # drawings in a row that bring nothing new
_FIRST = 512  # drawings begun in the first round; each has twice as many as the one before, up to a limit


def _unseen(drawings: Drawings, seen: set[bytes], limit: int) -> Drawings:
    """The first ``limit`` drawings that were not seen before, which are added to those seen."""
    new: list[int] = []
    for i, image in enumerate(drawings.images):
        digest = hashlib.blake2b(image.tobytes(), digest_size=16).digest()
        if len(new) < limit and digest not in seen:
            seen.add(digest)
            new.append(i)
    return Drawings(drawings.images[new], drawings.labels[new])


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
        part = _unseen(draw(rng, rules, begun), seen, count - len(seen))
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


def _pack(drawings: Drawings) -> Arrays:
    """Arrays for the cache, two pixels to a byte."""
    levels = np.append(drawings.images.reshape(-1) // GREY, np.zeros(drawings.images.size % 2, np.uint8))
    return {"levels": levels[::2] << 4 | levels[1::2], "labels": drawings.labels}


def _unpack(arrays: Arrays, shape: tuple[int, int, int]) -> Drawings:
    """Drawings of a cache file, if they can be so many images."""
    levels, labels = arrays["levels"], arrays["labels"]
    size = math.prod(shape)
    if levels.dtype != np.uint8 or levels.shape != (-(-size // 2),):
        raise ValueError(f"its levels are not those of {shape[0]} images of {shape[1]} x {shape[2]}")
    if labels.dtype != np.uint8 or labels.shape != shape[:1] or labels.max() >= CLASSES:
        raise ValueError(f"its labels are not those of {shape[0]} images")
    both = np.stack([levels >> 4, levels & 15], 1).reshape(-1)[:size]
    return Drawings(both.reshape(shape) * GREY, labels)


def cache_path(counts: Mapping[str, int], rules: Rules, seed: int, cache: Path) -> Path:
    """The file of the images in a cache folder."""
    return cache_file(cache, "pathfinder", _record(counts, rules, seed))


def _record(counts: Mapping[str, int], rules: Rules, seed: int) -> str:
    """All that the images of the splits depend on."""
    return json.dumps({"format": FORMAT, "seed": seed, **counts, **asdict(rules)}, sort_keys=True)


def cached_drawings(counts: Mapping[str, int], rules: Rules, seed: int, cache: Path) -> Drawings:
    """Images of all splits from the cache, or made now and put there.

    Args:
        counts: split -> how many; in this order they are made.
        rules: which images.
        seed: of `generate`.
        cache: folder.
    """
    count = sum(counts.values())
    return cached_arrays(
        cache_path(counts, rules, seed, cache),
        _record(counts, rules, seed),
        make=lambda: _pack(generate(count, rules=rules, seed=seed)),
        read=lambda arrays: _unpack(arrays, (count, rules.rows, rules.columns)),
    )
