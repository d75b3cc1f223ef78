"""Runs of a comparison: read from their folders, gathered into one row per label, shown as a table and in words."""

from __future__ import annotations

import json
import math
import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from rich.table import Table
from rich.text import Text

from kernelformer.errors import integer, number
from kernelformer.units import human_bytes, human_time

FOLDER = re.compile(r"(?P<label>.+)-seed(?P<seed>\d+)", re.DOTALL)
NONE = "–"  # noqa: RUF001


@dataclass(frozen=True)
class Point:
    """One line of a run's metrics."""

    step: int
    seconds: float  # of training, without evaluation
    tokens: int
    values: dict[str, float]  # "loss" and all other numbers of the line; an evaluation's without their "eval_"


@dataclass(frozen=True)
class Result:
    """The end of a run."""

    metric: str
    value: float  # not finite if the run diverged
    tokens_per_second: float
    peak_bytes: int
    parameters: int
    seconds: float
    steps: int
    decode: tuple[tuple[int, float, int], ...]  # context, seconds per token, bytes of state; empty if not measured


@dataclass(frozen=True)
class RunRecord:
    """What one run left in its folder."""

    path: Path
    label: str
    seed: int
    settings: dict[str, Any]
    environment: dict[str, Any]
    command: str
    training: tuple[Point, ...]
    evaluation: tuple[Point, ...]
    result: Result | None = None  # None: unfinished

    @property
    def diverged(self) -> bool:
        """Whether a loss, or the final value, was not finite."""
        losses = [p.values["loss"] for p in (*self.training, *self.evaluation)]
        return not all(map(math.isfinite, losses)) or (self.result is not None and not self.scored)

    @property
    def scored(self) -> bool:
        """Whether it finished with a finite value."""
        return self.result is not None and math.isfinite(self.result.value)

    @property
    def state(self) -> str:
        """In one word."""
        return "diverged" if self.diverged else "unfinished" if self.result is None else "finished"

    @property
    def step(self) -> int:
        """The last step it told of."""
        return max((p.step for p in (*self.training, *self.evaluation)), default=0)


def read_run(path: Path | str) -> RunRecord:
    """Read ``run.json``, ``metrics.jsonl`` and, if the run has finished, ``result.json`` of one folder.

    Label and seed are those of the settings, or else of a folder's name ``<label>-seed<n>``. A last line that was cut
    off is left out: the writer died in it. Where a resumed run goes back to its checkpoint, the later lines count.
    """
    folder = Path(path)
    head = _object(folder / "run.json")
    settings, environment = (_part(folder / "run.json", head, key, dict) for key in ("run", "environment"))
    named = FOLDER.fullmatch(folder.name)
    label = settings.get("label", named and named["label"])
    seed = settings.get("seed", named and int(named["seed"]))
    if not isinstance(label, str) or seed is None:
        raise ValueError(
            f"{folder / 'run.json'}: label must be a text and seed an integer, got {label!r} and {seed!r}; give both "
            f"in the settings, or name the folder <label>-seed<n>."
        )
    training, evaluation = _curves(folder / "metrics.jsonl")
    end = folder / "result.json"
    return RunRecord(
        path=folder,
        label=label,
        seed=integer(f"{folder / 'run.json'}: seed", seed),
        settings=settings,
        environment=environment,
        command=_part(folder / "run.json", head, "command", str),
        training=training,
        evaluation=evaluation,
        result=_result(end) if end.exists() else None,
    )


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(
            f"{path} is missing; the folder of a run has run.json, metrics.jsonl and, once finished, result.json."
        ) from None


def _object(path: Path) -> dict[str, Any]:
    content = _read(path)
    try:
        found = json.loads(content.decode())
    except ValueError as problem:
        raise ValueError(f"{path} is not JSON: {problem}.") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} must hold a JSON object, got {found!r:.60}.")
    return found


def _part(path: Path | str, record: dict[str, Any], key: str, kind: type) -> Any:
    if not isinstance(record.get(key), kind):
        raise ValueError(f"{path}: {key!r} must be of type {kind.__name__}, got {record.get(key)!r:.60}.")
    return record[key]


