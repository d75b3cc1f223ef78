"""Amino acid sequences of text, fasta and table files and of Hugging Face data sets, each checked and used once."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from kernelformer.data.local_files import check_inside
from kernelformer.data.readers import EXTENSIONS, Row, not_utf8, read_lines
from kernelformer.data.sources import Rows, Source
from kernelformer.data.splits import ALIASES
from kernelformer.data.values import text_value
from kernelformer.errors import flag

AMINO_ACIDS = "ACDEFGHIKLMNPQRSTVWY" + "BOUXZ"  # the standard ones, and those that the paper calls anomalous
FASTA = (".fasta", ".fa", ".faa")
SUFFIXES = (".txt", *FASTA, *EXTENSIONS)
ALLOWED = f"{', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}"
_FOREIGN = re.compile(f"[^{AMINO_ACIDS}{AMINO_ACIDS.lower()}]")  # not IGNORECASE, to which the Kelvin sign is a K


def letters(value: object) -> bytes:
    """Check for a sequence; gives it in capitals, without the stop at its end."""
    sequence = text_value(value).strip().removesuffix("*")
    if foreign := _FOREIGN.search(sequence):
        raise ValueError(
            f"has the letter {foreign.group()!r} at position {foreign.start() + 1}, which is none of {AMINO_ACIDS}; "
            f"X stands for an amino acid that is not known"
        )
    if not sequence:
        raise ValueError("has a stop '*' but no amino acids")
    return sequence.upper().encode()


def _plain(path: Path, field: str) -> Iterator[tuple[str, Row | str]]:
    """One sequence a line, as rows."""
    for position, line in read_lines(path):
        if not isinstance(line, str):
            yield position, not_utf8(line)
        elif line.startswith(">"):
            yield position, f"it is a header; a file with headers must end in {', '.join(FASTA)}"
        else:
            yield position, {field: line}


def _fasta(path: Path, field: str) -> Iterator[tuple[str, Row | str]]:
    """Sequences on any number of lines, as rows; of the headers nothing is used."""
    head, parts = "", list[str]()
    for position, line in chain(read_lines(path), [("", ">")]):
        # Old files have names in other encodings; as letters of a sequence they are refused in any.
        text = line if isinstance(line, str) else line.object.decode("latin-1")
        if text.startswith(">"):
            if head:
                yield f"record at {head}", {field: "".join(parts)}
            head, parts = position, []
        elif head:
            parts.append(text.strip())
        else:
            yield position, "a sequence without a header, a line that begins with '>', before it"


class Sequences(Source):
    """A source that also reads ``.txt`` and fasta files, and takes of each file or split every sequence once."""

    def __init__(self, data: str | os.PathLike[str] | None, field: str, deduplicate: bool, **options: Any) -> None:
        super().__init__(data, {field: letters}, layout=f"one sequence a line, fasta, or {field!r}", **options)
        self.field, self.deduplicate = field, flag("deduplicate", deduplicate)

    def files(self) -> list[Path]:
        """All files of a folder that are a split."""
        stems = set(chain(*ALIASES.values()))
        everything = sorted(self.path.iterdir())
        there = [x for x in everything if x.suffix in SUFFIXES and x.stem in stems]
        if not there:
            names = ", ".join(x.name for x in everything[:10]) or "nothing"
            raise ValueError(f"{self.path} must hold train, validation and test as {ALLOWED}, found {names}.")
        check_inside(self.path, there)
        return there

    def has(self, split: str) -> bool:
        """Whether there is such a split, in the data itself or by a share."""
        if isinstance(self.location, Path) and not self.location.is_dir():
            return True
        names = set(self._hub()) if isinstance(self.location, str) else {x.stem for x in self.files()}
        return not names.isdisjoint(ALIASES[split]) or (split == "validation" and self.has("train"))

    def read(self, path: Path) -> list[bytes]:
        """All sequences of a file."""
        sequences: list[bytes] = self._of_file(path)[self.field]
        return sequences

    def _of_file(self, path: Path) -> Rows:
        if path.suffix not in SUFFIXES:
            raise ValueError(f"{path} must end in {ALLOWED}, got {path.suffix or 'nothing'!r}.")
        if path.suffix in EXTENSIONS:
            return super()._of_file(path)
        return self._good(_fasta(path, self.field) if path.suffix in FASTA else _plain(path, self.field), path)

    def _good(self, rows: Iterator[tuple[str, Row | str]], where: object) -> Rows:
        good = super()._good(rows, where)[self.field]
        once = list(dict.fromkeys(good)) if self.deduplicate else good
        self.remark(len(good) - len(once), len(good), f"of {where}, which has them more than once")
        return {self.field: once}

    def _full(self, rows: Rows, split: str, of: int = 0) -> Rows:
        return rows  # also if there are none: they are read to be compared, and whoever needs some says so

    def remark(self, count: int, total: int, where: str) -> None:
        """Note how many sequences were left out, if any."""
        text = f"left out {count:,} of {total:,} sequences {where}"
        if count and text not in self.remarks:
            self.remarks.append(text)
