"""The index of a folder of token shards: what is in which file, of which tokenizer, and how it was made."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kernelformer.data.splits import SPLITS
from kernelformer.errors import choice, integer
from kernelformer.files import read_json, write_json

INDEX = "index.json"
FORMAT = 1
DTYPES = {"uint8": 1 << 8, "uint16": 1 << 16, "uint32": 1 << 32}  # and how many tokens they tell apart
AGAIN = "make the folder anew by `kernelformer prepare`"


@dataclass(frozen=True)
class Shard:
    """A file of tokens, and one of where documents end in it.

    Args:
        file: name of the tokens' file.
        tokens: how many.
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
        """How many there are in all shards."""
        return sum(x.tokens for x in self.shards)

    @property
    def documents(self) -> int:
        """How many end in all shards."""
        return sum(x.documents for x in self.shards)


@dataclass(frozen=True)
class ShardIndex:
    """What ``index.json`` says.

    Args:
        dtype: of the tokens, little-endian: a name of `DTYPES`.
        vocabulary_size: tokens are from 0 to vocabulary_size - 1.
        tokenizer: "name" as it was given, "file" beside the index (None: bytes), its "sha256", and "end", the token
            after a document (None: there is none).
        shard_tokens: tokens of a whole shard.
        splits: by name.
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
