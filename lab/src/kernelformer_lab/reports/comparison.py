"""Runs of a comparison: read from their folders, gathered into one row per label, shown as a table and in words."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import numpy as np
from markupsafe import Markup
from rich.table import Table
from rich.text import Text

from kernelformer.errors import integer
from kernelformer.files import write_text
from kernelformer.formatting import human_bytes, human_time, short_names, visible
from kernelformer.page import COLOURS, INK, LINES, Drawing, figure, legend_key, render, safe, safe_label, small, style
from kernelformer_lab.records import RESULT, RUN, Result, part, read_head, read_metrics, read_result, reading

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
    """Contents of the folder of one run."""

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
    resumed: tuple[Mapping[str, Any], ...] = ()  # environments in which it was resumed

    @property
    def conditions(self) -> list[dict[str, Any]]:
        """Conditions of its speed, at its start and at each resumption."""
        return [conditions_of(x) for x in (self.environment, *self.resumed)]

    @property
    def diverged(self) -> bool:
        """True where a loss, or the final value, was not finite."""
        losses = [p.values["loss"] for p in (*self.training, *self.evaluation)]
        return not all(map(math.isfinite, losses)) or (self.result is not None and not self.scored)

    @property
    def scored(self) -> bool:
        """True where it finished with a finite value."""
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

    def extra(self, metric: str, test: bool = False) -> Spread:
        """Another score, or one on the test split, of the runs that have it."""
        ends = [run.result.test if test else run.result.scores for run in self.runs if run.result is not None]
        return spread_of([x[metric] for x in ends if math.isfinite(x.get(metric, math.nan))])

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
        """The task; behind a semicolon stands how it gets data, which a comparison has."""
        return self.about.partition(";")[0]

    @property
    def curve(self) -> str:
        """The figure that is drawn over time: the metric, or the loss where the metric is known at the end alone."""
        known = any(self.metric in p.values for run in self.runs for p in run.evaluation)
        return self.metric if known else "loss"

    @property
    def tested(self) -> bool:
        """True where runs have selected their best weights and scored them on the test split."""
        return any(run.result is not None and self.metric in run.result.test for run in self.runs)

    @property
    def unequal(self) -> str:
        """Conditions of speed and memory that differ; empty where they can be compared."""
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
    """The summary as text: the head and a row per label; decoding only where it was measured."""
    rows, mark = comparison.summary(), MARK if comparison.unequal else ""
    better = "higher" if comparison.higher_is_better else "lower"
    metric = comparison.metric
    extra = {f"test {metric}": [row.extra(metric, test=True) for row in rows]} if comparison.tested else {}
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


def comparison_table(comparison: Comparison) -> Table:
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


def draw_curves(
    axis: Any,
    comparison: Comparison,
    curves: Mapping[int, Curve],
    x: int,
    mark: bool,
    places: Mapping[str, int] | None = None,
) -> None:
    """Means and bands of runs with a result, others alone.

    Args:
        curves: by the place of the run.
        x: 0 for steps, 1 for seconds.
        mark: whether points are few, and have markers of their own.
        places: the style of each label; None: by their order.
    """
    alone, frame = [], []
    for place, label in enumerate(comparison.labels):
        index = place if places is None else places[label]
        mine = [i for i, run in enumerate(comparison.runs) if run.label == label and curves[i]]
        whole = [i for i in mine if comparison.runs[i].scored]
        alone += [(index, i) for i in mine if i not in whole]
        common = sorted(set.intersection(*(set(curves[i]) for i in whole))) if whole else []
        if not common:
            continue
        common = common[:: -max(1, len(common) // 400)][::-1]  # more points than pixels would only make a large file
        both = np.array([[curves[i][step] for step in common] for i in whole])  # (runs, steps, 2)
        at = both[..., 0].mean(0) if x else np.array(common)
        mean = both[..., 1].mean(0)
        spread = both[..., 1].std(0, ddof=1) if len(whole) > 1 else 0 * mean
        axis.plot(at, mean, **style(index) | {"markevery": max(1, len(at) // (10 if mark else 5))})
        axis.fill_between(at, mean - spread, mean + spread, color=COLOURS[index % 7], alpha=0.2, linewidth=0)
        late = slice(len(at) // 8, None)
        frame += [*(mean - spread)[late], *(mean + spread)[late]]
    room = 0.05 * (max(frame) - min(frame)) or 0.5 if frame else math.inf
    low, high = min(frame, default=0) - room, max(frame, default=0) + room
    for index, i in alone:
        line = [(step, *curves[i][step]) for step in sorted(curves[i])]
        thin = {"marker": "" if len(line) > 1 else "o", "linewidth": 0.8}
        axis.plot([row[x] for row in line], [row[2] for row in line], **style(index) | thin)
        if comparison.runs[i].diverged:
            end = line[-1][x], min(max(line[-1][2], low), high)
            axis.plot(*end, "X", color=COLOURS[index % 7], mec=INK, markersize=9, clip_on=False, zorder=5)
    if frame:
        axis.set_ylim(low, high)  # neither the start nor a run that blows up may flatten the rest
    axis.set_xlabel("training time, s" if x else "step")
    if not x:
        axis.locator_params(axis="x", integer=True)


def draw_points(axis: Any, rows: Sequence[tuple[int, float, float, float]], name: str) -> None:
    """Points with error bars: rows of style, x, mean and deviation; ``name`` is that of the axis."""
    for index, at, mean, spread in rows:
        marks = style(index) | {"linestyle": "none", "markersize": 6.5, "elinewidth": 1.2, "capsize": 2.5}
        axis.errorbar([at], [mean], [spread], **marks)
    axis.margins(0.08)
    axis.xaxis.set_major_formatter(lambda x, _: f"{x:,g}" if x < 1e4 else f"{x / 1e3:,g}k")
    axis.set_xlabel(name)


def draw_sizes(
    axis: Any, series: Mapping[int, Sequence[tuple[int, float, float]]], levels: Mapping[int, float], name: str
) -> None:
    """Means with error bars over the number of features.

    Args:
        series: by style, rows of size, mean and deviation.
        levels: by style, means of what has no such number.
    """
    for index, level in levels.items():  # first: the frame is fitted to what comes later
        axis.axhline(level, color=COLOURS[index % 7], linestyle=LINES[index % 4], linewidth=1.2)
    for index, rows in series.items():
        at, mean, spread = zip(*rows, strict=True)
        axis.errorbar(at, mean, spread, **style(index) | {"elinewidth": 1.2, "capsize": 3})
    sizes = sorted({row[0] for rows in series.values() for row in rows})
    axis.set_xscale("log", base=2)
    axis.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axis.minorticks_off()
    axis.set_xlabel(name)


def draw_bars(axis: Any, comparison: Comparison, values: Mapping[str, float], show: Callable[[float], str]) -> None:
    """Draw one bar for each label."""
    colours = [COLOURS[comparison.labels.index(label) % 7] for label in values]
    bars = axis.barh(range(len(values)), list(values.values()), color=colours, height=0.62)
    axis.bar_label(bars, [show(value) for value in values.values()], padding=3, fontsize=10.5)
    short = [label if len(label) < 25 else label[:12] + "…" + label[-11:] for label in map(visible, values)]
    axis.set_yticks(range(len(values)), short)
    axis.set(ylim=(len(values) - 0.5, -0.5), xmargin=0.2, xticks=[])
    axis.grid(False)
    axis.spines["bottom"].set_visible(False)


def draw_decode(axis: Any, comparison: Comparison, column: int, show: Callable[[float], str]) -> None:
    """Draw seconds per token (``column`` 1) or bytes of state (2) over the context."""
    for row in comparison.summary():
        points = [(r[0], r[column]) for r in row.decode if r[0] > 0 and r[column] > 0]  # both axes are logarithmic
        if points:
            axis.plot(*zip(*points, strict=True), **style(comparison.labels.index(row.label)))
    axis.set_xscale("log", base=2)
    axis.set_yscale("log", base=10 if column == 1 else 2)  # round seconds, and round numbers of bytes
    if column == 1:
        axis.yaxis.get_major_locator().set_params(subs=(1, 2, 5))
    axis.minorticks_off()
    axis.xaxis.set_major_formatter(lambda x, _: f"{x / 1024:g}k" if x >= 1024 else f"{x:g}")
    axis.yaxis.set_major_formatter(lambda y, _: show(y))
    axis.set_xlabel("context, tokens")


def write_report(comparison: Comparison, path: Path | str, *, samples: Mapping[str, str] | None = None) -> None:
    """Write the report, all or nothing: a reader sees the old file or the new one.

    Args:
        path: of the HTML file; its folder is made if need be.
        samples: texts that the models wrote, by the name of the run.
    """
    target = Path(path)
    if target.is_dir():
        raise ValueError(f"the report's path must be a file, got the folder {target}; add a name such as report.html.")
    page = _page(comparison, samples or {})
    target.parent.mkdir(parents=True, exist_ok=True)
    write_text(target, page)


def words(comparison: Comparison) -> list[str]:
    """The outcome in sentences: the best and by how much, the fastest, the diverged and the unfinished."""
    rows = comparison.summary()
    ranked = [row for row in rows if row.mean is not None]
    said = [_best(comparison.metric.replace("_", " "), ranked, rows)]
    if reason := incomparable(comparison):
        said.append(f"{MARK} Speed and memory are marked: {reason[0].lower()}{reason[1:]}")
    timed = [r for r in rows if r.tokens_per_second and not reason]
    timed.sort(key=lambda r: -(r.tokens_per_second or 0))
    if len(timed) > 1:
        (fast, a), (slow, b) = ((r.label, r.tokens_per_second or 1) for r in (timed[0], timed[-1]))
        said.append(f"Fastest in training is {fast} with {a:,.0f} tokens/s, {a / b:.3g} times {slow}, the slowest.")
    contexts = [{c for c, seconds, _ in row.decode if seconds > 0} for row in rows if row.decode and not reason]
    if contexts and (shared := set.intersection(*contexts)):
        at = max(shared)
        quick = sorted((t, r.label, size) for r in rows for c, t, size in r.decode if c == at)
        (a, fast, size), (b, slow, _) = quick[0], quick[-1]
        text = f"With a context of {at:,} tokens {fast} decodes fastest: {human_time(a)} a token"
        slower = f"; {slow} takes {b / a:.3g} times as long" if len(quick) > 1 else ""
        said.append(f"{text}, {human_bytes(size)} of state{slower}.")
    for state, title in (("diverged", "Diverged (a loss was not finite)"), ("unfinished", "Unfinished")):
        some = [f"{run.label} (seed {run.seed}, step {run.step})" for run in comparison.runs if run.state == state]
        said += [f"{title}: {', '.join(some)}."] if some else []
    return said


def _best(metric: str, ranked: Sequence[Summary], rows: Sequence[Summary]) -> str:
    if not ranked:
        return f"No run has finished with a finite {metric}, so that nothing can be said about the best."
    shown = [score(rows, row) for row in ranked[:2]]
    if len(ranked) < 2:
        return f"{ranked[0].label} ({metric} {shown[0]}) is the only one with a value."
    a, b = ranked[:2]
    gap = abs((a.mean or 0.0) - (b.mean or 0.0))
    if gap == 0:
        return f"Best are {a.label} and {b.label}, level at {metric} {shown[0]}."
    text = f"Best is {a.label} ({metric} {shown[0]}), ahead of {b.label} ({shown[1]}) by {gap:.2g}"
    if a.deviation is None or b.deviation is None:
        return f"{text}; with one seed there is no spread to judge that by."
    spread = math.hypot(a.deviation, b.deviation)  # of the difference between two single runs
    if gap <= spread:
        return f"{text}, which is within the spread over seeds ({spread:.2g}): the two cannot be told apart."
    return f"{text}, which is beyond the spread over seeds ({spread:.2g})."


def _learning(comparison: Comparison) -> list[Drawing]:
    curve, names = comparison.curve.replace("_", " "), ", ".join(comparison.labels)
    scores = {i: smoothed(run.evaluation, comparison.curve, 0) for i, run in enumerate(comparison.runs)}
    losses = {i: smoothed(run.training, "loss", 0.04) for i, run in enumerate(comparison.runs)}
    made = []
    for kind, curves, height in ((curve, scores, 3.3), ("smoothed training loss", losses, 2.1)):
        for x, over in enumerate(("steps", "training seconds") if any(curves.values()) else ()):
            draw = partial(draw_curves, comparison=comparison, curves=curves, x=x, mark=curves is scores)
            title = f"{kind[:1].upper()}{kind[1:]} over {over}"
            made.append(figure(f"curve{height:.0f}{x}", title, names, draw, height))
    return made


def _cost(comparison: Comparison) -> list[Drawing]:
    rows = [row for row in comparison.summary() if row.tokens_per_second is not None]
    made, mark = [], f" {MARK} (not comparable)" if comparison.unequal else ""
    if not rows:
        return []
    for name, title, values, show in (
        ("speed", "Training speed, tokens/s", [r.tokens_per_second or 0.0 for r in rows], "{:,.0f}".format),
        ("memory", "Peak memory", [float(r.peak_bytes or 0) for r in rows], human_bytes),
    ):
        given = {row.label: value for row, value in zip(rows, values, strict=True)}
        told = ", ".join(f"{label} {show(value)}" for label, value in given.items())
        draw = partial(draw_bars, comparison=comparison, values=given, show=show)
        made.append(figure(name, f"{title}{mark}", told, draw, 0.4 + 0.36 * len(rows)))
    return made


def _decoding(comparison: Comparison) -> list[Drawing]:
    names = ", ".join(row.label for row in comparison.summary() if row.decode)
    return [
        figure(name, title, names, partial(draw_decode, comparison=comparison, column=column, show=show))
        for name, title, column, show in (
            ("latency", "Time per token over the length of the context", 1, human_time),
            ("state", "Size of the state over the length of the context", 2, human_bytes),
        )
        if names
    ]


def flat(record: Mapping[str, Any], start: str = "") -> dict[str, str]:
    """Nested values by dotted names, as text."""
    out: dict[str, str] = {}
    for key, value in record.items():
        if isinstance(value, dict) and value:
            out |= flat(value, f"{start}{key}.")
        else:
            out[start + key] = value if isinstance(value, str) else json.dumps(value)
    return out


HtmlTable = tuple[str, Sequence[str], Sequence[Sequence[str]], str]  # the arguments of the macro `table`


def records_tables(comparison: Comparison, name: str, records: Sequence[Mapping[str, Any]]) -> list[HtmlTable]:
    """Tables of what all runs share, and of what tells labels apart; one without rows is left out."""
    plain = [flat(record) for record in records]
    same, other = [], []
    for key in dict.fromkeys(key for record in plain for key in record):
        by: dict[str, dict[str, None]] = {label: {} for label in comparison.labels}
        for run, record in zip(comparison.runs, plain, strict=True):
            by[run.label][record.get(key, NONE)] = None
        if len({value for values in by.values() for value in values}) == 1:
            same.append([key, *by[comparison.labels[0]]])
        elif key not in ("label", "seed"):
            other.append([key, *(" | ".join(values) for values in by.values())])
    both: list[HtmlTable] = [
        (f"{name} of all runs", ["of all runs", ""], same, ""),
        (f"{name} by label", ["by label", *comparison.labels], other, ""),
    ]
    return [x for x in both if x[2]]


def _ends(run: RunRecord, metric: str) -> list[str]:
    """The value of a run, that of its test split, and the median, 95th percentile and maximum of its gradient norms."""
    result = run.result
    if result is None:
        return [NONE] * 3

    def measured(value: float, error: float) -> str:
        return f"{value:.6g} ± {error:.2g}" if math.isfinite(error) else f"{value:.6g}"

    test = measured(result.test[metric], result.test_error) if metric in result.test else NONE
    norms = ", ".join(f"{result.grad_norm[name]:.3g}" for name in ("median", "p95", "max") if name in result.grad_norm)
    return [measured(result.value, result.value_error), test, norms or NONE]


def _every_run(comparison: Comparison) -> HtmlTable:
    metric = comparison.metric
    rows = [
        [run.label, *map(str, (run.seed, run.state, *_ends(run, metric), run.step, run.path))]
        for run in comparison.runs
    ]
    head = ["run", "seed", "state", f"{metric} ± standard error over samples", f"test {metric}", "gradient norm"]
    return "every run", [*head, "steps", "folder"], rows, ""


def results_table(
    comparison: Comparison,
    places: Mapping[str, int],
    *,
    prefix: str = "row",
    show: Callable[[str], Markup] = safe_label,
    below: Mapping[str, str] | None = None,
    more: Sequence[Sequence[str]] = (),
) -> HtmlTable:
    """Make a table with a row for each label and the key of its curves, the best first.

    Args:
        prefix: keeps references apart from those of other tables.
        below: text that stands under the metric, by label.
        more: further lines, as long as the others.
    """
    head, lines = cells(comparison)
    marked: list[Sequence[str]] = []
    for row, (_, value, *rest) in zip(comparison.summary(), lines, strict=True):
        key = legend_key(f"{prefix}{comparison.labels.index(row.label)}", places[row.label])
        label = key + show(row.label) + small(row.note)
        marked.append([label, safe(value) + small((below or {}).get(row.label)), *rest])
    kind = "results best" if len(lines) > 1 and comparison.summary()[0].values else "results"
    return "results", head, [*marked, *more], kind


def _page(comparison: Comparison, samples: Mapping[str, str]) -> str:
    mark = f" {MARK} {incomparable(comparison)}" if comparison.unequal else ""
    labels = list(enumerate(comparison.labels))
    return render(
        Path(__file__).with_name("comparison.html"),
        comparison.title,
        comparison.subtitle,
        words=" ".join(words(comparison)),
        results=results_table(comparison, {label: i for i, label in labels}),
        caption=CAPTION + mark,
        keys=lambda name: [(legend_key(f"{name}{i}", i), label) for i, label in labels],
        learning=_learning(comparison),
        cost=_cost(comparison),
        decoding=_decoding(comparison),
        samples=samples,
        details={
            "Every run": [_every_run(comparison)],
            "Settings": records_tables(comparison, "settings", [run.settings for run in comparison.runs]),
            "Environment": records_tables(comparison, "environment", [run.environment for run in comparison.runs]),
        },
        commands="\n".join(dict.fromkeys(run.command for run in comparison.runs)),
    )
