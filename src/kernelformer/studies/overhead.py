"""Where the time of a training step goes: into tensor operations, or between them."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table
from torch.profiler import ProfilerActivity, profile
from transformers import TrainerCallback

from kernelformer.formatting import human_time, short_names
from kernelformer.training.config import Run
from kernelformer.training.session import train

WARM, TIMED, PROFILED = 5, 15, 5  # steps
OPERATORS = ("aten::", "kernelformer::")


@dataclass(frozen=True)
class Step:
    """One attention's training step.

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
        """The same without the profiler, as far as operations take as long with it as without."""
        return max(0.0, 1 - self.inside / self.seconds)


class Watch(TrainerCallback):
    """Times some steps, then profiles some more."""

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
        """Stop it."""
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


def run(base: Run, attentions: Sequence[str], tell: Callable[[str], None] = lambda _: None) -> list[Step]:
    """Train each attention for some steps and look."""
    found = []
    steps = WARM + TIMED + PROFILED
    for attention in attentions:
        tell(attention)
        watch = Watch()
        short = replace(
            base, attention=attention, steps=steps, warmup_steps=0, eval_every=None, save_every=None, log_every=10
        )
        with tempfile.TemporaryDirectory() as folder:
            train(short, Path(folder) / "run", quiet=True, callbacks=[watch])
        events = [x for x in watch.profiler.events() or () if x.name.startswith(OPERATORS)]
        inside = covered((x.time_range.start, x.time_range.end) for x in events) / 1e6
        found.append(
            Step(attention, median(watch.times), watch.profiled / PROFILED, inside / PROFILED, len(events) // PROFILED)
        )
    return found


def table(found: Sequence[Step]) -> Table:
    """For the terminal."""
    out = Table("attention", title="A training step", title_justify="left")
    for name in ("step", "profiled", "outside of operations", "without the profiler", "operations"):
        out.add_column(name, justify="right")
    short = short_names(x.attention for x in found)
    for x in found:
        shares = (f"{100 * share:.1f}%" for share in (x.outside, x.own))
        out.add_row(short[x.attention], human_time(x.seconds), human_time(x.profiled), *shares, f"{x.operations:,}")
    return out


def as_json(found: Sequence[Step]) -> list[dict[str, Any]]:
    """Plain values."""
    return [{**asdict(x), "outside": x.outside, "own": x.own} for x in found]
