"""Errors of approximate attention against exact attention (Performer, Fig. 4)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernelformer.modules import AttentionCore, build_attention


@dataclass(frozen=True)
class Error:
    """Error of the output against exact attention, relative to its size, over independent draws."""

    num_features: int
    mean: float
    standard_error: float


def sample_inputs(
    length: int, head_dim: int, *, norm: float, heads: int = 8, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw Gaussian q, k, v (1, H, L, D), with queries and keys of an expected norm after scaling."""
    gen = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, heads, length, head_dim, generator=gen) for _ in range(3))
    stretch = norm * head_dim**0.25 / math.sqrt(head_dim)
    return q * stretch, k * stretch, v


@torch.no_grad()
def output_errors(
    method: str,
    inputs: tuple[Tensor, Tensor, Tensor],
    num_features: Sequence[int],
    *,
    draws: int = 8,
    exact: AttentionCore | None = None,
    **options: Any,
) -> list[Error]:
    """Measure the relative error ``|out - exact|_F / |exact|_F`` for each number of features.

    Args:
        method: with a random map.
        inputs: q, k, v (B, H, L, D).
        num_features: frequencies drawn.
        draws: independent draws for the mean and its standard error, at least 2.
        exact: what is approximated; default softmax attention.
        options: of `build_attention`.
    """
    q, k, v = inputs
    shape: dict[str, int] = {"head_dim": q.shape[-1], "num_heads": q.shape[1]}
    target = (build_attention("softmax", **shape) if exact is None else exact)(q, k, v)
    rows = []
    for count in num_features:
        core = build_attention(method, **shape, num_features=count, **options)
        errors = []
        for draw in range(draws):
            core.resample(draw)
            errors.append(float((core(q, k, v) - target).norm() / target.norm()))
        sample = torch.tensor(errors, dtype=torch.float64)
        rows.append(Error(count, float(sample.mean()), float(sample.std() / math.sqrt(draws))))
    return rows
