"""Which files are data: regular ones, within the folder that was given."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from kernelformer.files import check_inside as check_inside
from kernelformer.files import check_regular as check_regular


def existing(path: Path, layout: str, hint: str = "", option: str = "data") -> Path:
    """The path of a folder or of a regular file.

    Args:
        path: as it was given.
        layout: what should be there, for the message.
        hint: what else could be meant.
        option: by which it was given.

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
