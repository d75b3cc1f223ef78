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
        arrays: by name.
    """
    everything: dict[str, Any] = {**arrays, "record": np.array(record)}
    with writing(path), replacing(path) as part, part.open("wb") as out:
        np.savez(out, **everything)


def load_arrays(path: Path, record: str, read: Callable[[Arrays], Data]) -> Data:
    """Data of saved arrays; nothing in the file is run.

    Args:
        path: as saved.
        record: as saved.
        read: data from arrays by name; it raises when they are not what they should be.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = dict(file)
        if str(arrays.pop("record")) != record:
            raise ValueError("it was made with other options")
        return read(arrays)
    except Exception as problem:  # a damaged archive raises all kinds
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
