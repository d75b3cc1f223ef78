"""Attention of short sequences by the matrix of weights, made from features.

    w_ij = phi(q_i) . phi(k_j)        out_i = sum_j w_ij v_j / sum_j w_ij

The same numbers as `linear` and `causal`, which sum over keys first: that costs M E operations a key and a query, and
a state of M E numbers a sequence; the matrix costs M + E a pair. Where keys are few that is less (`prefers_direct`),
and no state is made.

Cost: O((L + S) M D + L S (M + E)) time; memory beyond inputs and outputs is a few buffers of `blocks.BUFFER` numbers,
or those of one sample. The backward pass keeps the inputs, the output and one number per query, and maps all again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kernelformer.attention.blocks import (
    CAUSAL_CHUNK,
    Shapes,
    empty_rows,
    gather_grads,
    grouped,
    hidden_rows,
    put_rows,
    room_for_rows,
    rows_of,
    spans,
    spread,
    visible_pair,
)
from kernelformer.attention.direct_weights import DirectWeights
from kernelformer.contract import PositiveSpec, Workspace, compute_dtype, lookup, no_tangents

LONGEST = 256  # tokens up to which the features of whole sequences are small
# How many more operations the matrix may take, bidirectional and causal: no states are made, which are more to write
# than to compute, and nothing runs chunk by chunk. Measured on a CPU at 16 to 256 features.
RATES = (1.25, 1.75)


def prefers_direct(s: Shapes, *, is_causal: bool) -> bool:
    """Whether the matrix of weights costs less than sums over keys, by sizes alone."""
    if min(s.B, s.L, s.S) == 0 or max(s.L, s.S) > LONGEST:
        return False
    queries = s.R * s.L
    sums = (s.S + queries) * s.M * s.E
    if is_causal:  # inside of its chunks `causal` has a matrix too
        sums += queries * min(CAUSAL_CHUNK, s.S) * (s.M + s.E)
    return queries * s.S * (s.M + s.E) <= RATES[is_causal] * sums


class _Block:
    """Some samples of a call, as rows.

    Args:
        s: sizes of the call.
        key_mask: (B, S) bool, or None.
        block: of samples.
        work: buffers.
    """

    def __init__(self, s: Shapes, key_mask: Tensor | None, block: slice, work: Workspace) -> None:
        self.s, self.block, self.work = s, block, work
        self.hidden = None
        if key_mask is not None and not bool(key_mask[block].all()):
            self.hidden = hidden_rows(key_mask, block, slice(None), s.G, 1, s.S)

    def rows(self, name: str, x: Tensor) -> Tensor:
        """A tensor (B, G, R, T, X) as rows (N, R T, X)."""
        return rows_of(x[self.block], name, self.work)

    def pair(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values as rows, hidden ones zero."""
        return visible_pair(self.rows("k", key), self.rows("v", value), self.hidden)

    def room(self, name: str, target: Tensor) -> Tensor:
        """Room for what `put` will write into (B, G, R, T, X)."""
        return room_for_rows(target[self.block], name, self.work)

    def put(self, target: Tensor, rows: Tensor) -> None:
        """Write rows into (B, G, R, T, X)."""
        put_rows(target[self.block], rows)


def _visible(s: Shapes, is_causal: bool, work: Workspace) -> Tensor | None:
    """Which keys the queries of a row may see, (R L, S) of ones and zeros; None means all."""
    return torch.ones(s.L, s.S, dtype=work.dtype, device=work.device).tril_().repeat(s.R, 1) if is_causal else None


@torch.library.custom_op("kernelformer::direct_attention", mutates_args=())
def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    tensors: list[Tensor],
    spec: str,
    scale: float,
    is_causal: bool,
) -> tuple[Tensor, Tensor]:
    known = lookup(spec)
    assert isinstance(known, PositiveSpec)
    s = Shapes.of(query, key, value, known.feature_dim(tensors, query.shape[-1]))
    dtype = compute_dtype(query.dtype)
    work = Workspace(dtype, query.device)
    out, row_scales = empty_rows(query, s.E), query.new_empty(s.B, s.H, s.L, dtype=dtype)
    q5, k5, v5, out5 = (grouped(x, s.G) for x in (query, key, value, out))
    scales5 = grouped(row_scales.unsqueeze(3), s.G)
    visible = _visible(s, is_causal, work)
    for first, last in spans(s.B, s.samples()):
        block = _Block(s, key_mask, slice(first, last), work)
        chunks = known.bind(spread(tensors, block.block, last - first, s.G), scale, True, False)
        weights = DirectWeights(chunks, s, visible, block.hidden, work)
        y, row_scale = weights.attend(block.rows("q", q5), *block.pair(k5, v5), block.room("out", out5))
        block.put(out5, y)
        block.put(scales5, row_scale.unsqueeze(2))
    return out, row_scales


