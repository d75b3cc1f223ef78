"""Hashes of the files of a saved folder: written with them, compared before they are used.

A flipped bit in a file of weights is a valid file of other weights, so that nothing but a hash tells. Folders without
hashes, saved by earlier versions or by other programs, are used as they are.
"""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kernelformer.files import check_regular, read_json, write_json

HASHES = "hashes.json"
NAME = "blake2b"
WEIGHTS = ("model*.safetensors", "model.safetensors.index.json", "config.json", "generation_config.json")


class HashError(ValueError):
    """A file that is not what was saved under its name."""


def hash_bytes(content: bytes) -> str:
    """Hash of bytes, as `hash_file` gives that of a file."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def hash_file(path: Path) -> str:
    """Of all bytes of a file, which is read in blocks; 0.2 seconds for 100 million."""
    digest = hashlib.blake2b(digest_size=16)
    with check_regular(path).open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def write_hashes(folder: Path, patterns: Iterable[str] = ("*",), coming: Mapping[str, bytes] | None = None) -> None:
    """Write the hashes of a folder's files into ``hashes.json`` in it.

    Args:
        folder: of files that are all written.
        patterns: which files, as globs; hidden ones never.
        coming: contents of files that will be written after this one, by name.
    """
    files = {path.name: path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}
    names = sorted(name for name in files if name != HASHES and not name.startswith("."))
    hashes = {name: hash_file(files[name]) for name in names}
    hashes |= {name: hash_bytes(content) for name, content in (coming or {}).items()}
    write_json(folder / HASHES, {NAME: hashes})


def read_hashes(folder: Path) -> dict[str, str]:
    """Hashes of a folder by the names of its files; none where there is no ``hashes.json``.

    Raises:
        HashError: it cannot be read.
    """
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

    Whoever loads the folder says what is missing.
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
