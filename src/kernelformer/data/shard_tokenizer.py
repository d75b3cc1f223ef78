"""The tokenizer of token shards: bytes, a local ``tokenizer.json`` or folder, or a name on the hub."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kernelformer.data.tokenization import TOKENIZER, usual_token
from kernelformer.files import write_text
from kernelformer.records import MODEL

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BYTES = "bytes"
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


@dataclass(frozen=True)
class ShardTokenizer:
    """What turns texts into the tokens of shards.

    Args:
        name: as it was given, of a path its last part.
        tokenizer: of the library `tokenizers`; None: a token is a byte, from 0 to 255, whatever the bytes are.
        size: tokens are from 0 to size - 1.
        end: token that stands after a document; None: there is none.
    """

    name: str
    tokenizer: Tokenizer | None
    size: int
    end: int | None = None

    def encode(self, texts: Sequence[bytes]) -> list[NDArray[Any]]:
        """Tokens of each text, without special ones; texts are UTF-8, of bytes anything."""
        if self.tokenizer is None:
            return [np.frombuffer(x, np.uint8) for x in texts]
        encodings = self.tokenizer.encode_batch_fast([x.decode() for x in texts], add_special_tokens=False)
        return [np.array(x.ids, np.uint32) for x in encodings]

    def save(self, folder: Path) -> None:
        """Write ``tokenizer.json``, which other libraries read too; bytes need none."""
        if self.tokenizer is not None:
            write_text(folder / TOKENIZER, self._text())

    def record(self) -> dict[str, Any]:
        """What the index says of it."""
        return {
            "name": self.name,
            "file": None if self.tokenizer is None else TOKENIZER,
            "sha256": hashlib.sha256(self._text().encode()).hexdigest(),
            "end": self.end,
        }

    def _text(self) -> str:
        return BYTES if self.tokenizer is None else self.tokenizer.to_str(pretty=True)


def shard_tokenizer(name: str) -> ShardTokenizer:
    """Load a tokenizer; no code of others is run.

    Args:
        name: "bytes", the path of a ``tokenizer.json``, of a folder with one or of a run, or a name on the hub.

    Raises:
        ValueError: there is none, or it is not one of the library `tokenizers`.
    """
    if name == BYTES:
        return ShardTokenizer(BYTES, None, 256)
    path = Path(name).expanduser()
    files = [path, path / TOKENIZER, path / MODEL / TOKENIZER]
    file = next((x for x in files if x.is_file()), None)
    if file is not None:
        return _checked(path.name, _of_file(file))
    if not path.is_dir() and (not _HUB_NAME.fullmatch(name) or path.suffix == ".json"):
        raise ValueError(
            f"there is no tokenizer {name}; give bytes, a tokenizer.json, a folder with one, or a name on the hub."
        )
    return _of_transformers(name, path)


def _of_file(path: Path) -> Tokenizer:
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(path))
    except Exception as problem:  # the library raises plain Exceptions
        raise ValueError(f"{path} is not a tokenizer.json ({problem}); save it by Tokenizer.save.") from None


def _of_transformers(name: str, path: Path) -> ShardTokenizer:
    from kernelformer.hf.pretrained import hub_options
    from kernelformer.hf.tokenizer import load_tokenizer  # with transformers, which takes seconds

    loaded = load_tokenizer(path) if path.is_dir() else load_tokenizer(name, **hub_options(name))
    inner = getattr(loaded, "backend_tokenizer", None)
    if inner is None:
        found = "no tokenizer" if loaded is None else "one that is not of the library tokenizers"
        raise ValueError(f"{name} has {found}; give bytes, a tokenizer.json, a folder with one, or a name on the hub.")
    return _checked(path.name, inner, loaded.eos_token_id)


def _checked(name: str, tokenizer: Tokenizer, end: int | None = None) -> ShardTokenizer:
    """A tokenizer that neither cuts nor pads; where it does not say what ends a text, the usual names do."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True  # a text that says <eos> does not end there
    tokens = tokenizer.get_vocab(with_added_tokens=True)
    size = max(tokens.values(), default=-1) + 1
    if not size:
        raise ValueError(f"the tokenizer {name} has not one token; give another.")
    return ShardTokenizer(name, tokenizer, size, usual_token("eos", tokens) if end is None else end)
