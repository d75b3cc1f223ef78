"""Rules that decide on a claim from the jobs on record: a difference counts only beyond its standard errors."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from kernelformer_lab.analysis.statistics import (
    Difference,
    Mean,
    difference,
    fisher_test,
    mean_over_seeds,
    paired,
    rank_test,
)
from kernelformer_lab.evidence.base import MAIN, MISSING_RESULT, NOT_SEEN, OPEN, SUPPORTED, TRAINING, Finding

Entry = Mapping[str, Any]
VALUE, TEST = "result.value", "result.test"
SAMPLES = "samples"  # the probe that says what samples add to the error of a value
REACH = "reach"
ROUNDING = 1e-9  # relative errors below it are no spread over seeds
ALWAYS = ("relative", "rotary", "window", "kernel", "start")  # options that make another method of one
QUANTILE = "(or Student's quantile of them, if larger)"


def steps_to(entry: Entry, level: float) -> float:
    """The first step whose evaluation is at least so high; NaN where none is."""
    curve = entry.get("curve") or []
    return float(next((step for step, value in curve if value is not None and value >= level), math.nan))


def look_up(entry: Any, path: str) -> float:
    """A number of an entry by its path, NaN where it is not there.

    Args:
        entry: of a job.
        path: such as "result.scores.perplexity", or "reach.0.8" for the steps until the evaluation had 0.8.
    """
    head, _, level = path.partition(".")
    if head == REACH:
        return steps_to(entry, float(level))
    for name in path.split("."):
        if not isinstance(entry, Mapping) or name not in entry:
            return math.nan
        entry = entry[name]
    return math.nan if entry is None or isinstance(entry, str) else float(entry)


def runs_of(entries: Sequence[Entry], part: str, attention: str) -> list[Entry]:
    """The runs of an attention in a part."""
    return [x for x in entries if x["kind"] == TRAINING and x["part"] == part and x["name"] == attention]


def value_of(entry: Entry, path: str) -> float:
    """The value of a run; the accuracy of one that diverged is 0, as it answers nothing."""
    if path == VALUE and entry["result"]["diverged"] and entry["result"]["metric"] == "accuracy":
        return 0.0
    return look_up(entry, path)


def sample_error(entry: Entry, path: str = VALUE) -> float:
    """Standard error of a value over validation samples; NaN if it is not known.

    As measured; else of an accuracy sqrt(p (1 - p) / N), and of the steps to a level, which are known to an interval
    between two evaluations only, that interval / sqrt(12).
    """
    if path.startswith(REACH):
        steps = [0, *(step for step, _ in entry.get("curve") or [])]
        return max((b - a for a, b in pairwise(steps)), default=0) / math.sqrt(12)
    if path.startswith(TEST):
        return look_up(entry, "result.test_error")
    if path != VALUE:
        return look_up(entry, f"{path}_error")
    measured = look_up(entry, "result.value_error")
    count = look_up(entry, "settings.task_options.validation_samples")
    if math.isfinite(measured) or entry["result"]["metric"] != "accuracy" or not count > 0:
        return measured
    p = value_of(entry, VALUE)
    return math.sqrt(p * (1 - p) / count)


def mean_of(entries: Sequence[Entry], part: str, attention: str, path: str = VALUE) -> Mean | None:
    """Mean over the seeds of an attention that have the value; None where none has."""
    mine = [x for x in runs_of(entries, part, attention) if math.isfinite(value_of(x, path))]
    return mean_over_seeds([value_of(x, path) for x in mine], [sample_error(x, path) for x in mine]) if mine else None


def _errors(entries: Sequence[Entry], path: str) -> list[float]:
    """Standard errors over samples of the values of runs."""
    return [sample_error(x, path) for x in entries]


def paired_samples(sides: Sequence[Sequence[Entry]], path: str) -> float | None:
    """Squared error over samples of the difference of two sides, sample by sample (`analysis.statistics.paired`).

    Returns:
        None where runs were not all scored on the same samples, or the probe was not made.
    """
    runs = [run for side in sides for run in side]
    if any(_scored_on(run) != _scored_on(runs[0]) for run in runs):
        return None
    probes = [[run.get("probes", {}).get(SAMPLES, {}) for run in side] for side in sides]
    first, second = ([x["deviations"] if x.get("path") == path else [] for x in side] for side in probes)
    return paired(first, second)


def _scored_on(run: Entry) -> tuple[Any, ...]:
    """Key of the samples of a run's score, and of their order: the task, its options and its data."""
    settings = run.get("settings", {})
    return settings.get("task"), settings.get("task_options"), run.get("data")


