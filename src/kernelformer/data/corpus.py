"""Text as one sequence of sub-words, and its windows: what "masked" and "words" have in common."""

from __future__ import annotations

import json
import math
import os
from abc import abstractmethod
from collections import deque
from collections.abc import Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from kernelformer.data.sources import ALIASES, EXTENSIONS, Source, find_place, hash_files, text_value
from kernelformer.data.token_cache import Tokens, kept_tokens
from kernelformer.data.tokenization import (
    Vocabulary,
    saved_options,
    special,
    tokenizer_file,
    vocabulary,
    vocabulary_size,
)
from kernelformer.errors import choice, flag, integer, positive_int
from kernelformer.tasks.base import SPLITS, Outcome, Sample, Task, cache_folder
from kernelformer.tasks.bytes import Bytes, ConsecutiveWindows, Part, RandomWindows, Text, Windows

_FORMAT = 2  # of the cache; to be raised when the same options come to mean other texts
_PIECE = 1 << 14  # bytes that are tokenized together, so that threads share a long text

Piece = tuple[str, bool]  # a piece of a text, and whether a document ends with it


def pieces(content: bytes, where: object, start: int = 0) -> Iterator[str]:
    """A long text in pieces that end with a line or at least with a character.

    Args:
        content: UTF-8.
        where: the file, for the message.
        start: place of the content in it.
    """
    at = 0
    while at < len(content):
        stop = at + _PIECE
        line = content.find(b"\n", stop, stop + _PIECE) + 1
        while not line and stop < len(content) and content[stop] & 0xC0 == 0x80:  # within a character
            stop += 1
        stop = line or stop
        try:
            yield content[at:stop].decode()
        except UnicodeDecodeError as problem:
            raise ValueError(
                f"{where} is not UTF-8: {problem.reason} at byte {start + at + problem.start}; save it as UTF-8, or "
                f"leave it out."
            ) from None
        at = stop


class Files(Bytes):
    """Text of a file or of the files of a folder, in splits as "bytes" makes them, in UTF-8.

    Args:
        skip_bad: leave files of a folder out that are not text, and say how many, instead of raising at the first.
        options: of `Bytes`.
    """

    def __init__(self, *, skip_bad: bool, **options: Any) -> None:
        super().__init__(length=2, **options)
        self.skip_bad = flag("skip_bad", skip_bad)
        if skip_bad and not self.path.is_dir():
            raise ValueError(
                f"skip_bad leaves out rows, or files of a folder, and {self.path} is one text; mend it, or leave "
                f"skip_bad out."
            )
        self._bad: dict[str, str] = {}  # remarks by split

    def remarks(self) -> list[str]:
        """Files left out."""
        return [*super().remarks(), *self._bad.values()]

    def pieces(self, split: str) -> Iterator[Piece]:
        """Of a split; files of a folder are documents, a file alone is none."""
        if not self.path.is_dir():
            yield from ((text, False) for part in self.parts(split) for text in _characters(part))
            return
        files, shares = self._mine(split)
        bad: list[str] = []
        for file in files:
            try:
                part = self._part(file, shares, split)
                found = list(_characters(part))
            except ValueError as problem:
                if not self.skip_bad:
                    raise
                bad.append(str(problem).rstrip("."))
                continue
            whole = part.stop == len(part.text)
            yield from ((text, whole and i == len(found)) for i, text in enumerate(found, 1))
        if bad:
            of = f"{len(bad):,} of {len(files):,} files of the {split} split of {self.path}"
            self._bad[split] = f"left out {of} as bad; the first: {bad[0]}"


def _characters(part: Part) -> Iterator[str]:
    """Of a part of a file; a character on the border of two parts is in the first."""
    start, stop = (_border(part.text, x) if x else 0 for x in (part.start, part.stop))
    return pieces(part.text[start:stop].tobytes(), part.file, start)


def _border(text: Text, place: int) -> int:
    """Where the next character begins; none has more than 4 bytes."""
    inside = (text[place : place + 3] & 0xC0) == 0x80
    return place + int(np.argmin([*inside, False]))


