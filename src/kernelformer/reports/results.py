"""Comparisons on record: dated files in one folder, without what belongs to a machine, and how they are read again."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date as calendar_date
from itertools import pairwise
from pathlib import Path
from typing import Any

from kernelformer.errors import flag, integer, number
from kernelformer.records import BY_NAME, Result, part
from kernelformer.reports.comparison import Comparison, Point, RunRecord
from kernelformer.reports.portable import as_text, portable, rounded
from kernelformer.tasks import TASKS

FIGURES = "comparison.json"  # what `kernelformer compare` leaves
FIRST = ("title", "recipe", "task", "about", "source", "note", "date", "metric", "higher_is_better", "curve")
LAST = ("command", "environment", "baselines", "settings", "runs")
DATED = re.compile(r"(?P<date>\d{4}-\d\d-\d\d)-(?P<name>.+)", re.DOTALL)


@dataclass(frozen=True)
class RecordedRun(RunRecord):
    """A run of which only the evaluation and the end are left: it has diverged if its end says so."""

    @property
    def diverged(self) -> bool:
        """Whether a loss, or the final value, was not finite."""
        return self.result is not None and (self.result.diverged or not self.scored)


@dataclass(frozen=True)
class Recorded:
    """A comparison with all that is known of how it was made; texts are empty where nobody wrote them.

    Args:
        path: of its file.
        name: of the file, without its date.
        date: as YYYY-MM-DD.
        comparison: its runs.
        task: name of the task.
        source: the paper that it follows, or why it is as it is.
        note: how far it is from the paper's setting.
        curve: what was measured between the start and the end: the metric, or what stands for it.
        command: that made it.
        environment: versions and machine.
        baselines: scores by name, of what needs no model.
    """

    path: Path
    name: str
    date: str
    comparison: Comparison
    task: str
    source: str
    note: str
    curve: str
    command: str
    environment: dict[str, Any]
    baselines: dict[str, dict[str, float]]

    @property
    def seeds(self) -> list[int]:
        """Seeds of all runs."""
        return sorted({run.seed for run in self.comparison.runs})


def read_results(folder: Path | str, without: Collection[Path] = ()) -> list[Recorded]:
    """All comparisons among the ``.json`` files of a folder, by name, those of one name by date.

    Files of other kinds are left out; one that is damaged is named.

    Args:
        folder: of the records.
        without: paths of files not to be read.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; name the one with the results on record, or add to it first.")
    parsed = [parse(path, load(path)) for path in sorted(folder.glob("*.json")) if path not in without]
    return in_order(record for record in parsed if record is not None)


def in_order(records: Iterable[Recorded]) -> list[Recorded]:
    """By name, then by date; a name has one metric."""
    ordered = sorted(records, key=lambda x: (x.name, x.date, x.path.stem != x.name))
    for one, other in pairwise(ordered):
        a, b = one.comparison, other.comparison
        if one.name == other.name and (a.metric, a.higher_is_better) != (b.metric, b.higher_is_better):
            raise ValueError(
                f"{one.path} and {other.path} are both called {one.name!r}, but one is measured by {_sense(a)} and "
                f"the other by {_sense(b)}; rename or remove one."
            )
    return ordered


def _sense(comparison: Comparison) -> str:
    return f"{comparison.metric!r} ({'higher' if comparison.higher_is_better else 'lower'} is better)"


def load(path: Path) -> Any:
    """Read a JSON file; errors name it."""
    try:
        return json.loads(path.read_bytes().decode())
    except (ValueError, RecursionError) as problem:
        raise ValueError(f"{path}: not JSON: {problem}; put it right or remove it.") from None


def parse(path: Path, record: Any) -> Recorded | None:
    """A record from what its file holds: of `kernelformer compare` or of `make_record`; None: of another kind."""
    if not isinstance(record, dict) or "runs" not in record:
        return None
    try:
        return _parse(path, portable(record))
    except (ValueError, RecursionError) as problem:
        text = str(problem)
        raise ValueError(text if text.startswith(str(path)) else f"{path}: {text}") from None


def _parse(path: Path, record: Mapping[str, Any]) -> Recorded:
    metric = part(record, "metric", str)
    environment = part({"environment": {}, **record}, "environment", dict)
    runs = [_run(path, index, record) for index in range(len(part(record, "runs", list)))]
    if not runs:
        raise ValueError("a comparison needs at least one run, got none.")
    task = _text(record, "task") or str(runs[0].settings.get("task", ""))
    known = TASKS.get(task)
    higher = record.get("higher_is_better")
    if higher is None:
        if known is None or known.metric != metric:
            raise ValueError(
                f"nothing says whether {metric!r} of task {task!r} is better when higher; add "
                f'"higher_is_better": true or false to the file.'
            )
        higher = known.higher_is_better
    about = _text(record, "about") or (known.about if known else "")
    baselines = {} if record.get("baselines") is None else part(record, "baselines", dict)
    named = DATED.fullmatch(path.stem)
    return Recorded(
        path=path,
        name=named["name"] if named else path.stem,
        date=_day(named["date"] if named else None) or _made(record),
        comparison=Comparison(
            _text(record, "title"), metric, flag("higher_is_better", higher), about, runs, _extra_metrics(record)
        ),
        task=task,
        source=_text(record, "source"),
        note=_text(record, "note"),
        curve=_text(record, "curve") or metric,
        command=_text(record, "command"),
        environment=environment,
        baselines={name: _scores(name, x, metric) for name, x in baselines.items()},
    )


def _text(record: Mapping[str, Any], key: str) -> str:
    return "" if record.get(key) is None else str(part(record, key, str))


