"""What `studies.features` has measured, and the time at equal error that follows from it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from kernelformer.studies.features_data import About
from kernelformer.studies.settings import FeaturesSettings as Settings

EXACT, WINDOW_ALONE, UNIFORM = "softmax", "window alone", "uniform"
REFERENCES = (EXACT, WINDOW_ALONE, UNIFORM)  # what methods are compared with


@dataclass(frozen=True)
class Row:
    """Errors of one attention in one case.

    Args:
        data: name of the case.
        window: tokens nearby that were exact; 0: none.
        attention: its spec, or one of `REFERENCES`.
        size: number of features or landmarks; None: it has none to set.
        outputs: |out - exact| / |exact| in the Frobenius norm, mean over heads and texts, one for each draw.
        rows: total variation distance of the attention rows, 1/2 sum_j |a_ij - exact_ij|, mean over all rows, one for
            each draw.
    """

    data: str
    window: int
    attention: str
    size: int | None
    outputs: Sequence[float]
    rows: Sequence[float]

    @property
    def output(self) -> tuple[float, float]:
        """Mean and standard error of the output's error over the draws."""
        return spread(self.outputs)

    @property
    def row(self) -> tuple[float, float]:
        """Mean and standard error of the rows' distance over the draws."""
        return spread(self.rows)

    def as_json(self) -> dict[str, Any]:
        """The row with its means and standard errors."""
        parts = {"output": self.output, "row": self.row}
        more = {f"{name}_{what}": x for name, pair in parts.items() for what, x in zip(SPREAD, pair, strict=True)}
        return {**asdict(self), **more}


SPREAD = ("mean", "standard_error")


def spread(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard error; 0 for one value, which was not drawn."""
    if len(values) == 1:
        return values[0], 0.0
    return statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))


@dataclass(frozen=True)
class Pass:
    """A forward pass: all that its time depends on."""

    head_dim: int
    causal: bool
    window: int
    attention: str
    size: int | None


@dataclass
class Result:
    """What the study has measured.

    Args:
        settings: of the study.
        attentions: specs that were measured, with or without a window.
        untrained: those of them that have weights to train, and were measured as they start.
        cases: by their names.
        rows: errors.
        times: median seconds of forward passes; None: it failed.
        left_out: by "case, window", then by attention: why it was not measured there.
    """

    settings: Settings
    attentions: list[str]
    untrained: list[str]
    cases: dict[str, About] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    times: dict[Pass, float | None] = field(default_factory=dict)
    left_out: dict[str, dict[str, str]] = field(default_factory=dict)

    def label(self, attention: str) -> str:
        """The name of an attention for people."""
        return f"{attention} (untrained)" if attention in self.untrained else attention

    def curves(self, data: str, window: int) -> dict[str, list[Row]]:
        """The rows of a case by attention, in the order of their sizes."""
        found: dict[str, list[Row]] = {}
        for row in self.rows:
            if (row.data, row.window) == (data, window):
                found.setdefault(row.attention, []).append(row)
        return {name: sorted(rows, key=lambda x: x.size or 0) for name, rows in found.items()}

    def seconds(self, row: Row) -> float | None:
        """Time of a forward pass of the attention of a row; None: it was not measured."""
        case = self.cases[row.data]
        return self.times.get(Pass(case.head_dim, case.causal, row.window, row.attention, row.size))

    def least_time(self, curve: Sequence[Row], error: float) -> tuple[float, Row] | None:
        """The least time among the sizes of an attention whose output error is at most ``error``; None: not reached."""
        reached = [(self.seconds(row), row) for row in curve if row.output[0] <= error]
        timed = [(seconds, row) for seconds, row in reached if seconds is not None]
        return min(timed, key=lambda x: x[0], default=None)

    def equal_errors(self) -> list[dict[str, Any]]:
        """Time at equal error: of each case, window, attention and bound, None where it is not reached."""
        found = []
        for data in self.cases:
            for window in self.settings.window:
                for name, curve in self.curves(data, window).items():
                    for error in self.settings.errors if name != UNIFORM else ():
                        best = self.least_time(curve, error)
                        seconds, size = (None, None) if best is None else (best[0], best[1].size)
                        key = {"data": data, "window": window, "attention": name, "error": error}
                        found.append({**key, "seconds": seconds, "size": size})
        return found


def record(result: Result) -> dict[str, Any]:
    """The result as plain JSON."""
    return {
        "attentions": result.attentions,
        "untrained": result.untrained,
        "cases": {name: asdict(x) for name, x in result.cases.items()},
        "rows": [x.as_json() for x in result.rows],
        "times": [{**asdict(x), "seconds": seconds} for x, seconds in result.times.items()],
        "left_out": result.left_out,
        "equal_errors": result.equal_errors(),
    }


def restore(result: Result, kept: Mapping[str, Any]) -> None:
    """Take what a `record` of the same settings holds."""
    result.cases = {name: About(**x) for name, x in kept["cases"].items()}
    result.rows = [Row(**{each.name: x[each.name] for each in fields(Row)}) for x in kept["rows"]]
    result.times = {Pass(**{each.name: x[each.name] for each in fields(Pass)}): x["seconds"] for x in kept["times"]}
    result.left_out = kept["left_out"]
