"""Rows of plain local files and of Hugging Face data sets, each row checked before anything is made of it."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from kernelformer.errors import choice, flag, integer, number
from kernelformer.tasks.base import SPLITS

HUB = "hub:"
EXTENSIONS = (".jsonl", ".csv", ".tsv")
# Names that splits have elsewhere; the first that is there counts.
ALIASES = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val", "validation_matched"),
    "test": ("test", "test_matched"),
}
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+)?")

Row = dict[str, Any]
Rows = dict[str, list[Any]]
Check = Callable[[object], Any]  # a value of a row, as it is to be used; ValueError says what is wrong with it


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


def text_value(value: object) -> str:
    """A text that is not empty."""
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"must be a text that is not empty, got {value!r}")
    return value


def label_value(labels: int | list[str]) -> Check:
    """A check for labels: integers from 0 to ``labels`` - 1, or one of these names; gives the integer."""
    names = labels if isinstance(labels, list) else []
    count = len(names) or integer("labels", labels, at_least=1)

    def check(value: object) -> int:
        if isinstance(value, str) and value in names:
            return names.index(value)
        found = int(value) if isinstance(value, str) and re.fullmatch(r"-?\d{1,9}", value) else value
        if isinstance(found, bool) or not isinstance(found, int) or not 0 <= found < count:
            known = f"one of {', '.join(names)} or " if names else ""
            raise ValueError(f"must be {known}an integer from 0 to {count - 1}, got {value!r}")
        return found

    return check


def number_value(value: object) -> float:
    """A finite number, also as text."""
    try:
        return number("it", float(value) if isinstance(value, str) else value)
    except ValueError:
        raise ValueError(f"must be a finite number, got {value!r}") from None


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
    ) -> None:
        self.fields, self.layout = dict(fields), layout
        self.skip_bad = flag("skip_bad", skip_bad)
        self.shares = check_shares(validation_share, test_share)
        self.seed = integer("seed", seed, at_least=0)
        self.place = find_place(data, layout)
        self.remarks: list[str] = []  # about what was read so far
        self._read: dict[str, Rows] = {}

    def rows(self, split: str) -> Rows:
        """The columns of a split, by name; read once."""
        choice("split", split, SPLITS)
        if split not in self._read:
            self._read[split] = self._split(split)
        return self._read[split]

    def fingerprint(self) -> str:
        """Names and hash of all files, or what ``datasets`` calls the same rows."""
        if isinstance(self.place, str):
            found = hub(self.place)
            return f"{self.place}: " + ", ".join(f"{k} {len(v)} {v._fingerprint}" for k, v in sorted(found.items()))
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
        stems = set(chain(*ALIASES.values()))
        there = sorted(x for x in self.found.iterdir() if x.suffix in EXTENSIONS and x.stem in stems)
        if not there:
            names = ", ".join(sorted(x.name for x in self.found.iterdir())[:10]) or "nothing"
            raise ValueError(
                f"the folder {self.found} has no train{'|'.join(EXTENSIONS)}, found {names}; it must hold a file with "
                f"{self.layout} for each split."
            )
        return there

    def _split(self, split: str) -> Rows:
        if isinstance(self.place, str):
            sets = {name: lambda x=x: self._of_hub(x) for name, x in hub(self.place).items()}
        elif self.found.is_dir():
            sets = {}
            for path in self.files():
                if path.stem in sets:
                    twice = ", ".join(x.name for x in self.files() if x.stem == path.stem)
                    raise ValueError(f"the folder {self.found} has {twice}; keep one file for each split.")
                sets[path.stem] = lambda path=path: self._of_file(path)
        else:
            rows = self._of_file(self.found)
            return self._taken(rows, split, divide(_count(rows), self.shares, self.seed)[split])
        named = {s: next((x for x in names if x in sets), None) for s, names in ALIASES.items()}
        if named["validation"] is None and split != "test":
            wanted = named["train"]
            if wanted is not None:
                rows = sets[wanted]()
                shares = {"validation": self.shares["validation"], "test": 0.0}
                return self._taken(rows, split, divide(_count(rows), shares, self.seed)[split])
        name = named[split]
        if name is None:
            raise ValueError(
                f"{self.place} has no {split} split, found {', '.join(sorted(sets))}; add one, or evaluate another."
            )
        rows = sets[name]()
        return self._taken(rows, split, np.arange(_count(rows)))

    def _taken(self, rows: Rows, split: str, chosen: NDArray[np.int64]) -> Rows:
        if not len(chosen):
            share = "" if split == "train" else f", or give a larger {split}_share than {self.shares[split]}"
            raise ValueError(
                f"the {split} split of {self.place} is empty: {_count(rows)} good rows in all; add rows{share}."
            )
        return {name: [column[i] for i in chosen] for name, column in rows.items()}

    def _of_file(self, path: Path) -> Rows:
        return self._good(read_file_rows(path), path)

    def _of_hub(self, found: Any) -> Rows:
        lacking = [x for x in self.fields if x not in found.column_names]
        if lacking:
            raise wrong_columns(self.place, lacking, found.column_names, self.layout)
        return self._good(((f"row {i}", row) for i, row in enumerate(found)), self.place)

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
                sieve.bad(place, f"it has no {', '.join(lacking)}, found {', '.join(map(str, row)) or 'nothing'}")
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


def wrong_columns(where: object, lacking: list[str], found: object, layout: str) -> ValueError:
    """Columns that do not fit, with those that are there."""
    there = ", ".join(map(str, found)) if isinstance(found, list | tuple | dict) else str(found)
    return ValueError(
        f"{where} has no column {' and no '.join(map(repr, lacking))}, found {there or 'none'}; a row must have "
        f"{layout}, and the task's options name the columns."
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
    path = Path(text).expanduser()
    if not path.exists():
        hint = f"; a data set of the Hugging Face hub is said as {HUB}{text}" if _HUB_NAME.fullmatch(text) else ""
        raise ValueError(f"there is no file or folder {path}; data must be one with {layout}{hint}.")
    return path


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


def hash_files(paths: list[Path]) -> str:
    """Names, sizes and a hash of all bytes; 0.2 seconds for 100 million."""
    digest, size = hashlib.blake2b(digest_size=16), 0
    for path in paths:
        content = read_bytes(path)
        size += len(content)
        digest.update(f"{path.name}\0{len(content)}\0".encode(errors="surrogateescape"))
        digest.update(content)
    names = ", ".join(x.name for x in paths[:3]) + (", ..." if len(paths) > 3 else "")
    return f"{names}: {len(paths)} files, {size} bytes, blake2b {digest.hexdigest()}"


def read_bytes(path: Path) -> bytes:
    """All of a file."""
    try:
        return path.read_bytes()
    except OSError as problem:
        _unreadable(path, problem)


def _unreadable(path: Path, problem: OSError) -> NoReturn:
    raise ValueError(f"{path} cannot be read: {problem.strerror}; give a readable file.") from None


def read_lines(path: Path) -> Iterator[tuple[str, str | UnicodeDecodeError]]:
    """Lines of a text file with their places, ``line 1`` and so on; blank ones are left out.

    A line that is not UTF-8 comes as the error that says so; `not_utf8` words it.
    """
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    text: str | UnicodeDecodeError = line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
                except UnicodeDecodeError as problem:
                    text = problem
                if not isinstance(text, str) or text.strip():
                    yield f"line {number}", text
    except OSError as problem:
        _unreadable(path, problem)


def not_utf8(problem: UnicodeDecodeError) -> str:
    """Why a text is not UTF-8."""
    return f"not UTF-8: {problem.reason} at byte {problem.start} of the line"


def read_file_rows(path: Path) -> Iterator[tuple[str, Row | str]]:
    """Rows of a ``.jsonl``, ``.csv`` or ``.tsv`` file with their places; a bad one comes as the reason why it is."""
    if path.suffix not in EXTENSIONS:
        raise ValueError(f"{path} must end in {', '.join(EXTENSIONS)}, got {path.suffix or 'nothing'!r}.")
    return _json_rows(path) if path.suffix == ".jsonl" else _table_rows(path, "," if path.suffix == ".csv" else "\t")


def _json_rows(path: Path) -> Iterator[tuple[str, Row | str]]:
    for place, line in read_lines(path):
        if not isinstance(line, str):
            yield place, not_utf8(line)
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as problem:
            yield place, f"not JSON ({getattr(problem, 'msg', 'too deep')})"
            continue
        yield place, row if isinstance(row, dict) else f"not an object but {type(row).__name__}"


def _table_rows(path: Path, separator: str) -> Iterator[tuple[str, Row | str]]:
    try:
        text = read_bytes(path).decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        line = problem.object[: problem.start].count(b"\n") + 1
        raise ValueError(f"{path}, line {line}: not UTF-8: {problem.reason}; save it as UTF-8.") from None
    reader = csv.reader(
        io.StringIO(text, newline=""),
        delimiter=separator,
        strict=separator == ",",
        quoting=csv.QUOTE_MINIMAL if separator == "," else csv.QUOTE_NONE,
    )
    head: list[str] | None = None
    while True:
        try:
            values = next(reader)
        except StopIteration:
            return
        except csv.Error as problem:
            yield f"line {reader.line_num}", f"not a row of a table ({problem})"
            continue
        if not any(values):
            continue
        if head is None:
            head = values
        elif len(values) != len(head):
            yield f"line {reader.line_num}", f"it has {len(values)} values, the head line has {len(head)}"
        else:
            yield f"line {reader.line_num}", dict(zip(head, values, strict=True))


def read_texts(path: Path, field: str = "text") -> Iterator[str]:
    """The texts of a file, one after the other; blank lines are skipped.

    Args:
        path: ``.jsonl`` with ``field`` in each line, or any other text file, one text a line; UTF-8.
        field: of a ``.jsonl`` file.
    """
    if not path.is_file():
        raise ValueError(f"there is no file {path}; give a .jsonl file with {field!r} in each line, or a .txt file.")
    for place, row in _json_rows(path) if path.suffix == ".jsonl" else read_lines(path):
        if isinstance(row, UnicodeDecodeError):
            row = not_utf8(row)
        elif isinstance(row, str) and path.suffix != ".jsonl":
            yield row
            continue
        elif isinstance(row, dict) and isinstance(row.get(field), str):
            yield row[field]
            continue
        reason = row if isinstance(row, str) else f"no text in field {field!r}, found {sorted(row)}"
        raise ValueError(f"{path}, {place}: {reason}.")
