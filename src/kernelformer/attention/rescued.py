"""Rows of a causal chunk that are too small for float range, feature by feature and key by key in log space."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernelformer.contract import PositiveChunks

EMPTY = -1e30  # log mass of no keys: vanishes against any real one, and differences of it stay finite


def sees_some(before: Tensor, hidden: Tensor | None, size: int, queries: int) -> Tensor:
    """Which query rows (N c, R C) see any key at all."""
    earlier = before.amax(1) > EMPTY / 2
    if hidden is None:
        return torch.ones_like(earlier)
    here = (~hidden).cumsum(1) > 0
    return (here | earlier).repeat(1, queries // size)


def rescued_rows(lost: Tensor, size: int) -> list[tuple[int, Tensor]]:
    """The rows n with lost queries, a few queries of one head at a time, so that (queries, M, C) stays small.

    Args:
        lost: (N c, R C) bool.
        size: C.
    """
    return [
        (row, head * size + part)
        for row in lost.any(1).nonzero().squeeze(1).tolist()
        for head, queries in enumerate(lost[row].split(size))
        if bool(queries.any())
        for part in queries.nonzero().squeeze(1).split(32)
    ]


@dataclass
class Rescue:
    """Some queries of one chunk, feature by feature and key by key: what they were too small for is exact here."""

    chunks: PositiveChunks
    xq: Tensor  # (1, r, D)
    xk: Tensor  # (1, C, D)
    shares: Tensor  # (r, M, C) of the keys of the chunk; unnormalized, their weights divided by the root
    shares_before: Tensor  # (r, M) of what came before it
    mean: Tensor  # (M, E) before it
    root: Tensor  # (r, 1) of the row's size, unnormalized; else 1
    log: Tensor  # (r) of the row's size

    def sums(self, v: Tensor) -> Tensor:
        """The rows' outputs (r, E), for values (C, E)."""
        return (self.shares_before @ self.mean + self.shares.sum(1) @ v) * self.root


@dataclass
class RescueGrads:
    """Gradients of a rescue."""

    query: Tensor  # (r, M), of the log features
    key: Tensor  # (M, C), of the log features
    value: Tensor  # (C, E)
    kv_before: Tensor  # (M, E)
    mass_before: Tensor  # (M, 1)


def rescue_backward(r: Rescue, g: Tensor, out: Tensor, v: Tensor, normalize: bool) -> RescueGrads:
    """Gradients of a rescue, from that of its outputs, g (r, E)."""
    delta = -(g * out).sum(1, keepdim=True) if normalize else g.new_zeros(g.shape[0], 1)
    g = g * r.root
    pairs = r.shares * (g @ v.T + delta).unsqueeze(1)
    past = r.shares_before * (g @ r.mean.T + delta)
    value = r.shares.sum(1).T @ g
    return RescueGrads(pairs.sum(2) + past, pairs.sum(0), value, r.shares_before.T @ g, r.shares_before.T @ delta)
