"""What the heads of an attention look at, and how hard their scores are for a kernel."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernelformer.attention.reference import near_keys
from kernelformer.errors import choice, number, shape
from kernelformer.kernels import gaussian_kernel, softmax_kernel

KERNELS = {"softmax": softmax_kernel, "gaussian": gaussian_kernel}


@torch.no_grad()
def score_spectrum(query: Tensor, key: Tensor, kernel: str, scale: float | None = None) -> Tensor:
    """Singular values of the scores before normalization, descending, by SVD in float64.

        exp(scale q_i . k_j)  or  exp(-scale |q_i - k_j|^2 / 2)

    Args:
        query: (*, L, D).
        key: (*, S, D).
        kernel: ``softmax`` or ``gaussian``.
        scale: default 1 / sqrt(D).

    Returns:
        (*, min(L, S)).
    """
    choice("kernel", kernel, KERNELS)
    if query.numel() == 0 or key.numel() == 0:
        raise ValueError(f"a spectrum needs queries and keys, got shapes {shape(query)} and {shape(key)}.")
    root = math.sqrt(query.shape[-1] ** -0.5 if scale is None else scale)
    values: Tensor = torch.linalg.svdvals(KERNELS[kernel](query.double() * root, key.double() * root))
    return values


def condition_number(singular: Tensor, rank: float = 1.0) -> Tensor:
    """The largest singular value over the one at a share ``rank`` of the spectrum, (*); 1 is the smallest of all.

    Float64 resolves ratios up to about 1e16. Smaller shares say how fast the spectrum falls where that is not enough.
    """
    share = number("rank", rank, above=0)
    if share > 1:
        raise ValueError(f"rank is a share of the spectrum, at most 1, got {rank}.")
    last = max(1, round(share * singular.shape[-1])) - 1
    return singular[..., 0] / singular[..., last]


@torch.no_grad()
def statistical_dimension(query: Tensor, key: Tensor, epsilons: Sequence[float], scale: float | None = None) -> Tensor:
    """d_stat of the completed Gaussian scores, as a function of the ridge (Skyformer, Theorem 2).

        d_stat = Tr(C' (C' + lambda I)^-1)       C' = kappa([Q; K], [Q; K]),  lambda = epsilon |C|,  C = kappa(Q, K)

    Landmarks needed for a spectral error of ``epsilon |C|`` grow with it.

    Args:
        query: (*, L, D).
        key: (*, S, D).
        epsilons: of the ridge, relative to the spectral norm of C.
        scale: default 1 / sqrt(D).

    Returns:
        (*, number of epsilons); at most L + S.
    """
    root = math.sqrt(query.shape[-1] ** -0.5 if scale is None else scale)
    both = torch.cat([query, key], -2).double() * root
    values = torch.linalg.eigvalsh(gaussian_kernel(both, both)).clamp_min(0)
    norm = score_spectrum(query, key, "gaussian", scale)[..., :1]
    ridges = norm * torch.tensor([number("epsilon", x, above=0) for x in epsilons], dtype=norm.dtype)
    dimensions: Tensor = (values.unsqueeze(-2) / (values.unsqueeze(-2) + ridges.unsqueeze(-1))).sum(-1)
    return dimensions


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
