"""Byte-level language modelling of any file or folder of text."""

from __future__ import annotations

import hashlib
import math
import os
import sysconfig
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from kernelformer.data.local_files import check_inside, check_regular, existing
from kernelformer.data.readers import column_bytes
from kernelformer.data.sources import ALIASES, EXTENSIONS, check_shares, spread
from kernelformer.errors import choice, integer, positive_int
from kernelformer.tasks.base import SPLITS, Outcome, Sample, Task

Text = NDArray[np.uint8]
Places = NDArray[np.int64]

# What is installed beside the standard library, what tests it, and what programs have written: tables that are almost
# copies of one another, in training and validation, and one file with more text than all others of its split.
_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}


class Part(NamedTuple):
    """What a split has of a file.

    Args:
        file: its path.
        text: all of it.
        start: where the part begins.
        stop: where it ends.
    """

    file: Path
    text: Text
    start: int
    stop: int


class Windows(Dataset[Sample], ABC):
    """Windows of equal length of a text, by index; a batch is one gather.

    Args:
        text: (N) uint8.
        length: of a window.
        count: how many windows there are.
    """

    def __init__(self, text: Text, length: int, count: int) -> None:
        self.text, self.length, self.count = text, length, count

    @abstractmethod
    def places(self, indices: Places) -> Places:
        """Where these windows start."""

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Sample:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Sample]:
        chosen = np.asarray(indices, dtype=np.int64)
        if chosen.size and not (chosen.min() >= 0 and chosen.max() < self.count):
            raise IndexError(f"samples are numbered from 0 to {self.count - 1}, got {list(indices)}.")
        grid = self.places(chosen)[:, None] + np.arange(self.length)
        rows = torch.from_numpy(self.text[grid].astype(np.int64)).unbind()
        return [{"input_ids": row, "labels": row} for row in rows]


class RandomWindows(Windows):
    """Windows at pseudo-random places: sample i is a function of (seed, i), so no order has to be kept or restored."""

    def __init__(self, text: Text, length: int, count: int, seed: int) -> None:
        super().__init__(text, length, count)
        self.seed = seed

    def places(self, indices: Places) -> Places:
        """Uniform over all places where a whole window fits."""
        fits = len(self.text) - self.length + 1
        places: Places = (spread(indices, self.seed) * fits).astype(np.int64)
        return places


class ConsecutiveWindows(Windows):
    """Windows side by side, or as many of them as wanted, spread evenly; a last piece too short for one is left out."""

    def __init__(self, text: Text, length: int, count: int | None) -> None:
        self.whole = len(text) // length
        super().__init__(text, length, self.whole if count is None else min(count, self.whole))

    def places(self, indices: Places) -> Places:
        """Multiples of the length."""
        places: Places = indices * self.whole // self.count * self.length
        return places


