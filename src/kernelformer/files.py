"""Files that are whole or not there: a process may be killed at any moment, and a disk may be full."""

from __future__ import annotations

import json
import math
import os
import stat
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_KINDS = {
    stat.S_IFIFO: "a named pipe (FIFO)",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}
PART = ".partial"  # how the names of unfinished files end


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path to write to; if the block ends well, what is there gets the name ``path``, at once.

    A reader sees the old file or the new one, never a half; two writers at once do no harm.
    """
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex}{PART}")
    try:
        yield part
        sync(part)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    sync(path.parent)


def write_text(path: Path, text: str) -> None:
    """Write all or nothing, as UTF-8 and without a change to line ends."""
    with replacing(path) as part:
        part.write_bytes(text.encode())


def write_json(path: Path, record: Mapping[str, Any]) -> None:
    """Write JSON to a file, all of it or nothing."""
    write_text(path, json_text(record))


def json_text(record: Mapping[str, Any]) -> str:
    """Return JSON text as `write_json` writes it."""
    return json.dumps(record, indent=2) + "\n"


def finite(value: Any) -> Any:
    """Plain values with None for what is no number: JSON has no word for it."""
    if isinstance(value, dict):
        return {name: finite(x) for name, x in value.items()}
    if isinstance(value, list | tuple):
        return [finite(x) for x in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def parse_json(content: bytes | str) -> Any:
    """A value of JSON in UTF-8.

    Raises:
        ValueError: not JSON, or brackets within brackets beyond what can be followed.
    """
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("its brackets are nested too deeply to be read") from None


def read_json(path: Path) -> Any:
    """The JSON of a file; see `parse_json`."""
    return parse_json(check_regular(path).read_bytes())


def check_regular(path: Path) -> Path:
    """The path, if it leads to a regular file: a pipe may never end, and a device never does.

    Raises:
        ValueError: it leads to something else, which is named; of a folder the system says it when it is opened.
        OSError: it leads nowhere.
    """
    mode = path.stat().st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        kind = _KINDS.get(stat.S_IFMT(mode), "something else")
        raise ValueError(f"{path} is {kind}, and data is read from regular files; copy its content into one.")
    return path


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
