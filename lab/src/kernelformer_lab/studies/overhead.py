"""Where the time of a training step goes: into tensor operations, or between them."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table
from torch.profiler import ProfilerActivity, profile
from transformers import TrainerCallback

from kernelformer.formatting import human_time, short_names
from kernelformer.timing import taking_timings
from kernelformer_lab.recipes.catalogue import find_recipe
from kernelformer_lab.studies.base import Log, Progress
from kernelformer_lab.studies.settings import OverheadSettings as Settings
from kernelformer_lab.training.config import Run
from kernelformer_lab.training.session import train

WARM, TIMED, PROFILED = 5, 15, 5  # steps
OPERATORS = ("aten::", "kernelformer::")


@dataclass(frozen=True)
class Step:
    """Time of a training step of one attention.

    Args:
        attention: its spec.
        seconds: of a step, the median without a profiler.
        profiled: of a step under the profiler, whose own work is outside of the operations.
        inside: of those, within operators of torch and of this library.
        operations: of torch in one step, those within others included.
    """

    attention: str
    seconds: float
    profiled: float
    inside: float
    operations: int

    @property
    def outside(self) -> float:
        """Share of a profiled step outside of operators: Python, the trainer, the profiler itself."""
        return 1 - self.inside / self.profiled

    @property
    def own(self) -> float:
        """Share of a step outside of operators without the profiler, if operations take as long with it as without."""
        return max(0.0, 1 - self.inside / self.seconds)


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
def measure(base: Run, attention: str) -> Step:
    """Train one attention for some steps, timed and then profiled.

    Args:
        base: the run, but for its attention and its number of steps.
        attention: its spec.
    """
    timer = StepTimer()
    steps = WARM + TIMED + PROFILED
    short = replace(
        base, attention=attention, steps=steps, warmup_steps=0, eval_every=None, save_every=None, log_every=10
    )
    with tempfile.TemporaryDirectory() as folder:
        train(short, Path(folder) / "run", quiet=True, callbacks=[timer])
    events = [x for x in timer.profiler.events() or () if x.name.startswith(OPERATORS)]
    inside = covered((x.time_range.start, x.time_range.end) for x in events) / 1e6
    return Step(attention, median(timer.times), timer.profiled / PROFILED, inside / PROFILED, len(events) // PROFILED)


def attentions(settings: Settings) -> Sequence[str]:
    """The specs that are asked for, or those that the recipe compares."""
    return settings.attention or tuple(find_recipe(settings.recipe).attentions())


def steps(settings: Settings) -> int:
    """How often `run` calls ``progress``."""
    return len(attentions(settings))


def run(settings: Settings, folder: Path, log: Log, progress: Progress) -> list[Step]:
    """Measure a step of each attention."""
    base, result = find_recipe(settings.recipe).run(), []
    for attention in attentions(settings):
        log(attention)
        result.append(measure(base, attention))
        progress()
    return result


def tables(result: Sequence[Step]) -> list[Table]:
    """One table, a row for each attention."""
    out = Table("attention", title="A training step", title_justify="left")
    for name in ("step", "profiled", "outside of operations", "without the profiler", "operations"):
        out.add_column(name, justify="right")
    short = short_names(x.attention for x in result)
    for x in result:
        shares = (f"{100 * share:.1f}%" for share in (x.outside, x.own))
        out.add_row(short[x.attention], human_time(x.seconds), human_time(x.profiled), *shares, f"{x.operations:,}")
    return [out]


def record(result: Sequence[Step]) -> dict[str, Any]:
    """Every figure of every step."""
    return {"steps": [{**asdict(x), "outside": x.outside, "own": x.own} for x in result]}


def picture(result: Sequence[Step], path: Path) -> None:
    """Draw the milliseconds of a step, within and outside of operations, a bar for each attention."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    names = list(short_names(x.attention for x in result).values())
    outside = [1e3 * x.seconds * x.own for x in result]
    inside = [1e3 * x.seconds - y for x, y in zip(result, outside, strict=True)]
    figure, axis = plt.subplots(figsize=(7, 0.45 * len(result) + 1.6), constrained_layout=True)
    axis.barh(names, inside, label="within operations")
    axis.barh(names, outside, left=inside, label="outside")
    axis.invert_yaxis()
    axis.set_xlabel("ms of a training step")
    axis.grid(True, axis="x", alpha=0.2)
    figure.legend(loc="outside upper center", ncols=2, fontsize="small")
    figure.savefig(path, dpi=130)
    plt.close(figure)