class Bytes(Task):
    """Predict the next byte; scored in bits per byte, over the predicted bytes.

    A window of n bytes predicts its last n - 1: bits per byte at length n have contexts of 1 to n - 1 bytes.

    A file is taken as it is, whatever its bytes are, also the syntax of a table; ``column`` takes the texts of its rows
    instead, a line end after each. It is split by position: training, validation, test. With the
    default shares enwik8 has the usual 90, 5 and 5 million bytes.

    Files of a folder are in the splits that their names say, where some do: ``train/*``, ``validation/*``, ``test/*``
    or ``train.txt``, ``validation.txt``, ``test.txt``, also by the other names of `sources.ALIASES`. Others are left
    out then, and where nothing is named for validation, it is a share of the training files, or the end of a single
    one. Any other folder is split by a hash of names relative to it, so that no file is in two splits and none moves
    when others come. In a split files follow one another by name, without a mark between them. Hidden files are not
    part of a folder.

    Args:
        data: path of a file or folder; None takes the standard library of the running Python (without tests and
            generated tables), which every machine has, and which differs from one version of Python to the next.
        column: of ``.jsonl``, ``.csv`` and ``.tsv`` files, whose texts are modelled; None: the bytes as they are.
        pattern: which files of a folder, as a glob; default "**/*.py" for the standard library, else "**/*".
        length: bytes of a sample.
        samples: training samples, at random places; sample i is a function of (seed, i).
        validation_samples: at most so many windows, spread evenly over the split; None: all, side by side.
        test_samples: the same for the test.
        validation_share: of the bytes of a file, or of the files of a folder.
        test_share: the same for the test; training has the rest.
        seed: of the places of training samples.

    Cost: a file is mapped, not read; the files of a folder's split are read once. `fingerprint` reads everything.
    """

    name = "bytes"
    about = "byte-level language modelling of a file or folder; Python's own sources by default"
    model = "causal-lm"
    metric = "bits_per_byte"
    higher_is_better = False

    def __init__(
        self,
        *,
        data: str | os.PathLike[str] | None = None,
        column: str | None = None,
        pattern: str | None = None,
        length: int = 512,
        samples: int = 1_000_000,
        validation_samples: int | None = None,
        test_samples: int | None = None,
        validation_share: float = 0.05,
        test_share: float = 0.05,
        seed: int = 0,
    ) -> None:
        self.length = integer("length", length, at_least=2)  # one byte alone predicts none
        self.samples = positive_int("samples", samples)
        self.limits = {"validation": validation_samples, "test": test_samples}
        self.shares = check_shares(validation_share, test_share)
        for split, limit in self.limits.items():
            if limit is not None:
                positive_int(f"{split}_samples", limit)
        self.seed = integer("seed", seed, at_least=0)
        self.library = data is None
        self.path = Path(str(sysconfig.get_paths()["stdlib"] if data is None else data)).expanduser()
        existing(self.path, "the path of one")
        if pattern is not None and not self.path.is_dir():
            raise ValueError(
                f"pattern chooses files of a folder, got pattern={pattern!r} and the file {self.path}; leave it out."
            )
        if column is not None and self.path.is_file() and self.path.suffix not in EXTENSIONS:
            raise ValueError(
                f"column={column!r} is of the rows of a table ({', '.join(EXTENSIONS)}), got the file {self.path}; "
                f"leave it out."
            )
        self.column = column
        self.pattern = str(pattern) if pattern is not None else "**/*.py" if self.library else "**/*"
        self._left = ""  # remark on files that are in no split
        self._table = ""  # a table that was read with its syntax

    def settings(self) -> dict[str, Any]:
        """A byte is a token, and no token is padding."""
        return {"vocab_size": 256, "max_position_embeddings": self.length, "pad_token_id": None}

    def fingerprint(self) -> str:
        """Size and hash of all bytes, also of names in a folder; 0.2 seconds for 100 million."""
        digest = hashlib.blake2b(digest_size=16)
        if not self.path.is_dir():
            text = self._mapped()
            digest.update(text.data)
            return f"{self.path.name} with {len(text)} bytes, blake2b {digest.hexdigest()}"
        (names, _), size = self._in_splits(), 0
        for name in names:
            content = self._content(name)
            size += len(content)
            digest.update(f"{name}\0{len(content)}\0".encode(errors="surrogateescape"))
            digest.update(content)
        return f"{self.path.name} with {len(names)} files, {size} bytes, blake2b {digest.hexdigest()}"

    def remarks(self) -> list[str]:
        """Files left out, and tables that are modelled with their syntax."""
        syntax = f"{self._table} is modelled as it stands, with its syntax; task.column=NAME takes texts of its rows"
        return [x for x in (self._left, syntax if self._table else "") if x]

    def split(self, name: str) -> Windows:
        """Windows of the split's bytes."""
        text = self._text(choice("split", name, SPLITS))
        if len(text) < self.length:
            raise ValueError(
                f"the {name} split of {self.path} has {len(text)} bytes, less than one sample of length={self.length}; "
                f"give more text, a smaller length{'' if name == 'train' else f' or a larger {name}_share'}."
            )
        if name == "train":
            return RandomWindows(text, self.length, self.samples, self.seed)
        return ConsecutiveWindows(text, self.length, self.limits[name])

    def collate(self, samples: list[Sample]) -> dict[str, Tensor]:
        """input_ids (B, L) and labels, which are the same: the model shifts them."""
        ids = torch.stack([sample["input_ids"] for sample in samples])
        return {"input_ids": ids, "labels": ids}

    def score(self, found: Outcome) -> dict[str, float]:
        """Bits per byte: the loss in bits instead of nats."""
        return {self.metric: found.loss / math.log(2)}

    def parts(self, split: str) -> Iterator[Part]:
        """All that a split has, file by file."""
        if not self.path.is_dir():
            text = self._mapped()
            yield Part(self.path, text, *cuts(len(text), self.shares)[split])
            return
        files, shares = self._mine(split)
        for file in files:
            yield self._part(file, shares, split)

    def _part(self, file: str, shares: Mapping[str, float] | None, split: str) -> Part:
        """Of a file of the folder."""
        text = self._read(file)
        return Part(self.path / file, text, *((0, len(text)) if shares is None else cuts(len(text), shares)[split]))

    def _text(self, split: str) -> Text:
        found = [text[start:stop] for _, text, start, stop in self.parts(split)]
        return found[0] if len(found) == 1 else np.concatenate(found)

    def _mine(self, split: str) -> tuple[list[str], dict[str, float] | None]:
        """Files of a split of the folder, and the shares by which they are cut themselves, if they are."""
        files, named = self._in_splits()
        whose = {file: self._split_of(file) for file in files}
        if named:
            if split in named and (split != "train" or "validation" in named):
                return named[split], None
            if split == "test" or "train" not in named:
                raise ValueError(
                    f"{self.path} has no {split} split, found {_tops(files)}; add one, evaluate another, or choose "
                    f"files with other names by pattern."
                )
            files = named["train"]
            if len(files) == 1:
                return files, {**self.shares, "test": 0.0}
            whose = {file: "validation" if whose[file] == "validation" else "train" for file in files}
        mine = [file for file in files if whose[file] == split]
        if not mine:
            raise ValueError(
                f"none of the {len(files)} files of {self.path} falls into the {split} split, to which a file goes by "
                f"a hash of its name; give more files, another {split if split != 'train' else 'validation'}_share, "
                f"or a single file, which is split by position."
            )
        return mine, None

    def _in_splits(self) -> tuple[list[str], dict[str, list[str]]]:
        """Files that are in some split, and those of each where names say it."""
        files = self._files()
        named = named_splits(self.path, files)
        if not named:
            return files, named
        mine = sorted(chain(*named.values()))
        others = len(files) - len(mine)
        if others:
            self._left = f"left out {others:,} of {len(files):,} files of {self.path}: splits are {_tops(mine)}"
        return mine, named

    def _mapped(self) -> Text:
        """All of a file, or the texts of its rows."""
        if self.column is not None:
            return np.frombuffer(column_bytes(self.path, self.column), np.uint8)
        self._notice_table(self.path)
        try:
            size = check_regular(self.path).stat().st_size
            return np.asarray(np.memmap(self.path, np.uint8, "r")) if size else np.empty(0, np.uint8)
        except OSError as problem:
            raise ValueError(f"{self.path} cannot be read: {problem.strerror}; data must be a readable file.") from None

    def _notice_table(self, path: Path) -> None:
        self._table = self._table or (path.name if path.suffix in EXTENSIONS else "")

    def _files(self) -> list[str]:
        """Names relative to the folder, sorted."""
        wrong = f"pattern must be a glob relative to the folder, such as '**/*.txt', got {self.pattern!r}"
        if not self.pattern or Path(self.pattern).is_absolute():
            raise ValueError(f"{wrong}.")
        try:
            found = [path for path in self.path.glob(self.pattern) if not path.is_dir()]
        except ValueError as problem:
            raise ValueError(f"{wrong}: {problem}.") from None
        parts = [path.relative_to(self.path).parts for path in found]
        skipped = _NOT_LIBRARY if self.library else set()
        names = ["/".join(p) for p in parts if not any(x.startswith(".") for x in p) and skipped.isdisjoint(p)]
        if not names:
            raise ValueError(
                f"the folder {self.path} has no files that match pattern={self.pattern!r}; "
                f"give another pattern, or the path of a file as data."
            )
        if not self.library:  # systems link parts of their Python to other places
            check_inside(self.path, (self.path / name for name in names))
        return sorted(names)

    def _split_of(self, file: str) -> str:
        """By a hash of its name."""
        place = int.from_bytes(hashlib.sha256(file.encode(errors="surrogateescape")).digest()[:6], "big") / 2**48
        validation = self.shares["validation"]
        return "validation" if place < validation else "test" if place < validation + self.shares["test"] else "train"

    def _content(self, file: str) -> bytes:
        path = self.path / file
        if self.column is not None:
            return column_bytes(path, self.column)
        self._notice_table(path)
        try:
            return check_regular(path).read_bytes()
        except OSError as problem:
            raise ValueError(
                f"{path} cannot be read: {problem.strerror}; leave it out by pattern, which is {self.pattern!r}."
            ) from None

    def _read(self, file: str) -> Text:
        found = self._content(file)
        if b"\0" in found:
            raise ValueError(
                f"{self.path / file} is not text: it has a zero byte; "
                f"leave it out by pattern, which is {self.pattern!r}, for example '**/*.txt'."
            )
        return np.frombuffer(found, np.uint8)


def _tops(files: Sequence[str]) -> str:
    """What is in the folder itself, for messages."""
    return ", ".join(sorted({x.partition("/")[0] for x in files}))


def cuts(size: int, shares: Mapping[str, float]) -> dict[str, tuple[int, int]]:
    """Where splits begin and end in a text that is split by position."""
    test = size - round(size * shares["test"])
    validation = test - round(size * shares["validation"])
    return {"train": (0, validation), "validation": (validation, test), "test": (test, size)}


def named_splits(folder: Path, files: Sequence[str]) -> dict[str, list[str]]:
    """Files of the splits that their names say; nothing where none does.

    Args:
        folder: for the message.
        files: relative to it, such as ``train/a.txt`` or ``train.txt``.
    """
    tops: dict[str, list[str]] = {}
    for file in files:
        tops.setdefault(file.partition("/")[0], []).append(file)
    found: dict[str, list[str]] = {}
    for split, names in ALIASES.items():
        called = {name + end for name in names for end in ("", ".txt", *EXTENSIONS)}
        same = [top for top in tops if top in called]
        if len(same) > 1:
            raise ValueError(f"the folder {folder} has {' and '.join(same)}; keep one for each split.")
        if same:
            found[split] = tops[same[0]]
    return found
