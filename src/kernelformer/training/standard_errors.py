"""Standard errors of scores over the samples of a split, by the jackknife."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernelformer.analysis.jackknife import GROUPS, UNKNOWN, Numbers, deviations, sample_groups, standard_error
from kernelformer.tasks import Task
from kernelformer.tasks.base import Outcome

ERROR = "_error"  # after the name of a score, the name of its standard error


@dataclass(frozen=True)
class Contributions:
    """What each of N samples adds to the scores of a split.

    Args:
        losses: (N) float64, sums over the labels of a sample.
        counts: (N) labels that count.
        right: (N) labels that were the likeliest class.
        answers: (N) classes or numbers, of models with one answer per sample.
        labels: (N), of the same.
        top5: (N) whether the label was among the five likeliest classes, where there are more.
        split: its name.
    """

    losses: NDArray[Any]
    counts: NDArray[Any]
    right: NDArray[Any]
    answers: NDArray[Any] | None = None
    labels: NDArray[Any] | None = None
    top5: NDArray[Any] | None = None
    split: str = ""

    def outcome(self) -> Outcome:
        """All samples together."""
        return self._outcome(self._sums(slice(None)), self.answers, self.labels)

    def outcomes_without(self, groups: Sequence[NDArray[Any]]) -> Iterator[Outcome]:
        """Of all samples but those of one group, for each of the groups."""
        everything = self._sums(slice(None))
        for group in groups:
            rest = [None if x is None else np.delete(x, group) for x in (self.answers, self.labels)]
            yield self._outcome(everything - self._sums(group), *rest)

    def _sums(self, chosen: Any) -> NDArray[Any]:
        """Of losses, labels, right answers and those among five, of some samples."""
        top5 = self.right if self.top5 is None else self.top5
        return np.array([np.sum(x[chosen], dtype=np.float64) for x in (self.losses, self.counts, self.right, top5)])

    def _outcome(self, sums: NDArray[Any], answers: NDArray[Any] | None, labels: NDArray[Any] | None) -> Outcome:
        numbers = labels is not None and np.issubdtype(labels.dtype, np.floating)
        with np.errstate(divide="ignore", invalid="ignore"):
            loss, right, top5 = (float(x) for x in sums[[0, 2, 3]] / sums[1])
        return Outcome(
            loss=loss,
            right=math.nan if numbers else right,
            predictions=answers,
            labels=labels,
            split=self.split,
            top5=math.nan if self.top5 is None else top5,
        )


def standard_errors(task: Task, samples: Contributions) -> dict[str, float]:
    """Standard errors of the loss and of all scores of a task, as if its samples were independent.

    They are those of the jackknife (`analysis.jackknife.deviations`). Up to `GROUPS` samples each is a group; then the
    error of an accuracy p is sqrt(p (1 - p) / (N - 1)) exactly, that of a mean the sample's deviation / sqrt(N).

    Returns:
        Errors by the names of the scores, and "loss"; NaN where there are fewer than two samples with labels.

    Cost: G times that of the task's `score`.
    """
    return {name: standard_error(x) for name, x in sample_deviations(task, samples).items()}


def sample_deviations(task: Task, samples: Contributions, most: int = GROUPS) -> dict[str, Numbers]:
    """What each of at most so many groups of samples adds to the standard errors of the loss and of all scores.

    Returns:
        (G) by the names of the scores, and "loss"; `UNKNOWN` where there are fewer than two samples with labels.
    """
    size = len(samples.losses)
    whole = _values(task, samples.outcome())
    if size < 2 or np.count_nonzero(samples.counts) < 2:
        return dict.fromkeys(whole, UNKNOWN)
    groups = sample_groups(size, most)
    without = [_values(task, outcome) for outcome in samples.outcomes_without(groups)]
    return {name: deviations(value, [x[name] for x in without], groups) for name, value in whole.items()}


def _values(task: Task, outcome: Outcome) -> dict[str, float]:
    return {**task.score(outcome), "loss": outcome.loss}


def split_errors(values: Mapping[str, float]) -> tuple[dict[str, float], dict[str, float]]:
    """Scores, and the standard errors among them by the names of their scores."""
    errors = {name: values[name + ERROR] for name in values if name + ERROR in values}
    rest = {name: x for name, x in values.items() if name.removesuffix(ERROR) not in errors or name in errors}
    return rest, errors


def score_text(value: float, error: float | None = None) -> str:
    """A score with its standard error, where there is one: ``0.7500 ± 0.0433``."""
    return f"{value:.4f}" if error is None or math.isnan(error) else f"{value:.4f} ± {error:.4f}"
