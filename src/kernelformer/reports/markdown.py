"""Pieces of Markdown in which nothing that others wrote is obeyed."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Sequence

from kernelformer.formatting import visible


def plain(text: object) -> str:
    """A text of others as Markdown shows it: nothing in it is obeyed, neither by Markdown nor by a browser."""
    line = " ".join(visible(text).split())
    return re.sub(r"([\\`*_{}\[\]#|~$:@])", r"\\\1", html.escape(line, quote=False))


def code(text: str) -> str:
    """A text as a string of Python inside a fenced block, which three backticks would end."""
    return json.dumps(visible(text)).replace("`", "\\u0060")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; cells are Markdown, those of the first column stand on the left."""
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join(f"| {' | '.join(x)} |" for x in lines)


def put_section(page: str, section: str, before: str = "") -> str:
    """Put a section into a page in place of the one with the same heading.

    Args:
        page: Markdown with headings of the second level.
        section: begins with such a heading.
        before: heading before which the section comes where there is none yet; default, or not there: at the end.
    """
    section = section.strip() + "\n"
    heading = section.split("\n", 1)[0]
    parts = re.split(r"^(?=## )", page, flags=re.MULTILINE)
    names = [x.split("\n", 1)[0].rstrip() for x in parts]
    if heading in names:
        place = names.index(heading)
        parts[place] = section + ("\n" if place + 1 < len(parts) else "")
    elif before in names:
        parts.insert(names.index(before), section + "\n")
    else:
        parts.append(("\n" if page and not page.endswith("\n\n") else "") + section)
    return "".join(parts)
