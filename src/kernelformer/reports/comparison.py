"""Runs of a comparison: read from their folders, gathered into one row per label, shown as a table and in words."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from rich.table import Table
from rich.text import Text

from kernelformer.errors import integer
from kernelformer.formatting import human_bytes, human_time, short_names, visible
from kernelformer.records import RESULT, RUN, Result, part, read_head, read_metrics, read_result, reading

FOLDER = re.compile(r"(?P<label>.+)-seed(?P<seed>\d+)", re.DOTALL)
NONE = "–"  # noqa: RUF001
# What speed and memory depend on besides the run; those of runs that differ in one of them are not compared.
CONDITIONS = ("threads", "processes", "processor", "machine", "system", "cpus", "accelerator", "torch")
MARK = "*"  # at numbers that are not comparable


@dataclass(frozen=True)
class Point:
    """One line of a run's metrics."""

    step: int
    seconds: float  # of training, without evaluation
    tokens: int
    values: dict[str, float]  # "loss" and all other numbers of the line; an evaluation's without their "eval_"


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
    started: str = ""  # the day, where the record tells it
    resumed: tuple[Mapping[str, Any], ...] = ()  # environments in which it went on

    @property
    def conditions(self) -> list[dict[str, Any]]:
        """What its speed was measured under, where it started and wherever it went on."""
        return [conditions_of(x) for x in (self.environment, *self.resumed)]

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
        """State of the run in one word."""
        return "diverged" if self.diverged else "unfinished" if self.result is None else "finished"

    @property
    def step(self) -> int:
        """The last step on record."""
        return max((p.step for p in (*self.training, *self.evaluation)), default=0)


def conditions_of(environment: Mapping[str, Any]) -> dict[str, Any]:
    """The part of an environment that speed depends on."""
    return {key: environment[key] for key in CONDITIONS if key in environment}


def read_run(path: Path | str) -> RunRecord:
    """Read ``run.json``, ``metrics.jsonl`` and, if the run has finished, ``result.json`` of one folder.

    Label and seed are those of the settings, or else of a folder's name ``<label>-seed<n>``. A last line that was cut
    off is left out: the writer died in it. Where a resumed run goes back to its checkpoint, the later lines count.
    """
    folder = Path(path)
    head = read_head(folder)
    settings = head["run"]
    named = FOLDER.fullmatch(folder.name)
    label = settings.get("label", named and named["label"])
    seed = settings.get("seed", named and int(named["seed"]))
    if not isinstance(label, str) or seed is None:
        raise ValueError(
            f"{folder / RUN}: label must be a text and seed an integer, got {label!r} and {seed!r}; give both "
            f"in the settings, or name the folder <label>-seed<n>."
        )
    training, evaluation = _curves(folder)
    with reading(folder / RUN):
        seed = integer("seed", seed)
    return RunRecord(
        path=folder,
        label=label,
        seed=seed,
        settings=settings,
        environment=head["environment"],
        command=head["command"],
        started=str(head.get("started", ""))[:10],
        training=training,
        evaluation=evaluation,
        result=_result(folder, settings.get("steps")),
        resumed=tuple(part(x, "environment", dict) for x in head.get("resumed", ())),
    )


def _result(folder: Path, steps: object) -> Result | None:
    """The end of a run; None: unfinished, or finished before it was made longer."""
    if not (folder / RESULT).exists():
        return None
    result = read_result(folder)
    return None if isinstance(steps, int) and result.steps < steps and not result.diverged else result


def _curves(folder: Path) -> tuple[tuple[Point, ...], tuple[Point, ...]]:
    curves: dict[str, list[Point]] = {"loss": [], "eval_loss": []}
    last = 0
    for line in read_metrics(folder):
        step = line["step"]
        kinds = [kind for kind in curves if kind in line]
        for kind in curves if step < last else kinds:
            while curves[kind] and curves[kind][-1].step >= step:
                curves[kind].pop()
        last = step
        for kind in kinds:
            start = kind.removesuffix("loss")
            values = {"loss": float(line[kind])}
            for key, value in line.items():
                if key.startswith("eval_") == bool(start) and type(value) in (int, float):
                    values[key.removeprefix(start)] = float(value)
            curves[kind].append(Point(step, line["seconds"], line["tokens"], values))
    return tuple(curves["loss"]), tuple(curves["eval_loss"])


