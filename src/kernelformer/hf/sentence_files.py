"""Files by which sentence-transformers knows what follows a model (pooling, for example), copied to a converted one."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kernelformer.files import read_json

MODULES = "modules.json"
FILES = (MODULES, "config_sentence_transformers.json", "sentence_*_config.json")
PICKLED = (".bin", ".pt", ".pth", ".pkl")


def copy_sentence_files(source: str | Path, target: Path, *, allow_pickle: bool = False) -> list[str]:
    """Copy ``modules.json``, the other settings of sentence-transformers and the folders of its modules.

    Nothing is copied of a source without ``modules.json``, no file through a link that leads out of it, and no pickled
    weights unless they are allowed.

    Args:
        source: folder of the original, or its name on the hub.
        target: folder of the converted model.
        allow_pickle: copy pickled weights of modules too; they are never read here.

    Returns:
        Remarks for the user: what was copied, and what was not and why.
    """
    if Path(source).is_file():
        return []
    try:
        folder = _local(source, [MODULES])
        if not (folder / MODULES).is_file():
            return []
        names = _module_folders(folder / MODULES)
        folder = _local(source, [*FILES, *(f"{x}/*" for x in names)])
    except Exception as reason:  # the hub, links and JSON have many ways to fail, and the model is there without them
        return [f"files of sentence-transformers were not copied: {str(reason).splitlines()[0].rstrip('.')}"]
    files = sorted(x for pattern in FILES for x in folder.glob(pattern))
    files += sorted(x for name in names for x in (folder / name).glob("*"))
    # Of a name on the hub the files are links into the cache of its repository.
    inside = folder.resolve() if Path(source).is_dir() else folder.resolve().parents[1]
    copied, remarks = [], []
    for file in files:
        name = file.relative_to(folder).as_posix()
        if not file.resolve().is_relative_to(inside):
            remarks.append(f"{name} is a link out of {source} and was not copied")
        elif not file.is_file():
            remarks.append(f"{name} is no file and was not copied")
        elif file.suffix in PICKLED and not allow_pickle:
            remarks.append(f"{name} is pickled and was not copied; --allow-pickle does")
        else:
            (target / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(file, target / name)
            copied.append(name)
    return [f"files of sentence-transformers were copied: {', '.join(copied)}", *remarks]


def _local(source: str | Path, patterns: Sequence[str]) -> Path:
    """The folder itself, or one that has these files of a name on the hub."""
    if Path(source).is_dir():
        return Path(source)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(str(source), allow_patterns=list(patterns)))


def _module_folders(file: Path) -> list[str]:
    """Folders that ``modules.json`` names; the model itself has none."""
    record: Any = read_json(file)
    if not isinstance(record, list) or not all(isinstance(x, dict) for x in record):
        raise ValueError(f"{file.name} is not a list of modules")
    names = [x.get("path", "") for x in record]
    for name in names:
        if not isinstance(name, str) or (name and not re.fullmatch(r"\w[\w.-]*", name)):
            raise ValueError(f"{file.name} names {name!r:.60}, which is not the name of a folder")
    return [x for x in names if x]
