"""Exact kernels, and the expected errors of their random features.

All functions take the vectors as a kernel sees them, i.e. after multiplication by ``sqrt(scale)``.
"""

from __future__ import annotations

import torch
from torch import Tensor


def softmax_kernel(x: Tensor, y: Tensor) -> Tensor:
    """``SM(x, y) = exp(x . y)``: softmax attention before normalization (Performer, Eq. 6).

    Args:
        x: (*, L, D).
        y: (*, S, D).

    Returns:
        (*, L, S).
    """
    return torch.exp(x @ y.transpose(-1, -2))


def gaussian_kernel(x: Tensor, y: Tensor) -> Tensor:
    """``exp(-|x - y|^2 / 2)`` (Skyformer, Eq. 3, Performer, Sec. 2.3). Shapes as `softmax_kernel`."""
    return torch.exp(-0.5 * squared_distance(x, y))


def squared_distance(x: Tensor, y: Tensor) -> Tensor:
    """``|x_i - y_j|^2`` without a (L, S, D) tensor; never negative. Shapes as `softmax_kernel`."""
    x2 = x.square().sum(-1, keepdim=True)
    y2 = y.square().sum(-1, keepdim=True).transpose(-1, -2)
    return (x2 + y2 - 2 * (x @ y.transpose(-1, -2))).clamp_min(0)


