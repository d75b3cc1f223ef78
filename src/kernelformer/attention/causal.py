"""Causal attention at linear cost: quadratic inside a chunk, a state between chunks (Performer, Eq. 11).

Chunks are worked on several at a time, as batched matrix products; only the recurrence of the state runs chunk by
chunk.
The (L, M, E) tensor of prefix sums is never made.

Cost: O(L (M (D + E) + C (M + E))) time for chunks of C rows. The backward pass keeps the inputs, the output, one number
per query and one state per group of chunks, and maps every chunk again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kernelformer.attention.blocks import (
    Pieces,
    Shapes,
    empty_rows,
    gather_grads,
    grouped,
    put_rows,
    rows_of,
    spans,
    spread,
    visible_pair,
)
from kernelformer.attention.operator import Operator
from kernelformer.attention.plain.attend import plain_causal_attention
from kernelformer.attention.positive import CausalChunks, PositiveSums, bind_sums
from kernelformer.contract import Workspace, compute_dtype, lookup

INPUTS = (
    "Tensor query, Tensor key, Tensor value, Tensor? key_mask, Tensor[] tensors, Tensor[] state, str spec, "
    "float scale, bool normalize, bool keep"
)


def _forward(*arguments: Any) -> tuple[Any, ...]:
    query, key, value, key_mask, tensors, state, spec, scale, normalize, keep = arguments
    known = lookup(spec)
    s = Shapes.of(query, key, value, known.feature_dim(tensors, query.shape[-1]))
    dtype = compute_dtype(query.dtype)
    work = Workspace(dtype, query.device)
    # Keys beyond the last query are never seen; queries beyond the last key see the final state.
    pieces = Pieces(s, key_mask, work)
    out = empty_rows(query, s.E)
    row_scales = query.new_zeros(s.B, s.H, s.L, dtype=dtype)
    end_state = [torch.empty_like(x) for x in state]
    kept = [x.new_empty(s.groups(pieces.samples) if keep else 0, *x.shape) for x in state]
    q5, k5, v5 = (grouped(x, s.G) for x in (query, key, value))
    out5, row_scales5 = grouped(out, s.G), grouped(row_scales.unsqueeze(3), s.G)
    for first, last in spans(s.B, pieces.samples):
        block, count = slice(first, last), last - first
        bound = spread(tensors, block, count, s.G, pieces.together)
        sums = bind_sums(known, bound, scale, normalize, False, work)
        rows = [x[block].flatten(0, 1) for x in state]
        for group, (start, end) in enumerate(pieces.groups()):
            if keep:
                for whole, part in zip(kept, rows, strict=True):
                    whole[group, block] = part.view(whole[group, block].shape)
            hidden = pieces.hidden(block, start, end)
            xq, xk, v = (pieces.rows(n, x, block, start, end) for n, x in (("q", q5), ("k", k5), ("v", v5)))
            inputs = CausalChunks(xq, *visible_pair(xk, v, hidden), hidden, pieces.mask)
            y, row_scale, rows = sums.causal(rows, inputs)
            pieces.put(out5, y, block, start, end)
            pieces.put(row_scales5, row_scale.unsqueeze(2), block, start, end)
        for whole, part in zip(end_state, rows, strict=True):
            whole[block] = part.view(whole[block].shape)
        if s.L > s.S:
            tail = bind_sums(known, spread(tensors, block, count, s.G), scale, normalize, False, work)
            for start, end in spans(s.L - s.S, s.chunk(count, s.H)):
                at = slice(s.S + start, s.S + end)
                put_rows(out5[block, :, :, at], tail.read(rows, rows_of(q5[block, :, :, at], "q", work)))
    return out, row_scales, end_state, kept


def _fake(*arguments: Any) -> tuple[Any, ...]:
    query, key, value, _, tensors, state, spec, _, _, keep = arguments
    s = Shapes.of(query, key, value, lookup(spec).feature_dim(tensors, query.shape[-1]))
    groups = s.groups(s.samples()) if keep else 0
    return (
        empty_rows(query, s.E),
        query.new_empty(query.shape[:3], dtype=compute_dtype(query.dtype)),
        [torch.empty_like(x) for x in state],
        [x.new_empty(groups, *x.shape) for x in state],
    )


def _backward(*arguments: Any) -> tuple[Any, ...]:
    grad, state_grads, out, row_scales, end_state, kept, query, key, value, key_mask, *rest = arguments
    tensors, state, spec, scale, normalize, _, learn = rest
    known = lookup(spec)
    s = Shapes.of(query, key, value, known.feature_dim(tensors, query.shape[-1]))
    work = Workspace(compute_dtype(query.dtype), query.device)
    pieces = Pieces(s, key_mask, work)
    dq, dk, dv = (empty_rows(x, x.shape[-1]) for x in (query, key, value))
    for unseen in (dk, dv):
        unseen[:, :, s.L :] = 0
    start_grads = [torch.empty_like(x) for x in state]
    totals = [torch.zeros_like(x) for x in tensors] if learn else []
    q5, k5, v5, g5, out5, row_scales5 = (
        grouped(x, s.G) for x in (query, key, value, grad, out, row_scales.unsqueeze(3))
    )
    dq5, dk5, dv5 = (grouped(x, s.G) for x in (dq, dk, dv))
    for first, last in spans(s.B, pieces.samples):
        block, count = slice(first, last), last - first
        bound = spread(tensors, block, count, s.G, pieces.together)
        sums = bind_sums(known, bound, scale, normalize, learn, work)
        end_rows = [x[block].flatten(0, 1) for x in end_state]
        grads = sums.grads_in(end_rows, [x[block].flatten(0, 1) for x in state_grads])
        if s.L > s.S:
            tail = bind_sums(known, spread(tensors, block, count, s.G), scale, normalize, learn, work)
            for start, end in spans(s.L - s.S, s.chunk(count, s.H)):
                at = slice(s.S + start, s.S + end)
                x, g, y = (rows_of(t[block, :, :, at], n, work) for t, n in ((q5, "q"), (g5, "g"), (out5, "o")))
                put_rows(dq5[block, :, :, at], tail.read_backward(end_rows, grads, x, g, y))
            if learn:
                gather_grads(totals, tail.chunks.tensor_grads(), block, count, s.G)
        for group, (start, end) in reversed(list(enumerate(pieces.groups()))):
            rows = [x[group, block].flatten(0, 1) for x in kept]
            hidden = pieces.hidden(block, start, end)
            named = {"q": q5, "k": k5, "v": v5, "g": g5, "o": out5, "row_scale": row_scales5}
            xq, xk, v, g, y, row_scale = (pieces.rows(n, x, block, start, end) for n, x in named.items())
            inputs = CausalChunks(xq, *visible_pair(xk, v, hidden), hidden, pieces.mask)
            dx, dx_k, d_v, grads = sums.causal_backward(rows, grads, inputs, g, y, row_scale.squeeze(2))
            pieces.put(dq5, dx, block, start, end)
            for target, part in zip((dk5, dv5), visible_pair(dx_k, d_v, hidden), strict=True):
                pieces.put(target, part, block, start, end)
        first_grads = sums.grads_out([x[block].flatten(0, 1) for x in state], grads)
        for whole, part in zip(start_grads, first_grads, strict=True):
            whole[block] = part.view(whole[block].shape)
        if learn:
            gather_grads(totals, sums.chunks.tensor_grads(), block, count, s.G)
    return dq, dk, dv, totals, start_grads


OPERATOR = Operator(
    "causal_attention",
    inputs=INPUTS,
    outputs="Tensor out, Tensor row_scales, Tensor[] end_state, Tensor[] kept",
    forward=_forward,
    fake=_fake,
    backward=_backward,
    learned="query, key, value, tensors, state",
    given="out, end_state",
    plain=lambda keep, **inputs: plain_causal_attention(**inputs),
)


def causal_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    spec: str,
    tensors: Sequence[Tensor],
    scale: float,
    key_mask: Tensor | None = None,
    normalize: bool = True,
    state: Sequence[Tensor] | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """Attend to the keys up to one's own position, and to those in the state.

    Arguments as `linear.linear_attention`; key j is visible to query i iff j <= i, and ``state``, (B, G, ...) each, is
    of earlier keys. Returns (B, H, L, E) in the dtype of the query, and the state after the last key.
    """
    if state is None:
        features = lookup(spec).feature_dim(tensors, query.shape[-1])
        like = query.new_empty(0, dtype=compute_dtype(query.dtype))
        state = PositiveSums.empty((query.shape[0], key.shape[1]), features, value.shape[-1], like)
    state = [x.to(compute_dtype(query.dtype)) for x in state]
    inputs = (query, key, value, *tensors, *state)
    keep = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    out, _, end, _ = OPERATOR.forward(
        query, key, value, key_mask, list(tensors), list(state), spec, scale, normalize, keep
    )
    return out, end