def without(entries: Sequence[Entry], part: str, attention: str, path: str) -> int:
    """Count runs of an attention on record without a value: diverged, or never at the level."""
    return sum(not math.isfinite(value_of(x, path)) for x in runs_of(entries, part, attention))


def shown(mean: Mean, scale: float = 1.0, digits: int = 3) -> str:
    """A mean with its standard error and the number of seeds, or with the words that there is one."""
    if not math.isfinite(mean.of_seeds):
        return f"{scale * mean.value:.{digits}g} (one seed)"
    return f"{scale * mean.value:.{_places(scale * mean.error, digits)}f} ± {scale * mean.error:.2g}"


def _places(error: float, digits: int) -> int:
    return digits if error <= 0 else min(6, max(0, 1 - math.floor(math.log10(error))))


def brief(attention: str, other: str) -> str:
    """An attention by its method, positions and kernel, and what else tells it from another of the same method."""
    if ">" in attention + other:
        return attention
    head, *options = attention.split(":")
    there, *others = other.split(":")
    mine = (x for x in options if x.split("=")[0] in ALWAYS or (head == there and x not in others))
    return ":".join([head, *mine])


def errors_of(path: str) -> str:
    """Words on the sources of a value's standard errors."""
    measured = path == VALUE or path.startswith((TEST, REACH))
    return "standard errors over seeds and samples" if measured else "standard errors over seeds"


@dataclass(frozen=True)
class Above:
    """The first attention has a larger value than the second; "below" in the other direction.

    Args:
        first, second: attentions, as they stand in the runs.
        part, other_part: of the item; the second's is the first's where it is not said.
        path: of the value in an entry.
        name: of the value, for people.
        below: whether the claim is that the first one's is smaller.
        scale: that figures are shown by: 100 for percent.
    """

    first: str
    second: str
    part: str = MAIN
    other_part: str = ""
    path: str = VALUE
    name: str = "the value"
    below: bool = False
    scale: float = 1.0

    @property
    def text(self) -> str:
        """The rule in words."""
        word, other = ("below", "above") if self.below else ("above", "below")
        return (
            f"for: {self.name} of {self.names[0]} is {word} that of {self.names[1]} by more than two "
            f"{errors_of(self.path)} {QUANTILE}; against: {other} by as much; else open"
        )

    @property
    def sides(self) -> tuple[tuple[str, str], tuple[str, str]]:
        """Part and attention of both."""
        return (self.part, self.first), (self.other_part or self.part, self.second)

    @property
    def names(self) -> list[str]:
        """Both, in words."""
        both = zip(self.sides, (brief(self.first, self.second), brief(self.second, self.first)), strict=True)
        return [f"`{name}`" if part == MAIN else f"`{name}` ({part})" for (part, _), name in both]

    def __call__(self, entries: Sequence[Entry]) -> Finding:
        """Judge by the mean difference of runs with the same seed; where a run has no value, it is open."""
        groups, (one, other) = [runs_of(entries, *side) for side in self.sides], self.names
        if not all(groups):
            return Finding(MISSING_RESULT, "")
        values = [{x["seed"]: value_of(x, self.path) for x in group} for group in groups]
        lost = [sum(not math.isfinite(x) for x in each.values()) for each in values]
        if any(lost):
            return Finding(OPEN, f"runs of {one}, {other} without a value: {lost[0]}, {lost[1]}")
        pairs = [(values[0][seed], values[1][seed]) for seed in values[0] if seed in values[1]]
        if not pairs:
            return Finding(OPEN, f"no seed has runs of both {one} and {other}")
        of_samples = paired_samples(groups, self.path)
        gap = difference(self._mean(groups, [a - b for a, b in pairs], of_samples))
        first, second = (
            mean_over_seeds(list(each.values()), _errors(group, self.path))
            for each, group in zip(values, groups, strict=True)
        )
        ours = (
            f"{one} {shown(first, self.scale)}, {other} {shown(second, self.scale)}; "
            f"difference {self.scale * gap.value:+.2g}"
        )
        if not math.isfinite(gap.error):
            return Finding(OPEN, f"{ours}, one seed")
        ours += f" ± {self.scale * gap.error:.2g}{'' if of_samples is None else ', sample by sample'}"
        if gap.error <= ROUNDING * max(abs(first.value), abs(second.value)):
            return Finding(OPEN, f"{ours}: neither seeds nor samples differ, so there is no error to compare with")
        return Finding(self.verdict(gap), ours, self.p(gap), (gap.value, gap.error))

    def _mean(self, groups: Sequence[Sequence[Entry]], gaps: Sequence[float], of_samples: float | None) -> Mean:
        """Mean of the differences, with their error over samples, which is the sum of both sides' where not paired."""
        mean = mean_over_seeds(gaps)
        if of_samples is None:
            of_samples = sum(mean_over_seeds([0.0], _errors(group, self.path)).of_samples for group in groups)
        return Mean(mean.value, mean.count, mean.of_seeds, of_samples)

    def verdict(self, gap: Difference) -> str:
        """Verdict on a difference."""
        if abs(gap.value) <= gap.bound:
            return OPEN
        return SUPPORTED if (gap.value < 0) == self.below else NOT_SEEN

    def p(self, gap: Difference) -> float:
        """P-value of the hypothesis that the true difference is at the border between verdicts."""
        return gap.p()