def _float(what: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{what} must be a number, NaN and Infinity included, got {value!r:.60}.")
    return float(value)


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    lines = _read(path).split(b"\n")
    for count, line in enumerate(lines, 1):
        where = f"{path}, line {count}"
        if not line.strip():
            continue
        try:
            found = json.loads(line.decode())
        except ValueError as problem:
            if count == len(lines):  # no newline after it: cut off
                return
            raise ValueError(f"{where} is not JSON: {problem}.") from None
        if not isinstance(found, dict):
            raise ValueError(f"{where} must hold a JSON object, got {found!r:.60}.")
        yield where, found


def _curves(path: Path) -> tuple[tuple[Point, ...], tuple[Point, ...]]:
    curves: dict[str, list[Point]] = {"loss": [], "eval_loss": []}
    last = 0
    for where, line in _lines(path):
        step = integer(f"{where}: step", line.get("step"), at_least=0)
        seconds = number(f"{where}: seconds", line.get("seconds"), at_least=0)
        tokens = integer(f"{where}: tokens", line.get("tokens"), at_least=0)
        kinds = [kind for kind in curves if kind in line]
        if not kinds:
            raise ValueError(f"{where} has neither 'loss' (of training) nor 'eval_loss' (of evaluation): {line!r:.80}.")
        for kind in curves if step < last else kinds:
            while curves[kind] and curves[kind][-1].step >= step:
                curves[kind].pop()
        last = step
        for kind in kinds:
            start = kind.removesuffix("loss")
            values = {"loss": _float(f"{where}: {kind}", line[kind])}
            for key, value in line.items():
                if key.startswith("eval_") == bool(start) and type(value) in (int, float):
                    values[key.removeprefix(start)] = float(value)
            curves[kind].append(Point(step, seconds, tokens, values))
    return tuple(curves["loss"]), tuple(curves["eval_loss"])


def _result(path: Path) -> Result:
    record = _object(path)

    def count(key: str) -> int:
        return integer(f"{path}: {key}", record.get(key), at_least=0)

    decode = [] if record.get("decode") is None else record["decode"]
    if not isinstance(decode, list) or not all(isinstance(row, list) and len(row) == 3 for row in decode):
        raise ValueError(f"{path}: decode must be null or rows of context, seconds and bytes, got {decode!r:.60}.")
    rows = (
        (
            integer(f"{path}: context of decode", context, at_least=0),
            number(f"{path}: seconds of decode", seconds, at_least=0),
            integer(f"{path}: bytes of decode", size, at_least=0),
        )
        for context, seconds, size in decode
    )
    return Result(
        metric=_part(path, record, "metric", str),
        value=_float(f"{path}: value", record.get("value")),
        tokens_per_second=number(f"{path}: tokens_per_second", record.get("tokens_per_second"), at_least=0),
        peak_bytes=count("peak_bytes"),
        parameters=count("parameters"),
        seconds=number(f"{path}: seconds", record.get("seconds"), at_least=0),
        steps=count("steps"),
        decode=tuple(sorted(rows)),
    )


@dataclass(frozen=True)
class Summary:
    """One label over its seeds; None where no run has finished."""

    label: str
    runs: tuple[RunRecord, ...]
    values: tuple[float, ...]  # final and finite
    mean: float | None
    deviation: float | None  # of a sample: divided by n - 1; None for one seed
    tokens_per_second: float | None  # median
    peak_bytes: int | None  # the largest
    parameters: int | None
    seconds: float | None  # median
    decode: tuple[tuple[int, float, int], ...]  # medians over seeds by context, ascending

    @property
    def note(self) -> str:
        """Which runs count less, or nothing."""
        steps = {state: [r.step for r in self.runs if r.state == state] for state in ("diverged", "unfinished")}
        return "; ".join(
            f"{len(some)} of {len(self.runs)} {state} (step {', '.join(map(str, some))})"
            for state, some in steps.items()
            if some
        )


@dataclass(frozen=True)
class Comparison:
    """Runs that are measured by one metric."""

    title: str
    metric: str
    higher_is_better: bool
    about: str
    runs: Sequence[RunRecord]

    def __post_init__(self) -> None:
        if not self.runs:
            raise ValueError("a comparison needs at least one run, got none.")
        seen: dict[tuple[str, int], Path] = {}
        for run in self.runs:
            if run.result is not None and run.result.metric != self.metric:
                raise ValueError(
                    f"{run.path} was measured by {run.result.metric!r}, the comparison is by {self.metric!r}; compare "
                    f"runs of one task."
                )
            if (run.label, run.seed) in seen:
                raise ValueError(
                    f"{seen[run.label, run.seed]} and {run.path} are both seed {run.seed} of {run.label!r}; keep one, "
                    f"or give them two labels."
                )
            seen[run.label, run.seed] = run.path

    @property
    def labels(self) -> list[str]:
        """In the order of the runs."""
        return list(dict.fromkeys(run.label for run in self.runs))

    def summary(self) -> list[Summary]:
        """One row per label, the best first, those without a value last."""
        rows = [_summary(label, tuple(r for r in self.runs if r.label == label)) for label in self.labels]
        sign = -1 if self.higher_is_better else 1
        return sorted(rows, key=lambda row: math.inf if row.mean is None else sign * row.mean)


def _summary(label: str, runs: tuple[RunRecord, ...]) -> Summary:
    ends = [run.result for run in runs if run.result is not None]
    values = tuple(end.value for end in ends if math.isfinite(end.value))
    contexts = sorted({row[0] for end in ends for row in end.decode})
    at = {c: [row for end in ends for row in end.decode if row[0] == c] for c in contexts}
    return Summary(
        label=label,
        runs=runs,
        values=values,
        mean=fmean(values) if values else None,
        deviation=stdev(values) if len(values) > 1 else None,
        tokens_per_second=median(end.tokens_per_second for end in ends) if ends else None,
        peak_bytes=max((end.peak_bytes for end in ends), default=None),
        parameters=max((end.parameters for end in ends), default=None),
        seconds=median(end.seconds for end in ends) if ends else None,
        decode=tuple((c, median(r[1] for r in at[c]), round(median(r[2] for r in at[c]))) for c in contexts),
    )


Curve = dict[int, tuple[float, float]]  # step -> seconds, value


def smoothed(points: Sequence[Point], key: str, share: float) -> Curve:
    """A curve up to its first value that is not finite: running means over a ``share`` of its points, at most 101."""
    seen = [(p.step, p.seconds, p.values[key]) for p in points if key in p.values]
    end = next((i for i, row in enumerate(seen) if not math.isfinite(row[2])), len(seen))
    half = min(50, int(share * end / 2))
    near = [seen[max(0, i - half) : min(end, i + half + 1)] for i in range(end)]
    return {row[0]: (row[1], fmean(r[2] for r in some)) for row, some in zip(seen, near, strict=False)}


def visible(text: object, keep: str = "") -> str:
    """A text whose control characters, marks of direction and halves of pairs are seen instead of obeyed."""

    def show(char: str) -> str:
        code = ord(char)
        turns = unicodedata.bidirectional(char) in ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")
        unfit = unicodedata.category(char) in ("Cc", "Cs", "Zl", "Zp") or code & 0xFFFE == 0xFFFE
        return f"<U+{code:04X}>" if (turns or unfit) and char not in keep else char

    return "".join(map(show, str(text)))


def score(rows: Sequence[Summary], row: Summary) -> str:
    """Mean ± deviation, with the digits that all rows need: four of the largest mean, one of the smallest deviation."""
    means = [abs(r.mean) for r in rows if r.mean]
    digits = [3 - math.floor(math.log10(max(means)))] if means else [3]
    digits += [-math.floor(math.log10(r.deviation)) for r in rows if r.deviation]
    form = "{:.4g}" if means and max(means) >= 1e7 else f"{{:.{min(6, max(0, *digits))}f}}"
    return " ± ".join(form.format(x) for x in (row.mean, row.deviation) if x is not None) or NONE


def cells(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    """The summary as text: the head and a row per label; decoding only if somebody did."""
    rows = comparison.summary()
    better = "higher" if comparison.higher_is_better else "lower"
    head = ["label", f"{comparison.metric.replace('_', ' ')} ({better} is better)", "tokens/s", "peak memory"]
    head += ["parameters", "training", "decoding a token"]
    lines = []
    for row in rows:
        line = [row.label, f"{score(rows, row)} (n={len(row.values)})" if row.values else NONE]
        for value, show in (
            (row.tokens_per_second, "{:,.0f}".format),
            (row.peak_bytes, human_bytes),
            (row.parameters, "{:,}".format),
            (row.seconds, human_time),
        ):
            line.append(NONE if value is None else show(value))
        line += [f"{human_time(seconds)} at {context:,}" for context, seconds, _ in row.decode[-1:]] or [NONE]
        lines.append([*map(visible, line)])
    count = len(head) if any(row.decode for row in rows) else len(head) - 1
    return [visible(name) for name in head[:count]], [line[:count] for line in lines]


CAPTION = "Mean ± standard deviation of the seeds that finished; medians of speed and time, the largest peak memory."


def table(comparison: Comparison) -> Table:
    """The summary for a terminal, with the numbers of the report."""
    head, lines = cells(comparison)
    notes = "".join(f"\n{visible(row.label)}: {row.note}" for row in comparison.summary() if row.note)
    out = Table(title=Text(visible(comparison.title)), caption=Text(CAPTION + notes), box=None, padding=(0, 2, 0, 0))
    out.title_justify = out.caption_justify = "left"
    for index, name in enumerate(head):
        out.add_column(Text(name), justify="right" if index else "left", overflow="fold", no_wrap=1 < index < 6)
    for line in lines:
        out.add_row(*map(Text, line))
    return out
