"""Rows of plain local files and of Hugging Face data sets, each row checked before anything is made of it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernelformer.conversion.readers import Row, hash_files, unreadable
from kernelformer.errors import choice, flag, integer, number
from kernelformer.files import check_inside
from kernelformer_lab.data.files import EXTENSIONS, brief, existing, read_file_rows, separator_hint, short_names

SPLITS = ("train", "validation", "test")
# Names that splits have elsewhere; the first that is there counts.
ALIASES = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val", "validation_matched"),
    "test": ("test", "test_matched"),
}


def check_one_per_split(folder: Path, paths: Sequence[Path], known: Mapping[str, Sequence[str]] = ALIASES) -> None:
    """Refuse two files or folders for one split, also by two of its names."""
    for names in known.values():
        same = [path.name for path in paths if path.stem in names]
        if len(same) > 1:
            raise ValueError(f"the folder {folder} has {' and '.join(same)}; keep one file for each split.")


def check_shares(validation: float, test: float) -> dict[str, float]:
    """Check the shares of data that has no splits of its own, and give them by split."""
    shares = {"validation": number("validation_share", validation, at_least=0)}
    shares["test"] = number("test_share", test, at_least=0)
    if sum(shares.values()) >= 1:
        raise ValueError(
            f"validation_share and test_share must leave something to train on, got {validation} and {test}."
        )
    return shares


def divide(count: int, shares: Mapping[str, float], seed: int) -> dict[str, NDArray[np.int64]]:
    """Divide rows among the splits: row i goes where a hash of (seed, i) points.

    Args:
        shares: of "validation" and "test"; training has the rest.

    Returns:
        Split -> numbers of its rows, in order.
    """
    hashed = uniform(np.arange(count), seed)
    test = hashed < shares["test"]
    validation = ~test & (hashed < shares["test"] + shares["validation"])
    masks = {"train": ~test & ~validation, "validation": validation, "test": test}
    return {split: np.flatnonzero(mask) for split, mask in masks.items()}


def split_of(index: int, shares: Mapping[str, float], seed: int) -> str:
    """The split to which `divide` takes one row, for callers that do not know the number of rows yet."""
    hashed = uniform(np.array([index]), seed)[0]
    if hashed < shares["test"]:
        return "test"
    return "validation" if hashed < shares["test"] + shares["validation"] else "train"


def mix_bits(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Map 64 bits one to one, so that the outputs for consecutive inputs look independent (splitmix64)."""
    x = (x + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def uniform(indices: NDArray[np.int64], seed: int) -> NDArray[np.float64]:
    """Numbers in [0, 1) that are a function of (seed, index) and look independent, in the shape of the indices."""
    bits = mix_bits(mix_bits(np.array([seed], np.uint64)) + indices.astype(np.uint64)) >> np.uint64(11)
    numbers: NDArray[np.float64] = bits.astype(np.float64) * 2.0**-53
    return numbers


_NUMERAL = re.compile(r"-?\d{1,9}(\.0*)?")  # an integer as tables write it

Check = Callable[[object], Any]  # a value of a row, as it is to be used; ValueError says what is wrong with it


def text_value(value: object) -> str:
    """Check for a text that is not empty and can be written as UTF-8."""
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"must be a text that is not empty, got {brief(value)}")
    try:
        value.encode()
    except UnicodeEncodeError as problem:  # JSON can name half of a character, as \ud83d
        raise ValueError(
            f"is not UTF-8: {value[problem.start]!r} at character {problem.start} is half of one"
        ) from None
    return value


def optional_text(value: object) -> str:
    """Check for a text; one of blanks alone becomes empty."""
    return "" if isinstance(value, str) and not value.strip() else text_value(value)


def label_names(labels: int | Sequence[str], at_least: int = 1) -> tuple[int, list[str]]:
    """Number of labels, and their names if they have some."""
    if isinstance(labels, str) or not isinstance(labels, Sequence):
        return integer("labels", labels, at_least=at_least), []
    names = list(labels)
    if not all(isinstance(x, str) and x for x in names) or len(set(names)) < max(len(names), at_least):
        raise ValueError(f"labels must be a number or at least {at_least} different names, got {labels!r}.")
    return len(names), names


def label_value(labels: int | Sequence[str]) -> Check:
    """Make a check for labels: one of these names, or an integer from 0 to their number - 1; gives the integer.

    A number may also be a text, as all values of tables are, or a float without a fraction. Where a name looks like a
    number, all labels are names: with ``["1", "2"]`` the label 1 is the first, 2 the second, and 0 is wrong.
    """
    count, names = label_names(labels)
    numerals = any(_NUMERAL.fullmatch(x) for x in names)
    numbers = f"an integer from 0 to {count - 1}"
    wanted = " or ".join(([f"one of {', '.join(names)}"] if names else []) + ([] if numerals else [numbers]))

    def check(value: object) -> int:
        label = float(value) if isinstance(value, str) and _NUMERAL.fullmatch(value) else value
        if isinstance(label, float) and label.is_integer():
            label = int(label)
        for name in (value, label):
            if isinstance(name, str | int) and str(name) in names:
                return names.index(str(name))
        if numerals or isinstance(label, bool) or not isinstance(label, int) or not 0 <= label < count:
            raise ValueError(f"must be {wanted}, got {brief(value)}")
        return label

    return check


