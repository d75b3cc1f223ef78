"""Splits of data: their names, how what has none is divided, and numbers that are a function of (seed, index)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kernelformer.errors import number

SPLITS = ("train", "validation", "test")
# Names that splits have elsewhere; the first that is there counts.
ALIASES = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val", "validation_matched"),
    "test": ("test", "test_matched"),
}


def check_one_per_split(folder: Path, paths: Sequence[Path], known: Mapping[str, Sequence[str]] = ALIASES) -> None:
    """Refuse two files or folders for one split, also by two of its names."""
    for names in known.values():
        same = [path.name for path in paths if path.stem in names]
        if len(same) > 1:
            raise ValueError(f"the folder {folder} has {' and '.join(same)}; keep one file for each split.")


def check_shares(validation: float, test: float) -> dict[str, float]:
    """Check the shares of data that has no splits of its own, and give them by split."""
    shares = {"validation": number("validation_share", validation, at_least=0)}
    shares["test"] = number("test_share", test, at_least=0)
    if sum(shares.values()) >= 1:
        raise ValueError(
            f"validation_share and test_share must leave something to train on, got {validation} and {test}."
        )
    return shares


def divide(count: int, shares: Mapping[str, float], seed: int) -> dict[str, NDArray[np.int64]]:
    """Divide rows among the splits: row i goes where a hash of (seed, i) points.

    Args:
        count: rows.
        shares: of "validation" and "test"; training has the rest.
        seed: of the hash.

    Returns:
        Split -> numbers of its rows, in order.
    """
    hashed = uniform(np.arange(count), seed)
    test = hashed < shares["test"]
    validation = ~test & (hashed < shares["test"] + shares["validation"])
    masks = {"train": ~test & ~validation, "validation": validation, "test": test}
    return {split: np.flatnonzero(mask) for split, mask in masks.items()}


def split_of(index: int, shares: Mapping[str, float], seed: int) -> str:
    """The split to which `divide` takes one row, for whoever does not know yet how many there are."""
    hashed = uniform(np.array([index]), seed)[0]
    if hashed < shares["test"]:
        return "test"
    return "validation" if hashed < shares["test"] + shares["validation"] else "train"


def mix_bits(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Map 64 bits one to one, so that the outputs for consecutive inputs look independent (splitmix64)."""
    x = (x + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def uniform(indices: NDArray[np.int64], seed: int) -> NDArray[np.float64]:
    """Numbers in [0, 1) that are a function of (seed, index) and look independent, in the shape of the indices."""
    bits = mix_bits(mix_bits(np.array([seed], np.uint64)) + indices.astype(np.uint64)) >> np.uint64(11)
    numbers: NDArray[np.float64] = bits.astype(np.float64) * 2.0**-53
    return numbers
