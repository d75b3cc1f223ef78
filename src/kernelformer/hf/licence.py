"""The licence of a pretrained model, as its source states it."""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import BinaryIO

from kernelformer.files import check_regular
from kernelformer.formatting import visible
from kernelformer.hf.gguf import gguf_file

LONGEST = 1 << 20  # bytes of a card, or of a text in a header, that are read
NOT_STATED = "not stated by the source: ask there"
_CARD, _FILES = "README.md", ("LICENSE", "LICENSE.txt", "LICENSE.md", "LICENCE", "COPYING")
_FRONT = re.compile(r"\A---\n(.*?)^---$", re.DOTALL | re.MULTILINE)
# Types of values in a .gguf, as struct has them.
_NUMBERS = {**dict(enumerate("BbHhIif?")), 10: "Q", 11: "q", 12: "d"}
_TEXT, _LIST = 8, 9


def licence_of(source: str | Path) -> str:
    """Find the licence of a pretrained model; empty where the source states none.

    That of the card (``license:`` in the front matter of README.md), else the first line of a file such as LICENSE, of
    a ``.gguf`` file ``general.license``. Of a name on the hub the files are those that its cache has.

    Args:
        source: see `load_source`.
    """
    path = Path(source)
    try:
        packed = gguf_file(path)
        if packed is not None:
            return _of_gguf(packed) or _of_folder(packed.parent)
        return _of_folder(path) if path.is_dir() else _of_hub(str(source))
    except (OSError, ValueError):  # a licence that cannot be read is not stated
        return ""


def _of_folder(folder: Path) -> str:
    card = folder / _CARD
    stated = _of_card(_read(card)) if card.is_file() else ""
    files = (x for name in _FILES if (x := folder / name).is_file())
    return stated or next((line for x in files if (line := _first_line(_read(x)))), "")


def _of_hub(name: str) -> str:
    from huggingface_hub import try_to_load_from_cache

    cached = (try_to_load_from_cache(name, x) for x in (_CARD, "config.json"))
    found = next((x for x in cached if isinstance(x, str)), None)
    return _of_folder(Path(found).parent) if found else ""


def _read(path: Path) -> str:
    with check_regular(path).open("rb") as file:
        return file.read(LONGEST).decode("utf-8", errors="replace")


def _of_card(text: str) -> str:
    """``license_name`` or ``license`` of the front matter; ``other`` alone says nothing."""
    front = _FRONT.match(text.replace("\r\n", "\n").removeprefix("\ufeff"))
    block = front[1] if front else ""
    found = re.finditer(r"^(license(?:_name|_link)?):(.*(?:\n[ \t]*-[ \t].*)*)", block, re.MULTILINE)
    values = {x[1]: _values(x[2]) for x in found}  # a list goes on below, an item a line
    name = values.get("license_name") or values.get("license", "")
    if name == "other":
        return ""
    link = values.get("license_link")
    return f"{name} ({link})" if name and link else name


def _values(text: str) -> str:
    """The words of a value in a front matter, those of a list between commas."""
    items = [re.sub(r"^\s*-\s", "", x).split(" #")[0] for x in text.strip().strip("[]").splitlines()]
    words = [y.strip().strip("'\"") for x in items for y in x.split(",")]
    return ", ".join(x for x in words if x)


def _first_line(text: str) -> str:
    line = next((visible(x.strip()) for x in text.removeprefix("\ufeff").splitlines() if x.strip()), "")
    return f"{line[:80]} (file LICENSE of the source)" if line else ""


def _of_gguf(path: Path) -> str:
    """Read ``general.license`` of the header of a ``.gguf`` file, without the rest of it."""
    with check_regular(path).open("rb") as file:
        try:
            if file.read(4) != b"GGUF" or _number(file, "I") < 2:
                return ""
            file.read(8)  # number of tensors
            for _ in range(_number(file, "Q")):
                key, kind = _text(file), _number(file, "I")
                if key == "general.license" and kind == _TEXT:
                    return _text(file).strip()
                _skip(file, kind)
        except (KeyError, OverflowError, RecursionError, struct.error):
            return ""
    return ""


def _number(file: BinaryIO, kind: str) -> int:
    (value,) = struct.unpack(f"<{kind}", file.read(struct.calcsize(f"<{kind}")))
    return int(value)


def _text(file: BinaryIO) -> str:
    length = _number(file, "Q")
    if length > LONGEST:
        raise ValueError(f"a name or a licence of {length} bytes is none.")
    return file.read(length).decode("utf-8", errors="replace")


def _skip(file: BinaryIO, kind: int) -> None:
    if kind == _TEXT:
        file.seek(_number(file, "Q"), 1)
    elif kind == _LIST:
        inner, count = _number(file, "I"), _number(file, "Q")
        if inner in (_TEXT, _LIST):
            for _ in range(count):
                _skip(file, inner)
        else:
            file.seek(count * struct.calcsize(f"<{_NUMBERS[inner]}"), 1)
    else:
        file.seek(struct.calcsize(f"<{_NUMBERS[kind]}"), 1)