@dataclass(frozen=True)
class AtLeast(Above):
    """The first attention is as good as the second or better, within a margin.

    Args:
        margin: by which it may be worse.
    """

    margin: float = 0.0

    @property
    def text(self) -> str:
        """The rule in words."""
        word = "larger" if self.below else "smaller"
        return (
            f"for: {self.name} of {self.names[0]} is surely not {word} than that of {self.names[1]} by "
            f"{self.scale * self.margin:g} or more, with two {errors_of(self.path)} {QUANTILE} on top; against: "
            f"surely by more; else open"
        )

    def verdict(self, gap: Difference) -> str:
        """Verdict on a difference."""
        better = -gap.value if self.below else gap.value
        if better - gap.bound > -self.margin:
            return SUPPORTED
        return NOT_SEEN if better + gap.bound < -self.margin else OPEN

    def p(self, gap: Difference) -> float:
        """P-value of the hypothesis that the first is worse by exactly the margin."""
        return gap.p(self.margin if self.below else -self.margin)


@dataclass(frozen=True)
class Alike(Above):
    """Two attentions have the same value within a margin.

    Args:
        margin: the largest difference that counts as none.
    """

    margin: float = 0.0

    @property
    def text(self) -> str:
        """The rule in words."""
        both = " and ".join(self.names)
        return (
            f"for: {self.name} of {both} differ by less than {self.scale * self.margin:g}, "
            f"with two {errors_of(self.path)} {QUANTILE} on top; against: by more, with these taken off; else open"
        )

    def verdict(self, gap: Difference) -> str:
        """Verdict on a difference."""
        if abs(gap.value) + gap.bound < self.margin:
            return SUPPORTED
        return NOT_SEEN if abs(gap.value) - gap.bound > self.margin else OPEN

    def p(self, gap: Difference) -> float:
        """P-value of the hypothesis that they differ by exactly the margin."""
        return gap.p(math.copysign(self.margin, gap.value))