Spread = tuple[float | None, float | None]  # mean and deviation over seeds, None as in a `Summary`


def spread_of(values: Sequence[float]) -> Spread:
    """Mean and standard deviation of numbers, where there are enough for them."""
    return fmean(values) if values else None, stdev(values) if len(values) > 1 else None


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

    def extra(self, metric: str) -> Spread:
        """Another score of the runs that have it."""
        scores = [run.result.scores.get(metric, math.nan) for run in self.runs if run.result is not None]
        return spread_of([x for x in scores if math.isfinite(x)])

    def test(self, metric: str) -> Spread:
        """A score on the test split, of the runs that have it."""
        scores = [run.result.test.get(metric, math.nan) for run in self.runs if run.result is not None]
        return spread_of([x for x in scores if math.isfinite(x)])

    @property
    def note(self) -> str:
        """A remark on runs that diverged or did not finish; empty where there are none."""
        steps = {state: [r.step for r in self.runs if r.state == state] for state in ("diverged", "unfinished")}
        return "; ".join(
            f"{len(some)} of {len(self.runs)} {state} (step {', '.join(map(str, some))})"
            for state, some in steps.items()
            if some
        )


@dataclass(frozen=True)
class Comparison:
    """Runs that are measured by one metric, and maybe by others of which each has a column too."""

    title: str
    metric: str
    higher_is_better: bool
    about: str
    runs: Sequence[RunRecord]
    extra_metrics: Sequence[str] = ()

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
    def subtitle(self) -> str:
        """What the task is; behind a semicolon stands how it gets data, which a comparison has."""
        return self.about.partition(";")[0]

    @property
    def curve(self) -> str:
        """What is drawn over time: the metric, or the loss where the metric is known at the end alone."""
        known = any(self.metric in p.values for run in self.runs for p in run.evaluation)
        return self.metric if known else "loss"

    @property
    def tested(self) -> bool:
        """Whether runs have selected their best weights and scored them on the test split."""
        return any(run.result is not None and self.metric in run.result.test for run in self.runs)

    @property
    def unequal(self) -> str:
        """Under which different conditions speed and memory were measured; empty where they can be compared."""
        ended = [run for run in self.runs if run.result is not None]
        differences = []
        for key in CONDITIONS:
            by: dict[str, dict[str, None]] = {}
            for run in ended:
                for here in run.conditions:
                    if key in here:
                        by.setdefault(str(here[key]), {})[run.label] = None
            if len(by) > 1:
                sides = [f"{value} ({', '.join(labels)})" for value, labels in by.items()]
                differences.append(f"{key} {' and '.join(sides)}")
        return "; ".join(differences)

    @property
    def labels(self) -> list[str]:
        """Labels in the order of the runs."""
        return list(dict.fromkeys(run.label for run in self.runs))

    def summary(self) -> list[Summary]:
        """One row per label, the best first, those without a value last."""
        rows = [_summary(label, tuple(r for r in self.runs if r.label == label)) for label in self.labels]
        sign = -1 if self.higher_is_better else 1
        return sorted(rows, key=lambda row: math.inf if row.mean is None else sign * row.mean)


