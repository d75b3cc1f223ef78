"""Exact kernels: what a feature map approximates, and how far off a random one is expected to be.

All functions take the vectors as a kernel sees them, i.e. after multiplication by ``sqrt(scale)``.
"""

from __future__ import annotations

import torch
from torch import Tensor


def softmax_kernel(x: Tensor, y: Tensor) -> Tensor:
    """``SM(x, y) = exp(x . y)``: softmax attention before normalization (performer Eq. 6).

    Args:
        x: (*, L, D).
        y: (*, S, D).

    Returns:
        (*, L, S).
    """
    return torch.exp(x @ y.transpose(-1, -2))


def gaussian_kernel(x: Tensor, y: Tensor) -> Tensor:
    """``exp(-|x - y|^2 / 2)`` (skyformer Eq. 3, performer Sec. 2.3). Shapes as `softmax_kernel`."""
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
    """Mean squared error of the positive estimator of the softmax kernel, independent draws (performer Lemma 2).

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
    """The same for hyperbolic features of m draws: ``(1 - exp(-|x+y|^2)) / 2`` times `mse_positive`."""
    plus, _, _ = _sums(x, y)
    return -0.5 * torch.expm1(-plus) * mse_positive(x, y, num_features)


def mse_trigonometric(x: Tensor, y: Tensor, num_features: int) -> Tensor:
    """The same for trigonometric features: ``exp(|x+y|^2) SM^-2 (1 - exp(-|x-y|^2))^2 / (2m)``."""
    plus, minus, dot = _sums(x, y)
    return torch.exp(plus - 2 * dot) * torch.expm1(-minus).square() / (2 * num_features)


def orthogonal_gain(x: Tensor, y: Tensor, num_features: int) -> Tensor:
    """The least by which orthogonal draws (m <= d) lower `mse_positive`; arguments as there.

        gain = (1 - 1/m) 2/(d+2) (SM - exp(-(|x|^2 + |y|^2) / 2))^2

    performer Theorem 2 prints SM^2 instead of the square of the difference, which at x = -y would put the error below
    zero: the lemma behind it (at least two nonzero even powers) says nothing about the constant term of the series,
    which is the same for every draw. The form here holds by simulation, the printed one does not.
    """
    dot, norms = (x * y).sum(-1), (x.square() + y.square()).sum(-1)
    gap = torch.exp(dot) - torch.exp(-0.5 * norms)
    return (1 - 1 / num_features) * 2 / (x.shape[-1] + 2) * gap.square()