@dataclass(frozen=True)
class Level:
    """A value of an attention is below a level; with ``above`` it is above it.

    Args:
        attention: as it stands in the runs.
        path: of the value in an entry.
        part: of the item.
        level: that it is compared with.
        name: of the value, for people.
        above: whether the claim is that it is larger.
        scale: that figures are shown by: 100 for percent.
        against: whether the opposite contradicts the claim; else it leaves it open.
    """

    attention: str
    path: str
    part: str = MAIN
    level: float = 1.0
    name: str = "the value"
    above: bool = False
    scale: float = 1.0
    against: bool = True

    @property
    def text(self) -> str:
        """The rule in words."""
        word, other = ("above", "below") if self.above else ("below", "above")
        opposite = f"against: {other} by as much; " if self.against else ""
        return (
            f"for: {self.name} of `{brief(self.attention, '')}` is {word} {self.scale * self.level:g} by more than two "
            f"{errors_of(self.path)} {QUANTILE}; {opposite}else open"
        )

    def __call__(self, entries: Sequence[Entry]) -> Finding:
        """Judge by the mean over seeds."""
        mean = mean_of(entries, self.part, self.attention, self.path)
        if mean is None:
            return Finding(OPEN if runs_of(entries, self.part, self.attention) else MISSING_RESULT, "")
        ours = f"`{brief(self.attention, '')}`: {self.name} {shown(mean, self.scale)}"
        gap = difference(mean, self.level)
        lost = without(entries, self.part, self.attention, self.path)
        if lost or not gap.error > 0:
            return Finding(OPEN, f"{ours}; runs without a value: {lost}" if lost else ours)
        if abs(gap.value) <= gap.bound:
            return Finding(OPEN, ours, gap.p())
        if (gap.value > 0) == self.above:
            return Finding(SUPPORTED, ours, gap.p())
        return Finding(NOT_SEEN if self.against else OPEN, ours, gap.p())


@dataclass(frozen=True)
class Where:
    """A rule that decides only where a condition holds: models that have learned nothing are all alike.

    Args:
        condition: a rule that must be supported.
        rule: what is judged then.
    """

    condition: Level
    rule: Above | All

    @property
    def text(self) -> str:
        """The rule in words."""
        return f"{self.rule.text}; open unless {self.condition.text.removeprefix('for: ').split(';')[0]}"

    def __call__(self, entries: Sequence[Entry]) -> Finding:
        """Judge, if the condition holds."""
        finding, condition = self.rule(entries), self.condition(entries)
        if finding.verdict == MISSING_RESULT or condition.verdict == SUPPORTED:
            return finding
        return Finding(OPEN, f"{finding.ours}; too little is learned to tell ({condition.ours})", 1.0)


@dataclass(frozen=True)
class All:
    """Several rules at once: all of them must support a claim, and one is enough to contradict it."""

    rules: Sequence[Any]

    @property
    def text(self) -> str:
        """The rules in words."""
        return "; and ".join(x.text for x in self.rules)

    def __call__(self, entries: Sequence[Entry]) -> Finding:
        """Judge by every rule."""
        findings = [rule(entries) for rule in self.rules]
        ours = "; ".join(f"{x.ours} ({x.verdict})" for x in findings if x.ours)
        verdicts = {x.verdict for x in findings}
        if NOT_SEEN in verdicts:
            return Finding(
                NOT_SEEN, ours, min(1.0, len(findings) * min(x.p for x in findings if x.verdict == NOT_SEEN))
            )
        p = max(x.p for x in findings)
        verdict = next((x for x in (MISSING_RESULT, OPEN) if x in verdicts), SUPPORTED)
        return Finding(verdict, ours, p)


LEAST = 0.05  # p-value below which an order counts


@dataclass(frozen=True)
class Later(Above):
    """The first attention comes to a level later than the second; with ``below`` earlier.

    A run that never comes to it is later than all that do, which a mean cannot say: hence an exact rank test over
    seeds. With three seeds on either side nothing can be told (the smallest p-value is 0.1), with four it can.
    """

    @property
    def text(self) -> str:
        """The rule in words."""
        word, other = ("smaller", "larger") if self.below else ("larger", "smaller")
        return (
            f"for: {self.name} of {self.names[0]} are {word} than those of {self.names[1]} by an exact rank test over "
            f"seeds (p < {LEAST:g}), where a run that never comes so far is the last; against: {other}; else open"
        )

    def __call__(self, entries: Sequence[Entry]) -> Finding:
        """Judge by the ranks of all runs."""
        groups = [[value_of(x, self.path) for x in runs_of(entries, *side)] for side in self.sides]
        first, second = ([math.inf if math.isnan(x) else x for x in group] for group in groups)
        if not first or not second:
            return Finding(MISSING_RESULT, "")
        p = rank_test(first, second)
        one, other = self.names
        ours = f"{one} {_shown(first)}, {other} {_shown(second)}; p = {p:.2g} by ranks"
        if p >= LEAST:
            return Finding(OPEN, ours, p)
        later = sum((a > b) - (a < b) for a in first for b in second) > 0
        return Finding(SUPPORTED if later != self.below else NOT_SEEN, ours, p)


