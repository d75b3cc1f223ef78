"""Tokens of a folder of shards, mapped into memory piece by piece: a corpus may be larger than the memory."""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernelformer.data.shard_index import AGAIN, Shard, ShardIndex
from kernelformer.files import check_regular

END = np.dtype("<u8")  # of where documents end

Int64 = NDArray[np.int64]


def token_dtype(index: ShardIndex) -> np.dtype[Any]:
    """The type of tokens in the files: little-endian on every machine."""
    return np.dtype(index.dtype).newbyteorder("<")


class TokenShards:
    """The tokens of a split as one long sequence, of which any part can be read.

    What is read is mapped, and let go of at once, so that neither memory nor open files grow with the corpus; what was
    read lately is in the system's cache of pages. Processes share nothing else, and an object can go to any worker.

    Args:
        folder: of the shards.
        index: of the folder.
        split: its name.

    Raises:
        ValueError: a shard is missing or has another size than the index says.
    """

    def __init__(self, folder: Path, index: ShardIndex, split: str) -> None:
        self.folder, self.split, self.dtype = folder, split, token_dtype(index)
        self.shards, self.whole = index.splits[split].shards, index.shard_tokens
        self.size = index.splits[split].tokens
        for shard in self.shards:
            check_sizes(folder, shard, self.dtype)

    def __len__(self) -> int:
        return self.size

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """Tokens from ``start`` to ``stop`` - 1, (stop - start) of the files' type."""
        parts = [
            mapped(self.folder / shard.file, self.dtype, max(start - first, 0), min(stop - first, shard.tokens))
            for first, shard in self._shards(start, stop)
        ]
        return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, self.dtype), *parts])

    def document_ends(self, start: int, stop: int) -> Int64:
        """Where documents end between ``start`` and ``stop``, both not included; one that ends at e has token e - 1.

        Cost: two searches in the sorted ends of a shard or two, of which a few pages are read.
        """
        parts = [np.empty(0, np.int64)]
        for _, shard in self._shards(start, stop):
            if shard.documents:
                ends = _view(self.folder / shard.documents_file, END, 0, shard.documents, "MADV_RANDOM")
                # Of the same type: numpy would make another array of all of them to compare with a signed integer.
                low = int(ends.searchsorted(np.uint64(start), "right"))
                high = int(ends.searchsorted(np.uint64(stop), "left"))
                parts.append(np.array(ends[low:high], np.int64))
        return np.concatenate(parts)

    def _shards(self, start: int, stop: int) -> Iterator[tuple[int, Shard]]:
        """The shards that have tokens from start to stop - 1, each with the position of its first token."""
        if not 0 <= start <= stop <= self.size:
            raise IndexError(f"tokens are numbered from 0 to {self.size - 1}, got {start} to {stop}.")
        for number in range(start // self.whole, -(-stop // self.whole)):
            yield number * self.whole, self.shards[number]


def mapped(path: Path, dtype: np.dtype[Any], start: int, stop: int) -> NDArray[Any]:
    """Items ``start`` to ``stop`` - 1 of a file of plain integers, copied from the mapped file."""
    # All at once and nothing around it: by itself the system reads megabytes for the first touch of a page.
    return np.array(_view(path, dtype, start, stop, "MADV_WILLNEED"))


def _view(path: Path, dtype: np.dtype[Any], start: int, stop: int, advice: str) -> NDArray[Any]:
    """Items of a file of plain integers, as a view of these bytes of the mapped file, with advice to the system."""
    low, high = start * dtype.itemsize, stop * dtype.itemsize
    first = low - low % mmap.ALLOCATIONGRANULARITY
    try:
        with path.open("rb") as file:
            content = mmap.mmap(file.fileno(), high - first, access=mmap.ACCESS_READ, offset=first)
    except (OSError, ValueError) as problem:  # ValueError: the file ends before
        raise damaged(path, getattr(problem, "strerror", None) or str(problem)) from None
    if hasattr(mmap, advice):  # not on Windows
        content.madvise(getattr(mmap, advice))
    return np.frombuffer(content, dtype, stop - start, low - first)


def damaged(path: Path, why: str) -> ValueError:
    """The error for a file that is not what the index says."""
    return ValueError(f"{path} cannot be used: {why.rstrip('.')}; bring the file back, or {AGAIN}.")


def check_sizes(folder: Path, shard: Shard, dtype: np.dtype[Any]) -> None:
    """Raise if a file of a shard is missing or has another size than its numbers of tokens and documents say."""
    files = [(shard.file, shard.tokens, dtype)]
    if shard.documents:
        files.append((shard.documents_file, shard.documents, END))
    for name, count, kind in files:
        path = folder / name
        try:
            size = check_regular(path).stat().st_size
        except OSError as problem:
            raise damaged(path, "it is missing" if isinstance(problem, FileNotFoundError) else str(problem)) from None
        if size != count * kind.itemsize:
            what = f"{count} integers of type {kind.name}, {count * kind.itemsize} bytes"
            raise damaged(path, f"it has {size} bytes, the index says {what}")


def verify(folder: Path, index: ShardIndex) -> None:
    """Compare every file of a folder with the hash that the index has of it.

    Raises:
        ValueError: for the first that is missing or has changed.

    Cost: reads everything, a second or two for a gigabyte.
    """
    tokenizer = index.tokenizer
    if tokenizer["file"] is not None:
        _check_hash(folder / tokenizer["file"], tokenizer["sha256"])
    for split in index.splits.values():
        for shard in split.shards:
            check_sizes(folder, shard, token_dtype(index))
            _check_hash(folder / shard.file, shard.sha256)
            if shard.documents:
                _check_hash(folder / shard.documents_file, shard.documents_sha256)


def _check_hash(path: Path, expected: str) -> None:
    digest = hashlib.sha256()
    try:
        with check_regular(path).open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    except OSError as problem:
        raise damaged(path, problem.strerror or str(problem)) from None
    if digest.hexdigest() != expected:
        raise damaged(path, f"its sha256 is {digest.hexdigest()}, the index says {expected}")
