"""Rules over the records of studies."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kernelformer.analysis.differences import difference, mean_over_seeds
from kernelformer.evidence.base import CONTRADICTS, MISSING_RESULT, OPEN, SUPPORTS, Finding
from kernelformer.evidence.rules import Entry, shown

Record = Mapping[str, Any]


def studies_of(entries: Sequence[Entry], parts: Sequence[str]) -> list[Record]:
    """The records of those parts that are there."""
    return [x["record"] for x in entries if x["part"] in parts and "record" in x]


@dataclass(frozen=True)
class SmallerCost:
    """One of two values of a study, repeated with several seeds, is smaller than the other.

    Args:
        parts: the study with its seeds.
        first, second: the values of a record, and `names` what people call them.
        unit: of both.
    """

    parts: Sequence[str]
    first: Callable[[Record], float]
    second: Callable[[Record], float]
    names: tuple[str, str]
    unit: str

    @property
    def text(self) -> str:
        """The rule in words."""
        return (
            f"for: {self.names[0]} is below {self.names[1]} by more than two standard errors over seeds (or Student's "
            f"quantile, if larger); against: above by as much; else open"
        )

    def __call__(self, entries: Sequence[Entry]) -> Finding:
        """Judge by the means over the seeds that are on record."""
        records = studies_of(entries, self.parts)
        if not records:
            return Finding(MISSING_RESULT, "")
        values = [[value(x) for x in records] for value in (self.first, self.second)]
        if not all(math.isfinite(x) for side in values for x in side):
            return Finding(OPEN, f"{self.names[0]} or {self.names[1]} is not finite")
        first, second = map(mean_over_seeds, values)
        gap = difference(first, second)
        ours = f"{self.names[0]} {shown(first)}, {self.names[1]} {shown(second)} {self.unit}"
        if not math.isfinite(gap.error) or abs(gap.value) <= gap.bound:
            return Finding(OPEN, ours)
        return Finding(SUPPORTS if gap.value < 0 else CONTRADICTS, ours)


def conversion_cost(model: str, features: int) -> Callable[[Record], float]:
    """What a model of the study ``normalized`` loses when it is made linear with so many features."""

    def cost(record: Record) -> float:
        mine = record["models"][model]
        row = next(x for x in mine["converted"] if x["features"] == features)
        return math.nan if None in (row["mean"], mine["bits_per_byte"]) else float(row["mean"] - mine["bits_per_byte"])

    return cost


def conversion_costs(record: Record) -> dict[str, float]:
    """What every model of the study ``normalized`` loses, by model and number of features."""
    return {
        f"{name}, m = {row['features']}": conversion_cost(name, row["features"])(record)
        for name, model in record["models"].items()
        for row in model["converted"]
    }


def moved_values(record: Record) -> dict[str, float]:
    """Bits per byte of the study ``transfer``, by attention: at once, fine-tuned, from a fresh start."""
    values = {}
    whole = [row["attention"] for row in record["moved"]]
    methods = [x.split(":")[0] for x in whole]
    names = methods if len(set(methods)) == len(methods) else whole  # a picture has little room
    for name, row in zip(names, record["moved"], strict=True):
        values[f"{name}, at once"] = moved_at_once(row["attention"])(record)
        values[f"{name}, tuned"] = moved_tuned(row["attention"])(record)
        values[f"{name}, fresh"] = _number(row["fresh"][-1][1])
    return values


def _moved(record: Record, attention: str) -> Record:
    rows: Sequence[Record] = record["moved"]
    return next(x for x in rows if x["attention"] == attention)


def _number(value: float | None) -> float:
    """A number of a record, where null stands for one that is not finite."""
    return math.nan if value is None else float(value)


def moved_at_once(attention: str, plus: float = 0.0) -> Callable[[Record], float]:
    """The bits per byte that an attention of the study ``transfer`` has with the weights as they are, and a margin."""
    return lambda record: statistics.fmean(map(_number, _moved(record, attention)["at_once"])) + plus


def moved_tuned(attention: str, plus: float = 0.0) -> Callable[[Record], float]:
    """The bits per byte that an attention of the study ``transfer`` has after fine-tuning, and a margin."""
    return lambda record: _number(_moved(record, attention)["tuned"][-1][1]) + plus


@dataclass(frozen=True)
class OfStudy:
    """A rule over the record of one study.

    Args:
        part: of the item.
        text: the rule in words.
        judge: from the record to verdict and figures.
    """

    part: str
    text: str
    judge: Callable[[Record], Finding]

    def __call__(self, entries: Sequence[Entry]) -> Finding:
        """Judge by the study, if it is on record."""
        records = studies_of(entries, [self.part])
        return self.judge(records[0]) if records else Finding(MISSING_RESULT, "")
