"""Tasks on sub-words: which vocabulary they have, and how it is kept beside a model."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from kernelformer.data.readers import hash_files
from kernelformer.data.tokenization import (
    Vocabulary,
    saved_options,
    special,
    tokenizer_file,
    vocabulary,
    vocabulary_size,
)
from kernelformer.tasks.options import CacheOption, Location


@dataclass(kw_only=True, eq=False)
class VocabularyTask(CacheOption):
    """A task whose vocabulary is trained on the training split, a user's own, or that of bytes.

    Args:
        vocab_size: of the vocabulary at most; None: 8000, 262 for bytes, or what ``tokenizer`` has.
        kind: "bpe", "wordpiece" or "bytes".
        lowercase: whether capital letters become small, in a vocabulary that is trained.
        tokenizer: a ``tokenizer.json`` of the user's, or a folder with one, such as that of a run.

    Cost: tokenized once, 3 million characters a second on one core, and kept in the cache.
    """

    vocab_size: int | None = None
    kind: str = "bpe"
    lowercase: bool = False
    tokenizer: Location = None

    trained_size: ClassVar[int | None] = None  # of a vocabulary that is trained, where vocab_size is None

    def __post_init__(self) -> None:
        super().__post_init__()
        tokenizer = None if self.tokenizer is None else str(self.tokenizer)
        trained = tokenizer is None and self.kind != "bytes"
        size = self.trained_size if self.vocab_size is None and trained else self.vocab_size
        self.subwords: dict[str, Any] = {"tokenizer": tokenizer, "kind": self.kind}
        self.subwords |= {"vocab_size": size, "lowercase": self.lowercase}
        self.vocabulary_size = vocabulary_size(**self.subwords)
        self.special = special(tokenizer)
        self._vocabulary: Vocabulary | None = None

    @abstractmethod
    def train_texts(self) -> Iterable[str]:
        """Texts that a vocabulary is trained on; read when they are asked for."""

    @abstractmethod
    def texts_record(self) -> str:
        """All that `train_texts` depends on."""

    def vocabulary(self) -> Vocabulary:
        """The vocabulary: that of a saved model after `load_extra`, else from the cache, or trained now."""
        if self._vocabulary is None:
            trained = self.subwords["tokenizer"] is None and self.subwords["kind"] != "bytes"
            record = self.texts_record() if trained else ""
            self._vocabulary = vocabulary(self.train_texts(), **self.subwords, cache=self.cache_path, record=record)
        return self._vocabulary

    def save_extra(self, folder: Path) -> None:
        """Write the vocabulary into the folder of a saved model, which needs it to read and write."""
        self.vocabulary().save(folder)

    def load_extra(self, folder: Path) -> None:
        """Use the vocabulary of a saved model; neither the training data nor the cache need be there."""
        self.subwords, self._vocabulary = saved_options(self.subwords, folder), None

    def with_tokenizer(self, fingerprint: str) -> str:
        """A fingerprint of texts, and of a user's vocabulary."""
        tokenizer = self.subwords["tokenizer"]
        return fingerprint + ("" if tokenizer is None else f"; {hash_files([tokenizer_file(tokenizer)])}")
