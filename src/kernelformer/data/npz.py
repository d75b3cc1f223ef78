"""Arrays of npz files, checked before they are read, and mapped where they are large; nothing in a file is run."""

from __future__ import annotations

import hashlib
import math
import shutil
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kernelformer.data.array_cache import writing
from kernelformer.data.image_cache import Uint8, mapped
from kernelformer.data.local_files import check_regular
from kernelformer.data.readers import unreadable
from kernelformer.files import replacing
from kernelformer.limits import check_limit

MEMORY = 1 << 30  # bytes of an array that are held in memory


class Head(NamedTuple):
    """Shape and type of an array."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def __str__(self) -> str:
        return f"{self.dtype} {self.shape}"


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except Exception as problem:  # damaged, encrypted and dishonest archives raise all kinds
        raise ValueError(f"{path} cannot be read as npz ({problem}); write it again by numpy.savez.") from None


def heads(path: Path) -> dict[str, Head]:
    """Shapes and types of all arrays of a file by name, without their values."""
    arrays: dict[str, Head] = {}
    try:
        check_regular(path)
    except OSError as problem:
        unreadable(path, problem)
    with _reading(path), zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            if info.filename.endswith(".npy"):
                with archive.open(info) as stream:
                    old = np.lib.format.read_magic(stream)[0] == 1
                    read = np.lib.format.read_array_header_1_0 if old else np.lib.format.read_array_header_2_0
                    shape, _, dtype = read(stream)
                    size = stream.tell() + math.prod(shape) * dtype.itemsize
                name = info.filename.removesuffix(".npy")
                arrays[name] = Head(shape, dtype)
                # Before memory is asked for; objects, which are never read, have no size of their own.
                if size != info.file_size and not dtype.hasobject:
                    raise ValueError(f"{name} says {arrays[name]}, {size:,} bytes, but has {info.file_size:,}")
    for name, head in arrays.items():
        size = math.prod(head.shape) * head.dtype.itemsize
        check_limit("max_unpacked_bytes", size, f"{name} of {path} unpacks to {size:,} bytes")
    return arrays


def array(path: Path, name: str) -> NDArray[Any]:
    """Read one array into memory."""
    with _reading(path), np.load(path, allow_pickle=False) as file:
        values: NDArray[Any] = file[name]
    return values


def _blocks(path: Path, name: str) -> Iterator[bytes]:
    """An array as it would be in a file of its own."""
    with _reading(path), zipfile.ZipFile(path) as archive, archive.open(f"{name}.npy") as stream:
        while block := stream.read(1 << 20):
            yield block


def _free(folder: Path) -> int:
    """Bytes that a folder, which may not be there yet, has room for."""
    there = next(x for x in (folder, *folder.absolute().parents) if x.is_dir())
    return shutil.disk_usage(there).free


def pixels(path: Path, name: str, head: Head, cache: Path) -> Uint8:
    """An array of uint8: in memory up to `MEMORY` bytes, beyond that unpacked into the cache, once, and mapped."""
    if np.prod(head.shape, dtype=np.float64) <= MEMORY:
        return array(path, name)
    stat = path.stat()
    key = f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns} {name}"
    unpacked = cache / f"images-{hashlib.sha256(key.encode(errors='surrogateescape')).hexdigest()[:24]}.npy"
    if not unpacked.exists():
        size, free = math.prod(head.shape), _free(cache)
        if size > free:
            raise ValueError(
                f"{name} of {path} unpacks to {size:,} bytes, and {cache} has room for {free:,}; make room, or give "
                f"another folder as cache, or set XDG_CACHE_HOME."
            )
        with writing(unpacked), replacing(unpacked) as part, part.open("wb") as out:
            for block in _blocks(path, name):
                out.write(block)
    try:
        return mapped(unpacked, head.shape)
    except (OSError, ValueError) as problem:
        raise ValueError(
            f"the cache file {unpacked} cannot be used ({problem}); delete it, and it will be made again."
        ) from None
