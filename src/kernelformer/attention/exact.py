"""Exact Gaussian attention in tiles: quadratic time, linear memory (Skyformer, Sec. 4.1).

    out_i = sum_j exp(-scale |q_i - k_j|^2 / 2) v_j        over visible keys; unnormalized

The tile of weights is computed again in the backward pass; no (L, S) matrix is ever made.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernelformer.attention.blocks import BUFFER, grouped, spans
from kernelformer.attention.operator import Operator
from kernelformer.contract import compute_dtype, no_tangents

TILE = 512


class _Tiles:
    """The tiles of one call, for one sample at a time: (G, R Cq, Ck) weights."""

    def __init__(self, query: Tensor, key: Tensor, key_mask: Tensor | None, scale: float, is_causal: bool) -> None:
        self.dtype = compute_dtype(query.dtype)
        self.key_mask, self.root, self.is_causal = key_mask, math.sqrt(scale), is_causal
        heads = query.shape[1]
        self.step = max(32, min(TILE, math.isqrt(BUFFER // max(heads, 1))))

    def rows(self, x: Tensor, sample: int, start: int, end: int, root: float = 1.0) -> Tensor:
        """A piece of (B, G, R, T, X) as (G, R C, X)."""
        return x[sample, :, :, start:end].flatten(1, 2).to(self.dtype) * root

    def keys(self, k5: Tensor, v5: Tensor, sample: int, start: int, end: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keys, values and which of them are hidden, (C)."""
        k, v = self.rows(k5, sample, start, end, self.root), self.rows(v5, sample, start, end)
        if self.key_mask is None:
            return k, v, None
        hidden = ~self.key_mask[sample, start:end]
        return k.masked_fill(hidden.unsqueeze(1), 0), v.masked_fill(hidden.unsqueeze(1), 0), hidden

    def weights(self, q: Tensor, k: Tensor, hidden: Tensor | None, q0: int, k0: int, length: int) -> Tensor:
        """The tile at (q0, k0); ``length`` queries per head."""
        half_q, half_k = (torch.linalg.vecdot(x, x).mul_(0.5) for x in (q, k))
        w = torch.baddbmm(half_k.neg().unsqueeze(1), q, k.transpose(1, 2)).sub_(half_q.unsqueeze(2)).clamp_max_(0)
        w.exp_()
        if hidden is not None:
            w.masked_fill_(hidden, 0)
        if self.is_causal and k0 + k.shape[1] - 1 > q0:
            i = torch.arange(q0, q0 + length, device=q.device).repeat(q.shape[1] // length)
            w.masked_fill_(torch.arange(k0, k0 + k.shape[1], device=q.device) > i.unsqueeze(1), 0)
        return w

    def visible(self, q_end: int, keys: int) -> int:
        """The number of keys that queries before ``q_end`` see."""
        return min(keys, q_end) if self.is_causal else keys


def _forward(
    query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None, scale: float, is_causal: bool
) -> Tensor:
    tiles = _Tiles(query, key, key_mask, scale, is_causal)
    heads = key.shape[1]
    out = query.new_zeros(*query.shape[:3], value.shape[-1])
    q5, k5, v5, out5 = (grouped(x, heads) for x in (query, key, value, out))
    for b in range(query.shape[0]):
        for q0, q1 in spans(query.shape[2], tiles.step):
            q = tiles.rows(q5, b, q0, q1, tiles.root)
            total = q.new_zeros(*q.shape[:2], value.shape[-1])
            for k0, k1 in spans(tiles.visible(q1, key.shape[2]), tiles.step):
                k, v, hidden = tiles.keys(k5, v5, b, k0, k1)
                total.baddbmm_(tiles.weights(q, k, hidden, q0, k0, q1 - q0), v)
            out5[b, :, :, q0:q1] = total.unflatten(1, (-1, q1 - q0))
    return out


def _fake(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
    return query.new_empty(*query.shape[:3], value.shape[-1])


def _backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    scale: float,
    is_causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    tiles = _Tiles(query, key, key_mask, scale, is_causal)
    heads = key.shape[1]
    dq, dk, dv = (
        torch.zeros_like(x, dtype=tiles.dtype, memory_format=torch.contiguous_format) for x in (query, key, value)
    )
    q5, k5, v5, g5 = (grouped(x, heads) for x in (query, key, value, grad))
    dq5 = grouped(dq, heads)
    for b in range(query.shape[0]):
        for q0, q1 in spans(query.shape[2], tiles.step):
            q, g = tiles.rows(q5, b, q0, q1, tiles.root), tiles.rows(g5, b, q0, q1)
            total = torch.zeros_like(q)
            for k0, k1 in spans(tiles.visible(q1, key.shape[2]), tiles.step):
                k, v, hidden = tiles.keys(k5, v5, b, k0, k1)
                w = tiles.weights(q, k, hidden, q0, k0, q1 - q0)
                dv[b, :, k0:k1].baddbmm_(w.transpose(1, 2), g)
                w.mul_(torch.bmm(g, v.transpose(1, 2)))  # d exp(-|q - k|^2 / 2) = w (k - q), and the opposite at k
                total.baddbmm_(w, k).addcmul_(q, w.sum(2, keepdim=True), value=-1)
                dk[b, :, k0:k1].baddbmm_(w.transpose(1, 2), q).addcmul_(k, w.sum(1).unsqueeze(2), value=-1)
            dq5[b, :, :, q0:q1] = total.unflatten(1, (-1, q1 - q0))
    dq.mul_(tiles.root)
    dk.mul_(tiles.root)
    return dq.to(query.dtype), dk.to(key.dtype), dv.to(value.dtype)


def _fake_backward(grad: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs[:3])


def gaussian_matrix_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    key_mask: Tensor | None,
    is_causal: bool,
    dropout: float = 0.0,
) -> Tensor:
    """Attend by the whole matrix of weights, of which a share ``dropout`` is dropped; else as `gaussian_attention`."""
    dtype, repeat = compute_dtype(query.dtype), query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(repeat, 1) for x in (key, value))
    visible = query.new_ones(query.shape[2], key.shape[2], dtype=torch.bool)
    visible = visible.tril() if is_causal else visible
    if key_mask is not None:
        hidden = ~key_mask[:, None, :, None]
        key, value = key.masked_fill(hidden, 0), value.masked_fill(hidden, 0)
        visible = visible & key_mask[:, None, None, :]
    q, k = (math.sqrt(scale) * x.to(dtype) for x in (query, key))
    logs = q @ k.mT - 0.5 * (q.square().sum(-1, keepdim=True) + k.square().sum(-1).unsqueeze(2))
    return (F.dropout(logs.exp().masked_fill(~visible, 0), dropout) @ value.to(dtype)).to(query.dtype)


OPERATOR = Operator(
    "gaussian_attention",
    inputs="Tensor query, Tensor key, Tensor value, Tensor? key_mask, float scale, bool is_causal",
    outputs="Tensor out",
    forward=_forward,
    fake=_fake,
    backward=_backward,
    learned="query, key, value",
    kept="",
    fake_backward=_fake_backward,
    plain=gaussian_matrix_attention,
)


def gaussian_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    key_mask: Tensor | None = None,
    is_causal: bool = False,
) -> Tensor:
    """Exact, unnormalized Gaussian attention; arguments and shapes as `linear.linear_attention`.

    Cost: O(L S (D + E)) time, O(TILE^2 H) memory beyond inputs and outputs.
    """
    no_tangents(query=query, key=key, value=value)
    out: Tensor = OPERATOR.forward(query, key, value, key_mask, scale, is_causal)
    return out