def _summary(label: str, runs: tuple[RunRecord, ...]) -> Summary:
    ends = [run.result for run in runs if run.result is not None]
    values = tuple(end.value for end in ends if math.isfinite(end.value))
    rows = [row for end in ends for row in end.decode or ()]
    contexts = sorted({row[0] for row in rows})
    mean, deviation = spread_of(values)
    at = {c: [row for row in rows if row[0] == c] for c in contexts}
    return Summary(
        label=label,
        runs=runs,
        values=values,
        mean=mean,
        deviation=deviation,
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


def score(rows: Sequence[Summary], row: Summary) -> str:
    """Mean ± deviation, with the digits that all rows need: four of the largest mean, one of the smallest deviation."""
    return spread_text([(r.mean, r.deviation) for r in rows], (row.mean, row.deviation))


def spread_text(column: Sequence[Spread], spread: Spread) -> str:
    """One of a column as mean ± deviation, with the digits of `score`."""
    means = [abs(mean) for mean, _ in column if mean]
    digits = [3 - math.floor(math.log10(max(means)))] if means else [3]
    digits += [-math.floor(math.log10(deviation)) for _, deviation in column if deviation]
    form = "{:.4g}" if means and max(means) >= 1e7 else f"{{:.{min(6, max(0, *digits))}f}}"
    return " ± ".join(form.format(x) for x in spread if x is not None) or NONE


def cells(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    """The summary as text: the head and a row per label; decoding only if somebody did."""
    rows, mark = comparison.summary(), MARK if comparison.unequal else ""
    better = "higher" if comparison.higher_is_better else "lower"
    metric = comparison.metric
    extra = {f"test {metric}": [row.test(metric) for row in rows]} if comparison.tested else {}
    extra |= {name: [row.extra(name) for row in rows] for name in comparison.extra_metrics}
    head = ["label", f"{metric.replace('_', ' ')} ({better} is better)"]
    head += [name.replace("_", " ") for name in extra]
    head += ["tokens/s", "peak memory", "parameters", "training", "decoding a token"]
    lines = []
    for index, row in enumerate(rows):
        line = [row.label, f"{score(rows, row)} (n={len(row.values)})" if row.values else NONE]
        line += [spread_text(column, column[index]) for column in extra.values()]
        for value, show in (
            (row.tokens_per_second, lambda x: f"{x:,.0f}{mark}"),
            (row.peak_bytes, lambda x: human_bytes(x) + mark),
            (row.parameters, "{:,}".format),
            (row.seconds, lambda x: human_time(x) + mark),
        ):
            line.append(NONE if value is None else show(value))
        line += [f"{human_time(seconds)}{mark} at {context:,}" for context, seconds, _ in row.decode[-1:]] or [NONE]
        lines.append([*map(visible, line)])
    count = len(head) if any(row.decode for row in rows) else len(head) - 1
    return [visible(name) for name in head[:count]], [line[:count] for line in lines]


CAPTION = "Mean ± standard deviation of the seeds that finished; medians of speed and time, the largest peak memory."


def incomparable(comparison: Comparison) -> str:
    """The reason why speed and memory are not compared, in a sentence; empty where they are."""
    reason = comparison.unequal
    said = f"Not comparable, since measured under different conditions: {reason}."
    return f"{said} Train the runs anew under the same ones for their speed." if reason else ""


def table(comparison: Comparison) -> Table:
    """The summary for a terminal, with the numbers of the report."""
    head, lines = cells(comparison)
    short = short_names(line[0] for line in lines)
    notes = "".join(f"\n{visible(row.label)}: {row.note}" for row in comparison.summary() if row.note)
    if reason := incomparable(comparison):
        notes += f"\n{MARK} {visible(reason)}"
    notes += "".join(f"\n{name}: {whole}" for whole, name in short.items() if name != whole)
    out = Table(title=Text(visible(comparison.title)), caption=Text(CAPTION + notes), box=None, padding=(0, 2, 0, 0))
    out.title_justify = out.caption_justify = "left"
    first = 2 + comparison.tested + len(comparison.extra_metrics)
    for index, name in enumerate(head):
        whole = first <= index < first + 4
        out.add_column(Text(name), justify="right" if index else "left", overflow="fold", no_wrap=whole)
    for label, *rest in lines:
        out.add_row(*map(Text, (short[label], *rest)))
    return out
