"""Token shards as they are written: each file whole or not there, with its hash."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernelformer.data.shard_index import Shard
from kernelformer.data.token_shards import END
from kernelformer.files import replacing

Int64 = NDArray[np.int64]


class ShardWriter:
    """Writer of the shards of one split.

    Args:
        folder: where they go.
        split: its name, with which the names of files begin.
        dtype: of the tokens.
        whole: tokens of a shard; the last one may have fewer.
        written: called with every shard that is on the disk.

    Cost: holds the tokens of at most one shard and what was given last.
    """

    def __init__(
        self, folder: Path, split: str, dtype: np.dtype[Any], whole: int, written: Callable[[Shard], None]
    ) -> None:
        self.folder, self.split, self.dtype, self.whole, self.written = folder, split, dtype, whole, written
        self.shards: list[Shard] = []
        self.text_bytes = 0
        self.total = 0  # tokens so far
        self._tokens: list[NDArray[Any]] = []  # not in a file yet
        self._ends: list[int] = []  # of documents, not in a file yet
        self._held = 0
        self._last_end = 0

    def add(self, tokens: NDArray[Any], text_bytes: int, *, ends: bool) -> None:
        """Take the next tokens.

        Args:
            tokens: (N) integers.
            text_bytes: of the text that they are of.
            ends: whether a document ends with them.
        """
        self.text_bytes += text_bytes
        self._tokens.append(tokens.astype(self.dtype))
        self._held += len(tokens)
        self.total += len(tokens)
        if ends and self.total > self._last_end:  # a document without a token is none
            self._ends.append(self.total)
            self._last_end = self.total
        while self._held >= self.whole:
            self._write(self.whole)

    def close(self) -> tuple[Shard, ...]:
        """Write what is left, and return all shards."""
        if self._held:
            self._write(self._held)
        return tuple(self.shards)

    def _write(self, count: int) -> None:
        flat = np.concatenate(self._tokens)
        tokens, rest = flat[:count], flat[count:]
        self._tokens, self._held = [rest], len(rest)
        stop = self.total - self._held
        ends = [x for x in self._ends if x <= stop]
        self._ends = [x for x in self._ends if x > stop]
        shard = Shard(f"{self.split}-{len(self.shards):05d}.bin", count, "", len(ends))
        hashes = {"sha256": self._save(shard.file, tokens)}
        if ends:
            hashes["documents_sha256"] = self._save(shard.documents_file, np.array(ends, END))
        shard = Shard(shard.file, count, documents=len(ends), **hashes)
        self.shards.append(shard)
        self.written(shard)

    def _save(self, name: str, values: NDArray[Any]) -> str:
        with replacing(self.folder / name) as part:
            part.write_bytes(values.tobytes())
        return hashlib.sha256(values.tobytes()).hexdigest()
