"""Files and folders of data, and the rows of .jsonl, .csv and .tsv files."""

from __future__ import annotations

import csv
import os
import re
import stat
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

from kernelformer.conversion.readers import Row, json_rows, not_utf8, read_lines, unreadable
from kernelformer.files import check_inside, check_regular

EXTENSIONS = (".jsonl", ".csv", ".tsv")
LONGEST = 2**31 - 1  # characters of a value in a table


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


def read_file_rows(path: Path) -> Iterator[tuple[str, Row | str]]:
    """Rows of a ``.jsonl``, ``.csv`` or ``.tsv`` file with their positions; a bad one comes as the reason why it is."""
    if path.suffix not in EXTENSIONS:
        raise ValueError(f"{path} must end in {', '.join(EXTENSIONS)}, got {path.suffix or 'nothing'!r}.")
    if path.suffix == ".jsonl":
        return json_rows(path)
    return _table_rows(path, _csv_values(path) if path.suffix == ".csv" else _tsv_values(path))


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


def existing(path: Path, layout: str, hint: str = "", option: str = "data") -> Path:
    """The path of a folder or of a regular file.

    Args:
        layout: what should be there, for the message.

    Raises:
        ValueError: nothing is there, or what is neither.
    """
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as problem:  # ValueError: a zero byte in the name
        why = "" if isinstance(problem, FileNotFoundError) else f" ({getattr(problem, 'strerror', None) or problem})"
        text = str(path)
        named = text if len(text) <= 200 else f"{text[:100]}... of {len(text):,} characters"
        raise ValueError(f"there is no file or folder {named}{why}; {option} must be {layout}{hint}.") from None
    return path if stat.S_ISDIR(mode) else check_regular(path)


def walk(folder: Path, root: Path) -> Iterator[tuple[Path, list[str]]]:
    """Folders within a folder, itself first, with the names of their files; links that lead back up are not followed.

    Args:
        folder: where to begin; what is hidden is not seen.
        root: of all data, which links may not leave; see `check_inside`.
    """
    above = {os.fspath(folder): frozenset([os.path.realpath(folder)])}
    for where, folders, files in os.walk(folder, followlinks=True):
        seen = above.pop(where)
        inner = [x for x in folders if not x.startswith(".")]
        check_inside(root, [Path(where, x) for x in inner])
        folders.clear()
        for name in inner:
            path = os.path.join(where, name)
            real = os.path.realpath(path)
            if real not in seen:
                above[path] = seen | {real}
                folders.append(name)
        yield Path(where), [x for x in files if not x.startswith(".")]
