"""The measurements of `studies.estimators`, a function for each figure or theorem."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Generator, Tensor

from kernelformer.errors import number, positive_int
from kernelformer.feature_maps.draws import draw_frequencies, generator
from kernelformer.kernels import mse_positive, mse_trigonometric, orthogonal_gain
from kernelformer.settings import plain
from kernelformer_lab.analysis.errors import ESTIMATORS, exact_attention, feature_attention, largest_kernel_error
from kernelformer_lab.studies.base import Log, Progress, read_record, write_record
from kernelformer_lab.studies.settings import EstimatorsSettings as Settings

NUMBERS = 1 << 22  # Gaussian numbers that are drawn at once: 32 MiB
ANGLES = 20_001  # points of the integral over a sphere


@dataclass(frozen=True)
class Estimate:
    """A mean over independent draws, and its standard error."""

    mean: float
    standard_error: float

    @staticmethod
    def of(values: Tensor) -> Estimate:
        """The mean of at least two values, of any shape."""
        x = values.flatten().double()
        return Estimate(float(x.mean()), float(x.std() / math.sqrt(len(x))))


def sample_products(
    count: int, num_features: int, dim: int, gen: Generator, *, orthogonal: bool, regularized: bool = False
) -> Tensor:
    """Products ``omega_i . z / |z|`` of m frequencies with any one vector z, for independent draws, in float64.

    Orthogonal directions are a random rotation of unit vectors, so that their products with z are m coordinates of a
    uniform unit vector (Performer, Eq. 53): no matrix is made orthogonal here.

    Args:
        count: N, of draws.
        num_features: m; with ``orthogonal`` at most ``dim``.
        dim: d.
        gen: the source of randomness.
        orthogonal: whether the frequencies of a draw are orthogonal or independent.
        regularized: whether all have the norm sqrt(d), as for SMREG, or norms of Gaussian vectors.

    Returns:
        (N, m).

    Cost: O(N m d) time, a chunk of draws at a time.
    """
    m, d = positive_int("num_features", num_features), positive_int("dim", dim)
    if orthogonal and m > d:
        raise ValueError(f"num_features of orthogonal frequencies must be at most dim, got {m} and {d}.")

    def gaussian(*size: int) -> Tensor:
        return torch.randn(*size, generator=gen, dtype=torch.float64)

    if not orthogonal and not regularized:
        return gaussian(count, m)
    parts = []
    for first in range(0, count, max(1, NUMBERS // (m * d))):
        n = min(count - first, max(1, NUMBERS // (m * d)))
        if orthogonal:
            u = gaussian(n, d)
            u = u[:, :m] / u.norm(dim=-1, keepdim=True)
            norms = math.sqrt(d) if regularized else gaussian(n, m, d).norm(dim=-1)
            parts.append(u * norms)
        else:
            g = gaussian(n, m, d)
            parts.append(math.sqrt(d) * g[..., 0] / g.norm(dim=-1))
    return torch.cat(parts)


def positive_estimates(products: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Estimates ``exp(-(|x|^2 + |y|^2)/2) mean_i exp(omega_i . (x + y))`` of the softmax kernel (Performer, Lemma 1).

    Args:
        products: (N, m), of `sample_products`.
        x: (D).
        y: (D).

    Returns:
        (N).
    """
    scale = torch.exp(-0.5 * (x.square().sum() + y.square().sum()))
    return scale * torch.exp(products * (x + y).norm()).mean(-1)


