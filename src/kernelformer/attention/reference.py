"""Attention by its definition: whole features, the (L, S) matrix, any dtype. What every fast path must equal.

Nothing here calls a fast path. Maps and cores by hand are in `tests/reference.py`.
For tests, for looking at small examples and for reading; cost O(L S M).
"""

from __future__ import annotations

import torch
from torch import Tensor

GUARD = 1e-2  # share of its bound below which the denominator of a signed map cannot fall
PAIRS = 1 << 24  # numbers that are made at once for sums over features in log space


def visibility(
    num_queries: int, num_keys: int, *, is_causal: bool, key_mask: Tensor | None, device: torch.device | None = None
) -> Tensor:
    """Mask (L, S) or (B, 1, L, S) of the keys that a query may see: ``j <= i`` if causal, and no padding."""
    visible = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device)
    if is_causal:
        visible = visible.tril()
    return visible if key_mask is None else visible & key_mask[:, None, None, :]


def near_keys(
    num_queries: int,
    num_keys: int,
    *,
    window: int,
    sinks: int,
    key_mask: Tensor | None,
    device: torch.device | None = None,
) -> Tensor:
    """Mask (L, S) or (B, 1, L, S) of the keys near a query: ``|i - j| < window``, and the first visible tokens."""
    i, j = torch.arange(num_queries, device=device), torch.arange(num_keys, device=device)
    near = (i.unsqueeze(1) - j).abs() < window
    if key_mask is None:
        return near | (j < sinks)
    first = key_mask & (key_mask.cumsum(1) <= sinks)
    return near | first[:, None, None, :]


def near_far_attention(
    scores: Tensor, value: Tensor, near: Tensor, far: Tensor, weights: Tensor, guard: Tensor | None = None
) -> Tensor:
    """Softmax on the near keys and weights of any sign on the far ones, in one normalization.

        out_i = ( sum_near e^(s_ij) v_j + sum_far w_ij v_j ) / max( the same sums with v = 1, GUARD G_i )
        G_i = sum_near e^(s_ij) + guard_i

    Args:
        scores: s, (*, L, S).
        value: (*, S, E).
        near: broadcastable to (*, L, S) bool, visible keys that are near.
        far: the same of the other visible keys.
        weights: w, (*, L, S), with the factor e^beta.
        guard: ``e^beta |phi(q_i)| sum_far |phi(k_j)|``, (*, L, 1); None for no guard.

    Returns:
        (*, L, E); a row whose denominator is not positive is zero.
    """
    exact = scores.masked_fill(~near, -torch.inf).exp()
    weights = exact + torch.where(far, weights, 0.0)
    bound = None if guard is None else GUARD * (exact.sum(-1, keepdim=True) + guard)
    return weighted_attention(weights, value, near | far, bound=bound)