class Corpus(Task):
    """A task on windows of text.

    Data, in UTF-8:

    - a plain text file (any ending but .jsonl, .csv and .tsv), split by position: training, validation, test;
    - a folder of ``.txt`` files: ``train/``, ``validation/`` and ``test/``, the layout of PG-19, or ``train.txt`` and
      so on are the splits; any other is split by a hash of the files' names; see `tasks.bytes.Bytes`;
    - rows with a column of texts: a ``.jsonl``, ``.csv`` or ``.tsv`` file, a folder with ``train``, ``validation`` and
      ``test`` of these, or ``hub:NAME[:CONFIGURATION]``; see `data.sources.Source`. Rows of blanks, as WikiText-103
      has them, are passed over.

    Texts of rows and files of a folder end with <eos>.

    Args:
        data: the place; None is refused only when a split is asked for.
        text: column of the texts, where there are rows.
        pattern: which files of a folder, as a glob; default "**/*.txt".
        length: tokens of a sample.
        samples: training samples, at random places; sample i is a function of (seed, i).
        validation_samples: at most so many windows, spread evenly over the split; None: all, side by side.
        test_samples: the same for the test.
        vocab_size: of the vocabulary at most; None: 8000, 262 for bytes, or what ``tokenizer`` has.
        kind: "bpe", "wordpiece" or "bytes".
        lowercase: whether capital letters become small, in a vocabulary that is trained.
        tokenizer: a ``tokenizer.json`` of the user's, or a folder with one, such as that of a run.
        validation_share: of the bytes of a file, of the files of a folder, or of rows without splits.
        test_share: the same for the test.
        skip_bad: leave bad rows, or bad files of a folder, out, and say how many, instead of raising at the first.
        seed: of places and the division of rows.
        cache: folder for vocabularies and tokens; None: kernelformer in XDG_CACHE_HOME, or else in ~/.cache.

    Cost: tokenized once, 3 million characters a second on one core, and kept in the cache.
    """

    metric = "perplexity"
    higher_is_better = False
    shortest: ClassVar[int] = 1  # window from which something can be learnt

    def __init__(
        self,
        *,
        data: str | os.PathLike[str] | None = None,
        text: str = "text",
        pattern: str | None = None,
        length: int = 512,
        samples: int = 1_000_000,
        validation_samples: int | None = None,
        test_samples: int | None = None,
        vocab_size: int | None = None,
        kind: str = "bpe",
        lowercase: bool = False,
        tokenizer: str | None = None,
        validation_share: float = 0.05,
        test_share: float = 0.05,
        skip_bad: bool = False,
        seed: int = 0,
        cache: str | os.PathLike[str] | None = None,
    ) -> None:
        self.length, self.samples = integer("length", length, at_least=self.shortest), positive_int("samples", samples)
        self.limits = {"validation": validation_samples, "test": test_samples}
        for split, limit in self.limits.items():
            if limit is not None:
                positive_int(f"{split}_samples", limit)
        self.subwords: dict[str, Any] = {"tokenizer": tokenizer, "kind": kind}
        self.subwords |= {"vocab_size": vocab_size, "lowercase": lowercase}
        self.size = vocabulary_size(**self.subwords)
        self.special = special(tokenizer)
        self.seed = integer("seed", seed, at_least=0)
        self.options: dict[str, Any] = {"validation_share": validation_share, "test_share": test_share}
        self.text, self.pattern = text, pattern
        self.cache = cache_folder() if cache is None else Path(os.fspath(cache)).expanduser()
        self.skip_bad = flag("skip_bad", skip_bad)
        self.origin = self._origin(data)
        self._vocabulary: Vocabulary | None = None
        self._tokens: dict[str, NDArray[Any]] = {}

    @abstractmethod
    def split(self, name: str) -> Dataset[Sample]:
        """Samples of `windows`."""

    def settings(self) -> dict[str, Any]:
        """A token of the vocabulary at each place."""
        return {"vocab_size": self.size, "max_position_embeddings": self.length, "pad_token_id": self.special.pad}

    def fingerprint(self) -> str:
        """Hash of the texts, and of a user's vocabulary."""
        place = self.subwords["tokenizer"]
        return self.origin.fingerprint() + ("" if place is None else f"; {hash_files([tokenizer_file(place)])}")

    def remarks(self) -> list[str]:
        """Rows and files left out."""
        return self.origin.remarks if isinstance(self.origin, Source) else self.origin.remarks()

    def vocabulary(self) -> Vocabulary:
        """From the cache, or trained now on the training split."""
        if self._vocabulary is None:
            texts = (text for text, _ in self.pieces("train"))
            trained = self.subwords["tokenizer"] is None and self.subwords["kind"] != "bytes"
            record = self.record() if trained else ""
            self._vocabulary = vocabulary(texts, **self.subwords, cache=self.cache, record=record)
        return self._vocabulary

    def save_extra(self, folder: Path) -> None:
        """The vocabulary."""
        self.vocabulary().save(folder)

    def load_extra(self, folder: Path) -> None:
        """Use the vocabulary of a saved model."""
        self.subwords, self._vocabulary, self._tokens = saved_options(self.subwords, folder), None, {}

    def pieces(self, split: str) -> Iterator[Piece]:
        """The text of a split."""
        if isinstance(self.origin, Files):
            yield from self.origin.pieces(split)
            return
        yield from ((text, True) for text in self.origin.rows(split)[self.text] if text)

    def tokens(self, split: str) -> NDArray[Any]:
        """All tokens of a split, (N); from the cache, or made now."""
        if split not in self._tokens:
            words = self.vocabulary()
            if words.tokenizer is None:
                self._tokens[split] = self._encoded(split)[0].astype(np.uint16)  # nearly as fast as a file
            else:
                make, record = partial(self._encoded, split), json.dumps([split, words.fingerprint(), self.record()])
                self._tokens[split] = kept_tokens(make, size=words.size, cache=self.cache, record=record)[0]
                if self.skip_bad:
                    deque(self.pieces(split), maxlen=0)  # kept tokens do not tell what was left out of them
        return self._tokens[split]

    def windows(self, split: str) -> Windows:
        """Of the split's tokens: at random places in training, else side by side."""
        tokens = self.tokens(choice("split", split, SPLITS))
        if len(tokens) < self.length:
            raise ValueError(
                f"the {split} split of {self._place()} has {len(tokens)} tokens, less than one sample of "
                f"length={self.length}; give more text, a smaller length"
                f"{'' if split == 'train' else f' or a larger {split}_share'}."
            )
        text = cast(Text, tokens)  # of another width, which windows do not mind
        if split == "train":
            return RandomWindows(text, self.length, self.samples, self.seed)
        return ConsecutiveWindows(text, self.length, self.limits[split])

    def score(self, found: Outcome) -> dict[str, float]:
        """Perplexity, exp(loss); accuracy; bits per token."""
        return {self.metric: exp(found.loss), "accuracy": found.right, "bits_per_token": found.loss / math.log(2)}

    def record(self) -> str:
        """What the texts of splits depend on."""
        of = {"text": self.text, "pattern": self.pattern, **self.options, "of": self.origin.fingerprint()}
        seed = self.seed if isinstance(self.origin, Source) else None  # of the division of rows alone
        return json.dumps({"format": _FORMAT, "skip_bad": self.skip_bad, "seed": seed, **of}, sort_keys=True)

    def _origin(self, data: str | os.PathLike[str] | None) -> Files | Source:
        """Of the texts: plain files, or rows."""
        layout = f'"{self.text}" in each row, or plain text'
        place = find_place(data, layout)
        options, pattern = {**self.options, "skip_bad": self.skip_bad}, self.pattern
        if isinstance(place, Path):
            splits = {stem + end for stem in chain(*ALIASES.values()) for end in EXTENSIONS}
            folder = place.is_dir()
            if folder and (pattern is not None or not any((place / x).exists() for x in splits)):
                return Files(data=place, pattern=pattern or "**/*.txt", **options)
            if not folder and place.suffix not in EXTENSIONS:
                return Files(data=place, pattern=pattern, **options)
        if pattern is not None:
            raise ValueError(f"pattern chooses files of a folder, got pattern={pattern!r} and {place}; leave it out.")
        return Source(place, {self.text: perhaps_text}, layout=layout, seed=self.seed, **options)

    def _place(self) -> object:
        return self.origin.place if isinstance(self.origin, Source) else self.origin.path

    def _encoded(self, split: str) -> Tokens:
        words, found = self.vocabulary(), list(self.pieces(split))
        flat, offsets = words.encode_batch([text for text, _ in found])
        ends = offsets[1:][[end for _, end in found]] if found else offsets[:0]
        whole = np.insert(flat, ends, words.eos)
        return whole, np.array([0, len(whole)])


def exp(loss: float) -> float:
    """Of any loss; infinite instead of an error."""
    return math.exp(loss) if loss < 700 else math.inf


def perhaps_text(value: object) -> str:
    """A text, or nothing for one of blanks."""
    return "" if isinstance(value, str) and not value.strip() else text_value(value)