def trigonometric_estimates(products: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Estimates ``exp((|x|^2 + |y|^2)/2) mean_i cos(omega_i . (x - y))``; arguments as `positive_estimates`."""
    scale = torch.exp(0.5 * (x.square().sum() + y.square().sum()))
    return scale * torch.cos(products * (x - y).norm()).mean(-1)


def regularized_ratio(half_square: float, dim: int) -> float:
    """The regularized softmax kernel over the softmax kernel, which depends on w = |x + y|^2 / 2 and d alone.

        SMREG / SM = e^-w sum_k w^k / k! f(k, d)     f(k, d) = d^k / (d (d + 2) ... (d + 2k - 2))    (Performer, Eq. 30)

    Args:
        half_square: w, at least 0.
        dim: d.
    """
    w = number("half_square", half_square, at_least=0)
    if w == 0:
        return 1.0
    k = torch.arange(math.ceil(w + 20 * math.sqrt(w) + 60), dtype=torch.float64)
    steps = torch.log(dim / (dim + 2 * k[:-1]))
    log_f = torch.cat([steps.new_zeros(1), steps.cumsum(0)])
    return float(torch.exp(k * math.log(w) - w - torch.lgamma(k + 1) + log_f).sum())


@dataclass(frozen=True)
class Chernoff:
    """Chernoff's bound on the tail of a mean of m independent terms X, ``P[mean > a] <= exp(-m exponent)``.

    Args:
        theta: at which the supremum of the exponent is reached; infinite where X never exceeds a.
        exponent: the Legendre transform ``sup_theta theta a - log E exp(theta X)``.
    """

    theta: float
    exponent: float


def regularized_chernoff(ratio: float, length: float, dim: int) -> Chernoff:
    """Chernoff's bound for the regularized positive estimator, in units of its mean (Performer, Theorem 3 and Lemma 4).

        X = exp(sqrt(d) |z| u_1) / E exp(sqrt(d) |z| u_1)       u uniform on the unit sphere, z = x + y

    The plain estimator has no such bound: X is log-normal there, ``E exp(theta X)`` infinite for every theta > 0, and
    the exponent of Lemma 4 minus infinity.

    Args:
        ratio: a / SMREG(x, y), above 1.
        length: ``|z|``.
        dim: d.
    """
    if not ratio > 1:
        raise ValueError(f"ratio must be above 1, the mean of the estimator over itself, got {ratio}.")
    log_weight, x = _term_distribution(length, dim)
    if ratio >= float(x.max()):
        return Chernoff(math.inf, math.inf)

    def tilted_mean(theta: float) -> float:
        return float((torch.softmax(log_weight + theta * x, 0) * x).sum())

    low, high = 0.0, 1.0
    while tilted_mean(high) < ratio:
        low, high = high, 2 * high
    for _ in range(100):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if tilted_mean(middle) < ratio else (low, middle)
    theta = 0.5 * (low + high)
    return Chernoff(theta, theta * ratio - float(torch.logsumexp(log_weight + theta * x, 0)))


def _term_distribution(length: float, dim: int) -> tuple[Tensor, Tensor]:
    """Logarithms of weights that sum to 1, and values of one term of mean 1, as points of an integral over angles."""
    if dim == 1:
        cosine, log_weight = torch.tensor([-1.0, 1.0], dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    else:
        angle = (torch.arange(ANGLES, dtype=torch.float64) + 0.5) * (math.pi / ANGLES)
        cosine, log_weight = angle.cos(), (dim - 2) * angle.sin().log()
    log_weight = log_weight - torch.logsumexp(log_weight, 0)
    log_x = math.sqrt(dim) * length * cosine
    return log_weight, torch.exp(log_x - torch.logsumexp(log_weight + log_x, 0))


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


DRAWS = ("iid", "orthogonal")
SIMULATED_ANGLES = (math.pi / 4, math.pi / 2, 3 * math.pi / 4, math.pi)  # of Fig. 2, simulated
LENGTHS = (0.5, 1.0, 1.5)  # of x and y there; longer ones need more draws than anybody has
HALF_SQUARES = (1.0, 4.0, 16.0)  # |x + y|^2 / 2 of Theorem 1
SUM_LENGTH = 1.0  # |x + y| of Theorem 3
DEVIATIONS = (0.1, 0.5, 1.5, 3.0)  # thresholds of Theorem 3 above the mean
BLOCKS = (1, 4, 16)  # m / d of Theorem 4
SHARES = (16, 4, 1)  # of all tokens, for Theorem 4: it says that their number does not count


@torch.no_grad()
def output_errors(settings: Settings, norm: float) -> list[OutputError]:
    """Mean squared errors of the output at a norm; all estimators have the same samples, iid and orthogonal their own.

    Cost: O(samples L (L + m)) time, O(512 L + m L) memory.
    """
    cases = [(x, draw, m) for draw in DRAWS for m in settings.features for x in ESTIMATORS]
    errors: dict[tuple[str, str, int], list[float]] = {case: [] for case in cases}
    below: dict[tuple[str, str, int], float] = dict.fromkeys(cases, 0.0)
    uniform = 0.0
    for sample in range(settings.samples):
        q, k, v = _inputs(settings, norm, sample)
        exact = exact_attention(q, k, v)
        uniform += float((v.mean(0) - exact).square().mean()) / settings.samples
        for draw in DRAWS:
            for m in settings.features:
                gen = generator(settings.seed, 1 + sample)
                omega = draw_frequencies(m, settings.head_dim, gen, draw=draw)
                for estimator in ESTIMATORS:
                    out = feature_attention(omega, q, k, v, estimator)
                    errors[estimator, draw, m].append(float((out.output - exact).square().mean()))
                    below[estimator, draw, m] += out.below_zero / settings.samples
    return [OutputError(norm, *case, tuple(errors[case]), uniform, below[case]) for case in cases]


def _inputs(settings: Settings, norm: float, sample: int) -> tuple[Tensor, Tensor, Tensor]:
    """Gaussian queries, keys and values (L, D) in float64; the mean square of a query's or key's norm is ``norm^2``."""
    gen = generator(settings.seed, -1 - sample)
    size = (settings.length, settings.head_dim)
    q, k, v = (torch.randn(size, generator=gen, dtype=torch.float64) for _ in range(3))
    stretch = norm / math.sqrt(settings.head_dim)
    return q * stretch, k * stretch, v


def vectors_at(angle: float, length: float, dim: int) -> tuple[Tensor, Tensor]:
    """Two vectors (D) of one length at an angle, in float64."""
    x, y = torch.zeros(2, dim, dtype=torch.float64)
    x[0] = length
    y[0], y[1] = length * math.cos(angle), length * math.sin(angle)
    return x, torch.where(y.abs() < 1e-15, 0.0, y)  # at pi the sum is to be 0, not 1e-16


def kernel_errors(settings: Settings) -> list[KernelError]:
    """Errors of single estimates over angle and length, with m = d features."""
    m = d = settings.head_dim
    gen = generator(settings.seed, 0)
    rows = []
    for length in LENGTHS:
        for angle in SIMULATED_ANGLES:
            x, y = vectors_at(angle, length, d)
            kernel = torch.exp(x @ y)
            iid = sample_products(settings.draws, m, d, gen, orthogonal=False)
            orthogonal = sample_products(settings.draws, m, d, gen, orthogonal=True)
            estimates = {
                "trigonometric": trigonometric_estimates(iid, x, y),
                "positive": positive_estimates(iid, x, y),
                "orthogonal": positive_estimates(orthogonal, x, y),
            }
            positive = float(mse_positive(x, y, m))
            rows.append(
                KernelError(
                    angle=angle,
                    length=length,
                    num_features=m,
                    kernel=float(kernel),
                    closed={"trigonometric": float(mse_trigonometric(x, y, m)), "positive": positive},
                    simulated={name: Estimate.of((z - kernel).square()) for name, z in estimates.items()},
                    printed_bound=positive - (1 - 1 / m) * 2 / (d + 2) * float(kernel) ** 2,
                    mended_bound=positive - float(orthogonal_gain(x, y, m)),
                )
            )
    return rows


def regularized_rows(settings: Settings) -> list[Regularized]:
    """The regularized kernel over the softmax kernel by series and simulation, over d and ``w = |x + y|^2 / 2``.

    With x orthogonal to y and ``|x|^2 = |y|^2 = w`` the softmax kernel is 1 at any w, so that every w is allowed by
    the theorem's condition that no entry of the attention matrix exceeds C.
    """
    gen = generator(settings.seed, 1)
    rows = []
    for d in settings.dims:
        products = sample_products(settings.draws, 1, d, gen, orthogonal=False, regularized=True)
        for w in HALF_SQUARES:
            simulated = Estimate.of(torch.exp(products * math.sqrt(2 * w) - w))
            rows.append(Regularized(d, w, regularized_ratio(w, d), simulated, 1 - 2 / d ** (1 / 3)))
    return rows


def tail_rows(settings: Settings) -> list[Tail]:
    """Tails of estimates of SMREG from m = d features, in units of its value, against the printed bounds."""
    gen = generator(settings.seed, 2)
    rows = []
    for d in settings.dims:
        mean = regularized_ratio(SUM_LENGTH**2 / 2, d) * math.exp(SUM_LENGTH**2 / 2)
        iid, orthogonal = (
            torch.exp(SUM_LENGTH * sample_products(settings.draws, d, d, gen, orthogonal=which, regularized=True)).div_(
                mean
            )
            for which in (False, True)
        )
        # E X^2 of a term is the series at 2 z.
        square = regularized_ratio(2 * SUM_LENGTH**2, d) * math.exp(2 * SUM_LENGTH**2) / mean**2
        deviation = math.sqrt((square - 1) / d)
        for t in DEVIATIONS:
            threshold = 1 + t * deviation
            bound = regularized_chernoff(threshold, SUM_LENGTH, d)
            if math.isinf(bound.theta):  # no estimate can be above
                continue
            chernoff = math.exp(-d * bound.exponent)
            # log E exp(theta X) = theta a - exponent
            log_moment = bound.theta * threshold - bound.exponent
            moments = torch.exp(bound.theta * orthogonal.sum(-1) - d * log_moment)
            one, two = (Estimate.of((x.mean(-1) > threshold).double()) for x in (iid, orthogonal))
            rows.append(Tail(d, SUM_LENGTH, t, one, two, chernoff, d / (d + 2) * chernoff, Estimate.of(moments)))
    return rows


def uniform_rows(settings: Settings) -> list[Uniform]:
    """Largest errors of an entry of the attention matrix over d, m and the number of queries, and of keys."""
    rows = []
    for d in settings.dims:
        for m in (d * x for x in BLOCKS):
            for estimator in ("trigonometric", "positive"):
                sizes = {settings.tokens // x: list[float]() for x in SHARES if settings.tokens >= x}
                for sample in range(settings.samples):
                    gen = generator(settings.seed, 3 + sample)
                    q, k = (_in_ball(settings.tokens, d, gen) for _ in range(2))
                    omega = draw_frequencies(m, d, gen, draw="orthogonal")
                    for n, deltas in sizes.items():
                        deltas.append(largest_kernel_error(omega, q[:n], k[:n], estimator) / math.e)
                for n, deltas in sizes.items():
                    delta = Estimate.of(torch.tensor(deltas, dtype=torch.float64))
                    rows.append(Uniform(estimator, d, m, n, delta, predicted_delta(m, d)))
    return rows


def _in_ball(count: int, dim: int, gen: torch.Generator) -> Tensor:
    """Points uniform in the unit ball, (count, D), in float64."""
    x = torch.randn(count, dim, generator=gen, dtype=torch.float64)
    radius = torch.rand(count, 1, generator=gen, dtype=torch.float64) ** (1 / dim)
    points: Tensor = x / x.norm(dim=-1, keepdim=True) * radius
    return points


def predicted_delta(num_features: int, dim: int) -> float:
    """The delta of Performer, Theorem 4, with a constant of 1: ``m = d / delta^2 log(4 d / delta)``, by bisection.

    The theorem's ``4 d^(3/4) R`` is ``4 d`` for queries and keys of norm 1 as the kernel sees them, R = d^(1/4).
    """
    low, high = 1e-9, 4.0 * dim
    for _ in range(200):
        middle = math.sqrt(low * high)
        enough = dim / middle**2 * math.log(4 * dim / middle) <= num_features
        low, high = (low, middle) if enough else (middle, high)
    return high


def tables(result: Result) -> list[Table]:
    """One table for each part that was measured."""
    return [
        _outputs(result.output),
        _draws(result.output),
        _kernels(result.kernel),
        _regularized(result.regularized),
        _tails(result.tails),
        _uniform(result.uniform),
    ]


def _table(title: str, left: Sequence[str], right: Sequence[str], caption: str = "") -> Table:
    out = Table(title=title, caption=caption or None)
    for name in left:
        out.add_column(name, no_wrap=True)
    for name in right:
        out.add_column(name, justify="right", no_wrap=True)
    return out


def _with_error(x: Estimate) -> str:
    return f"{x.mean:.3g} ± {x.standard_error:.1g}"


def _outputs(rows: Sequence[OutputError]) -> Table:
    features = list(dict.fromkeys(x.num_features for x in rows))
    title = f"Fig. 4: mean squared error of the output, mean ± standard deviation of {len(rows[0].values)} samples"
    caption = "uniform: the mean of all values in place of attention; below 0: queries without a positive denominator"
    heads = [f"m = {m}" for m in features]
    out = _table(title, ("norm", "estimator", "draw"), (*heads, "uniform", "below 0"), caption)
    for key in dict.fromkeys((x.norm, x.estimator, x.draw) for x in rows):
        mine = [x for x in rows if (x.norm, x.estimator, x.draw) == key]
        cells = [f"{x.mean:.2g} ± {x.deviation:.1g}" for x in mine]
        below = f"{100 * mine[0].below_zero:.1f}% - {100 * mine[-1].below_zero:.1f}%"
        out.add_row(f"{key[0]:g}", key[1], key[2], *cells, f"{mine[0].uniform:.2g}", below)
    return out


def _draws(rows: Sequence[OutputError]) -> Table:
    """Ratios of errors on the same samples: what orthogonality and positivity change."""
    features = list(dict.fromkeys(x.num_features for x in rows))
    by_key = {(x.norm, x.estimator, x.draw, x.num_features): x for x in rows}
    title = "Fig. 4: ratio of errors, geometric mean over samples, and its logarithm in standard errors"
    out = _table(title, ("norm", "ratio"), [f"m = {m}" for m in features])
    positive, trigonometric, clamped = "positive", "trigonometric", "trigonometric, clamped"
    for norm in dict.fromkeys(x.norm for x in rows):
        pairs = {f"{x}: orthogonal / iid": ((x, "orthogonal"), (x, "iid")) for x in (positive, trigonometric, clamped)}
        for other in (trigonometric, clamped):
            pairs[f"orthogonal: positive / {other}"] = ((positive, "orthogonal"), (other, "orthogonal"))
        for label, (one, other_one) in pairs.items():
            logs = [log_ratio(*(by_key[(norm, *x, m)] for x in (one, other_one))) for m in features]
            cells = [f"{math.exp(x.mean):.2g} ({x.mean / max(x.standard_error, 1e-300):+.1f})" for x in logs]
            out.add_row(f"{norm:g}", label, *cells)
    return out


def _kernels(rows: Sequence[KernelError]) -> Table:
    title = "Fig. 2, Lemma 2, Theorem 2: mean squared error of SM(x, y), m = d"
    right = ("SM", "trig., closed", "simulated", "positive, closed", "simulated", "r", "orthogonal", "bound", "printed")
    caption = (
        "r: trigonometric over positive; bound: on orthogonal features, without the misprint of Theorem 2. Where r is "
        "small rare draws make the error of positive features, and simulations fall short of it"
    )
    out = _table(title, ("|x| = |y|", "angle / pi"), right, caption)
    for x in rows:
        trig, positive = x.closed["trigonometric"], x.closed["positive"]
        out.add_row(
            f"{x.length:g}",
            f"{x.angle / math.pi:.2f}",
            f"{x.kernel:.3g}",
            f"{trig:.3g}",
            _with_error(x.simulated["trigonometric"]),
            f"{positive:.3g}",
            _with_error(x.simulated["positive"]),
            f"{trig / positive:.3g}" if positive > 1e-12 * trig else "infinite",
            _with_error(x.simulated["orthogonal"]),
            f"{x.mended_bound:.3g}",
            f"{x.printed_bound:.3g}",
        )
    return out


def _regularized(rows: Sequence[Regularized]) -> Table:
    title = "Theorem 1: regularized over softmax kernel, w = |x + y|^2 / 2"
    out = _table(title, ("d", "w"), ("ratio", "simulated", "printed bound"))
    for x in rows:
        out.add_row(
            str(x.dim), f"{x.half_square:g}", f"{x.ratio:.4f}", _with_error(x.simulated), f"{x.printed_bound:.3f}"
        )
    return out


def _tails(rows: Sequence[Tail]) -> Table:
    title = f"Theorem 3: probability of an estimate of SMREG above its mean, m = d, |x + y| = {rows[0].length:g}"
    caption = "moments: E exp(theta sum X), orthogonal over iid; the proof takes it to be at most d / (d + 2)"
    right = ("iid", "bound", "orthogonal", "bound", "moments", "d / (d + 2)")
    out = _table(title, ("d", "deviations above"), right, caption)
    for x in rows:
        cells = (_with_error(x.iid), f"{x.iid_bound:.3g}", _with_error(x.orthogonal), f"{x.orthogonal_bound:.3g}")
        out.add_row(str(x.dim), f"{x.deviations:g}", *cells, _with_error(x.moments), f"{x.dim / (x.dim + 2):.3f}")
    return out


def _uniform(rows: Sequence[Uniform]) -> Table:
    tokens = list(dict.fromkeys(x.tokens for x in rows))
    title = "Theorem 4: largest error of an entry over h*^2, orthogonal frequencies, by number of tokens"
    right = (*(f"L = {n}" for n in tokens), "delta, constant 1")
    out = _table(title, ("estimator", "d", "m"), right)
    for key in dict.fromkeys((x.estimator, x.dim, x.num_features) for x in rows):
        mine = [x for x in rows if (x.estimator, x.dim, x.num_features) == key]
        cells = [_with_error(x.delta) for x in mine]
        out.add_row(key[0], str(key[1]), str(key[2]), *cells, f"{mine[0].predicted:.3g}")
    return out


STYLES = {
    "positive": ("C0", "o"),
    "trigonometric": ("C3", "s"),
    "trigonometric, clamped": ("C1", "^"),
}
GRID = 121  # points of an axis of Fig. 2
FARTHEST, LONGEST = math.pi, 2.0  # of angles and lengths there


def picture(result: Result, path: Path) -> None:
    """Draw Fig. 4, a panel for each norm, and Fig. 2: the utility, its slice at length 1, and both errors there."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    norms = list(dict.fromkeys(x.norm for x in result.output))
    columns = max(3, len(norms))
    figure, axes = plt.subplots(2, columns, figsize=(4.6 * columns, 8.4), constrained_layout=True, squeeze=False)
    for axis, norm in zip(axes[0], norms, strict=False):
        _draw_output(axis, result, norm)
    for axis in axes[0, len(norms) :]:
        axis.set_axis_off()
    axes[0, 0].set_ylabel("mean squared error of the output")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=4, fontsize="small")
    _draw_utility(figure, axes[1, 0])
    _draw_slice(axes[1, 1])
    _draw_errors(axes[1, 2], result)
    for axis in axes[1, 3:]:
        axis.set_axis_off()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _draw_output(axis: Any, result: Result, norm: float) -> None:
    """Medians over samples with bands from the smallest to the largest: means can be those of one sample."""
    rows = [x for x in result.output if x.norm == norm]
    features = list(dict.fromkeys(x.num_features for x in rows))
    for estimator, (color, marker) in STYLES.items():
        for draw, line in (("iid", "--"), ("orthogonal", "-")):
            mine = [x for x in rows if (x.estimator, x.draw) == (estimator, draw)]
            label = f"{estimator}, {draw}"
            axis.plot(features, [x.median for x in mine], color=color, linestyle=line, marker=marker, label=label)
            low, high = ([f(x.values) for x in mine] for f in (min, max))
            axis.fill_between(features, low, high, color=color, alpha=0.1)
    axis.axhline(rows[0].uniform, color="grey", linestyle=":", label="mean of all values")
    axis.set_title(f"Fig. 4: |q|, |k| about {norm:g}; median and range")
    axis.set_xlabel("frequencies m")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(features)
    axis.xaxis.set_major_formatter("{x:.0f}")
    axis.grid(True, alpha=0.2)


