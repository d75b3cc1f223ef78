"""Files that are whole or not there: a process may be killed at any moment, and a disk may be full."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import stat
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kernelformer.limits import environment_variable, limit

_KINDS = {
    stat.S_IFIFO: "a named pipe (FIFO)",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}
FULL = (errno.ENOSPC, errno.EDQUOT)  # no room on the disk, or none in one's share of it
PART = ".partial"  # how the names of unfinished files end


@contextmanager
def naming_full_disk(path: Path) -> Iterator[None]:
    """Context in which a writer that finds no room raises an OSError that says so, and where, whatever it says itself.

    safetensors has an error of its own, and of what torch says no one word is of the disk; so it counts only where
    nothing is left there.
    """
    try:
        yield
    except Exception as problem:
        said, place = str(problem), path
        while not os.path.exists(place):
            place = place.parent
        by_torch = any(x in said for x in ("inline_container", "PytorchStreamWriter", "iostream error"))
        by_system = getattr(problem, "errno", None) in FULL or any(f"(os error {x})" in said for x in FULL)
        if by_system or (by_torch and shutil.disk_usage(place).free < 1 << 20):
            raise OSError(errno.ENOSPC, "the disk is full", str(path)) from None
        raise


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path to write to; if the block ends well, what is there gets the name ``path``, at once.

    A reader sees the old file or the new one, never a half; two writers at once do no harm.
    """
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex}{PART}")
    try:
        with naming_full_disk(path):
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


def check_inside(folder: Path, paths: Iterable[Path]) -> None:
    """Raise for the first file or folder that a link leads out of a folder, unless that was allowed.

    The hub's cache keeps a model as links (``snapshots/*``) to files beside them (``blobs``): these belong to it.

    Args:
        folder: that was given; it may be a link itself.
        paths: in it.
    """
    if limit("follow_links"):
        return
    root = os.path.realpath(folder)
    cache = os.path.dirname(os.path.dirname(root))
    roots = [root, os.path.join(cache, "blobs")] if root.startswith(os.path.join(cache, "snapshots", "")) else [root]
    parents: dict[str, str] = {}
    for path in paths:
        above, name = os.path.split(path)
        if above not in parents:
            parents[above] = os.path.realpath(above)
        real = os.path.realpath(path) if os.path.islink(path) else os.path.join(parents[above], name)
        if all(os.path.commonpath([x, real]) != x for x in roots):
            raise ValueError(
                f"{path} leads out of {folder}, by a link to {real}; copy what is there, or if you trust the folder "
                f"follow its links by kernelformer --follow-links COMMAND, or in the environment: "
                f"{environment_variable('follow_links')}=1."
            )


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
