"""Read and write files safely: checks before reading, bounds, hashes, complete files only."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import shutil
import stat
import uuid
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kernelformer.errors import choice, integer

LIMITS = {
    "max_layers": 1_000,  # blocks of a saved configuration
    "max_labels": 1_000_000,  # classes of a saved configuration, each of which gets a name
    "max_tensors": 100_000,  # of saved weights
    "max_unpacked_bytes": 1 << 34,  # of an array in an archive
    "max_attention_characters": 2_000,  # of one attention
    "follow_links": 0,  # 1: links may lead out of a folder of data or of a model
    "allow_hub": 0,  # 1: a local folder may name parts of a model that are on the hub
}
_given: dict[str, int] = {}  # bounds that were set in this process, not inherited
_LAYERS = re.compile(r"(^|_)(layers?|depths?|blocks?)$")


def limit(name: str) -> int:
    """The bound of this name, as the environment has it, or its default."""
    variable = environment_variable(name)
    value = os.environ.get(variable, "").strip()
    if not value:
        return LIMITS[name]
    if not re.fullmatch(r"\d{1,18}", value):
        raise ValueError(f"{variable} must be an integer of at least 0, got {value!r:.40}.")
    return int(value)


def set_limit(name: str, value: int) -> None:
    """Raise or lower a bound, for this process and those that it starts."""
    os.environ[environment_variable(name)] = str(integer(name, value, at_least=0))
    _given[name] = value


def given_options() -> list[str]:
    """The options of the command that set bounds in this process: what is typed later needs them too."""
    plain = {name: x for name, x in _given.items() if (name, x) != ("follow_links", 1)}
    return [*(f"--limit {name}={x}" for name, x in plain.items()), *["--follow-links"] * (len(plain) < len(_given))]


def raise_by(name: str, value: int) -> str:
    """The command-line option that raises a bound, for messages."""
    here = f"{environment_variable(name)}={value}"
    return f"raise it by kernelformer --limit {name}={value} COMMAND, or in the environment: {here}"


def check_limit(name: str, value: int, what: str) -> None:
    """Raise if a value is above its bound; ``what`` says of what it is, such as ``a.json has 5000 layers``."""
    bound = limit(name)
    if value > bound:
        raise ValueError(f"{what}, the limit {name} is {bound:,}; if you trust it, {raise_by(name, value)}.")


def check_counts(where: object, settings: Mapping[str, Any]) -> None:
    """Raise for a configuration, by its names and values, with more blocks or classes than the bound; parts of it too.

    Their cost is known before weights are looked at: a module for each block, a name for each class.
    """
    for name, value in settings.items():
        if isinstance(value, Mapping):
            check_counts(where, value)
        elif name == "num_labels" and isinstance(value, int):
            check_limit("max_labels", value, f"{where} asks for num_labels={value:,}")
        elif _LAYERS.search(str(name)):
            for count in value if isinstance(value, Iterable) and not isinstance(value, str) else [value]:
                if isinstance(count, int):
                    check_limit("max_layers", count, f"{where} asks for {name}={count:,}")


def environment_variable(name: str) -> str:
    """The variable of the environment that sets a bound."""
    return f"KERNELFORMER_{choice('limit', name, LIMITS).upper()}"


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
    """A value of JSON in UTF-8; a ValueError where it is none, or its brackets are nested too deeply."""
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("its brackets are nested too deeply to be read") from None


def read_json(path: Path) -> Any:
    """The JSON of a file; see `parse_json`."""
    return parse_json(check_regular(path).read_bytes())


def check_regular(path: Path) -> Path:
    """The path, if it leads to a regular file: a pipe may never end, and a device never does. Folders pass."""
    mode = path.stat().st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        kind = _KINDS.get(stat.S_IFMT(mode), "something else")
        raise ValueError(f"{path} is {kind}, and data is read from regular files; copy its content into one.")
    return path


def check_inside(folder: Path, paths: Iterable[Path]) -> None:
    """Raise for the first file or folder that a link leads out of a folder, unless that was allowed.

    The hub's cache keeps a model as links (``snapshots/*``) to files beside them (``blobs``): these belong to it.
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


HASHES = "hashes.json"
NAME = "blake2b"
WEIGHTS = ("model*.safetensors", "model.safetensors.index.json", "config.json", "generation_config.json")


class HashError(ValueError):
    """A file that is not what was saved under its name."""


def hash_file(path: Path) -> str:
    """Hash of all bytes of a file, which is read in blocks; 0.2 seconds for 100 million."""
    digest = hashlib.blake2b(digest_size=16)
    with check_regular(path).open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def write_hashes(folder: Path, patterns: Iterable[str] = ("*",), coming: Mapping[str, bytes] | None = None) -> None:
    """Write the hashes of a folder's files, and of contents that will come by name, into ``hashes.json`` in it."""
    files = {path.name: path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}
    names = sorted(name for name in files if name != HASHES and not name.startswith("."))
    hashes = {name: hash_file(files[name]) for name in names}
    hashes |= {name: hashlib.blake2b(x, digest_size=16).hexdigest() for name, x in (coming or {}).items()}
    write_json(folder / HASHES, {NAME: hashes})


def read_hashes(folder: Path) -> dict[str, str]:
    """Hashes of a folder by the names of its files; none where there is no ``hashes.json``."""
    path = folder / HASHES
    if not path.is_file():
        return {}
    try:
        record: Any = read_json(path)
        hashes = record[NAME] if isinstance(record, dict) else None
        if not isinstance(hashes, dict) or not all(isinstance(x, str) and Path(x).name == x for x in hashes):
            raise ValueError(f"it has no {NAME} hashes by the names of files")
    except (KeyError, OSError, ValueError) as problem:
        raise HashError(f"{path} cannot be read: {problem}; {_way_out(folder)}.") from None
    return {name: str(x) for name, x in hashes.items()}


def check_hash(path: Path, expected: str) -> None:
    """Raise `HashError` if a file has another hash, without its name; one that is missing is an `OSError`."""
    actual = hash_file(path)
    if actual != expected:
        raise HashError(f"its {NAME} hash is {actual}, it was saved with {expected}")


def check_hashes(folder: Path) -> None:
    """Raise `HashError` for the first file of a folder that is not what was saved; one that is gone is not looked at.

    The loader reports missing files.
    """
    for name, expected in read_hashes(folder).items():
        path = folder / name
        if path.is_file():
            try:
                check_hash(path, expected)
            except HashError as problem:
                raise HashError(f"{path} has changed since it was saved: {problem}; {_way_out(folder)}.") from None


def _way_out(folder: Path) -> str:
    return f"bring the file back, or remove {folder / HASHES} if you changed it on purpose"


def check_archive(path: Path) -> None:
    """Raise if a file of `torch.save`, which is a zip archive, is cut off, or a part of it has another checksum."""
    with zipfile.ZipFile(check_regular(path)) as archive:
        broken = archive.testzip()
    if broken is not None:
        raise ValueError(f"{broken} in it has another checksum")
