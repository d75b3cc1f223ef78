"""Masked language modelling of text: hidden tokens are to be found from both sides."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from kernelformer.errors import choice, integer, number, positive_int
from kernelformer.tasks.base import SPLITS, Outcome, Sample, Task, cache_folder
from kernelformer.tasks.bytes import Bytes, ConsecutiveWindows, RandomWindows, Text, Windows
from kernelformer.tasks.sources import (
    ALIASES,
    EXTENSIONS,
    Source,
    find_place,
    hash_files,
    mixed,
    spread,
    text_value,
)
from kernelformer.tasks.tokenization import Vocabulary, special, tokenizer_file, vocabulary, vocabulary_size
from kernelformer.tasks.tokens import Tokens, kept_tokens

HIDDEN, REPLACED = 0.8, 0.1  # of the chosen tokens; the rest stays as it is
IGNORED = -100
_FORMAT = 1  # of the cache; to be raised when the same options come to mean other tokens
_PIECE = 1 << 14  # bytes that are tokenized together, so that threads share a long text

Int64 = NDArray[np.int64]
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
    """Text of a file, split by position, or of the files of a folder, split by file: as "bytes" does it, in UTF-8."""

    def pieces(self, split: str) -> Iterator[Piece]:
        """Of a split; files of a folder are documents, a file alone is none."""
        if not self.path.is_dir():
            yield from ((text, False) for text in self._characters(split))
            return
        files = [file for file in self._files() if self._split_of(file) == split]
        if not files:
            self._text(split)  # says which files there are
        for file in files:
            found = list(pieces(self._read(file).tobytes(), self.path / file))
            yield from ((text, i == len(found)) for i, text in enumerate(found, 1))

    def _characters(self, split: str) -> Iterator[str]:
        """Of a part of a file; a character on the border of two parts is in the first."""
        text, sizes = self._mapped(), [len(self._part(x)) for x in SPLITS]
        borders = [0, *(_border(text, int(x)) for x in np.cumsum(sizes))]
        start, stop = borders[SPLITS.index(split)], borders[SPLITS.index(split) + 1]
        yield from pieces(text[start:stop].tobytes(), self.path, start)


def _border(text: Text, place: int) -> int:
    """Where the next character begins; none has more than 4 bytes."""
    inside = (text[place : place + 3] & 0xC0) == 0x80
    return place + int(np.argmin([*inside, False]))


class Hidden(Dataset[Sample]):
    """Windows of tokens, some of which are hidden; a batch is a few operations.

    Which tokens, and what becomes of them, is a function of (seed, split, index, position).

    Args:
        windows: where the windows are.
        tokens: (N) of the split.
        words: the vocabulary.
        share: of the tokens is chosen.
        keys: three numbers that the choices depend on.
    """

    def __init__(
        self, windows: Windows, tokens: NDArray[Any], words: Vocabulary, share: float, keys: list[int]
    ) -> None:
        self.windows, self.tokens, self.share, self.keys = windows, tokens, share, keys
        self.mask, self.ordinary = cast(int, words.mask), words.ordinary()
        self.fixed = np.ones(words.size, bool)
        self.fixed[self.ordinary] = False

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> Sample:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Sample]:
        ids, labels = self.batch(indices)
        rows = zip(torch.from_numpy(ids), torch.from_numpy(labels), strict=True)
        return [{"input_ids": x, "labels": y} for x, y in rows]

    def batch(self, indices: Sequence[int]) -> tuple[Int64, Int64]:
        """Tokens as the model sees them, and labels, both (B, L)."""
        chosen = np.asarray(indices, dtype=np.int64)
        if chosen.size and not (chosen.min() >= 0 and chosen.max() < len(self)):
            raise IndexError(f"samples are numbered from 0 to {len(self) - 1}, got {list(indices)}.")
        place = np.arange(self.windows.length)
        whole = self.tokens[self.windows.places(chosen)[:, None] + place].astype(np.int64)
        return self.hide(whole, chosen[:, None] * self.windows.length + place)

    def hide(self, whole: Int64, number: Int64) -> tuple[Int64, Int64]:
        """Tokens (B, L), each with a number of its own; gives inputs and labels."""
        chance = spread(number, self.keys[0])
        chance[self.fixed[whole]] = 2.0  # special tokens are not hidden
        chosen = chance < self.share
        chosen[np.arange(len(whole)), chance.argmin(1)] = True  # at least one: no label, no mean loss
        labels = np.where(chosen, whole, IGNORED)
        number, wanted = number[chosen], whole[chosen]
        fate = spread(number, self.keys[1])
        seen = np.where(fate < HIDDEN, self.mask, wanted)
        other = (fate >= HIDDEN) & (fate < HIDDEN + REPLACED)
        seen[other] = self.ordinary[(spread(number[other], self.keys[2]) * len(self.ordinary)).astype(np.int64)]
        ids = whole.copy()
        ids[chosen] = seen
        return ids, labels


class Masked(Task):
    """Find the hidden tokens of a text; scored by perplexity, over the chosen tokens.

    Of the tokens of a window 15% are chosen; of these 80% become <mask>, 10% another token, any of the vocabulary with
    the same probability, and 10% stay. At least one is chosen in each window. Masks of validation and test are fixed.

    Data, in UTF-8:

    - a plain text file (any ending but .jsonl, .csv and .tsv), split by position: training, validation, test;
    - a folder of ``.txt`` files, split by file, by a hash of its name;
    - rows with a column of texts: a ``.jsonl``, ``.csv`` or ``.tsv`` file, a folder with ``train``, ``validation`` and
      ``test`` of these, or ``hub:NAME[:CONFIGURATION]``; see `tasks.sources.Source`.

    Texts of rows and files of a folder end with <eos>; windows pay no heed to it, but it is never hidden.

    Departures from BERT: one sentence after the other is all there is, tokens are chosen and not words, and windows are
    at random places instead of one after the other.

    Args:
        data: the place; None is refused only when a split is asked for.
        text: column of the texts, where there are rows.
        pattern: which files of a folder, as a glob; default "**/*.txt".
        length: tokens of a sample.
        samples: training samples, at random places; sample i is a function of (seed, i).
        validation_samples: at most so many windows, spread evenly over the split; None: all, side by side.
        test_samples: the same for the test.
        mask_share: of the tokens is chosen.
        vocab_size: of the vocabulary at most; None: 8000, 262 for bytes, or what ``tokenizer`` has.
        kind: "bpe", "wordpiece" or "bytes".
        lowercase: whether capital letters become small.
        tokenizer: a ``tokenizer.json`` of the user's, or a folder with one; it must have a token for masks.
        validation_share: of the bytes of a file, of the files of a folder, or of rows without splits.
        test_share: the same for the test.
        skip_bad: leave bad rows out, and say how many, instead of raising at the first.
        seed: of places, masks and the division of rows.
        cache: folder for vocabularies and tokens; None: kernelformer in XDG_CACHE_HOME, or else in ~/.cache.

    Cost: tokenized once, 3 million characters a second on one core, and kept in the cache.
    """

    name = "masked"
    about = "masked language modelling; --data is a text file, a folder of .txt, rows with texts, or hub:NAME"
    model = "masked-lm"
    metric = "perplexity"
    higher_is_better = False

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
        mask_share: float = 0.15,
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
        self.length, self.samples = positive_int("length", length), positive_int("samples", samples)
        self.limits = {"validation": validation_samples, "test": test_samples}
        for split, limit in self.limits.items():
            if limit is not None:
                positive_int(f"{split}_samples", limit)
        self.share = number("mask_share", mask_share, above=0)
        if self.share >= 1:
            raise ValueError(f"mask_share must be below 1, so that something is left to see, got {mask_share}.")
        self.words: dict[str, Any] = {"tokenizer": tokenizer, "kind": kind}
        self.words |= {"vocab_size": vocab_size, "lowercase": lowercase}
        self.size = vocabulary_size(**self.words)
        self.special = special(tokenizer)
        if self.special.mask is None:
            raise ValueError(f"{tokenizer} has no token for what is hidden; add <mask> or [MASK] to it.")
        self.seed = integer("seed", seed, at_least=0)
        self.options: dict[str, Any] = {"validation_share": validation_share, "test_share": test_share}
        self.text, self.pattern = text, pattern
        self.cache = cache_folder() if cache is None else Path(os.fspath(cache)).expanduser()
        self.origin = self._origin(data, skip_bad)
        self._vocabulary: Vocabulary | None = None
        self._tokens: dict[str, NDArray[Any]] = {}

    def settings(self) -> dict[str, Any]:
        """A token of the vocabulary at each place."""
        return {"vocab_size": self.size, "max_position_embeddings": self.length, "pad_token_id": self.special.pad}

    def fingerprint(self) -> str:
        """Hash of the texts, and of a user's vocabulary."""
        place = self.words["tokenizer"]
        return self.origin.fingerprint() + ("" if place is None else f"; {hash_files([tokenizer_file(place)])}")

    def remarks(self) -> list[str]:
        """Rows left out."""
        return self.origin.remarks if isinstance(self.origin, Source) else []

    def vocabulary(self) -> Vocabulary:
        """From the cache, or trained now on the training split."""
        if self._vocabulary is None:
            texts = (text for text, _ in self._pieces("train"))
            trained = self.words["tokenizer"] is None and self.words["kind"] != "bytes"
            record = self._record() if trained else ""
            self._vocabulary = vocabulary(texts, **self.words, cache=self.cache, record=record)
        return self._vocabulary

    def save_extra(self, folder: Path) -> None:
        """The vocabulary."""
        self.vocabulary().save(folder)

    def tokens(self, split: str) -> NDArray[Any]:
        """All tokens of a split, (N); from the cache, or made now."""
        if split not in self._tokens:
            words = self.vocabulary()
            options = {name: x for name, x in self.words.items() if name != "tokenizer"}  # which is in the fingerprint
            if words.tokenizer is None:
                self._tokens[split] = self._encoded(split)[0].astype(np.uint16)  # nearly as fast as a file
            else:
                record = json.dumps([split, options, self._record()], sort_keys=True)
                make = partial(self._encoded, split)
                self._tokens[split] = kept_tokens(make, size=words.size, cache=self.cache, record=record)[0]
        return self._tokens[split]

    def split(self, name: str) -> Hidden:
        """Windows of the split's tokens."""
        tokens = self.tokens(choice("split", name, SPLITS))
        if len(tokens) < self.length:
            raise ValueError(
                f"the {name} split of {self._place()} has {len(tokens)} tokens, less than one sample of "
                f"length={self.length}; give more text, a smaller length"
                f"{'' if name == 'train' else f' or a larger {name}_share'}."
            )
        places = cast(Text, tokens)  # whose number alone says where windows are
        if name == "train":
            windows: Windows = RandomWindows(places, self.length, self.samples, self.seed)
        else:
            windows = ConsecutiveWindows(places, self.length, self.limits[name])
        seed = mixed(np.array([self.seed], np.uint64))
        keys = mixed(seed + np.arange(9).astype(np.uint64)).reshape(3, 3)
        return Hidden(windows, tokens, self.vocabulary(), self.share, keys[SPLITS.index(name)].tolist())

    def collate(self, samples: list[Sample]) -> dict[str, Tensor]:
        """input_ids and labels, both (B, L); labels are -100 where nothing was hidden."""
        return {name: torch.stack([sample[name] for sample in samples]) for name in ("input_ids", "labels")}

    def score(self, found: Outcome) -> dict[str, float]:
        """Perplexity, exp(loss); accuracy; bits per token."""
        perplexity = math.exp(found.loss) if found.loss < 700 else math.inf
        return {self.metric: perplexity, "accuracy": found.right, "bits_per_token": found.loss / math.log(2)}

    def baselines(self, split: str) -> dict[str, dict[str, float]]:
        """What comes of guessing by frequency in the training split, each token counted once more."""
        data, words = self.split(split), self.vocabulary()
        counts = np.bincount(self.tokens("train"), minlength=words.size)[words.ordinary()] + 1
        share = np.zeros(words.size)
        share[words.ordinary()] = counts / counts.sum()
        loss = right = total = 0.0
        for first in range(0, len(data), 256):
            labels = data.batch(range(first, min(first + 256, len(data))))[1]
            labels = labels[labels != IGNORED]
            loss -= float(np.log(share[labels]).sum())
            right += float((labels == share.argmax()).sum())
            total += len(labels)
        return {"frequency of tokens": self.score(Outcome(loss / total, right / total))}

    def _origin(self, data: str | os.PathLike[str] | None, skip_bad: bool) -> Files | Source:
        """Of the texts: plain files, or rows."""
        layout = f'"{self.text}" in each row, or plain text'
        place = find_place(data, layout)
        shares, pattern = self.options, self.pattern
        if isinstance(place, Path):
            splits = {stem + end for stem in chain(*ALIASES.values()) for end in EXTENSIONS}
            folder = place.is_dir()
            if folder and (pattern is not None or not any((place / x).exists() for x in splits)):
                return Files(data=place, pattern=pattern or "**/*.txt", length=2, **shares)
            if not folder and place.suffix not in EXTENSIONS:
                return Files(data=place, pattern=pattern, length=2, **shares)
        if pattern is not None:
            raise ValueError(f"pattern chooses files of a folder, got pattern={pattern!r} and {place}; leave it out.")
        fields = {self.text: text_value}
        return Source(place, fields, layout=layout, skip_bad=skip_bad, seed=self.seed, **shares)

    def _place(self) -> object:
        return self.origin.place if isinstance(self.origin, Source) else self.origin.path

    def _pieces(self, split: str) -> Iterator[Piece]:
        if isinstance(self.origin, Files):
            yield from self.origin.pieces(split)
            return
        for text in self.origin.rows(split)[self.text]:
            yield text, True

    def _record(self) -> str:
        """What the tokens of splits depend on."""
        rows = {"skip_bad": self.origin.skip_bad, "seed": self.seed} if isinstance(self.origin, Source) else {}
        of = {"text": self.text, "pattern": self.pattern, **self.options, **rows, "of": self.fingerprint()}
        return json.dumps({"format": _FORMAT, **of}, sort_keys=True)

    def _encoded(self, split: str) -> Tokens:
        words, found = self.vocabulary(), list(self._pieces(split))
        flat, offsets = words.encode_batch([text for text, _ in found])
        ends = offsets[1:][[end for _, end in found]] if found else offsets[:0]
        whole = np.insert(flat, ends, words.eos)
        return whole, np.array([0, len(whole)])
