"""Records on file, and figures of theirs as the tables of a page show them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from kernelformer.files import read_json

ABSENT = "not on record"  # what a table says in place of a figure whose record is missing


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

    def bench(self, path: str) -> Bench:
        """A record of `kernelformer bench`."""
        return Bench(self.get(path).get("rows", []))

    def runs(self, path: str) -> dict[str, list[dict[str, Any]]]:
        """The results of a comparison's runs by the label of their attention, a result for each seed."""
        results: dict[str, list[dict[str, Any]]] = {}
        for run in self.get(path).get("runs", []):
            results.setdefault(run["label"], []).append(run["result"])
        return results


class Bench:
    """Rows of the benchmark, by contender and case.

    Args:
        rows: of `measure.benchmark.Row`, as JSON has them.
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

    def faster(
        self, name: str, other: str, task: str, length: int, *, backward: bool = False, heap: str = "default"
    ) -> str:
        """How many times as long another contender takes as the named one."""
        own, its = (self.seconds(x, task, length, backward=backward, heap=heap) for x in (name, other))
        return ABSENT if own is None or its is None else times(its / own)

    def beyond(self, name: str, task: str, length: int, *, backward: bool = False) -> str:
        """Peak memory beyond inputs and results."""
        row = self.row(name, task, length, backward=backward)
        return ABSENT if row is None or row["peak"] is None else mebibytes(row["peak"] - row["results"])


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
