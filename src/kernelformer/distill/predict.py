"""What error random features should have on given queries and keys, by their closed forms."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from kernelformer.hf.convert import EXACT
from kernelformer.modules import AttentionCore, MixedCore

CEILING = 1e30  # of a predicted error; beyond any meaning, and JSON has no infinity


def log_variance(core: AttentionCore, query: Tensor, key: Tensor, scale: float) -> Tensor | str:
    """Logarithm of the relative variance of each estimated weight before normalization, or why there is no formula.

        positive        (exp(|x + y|^2) - 1) / m                                      (performer Lemma 2)
        hyperbolic      (exp(|x + y|^2) - 1) (1 - exp(-|x + y|^2)) / 2m
        trigonometric   exp(|x - y|^2) (1 - exp(-|x - y|^2))^2 / 2m

    with x = sqrt(scale) q, y = sqrt(scale) k. They hold for independent draws; orthogonal ones do a little better.

    Args:
        core: of which heads exactly these are; not a mixed one.
        query: (B, H, L, D).
        key: (B, H, S, D).
        scale: the model's.

    Returns:
        (B, H, L, S).
    """
    if core.method == EXACT:
        return "exact"
    if core.method not in ("favor+", "favor+hyperbolic", "trigonometric"):
        learned = any(True for _ in core.parameters())
        return "learned" if learned else "no formula"
    phi: Any = core.feature_map
    if core.normalize_qk or core.scale != scale or phi.options.get("kernel", "softmax") != "softmax":
        return "another kernel"
    x, y = query.double() * scale**0.5, key.double() * scale**0.5
    sign = -1.0 if core.method == "trigonometric" else 1.0
    squares: Tensor = x.square().sum(-1).unsqueeze(-1) + y.square().sum(-1).unsqueeze(-2) + 2 * sign * (x @ y.mT)
    squares.clamp_(min=1e-12)
    rest = torch.log(-torch.expm1(-squares))
    number: int = phi.num_features
    if core.method == "favor+":
        return squares + rest - math.log(number)
    return squares + 2 * rest - math.log(2 * number)


def predicted_error(core: AttentionCore, query: Tensor, key: Tensor, weights: Tensor, scale: float) -> Tensor | str:
    """Expected squared error of estimated weights for each head, ``sum_ij A_ij^2 var_ij``, or why it is not known.

    Over ``sum_ij A_ij^2`` it is the square of a relative error. That of the normalized weights is close to it while it
    is small, and never much above 1: a larger one says that the estimate is worthless.

    Args:
        core: of all heads.
        query: (B, H, L, D).
        key: (B, H, S, D).
        weights: (B, H, L, S), A.
        scale: the model's.

    Returns:
        (H), in float64.
    """
    parts: list[tuple[AttentionCore, list[int]]] = [(core, list(range(core.num_heads)))]
    if isinstance(core, MixedCore):
        parts = list(zip(core.cores, core.heads, strict=True))[1:]
    total = torch.zeros(core.num_heads, dtype=torch.float64)
    for part, heads in parts:
        variance = log_variance(part, query[:, heads], key[:, heads], scale)
        if isinstance(variance, str):
            return variance
        logs = variance + 2 * weights[:, heads].double().log()
        total[heads] = logs.transpose(0, 1).flatten(1).logsumexp(1).clamp(max=2 * math.log(CEILING)).exp().cpu()
    return total
