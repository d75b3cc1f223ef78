"""Errors of trigonometric and positive, independent and orthogonal features: Performer (2009.14794), Fig. 2 and 4.

A function for each figure, and for each of Theorems 1 to 4.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Generator, Tensor

from kernelformer.errors import number, positive_int
from kernelformer.feature_maps.draws import draw_frequencies, generator
from kernelformer.kernels import mse_positive, mse_trigonometric, orthogonal_gain
from kernelformer.settings import SEED, Settings, option
from kernelformer_lab.analysis.errors import ESTIMATORS, exact_attention, feature_attention, largest_kernel_error
from kernelformer_lab.analysis.statistics import mean_and_error
from kernelformer_lab.figures import drawing, table
from kernelformer_lab.studies.base import Log, Progress, Record, Row, Study, unique, where

NUMBERS = 1 << 22  # Gaussian numbers that are drawn at once: 32 MiB
ANGLES = 20_001  # points of the integral over a sphere


@dataclass(frozen=True, kw_only=True)
class EstimatorsSettings(Settings):
    """Settings of this study; defaults are those of Performer, Fig. 4."""

    length: int = option(4096, "queries, and keys, of Fig. 4", least=2)
    head_dim: int = option(16, "of Fig. 4 and 2", least=2)
    features: tuple[int, ...] = option((16, 32, 64, 128, 256), "numbers of frequencies of Fig. 4", least=1)
    norms: tuple[float, ...] = option((0.5, 1.0, 2.0), "of queries and keys of Fig. 4, times sqrt(scale)", least=0.01)
    samples: int = option(15, "of inputs and frequencies of Fig. 4 and Theorem 4", least=2)
    dims: tuple[int, ...] = option((1, 4, 16, 64), "d of Theorems 1, 3 and 4", least=1)
    draws: int = option(100_000, "of frequencies, for single pairs of vectors", least=2)
    tokens: int = option(1024, "queries, and keys, of Theorem 4", least=1)
    seed: int = option(0, SEED, least=0)


Estimate = dict[str, float]  # mean and standard_error


def estimate(values: Tensor) -> Estimate:
    """Mean over at least two independent values, of any shape, and its standard error."""
    x = values.flatten().double()
    return {"mean": float(x.mean()), "standard_error": float(x.std() / math.sqrt(len(x)))}


def sample_products(
    count: int, num_features: int, dim: int, gen: Generator, *, orthogonal: bool, regularized: bool = False
) -> Tensor:
    """Products ``omega_i . z / |z|`` of m frequencies with any one vector z, for independent draws, in float64.

    Orthogonal directions are a random rotation of unit vectors, so that their products with z are m coordinates of a
    uniform unit vector (Performer, Eq. 53): no matrix is made orthogonal here.

    Args:
        num_features: m; with ``orthogonal`` at most ``dim``.
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


def log_ratio(one: Row, other: Row) -> tuple[float, float]:
    """Natural logarithm of the ratio of the errors of two estimators on the same samples: mean and standard error."""
    return mean_and_error([math.log(x / y) for x, y in zip(one["values"], other["values"], strict=True)])


DRAWS = ("iid", "orthogonal")
SIMULATED_ANGLES = (math.pi / 4, math.pi / 2, 3 * math.pi / 4, math.pi)  # of Fig. 2, simulated
LENGTHS = (0.5, 1.0, 1.5)  # of x and y there; longer ones need more draws than anybody has
HALF_SQUARES = (1.0, 4.0, 16.0)  # |x + y|^2 / 2 of Theorem 1
SUM_LENGTH = 1.0  # |x + y| of Theorem 3
DEVIATIONS = (0.1, 0.5, 1.5, 3.0)  # thresholds of Theorem 3 above the mean
BLOCKS = (1, 4, 16)  # m / d of Theorem 4
SHARES = (16, 4, 1)  # of all tokens, for Theorem 4: it says that their number does not count


