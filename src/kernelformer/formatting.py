"""Numbers and texts as people read them."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable


def human_time(seconds: float) -> str:
    """Three digits and a unit."""
    if seconds >= 600:
        return f"{seconds / 60:.3g} min" if seconds < 36000 else f"{seconds / 3600:.3g} h"
    factor, unit = next(((f, u) for f, u in ((1.0, "s"), (1e3, "ms")) if seconds * f >= 1), (1e6, "µs"))
    return f"{seconds * factor:.3g} {unit}"


def human_bytes(count: float | None) -> str:
    """Three digits and a unit; nothing for None."""
    if count is None:
        return ""
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while abs(count) >= 999.5 and len(units) > 1:
        count, _ = count / 1024, units.pop(0)
    return f"{count:.3g} {units[0]}"


def human_ratio(ratio: float) -> str:
    """Format a ratio with two or three digits."""
    return f"{ratio:.1f}x" if ratio >= 10 else f"{ratio:.2f}x"


def shortened(text: str, width: int = 40) -> str:
    """A text of at most ``width`` characters: the middle of a longer one is left out, and three dots say so."""
    if len(text) <= width:
        return text
    end = max(0, (width - 1) // 2)
    return f"{text[: width - 1 - end]}…{text[len(text) - end :]}"


def short_names(names: Iterable[str], width: int = 40) -> dict[str, str]:
    """`shortened` names by the whole ones, a little longer where two would look the same."""
    whole = list(dict.fromkeys(names))
    while len({shortened(x, width) for x in whole}) < len(whole):
        width += 8
    return {x: shortened(x, width) for x in whole}


def visible(text: object, keep: str = "") -> str:
    """A text whose control characters, marks of direction and halves of pairs are seen instead of obeyed."""
    whole = str(text)
    if whole.isprintable():
        return whole

    def show(char: str) -> str:
        code = ord(char)
        turns = unicodedata.bidirectional(char) in ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")
        unfit = unicodedata.category(char) in ("Cc", "Cs", "Zl", "Zp") or code & 0xFFFE == 0xFFFE
        return f"<U+{code:04X}>" if (turns or unfit) and char not in keep else char

    return "".join(map(show, whole))
