"""Data that is made from other data before a job can run: by the name of its folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from kernelformer.data.linked_articles import write_pairs

# Folder: what it is made from, below the folder of all data, and how.
DERIVED: dict[str, tuple[str, Callable[[Path, Path], None]]] = {"enwik8-links": ("enwik8/enwik8", write_pairs)}


def is_there(name: str, data: Path) -> bool:
    """Whether a folder of data is there, or can be made."""
    return (data / name).exists() or (name in DERIVED and (data / DERIVED[name][0]).exists())


def make_missing(names: tuple[str, ...], data: Path, log: Callable[[str], None]) -> None:
    """Make those folders that are made from others and not there yet; what is half written has another name."""
    for name in names:
        if name in DERIVED and not (data / name).exists():
            source, make = DERIVED[name]
            log(f"{data / name}: made from {source}")
            part = data / f".{name}.partial"
            make(data / source, part)
            part.rename(data / name)