@torch.no_grad()
def output_errors(settings: EstimatorsSettings, norm: float) -> list[Row]:
    """Mean squared errors of the output at a norm; all estimators have the same samples, iid and orthogonal their own.

    ``norm`` is the root of the mean square norm of queries and keys as the kernel sees them; ``values`` are the errors
    of the samples, each with queries, keys, values and frequencies of its own; ``uniform`` is that of the mean of all
    values in place of attention; ``below_zero`` the share of queries whose denominator is not positive; ``deviation``
    is over samples, as the paper shows it; a denominator near 0 in one of them makes the ``mean`` say nothing, but not
    the ``median``.

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
    return [
        {
            **{"norm": norm, "estimator": estimator, "draw": draw, "num_features": m},
            **{"values": x, "uniform": uniform, "below_zero": below[estimator, draw, m]},
            **{"mean": statistics.fmean(x), "deviation": statistics.stdev(x), "median": statistics.median(x)},
        }
        for (estimator, draw, m), x in errors.items()
    ]


def _inputs(settings: EstimatorsSettings, norm: float, sample: int) -> tuple[Tensor, Tensor, Tensor]:
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


def kernel_errors(settings: EstimatorsSettings) -> list[Row]:
    """Mean squared errors of estimates of SM(x, y) at |x| = |y|: Performer, Fig. 2, Lemma 2 and Theorem 2; m = d.

    ``closed`` by Lemma 2, independent frequencies; ``simulated`` the same, and ``orthogonal``: positive features of
    orthogonal frequencies; ``printed_bound`` on its error as Theorem 2 prints it, ``mended_bound`` without the
    misprint, see `kernels.orthogonal_gain`.
    """
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
                {
                    "angle": angle,
                    "length": length,
                    "num_features": m,
                    "kernel": float(kernel),
                    "closed": {"trigonometric": float(mse_trigonometric(x, y, m)), "positive": positive},
                    "simulated": {name: estimate((z - kernel).square()) for name, z in estimates.items()},
                    "printed_bound": positive - (1 - 1 / m) * 2 / (d + 2) * float(kernel) ** 2,
                    "mended_bound": positive - float(orthogonal_gain(x, y, m)),
                }
            )
    return rows


def regularized_rows(settings: EstimatorsSettings) -> list[Row]:
    """The regularized kernel over the softmax kernel by series and simulation, over d and ``w = |x + y|^2 / 2``.

    With x orthogonal to y and ``|x|^2 = |y|^2 = w`` the softmax kernel is 1 at any w, so that every w is allowed by
    the theorem's condition that no entry of the attention matrix exceeds C. ``printed_bound`` is ``1 - 2 / d^(1/3)``,
    without the term of lower order.
    """
    gen = generator(settings.seed, 1)
    rows = []
    for d in settings.dims:
        products = sample_products(settings.draws, 1, d, gen, orthogonal=False, regularized=True)
        for w in HALF_SQUARES:
            simulated = estimate(torch.exp(products * math.sqrt(2 * w) - w))
            row = {"dim": d, "half_square": w, "ratio": regularized_ratio(w, d), "simulated": simulated}
            rows.append({**row, "printed_bound": 1 - 2 / d ** (1 / 3)})
    return rows


def tail_rows(settings: EstimatorsSettings) -> list[Row]:
    """Probabilities that an estimate of SMREG from m = d features exceeds a threshold: Performer, Theorem 3.

    The threshold is ``deviations`` above the mean, in standard deviations of the estimate from independent frequencies.
    Bounds are as printed, ``orthogonal_bound`` d / (d + 2) times ``iid_bound``; ``moments`` is ``E exp(theta sum X)``
    of orthogonal over independent frequencies at the bound's theta, which the proof needs to be at most d / (d + 2).
    """
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
            one, two = (estimate((x.mean(-1) > threshold).double()) for x in (iid, orthogonal))
            row = {"dim": d, "length": SUM_LENGTH, "deviations": t, "iid": one, "orthogonal": two}
            row |= {"iid_bound": chernoff, "orthogonal_bound": d / (d + 2) * chernoff}
            rows.append({**row, "moments": estimate(moments)})
    return rows


def uniform_rows(settings: EstimatorsSettings) -> list[Row]:
    """Largest errors of an entry of the attention matrix before normalization: Performer, Theorems 4 and 7.

    Frequencies are in orthogonal blocks; queries and keys are uniform in the ball of radius 1, as the kernel sees them.
    ``delta`` is the largest error over ``h*^2 = e``, mean over draws; ``predicted`` the theorem's with a constant of 1.
    """
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
                    key = {"estimator": estimator, "dim": d, "num_features": m, "tokens": n}
                    delta = estimate(torch.tensor(deltas, dtype=torch.float64))
                    rows.append({**key, "delta": delta, "predicted": predicted_delta(m, d)})
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


def tables(record: Record) -> list[Table]:
    """One table for each part."""
    parts = record.figures
    return [
        _outputs(parts["output"]),
        _draws(parts["output"]),
        _kernels(parts["kernel"]),
        _regularized(parts["regularized"]),
        _tails(parts["tails"]),
        _uniform(parts["uniform"]),
    ]


def _with_error(x: Estimate) -> str:
    return f"{x['mean']:.3g} ± {x['standard_error']:.1g}"


def _outputs(rows: Sequence[Row]) -> Table:
    cells = []
    for norm, estimator, draw in unique(rows, "norm", "estimator", "draw"):
        mine = where(rows, norm=norm, estimator=estimator, draw=draw)
        errors = [f"{x['mean']:.2g} ± {x['deviation']:.1g}" for x in mine]
        below = " - ".join(f"{100 * mine[i]['below_zero']:.1f}%" for i in (0, -1))
        cells.append((f"{norm:g}", estimator, draw, *errors, f"{mine[0]['uniform']:.2g}", below))
    heads = [f"m = {m}" for m in unique(rows, "num_features")]
    return table(
        f"Fig. 4: mean squared error of the output, mean ± standard deviation of {len(rows[0]['values'])} samples",
        ("norm", "estimator", "draw", *heads, "uniform", "below 0"),
        cells,
        left=3,
        caption="uniform: the mean of all values as output; below 0: queries without a positive denominator",
    )


def _draws(rows: Sequence[Row]) -> Table:
    """Ratios of errors on the same samples: what orthogonality and positivity change."""
    features = unique(rows, "num_features")
    by_key = {(x["norm"], x["estimator"], x["draw"], x["num_features"]): x for x in rows}
    positive, trigonometric, clamped = "positive", "trigonometric", "trigonometric, clamped"
    pairs = {f"{x}: orthogonal / iid": ((x, "orthogonal"), (x, "iid")) for x in (positive, trigonometric, clamped)}
    for other in (trigonometric, clamped):
        pairs[f"orthogonal: positive / {other}"] = ((positive, "orthogonal"), (other, "orthogonal"))
    cells = []
    for norm in unique(rows, "norm"):
        for label, pair in pairs.items():
            logs = [log_ratio(*(by_key[(norm, *x, m)] for x in pair)) for m in features]
            texts = [f"{math.exp(mean):.2g} ({mean / max(error, 1e-300):+.1f})" for mean, error in logs]
            cells.append((f"{norm:g}", label, *texts))
    title = "Fig. 4: ratio of errors, geometric mean over samples, and its logarithm in standard errors"
    return table(title, ("norm", "ratio", *(f"m = {m}" for m in features)), cells, left=2)


def _kernels(rows: Sequence[Row]) -> Table:
    cells = []
    for x in rows:
        trig, positive = x["closed"]["trigonometric"], x["closed"]["positive"]
        cells.append(
            (
                f"{x['length']:g}",
                f"{x['angle'] / math.pi:.2f}",
                f"{x['kernel']:.3g}",
                f"{trig:.3g}",
                _with_error(x["simulated"]["trigonometric"]),
                f"{positive:.3g}",
                _with_error(x["simulated"]["positive"]),
                f"{trig / positive:.3g}" if positive > 1e-12 * trig else "infinite",
                _with_error(x["simulated"]["orthogonal"]),
                f"{x['mended_bound']:.3g}",
                f"{x['printed_bound']:.3g}",
            )
        )
    heads = ("SM", "trig., closed", "simulated", "positive, closed", "simulated", "r", "orthogonal", "bound", "printed")
    return table(
        "Fig. 2, Lemma 2, Theorem 2: mean squared error of SM(x, y), m = d",
        ("|x| = |y|", "angle / pi", *heads),
        cells,
        left=2,
        caption="r: trigonometric over positive; bound: on orthogonal features, without the misprint of Theorem 2. "
        "Where r is small rare draws make the error of positive features, and simulations fall short of it",
    )


def _regularized(rows: Sequence[Row]) -> Table:
    cells = [
        (
            str(x["dim"]),
            f"{x['half_square']:g}",
            f"{x['ratio']:.4f}",
            _with_error(x["simulated"]),
            f"{x['printed_bound']:.3f}",
        )
        for x in rows
    ]
    title = "Theorem 1: regularized over softmax kernel, w = |x + y|^2 / 2"
    return table(title, ("d", "w", "ratio", "simulated", "printed bound"), cells, left=2)


def _tails(rows: Sequence[Row]) -> Table:
    cells = [
        (
            str(x["dim"]),
            f"{x['deviations']:g}",
            *(_with_error(x["iid"]), f"{x['iid_bound']:.3g}"),
            *(_with_error(x["orthogonal"]), f"{x['orthogonal_bound']:.3g}"),
            *(_with_error(x["moments"]), f"{x['dim'] / (x['dim'] + 2):.3f}"),
        )
        for x in rows
    ]
    return table(
        f"Theorem 3: probability of an estimate of SMREG above its mean, m = d, |x + y| = {rows[0]['length']:g}",
        ("d", "deviations above", "iid", "bound", "orthogonal", "bound", "moments", "d / (d + 2)"),
        cells,
        left=2,
        caption="moments: E exp(theta sum X), orthogonal over iid; the proof takes it to be at most d / (d + 2)",
    )


def _uniform(rows: Sequence[Row]) -> Table:
    cells = []
    for estimator, dim, m in unique(rows, "estimator", "dim", "num_features"):
        mine = where(rows, estimator=estimator, dim=dim, num_features=m)
        deltas = [_with_error(x["delta"]) for x in mine]
        cells.append((estimator, str(dim), str(m), *deltas, f"{mine[0]['predicted']:.3g}"))
    title = "Theorem 4: largest error of an entry over h*^2, orthogonal frequencies, by number of tokens"
    heads = (*(f"L = {n}" for n in unique(rows, "tokens")), "delta, constant 1")
    return table(title, ("estimator", "d", "m", *heads), cells, left=3)


STYLES = {"positive": ("C0", "o"), "trigonometric": ("C3", "s"), "trigonometric, clamped": ("C1", "^")}
GRID = 121  # points of an axis of Fig. 2
FARTHEST, LONGEST = math.pi, 2.0  # of angles and lengths there


def picture(record: Record, path: Path) -> None:
    """Draw Fig. 4, a panel for each norm, and Fig. 2: the utility, its slice at length 1, and both errors there."""
    output = record.figures["output"]
    norms = unique(output, "norm")
    columns = max(3, len(norms))
    with drawing(path, (4.6 * columns, 8.4), 2, columns) as (figure, axes):
        for axis, norm in zip(axes[0], norms, strict=False):
            _draw_output(axis, where(output, norm=norm), norm)
        for axis in (*axes[0, len(norms) :], *axes[1, 3:]):
            axis.set_axis_off()
        axes[0, 0].set_ylabel("mean squared error of the output")
        figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=4, fontsize="small")
        _draw_utility(figure, axes[1, 0])
        _draw_slice(axes[1, 1])
        _draw_errors(axes[1, 2], where(record.figures["kernel"], length=1.0))


def _draw_output(axis: Any, rows: Sequence[Row], norm: float) -> None:
    """Medians over samples with bands from the smallest to the largest: means can be those of one sample."""
    features = unique(rows, "num_features")
    for estimator, (color, marker) in STYLES.items():
        for draw, line in (("iid", "--"), ("orthogonal", "-")):
            mine = where(rows, estimator=estimator, draw=draw)
            label = f"{estimator}, {draw}"
            axis.plot(features, [x["median"] for x in mine], color=color, linestyle=line, marker=marker, label=label)
            low, high = ([f(x["values"]) for x in mine] for f in (min, max))
            axis.fill_between(features, low, high, color=color, alpha=0.1)
    axis.axhline(rows[0]["uniform"], color="grey", linestyle=":", label="mean of all values")
    axis.set(title=f"Fig. 4: |q|, |k| about {norm:g}; median and range", xlabel="frequencies m")
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


def _draw_errors(axis: Any, rows: Sequence[Row]) -> None:
    """Errors at length 1 over the angle: closed forms as lines, simulations as points with their standard errors."""
    angle = torch.linspace(0.02, 0.99 * FARTHEST, 2 * GRID, dtype=torch.float64)
    m = rows[0]["num_features"]
    for name, closed in zip(("trigonometric", "positive"), _errors_at(angle, torch.ones_like(angle)), strict=True):
        axis.plot(angle, closed / m, color=STYLES[name][0], label=f"{name}, Lemma 2")
    for name, label, color in (
        ("trigonometric", "trigonometric, simulated", "C3"),
        ("positive", "positive, simulated", "C0"),
        ("orthogonal", "positive orthogonal, simulated", "C2"),
    ):
        seen = [x for x in rows if x["simulated"][name]["mean"] > 1e-12]  # at the angle pi positive ones are exact
        means, errors = ([x["simulated"][name][y] for x in seen] for y in ("mean", "standard_error"))
        axis.errorbar([x["angle"] for x in seen], means, yerr=errors, fmt="x", color=color, label=label)
    axis.set_title(f"Fig. 2, corner: errors at l = 1, m = d = {m}")
    axis.set_xlabel("angle")
    axis.set_ylabel("mean squared error of SM(x, y)")
    axis.set_yscale("log")
    axis.set_ylim(1e-4, None)
    axis.grid(True, alpha=0.2)
    axis.legend(fontsize="small", loc="lower left")


def steps(settings: EstimatorsSettings) -> int:
    """A step for each norm, and each part on pairs of vectors."""
    return len(settings.norms) + 4


PARTS = ("output", "kernel", "regularized", "tails", "uniform")


def run(record: Record, log: Log, progress: Progress) -> None:
    """Measure every part that the record does not have, of the same settings."""
    settings, kept = record.settings, record.earlier_of_same_settings()
    record.figures = {name: kept.get(name, []) for name in PARTS}
    output, kernel, regularized, tails, largest = record.figures.values()
    # What is done, the rows that it goes to, whether they are there, and what makes them.
    parts: list[tuple[str, list[Row], bool, Callable[[EstimatorsSettings], Sequence[Row]]]] = [
        (f"output at norm {x:g}", output, x in unique(output, "norm"), partial(output_errors, norm=x))
        for x in settings.norms
    ]
    parts += [
        ("errors over angle and length", kernel, bool(kernel), kernel_errors),
        ("regularized kernel over d", regularized, bool(regularized), regularized_rows),
        ("tails over d", tails, bool(tails), tail_rows),
        ("largest error of an entry over d", largest, bool(largest), uniform_rows),
    ]
    for sentence, rows, there, measure in parts:
        if not there:
            log(sentence)
            rows += measure(settings)
            record.save()
        progress()


STUDY = Study(
    "estimators",
    "Performer (2009.14794), Fig. 2 and 4, Theorems 1 to 4",
    EstimatorsSettings,
    steps,
    run,
    tables,
    picture,
    resumes=True,
    examples=(("--length 1024", "smaller than the paper's"),),
)
