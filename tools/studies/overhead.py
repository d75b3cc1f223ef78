"""Measure the part of a training step that is outside of tensor operations.

python tools/studies/overhead.py listops
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table
from torch.profiler import ProfilerActivity, profile
from transformers import TrainerCallback

from kernelformer.formatting import human_time, short_names
from kernelformer.settings import Settings, option
from kernelformer_lab.bench.timing import taking_timings
from kernelformer_lab.cli.studies import main
from kernelformer_lab.figures import drawing, table
from kernelformer_lab.recipes.catalogue import find_recipe
from kernelformer_lab.studies.base import SCRIPT, SPECS, Log, Progress, Record, Row, Study
from kernelformer_lab.training.config import Run
from kernelformer_lab.training.session import train

WARM, TIMED, PROFILED = 5, 15, 5  # steps
OPERATORS = ("aten::", "kernelformer::")


@dataclass(frozen=True, kw_only=True)
class OverheadSettings(Settings):
    """Settings of this study."""

    recipe: str = option("demo", "a recipe of `kernelformer list`", argument=True, shown="RECIPE")
    attention: tuple[str, ...] = option((), f"{SPECS}; default: the recipe's")


class StepTimer(TrainerCallback):
    """Callback that times some steps, then profiles some more."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.profiler = profile(activities=[ProfilerActivity.CPU])
        self.profiled, self._start = 0.0, 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the clock, or the profiler."""
        if state.global_step == WARM + TIMED:
            self.profiler.__enter__()
        if state.global_step <= WARM + TIMED:
            self._start = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop the clock, or the profiler."""
        if WARM < state.global_step <= WARM + TIMED:
            self.times.append(time.perf_counter() - self._start)
        if state.global_step == WARM + TIMED + PROFILED:
            self.profiled = time.perf_counter() - self._start
            self.profiler.__exit__(None, None, None)


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total, end = 0.0, float("-inf")
    for first, last in sorted(spans):
        total += max(0.0, last - max(first, end))
        end = max(end, last)
    return total


@taking_timings()
def measure(base: Run, attention: str) -> Row:
    """Train one attention for some steps, timed and then profiled.

    Returns:
        ``seconds`` of a step, the median without a profiler; ``profiled`` seconds of one under it; ``inside``: of
        those, in operators of torch and of this library; ``operations`` of a step, those within others included;
        ``outside``: share of a profiled step outside of operators (Python, the trainer, the profiler itself); ``own``:
        the same without the profiler, if operations take as long with it as without.
    """
    timer = StepTimer()
    short = replace(
        base,
        attention=attention,
        steps=WARM + TIMED + PROFILED,
        warmup_steps=0,
        eval_every=None,
        save_every=None,
        log_every=10,
    )
    with tempfile.TemporaryDirectory() as folder:
        train(short, Path(folder) / "run", quiet=True, callbacks=[timer])
    events = [x for x in timer.profiler.events() or () if x.name.startswith(OPERATORS)]
    inside = covered((x.time_range.start, x.time_range.end) for x in events) / 1e6 / PROFILED
    seconds, profiled = median(timer.times), timer.profiled / PROFILED
    figures = {"seconds": seconds, "profiled": profiled, "inside": inside, "operations": len(events) // PROFILED}
    return {"attention": attention, **figures, "outside": 1 - inside / profiled, "own": max(0.0, 1 - inside / seconds)}


def attentions(settings: OverheadSettings) -> Sequence[str]:
    """The specs that are asked for, or those that the recipe compares."""
    return settings.attention or tuple(find_recipe(settings.recipe).attentions())


def run(record: Record, log: Log, progress: Progress) -> None:
    """Measure a step of each attention."""
    base = find_recipe(record.settings.recipe).run()
    record.figures["steps"] = []
    for attention in attentions(record.settings):
        log(attention)
        record.figures["steps"].append(measure(base, attention))
        progress()


def tables(record: Record) -> list[Table]:
    """A row for each attention."""
    rows = record.figures["steps"]
    short = short_names(x["attention"] for x in rows)
    cells = [
        [short[x["attention"]], *(human_time(x[name]) for name in ("seconds", "profiled"))]
        + [f"{100 * x[name]:.1f}%" for name in ("outside", "own")]
        + [f"{x['operations']:,}"]
        for x in rows
    ]
    columns = ("attention", "step", "profiled", "outside of operations", "without the profiler", "operations")
    return [table("A training step", columns, cells)]


def picture(record: Record, path: Path) -> None:
    """Draw the milliseconds of a step, within and outside of operations, a bar for each attention."""
    rows = record.figures["steps"]
    names = list(short_names(x["attention"] for x in rows).values())
    outside = [1e3 * x["seconds"] * x["own"] for x in rows]
    inside = [1e3 * x["seconds"] - y for x, y in zip(rows, outside, strict=True)]
    with drawing(path, (7, 0.45 * len(rows) + 1.6)) as (figure, ((axis,),)):
        axis.barh(names, inside, label="within operations")
        axis.barh(names, outside, left=inside, label="outside")
        axis.invert_yaxis()
        axis.set_xlabel("ms of a training step")
        axis.grid(True, axis="x", alpha=0.2)
        figure.legend(loc="outside upper center", ncols=2, fontsize="small")


STUDY = Study("overhead", "", OverheadSettings, lambda x: len(attentions(x)), run, tables, picture, program=SCRIPT)

if __name__ == "__main__":
    main(STUDY, "Measure the part of a training step that is outside of tensor operations.")
