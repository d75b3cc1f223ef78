"""Arrays that take long to make, kept in files with a record of all that they depend on."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from kernelformer.files import replacing

Arrays = Mapping[str, NDArray[Any]]
Data = TypeVar("Data")


def cache_folder(option: str | os.PathLike[str] | None = None) -> Path:
    """The folder of the option ``cache``; None: kernelformer in XDG_CACHE_HOME, or else in ~/.cache."""
    if option is not None:
        return Path(os.fspath(option)).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "kernelformer"


def cache_file(cache: Path, kind: str, record: str) -> Path:
    """The file of arrays in a cache: ``KIND-HASH.npz``, by a hash of the record."""
    return cache / f"{kind}-{hashlib.sha256(record.encode()).hexdigest()[:16]}.npz"


def cached_arrays(path: Path, record: str, *, make: Callable[[], Arrays], read: Callable[[Arrays], Data]) -> Data:
    """Data of the arrays in a cache file, which is made if it is not there.

    Args:
        path: of `cache_file`.
        record: all that the arrays depend on.
        make: gives the arrays by name; called only where there is no file.
        read: data from arrays by name; it raises when they are not what they should be.
    """
    if path.exists():
        return load_arrays(path, record, read)
    arrays = make()
    save_arrays(path, record, arrays)
    return read(arrays)


def save_arrays(path: Path, record: str, arrays: Arrays) -> None:
    """Write all or nothing: a killed process leaves no half file at this path, and two at once do no harm.

    Args:
        path: ``.npz``; its folder is made.
        record: what the arrays depend on, to be compared when they are loaded.
    """
    everything: dict[str, Any] = {**arrays, "record": np.array(record)}
    with writing(path), replacing(path) as part, part.open("wb") as out:
        np.savez(out, **everything)


def load_arrays(path: Path, record: str, read: Callable[[Arrays], Data]) -> Data:
    """Data of saved arrays; nothing in the file is run.

    Args:
        read: data from arrays by name; it raises when they are not what they should be.
    """
    with reading(path):
        with np.load(path, allow_pickle=False) as file:
            arrays = dict(file)
        if str(arrays.pop("record")) != record:
            raise ValueError("it was made with other options")
        return read(arrays)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn any problem with a cache file into an error with a way out."""
    try:
        yield
    except Exception as problem:  # a damaged file raises all kinds
        raise ValueError(
            f"the cache file {path} cannot be used ({problem}); delete it, and it will be made again."
        ) from problem


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Make the folder of a cache file; a disk that is full or not to be written to is an error with a way out."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as problem:
        raise ValueError(
            f"{path} cannot be written: {problem.strerror}; give another folder as cache, or set XDG_CACHE_HOME."
        ) from None


Int64 = NDArray[np.int64]
Tokens = tuple[NDArray[Any], Int64]  # (T) uint16 or int32 of all texts, and (N + 1) offsets


def cached_tokens(make: Callable[[], Tokens], *, size: int, cache: Path, record: str) -> Tokens:
    """Tokens from the cache, or made now and put there.

    Args:
        make: gives them, as `Vocabulary.encode_batch` does.
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
