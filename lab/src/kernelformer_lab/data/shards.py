"""Tokens of a folder of shards, mapped into memory piece by piece: a corpus may be larger than the memory."""

from __future__ import annotations

import hashlib
import json
import math
import mmap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Sampler

from kernelformer.errors import choice, integer
from kernelformer.files import check_regular, read_json, replacing, write_json
from kernelformer_lab.data.batching import IGNORED, Sample, Samples
from kernelformer_lab.data.sources import SPLITS, mix_bits

_ROUNDS = 6
_BLOCK = 4096  # samples whose numbers are computed at once
MOST = 1 << 62  # samples: sums of two halves and of positions stay within 64 bits

Int64 = NDArray[np.int64]
UInt64 = NDArray[np.uint64]


def permute(indices: Int64, size: int, *, seed: int, epoch: int) -> Int64:
    """Apply the permutation of 0..size-1 that (seed, epoch) chooses.

    A generalized Feistel network over a x b >= size, a = ceil(sqrt(size)), b = ceil(size / a): with x = l b + r,

        l <- (l + F_i(r)) mod a  for even rounds i,    r <- (r + F_i(l)) mod b  for odd ones,

    F_i being 64 mixed bits of a key of the round. Every round can be undone, so x -> l b + r is one to one. A result
    from size on goes through it again until it is below (cycle walking), which keeps it one to one on 0..size-1; fewer
    than a of the a b values are outside, so that hardly any does.

    Args:
        indices: from 0 to size - 1, any shape.
        size: from 1 to 2^62.

    Cost: a few tenths of a second for a million indices, no memory but theirs.
    """
    key = mix_bits(mix_bits(np.array([seed], np.uint64)) + np.uint64(epoch))
    keys = mix_bits(key + np.arange(_ROUNDS).astype(np.uint64))
    high = math.isqrt(size - 1) + 1
    low = -(-size // high)
    values = _network(indices.astype(np.uint64), high, low, keys)
    while (outside := values >= size).any():
        values[outside] = _network(values[outside], high, low, keys)
    return values.astype(np.int64)


def _network(x: UInt64, high: int, low: int, keys: UInt64) -> UInt64:
    a, b = np.uint64(high), np.uint64(low)
    left, right = x // b, x % b
    for i in range(len(keys)):
        key = keys[i : i + 1].reshape((1,) * x.ndim)
        if i % 2:
            right = (right + mix_bits(left ^ key) % b) % b
        else:
            left = (left + mix_bits(right ^ key) % a) % a
    return left * b + right


def order_at(positions: Int64, size: int, seed: int) -> Int64:
    """Numbers of the samples at these positions of the endless order: epoch after epoch, each permuted anew.

    Args:
        positions: (N), from 0 on; position p is place p mod size of epoch p // size.
    """
    numbers = np.empty_like(positions)
    epochs = positions // size
    for epoch in np.unique(epochs).tolist():
        there = epochs == epoch
        numbers[there] = permute(positions[there] - epoch * size, size, seed=seed, epoch=epoch)
    return numbers


class PermutedOrder(Sampler[int]):
    """Numbers of samples for a whole run, by `order_at`: sample i of the run is a function of (seed, i) alone.

    Step t of batches of B takes positions t B to (t + 1) B - 1, on however many processes, before and after a resume;
    what a resumed run passes over is numbers, at the cost of `permute`: no sample of it is read.

    Args:
        count: how many are wanted, with repetition.
    """

    def __init__(self, size: int, count: int, seed: int) -> None:
        if not 1 <= size <= MOST:
            raise ValueError(f"an order needs from 1 to 2^62 samples, got {size}.")
        self.size, self.count, self.seed = size, count, seed

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        for start in range(0, self.count, _BLOCK):
            positions = np.arange(start, min(start + _BLOCK, self.count))
            yield from order_at(positions, self.size, self.seed).tolist()


INDEX = "index.json"
FORMAT = 1
DTYPES = {"uint8": 1 << 8, "uint16": 1 << 16, "uint32": 1 << 32}  # and how many tokens they tell apart
AGAIN = "make the folder anew by `kernelformer prepare`"


@dataclass(frozen=True)
class Shard:
    """A file of tokens, and one of where documents end in it.

    Args:
        sha256: of all bytes of the file.
        documents: how many end in this shard.
        documents_sha256: of the file of their ends, `documents_file`; "" where there is none because none ends here.
    """

    file: str
    tokens: int
    sha256: str
    documents: int = 0
    documents_sha256: str = ""

    @property
    def documents_file(self) -> str:
        """Name of the file of 64-bit integers that say after how many tokens of the split documents end."""
        return f"{Path(self.file).stem}.documents.bin"


@dataclass(frozen=True)
class ShardSplit:
    """The shards of a split.

    Args:
        shards: in their order; all but the last have the same number of tokens.
        text_bytes: of the text that was tokenized, in UTF-8.
    """

    shards: tuple[Shard, ...] = ()
    text_bytes: int = 0

    @property
    def tokens(self) -> int:
        """Tokens in all shards."""
        return sum(x.tokens for x in self.shards)

    @property
    def documents(self) -> int:
        """Documents that end in all shards."""
        return sum(x.documents for x in self.shards)


@dataclass(frozen=True)
class ShardIndex:
    """Content of ``index.json``.

    Args:
        dtype: of the tokens, little-endian: a name of `DTYPES`.
        vocabulary_size: tokens are from 0 to vocabulary_size - 1.
        tokenizer: "name" as it was given, "file" beside the index (None: bytes), its "sha256", and "end", the token
            after a document (None: there is none).
        made: settings, the names and sizes of the texts, the rule of the splits, the command.
    """

    dtype: str
    vocabulary_size: int
    tokenizer: Mapping[str, Any]
    shard_tokens: int
    splits: Mapping[str, ShardSplit]
    made: Mapping[str, Any]

    def write(self, folder: Path) -> None:
        """Write it into a folder whose shards are all there."""
        splits = {name: {"tokens": x.tokens, "documents": x.documents, **asdict(x)} for name, x in self.splits.items()}
        write_json(folder / INDEX, {"format": FORMAT, **asdict(self), "splits": splits})

    def fingerprint(self) -> str:
        """Hash of all that tokens depend on: the hashes of the files, and what their bytes mean."""
        hashes = [[x.sha256, x.documents_sha256] for name in SPLITS for x in self.splits[name].shards]
        whole = json.dumps([FORMAT, self.dtype, self.vocabulary_size, self.tokenizer["sha256"], hashes])
        tokens = sum(x.tokens for x in self.splits.values())
        return f"{len(hashes)} shards, {tokens} tokens, sha256 {hashlib.sha256(whole.encode()).hexdigest()}"


def dtype_for(vocabulary_size: int) -> str:
    """The smallest integers that hold all tokens."""
    return next(name for name, most in DTYPES.items() if vocabulary_size <= most)


def read_index(folder: Path) -> ShardIndex:
    """Read and check the index of a folder of shards; none of the shards is opened.

    Raises:
        ValueError: it is not there, cannot be read, or contradicts itself; with the way out.
    """
    path = folder / INDEX
    try:
        if not path.is_file():
            raise ValueError("there is no such file")
        return _parsed(read_json(path))
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as problem:
        why = f"it has no {problem}" if isinstance(problem, KeyError) else str(problem).rstrip(".")
        raise ValueError(
            f"{path} cannot be used: {why}; data must be a folder that `kernelformer prepare` has finished."
        ) from None


def _parsed(record: Any) -> ShardIndex:
    if record["format"] != FORMAT:
        raise ValueError(f"its format is {record['format']!r}, this version reads {FORMAT}")
    dtype = choice("dtype", str(record["dtype"]), DTYPES)
    size = integer("vocabulary_size", record["vocabulary_size"], at_least=1)
    if size > DTYPES[dtype]:
        raise ValueError(f"vocabulary_size={size} does not fit into its dtype {dtype}")
    tokenizer = {name: record["tokenizer"][name] for name in ("name", "file", "sha256", "end")}
    if tokenizer["file"] is not None:
        _check_name(tokenizer["file"])
    whole = integer("shard_tokens", record["shard_tokens"], at_least=1)
    splits = {name: _split(record["splits"][name], whole) for name in SPLITS}
    return ShardIndex(dtype, size, tokenizer, whole, splits, dict(record["made"]))


def _split(record: Mapping[str, Any], whole: int) -> ShardSplit:
    shards = tuple(Shard(**x) for x in record["shards"])
    for number, x in enumerate(shards, 1):
        _check_name(x.file)
        integer(f"documents of {x.file}", x.documents, at_least=0)
        tokens = integer(f"tokens of {x.file}", x.tokens, at_least=1)
        if tokens > whole or (tokens < whole and number < len(shards)):
            raise ValueError(f"{x.file} has {tokens} tokens, a shard has shard_tokens={whole}")
    return ShardSplit(shards, integer("text_bytes", record["text_bytes"], at_least=0))


def _check_name(name: str) -> None:
    """Raise for a name that would lead out of the folder."""
    if Path(name).name != name:
        raise ValueError(f"{name!r} is not the name of a file")


END = np.dtype("<u8")  # of where documents end


def token_dtype(index: ShardIndex) -> np.dtype[Any]:
    """The type of tokens in the files: little-endian on every machine."""
    return np.dtype(index.dtype).newbyteorder("<")


class TokenShards:
    """The tokens of a split as one long sequence, of which any part can be read.

    What is read is mapped, and let go of at once, so that neither memory nor open files grow with the corpus; what was
    read lately is in the system's cache of pages. Processes share nothing else, and an object can go to any worker.

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
        """Ends of documents between ``start`` and ``stop``, both excluded; one that ends at e has token e - 1.

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


class ShardWriter:
    """Writer of the shards of one split.

    Args:
        split: its name, with which the names of files begin.
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


class ShardWindows(Samples):
    """Windows of ``length`` tokens, one after the other; neighbours share one token.

    Window i has tokens i (length - 1) to i (length - 1) + length - 1. Its model predicts all but the first of them, so
    that in an epoch every token of the split but its first is predicted once; the last ones, too few for a window, are
    left out.

    Args:
        length: of a window, at least 2.
        count: at most so many windows, spread evenly over the split; None: all.
        documents: give segment_ids too, which tell the documents of a window apart; the first token of a document is
            no label then, as nothing of it was seen before.
    """

    def __init__(self, tokens: TokenShards, length: int, count: int | None = None, *, documents: bool = False) -> None:
        self.tokens, self.length, self.documents = tokens, length, documents
        self.whole = max(0, (len(tokens) - 1) // (length - 1))
        self.count = self.whole if count is None else min(count, self.whole)

    def __len__(self) -> int:
        return self.count

    def take(self, chosen: Int64) -> list[Sample]:
        """Whole windows."""
        return [self.sample(index) for index in chosen.tolist()]

    def sampler(self, count: int, seed: int) -> Sampler[int]:
        """The order of training: `PermutedOrder`, which needs no list of all windows."""
        return PermutedOrder(len(self), count, seed)

    def start(self, index: int) -> int:
        """Position in the split of a window's first token."""
        return index * self.whole // self.count * (self.length - 1)

    def sample(self, index: int, start: int = 0, stop: int | None = None) -> Sample:
        """A window, or its tokens ``start`` to ``stop`` - 1: input_ids, labels (the same tokens) and segment_ids.

        A part is read without the rest of its window, and is what it is in the whole: processes that share a
        window ask for one part each.
        """
        first = self.start(index)
        low, high = first + start, first + (self.length if stop is None else stop)
        ids = torch.from_numpy(self.tokens.read(low, high).astype(np.int64))
        if not self.documents:
            return {"input_ids": ids, "labels": ids}
        ends = self.tokens.document_ends(first, high)
        segments = np.searchsorted(ends, np.arange(low, high), side="right")
        labels = ids.clone()
        labels[torch.from_numpy(ends[ends >= low] - low)] = IGNORED
        return {"input_ids": ids, "labels": labels, "segment_ids": torch.from_numpy(segments)}