def log_kernel(log_phi_q: Tensor, log_phi_k: Tensor) -> Tensor:
    """``log phi(q_i) . phi(k_j)`` without leaving log space: (*, L, M), (*, S, M) -> (*, L, S)."""
    rows = max(1, PAIRS // max(1, log_phi_k.numel()))
    parts = [(part.unsqueeze(-2) + log_phi_k.unsqueeze(-3)).logsumexp(-1) for part in log_phi_q.split(rows, -2)]
    return torch.cat(parts, -2)


def log_attention(
    scores: Tensor, value: Tensor, visible: Tensor, normalize: bool = True, bias: Tensor | None = None
) -> Tensor:
    """Attention from the logarithms of positive weights.

        out_i = sum_j w_ij v_j / sum_j w_ij        w_ij = exp(s_ij + b_ij) where visible, else 0

    Args:
        scores: s, (*, L, S).
        value: (*, S, E).
        visible: broadcastable to (*, L, S) bool.
        normalize: divide by the sum of the weights.
        bias: b, broadcastable to (*, L, S).

    Returns:
        (*, L, E); a row that sees no key is zero.
    """
    scores = scores if bias is None else scores + bias
    scores = scores.masked_fill(~visible, -torch.inf)
    if not normalize:
        return scores.exp() @ value
    seen = (scores > -torch.inf).any(-1, keepdim=True)
    return torch.where(seen, scores.masked_fill(~seen, 0.0).softmax(-1) @ value, 0.0)


def positive_attention(
    log_phi_q: Tensor,
    log_phi_k: Tensor,
    value: Tensor,
    visible: Tensor,
    normalize: bool = True,
    bias: Tensor | None = None,
) -> Tensor:
    """Attention of a positive map, ``w_ij = phi(q_i) . phi(k_j) exp(b_ij)`` in `log_attention`.

    Args:
        log_phi_q: (*, L, M).
        log_phi_k: (*, S, M).
        value: (*, S, E).

    The others are those of `log_attention`.
    """
    return log_attention(log_kernel(log_phi_q, log_phi_k), value, visible, normalize, bias)


def weighted_attention(
    weights: Tensor, value: Tensor, visible: Tensor, normalize: bool = True, bound: Tensor | None = None
) -> Tensor:
    """Attention from weights of any sign.

        out_i = sum_j w_ij v_j / max(sum_j w_ij, bound_i)        over visible keys

    Args:
        weights: w, (*, L, S).
        value: (*, S, E).
        visible: broadcastable to (*, L, S) bool.
        normalize: divide by the denominator.
        bound: of the denominator from below, (*, L, 1); None for none.

    Returns:
        (*, L, E); a row whose denominator is not positive is zero.
    """
    weights = torch.where(visible, weights, 0.0)
    if not normalize:
        return weights @ value
    denominator = weights.sum(-1, keepdim=True)
    if bound is not None:
        denominator = torch.maximum(denominator, bound)
    some = denominator > 0
    return torch.where(some, weights @ value / torch.where(some, denominator, 1.0), 0.0)


def guard_bound(size_q: Tensor, size_k: Tensor, visible: Tensor, factor: Tensor | None = None) -> Tensor:
    """``GUARD |phi(q_i)| sum_j |phi(k_j)| f_ij`` over visible keys, (*, L, 1): what a signed denominator stays above.

    Args:
        size_q: |phi(q_i)|, (*, L, 1).
        size_k: |phi(k_j)|, (*, S, 1).
        visible: broadcastable to (*, L, S) bool.
        factor: f, what the weights are multiplied by, broadcastable to (*, L, S); None means 1.
    """
    sizes = size_k.transpose(-1, -2) if factor is None else size_k.transpose(-1, -2) * factor
    return GUARD * size_q * torch.where(visible, sizes, 0.0).sum(-1, keepdim=True)


def signed_attention(
    phi_q: Tensor,
    phi_k: Tensor,
    value: Tensor,
    visible: Tensor,
    normalize: bool = True,
    guard: bool = True,
    lengths: tuple[Tensor, Tensor] | None = None,
    factor: Tensor | None = None,
) -> Tensor:
    """Attention of a map by its values, ``w_ij = phi(q_i) . phi(k_j) f_ij`` in `weighted_attention`.

    Args:
        phi_q: (*, L, M).
        phi_k: (*, S, M).
        value: (*, S, E).
        guard: bound the denominator from below (`guard_bound`), as signed maps need.
        lengths: what the guard takes for |phi_q| (*, L, 1) and |phi_k| (*, S, 1); default: measured.
        factor: f, exp(bias) or what a gate has left, broadcastable to (*, L, S); None means 1.

    The others are those of `weighted_attention`.
    """
    weights = phi_q @ phi_k.transpose(-1, -2)
    bound = None
    if guard and normalize:
        size_q, size_k = lengths or (phi_q.norm(dim=-1, keepdim=True), phi_k.norm(dim=-1, keepdim=True))
        bound = guard_bound(size_q, size_k, visible, factor)
    return weighted_attention(weights if factor is None else weights * factor, value, visible, normalize, bound)