@dataclass(frozen=True)
class LearnedBy(Above):
    """More runs of the first attention than of the second reach a level, by Fisher's exact test.

    For results with two modes, such as recall, where a run either learns the task or does not.

    Args:
        level: value from which a run counts as having learned.
    """

    level: float = 0.5

    @property
    def text(self) -> str:
        """The rule in words."""
        word, other = ("fewer", "more") if self.below else ("more", "fewer")
        return (
            f"for: {word} runs of {self.names[0]} than of {self.names[1]} have {self.name} of at least "
            f"{self.scale * self.level:g}, by Fisher's exact test (p < {LEAST:g}); against: {other}; else open"
        )

    def __call__(self, entries: Sequence[Entry]) -> Finding:
        """Judge by the numbers of runs that have learned."""
        groups = [runs_of(entries, *side) for side in self.sides]
        if not all(groups):
            return Finding(MISSING_RESULT, "")
        (first, all_first), (second, all_second) = (
            (sum(value_of(x, self.path) >= self.level for x in group), len(group)) for group in groups
        )
        p = fisher_test(first, all_first, second, all_second)
        one, other = self.names
        ours = f"{one} {first} of {all_first} runs, {other} {second} of {all_second}; p = {p:.2g} (Fisher)"
        if p >= LEAST:
            return Finding(OPEN, ours, p)
        more = first / all_first > second / all_second
        return Finding(SUPPORTED if more != self.below else NOT_SEEN, ours, p)


def _shown(values: Sequence[float]) -> str:
    """The median, and how many runs never came so far."""
    never = sum(map(math.isinf, values))
    middle = median(values)
    told = f"median {middle:g}" if math.isfinite(middle) else "median never"
    return f"{told} ({never} of {len(values)} never)" if never else told


Record = Mapping[str, Any]


def studies_of(entries: Sequence[Entry], parts: Sequence[str]) -> list[Record]:
    """The records of those parts that are there."""
    return [x["record"] for x in entries if x["part"] in parts and "record" in x]


@dataclass(frozen=True)
class SmallerCost:
    """One of two values of a study is smaller than the other: by the mean of their differences over seeds or samples.

    Args:
        parts: the study with its seeds.
        first, second: the values of a record, one or a list, and `names` what people call them.
        unit: of both.
        over: what the values are independent over.
    """

    parts: Sequence[str]
    first: Callable[[Record], float | list[float]]
    second: Callable[[Record], float | list[float]]
    names: tuple[str, str]
    unit: str
    over: str = "seeds"

    @property
    def text(self) -> str:
        """The rule in words."""
        return (
            f"for: {self.names[0]} is below {self.names[1]} by more than two standard errors over "
            f"{self.over} {QUANTILE}; "
            f"against: above by as much; else open"
        )

    def __call__(self, entries: Sequence[Entry]) -> Finding:
        """Judge by the mean difference of the values of the same seed or sample."""
        records = studies_of(entries, self.parts)
        if not records:
            return Finding(MISSING_RESULT, "")
        values = [[y for x in records for y in _listed(value(x))] for value in (self.first, self.second)]
        if not all(math.isfinite(x) for side in values for x in side):
            return Finding(OPEN, f"{self.names[0]} or {self.names[1]} is not finite")
        first, second = map(mean_over_seeds, values)
        gap = difference(mean_over_seeds([a - b for a, b in zip(*values, strict=True)]))
        ours = f"{self.names[0]} {shown(first)}, {self.names[1]} {shown(second)} {self.unit}".rstrip()
        if not gap.error > 0:
            return Finding(OPEN, ours)
        verdict = OPEN if abs(gap.value) <= gap.bound else SUPPORTED if gap.value < 0 else NOT_SEEN
        return Finding(verdict, ours, gap.p(), (gap.value, gap.error))


