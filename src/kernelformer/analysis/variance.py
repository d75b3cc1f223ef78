"""Closed forms of the variance of random features."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kernelformer.errors import choice

FORMULAS = ("favor+", "favor+hyperbolic", "trigonometric")  # methods whose variance has a closed form


def log_variance(method: str, query: Tensor, key: Tensor, num_features: int, scale: float) -> Tensor:
    """Logarithm of the relative variance of each estimated weight before normalization.

        favor+              (exp(|x + y|^2) - 1) / m                                      (Performer, Lemma 2)
        favor+hyperbolic    (exp(|x + y|^2) - 1) (1 - exp(-|x + y|^2)) / 2m
        trigonometric       exp(|x - y|^2) (1 - exp(-|x - y|^2))^2 / 2m

    with x = sqrt(scale) q, y = sqrt(scale) k. They hold for independent draws; orthogonal ones do a little better.

    Args:
        method: one of `FORMULAS`, for the softmax kernel.
        query: (*, L, D).
        key: (*, S, D).
        num_features: m, the frequencies drawn.
        scale: of the product q . k.

    Returns:
        (*, L, S), in float64.
    """
    choice("method", method, FORMULAS)
    x, y = query.double() * scale**0.5, key.double() * scale**0.5
    sign = -1.0 if method == "trigonometric" else 1.0
    squares: Tensor = x.square().sum(-1).unsqueeze(-1) + y.square().sum(-1).unsqueeze(-2) + 2 * sign * (x @ y.mT)
    squares.clamp_(min=1e-12)
    rest = torch.log(-torch.expm1(-squares))
    if method == "favor+":
        return squares + rest - math.log(num_features)
    return squares + 2 * rest - math.log(2 * num_features)