def _errors_at(angle: torch.Tensor, length: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean squared errors by Lemma 2 of trigonometric and positive features, m = 1, at angles and lengths (*)."""
    x = torch.stack([length, torch.zeros_like(length)], -1)
    y = torch.stack([length * angle.cos(), length * angle.sin()], -1)
    return mse_trigonometric(x, y, 1), mse_positive(x, y, 1)


def _draw_utility(figure: Any, axis: Any) -> None:
    angles = torch.linspace(-FARTHEST, FARTHEST, GRID, dtype=torch.float64)
    lengths = torch.linspace(-LONGEST, LONGEST, GRID, dtype=torch.float64)
    trigonometric, positive = _errors_at(*torch.meshgrid(angles, lengths, indexing="xy"))
    logs = (trigonometric / positive.clamp_min(1e-300)).clamp(10**-4.5, 10**8.5).log10()  # beyond the last colour
    logs = logs.nan_to_num(0.0)  # 0 / 0 at length 0
    image = axis.contourf(angles, lengths, logs, levels=range(-4, 9), cmap="RdBu_r", vmin=-8, vmax=8, extend="both")
    axis.contour(angles, lengths, logs, levels=[0], colors="k", linewidths=1)
    figure.colorbar(image, ax=axis, label="log10 r")
    axis.set_title("Fig. 2: r = MSE trigonometric / positive; line: r = 1")
    axis.set_xlabel("angle")
    axis.set_ylabel("length l")


def _draw_slice(axis: Any) -> None:
    angle = torch.linspace(-0.98 * FARTHEST, 0.98 * FARTHEST, 4 * GRID, dtype=torch.float64)
    trigonometric, positive = _errors_at(angle, torch.ones_like(angle))
    axis.plot(angle, trigonometric / positive, color="k")
    axis.axhline(1, color="grey", linestyle=":")
    axis.set_title("Fig. 2: slice of r at l = 1")
    axis.set_xlabel("angle")
    axis.set_ylabel("r")
    axis.set_yscale("log")
    axis.set_ylim(1e-4, 1e5)
    axis.grid(True, alpha=0.2)


def _draw_errors(axis: Any, result: Result) -> None:
    """Errors at length 1 over the angle: closed forms as lines, simulations as points with their standard errors."""
    rows = [x for x in result.kernel if x.length == 1.0]
    angle = torch.linspace(0.02, 0.99 * FARTHEST, 2 * GRID, dtype=torch.float64)
    m = rows[0].num_features
    for name, closed in zip(("trigonometric", "positive"), _errors_at(angle, torch.ones_like(angle)), strict=True):
        axis.plot(angle, closed / m, color=STYLES[name][0], label=f"{name}, Lemma 2")
    for name, label, color in (
        ("trigonometric", "trigonometric, simulated", "C3"),
        ("positive", "positive, simulated", "C0"),
        ("orthogonal", "positive orthogonal, simulated", "C2"),
    ):
        seen = [x for x in rows if x.simulated[name].mean > 1e-12]  # at the angle pi positive ones are exact
        means, errors = ([getattr(x.simulated[name], y) for x in seen] for y in ("mean", "standard_error"))
        axis.errorbar([x.angle for x in seen], means, yerr=errors, fmt="x", color=color, label=label)
    axis.set_title(f"Fig. 2, corner: errors at l = 1, m = d = {m}")
    axis.set_xlabel("angle")
    axis.set_ylabel("mean squared error of SM(x, y)")
    axis.set_yscale("log")
    axis.set_ylim(1e-4, None)
    axis.grid(True, alpha=0.2)
    axis.legend(fontsize="small", loc="lower left")


__all__ = ["picture", "record", "run", "steps", "tables"]
NAME = "estimators"


def steps(settings: Settings) -> int:
    """How often `run` calls ``progress``: for each norm, and each part on pairs of vectors."""
    return len(settings.norms) + 4


def run(settings: Settings, folder: Path, log: Log, progress: Progress) -> Result:
    """Measure every part that the record in ``folder`` does not have, of the same settings."""
    kept = read_record(folder, NAME) or {}
    result = restore(kept) if kept.get("settings") == plain(settings) else Result()
    done = {x.norm for x in result.output}
    # What is done, the rows that it goes to, whether they are there, and what makes them.
    parts: list[tuple[str, list[Any], bool, Callable[[Settings], Sequence[Any]]]] = [
        (f"output at norm {x:g}", result.output, x in done, partial(output_errors, norm=x)) for x in settings.norms
    ]
    parts += [
        ("errors over angle and length", result.kernel, bool(result.kernel), kernel_errors),
        ("regularized kernel over d", result.regularized, bool(result.regularized), regularized_rows),
        ("tails over d", result.tails, bool(result.tails), tail_rows),
        ("largest error of an entry over d", result.uniform, bool(result.uniform), uniform_rows),
    ]
    for sentence, rows, there, measure in parts:
        if not there:
            log(sentence)
            rows += measure(settings)
            write_record(folder, NAME, settings, record(result))
        progress()
    return result