@_forward.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    tensors: list[Tensor],
    spec: str,
    scale: float,
    is_causal: bool,
) -> tuple[Tensor, Tensor]:
    row_scales = query.new_empty(query.shape[:3], dtype=compute_dtype(query.dtype))
    return empty_rows(query, value.shape[-1]), row_scales


@torch.library.custom_op("kernelformer::direct_attention_backward", mutates_args=())
def _backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    tensors: list[Tensor],
    out: Tensor,
    row_scales: Tensor,
    spec: str,
    scale: float,
    is_causal: bool,
    learn: bool,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    known = lookup(spec)
    assert isinstance(known, PositiveSpec)
    s = Shapes.of(query, key, value, known.feature_dim(tensors, query.shape[-1]))
    work = Workspace(compute_dtype(query.dtype), query.device)
    dq, dk, dv = (empty_rows(x, x.shape[-1]) for x in (query, key, value))
    totals = [torch.zeros_like(x) for x in tensors] if learn else []
    q5, k5, v5, g5, out5 = (grouped(x, s.G) for x in (query, key, value, grad, out))
    scales5 = grouped(row_scales.unsqueeze(3), s.G)
    targets = [grouped(x, s.G) for x in (dq, dk, dv)]
    visible = _visible(s, is_causal, work)
    for first, last in spans(s.B, s.samples()):
        block = _Block(s, key_mask, slice(first, last), work)
        chunks = known.bind(spread(tensors, block.block, last - first, s.G), scale, True, learn)
        weights = DirectWeights(chunks, s, visible, block.hidden, work)
        given = (block.rows("g", g5), block.rows("o", out5), block.rows("row_scale", scales5).squeeze(2))
        room = [block.room(name, x) for name, x in zip(("dq", "dk", "dv"), targets, strict=True)]
        grads = weights.backward((block.rows("q", q5), *block.pair(k5, v5)), *given, room)
        for target, rows in zip(targets, grads, strict=True):
            block.put(target, rows)
        if learn:
            gather_grads(totals, chunks.tensor_grads(), block.block, last - first, s.G)
    return dq, dk, dv, totals


@_backward.register_fake
def _(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    tensors: list[Tensor],
    out: Tensor,
    row_scales: Tensor,
    spec: str,
    scale: float,
    is_causal: bool,
    learn: bool,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    dq, dk, dv = (empty_rows(x, x.shape[-1]) for x in (query, key, value))
    return dq, dk, dv, [torch.empty_like(x) for x in tensors] if learn else []


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    query, key, value, key_mask, tensors, ctx.spec, ctx.scale, ctx.is_causal = inputs
    ctx.set_materialize_grads(False)
    ctx.count = len(tensors)
    ctx.learn = any(x.requires_grad for x in tensors)
    ctx.save_for_backward(query, key, value, key_mask, *output, *tensors)


def _grad(ctx: Any, grad: Tensor | None, _: Any) -> tuple[Any, ...]:
    if grad is None:
        return (None,) * 4 + ([None] * ctx.count,) + (None,) * 3
    query, key, value, key_mask, out, row_scales, *tensors = ctx.saved_tensors
    dq, dk, dv, totals = _backward(
        grad, query, key, value, key_mask, tensors, out, row_scales, ctx.spec, ctx.scale, ctx.is_causal, ctx.learn
    )
    return dq, dk, dv, None, totals if ctx.learn else [None] * ctx.count, None, None, None


_forward.register_autograd(_grad, setup_context=_save)


def direct_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    spec: str,
    tensors: Sequence[Tensor],
    scale: float,
    key_mask: Tensor | None = None,
    is_causal: bool = False,
) -> Tensor:
    """Attend to all keys, or to those up to one's own position, under normalization by a positive map.

    Arguments as `linear.linear_attention`; causal: key j is visible to query i iff j <= i.

    Returns:
        (B, H, L, E) in the dtype of the query; rows without a visible key are zero.
    """
    no_tangents(query=query, key=key, value=value, a_parameter_of_the_feature_map=tensors)
    out: Tensor = _forward(query, key, value, key_mask, list(tensors), spec, scale, is_causal)[0]
    return out
