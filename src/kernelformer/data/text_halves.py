"""Pairs of half texts that belong together or not, made of single texts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kernelformer.data.splits import uniform
from kernelformer.data.values import text_value

FORMAT = 1  # to be raised when the same options come to mean other pairs


def halves(value: object) -> tuple[bytes, bytes]:
    """Check for texts of at least two characters; gives their halves in UTF-8.

    The cut is at the blank nearest to the middle, or in the middle itself if none is within a quarter of the text.
    """
    text = text_value(value).strip()
    if len(text) < 2:
        raise ValueError(f"must have at least two characters, one for each half, got {text!r}")
    middle = len(text) // 2
    near = (at for step in range(len(text) // 4 + 1) for at in (middle - step, middle + step))
    at = next((x for x in near if text[x].isspace()), middle)
    return text[:at].rstrip().encode(), text[at:].lstrip().encode()


def exchange_halves(lengths: Sequence[int], seed: int) -> NDArray[np.int64]:
    """Choose whose second half goes with the first half of each text: its own, or that of a text as long.

    Texts are ordered by length, equal ones by a hash of (seed, row). Two neighbours are a couple, and of two couples in
    a row one, by a hash, exchanges second halves. So every half occurs once, and half of the texts keep their own.

    Args:
        lengths: (N), of the second halves.
        seed: of both hashes.

    Returns:
        (N) numbers of texts.
    """
    count = len(lengths)
    order = np.lexsort((uniform(np.arange(count), seed), np.asarray(lengths)))
    couples = np.arange(count // 2)
    toss = uniform(count + couples // 2, seed) < 0.5
    parted = couples[(couples + toss) % 2 == 1]
    one, other = order[2 * parted], order[2 * parted + 1]
    whose = np.arange(count)
    whose[one], whose[other] = other, one
    return whose
