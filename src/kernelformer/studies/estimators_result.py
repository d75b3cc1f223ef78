"""What `studies.estimators` measures: one kind of row for each figure or theorem, and its record."""

from __future__ import annotations

import math
import statistics
from dataclasses import asdict, dataclass, field
from typing import Any

from kernelformer.analysis.kernel_estimates import Estimate


@dataclass(frozen=True)
class OutputError:
    """Mean squared error of the output of attention by features, Performer, Fig. 4.

    Args:
        norm: root of the mean square norm of queries and keys as the kernel sees them.
        estimator: one of `analysis.output_errors.ESTIMATORS`.
        draw: iid or orthogonal.
        num_features: m.
        values: mean squared error of each sample, which has queries, keys, values and frequencies of its own.
        uniform: error of the mean of all values in place of attention, the mean over the samples.
        below_zero: share of queries whose denominator is not positive, the mean over the samples.
    """

    norm: float
    estimator: str
    draw: str
    num_features: int
    values: tuple[float, ...]
    uniform: float
    below_zero: float

    @property
    def mean(self) -> float:
        """The mean over samples."""
        return statistics.fmean(self.values)

    @property
    def deviation(self) -> float:
        """The standard deviation over samples, which the paper shows."""
        return statistics.stdev(self.values)

    @property
    def median(self) -> float:
        """The median over samples: a denominator near 0 in one of them makes the mean say nothing."""
        return statistics.median(self.values)


def log_ratio(one: OutputError, other: OutputError) -> Estimate:
    """Natural logarithm of the ratio of the errors of two estimators on the same samples: mean and standard error."""
    logs = [math.log(x / y) for x, y in zip(one.values, other.values, strict=True)]
    return Estimate(statistics.fmean(logs), statistics.stdev(logs) / math.sqrt(len(logs)))


@dataclass(frozen=True)
class KernelError:
    """Mean squared errors of estimates of SM(x, y) at |x| = |y|: Performer, Fig. 2, Lemma 2 and Theorem 2.

    Args:
        angle: between x and y, in radians.
        length: ``|x| = |y|``.
        num_features: m, and as many dimensions.
        kernel: SM(x, y).
        closed: by Lemma 2, ``trigonometric`` and ``positive``, independent frequencies.
        simulated: the same by simulation, and ``orthogonal``: positive features of orthogonal frequencies.
        printed_bound: on the error of ``orthogonal``, as Theorem 2 prints it.
        mended_bound: the same without its misprint, see `kernels.orthogonal_gain`.
    """

    angle: float
    length: float
    num_features: int
    kernel: float
    closed: dict[str, float]
    simulated: dict[str, Estimate]
    printed_bound: float
    mended_bound: float


@dataclass(frozen=True)
class Regularized:
    """The regularized kernel over the softmax kernel: Performer, Theorem 1.

    Args:
        dim: d.
        half_square: ``w = |x + y|^2 / 2``, which alone counts besides d.
        ratio: SMREG / SM by its series.
        simulated: the same by simulation.
        printed_bound: ``1 - 2 / d^(1/3)``, without the term of lower order.
    """

    dim: int
    half_square: float
    ratio: float
    simulated: Estimate
    printed_bound: float


@dataclass(frozen=True)
class Tail:
    """Probability that an estimate of SMREG exceeds a threshold: Performer, Theorem 3.

    Args:
        dim: d, and as many features.
        length: ``|x + y|``.
        deviations: threshold above the mean, in standard deviations of the estimate from independent frequencies.
        iid: probability for independent frequencies.
        orthogonal: the same for orthogonal ones.
        iid_bound: as printed.
        orthogonal_bound: as printed: d / (d + 2) times the other.
        moments: ``E exp(theta sum X)`` of orthogonal over independent frequencies at the bound's theta, which the proof
            needs to be at most d / (d + 2).
    """

    dim: int
    length: float
    deviations: float
    iid: Estimate
    orthogonal: Estimate
    iid_bound: float
    orthogonal_bound: float
    moments: Estimate


@dataclass(frozen=True)
class Uniform:
    """The largest error of an entry of the attention matrix before normalization: Performer, Theorems 4 and 7.

    Args:
        estimator: ``trigonometric``, of which the theorems speak, or ``positive``.
        dim: d.
        num_features: m, in orthogonal blocks.
        tokens: L; queries and keys are uniform in the ball of radius 1, as the kernel sees them.
        delta: largest error over ``h*^2 = e``, mean over draws.
        predicted: the delta at which ``m = d / delta^2 log(4 d / delta)``: the theorem with a constant of 1.
    """

    estimator: str
    dim: int
    num_features: int
    tokens: int
    delta: Estimate
    predicted: float


@dataclass
class Result:
    """Rows of all parts; a part that was not measured yet has none."""

    output: list[OutputError] = field(default_factory=list)
    kernel: list[KernelError] = field(default_factory=list)
    regularized: list[Regularized] = field(default_factory=list)
    tails: list[Tail] = field(default_factory=list)
    uniform: list[Uniform] = field(default_factory=list)


def record(result: Result) -> dict[str, Any]:
    """The rows of every part, with means, deviations and medians beside single values."""
    parts: dict[str, list[dict[str, Any]]] = {name: [asdict(x) for x in rows] for name, rows in vars(result).items()}
    for row, x in zip(parts["output"], result.output, strict=True):
        row |= {"mean": x.mean, "deviation": x.deviation, "median": x.median}
    return parts


def restore(kept: dict[str, Any]) -> Result:
    """The rows of a record."""
    result = Result()
    for row in kept["output"]:
        plain = {k: x for k, x in row.items() if k not in ("mean", "deviation", "median")}
        result.output.append(OutputError(**{**plain, "values": tuple(row["values"])}))
    for row in kept["kernel"]:
        simulated = {name: Estimate(**x) for name, x in row["simulated"].items()}
        result.kernel.append(KernelError(**{**row, "simulated": simulated}))
    result.regularized = [Regularized(**_estimates(row, "simulated")) for row in kept["regularized"]]
    result.tails = [Tail(**_estimates(row, "iid", "orthogonal", "moments")) for row in kept["tails"]]
    result.uniform = [Uniform(**_estimates(row, "delta")) for row in kept["uniform"]]
    return result


def _estimates(row: dict[str, Any], *names: str) -> dict[str, Any]:
    return {**row, **{name: Estimate(**row[name]) for name in names}}
