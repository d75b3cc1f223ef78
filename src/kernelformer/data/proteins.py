"""Amino acid sequences of text, fasta and table files and of Hugging Face data sets, each checked and used once."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from kernelformer.data import sources
from kernelformer.data.local_files import check_inside
from kernelformer.errors import flag

AMINO_ACIDS = "ACDEFGHIKLMNPQRSTVWY" + "BOUXZ"  # the standard ones, and those that the paper calls anomalous
FASTA = (".fasta", ".fa", ".faa")
SUFFIXES = (".txt", *FASTA, *sources.EXTENSIONS)
SAID = f"{', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}"
_FOREIGN = re.compile(f"[^{AMINO_ACIDS}{AMINO_ACIDS.lower()}]")  # not IGNORECASE, to which the Kelvin sign is a K


def letters(value: object) -> bytes:
    """A sequence in capitals, without the stop at its end; ValueError says what is wrong with it."""
    found = sources.text_value(value).strip().removesuffix("*")
    if foreign := _FOREIGN.search(found):
        raise ValueError(
            f"has the letter {foreign.group()!r} at position {foreign.start() + 1}, which is none of {AMINO_ACIDS}; "
            f"X stands for an amino acid that is not known"
        )
    if not found:
        raise ValueError("has a stop '*' but no amino acids")
    return found.upper().encode()


def _plain(path: Path, field: str) -> Iterator[tuple[str, sources.Row | str]]:
    """One sequence a line, as rows."""
    for place, line in sources.read_lines(path):
        if not isinstance(line, str):
            yield place, sources.not_utf8(line)
        elif line.startswith(">"):
            yield place, f"it is a header; a file with headers must end in {', '.join(FASTA)}"
        else:
            yield place, {field: line}


def _fasta(path: Path, field: str) -> Iterator[tuple[str, sources.Row | str]]:
    """Sequences on any number of lines, as rows; of the headers nothing is used."""
    head, parts = "", list[str]()
    for place, line in chain(sources.read_lines(path), [("", ">")]):
        # Old files have names in other encodings; as letters of a sequence they are refused in any.
        text = line if isinstance(line, str) else line.object.decode("latin-1")
        if text.startswith(">"):
            if head:
                yield f"record at {head}", {field: "".join(parts)}
            head, parts = place, []
        elif head:
            parts.append(text.strip())
        else:
            yield place, "a sequence without a header, a line that begins with '>', before it"


class Sequences(sources.Source):
    """A source that also reads ``.txt`` and fasta files, and takes of each file or split every sequence once."""

    def __init__(self, data: str | os.PathLike[str] | None, field: str, deduplicate: bool, **options: Any) -> None:
        super().__init__(data, {field: letters}, layout=f"one sequence a line, fasta, or {field!r}", **options)
        self.field, self.deduplicate = field, flag("deduplicate", deduplicate)

    def files(self) -> list[Path]:
        """All files of a folder that are a split."""
        stems = set(chain(*sources.ALIASES.values()))
        everything = sorted(self.found.iterdir())
        there = [x for x in everything if x.suffix in SUFFIXES and x.stem in stems]
        if not there:
            names = ", ".join(x.name for x in everything[:10]) or "nothing"
            raise ValueError(f"{self.found} must hold train, validation and test as {SAID}, found {names}.")
        check_inside(self.found, there)
        return there

    def has(self, split: str) -> bool:
        """Whether there is such a split, in the place itself or by a share."""
        if isinstance(self.place, Path) and not self.place.is_dir():
            return True
        names = set(self._hub()) if isinstance(self.place, str) else {x.stem for x in self.files()}
        return not names.isdisjoint(sources.ALIASES[split]) or (split == "validation" and self.has("train"))

    def read(self, path: Path) -> list[bytes]:
        """All sequences of a file."""
        found: list[bytes] = self._of_file(path)[self.field]
        return found

    def _of_file(self, path: Path) -> sources.Rows:
        if path.suffix not in SUFFIXES:
            raise ValueError(f"{path} must end in {SAID}, got {path.suffix or 'nothing'!r}.")
        if path.suffix in sources.EXTENSIONS:
            return super()._of_file(path)
        return self._good(_fasta(path, self.field) if path.suffix in FASTA else _plain(path, self.field), path)

    def _good(self, rows: Iterator[tuple[str, sources.Row | str]], where: object) -> sources.Rows:
        found = super()._good(rows, where)[self.field]
        once = list(dict.fromkeys(found)) if self.deduplicate else found
        self.remark(len(found) - len(once), len(found), f"of {where}, which has them more than once")
        return {self.field: once}

    def _full(self, rows: sources.Rows, split: str, of: int = 0) -> sources.Rows:
        return rows  # also if there are none: they are read to be compared, and whoever needs some says so

    def remark(self, count: int, total: int, where: str) -> None:
        """Note how many sequences were left out, if any."""
        text = f"left out {count:,} of {total:,} sequences {where}"
        if count and text not in self.remarks:
            self.remarks.append(text)
