"""Attention by its definition, with whole mapped tensors and the (L, S) matrix: the meaning of all fast paths.

For tests, for looking at small examples and for reading; cost O(L S M).
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernelformer.attention.signed import GUARD


def visibility(
    num_queries: int, num_keys: int, *, is_causal: bool, key_mask: Tensor | None, device: torch.device | None = None
) -> Tensor:
    """Which key each query may see, (L, S) or (B, 1, L, S) bool: ``j <= i`` if causal, and the keys that are not
    padding."""
    visible = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device)
    if is_causal:
        visible = visible.tril()
    return visible if key_mask is None else visible & key_mask[:, None, None, :]


def log_kernel(log_phi_q: Tensor, log_phi_k: Tensor) -> Tensor:
    """``log phi(q_i) . phi(k_j)`` without leaving log space: (*, L, M), (*, S, M) -> (*, L, S)."""
    rows = [(log_phi_q[..., i : i + 1, :] + log_phi_k).logsumexp(-1) for i in range(log_phi_q.shape[-2])]
    return torch.stack(rows, -2) if rows else log_phi_q.new_zeros(*log_phi_q.shape[:-1], log_phi_k.shape[-2])


def positive_attention(
    log_phi_q: Tensor, log_phi_k: Tensor, value: Tensor, visible: Tensor, normalize: bool = True
) -> Tensor:
    """Attention of a positive map.

        out_i = sum_j w_ij v_j / sum_j w_ij        w_ij = phi(q_i) . phi(k_j) where visible, else 0

    Args:
        log_phi_q: (*, L, M).
        log_phi_k: (*, S, M).
        value: (*, S, E).
        visible: broadcastable to (*, L, S) bool.
        normalize: divide by the sum of the weights.

    Returns:
        (*, L, E); a row that sees no key is zero.
    """
    scores = log_kernel(log_phi_q, log_phi_k)
    if not normalize:
        return torch.where(visible, scores.exp(), 0.0) @ value
    seen = visible.any(-1, keepdim=True).expand(*scores.shape[:-1], 1)
    scores = scores.masked_fill(~visible, -torch.inf).masked_fill(~seen, 0.0)
    return torch.where(seen, scores.softmax(-1) @ value, 0.0)


def signed_attention(
    phi_q: Tensor,
    phi_k: Tensor,
    value: Tensor,
    visible: Tensor,
    normalize: bool = True,
    guard: bool = True,
    lengths: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Attention of a map by its values.

        out_i = sum_j w_ij v_j / max(sum_j w_ij, GUARD |phi(q_i)| sum_j |phi(k_j)|)       both sums over visible keys

    Arguments as `positive_attention`, with features instead of their logarithms.

    Args:
        guard: bound the denominator from below, as signed maps need.
        lengths: what the guard takes for |phi_q| (*, L, 1) and |phi_k| (*, S, 1); default: measured.
    """
    weights = torch.where(visible, phi_q @ phi_k.transpose(-1, -2), 0.0)
    if not normalize:
        return weights @ value
    denominator = weights.sum(-1, keepdim=True)
    if guard:
        size_q, size_k = lengths or (phi_q.norm(dim=-1, keepdim=True), phi_k.norm(dim=-1, keepdim=True))
        norms = torch.where(visible, size_k.transpose(-1, -2), 0.0).sum(-1, keepdim=True)
        denominator = torch.maximum(denominator, GUARD * size_q * norms)
    some = denominator > 0
    return torch.where(some, weights @ value / torch.where(some, denominator, 1.0), 0.0)
