"""Progress on a terminal: a bar with the time left; elsewhere the same sentences, a line each."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TaskProgressColumn, TimeElapsedColumn
from rich.progress import TimeRemainingColumn as TimeLeft

from kernelformer.cli.common import console, errors
from kernelformer.formatting import shortened, visible
from kernelformer.terminal import text_column

# "step 30 of 200", "step 30/200", "0.4 of 1.5 min", "change 2 of 9": the words that log sentences have for a part.
PART = re.compile(r"(?:step|change) ([\d,]+)(?: of |/)([\d,]+)|([\d.]+) of ([\d.]+) min")


class Following:
    """Progress of one job.

    Args:
        total: parts of the job; None: nobody knows.
        inner: whether sentences tell how far the present part is, which then counts too.
        seconds: that the job takes, where time decides; counted from the first sentence.
    """

    def __init__(self, total: int | None, inner: bool = False, seconds: float | None = None) -> None:
        columns = (
            SpinnerColumn(),
            text_column("{task.description}"),
            BarColumn(20),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            text_column("left"),
            TimeLeft(),
        )
        quiet = console.stderr or not errors.is_terminal
        self.bars = Progress(*columns, console=errors, transient=True, disable=quiet, refresh_per_second=4)
        self.total, self.inner, self.seconds = total, inner, seconds
        self.bar: TaskID = self.bars.add_task("", total=seconds if total is None else total)
        self.done, self.stage, self.start = 0, "", time.monotonic()

    def log(self, text: str) -> None:
        """Show a sentence next to the bar, or as a line on stderr where there is none."""
        if self.bars.disable:
            errors.print(text)
        self.bars.update(self.bar, description=shortened(visible(text), max(30, errors.width - 60)))
        part = part_done(text)
        if self.seconds is not None:
            self.bars.update(self.bar, completed=min(self.seconds, time.monotonic() - self.start))
        elif part is not None and self.total is None:
            self._stage(text.partition(":")[0], part)
        elif part is not None and self.inner:
            self.bars.update(self.bar, completed=self.done + part)

    def advance(self) -> None:
        """One part of the job is done."""
        self.done += 1
        self.bars.update(self.bar, completed=self.done)

    def reach(self, done: float, total: float) -> None:
        """So much of the whole is done."""
        self.bars.update(self.bar, completed=done, total=total)

    def _stage(self, name: str, part: float) -> None:
        """A job of several stages has a bar for each: their times do not tell of each other's."""
        if name != self.stage:
            self.stage = name
            self.bars.reset(self.bar, total=1.0)
        self.bars.update(self.bar, completed=part, total=1.0)


@contextmanager
def following(total: int | None = None, *, inner: bool = False, seconds: float | None = None) -> Iterator[Following]:
    """Progress of what is done in here, on stderr; it disappears at the end. See `Following`."""
    job = Following(total, inner, seconds)
    with job.bars:
        yield job


def part_done(text: str) -> float | None:
    """How much of something a sentence says to be done, 0 to 1; None: it does not say."""
    match = PART.search(text)
    if match is None:
        return None
    done, whole = (
        float((a or b).replace(",", "")) for a, b in zip(match.groups()[:2], match.groups()[2:], strict=True)
    )
    return min(1.0, done / whole) if whole else None
