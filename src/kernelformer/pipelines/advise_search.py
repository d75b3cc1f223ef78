"""The search of `advise`: which candidates are measured, timed, fitted and run in the model, within its time."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from kernelformer.distill.candidates import LEARNED, Candidate, coarse_grid, neighbours, windows_for
from kernelformer.distill.expected import LossFit
from kernelformer.distill.figures import Figure
from kernelformer.distill.trials import Trials
from kernelformer.hf.propose import propose
from kernelformer.measure.attention_times import Shape, time_attentions, time_curve, timed_core
from kernelformer.reports.advice_result import Advice, Kept, Trial

Log = Callable[[str], None]
T = TypeVar("T", int, tuple[int, int])
Item = TypeVar("Item", Candidate, str)
# Shares of the time of the search by which each part has to end; what is left over goes to the parts after it.
ERRORS, FITS, TIMES, RUNS, KEPT = 0.25, 0.42, 0.55, 0.85, 0.93
BEST = 3  # methods whose neighbours are tried
RUN = 12  # models at most
FITTED = 64  # features of maps that are fitted
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
FAR_ABOVE = 2.0  # times the median error: such an attention, or head, may be worth keeping exact


@dataclass
class Clock:
    """Time of an advice.

    Args:
        seconds: in all.
        start: when it began.
        longest: seconds that one step of a kind has taken so far.
        before: seconds until the shares began.
    """

    seconds: float
    start: float = field(default_factory=time.monotonic)
    longest: dict[str, float] = field(default_factory=dict)
    before: float = 0.0

    @property
    def spent(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self.start

    def left(self, share: float) -> float:
        """Seconds until a share of the time is over."""
        return self.before + share * (self.seconds - self.before) - self.spent

    @contextmanager
    def step(self, kind: str) -> Iterator[None]:
        """Measure one step of a kind."""
        before = self.spent
        yield
        self.longest[kind] = max(self.longest.get(kind, 0.0), self.spent - before)

    def steps(self, kind: str, share: float, items: Sequence[Item], left_out: list[str]) -> Iterator[Item]:
        """Yield items while another one fits in; name the others."""
        for place, item in enumerate(items):
            if self.left(share) < self.longest.get(kind, 0.0):
                missed = f"{kind} of {few(list(map(str, items[place:])))}"
                left_out += [] if missed in left_out else [missed]
                return
            with self.step(kind):
                yield item


@dataclass
class Search:
    """Search for the cheapest attention that leaves a model as it is.

    Args:
        trials: the model and its attention.
        advice: what is filled.
        clock: how long.
        shape: of its attentions, to be timed.
        steps: of a fit.
        log: called with what happens.
    """

    trials: Trials
    advice: Advice
    clock: Clock
    shape: Shape
    steps: int
    log: Log
    grid: list[Candidate] = field(default_factory=list)  # that is to be measured

    def start(self) -> None:
        """Measure and run the candidate that is the most promising by the kind of model, see `propose`.

        Raises:
            ValueError: the budget is over, or the model can have none of the candidates.
        """
        advice = self.advice
        first = propose(self.trials.model, distilled=advice.causal)
        self.grid = coarse_grid(causal=advice.causal, length=advice.length, first=first)
        if self.clock.left(1.0) <= 0:
            raise ValueError(
                f"a budget of {self.clock.seconds / 60:g} minutes was over before one candidate was measured, after "
                f"{self.clock.spent:.0f} seconds; give more --minutes, a smaller --length or fewer --samples."
            )
        while self.grid and not advice.trials:
            candidate = self.grid.pop(0)
            with self.clock.step("fits" if candidate.learned else "errors"):  # maps are started as for a fit
                self._measure(candidate)
        if not advice.trials:
            name, reason = next(iter(advice.refused.items()))
            raise ValueError(f"the model can have none of the candidates; {name}: {reason}")
        self._run(advice.trials[0])
        self.clock.before = self.clock.spent

    def measure_errors(self) -> None:
        """Measure a coarse grid, and the neighbours of the best."""
        length = self.advice.length
        for candidate in self.clock.steps("errors", ERRORS, self.grid, self.advice.left_out):
            self._measure(candidate)
        for _ in range(2):
            known = [x.candidate for x in self.advice.trials]
            new = neighbours(self._best_of_methods(), known, length=length)
            for candidate in self.clock.steps("errors", ERRORS, new, self.advice.left_out):
                self._measure(candidate)

    def _best_of_methods(self) -> list[Candidate]:
        """The candidate of smallest error of each of the best methods that have a size."""
        ranked = sorted((x for x in self.advice.trials if x.candidate.size), key=lambda x: x.errors.mean)
        best: dict[str, Candidate] = {}
        for x in ranked:
            best.setdefault(x.candidate.method, x.candidate)
        return list(best.values())[:BEST]

    def _measure(self, candidate: Candidate, steps: int = 0) -> None:
        self.log(f"error of {candidate}")
        try:
            errors = self.trials.errors(candidate)
        except ValueError as reason:
            self.advice.refused[str(candidate)] = str(reason)
            return
        self.advice.trials.append(Trial(candidate, errors, steps=steps))

    def fit(self) -> None:
        """Fit maps with each window, and without, on other texts than those that are measured."""
        windows = windows_for(self.advice.length)
        order = sorted(windows, key=lambda w: abs(w - 64))
        sinks = 4 if self.advice.causal else 1
        items = [Candidate(LEARNED, FITTED, w, sinks if w else 0, fitted=True) for w in (*order, 0)]
        for candidate in self.clock.steps("fits", FITS, items, self.advice.left_out):
            self.log(f"fitting {candidate}")
            try:
                done = self.trials.fit(candidate, steps=self.steps, seconds=max(1.0, self.clock.left(FITS)))
            except ValueError as reason:
                self.advice.refused[str(candidate)] = str(reason)
                continue
            self._measure(candidate, done)

    def time(self) -> None:
        """Time all candidates at the length of use, a method at a time, each beside exact attention."""
        groups: dict[str, list[Trial]] = {}
        for x in sorted(self.advice.trials, key=lambda x: (x.candidate.size is not None, x.errors.mean)):
            if x.timing is None:
                groups.setdefault(x.candidate.method, []).append(x)
        for method in self.clock.steps("times", TIMES, list(groups), self.advice.left_out):
            self.log(f"timing {method}")
            self._time(groups[method])

    def _time(self, trials: Sequence[Trial]) -> None:
        mine, shape = {x.label: x for x in trials}, self.shape.smaller()
        cores = {label: timed_core(x.candidate.name, x.candidate.options, shape) for label, x in mine.items()}
        for label, timing in time_attentions(cores, shape, self.advice.use_length).items():
            mine[label].timing = timing

    def run(self) -> None:
        """Run the model with those that may be the cheapest within the tolerance, and with others to learn from."""
        for _ in range(RUN - 1):
            trial = self._next()
            if trial is None:
                break
            if self.clock.left(RUNS) < self.clock.longest["runs"]:
                names = [x.label for x in self.advice.trials if x.figure is None]
                self.advice.left_out.append(f"runs of the model with {few(names)}")
                break
            self._run(trial)

    def _run(self, trial: Trial) -> None:
        """Run the model with a trial, which has a time then, too."""
        self.log(f"running the model with {trial.label}")
        with self.clock.step("runs"):
            if trial.timing is None:
                self._time([trial])
            trial.figure = self.trials.figure(trial.candidate)
        self._expect()

    def _next(self) -> Trial | None:
        """The trial to run next; None: no other is of interest.

        First the best of each group, of fitted maps before the others; then the cheapest that may be within the
        tolerance, while it is cheaper than what was run and is; then the best of each method.
        """
        left = sorted((x for x in self.advice.trials if x.figure is None), key=_error)
        done = [x for x in self.advice.trials if x.figure is not None]
        groups, methods = ({getattr(x.candidate, name) for x in done} for name in ("group", "method"))
        missing = [x for x in left if x.candidate.group not in groups]
        if missing:
            return next((x for x in missing if x.fitted), missing[0])
        limit = min((_cost(x) for x in done if self.advice.within(x) and not x.fitted), default=math.inf)
        hopeful = [x for x in left if not x.fitted and _cost(x) < limit and self._may_be_within(x)]
        if hopeful:
            return min(hopeful, key=_cost)
        return next((x for x in left if x.candidate.method not in methods), None)

    def _may_be_within(self, trial: Trial) -> bool:
        """Whether what is expected is within the tolerance, or not far from it.

        Where nobody can tell: whether its error is below all of its group that were run and are not.
        """
        if trial.expected is not None:
            likely = math.sqrt(trial.expected.low * trial.expected.loss)  # one standard deviation below
            return likely <= Figure(self.advice.kind, self.advice.tolerance).loss
        same = [x for x in self.advice.trials if x.figure is not None and x.candidate.group == trial.candidate.group]
        return _error(trial) < min((_error(x) for x in same if not self.advice.within(x)), default=math.inf)

    def _expect(self) -> None:
        """Expect a figure of all that were not run, by those that were."""
        run = [x for x in self.advice.trials if x.figure is not None]
        fit = LossFit.of([(x.candidate.group, _error(x), _loss(x)) for x in run])
        for x in self.advice.trials:
            known = fit is not None and x.figure is None
            x.expected = fit.expected(x.candidate.group, _error(x)) if fit is not None and known else None

    def choose(self) -> None:
        """Choose the cheapest untrained trial within the tolerance, else the nearest; and the nearest fitted one."""
        run = [x for x in self.advice.trials if x.figure is not None]
        untrained = [x for x in run if not x.fitted] or run
        good = [x for x in untrained if self.advice.within(x)]
        self.advice.chosen = (min(good, key=_cost) if good else min(untrained, key=_loss)).label
        fitted = [x for x in run if x.fitted]
        if fitted:
            self.advice.distilled = min(fitted, key=_loss).label

    def curve(self) -> None:
        """Time the chosen one at rising lengths."""
        candidate = self.advice.trial(self.advice.chosen).candidate
        core = timed_core(candidate.name, candidate.options, self.shape)
        self.log(f"timing {self.advice.chosen} from {LENGTHS[0]} to {LENGTHS[-1]} tokens")
        rows, missed = time_curve(core, self.shape, LENGTHS, self.clock.left(1.0))
        self.advice.curve = rows
        if missed:
            self.advice.left_out.append(f"times at {', '.join(map(str, missed))} tokens")

    def keep(self) -> None:
        """Run the model with those attentions, or heads, exact whose errors are the largest.

        Where the chosen trial is near enough: those far above the others, to say what they would gain. Where it is not:
        a quarter and a half of the attentions, a quarter of the heads; the first that is near enough is advised.
        """
        advice, trial = self.advice, self.advice.trial(self.advice.chosen)
        for layers, heads in self._choices(trial):
            if self.clock.left(KEPT) < self.clock.longest["runs"]:
                advice.left_out.append("runs with some attentions or heads kept exact")
                break
            self.log(f"running the model with {sum(map(len, heads.values())) or len(layers)} kept exact")
            rest = [i for i in advice.convertible if i not in layers]
            figure = self.trials.figure(trial.candidate, layers=rest, exact_heads=heads or None)
            advice.kept.append(Kept(layers, heads, figure, trial.label))
            if not advice.within(trial) and advice.exact is None and figure.within(advice.tolerance):
                advice.exact = advice.kept[-1]

    def _choices(self, trial: Trial) -> list[tuple[tuple[int, ...], dict[int, tuple[int, ...]]]]:
        """Numbers of attentions, or of heads by their attention, that may be kept exact."""
        numbers = {name: i for i, name in enumerate(self.advice.attentions)}
        layers: dict[int, float] = {}
        heads: dict[tuple[int, int], float] = {}
        for (name, _), whole, each in zip(trial.errors.calls, trial.errors.layers, trial.errors.heads, strict=True):
            i = numbers[name]
            layers[i] = max(whole, layers.get(i, 0.0))
            heads |= {(i, h): max(x, heads.get((i, h), 0.0)) for h, x in enumerate(each)}
        near_enough = self.advice.within(trial)
        some_layers = [_far_above(layers)] if near_enough else [_worst(layers, 4), _worst(layers, 2)]
        some_heads = _far_above(heads) if near_enough else _worst(heads, 4)
        by_layer: dict[int, tuple[int, ...]] = {}
        for i, h in sorted(some_heads):
            by_layer[i] = (*by_layer.get(i, ()), h)
        different = dict.fromkeys(tuple(sorted(x)) for x in some_layers if x)
        return [*((x, {}) for x in different), *([((), by_layer)] if by_layer else [])]


def few(names: Sequence[str], most: int = 3) -> str:
    """The first of some names, and how many there are beside them."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _worst(errors: Mapping[T, float], part: int) -> list[T]:
    """The items of largest error, one of ``part``; none of a single one."""
    return sorted(errors, key=lambda x: errors[x], reverse=True)[: len(errors) // part]


def _far_above(errors: Mapping[T, float]) -> list[T]:
    """Items whose error is far above the median, at most a quarter of them."""
    middle = statistics.median(errors.values())
    return [x for x in _worst(errors, 4) if errors[x] > FAR_ABOVE * middle]


def _error(trial: Trial) -> float:
    return trial.errors.mean


def _loss(trial: Trial) -> float:
    assert trial.figure is not None
    return trial.figure.loss


def _cost(trial: Trial) -> float:
    """Time of the attention, of that of exact attention; one that was not timed goes last."""
    return math.inf if trial.timing is None else trial.timing.ratio
