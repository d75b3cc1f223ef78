"""Attention by random features as its definition says, in float64, beside exact attention (Performer, Eq. 1, 4)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernelformer.errors import choice
from kernelformer.modules import AttentionCore, build_attention
from kernelformer_lab.analysis.statistics import mean_and_error


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
        rows.append(Error(count, *mean_and_error(errors)))
    return rows


ESTIMATORS = ("positive", "trigonometric", "trigonometric, clamped")
CLAMP = 1e-2  # of the least denominator that signed maps of this library have, relative to sum_j |phi(q)| |phi(k_j)|
CHUNK = 512  # queries whose weights are there at once


def exact_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Softmax attention in float64, some queries at a time: never an (L, S) matrix.

    Args:
        query: (L, D), already multiplied by ``sqrt(scale)``.
        key: (S, D), multiplied as the queries.
        value: (S, E).

    Returns:
        (L, E).
    """
    q, k, v = query.double(), key.double(), value.double()
    return torch.cat([(x @ k.T).softmax(-1) @ v for x in q.split(CHUNK)])


@dataclass(frozen=True)
class FeatureAttention:
    """Attention by features.

    Args:
        output: (L, E).
        below_zero: share of the queries whose weights sum to 0 or less, so that their outputs mean nothing.
    """

    output: Tensor
    below_zero: float


def features(omega: Tensor, x: Tensor, estimator: str) -> Tensor:
    """Random features of vectors in float64, from their definition and without any stabilization.

        positive         phi(x) = exp(-|x|^2/2) exp(omega x) / sqrt(m)                         (Performer, Lemma 1)
        trigonometric    phi(x) = exp(+|x|^2/2) [cos(omega x), sin(omega x)] / sqrt(m)         (Performer, Sec. 2.3)

    Args:
        omega: (M, D), frequencies.
        x: (*, D), already multiplied by ``sqrt(scale)``.
        estimator: one of `ESTIMATORS`.

    Returns:
        (*, M), of trigonometric ones (*, 2M).
    """
    choice("estimator", estimator, ESTIMATORS)
    x, root = x.double(), math.sqrt(len(omega))
    products, norms = x @ omega.double().T, 0.5 * x.square().sum(-1, keepdim=True)
    if estimator == "positive":
        return torch.exp(products - norms) / root
    return torch.cat([products.cos(), products.sin()], -1) * (torch.exp(norms) / root)


def feature_attention(
    omega: Tensor, query: Tensor, key: Tensor, value: Tensor, estimator: str = "positive"
) -> FeatureAttention:
    """Attention by random features in float64, from its definition.

        out_i = phi(q_i) . sum_j phi(k_j) v_j / phi(q_i) . sum_j phi(k_j)                     (Performer, Eq. 4)

    ``trigonometric, clamped`` keeps denominators from falling below `CLAMP` times ``sum_j |phi(q_i)| |phi(k_j)|``, as
    the method ``trigonometric`` of this library does; the paper's has no such guard.

    Args:
        omega: (M, D), frequencies.
        query: (L, D), already multiplied by ``sqrt(scale)``.
        key: (S, D), multiplied as the queries.
        value: (S, E).
        estimator: one of `ESTIMATORS`.

    Cost: O((L + S) M) memory.
    """
    phi_q, phi_k = features(omega, query, estimator), features(omega, key, estimator)
    total = phi_q @ phi_k.sum(0)
    below_zero = float((total <= 0).double().mean())
    if estimator == "trigonometric, clamped":
        total = torch.maximum(total, CLAMP * phi_q.norm(dim=-1) * phi_k.norm(dim=-1).sum())
    return FeatureAttention(phi_q @ (phi_k.T @ value.double()) / total.unsqueeze(-1), below_zero)


def largest_kernel_error(omega: Tensor, query: Tensor, key: Tensor, estimator: str) -> float:
    """The largest ``|phi(q_i) . phi(k_j) - exp(q_i . k_j)|`` of all pairs, before normalization (Performer, Theorem 4).

    Arguments are those of `feature_attention`; some queries at a time.
    """
    phi_k, k = features(omega, key, estimator), key.double()
    gaps = (features(omega, x, estimator) @ phi_k.T - torch.exp(x @ k.T) for x in query.double().split(CHUNK))
    return max(float(gap.abs().max()) for gap in gaps)