def number_value(value: object) -> float:
    """Check for a finite number, also as text."""
    try:
        return number("it", float(value) if isinstance(value, str) else value)
    except ValueError:
        raise ValueError(f"must be a finite number, got {brief(value)}") from None


class BadRows:
    """Handler of bad rows of one file or data set.

    Args:
        where: file or data set, for the message.
        skip: leave them out instead of raising at the first.
    """

    def __init__(self, where: object, skip: bool) -> None:
        self.where, self.skip = str(where), flag("skip_bad", skip)
        self.count, self.first = 0, ""

    def add(self, position: str, reason: str) -> None:
        """Count a bad row at a position, such as ``line 7``, or raise."""
        if not self.skip:
            raise ValueError(
                f"{self.where}, {position}: {reason.rstrip('.')}; mend it, or leave bad rows out by --skip-bad "
                f"(skip_bad=True)."
            )
        self.first = self.first or f"{position}: {reason}"
        self.count += 1

    def remarks(self, good: int) -> list[str]:
        """One sentence on the rows that were left out beside so many good ones; empty if there are none."""
        if not self.count:
            return []
        rows = f"{self.count:,} of {self.count + good:,} rows"
        return [f"left out {rows} of {self.where} as bad; the first: {self.first}"]


HUB = "hub:"
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+)?")

Rows = dict[str, list[Any]]


