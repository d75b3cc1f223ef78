"""The course of a stage of distillation: steps, clock, held-out curve, and what is needed to go on after a stop."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Log = Callable[[int, float], None]
WARM_UP = 20  # steps; a tenth of the stage where it has few
LOOKS = 20  # at the held-out texts, evenly over a stage; fewer where it has few steps
LOOKING = 0.15  # of the time at most, where a clock ends the stage
PATIENCE = 10  # looks without a better one after which a stage ends: rates at their peak often cost something at first
Point = tuple[int, float, int, float]  # step, seconds, tokens, held-out loss


@dataclass
class Progress:
    """Progress of a stage, with which a run that was stopped goes on as if it had not been.

    Args:
        losses: of the steps so far.
        saved: what `state` gave, to go on from.
    """

    losses: list[float] = field(default_factory=list)
    saved: dict[str, Any] | None = None
    curve: list[Point] = field(default_factory=list)
    tokens: int = 0  # of all steps so far
    ended: bool = False  # whether held-out texts no longer gained
    over: bool = False  # whether the stage is done
    rates: list[float] = field(default_factory=list)  # of the groups, at their peak
    whole: bool = True  # whether weights and losses are of the same steps
    optimizer: torch.optim.Optimizer | None = None  # of the run that is going on
    best: list[Tensor] | None = None  # trained tensors as they were at the best look
    _before: float = 0.0  # seconds of runs that were stopped
    _start: float = 0.0

    def state(self) -> dict[str, Any] | None:
        """All that a run needs to go on, as tensors and plain values; None before the first run."""
        if self.optimizer is None:
            return self.saved
        return {
            "optimizer": self.optimizer.state_dict(),
            "curve": self.curve,
            "tokens": self.tokens,
            "ended": self.ended,
            "over": self.over,
            "rates": self.rates,
            "best": self.best,
            "seconds": self.seconds,
        }

    def start(self, optimizer: torch.optim.Optimizer) -> None:
        """Begin a run with this optimizer, from the state that was saved if there is one."""
        for group in optimizer.param_groups:
            group.setdefault("peak", group["lr"])
        if self.saved is not None:
            optimizer.load_state_dict(self.saved["optimizer"])
            self.curve = [tuple(x) for x in self.saved["curve"]]
            self.tokens, self.ended, self.best = (self.saved[x] for x in ("tokens", "ended", "best"))
            self._before = self.saved["seconds"]
        self.rates = [group["peak"] for group in optimizer.param_groups]
        self.optimizer = optimizer
        self._start = time.monotonic()

    @property
    def seconds(self) -> float:
        """Time that the stage has taken so far, in all runs."""
        return self._before + (time.monotonic() - self._start if self._start else 0.0)


class Stage:
    """A stage of training: steps until their number, the time or the patience is at its end.

    The rate rises over the first steps and falls to nothing by a cosine over the stage. Where there are held-out
    texts they are looked at before the first step and `LOOKS` times after, and the tensors of the best look are what
    stays in the end.

    Args:
        optimizer: of the trained tensors.
        steps: at most.
        seconds: at most, if given; the schedule then follows the clock, of all runs together.
        progress: to go on with.
        look: gives the loss of the held-out texts; None: there are none.
        log: called after each step with its number and its loss.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        steps: int,
        seconds: float | None,
        progress: Progress | None,
        look: Callable[[], float] | None,
        log: Log | None,
    ) -> None:
        self.optimizer, self.steps, self.budget, self.look, self.log = optimizer, steps, seconds, look, log
        self.progress = progress or Progress()
        self.progress.start(optimizer)
        self.trained = [x for group in optimizer.param_groups for x in group["params"]]
        self.looking = 0.0  # seconds
        self.looks = max(1, min(LOOKS, steps // 4))

    @property
    def share(self) -> float:
        """The share of the work that is done."""
        gone = 0.0 if self.budget is None else self.progress.seconds / max(self.budget, 1e-9)
        return max(len(self.progress.losses) / max(1, self.steps), gone)

    def __iter__(self) -> Iterator[int]:
        """Yield the numbers of the steps, from the first one that was not done; each is to call `update`."""
        progress = self.progress
        while True:
            if self._look_is_due():  # here, so that a look during which a run was stopped is made up for
                self._look()
            if len(progress.losses) >= self.steps or self.share >= 1 or progress.ended:
                break
            step = len(progress.losses)
            self._set_rate(step)
            yield step
        if self.look is not None and progress.curve[-1][0] < len(progress.losses):
            self._look()
        self._finish()

    def update(self, loss: float, tokens: int) -> None:
        """Make a step of the optimizer, by the gradients that are there, and count it: both or neither."""
        progress = self.progress
        with uninterrupted():
            progress.whole = False
            self.optimizer.step()
            progress.losses.append(loss)
            progress.tokens += tokens
            progress.whole = True
        if self.log is not None:
            self.log(len(progress.losses), loss)

    def _look_is_due(self) -> bool:
        if self.look is None:
            return False
        quick = self.budget is None or self.looking <= LOOKING * self.progress.seconds
        return quick and min(1.0, self.share) * self.looks >= len(self.progress.curve)

    def _look(self) -> None:
        assert self.look is not None
        progress = self.progress
        start = time.monotonic()
        value = self.look()
        self.looking += time.monotonic() - start
        best = min((x[-1] for x in progress.curve), default=math.inf)
        progress.curve.append((len(progress.losses), progress.seconds, progress.tokens, value))
        if value < best:
            progress.best = [x.detach().clone() for x in self.trained]
        values = [x[-1] for x in progress.curve]
        progress.ended = len(values) - 1 - values.index(min(values)) >= PATIENCE

    @torch.no_grad()
    def _finish(self) -> None:
        if self.progress.best is not None:
            for x, best in zip(self.trained, self.progress.best, strict=True):
                x.copy_(best)
        self.optimizer.zero_grad()
        self.progress.over = True

    def _set_rate(self, step: int) -> None:
        rise = max(1, min(WARM_UP, self.steps // 10))
        factor = min(1.0, (step + 1) / rise) * 0.5 * (1 + math.cos(math.pi * min(1.0, self.share)))
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak"] * max(factor, 0.01)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold Ctrl-C back until the end of a block; other threads than the main one never get it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pressed = []
    before = signal.signal(signal.SIGINT, lambda *_: pressed.append(True))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed:
        raise KeyboardInterrupt


def best_rate(
    tensors: Sequence[Tensor], rates: Sequence[float], trial: Callable[[float], float]
) -> tuple[float, dict[float, float]]:
    """Try rates one after the other, a few steps each, and put the tensors back after each.

    Args:
        tensors: that a trial changes.
        rates: to try.
        trial: trains with a rate and returns a held-out loss.

    Returns:
        The rate with the smallest loss, and all losses; one that is no number counts as infinite.
    """
    before = [x.detach().clone() for x in tensors]
    losses = {}
    for rate in rates:
        value = trial(rate)
        losses[rate] = value if math.isfinite(value) else math.inf
        with torch.no_grad():
            for x, old in zip(tensors, before, strict=True):
                x.copy_(old)
    return min(losses, key=losses.__getitem__), losses
