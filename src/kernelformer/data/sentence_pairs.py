"""Sentences and their translations: pairs read from files, and pairs as arrays of tokens."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from kernelformer.data.batching import Sample, check_indices
from kernelformer.data.local_files import check_inside
from kernelformer.data.readers import EXTENSIONS, Row, hash_files, not_utf8, read_bytes, read_file_rows
from kernelformer.data.sources import Rows, Source
from kernelformer.data.splits import ALIASES
from kernelformer.data.values import text_value

NESTED = "translation"  # the column of the hub's data sets that holds a text for each language
STEMS = frozenset(chain(*ALIASES.values()))


def sentence(value: object) -> str:
    """Check for a text that is not empty; gives it without blanks around it."""
    return text_value(value).strip()


class Parallel(Source):
    """Pairs of texts from all locations that a `Source` reads, and from more.

    - In a folder, two plain files for a split, such as ``train.en`` and ``train.de``: line i of one is the translation
      of line i of the other. A line that is blank in both is skipped.
    - In files and data sets, a column ``translation`` with ``{"en": ..., "de": ...}``, as the hub has it.

    Args:
        data: the location.
        source: name of the column, or ending of the files, of what is translated.
        target: the same for what it is translated to.
        options: of a `Source`.
    """

    def __init__(self, data: str | os.PathLike[str] | None, source: str, target: str, **options: Any) -> None:
        layout = f'"{source}" and "{target}" (columns; or a folder with plain files train.{source} and train.{target})'
        super().__init__(data, {source: sentence, target: sentence}, layout=layout, **options)
        self.source, self.target = source, target

    def files(self) -> list[Path]:
        """All files of a folder that are a split; of plain ones those of the source."""
        return self._plain() or super().files()

    def fingerprint(self) -> str:
        """The fingerprint of a source; of plain files both sides count."""
        plain = self._plain() if isinstance(self.location, Path) and self.location.is_dir() else []
        return (
            hash_files([side for x in plain for side in (x, self._target_file(x))]) if plain else super().fingerprint()
        )

    def _target_file(self, path: Path) -> Path:
        return path.with_suffix(f".{self.target}")

    def _plain(self) -> list[Path]:
        """The source's side of all splits in plain files."""
        there = [x for x in self.path.iterdir() if x.stem in STEMS]
        sides = [{x.stem for x in there if x.suffix == f".{side}"} for side in (self.source, self.target)]
        if not any(sides):
            return []
        tables = sorted(x.name for x in there if x.suffix in EXTENSIONS)
        if tables:
            stem = min(sides[0] | sides[1])
            raise ValueError(
                f"the folder {self.path} has plain files, such as {stem}.{self.source}, and {', '.join(tables)}; "
                f"keep one kind."
            )
        alone = sorted(sides[0] ^ sides[1])
        if alone:
            has, lacks = (self.source, self.target) if alone[0] in sides[0] else (self.target, self.source)
            raise ValueError(
                f"the folder {self.path} has {alone[0]}.{has} but no {alone[0]}.{lacks}; the texts of a split are in "
                f"two files, one for each language."
            )
        plain = [self.path / f"{stem}.{self.source}" for stem in sorted(sides[0])]
        check_inside(self.path, [side for x in plain for side in (x, self._target_file(x))])
        return plain

    def _of_file(self, path: Path) -> Rows:
        if path.suffix not in EXTENSIONS and path.stem in STEMS and path.suffix == f".{self.source}":
            return self._good(self._aligned(path), f"{path} and {self._target_file(path).name}")
        rows = ((position, row if isinstance(row, str) else self._flat(row)) for position, row in read_file_rows(path))
        return self._good(rows, path)

    def _of_hub(self, dataset: Any) -> Rows:
        if NESTED in dataset.column_names and not all(x in dataset.column_names for x in self.fields):
            return self._good(((f"row {i}", self._flat(row)) for i, row in enumerate(dataset)), self.location)
        return super()._of_hub(dataset)

    def _flat(self, row: Row) -> Row:
        inner = row.get(NESTED)
        return inner if isinstance(inner, dict) and self.source not in row else row

    def _aligned(self, path: Path) -> Iterator[tuple[str, Row | str]]:
        sides = [_lines(side) for side in (path, self._target_file(path))]
        if len(sides[0]) != len(sides[1]):
            raise ValueError(
                f"{path} has {len(sides[0]):,} lines and {self._target_file(path)} has {len(sides[1]):,}; line i of "
                f"one must be the translation of line i of the other."
            )
        for line, pair in enumerate(zip(*sides, strict=True), 1):
            try:
                texts = [x.decode() for x in pair]
            except UnicodeDecodeError as problem:
                yield f"line {line}", not_utf8(problem)
                continue
            if any(x.strip() for x in texts):
                yield f"line {line}", {self.source: texts[0], self.target: texts[1]}


def _lines(path: Path) -> list[bytes]:
    """Split at line feeds alone: what else Unicode calls the end of a line may stand within a sentence."""
    lines = read_bytes(path).removeprefix(b"\xef\xbb\xbf").split(b"\n")
    return lines if lines[-1] else lines[:-1]


class Tokens(NamedTuple):
    """Texts one after the other.

    Args:
        flat: (T) int32, of all texts.
        offsets: (N + 1) int64; text i is flat[offsets[i] : offsets[i + 1]].
    """

    flat: NDArray[np.int32]
    offsets: NDArray[np.int64]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """(N) numbers of tokens."""
        return np.diff(self.offsets)

    def text(self, i: int) -> torch.Tensor:
        """Tokens of one text, (L) int64."""
        return torch.from_numpy(self.flat[self.offsets[i] : self.offsets[i + 1]].astype(np.int64))

    def ended(self, eos: int) -> Tokens:
        """The same texts with a token at the end of each."""
        flat = np.insert(self.flat, self.offsets[1:], np.int32(eos))
        return Tokens(flat, self.offsets + np.arange(len(self.offsets)))

    def cut(self, length: int) -> Tokens:
        """The first so many tokens of each text."""
        position = np.arange(len(self.flat)) - np.repeat(self.offsets[:-1], self.lengths)
        kept = np.minimum(self.lengths, length)
        return Tokens(self.flat[position < length], np.concatenate([np.zeros(1, np.int64), np.cumsum(kept)]))


class Pairs(Dataset[Sample]):
    """Some of the pairs, by index: input_ids and labels, both (L) int64, and the reference, a text.

    Args:
        source: N texts.
        target: N texts.
        references: the N targets as they were written.
        chosen: which of them.
    """

    def __init__(self, source: Tokens, target: Tokens, references: Sequence[str], chosen: NDArray[np.int64]) -> None:
        self.source, self.target, self.references, self.chosen = source, target, references, chosen

    def __len__(self) -> int:
        return len(self.chosen)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """(N) numbers of tokens, those of the longer side."""
        return np.maximum(self.source.lengths, self.target.lengths)[self.chosen]

    def __getitem__(self, index: int) -> Sample:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Sample]:
        chosen = self.chosen[check_indices(indices, len(self))].tolist()
        return [
            {"input_ids": self.source.text(i), "labels": self.target.text(i), "reference": self.references[i]}
            for i in chosen
        ]
