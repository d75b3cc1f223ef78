"""Rows of plain local files and of Hugging Face data sets, each row checked before anything is made of it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from kernelformer.data.bad_rows import BadRows
from kernelformer.data.local_files import check_inside, existing
from kernelformer.data.readers import (
    EXTENSIONS,
    Row,
    hash_files,
    read_file_rows,
    separator_hint,
    short_names,
    unreadable,
)
from kernelformer.data.splits import ALIASES, SPLITS, check_one_per_split, check_shares, divide
from kernelformer.data.values import Check
from kernelformer.errors import choice, flag, integer

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
