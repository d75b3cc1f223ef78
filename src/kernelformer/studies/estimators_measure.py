"""The measurements of `studies.estimators`, a function for each figure or theorem."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kernelformer.analysis.kernel_estimates import (
    Estimate,
    positive_estimates,
    regularized_chernoff,
    regularized_ratio,
    sample_products,
    trigonometric_estimates,
)
from kernelformer.analysis.output_errors import ESTIMATORS, exact_attention, feature_attention, largest_kernel_error
from kernelformer.feature_maps.draws import draw_frequencies, generator
from kernelformer.kernels import mse_positive, mse_trigonometric, orthogonal_gain
from kernelformer.studies.estimators_result import KernelError, OutputError, Regularized, Tail, Uniform
from kernelformer.studies.settings import EstimatorsSettings as Settings

DRAWS = ("iid", "orthogonal")
ANGLES = (math.pi / 4, math.pi / 2, 3 * math.pi / 4, math.pi)  # of Fig. 2, simulated
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
        for angle in ANGLES:
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
