"""Lines, rows and bytes of local files; what cannot be read says where and why."""

from __future__ import annotations

import csv
import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

from kernelformer.files import check_regular

EXTENSIONS = (".jsonl", ".csv", ".tsv")
LONGEST = 2**31 - 1  # characters of a value in a table

Row = dict[str, Any]


def brief(value: object) -> str:
    """A value for a message, shortened: a whole document would hide the rest."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:50]}... ({len(text):,} characters)"


def short_names(columns: Iterable[object]) -> str:
    """Names of columns for a message, long ones shortened; those of a table without a head line are whole texts."""
    return ", ".join(x if len(x) <= 40 else f"{x[:30]}..." for x in map(str, columns)) or "none"


def separator_hint(columns: Iterable[object]) -> str:
    """Hint for a table whose only column is several: another separator than its ending says."""
    names = list(map(str, columns))
    for sign, word in ((";", "semicolons"), ("\t", "tabs")):
        if len(names) == 1 and sign in names[0]:
            return f"; its values seem to be separated by {word}: write commas into a .csv, or tabs and call it .tsv"
    return ""


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
        return check_regular(path).read_bytes()
    except OSError as problem:
        unreadable(path, problem)


def unreadable(path: Path, problem: OSError) -> NoReturn:
    """Say why a file or folder cannot be read."""
    raise ValueError(f"{path} cannot be read: {problem.strerror}; give a readable file.") from None


def read_lines(path: Path, separator: str = "") -> Iterator[tuple[str, str | UnicodeDecodeError]]:
    """Lines of a text file with their positions, ``line 1`` and so on; blank ones are left out.

    A line that is not UTF-8 comes as the error that says so; `not_utf8` words it.

    Args:
        path: of the file.
        separator: a line that has it is not blank, also if it has nothing else.
    """
    try:
        with check_regular(path).open("rb") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    text: str | UnicodeDecodeError = line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
                except UnicodeDecodeError as problem:
                    text = problem
                if not isinstance(text, str) or text.strip() or (separator and separator in text):
                    yield f"line {number}", text
    except OSError as problem:
        unreadable(path, problem)


def not_utf8(problem: UnicodeDecodeError) -> str:
    """The reason why a text is not UTF-8."""
    return f"not UTF-8: {problem.reason} at byte {problem.start} of the line"


def read_file_rows(path: Path) -> Iterator[tuple[str, Row | str]]:
    """Rows of a ``.jsonl``, ``.csv`` or ``.tsv`` file with their positions; a bad one comes as the reason why it is."""
    if path.suffix not in EXTENSIONS:
        raise ValueError(f"{path} must end in {', '.join(EXTENSIONS)}, got {path.suffix or 'nothing'!r}.")
    if path.suffix == ".jsonl":
        return _json_rows(path)
    return _table_rows(path, _csv_values(path) if path.suffix == ".csv" else _tsv_values(path))


def _json_rows(path: Path) -> Iterator[tuple[str, Row | str]]:
    for position, line in read_lines(path):
        if not isinstance(line, str):
            yield position, not_utf8(line)
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as problem:
            reason = "too deep" if isinstance(problem, RecursionError) else getattr(problem, "msg", problem)
            yield position, f"not JSON ({reason})"
            continue
        yield position, row if isinstance(row, dict) else f"not an object but {type(row).__name__}"


def _table_rows(path: Path, lines: Iterator[tuple[str, list[str] | str]]) -> Iterator[tuple[str, Row | str]]:
    head: list[str] | None = None
    for position, values in lines:
        if head is None:
            if isinstance(values, str) or len(set(values)) < len(values):
                reason = values if isinstance(values, str) else f"two columns have one name: {short_names(values)}"
                raise ValueError(f"{path}, {position}: {reason}; the first line must name the columns.")
            head = values
        elif isinstance(values, str):
            yield position, values
        elif len(values) != len(head):
            yield position, f"it has {len(values)} values, the head line has {len(head)}{separator_hint(head)}"
        else:
            yield position, dict(zip(head, values, strict=True))


def _tsv_values(path: Path) -> Iterator[tuple[str, list[str] | str]]:
    """Values between tabs; quotes are as any other character, so a row is a line."""
    for position, line in read_lines(path, separator="\t"):
        yield position, line.split("\t") if isinstance(line, str) else not_utf8(line)


def _csv_values(path: Path) -> Iterator[tuple[str, list[str] | str]]:
    """Values of rows with the line where each begins: quoted ones may hold line ends."""
    csv.field_size_limit(LONGEST)  # of the whole process; by default a document of 131,073 characters is an error
    try:
        with check_regular(path).open(encoding="utf-8-sig", errors="surrogateescape", newline="") as lines:
            reader = csv.reader(lines, strict=True)
            while True:
                first = reader.line_num + 1
                position = f"line {first}"
                try:
                    values = next(reader)
                    "".join(values).encode()
                except StopIteration:
                    return
                except csv.Error as problem:
                    if "unexpected end of data" in str(problem):  # not one bad row: it has swallowed all others
                        raise ValueError(
                            f"{path}, line {_opened(path, first)}: the quote that opens here is never closed, so that "
                            f"no row after it can be told; close it, or quote the whole value, its own quotes twice."
                        ) from None
                    yield position, f"not a row of a table ({problem})"
                    continue
                except UnicodeEncodeError:
                    yield position, "not UTF-8"
                    continue
                if values:
                    yield position, values
    except OSError as problem:
        unreadable(path, problem)


def _opened(path: Path, first: int) -> int:
    """The line where the last value of a row that begins in line ``first``, and never ends, begins."""
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as lines:
        values = next(csv.reader(islice(lines, first - 1, None)))
    return first + sum(len(re.findall(r"\r\n|\r|\n", x)) for x in values[:-1])


def column_bytes(path: Path, column: str) -> bytes:
    """The texts in a column of a table, a line end after each.

    Args:
        path: ``.jsonl``, ``.csv`` or ``.tsv``.
        column: with a text in every row.
    """
    texts = []
    for position, row in read_file_rows(path):
        if isinstance(row, str):
            raise ValueError(f"{path}, {position}: {row}.")
        if not isinstance(row.get(column), str):
            value = f"has {brief(row[column])}" if column in row else "is not there"
            there = f"{short_names(row)}{separator_hint(row)}"
            raise ValueError(
                f"{path}, {position}: column {column!r} must be a text and {value}, found columns {there}."
            )
        texts.append(row[column] + "\n")
    return "".join(texts).encode()


def each_text(path: Path, field: str = "text") -> Iterator[str]:
    """Yield the texts of a file; blank lines are skipped.

    Args:
        path: ``.jsonl`` with ``field`` in each line, or any other text file, one text a line; UTF-8.
        field: of a ``.jsonl`` file.
    """
    if not path.is_file():
        raise ValueError(f"there is no file {path}; give a .jsonl file with {field!r} in each line, or a .txt file.")
    for position, row in _json_rows(path) if path.suffix == ".jsonl" else read_lines(path):
        if isinstance(row, UnicodeDecodeError):
            row = not_utf8(row)
        elif isinstance(row, str) and path.suffix != ".jsonl":
            yield row
            continue
        elif isinstance(row, dict) and isinstance(row.get(field), str):
            yield row[field]
            continue
        reason = row if isinstance(row, str) else f"no text in field {field!r}, found {sorted(row)}"
        raise ValueError(f"{path}, {position}: {reason}.")
