"""Tokens of many texts, kept in files: making them takes as long as some trainings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernelformer.data.array_cache import Arrays, cache_file, cached_arrays

Int64 = NDArray[np.int64]
Tokens = tuple[NDArray[Any], Int64]  # (T) uint16 or int32 of all texts, and (N + 1) offsets


def cached_tokens(make: Callable[[], Tokens], *, size: int, cache: Path, record: str) -> Tokens:
    """Tokens from the cache, or made now and put there.

    Args:
        make: gives them, as `Vocabulary.encode_batch` does.
        size: of the vocabulary.
        cache: folder.
        record: all that they depend on.
    """

    def arrays() -> Arrays:
        tokens, offsets = make()
        return {"tokens": tokens.astype(np.uint16 if size <= 1 << 16 else np.int32), "offsets": offsets}

    path = cache_file(cache, "tokens", record)
    return cached_arrays(path, record, make=arrays, read=lambda x: _checked(x["tokens"], x["offsets"], size))


def _checked(tokens: NDArray[Any], offsets: Int64, size: int) -> Tokens:
    """Tokens and offsets, if they can be those of such a vocabulary."""
    if tokens.dtype not in (np.uint16, np.int32) or tokens.ndim != 1 or offsets.dtype != np.int64 or offsets.ndim != 1:
        raise ValueError(f"its arrays are {tokens.dtype} {tokens.shape} and {offsets.dtype} {offsets.shape}")
    if not len(offsets) or offsets[0] != 0 or offsets[-1] != len(tokens) or (np.diff(offsets) < 0).any():
        raise ValueError("its arrays do not fit together")
    if tokens.size and not (tokens.min() >= 0 and tokens.max() < size):
        raise ValueError(f"its tokens are not from 0 to {size - 1}")
    return tokens, offsets