def _listed(value: float | list[float]) -> list[float]:
    return value if isinstance(value, list) else [value]


def instability(attention: str) -> Callable[[Record], float]:
    """Logarithm of the mean score of an attention over the last window of the study ``instability``."""

    def score(record: Record) -> float:
        mine = [x for x in record["rows"] if x["attention"] == attention]
        return math.log(max(mine, key=lambda x: x["start"])["mean"])

    return score


def instabilities(record: Record) -> dict[str, float]:
    """Mean scores of the study ``instability``, by attention and window."""
    return {f"{x['attention'].split(':')[0]}, after step {x['start']}": x["mean"] for x in record["rows"]}


def conversion_cost(model: str, features: int) -> Callable[[Record], float]:
    """Loss of a model of the study ``normalized`` by making it linear with so many features."""

    def cost(record: Record) -> float:
        mine = record["models"][model]
        row = next(x for x in mine["converted"] if x["features"] == features)
        return math.nan if None in (row["mean"], mine["bits_per_byte"]) else float(row["mean"] - mine["bits_per_byte"])

    return cost


def converted_bits(model: str, features: int) -> Callable[[Record], float]:
    """Bits per byte of a model of the study ``normalized`` with so many features, without fine-tuning."""

    def value(record: Record) -> float:
        return _number(next(x for x in record["models"][model]["converted"] if x["features"] == features)["mean"])

    return value


def conversion_costs(record: Record) -> dict[str, float]:
    """Losses of all models of the study ``normalized``, by model and number of features."""
    return {
        f"{name}, m = {row['features']}": conversion_cost(name, row["features"])(record)
        for name, model in record["models"].items()
        for row in model["converted"]
    }


def moved_values(record: Record) -> dict[str, float]:
    """Bits per byte of the study ``transfer``, by attention: at once, fine-tuned, from a fresh start."""
    values = {}
    whole = [row["attention"] for row in record["moved"]]
    methods = [x.split(":")[0] for x in whole]
    names = methods if len(set(methods)) == len(methods) else whole  # a picture has little room
    for name, row in zip(names, record["moved"], strict=True):
        values[f"{name}, at once"] = moved_at_once(row["attention"])(record)
        values[f"{name}, tuned"] = moved_tuned(row["attention"])(record)
        values[f"{name}, fresh"] = fresh(row["attention"])(record)
        if "ceiling" in row:
            values[f"{name}, all steps"] = ceiling(row["attention"])(record)
    return values


def _moved(record: Record, attention: str) -> Record:
    rows: Sequence[Record] = record["moved"]
    return next(x for x in rows if x["attention"] == attention)


def _number(value: float | None) -> float:
    """A number of a record, where null stands for one that is not finite."""
    return math.nan if value is None else float(value)


def moved_at_once(attention: str, plus: float = 0.0) -> Callable[[Record], float]:
    """The bits per byte that an attention of the study ``transfer`` has with the weights as they are, and a margin."""
    return lambda record: statistics.fmean(map(_number, _moved(record, attention)["at_once"])) + plus


def _last(kind: str, attention: str, plus: float) -> Callable[[Record], float]:
    return lambda record: _number(_moved(record, attention)[kind][-1][1]) + plus


def moved_tuned(attention: str, plus: float = 0.0) -> Callable[[Record], float]:
    """The bits per byte that an attention of the study ``transfer`` has after fine-tuning, and a margin."""
    return _last("tuned", attention, plus)


def fresh(attention: str) -> Callable[[Record], float]:
    """The bits per byte of an attention of the study ``transfer`` after as many steps from first weights."""
    return _last("fresh", attention, 0.0)


def ceiling(attention: str, plus: float = 0.0) -> Callable[[Record], float]:
    """The bits per byte of an attention of the study ``transfer`` after all steps, and a margin."""
    return _last("ceiling", attention, plus)
