"""Tables of Markdown pages that are made from records: between two marks stands what the records give.

    <!-- table NAME -->
    ...
    <!-- /table -->

NAME is one of `tables.TABLES`. `write_tables` writes all of them again; the text around them is left as it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from kernelformer.files import write_text
from kernelformer_lab.reports.tables.records import Records

Table = Callable[[Records], str]
BEGIN = re.compile(r"^<!-- table (\S+) -->\n", re.MULTILINE)
END = "<!-- /table -->"


def filled(text: str, records: Records, tables: Mapping[str, Table]) -> str:
    """A page with all its tables made again.

    Args:
        text: of the page.
        records: that the figures come from.
        tables: functions that make a table, by name.
    """
    parts = BEGIN.split(text)  # text, then name and text in turns
    made = [parts[0]]
    for name, rest in zip(parts[1::2], parts[2::2], strict=True):
        if name not in tables:
            raise ValueError(f"there is no table {name!r}; known are {', '.join(sorted(tables))}.")
        _, sign, after = rest.partition(END)
        if not sign:
            raise ValueError(f"table {name!r} has no end; put {END} on a line after it.")
        made.append(f"<!-- table {name} -->\n{tables[name](records)}\n{END}{after}")
    return "".join(made)


def pages(folder: Path) -> list[Path]:
    """The pages that may have tables: those of the records' folder, and README.md and docs beside it."""
    root = folder.resolve().parent
    beside = [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
    return [x for x in (*beside, *sorted(folder.resolve().rglob("*.md"))) if x.is_file()]


def fill_pages(folder: Path, tables: Mapping[str, Table]) -> dict[Path, str]:
    """Every page as it should be, by its path; errors name the page.

    Args:
        folder: of the records.
        tables: functions that make a table, by name.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; name the one with the records.")
    records, texts = Records(folder), {}
    for page in pages(folder):
        try:
            texts[page] = filled(page.read_text(encoding="utf-8"), records, tables)
        except ValueError as problem:
            raise ValueError(f"{page}: {problem}") from None
    return texts


def write_tables(folder: Path, tables: Mapping[str, Table]) -> list[Path]:
    """Make the tables of all pages again, and return the pages that changed."""
    texts = fill_pages(folder, tables)  # all of them, before the first is written
    changed = [page for page, text in texts.items() if page.read_text(encoding="utf-8") != text]
    for page in changed:
        write_text(page, texts[page])
    return changed
