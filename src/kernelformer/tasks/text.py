"""Texts from plain files: one a line in ``.txt``, or a field of each line in ``.jsonl``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path


def read_texts(path: Path, field: str = "text") -> Iterator[str]:
    """The texts of a file, one after the other; empty lines are skipped.

    Args:
        path: ``.jsonl`` with ``field`` in each line, or any other text file, one text a line; UTF-8.
        field: of a ``.jsonl`` file.
    """
    if not path.is_file():
        raise ValueError(f"there is no file {path}; give a .jsonl file with {field!r} in each line, or a .txt file.")
    with path.open(encoding="utf-8") as lines:
        try:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _parsed(path, number, line, field) if path.suffix == ".jsonl" else line.rstrip("\n")
        except UnicodeDecodeError as problem:
            raise ValueError(f"{path} is not UTF-8 text: {problem.reason} at byte {problem.start}.") from None


def _parsed(path: Path, number: int, line: str, field: str) -> str:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as problem:
        raise ValueError(f"{path}, line {number}: not JSON ({problem.msg}).") from None
    if not isinstance(row, dict) or not isinstance(row.get(field), str):
        found = sorted(row) if isinstance(row, dict) else type(row).__name__
        raise ValueError(f"{path}, line {number}: no text in field {field!r}, found {found}.")
    text: str = row[field]
    return text