def _sums(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``|x + y|^2``, ``|x - y|^2`` and ``x . y`` for paired rows (*, D)."""
    return (x + y).square().sum(-1), (x - y).square().sum(-1), (x * y).sum(-1)


def mse_positive(x: Tensor, y: Tensor, num_features: int) -> Tensor:
    """Mean squared error of the positive estimator of the softmax kernel, independent draws (Performer, Lemma 2).

        MSE = exp(|x+y|^2) SM^2 (1 - exp(-|x+y|^2)) / m

    Args:
        x: (*, D).
        y: (*, D), paired with ``x``.
        num_features: m.

    Returns:
        (*).
    """
    plus, _, dot = _sums(x, y)
    return torch.exp(plus + 2 * dot) * -torch.expm1(-plus) / num_features


def mse_hyperbolic(x: Tensor, y: Tensor, num_features: int) -> Tensor:
    """Mean squared error of hyperbolic features of m draws: ``(1 - exp(-|x+y|^2)) / 2`` times `mse_positive`."""
    plus, _, _ = _sums(x, y)
    return -0.5 * torch.expm1(-plus) * mse_positive(x, y, num_features)


def mse_trigonometric(x: Tensor, y: Tensor, num_features: int) -> Tensor:
    """Mean squared error of trigonometric features: ``exp(|x+y|^2) SM^-2 (1 - exp(-|x-y|^2))^2 / (2m)``."""
    plus, minus, dot = _sums(x, y)
    return torch.exp(plus - 2 * dot) * torch.expm1(-minus).square() / (2 * num_features)


def orthogonal_gain(x: Tensor, y: Tensor, num_features: int) -> Tensor:
    """Least reduction of `mse_positive` by orthogonal draws (m <= d); arguments as there.

        gain = (1 - 1/m) 2/(d+2) (SM - exp(-(|x|^2 + |y|^2) / 2))^2

    Performer, Theorem 2 prints SM^2 instead of the square of the difference, which at x = -y would put the error below
    zero: the lemma behind it (at least two nonzero even powers) says nothing about the constant term of the series,
    which is the same for every draw. The form here holds by simulation, the printed one does not.
    """
    dot, norms = (x * y).sum(-1), (x.square() + y.square()).sum(-1)
    gap = torch.exp(dot) - torch.exp(-0.5 * norms)
    return (1 - 1 / num_features) * 2 / (x.shape[-1] + 2) * gap.square()


def mixture_fourier(x: Tensor, y: Tensor, mu: Tensor, S: Tensor) -> Tensor:
    """Kernel whose spectral density is a Gaussian mixture (KL-Transformer, Eq. 4, real part).

        K(x, y) = 1/C sum_c cos(mu_c . p) exp(-|S_c^T p|^2 / 2)        p = x - y

    Args:
        x: (*, D).
        y: (*, D), paired with ``x``.
        mu: (C, D).
        S: (C, D, D); covariances are S S^T.

    Returns:
        (*).
    """
    spread, shift = _components(x - y, mu, S)
    return (shift.cos() * torch.exp(-0.5 * spread.square().sum(-1))).mean(-1)


def mixture_positive(x: Tensor, y: Tensor, mu: Tensor, S: Tensor) -> Tensor:
    """Kernel estimated by positive features of a mixture (KL-Transformer, Eq. 9). Arguments as `mixture_fourier`.

        K(x, y) = 1/C sum_c exp(mu_c . o + |S_c^T o|^2 / 2 - |x|^2 - |y|^2)        o = x + y

    With mu = 0 and S = I this is the Gaussian kernel; in general it does not depend on x - y alone.
    """
    spread, shift = _components(x + y, mu, S)
    norms = (x.square() + y.square()).sum(-1, keepdim=True)
    return torch.exp(shift + 0.5 * spread.square().sum(-1) - norms).mean(-1)


def mse_mixture_fourier(x: Tensor, y: Tensor, mu: Tensor, S: Tensor, num_features: int) -> Tensor:
    """Mean squared error of Fourier features whose C components share m independent noise draws.

        MSE = 1/(C^2 m) sum_{c,c'} cov(cos(a_c . n + b_c), cos(a_c' . n + b_c'))        a_c = S_c^T p, b_c = mu_c . p

    For two components with mu_2 = -mu_1, S_2 = S_1 it is ``cos^2(mu . p) (1 - exp(-|S^T p|^2))^2 / (2m)``;
    KL-Transformer, Theorem 3 states it for the sum of the two, four times as much. Arguments as `mixture_fourier`.
    """
    a, b = _components(x - y, mu, S)
    inner, apart = _pairs(a)
    # e^(-apart/2) (cos b cos b' (cosh t - 1) + sin b sin b' sinh t), without differences of near numbers or huge ones
    t = inner.abs()
    size = torch.exp(t - 0.5 * apart)
    even = 0.5 * size * torch.expm1(-t).square()
    odd = -0.5 * size * torch.expm1(-2 * t) * inner.sign()
    b1, b2 = b.unsqueeze(-1), b.unsqueeze(-2)
    return (b1.cos() * b2.cos() * even + b1.sin() * b2.sin() * odd).mean((-2, -1)) / num_features


def mse_mixture_positive(x: Tensor, y: Tensor, mu: Tensor, S: Tensor, num_features: int) -> Tensor:
    """Mean squared error of positive features whose C components share m independent noise draws.

        MSE = exp(-2(|x|^2 + |y|^2)) / (C^2 m) sum_{c,c'} cov(exp(a_c . n + b_c), exp(a_c' . n + b_c'))     o = x + y

    with ``a_c = S_c^T o``, ``b_c = mu_c . o``. For C = 1 it is KL-Transformer, Theorem 3,
    ``exp(-2(|x|^2 + |y|^2 - mu . o)) (exp(2|S^T o|^2) - exp(|S^T o|^2)) / m``, with the squares that are missing there.
    """
    a, b = _components(x + y, mu, S)
    inner, apart = _pairs(a)
    norms = (x.square() + y.square()).sum(-1)[..., None, None]
    size = b.unsqueeze(-1) + b.unsqueeze(-2) - 2 * norms
    return (torch.exp(size + 0.5 * apart) * torch.expm1(inner)).mean((-2, -1)) / num_features


def _components(z: Tensor, mu: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
    """``S_c^T z`` (*, C, D) and ``mu_c . z`` (*, C)."""
    return torch.einsum("...d,cde->...ce", z, S), z @ mu.T


def _pairs(a: Tensor) -> tuple[Tensor, Tensor]:
    """``a_c . a_c'`` and ``|a_c|^2 + |a_c'|^2``, (*, C, C) each."""
    squares = a.square().sum(-1)
    return a @ a.transpose(-1, -2), squares.unsqueeze(-1) + squares.unsqueeze(-2)
