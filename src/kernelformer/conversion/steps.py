"""Steps of a phase of a job: said one by one with the time so far and the time expected, and within a bound."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

Log = Callable[[str], None]


@dataclass
class Steps:
    """Time of a phase, by the work that is done and what it took.

    Args:
        phase: its name.
        work: of all its steps, in any unit.
        log: called with a sentence before each step.
        seconds: at most.
    """

    phase: str
    work: float
    log: Log
    seconds: float = math.inf
    done: float = 0.0
    start: float = field(default_factory=time.monotonic)

    @property
    def spent(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self.start

    def fits(self, work: float) -> bool:
        """Return True if so much more work is expected to end in time, or nothing was done yet."""
        return not self.done or self.spent * (1 + work / self.done) <= self.seconds

    @contextmanager
    def step(self, what: str, work: float) -> Iterator[None]:
        """Say a step with the minutes so far and those expected in all, and count its work."""
        total = min(self.seconds, self.spent * self.work / self.done) if self.done else 0.0
        self.log(f"{self.phase}: {f'{self.spent / 60:.1f} of {total / 60:.1f} min, ' if total else ''}{what}")
        yield
        self.done += work