class Source:
    """Rows by split, from one of these locations.

    - A folder with ``train``, ``validation`` (or ``valid``, ``dev``) and ``test``, each ``.jsonl`` (an object a line),
      ``.csv`` or ``.tsv`` (with a head line); UTF-8, blank lines are skipped.
    - One such file, which is divided by the shares.
    - ``hub:NAME`` or ``hub:NAME:CONFIGURATION``: a data set of the Hugging Face hub, read by ``datasets``; none that
      would run code of its own.

    Where there is no validation split, a share of the training rows is one; which ones depends on the seed and on the
    number of the row alone, so that rows which are added later move none of the others.

    Args:
        data: the location; None is refused when rows are read, not before.
        fields: name of a column -> check of its values.
        layout: what the task wants to see in a row, for messages: ``"text" and "label"``.
        skip_bad: leave bad rows out, and say how many, instead of raising at the first.
        validation_share: of the training rows, or of the rows of one file.
        test_share: of the rows of one file.
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
        self.location = find_location(data, layout)
        for split, name in self.names.items():
            if isinstance(self.location, Path) and not self.location.is_dir():
                raise ValueError(
                    f"{split}_split is a split of a folder or data set, got {name!r} and the file {self.location}; "
                    f"leave it out."
                )
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
        """The columns of a split, for a caller who keeps them: here they are forgotten, not kept twice."""
        rows = self.rows(split)
        del self._read[split]
        return rows

    def fingerprint(self) -> str:
        """Names and hash of all files, or what ``datasets`` calls the same rows."""
        if isinstance(self.location, str):
            sets = sorted(self._hub().items())
            return f"{self.location}: " + ", ".join(f"{name} {len(x)} {x._fingerprint}" for name, x in sets)
        return hash_files(self.files() if self.path.is_dir() else [self.path])

    @property
    def path(self) -> Path:
        """The folder or file."""
        if self.location is None:
            raise missing_data(self.layout)
        assert isinstance(self.location, Path)
        return self.location

    def files(self) -> list[Path]:
        """All files of a folder that are a split."""
        try:
            everything = sorted(self.path.iterdir())
        except OSError as problem:
            unreadable(self.path, problem)
        stems = set(chain(*self.known.values()))
        there = [x for x in everything if x.suffix in EXTENSIONS and x.stem in stems]
        if not there:
            names = ", ".join(x.name for x in everything[:10]) or "nothing"
            raise ValueError(
                f"the folder {self.path} has no train{'|'.join(EXTENSIONS)}, found {names}; it must hold a file with "
                f"{self.layout} for each split."
            )
        check_inside(self.path, there)
        return there

    def _hub(self) -> Mapping[str, Any]:
        if self._sets is None:
            assert isinstance(self.location, str)
            self._sets = hub(self.location)
        return self._sets

    def _split(self, split: str) -> Rows:
        if isinstance(self.location, str):
            readers: dict[str, Callable[[], Rows]] = {x: partial(self._of_hub, y) for x, y in self._hub().items()}
        elif self.path.is_dir():
            files = self.files()
            check_one_per_split(self.path, files, self.known)
            readers = {x.stem: partial(self._of_file, x) for x in files}
        else:
            return self._divided(self._of_file(self.path), split, SPLITS)
        for lacking in set(self.names.values()).difference(readers):
            there = ", ".join(sorted(readers))
            raise ValueError(f"{self.location} has no {lacking!r}, found {there}; name another split.")
        named = {s: next((x for x in names if x in readers), None) for s, names in self.known.items()}
        if named["validation"] is None and split != "test" and named["train"] is not None:
            return self._divided(readers[named["train"]](), split, ("train", "validation"))
        name = named[split]
        if name is None:
            there = ", ".join(sorted(readers))
            raise ValueError(f"{self.location} has no {split} split, found {there}; add one, or evaluate another.")
        return self._full(readers[name](), split)

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
            remarks = "".join(f" ({x})" for x in self.remarks)
            raise ValueError(
                f"the {split} split of {self.location} is empty: {of} good rows in all{remarks}; add rows{share}."
            )
        return rows

    def _of_file(self, path: Path) -> Rows:
        return self._good(read_file_rows(path), path)

    def _of_hub(self, dataset: Any) -> Rows:
        lacking = [x for x in self.fields if x not in dataset.column_names]
        if lacking:
            raise wrong_columns(self.location, lacking, dataset.column_names, self.layout)
        rows = dataset.select_columns(list(self.fields))  # what is not read is not decoded
        return self._good(((f"row {i}", row) for i, row in enumerate(rows)), self.location)

    def _good(self, rows: Iterator[tuple[str, Row | str]], where: object) -> Rows:
        """Columns of the rows that pass the checks."""
        bad = BadRows(where, self.skip_bad)
        columns: Rows = {name: [] for name in self.fields}
        fields = list(self.fields.items())
        for index, (position, row) in enumerate(rows):
            if isinstance(row, str):
                bad.add(position, row)
                continue
            lacking = [name for name in self.fields if name not in row]
            if lacking and not index:  # the first row: not a bad row, but another kind of file
                raise wrong_columns(where, lacking, row, self.layout)
            if lacking:
                bad.add(position, f"it has no {', '.join(lacking)}, found {short_names(row)}")
                continue
            name = ""
            try:
                values = []
                for name, check in fields:
                    values.append(check(row[name]))
            except ValueError as problem:
                bad.add(position, f"{name} {problem}")
                continue
            for (name, _), value in zip(fields, values, strict=True):
                columns[name].append(value)
        self.remarks += [x for x in bad.remarks(_count(columns)) if x not in self.remarks]
        return columns


def _count(rows: Rows) -> int:
    return len(next(iter(rows.values())))


def wrong_columns(where: object, lacking: Sequence[str], columns: Iterable[object], layout: str) -> ValueError:
    """The error for columns that do not fit, with those that are there."""
    there = list(columns)
    return ValueError(
        f"{where} has no column {' and no '.join(map(repr, lacking))}, found {short_names(there)}"
        f"{separator_hint(there)}; a row must have {layout}, and the task's options name the columns."
    )


def missing_data(layout: str) -> ValueError:
    """The error for a task that was given no data."""
    return ValueError(
        f"this task needs data, got None; give the path of a folder or file with {layout}, or hub:NAME, by --data."
    )


def find_location(data: str | os.PathLike[str] | None, layout: str) -> Path | str | None:
    """The location that the option ``data`` means: a path that exists, or ``hub:NAME``, or None as it is."""
    if data is None:
        return None
    text = os.fspath(data)
    if text.startswith(HUB):
        if not _HUB_NAME.fullmatch(text.removeprefix(HUB)) and not Path(text.removeprefix(HUB)).exists():
            raise ValueError(f"a data set of the hub is said as hub:OWNER/NAME or hub:OWNER/NAME:SUBSET, got {text!r}.")
        return text
    hint = f"; a data set of the Hugging Face hub is said as {HUB}{text}" if _HUB_NAME.fullmatch(text) else ""
    return existing(Path(text).expanduser(), f"one with {layout}", hint)


def hub(location: str) -> Mapping[str, Any]:
    """Splits of a data set of the Hugging Face hub, or of a local folder in its layout; no code of others is run."""
    from datasets import load_dataset  # takes a second, and only the hub needs it

    name = location.removeprefix(HUB)
    path, _, configuration = (name, "", "") if Path(name).exists() else name.partition(":")
    try:
        splits: Mapping[str, Any] = load_dataset(path, configuration or None)
    except Exception as problem:  # of the network, of the hub, of a builder: all kinds
        first = (str(problem).strip().splitlines() or [type(problem).__name__])[0]
        raise ValueError(
            f"{location} cannot be read by datasets: {first.rstrip('.')}; check the name and the network, or give "
            f"local files."
        ) from None
    return splits
