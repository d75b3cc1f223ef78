"""Bidirectional (and cross) attention at linear cost: one pass over the keys, one over the queries.

    out_i = phi(q_i)^T sum_j phi(k_j) v_j^T / phi(q_i)^T sum_j phi(k_j)          (Performer, Eq. 4)

Cost: O((L + S) M (D + E)) time; memory beyond inputs and outputs is a few buffers of `blocks.BUFFER` numbers and the
state, whatever the length. The backward pass keeps the inputs, the output and the state, and maps every chunk again;
where sequences are so short that states are larger than the keys, it sums them up again too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kernelformer.attention import decomposed
from kernelformer.attention.blocks import Shapes, empty_rows, gather_grads, grouped, spans, spread
from kernelformer.attention.families import engine_class, make_engine
from kernelformer.attention.passes import KeyPass, QueryPass
from kernelformer.contract import Workspace, compute_dtype, lookup, no_tangents


def _keeps(s: Shapes) -> bool:
    """Whether the states are worth keeping for the backward pass."""
    return s.S >= s.M


@torch.library.custom_op("kernelformer::linear_attention", mutates_args=())
def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    tensors: list[Tensor],
    spec: str,
    scale: float,
    normalize: bool,
) -> tuple[Tensor, list[Tensor]]:
    known = lookup(spec)
    s = Shapes.of(query, key, value, known.feature_dim(tensors, query.shape[-1]))
    dtype = compute_dtype(query.dtype)
    work = Workspace(dtype, query.device)
    out = empty_rows(query, s.E)
    like = query.new_empty(0, dtype=dtype)
    kept = [like.new_empty(s.B, s.G, *x) for x in engine_class(known).state_shapes(s.M, s.E)] if _keeps(s) else []
    q5, k5, v5, out5 = grouped(query, s.G), grouped(key, s.G), grouped(value, s.G), grouped(out, s.G)
    for first, last in spans(s.B, s.samples()):
        block, count = slice(first, last), last - first
        engine, _ = make_engine(known, spread(tensors, block, count, s.G), scale, normalize, False, work)
        rows = KeyPass(s, k5, v5, key_mask, block, work).sums(engine)
        QueryPass(s, q5, block, work).read(engine, rows, out5)
        for whole, part in zip(kept, rows, strict=False):
            whole[block] = part.view(whole[block].shape)
    return out, kept


@_forward.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    tensors: list[Tensor],
    spec: str,
    scale: float,
    normalize: bool,
) -> tuple[Tensor, list[Tensor]]:
    known = lookup(spec)
    s = Shapes.of(query, key, value, known.feature_dim(tensors, query.shape[-1]))
    shapes = engine_class(known).state_shapes(s.M, s.E) if _keeps(s) else []
    kept = [query.new_empty(s.B, s.G, *x, dtype=compute_dtype(query.dtype)) for x in shapes]
    return empty_rows(query, s.E), kept


@torch.library.custom_op("kernelformer::linear_attention_backward", mutates_args=())
def _backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    tensors: list[Tensor],
    out: Tensor,
    state: list[Tensor],
    spec: str,
    scale: float,
    normalize: bool,
    learn: bool,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    known = lookup(spec)
    s = Shapes.of(query, key, value, known.feature_dim(tensors, query.shape[-1]))
    dtype = compute_dtype(query.dtype)
    work = Workspace(dtype, query.device)
    dq, dk, dv = (empty_rows(x, x.shape[-1]) for x in (query, key, value))
    totals = [torch.zeros_like(x) for x in tensors] if learn else []
    q5, k5, v5, g5, out5 = (grouped(x, s.G) for x in (query, key, value, grad, out))
    dq5, dk5, dv5 = (grouped(x, s.G) for x in (dq, dk, dv))
    for first, last in spans(s.B, s.samples()):
        block, count = slice(first, last), last - first
        engine, tensor_grads = make_engine(known, spread(tensors, block, count, s.G), scale, normalize, learn, work)
        keys = KeyPass(s, k5, v5, key_mask, block, work)
        rows = [x[block].flatten(0, 1) for x in state] if state else keys.sums(engine)
        grads = engine.zero_grads(rows)
        QueryPass(s, q5, block, work).backward(engine, rows, grads, (g5, out5), dq5)
        keys.backward(engine, rows, grads, dk5, dv5)
        if learn:
            gather_grads(totals, tensor_grads(), block, count, s.G)
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
    state: list[Tensor],
    spec: str,
    scale: float,
    normalize: bool,
    learn: bool,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    dq, dk, dv = (empty_rows(x, x.shape[-1]) for x in (query, key, value))
    return dq, dk, dv, [torch.empty_like(x) for x in tensors] if learn else []


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    query, key, value, key_mask, tensors, ctx.spec, ctx.scale, ctx.normalize = inputs
    out, state = output
    ctx.set_materialize_grads(False)
    ctx.counts = (len(tensors), len(state))
    ctx.learn = any(x.requires_grad for x in tensors)
    ctx.save_for_backward(query, key, value, key_mask, out, *tensors, *state)


def _grad(ctx: Any, grad: Tensor | None, _: Any) -> tuple[Any, ...]:
    if grad is None:
        return (None,) * 4 + ([None] * ctx.counts[0],) + (None,) * 3
    query, key, value, key_mask, out, *rest = ctx.saved_tensors
    tensors, state = rest[: ctx.counts[0]], rest[ctx.counts[0] :]
    dq, dk, dv, totals = _backward(
        grad, query, key, value, key_mask, tensors, out, state, ctx.spec, ctx.scale, ctx.normalize, ctx.learn
    )
    return dq, dk, dv, None, totals if ctx.learn else [None] * ctx.counts[0], None, None, None


_forward.register_autograd(_grad, setup_context=_save)


def linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    spec: str,
    tensors: Sequence[Tensor],
    scale: float,
    key_mask: Tensor | None = None,
    normalize: bool = True,
) -> Tensor:
    """Attend to all keys.

    Args:
        query: (B, H, L, D).
        key: (B, G, S, D), G divides H.
        value: (B, G, S, E).
        spec: of the map, as `contract.register` names it.
        tensors: of the map, (B or 1, G or 1, ...) in the dtype of the arithmetic.
        scale: the map sees ``sqrt(scale) x``.
        key_mask: (B, S) bool, True = attend.
        normalize: divide by the sum of the weights.

    Returns:
        (B, H, L, E) in the dtype of the query; rows without a visible key are zero.
    """
    if decomposed.is_exporting():
        common: dict[str, Any] = {"spec": spec, "tensors": tensors, "scale": scale}
        return decomposed.linear(query, key, value, **common, key_mask=key_mask, normalize=normalize)
    no_tangents(query=query, key=key, value=value, a_parameter_of_the_feature_map=tensors)
    out: Tensor = _forward(query, key, value, key_mask, list(tensors), spec, scale, normalize)[0]
    return out
