"""Rows of plain local files and of Hugging Face data sets, each row checked before anything is made of it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernelformer.data.local_files import check_inside, existing
from kernelformer.data.readers import EXTENSIONS as EXTENSIONS
from kernelformer.data.readers import Row as Row
from kernelformer.data.readers import brief as brief
from kernelformer.data.readers import hash_files as hash_files
from kernelformer.data.readers import not_utf8 as not_utf8
from kernelformer.data.readers import read_bytes as read_bytes
from kernelformer.data.readers import read_file_rows as read_file_rows
from kernelformer.data.readers import read_lines as read_lines
from kernelformer.data.readers import read_texts as read_texts
from kernelformer.data.readers import said_names, separator_hint, unreadable
from kernelformer.data.values import Check as Check
from kernelformer.data.values import label_names as label_names
from kernelformer.data.values import label_value as label_value
from kernelformer.data.values import number_value as number_value
from kernelformer.data.values import text_value as text_value
from kernelformer.errors import choice, flag, integer, number
from kernelformer.tasks.base import SPLITS

HUB = "hub:"
# Names that splits have elsewhere; the first that is there counts.
ALIASES = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val", "validation_matched"),
    "test": ("test", "test_matched"),
}
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+)?")

Rows = dict[str, list[Any]]


class Sieve:
    """What becomes of bad rows: the first is an error, or all are left out and counted.

    Args:
        where: file or data set, for the message.
        skip: leave them out.
    """

    def __init__(self, where: object, skip: bool) -> None:
        self.where, self.skip = str(where), flag("skip_bad", skip)
        self.count, self.first = 0, ""

    def bad(self, place: str, reason: str) -> None:
        """A bad row at a place, such as ``line 7``: raise, or count it."""
        if not self.skip:
            raise ValueError(
                f"{self.where}, {place}: {reason.rstrip('.')}; mend it, or leave bad rows out by --skip-bad "
                f"(skip_bad=True)."
            )
        self.first = self.first or f"{place}: {reason}"
        self.count += 1

    def remarks(self, good: int) -> list[str]:
        """How many were left out, if any."""
        if not self.count:
            return []
        rows = f"{self.count:,} of {self.count + good:,} rows"
        return [f"left out {rows} of {self.where} as bad; the first: {self.first}"]


class Source:
    """Rows by split, from one of these places.

    - A folder with ``train``, ``validation`` (or ``valid``, ``dev``) and ``test``, each ``.jsonl`` (an object a line),
      ``.csv`` or ``.tsv`` (with a head line); UTF-8, blank lines are skipped.
    - One such file, which is divided by the shares.
    - ``hub:NAME`` or ``hub:NAME:CONFIGURATION``: a data set of the Hugging Face hub, read by ``datasets``; none that
      would run code of its own.

    Where there is no validation split, a share of the training rows is one; which ones depends on the seed and on the
    number of the row alone, so that rows which are added later move none of the others.

    Args:
        data: the place; None is refused when rows are read, not before.
        fields: name of a column -> check of its values.
        layout: what the task wants to see in a row, for messages: ``"text" and "label"``.
        skip_bad: leave bad rows out, and say how many, instead of raising at the first.
        validation_share: of the training rows, or of the rows of one file.
        test_share: of the rows of one file.
        seed: of the division.
        names: split -> the name it has there, where that is none of `ALIASES` or another is wanted.
    """

    def __init__(
        self,
        data: str | os.PathLike[str] | None,
        fields: Mapping[str, Check],
        *,
        layout: str,
        skip_bad: bool = False,
        validation_share: float = 0.1,
        test_share: float = 0.1,
        seed: int = 0,
        names: Mapping[str, str] | None = None,
    ) -> None:
        self.fields, self.layout = dict(fields), layout
        self.names = dict(names or {})
        self.known: dict[str, tuple[str, ...]] = {**ALIASES, **{split: (name,) for split, name in self.names.items()}}
        self.skip_bad = flag("skip_bad", skip_bad)
        self.shares = check_shares(validation_share, test_share)
        self.seed = integer("seed", seed, at_least=0)
        self.place = find_place(data, layout)
        self.remarks: list[str] = []  # about what was read so far
        self._read: dict[str, Rows] = {}
        self._sets: Mapping[str, Any] | None = None

    def rows(self, split: str) -> Rows:
        """The columns of a split, by name; read once."""
        choice("split", split, SPLITS)
        if split not in self._read:
            self._read[split] = self._split(split)
        return self._read[split]

    def take(self, split: str) -> Rows:
        """The columns of a split, for whoever makes something else of them: here they are forgotten, not kept twice."""
        rows = self.rows(split)
        del self._read[split]
        return rows

    def fingerprint(self) -> str:
        """Names and hash of all files, or what ``datasets`` calls the same rows."""
        if isinstance(self.place, str):
            sets = sorted(self._hub().items())
            return f"{self.place}: " + ", ".join(f"{name} {len(x)} {x._fingerprint}" for name, x in sets)
        return hash_files(self.files() if self.found.is_dir() else [self.found])

    @property
    def found(self) -> Path:
        """The folder or file."""
        if self.place is None:
            raise missing_data(self.layout)
        assert isinstance(self.place, Path)
        return self.place

    def files(self) -> list[Path]:
        """All files of a folder that are a split."""
        try:
            everything = sorted(self.found.iterdir())
        except OSError as problem:
            unreadable(self.found, problem)
        stems = set(chain(*self.known.values()))
        there = [x for x in everything if x.suffix in EXTENSIONS and x.stem in stems]
        if not there:
            names = ", ".join(x.name for x in everything[:10]) or "nothing"
            raise ValueError(
                f"the folder {self.found} has no train{'|'.join(EXTENSIONS)}, found {names}; it must hold a file with "
                f"{self.layout} for each split."
            )
        check_inside(self.found, there)
        return there

    def _hub(self) -> Mapping[str, Any]:
        if self._sets is None:
            assert isinstance(self.place, str)
            self._sets = hub(self.place)
        return self._sets

    def _split(self, split: str) -> Rows:
        if isinstance(self.place, str):
            sets = {name: lambda x=x: self._of_hub(x) for name, x in self._hub().items()}
        elif self.found.is_dir():
            files = self.files()
            one_each(self.found, files, self.known)
            sets = {x.stem: lambda x=x: self._of_file(x) for x in files}
        else:
            return self._divided(self._of_file(self.found), split, SPLITS)
        for lacking in set(self.names.values()).difference(sets):
            raise ValueError(f"{self.place} has no {lacking!r}, found {', '.join(sorted(sets))}; name another split.")
        named = {s: next((x for x in names if x in sets), None) for s, names in self.known.items()}
        if named["validation"] is None and split != "test" and named["train"] is not None:
            return self._divided(sets[named["train"]](), split, ("train", "validation"))
        name = named[split]
        if name is None:
            raise ValueError(
                f"{self.place} has no {split} split, found {', '.join(sorted(sets))}; add one, or evaluate another."
            )
        return self._full(sets[name](), split)

    def _divided(self, rows: Rows, split: str, among: Sequence[str]) -> Rows:
        """A part of rows that have no splits of their own; the other parts are kept too, as all have been read."""
        count = _count(rows)
        chosen = divide(count, {name: x if name in among else 0.0 for name, x in self.shares.items()}, self.seed)
        for name in among:
            part = {column: [values[i] for i in chosen[name]] for column, values in rows.items()}
            if name == split:
                wanted = self._full(part, split, count)
            elif len(chosen[name]):
                self._read[name] = part
        return wanted

    def _full(self, rows: Rows, split: str, of: int = 0) -> Rows:
        """The rows, if there are any."""
        if not _count(rows):
            share = f", or give a larger {split}_share than {self.shares[split]}" if of and split != "train" else ""
            said = "".join(f" ({x})" for x in self.remarks)
            raise ValueError(
                f"the {split} split of {self.place} is empty: {of} good rows in all{said}; add rows{share}."
            )
        return rows

    def _of_file(self, path: Path) -> Rows:
        return self._good(read_file_rows(path), path)

    def _of_hub(self, found: Any) -> Rows:
        lacking = [x for x in self.fields if x not in found.column_names]
        if lacking:
            raise wrong_columns(self.place, lacking, found.column_names, self.layout)
        rows = found.select_columns(list(self.fields))  # what is not read is not decoded
        return self._good(((f"row {i}", row) for i, row in enumerate(rows)), self.place)

    def _good(self, rows: Iterator[tuple[str, Row | str]], where: object) -> Rows:
        """Columns of the rows that pass the checks."""
        sieve = Sieve(where, self.skip_bad)
        columns: Rows = {name: [] for name in self.fields}
        fields = list(self.fields.items())
        for index, (place, row) in enumerate(rows):
            if isinstance(row, str):
                sieve.bad(place, row)
                continue
            lacking = [name for name in self.fields if name not in row]
            if lacking and not index:  # the first row: not a bad row, but another kind of file
                raise wrong_columns(where, lacking, row, self.layout)
            if lacking:
                sieve.bad(place, f"it has no {', '.join(lacking)}, found {said_names(row)}")
                continue
            name = ""
            try:
                values = []
                for name, check in fields:
                    values.append(check(row[name]))
            except ValueError as problem:
                sieve.bad(place, f"{name} {problem}")
                continue
            for (name, _), value in zip(fields, values, strict=True):
                columns[name].append(value)
        self.remarks += [x for x in sieve.remarks(_count(columns)) if x not in self.remarks]
        return columns


def _count(rows: Rows) -> int:
    return len(next(iter(rows.values())))


def one_each(folder: Path, found: Sequence[Path], known: Mapping[str, Sequence[str]] = ALIASES) -> None:
    """Refuse two files or folders for one split, also by two of its names."""
    for names in known.values():
        same = [x.name for x in found if x.stem in names]
        if len(same) > 1:
            raise ValueError(f"the folder {folder} has {' and '.join(same)}; keep one file for each split.")


def wrong_columns(where: object, lacking: Sequence[str], found: Iterable[object], layout: str) -> ValueError:
    """Columns that do not fit, with those that are there."""
    found = list(found)
    return ValueError(
        f"{where} has no column {' and no '.join(map(repr, lacking))}, found {said_names(found)}"
        f"{separator_hint(found)}; a row must have {layout}, and the task's options name the columns."
    )


def missing_data(layout: str) -> ValueError:
    """No place was given."""
    return ValueError(
        f"this task needs data, got None; give the path of a folder or file with {layout}, or hub:NAME, by --data."
    )


def find_place(data: str | os.PathLike[str] | None, layout: str) -> Path | str | None:
    """A path that exists, or ``hub:NAME``, or None as it is."""
    if data is None:
        return None
    text = os.fspath(data)
    if text.startswith(HUB):
        if not _HUB_NAME.fullmatch(text.removeprefix(HUB)) and not Path(text.removeprefix(HUB)).exists():
            raise ValueError(f"a data set of the hub is said as hub:OWNER/NAME or hub:OWNER/NAME:SUBSET, got {text!r}.")
        return text
    hint = f"; a data set of the Hugging Face hub is said as {HUB}{text}" if _HUB_NAME.fullmatch(text) else ""
    return existing(Path(text).expanduser(), f"one with {layout}", hint)


def hub(place: str) -> Mapping[str, Any]:
    """Splits of a data set of the Hugging Face hub, or of a local folder in its layout; no code of others is run."""
    from datasets import load_dataset  # takes a second, and only the hub needs it

    name = place.removeprefix(HUB)
    path, _, configuration = (name, "", "") if Path(name).exists() else name.partition(":")
    try:
        found: Mapping[str, Any] = load_dataset(path, configuration or None)
    except Exception as problem:  # of the network, of the hub, of a builder: all kinds
        first = (str(problem).strip().splitlines() or [type(problem).__name__])[0]
        raise ValueError(
            f"{place} cannot be read by datasets: {first.rstrip('.')}; check the name and the network, or give local "
            f"files."
        ) from None
    return found


def check_shares(validation: float, test: float) -> dict[str, float]:
    """Shares of what has no splits of its own."""
    shares = {"validation": number("validation_share", validation, at_least=0)}
    shares["test"] = number("test_share", test, at_least=0)
    if sum(shares.values()) >= 1:
        raise ValueError(
            f"validation_share and test_share must leave something to train on, got {validation} and {test}."
        )
    return shares


def divide(count: int, shares: Mapping[str, float], seed: int) -> dict[str, NDArray[np.int64]]:
    """Numbers of the rows of each split: row i goes where a hash of (seed, i) points."""
    place = spread(np.arange(count), seed)
    test = place < shares["test"]
    validation = ~test & (place < shares["test"] + shares["validation"])
    found = {"train": ~test & ~validation, "validation": validation, "test": test}
    return {name: np.flatnonzero(x) for name, x in found.items()}


def mixed(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A bijection of 64 bits whose outputs for consecutive inputs look independent (splitmix64)."""
    x = (x + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def spread(indices: NDArray[np.int64], seed: int) -> NDArray[np.float64]:
    """Numbers in [0, 1) that are a function of (seed, index) and look independent."""
    bits = mixed(mixed(np.array([seed], np.uint64)) + indices.astype(np.uint64)) >> np.uint64(11)
    numbers: NDArray[np.float64] = bits.astype(np.float64) * 2.0**-53
    return numbers
