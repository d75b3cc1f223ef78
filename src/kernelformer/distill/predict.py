"""The error that random features should have on given queries and keys, by the closed forms of their variance."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from kernelformer.analysis.variance import FORMULAS, log_variance
from kernelformer.hf.plan import EXACT
from kernelformer.modules import AttentionCore, MixedCore

CEILING = 1e30  # of a predicted error; beyond any meaning, and JSON has no infinity


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
        (H), in float64; or a few words: "exact", "near tokens exactly", "learned", "no formula", "another kernel".
    """
    parts: list[tuple[AttentionCore, list[int]]] = [(core, list(range(core.num_heads)))]
    if isinstance(core, MixedCore):
        parts = list(zip(core.cores, core.heads, strict=True))[1:]
    total = torch.zeros(core.num_heads, dtype=torch.float64)
    for part, heads in parts:
        reason = _no_formula(part, scale)
        if reason is not None:
            return reason
        phi: Any = part.feature_map
        variance = log_variance(part.method, query[:, heads], key[:, heads], phi.num_features, scale)
        logs = variance + 2 * weights[:, heads].double().log()
        total[heads] = logs.transpose(0, 1).flatten(1).logsumexp(1).clamp(max=2 * math.log(CEILING)).exp().cpu()
    return total


def _no_formula(core: AttentionCore, scale: float) -> str | None:
    """Why there is no formula for the variance of a core, or None; not of a mixed one."""
    if core.method == EXACT:
        return "exact"
    if core.has_near:
        return "near tokens exactly"
    if core.method not in FORMULAS:
        learned = any(True for _ in core.parameters())
        return "learned" if learned else "no formula"
    phi: Any = core.feature_map
    if core.normalize_qk or core.scale != scale or phi.options.get("kernel", "softmax") != "softmax":
        return "another kernel"
    return None
