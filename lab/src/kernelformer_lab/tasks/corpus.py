"""Text as one sequence of sub-words, and its windows: what "masked" and "words" have in common."""

from __future__ import annotations

import json
import math
from abc import abstractmethod
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from kernelformer.errors import choice, flag
from kernelformer_lab.data.arrays import Tokens, cached_tokens
from kernelformer_lab.data.batching import Sample
from kernelformer_lab.data.files import EXTENSIONS
from kernelformer_lab.data.sources import ALIASES, SPLITS, Source, find_location, optional_text
from kernelformer_lab.data.text_files import DecodedPiece, TextFiles
from kernelformer_lab.data.windows import Windows
from kernelformer_lab.tasks.base import Outcome, SkipOption
from kernelformer_lab.tasks.kinds import VocabularyTask, WindowTask

_FORMAT = 2  # of the cache; to be raised when the same options come to mean other texts


@dataclass(kw_only=True, eq=False)
class Corpus(VocabularyTask, SkipOption, WindowTask):
    """A task on windows of sub-words.

    Data, in UTF-8:

    - a plain text file (any ending but .jsonl, .csv and .tsv), split by position: training, validation, test;
    - a folder of ``.txt`` files: ``train/``, ``validation/`` and ``test/``, the layout of PG-19, or ``train.txt`` and
      so on are the splits; any other is split by a hash of the files' names; see `data.text_files.TextFiles`;
    - rows with a column of texts: a ``.jsonl``, ``.csv`` or ``.tsv`` file, a folder with ``train``, ``validation`` and
      ``test`` of these, or ``hub:NAME[:CONFIGURATION]``; see `data.sources.Source`. Rows of blanks, as WikiText-103
      has them, are passed over.

    Texts of rows and files of a folder end with <eos>.

    Args:
        text: column of the texts, where there are rows.
        pattern: which files of a folder, as a glob; default "**/*.txt".

    Other options: see `WindowTask` and `VocabularyTask`.
    """

    text: str = "text"
    pattern: str | None = None

    metric = "perplexity"
    higher_is_better = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.shares: dict[str, Any] = {"validation_share": self.validation_share, "test_share": self.test_share}
        self.skip_bad = flag("skip_bad", self.skip_bad)
        self.source = self._source()
        self._tokens: dict[str, NDArray[Any]] = {}

    @abstractmethod
    def split(self, name: str) -> Dataset[Sample]:
        """Samples made of `windows`."""

    def settings(self) -> dict[str, Any]:
        """A token of the vocabulary at each position."""
        return {
            "vocab_size": self.vocabulary_size,
            "max_position_embeddings": self.length,
            "pad_token_id": self.special.pad,
        }

    def fingerprint(self) -> str:
        """Hash of the texts, and of a user's vocabulary."""
        return self.with_tokenizer(self.source.fingerprint())

    def remarks(self) -> list[str]:
        """Rows and files left out."""
        return self.source.remarks if isinstance(self.source, Source) else self.source.remarks()

    def train_texts(self) -> Iterator[str]:
        """The text of the training split, piece by piece."""
        return (text for text, _ in self.pieces("train"))

    def load_extra(self, folder: Path) -> None:
        """Use the vocabulary of a saved model."""
        super().load_extra(folder)
        self._tokens = {}

    def pieces(self, split: str) -> Iterator[DecodedPiece]:
        """The text of a split, piece by piece."""
        if isinstance(self.source, TextFiles):
            yield from self.source.pieces(split)
            return
        yield from ((text, True) for text in self.source.rows(split)[self.text] if text)

    def tokens(self, split: str) -> NDArray[Any]:
        """All tokens of a split, (N); from the cache, or made now."""
        if split not in self._tokens:
            words = self.vocabulary()
            if words.tokenizer is None:
                self._tokens[split] = self._encoded(split)[0].astype(np.uint16)  # nearly as fast as a file
            else:
                record = json.dumps([split, words.fingerprint(), self.texts_record()])
                make = partial(self._encoded, split)
                self._tokens[split] = cached_tokens(make, size=words.size, cache=self.cache_path, record=record)[0]
                if self.skip_bad:
                    deque(self.pieces(split), maxlen=0)  # cached tokens do not tell what was left out of them
        return self._tokens[split]

    def windows(self, split: str) -> Windows:
        """Windows of the split's tokens: at random places in training, else side by side."""
        tokens = self.tokens(choice("split", split, SPLITS))
        where = self.source.location if isinstance(self.source, Source) else self.source.path
        return self.cut(tokens, split, where=where, unit="tokens")

    def score(self, outcome: Outcome) -> dict[str, float]:
        """Perplexity, exp(loss); accuracy; bits per token."""
        bits = outcome.loss / math.log(2)
        return {self.metric: perplexity(outcome.loss), "accuracy": outcome.right, "bits_per_token": bits}

    def texts_record(self) -> str:
        """All that the texts of splits depend on."""
        of = {"text": self.text, "pattern": self.pattern, **self.shares, "of": self.source.fingerprint()}
        seed = self.seed if isinstance(self.source, Source) else None  # of the division of rows alone
        return json.dumps({"format": _FORMAT, "skip_bad": self.skip_bad, "seed": seed, **of}, sort_keys=True)

    def _source(self) -> TextFiles | Source:
        """The texts: plain files, or rows."""
        layout = f'"{self.text}" in each row, or plain text'
        location = find_location(self.data, layout)
        options, pattern = {**self.shares, "skip_bad": self.skip_bad}, self.pattern
        if isinstance(location, Path):
            splits = {stem + end for stem in chain(*ALIASES.values()) for end in EXTENSIONS}
            folder = location.is_dir()
            if folder and (pattern is not None or not any((location / x).exists() for x in splits)):
                return TextFiles(location, pattern=pattern or "**/*.txt", **options)
            if not folder and location.suffix not in EXTENSIONS:
                return TextFiles(location, pattern=pattern, **options)
        if pattern is not None:
            raise ValueError(
                f"pattern chooses files of a folder, got pattern={pattern!r} and {location}; leave it out."
            )
        return Source(location, {self.text: optional_text}, layout=layout, seed=self.seed, **options)

    def _encoded(self, split: str) -> Tokens:
        words, pieces = self.vocabulary(), list(self.pieces(split))
        flat, offsets = words.encode_batch([text for text, _ in pieces])
        ends = offsets[1:][[end for _, end in pieces]] if pieces else offsets[:0]
        whole = np.insert(flat, ends, words.eos)
        return whole, np.array([0, len(whole)])


def perplexity(loss: float) -> float:
    """exp(loss) of any loss; infinite instead of an error."""
    return math.exp(loss) if loss < 700 else math.inf
