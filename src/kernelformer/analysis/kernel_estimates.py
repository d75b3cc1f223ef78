"""Random features as estimators of the softmax kernel: samples of them, the regularized kernel, bounds on their tails.

Vectors x, y are as a kernel sees them, after multiplication by ``sqrt(scale)``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from kernelformer.errors import number, positive_int

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
