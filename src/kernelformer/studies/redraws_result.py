"""The result of `studies.redraws`: runs, their means by method with the spread over seeds, and correlations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations
from statistics import fmean, stdev
from typing import Any

from kernelformer.analysis.redraws import squared_correlation
from kernelformer.studies.settings import RedrawsSettings

# Measures of a run that Fig. 9 and 10 set against each other, by the paper's names.
VARIANCE = {"RSD": "rsd", "PI": "pi", "AGV": "agv"}
PAPER = {("RSD", "AGV"): 0.95, ("RSD", "PI"): 0.98, ("PI", "AGV"): 0.89}  # R^2 of Sec. 4.1
# In a figure of a run: a mean over samples, or a number by itself.
MEASURES = ("rsd", "rsd_median", "pi", "agv", "voting_accuracy", "accuracy", "accuracy_deviation")


@dataclass(frozen=True)
class Measured:
    """What was measured of one run, as plain values.

    Args:
        folder: its name.
        task: of the run.
        attention: of the run, as people say it.
        seed: of the run.
        weights: hash of the model.
        redraws: of `redraw_statistics`.
        eigenvalues: of `eigenvalue_statistics`.
        gradients: of `gradient_statistics`.
    """

    folder: str
    task: str
    attention: str
    seed: int
    weights: str
    redraws: dict[str, Any]
    eigenvalues: dict[str, Any]
    gradients: list[dict[str, Any]]

    def value(self, measure: str) -> float:
        """One of `MEASURES`; of a mean over samples the mean."""
        figure = self.redraws["figures"][measure]
        return float(figure["mean"] if isinstance(figure, dict) else figure)

    @property
    def deterministic(self) -> bool:
        """Whether nothing is redrawn."""
        return bool(self.redraws["deterministic"])


@dataclass(frozen=True)
class Spread:
    """A mean over seeds and the standard deviation over them; NaN for one seed, or where a number is not finite."""

    mean: float
    deviation: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Mean and deviation of some numbers, at least one."""
        finite = all(map(math.isfinite, values))
        return cls(fmean(values), stdev(values) if len(values) > 1 and finite else math.nan)

    def text(self, digits: int, factor: float = 1.0) -> str:
        """The mean, and after ± the deviation where there is one."""
        spread = "" if math.isnan(self.deviation) else f" ± {factor * self.deviation:.{digits}f}"
        return f"{factor * self.mean:.{digits}f}{spread}"


@dataclass
class Method:
    """The runs of one attention on one task, one for each seed."""

    task: str
    attention: str
    runs: list[Measured] = field(default_factory=list)

    def spread(self, measure: str) -> Spread:
        """One of `MEASURES` over the seeds."""
        return Spread.of([x.value(measure) for x in self.runs])

    def eigenvalues(self, when: str, which: str, part: str | None = None) -> Spread | None:
        """Over the seeds, of a figure at ``start`` or ``end``; ``part``: squared_log_variance; None: there are none."""
        found = [x.eigenvalues[when] for x in self.runs]
        found = [x if part is None or x is None else x.get(part) for x in found]
        return None if None in found else Spread.of([x[which] for x in found])

    @property
    def deterministic(self) -> bool:
        """Whether nothing is redrawn."""
        return all(x.deterministic for x in self.runs)


@dataclass
class Result:
    """What the study has measured.

    Args:
        settings: of the study.
        runs: in the order of the folders.
        left_out: why, by folder.
    """

    settings: RedrawsSettings
    runs: list[Measured] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)

    def add(self, run: Measured) -> None:
        """Add a run.

        Raises:
            ValueError: there is one of the same task, attention and seed.
        """
        for x in self.runs:
            if (x.task, x.attention, x.seed) == (run.task, run.attention, run.seed):
                raise ValueError(
                    f"{x.folder} and {run.folder} are both of task {run.task!r}, attention {run.attention!r} and seed "
                    f"{run.seed}; give one of them, or measure them in two studies."
                )
        self.runs.append(run)

    @property
    def methods(self) -> list[Method]:
        """The runs by task and attention."""
        groups: dict[tuple[str, str], Method] = {}
        for x in self.runs:
            groups.setdefault((x.task, x.attention), Method(x.task, x.attention)).runs.append(x)
        return list(groups.values())

    def correlations(self) -> list[dict[str, Any]]:
        """R^2 of each pair of measures of variance by task, over methods as in the paper, and over all runs (Fig. 9,
        10); methods that draw nothing are no points."""
        rows = []
        for task in dict.fromkeys(x.task for x in self.runs):
            methods = [x for x in self.methods if x.task == task and not x.deterministic]
            runs = [x for method in methods for x in method.runs]
            for a, b in combinations(VARIANCE, 2):
                a, b = (a, b) if (a, b) in PAPER else (b, a)
                means = [[x.spread(VARIANCE[name]).mean for x in methods] for name in (a, b)]
                each = [[x.value(VARIANCE[name]) for x in runs] for name in (a, b)]
                rows.append(
                    {
                        "task": task,
                        "measures": [a, b],
                        "methods": len(methods),
                        "r2": squared_correlation(*means),
                        "r2_of_runs": squared_correlation(*each),
                        "paper": PAPER[a, b],
                    }
                )
        return rows


def record(result: Result) -> dict[str, Any]:
    """Runs, means over their seeds, correlations and what was left out."""
    methods = [
        {
            "task": x.task,
            "attention": x.attention,
            "seeds": [run.seed for run in x.runs],
            "deterministic": x.deterministic,
            **{name: asdict(x.spread(name)) for name in MEASURES},
            "eigenvalues": _eigenvalues(x),
        }
        for x in result.methods
    ]
    runs = [asdict(x) for x in result.runs]
    return {"runs": runs, "methods": methods, "correlations": result.correlations(), "left_out": result.left_out}


def _eigenvalues(method: Method) -> dict[str, Any] | None:
    """Table 4 with both ends of training, over seeds."""
    parts: dict[str, Any] = {}
    for when in ("start", "end"):
        for which in ("minimum", "maximum", "mean"):
            spread = method.eigenvalues(when, which)
            if spread is None:
                return None
            parts.setdefault(when, {})[which] = asdict(spread)
    return parts
