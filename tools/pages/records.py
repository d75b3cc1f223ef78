"""Records on file, the figures that pages show of them, and the tables of Markdown pages that are made from them.

A table of a page stands between two marks, where NAME is that of a function with `table`:

    <!-- table NAME -->
    ...
    <!-- /table -->
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from kernelformer.files import read_json, write_text
from kernelformer.formatting import human_time

ABSENT = "not on record"  # in place of a figure whose record is missing
PASSES = {False: "forward", True: "forward + backward"}


class Records:
    """The JSON records of a folder, each read once.

    Args:
        folder: of the records.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._read: dict[str, Any] = {}

    def get(self, path: str) -> dict[str, Any]:
        """A record by its path in the folder; empty where there is none, so that its figures are `ABSENT`."""
        if path not in self._read:
            file = self.folder / path
            self._read[path] = read_json(file) if file.is_file() else {}
        record: dict[str, Any] = self._read[path]
        return record

    def rows(self, path: str, key: str = "rows") -> list[Any]:
        """A list of a record."""
        rows: list[Any] = self.get(path).get(key, [])
        return rows

    def bench(self, path: str) -> Bench:
        """A record of `kernelformer bench`."""
        return Bench(self.rows(path))

    def runs(self, path: str) -> dict[str, list[dict[str, Any]]]:
        """The results of a comparison's runs by the label of their attention, a result for each seed."""
        results: dict[str, list[dict[str, Any]]] = {}
        for run in self.rows(path, "runs"):
            results.setdefault(run["label"], []).append(run["result"])
        return results


class Bench:
    """Rows of the benchmark, by contender and case.

    Args:
        rows: of `bench.benchmark.Row`, as JSON has them.
    """

    def __init__(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self.rows = rows

    def row(self, name: str, task: str, length: int, *, backward: bool = False) -> Mapping[str, Any] | None:
        """The row of a contender in a case; None: it was not measured."""
        for row in self.rows:
            case = row["case"]
            if (row["name"], case["task"], case["length"], case["backward"]) == (name, task, length, backward):
                return None if row["note"] else row
        return None

    def seconds(
        self, name: str, task: str, length: int, *, backward: bool = False, heap: str = "default"
    ) -> float | None:
        """The time of a contender in a case."""
        row = self.row(name, task, length, backward=backward)
        return None if row is None else row["seconds"].get(heap)

    def ratio(self, name: str, other: str, task: str, length: int, **case: Any) -> float | None:
        """Time of one contender over that of another."""
        own, its = (self.seconds(x, task, length, **case) for x in (name, other))
        return None if own is None or its is None else own / its

    def faster(self, name: str, other: str, task: str, length: int, **case: Any) -> str:
        """Time of another contender over that of the named one, as text."""
        return show(self.ratio(other, name, task, length, **case), times)

    def time(self, name: str, task: str, length: int, **case: Any) -> str:
        """The time of a contender in a case, as text."""
        return show(self.seconds(name, task, length, **case), human_time)

    def beyond(self, name: str, task: str, length: int, *, backward: bool = False) -> str:
        """Peak memory beyond inputs and results."""
        row = self.row(name, task, length, backward=backward)
        return ABSENT if row is None or row["peak"] is None else mebibytes(row["peak"] - row["results"])


def show(value: float | None, form: str | Callable[[float], str] = "{:.3f}") -> str:
    """A figure as text; `ABSENT` for None."""
    return ABSENT if value is None else form.format(value) if isinstance(form, str) else form(value)


def times(ratio: float) -> str:
    """A ratio with two digits, as 0.7x, 7.0x or 25x."""
    return f"{ratio:.0f}x" if ratio >= 9.95 else f"{ratio:.1f}x"


def mebibytes(count: float) -> str:
    """Bytes as whole MiB."""
    return f"{count / 2**20:.0f} MiB"


def joined(cells: Sequence[str], sign: str = " / ") -> str:
    """Figures that belong together in one cell; `ABSENT` once where none of them is on record."""
    return ABSENT if set(cells) <= {ABSENT} else sign.join(cells)


def spread(values: Sequence[float], digits: int = 3) -> str:
    """Mean and standard deviation over seeds; of one seed the value alone."""
    if not values:
        return ABSENT
    mean = f"{fmean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ± {stdev(values):.{digits}f}"


def grid(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    return "\n".join("|" + "".join(f" {x} |" if x else " |" for x in row) for row in (head, ["---"] * len(head), *rows))


Table = Callable[[Records], str]
TABLES: dict[str, Table] = {}
BEGIN = re.compile(r"^<!-- table (\S+) -->\n", re.MULTILINE)
END = "<!-- /table -->"


def table(make: Table) -> Table:
    """Register a function by its name as a table of the pages, with ``-`` for ``_``."""
    TABLES[make.__name__.replace("_", "-")] = make
    return make


def filled(text: str, records: Records, tables: Mapping[str, Table] = TABLES) -> str:
    """Return the text of a page with all its tables made again."""
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


def fill_pages(folder: Path, tables: Mapping[str, Table] = TABLES) -> dict[Path, str]:
    """Fill the pages in the records' folder, and README.md and docs beside it; errors name the page.

    Args:
        folder: of the records.
        tables: functions that make a table, by name.

    Returns:
        The text of every page by its path.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; name the one with the records.")
    folder, records, texts = folder.resolve(), Records(folder), {}
    root = folder.parent
    for page in (root / "README.md", *sorted((root / "docs").rglob("*.md")), *sorted(folder.rglob("*.md"))):
        if page.is_file():
            try:
                texts[page] = filled(page.read_text(encoding="utf-8"), records, tables)
            except ValueError as problem:
                raise ValueError(f"{page}: {problem}") from None
    return texts


def write_tables(folder: Path, tables: Mapping[str, Table] = TABLES) -> list[Path]:
    """Make the tables of all pages again, and return the pages that changed."""
    texts = fill_pages(folder, tables)  # all of them, before the first is written
    changed = [page for page, text in texts.items() if page.read_text(encoding="utf-8") != text]
    for page in changed:
        write_text(page, texts[page])
    return changed
