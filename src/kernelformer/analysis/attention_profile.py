"""What the heads of an attention look at, and how hard their scores are for a kernel."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kernelformer.analysis.matrices import statistical_dimension
from kernelformer.attention.reference import near_keys

WINDOWS = (32, 64, 128)  # a key is near where |i - j| is less
SINKS = (1, 4)  # first visible keys
TOKENS = 128  # of the statistical dimension, whose cost is cubic
EPSILON = 0.1  # of its ridge


@dataclass(frozen=True)
class AttentionProfile:
    """Figures of one attention, a number for each head.

    Args:
        query: root mean square of the norms of sqrt(scale) q, which is what a kernel sees.
        key: the same of keys.
        near: mean share of a query's weight on keys with |i - j| < w, by w.
        first: the same on the first s visible keys, by s.
        far: on keys that are neither within 64 tokens nor among the first 4.
        dimension: `statistical_dimension` of 128 tokens, at a ridge of 0.1; at most 256.
    """

    query: tuple[float, ...]
    key: tuple[float, ...]
    near: dict[int, tuple[float, ...]]
    first: dict[int, tuple[float, ...]]
    far: tuple[float, ...]
    dimension: tuple[float, ...]


@torch.no_grad()
def attention_profile(
    query: Tensor,
    key: Tensor,
    *,
    scale: float,
    causal: bool,
    key_mask: Tensor | None = None,
    position_bias: Tensor | None = None,
) -> AttentionProfile:
    """Measure what the heads of an attention look at.

        share on a set of keys = mean over real queries i of  sum_{j in set(i)} A_ij,   A = softmax(scale q k + bias)

    Args:
        query: (B, H, L, D).
        key: (B, G, L, D), of the same tokens; G divides H.
        scale: of the product q . k.
        causal: whether query i sees keys up to i alone.
        key_mask: (B, L) bool, which tokens are real; None: all.
        position_bias: (1, H, L, L), added to the logits.

    Cost: O(L^2) numbers for each head.
    """
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    weights = attention_weights(query, key, scale=scale, causal=causal, key_mask=key_mask, position_bias=position_bias)
    everyone = torch.ones(query.shape[0], query.shape[2], dtype=torch.bool, device=query.device)
    real = everyone if key_mask is None else key_mask

    def share(window: int, sinks: int) -> Tensor:
        where = near_keys(
            query.shape[2], query.shape[2], window=window, sinks=sinks, key_mask=key_mask, device=query.device
        )
        rows = (weights * where).sum(-1).transpose(1, 2)  # (B, L, H)
        return rows[real].mean(0)

    def norms(x: Tensor) -> Tensor:
        return (x.float().square().sum(-1).transpose(1, 2)[real].mean(0) * scale).sqrt()

    return AttentionProfile(
        query=_plain(norms(query)),
        key=_plain(norms(key)),
        near={w: _plain(share(w, 0)) for w in WINDOWS},
        first={s: _plain(share(0, s)) for s in SINKS},
        far=_plain(1 - share(WINDOWS[1], SINKS[1])),
        dimension=_plain(_dimension(query, key, scale, real)),
    )


@torch.no_grad()
def attention_weights(
    query: Tensor,
    key: Tensor,
    *,
    scale: float,
    causal: bool,
    key_mask: Tensor | None = None,
    position_bias: Tensor | None = None,
    rows: Tensor | None = None,
) -> Tensor:
    """Weights of softmax attention, ``softmax(scale q_i k_j + b_ij)``; rows of queries that see nothing are zero.

    Args:
        query: (B, H, L, D).
        key: (B, G, S, D), G divides H.
        scale: of the product.
        causal: whether query i sees keys up to i alone.
        key_mask: (B, S) bool; None: all keys are real.
        position_bias: (1, H, L, S).
        rows: (N), which queries; None: all.

    Returns:
        (B, H, N or L, S).
    """
    rows = torch.arange(query.shape[2], device=query.device) if rows is None else rows
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    logits = query[:, :, rows] @ key.mT * scale
    logits = logits if position_bias is None else logits + position_bias[:, :, rows]
    if causal:
        logits = logits.masked_fill(torch.arange(key.shape[2], device=key.device) > rows.unsqueeze(1), -math.inf)
    if key_mask is not None:
        logits = logits.masked_fill(~key_mask[:, None, None], -math.inf)
    return logits.softmax(-1).nan_to_num()


def _dimension(query: Tensor, key: Tensor, scale: float, real: Tensor) -> Tensor:
    """Statistical dimension (H) of evenly spread real tokens of the first sample."""
    tokens = real[0].nonzero().flatten()
    some = tokens[torch.linspace(0, len(tokens) - 1, min(len(tokens), TOKENS)).long()]
    return statistical_dimension(query[0, :, some], key[0, :, some], [EPSILON], scale)[:, 0]


def _plain(x: Tensor) -> tuple[float, ...]:
    return tuple(float(value) for value in x)