def _extra_metrics(record: Mapping[str, Any]) -> list[str]:
    names: list[str] = part({"extra_metrics": [], **record}, "extra_metrics", list)
    if not all(isinstance(name, str) for name in names):
        raise ValueError(f"extra_metrics must be names, got {names!r:.60}.")
    return names


def _scores(name: str, scores: Any, metric: str) -> dict[str, float]:
    given = scores if isinstance(scores, dict) else {metric: scores}
    return {key: number(f"{key} of baseline {name!r}", x) for key, x in given.items() if x is not None}


def _run(path: Path, index: int, record: Mapping[str, Any]) -> RecordedRun:
    raw = record["runs"][index]
    try:
        if not isinstance(raw, dict):
            raise ValueError(f"not a JSON object but {raw!r:.60}")
        shared, own = (part({"settings": {}, **x}, "settings", dict) for x in (record, raw))
        end = raw.get("result")
        first, *others = _conditions(raw) or [record.get("environment") or {}]
        return RecordedRun(
            path=path,
            label=part(raw, "label", str),
            seed=integer("seed", raw.get("seed")),
            settings={**shared, **own},
            environment=first,
            resumed=tuple(others),
            command=_text(record, "command"),
            training=(),
            evaluation=_points(raw.get("evaluation"), _text(record, "curve") or record["metric"]),
            result=None if end is None else _result(part(raw, "result", dict)),
        )
    except ValueError as problem:
        raise ValueError(f"{path}: run {index + 1} of {len(record['runs'])}: {problem}") from None


def _conditions(raw: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What the run was measured under, one after the other, where its comparison found differences."""
    rows: list[dict[str, Any]] = part({"conditions": [], **raw}, "conditions", list)
    if not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"conditions must be objects, got {rows!r:.60}.")
    return rows


def _points(rows: Any, curve: str) -> tuple[Point, ...]:
    """Steps with seconds and a value, which null leaves out."""
    if not isinstance(rows, list) or not all(isinstance(row, list) and len(row) == 3 for row in rows):
        raise ValueError(f"evaluation must be rows of step, seconds and value, got {rows!r:.60}.")
    return tuple(
        Point(
            integer("step of evaluation", step, at_least=0),
            number("seconds of evaluation", seconds, at_least=0),
            0,
            {} if value is None else {curve: number("value of evaluation", value)},
        )
        for step, seconds, value in rows
    )


def _result(record: dict[str, Any]) -> Result:
    """Null is what JSON has for a number that is none; what else is null was not measured."""
    plain = {key: x for key, x in record.items() if x is not None}
    if "value" in record:
        plain.setdefault("value", math.nan)
    known = {key: part(plain, key, dict) for key in BY_NAME if key in plain}
    return Result.from_json(
        plain | {key: {name: x for name, x in some.items() if x is not None} for key, some in known.items()}
    )


def _day(text: Any) -> str:
    """The day of a date in ISO's form, or nothing."""
    try:
        return calendar_date.fromisoformat(text[:10]).isoformat() if isinstance(text, str) else ""
    except ValueError:
        return ""


def _made(record: Mapping[str, Any]) -> str:
    environment = record.get("environment")
    return _day(record.get("date")) or _day(environment.get("date") if isinstance(environment, dict) else None)


def make_record(folder: Path | str, results: Path, day: str | None = None) -> tuple[Path, str]:
    """What is to be kept of a comparison, and where: ``RESULTS/DATE-NAME.json`` and its text.

    Settings that all runs share stand once; nothing of the machine's paths is left, and no number is NaN.

    Args:
        folder: where `kernelformer compare` left its figures; NAME is its name.
        results: the folder of all records.
        day: as YYYY-MM-DD; None: that of the comparison, or today.
    """
    source = Path(folder) / FIGURES
    if not source.is_file():
        raise ValueError(f"{folder} has no {FIGURES}; name a folder where `kernelformer compare` has ended.")
    if day is not None and _day(day) != day:
        raise ValueError(f"a date is YYYY-MM-DD, got {day!r}.")
    raw = load(source)
    read = parse(source, raw)
    if read is None:
        raise ValueError(f"{source} has no 'runs'; name a folder where `kernelformer compare` has ended.")
    record = portable(raw)
    day = day or _made(record) or calendar_date.today().isoformat()
    runs = read.comparison.runs
    first = runs[0].settings
    shared = {k: x for k, x in first.items() if all(k in run.settings and run.settings[k] == x for run in runs)}
    record |= {"task": read.task, "about": read.comparison.about, "date": day, "settings": shared}
    record |= {"higher_is_better": read.comparison.higher_is_better}
    for run, given in zip(runs, record["runs"], strict=True):
        given["settings"] = {key: x for key, x in run.settings.items() if key not in shared}
        given |= {key: rounded(given[key]) for key in ("evaluation", "result") if key in given}
    more = sorted(record.keys() - {*FIRST, *LAST})
    ordered = {key: record[key] for key in (*FIRST, *more, *LAST) if key in record}
    name = re.sub(r"[^A-Za-z0-9+=.,_-]", "_", Path(folder).resolve().name).lstrip(".") or "comparison"
    return results / f"{day}-{name}.json", as_text(ordered) + "\n"


def add_results(folders: Sequence[Path | str], results: Path, day: str | None = None) -> dict[Path, str]:
    """The records of several comparisons, by their paths."""
    made: dict[Path, str] = {}
    for folder in folders:
        path, text = make_record(folder, results, day)
        if path in made:
            raise ValueError(f"two of the folders to add would be {path}; rename {folder}, or add it by another date.")
        made[path] = text
    return made
