"""Attention with a relative bias, exact, in tiles: `direct` over all keys, `windowed` with sums for the far ones.

    out_i = sum_j w_ij v_j / sum_j w_ij       w_ij = exp(b_{j-i}) phi(q_i) . phi(k_j)       (kernelized-rpe Eq. 10)

`direct` costs O(L S (M + E)) and makes tiles only. Where the bias goes on as a straight line beyond a distance w, keys
farther away are summed up: that is `windowed`, O(L (w + M) (M + E)), one pass for the keys on the right, another for
those on the left and the band of tiles between.

The backward pass maps everything again. Sums run the same way, over keys for the queries ahead of them and over queries
for the keys ahead of those, so that nothing of the size of the sequence is kept beside one unit and one denominator per
row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kernelformer.attention.blocks import gather_grads
from kernelformer.attention.relative.backward import Backward
from kernelformer.attention.relative.bias_view import Layout
from kernelformer.attention.relative.forward import (
    Rights,
    absorb,
    end_sums,
    finish,
    largest,
    meet,
    read,
    sees_some,
    side_by_side,
)
from kernelformer.attention.relative.rescue import rescue
from kernelformer.attention.relative.windows import NO_WINDOW, Call, Scan
from kernelformer.contract import compute_dtype, lookup, no_tangents


@torch.library.custom_op("kernelformer::relative_attention", mutates_args=())
def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    tensors: list[Tensor],
    bias: Tensor,
    slope: Tensor | None,
    state: list[Tensor],
    spec: str,
    scale: float,
    is_causal: bool,
    window: int,
    layout: list[int],
    unit: bool,
    keep: int,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    call = Call(query, key, value, key_mask, tensors, bias, slope, spec, scale, is_causal, window, layout, unit)
    B, H, L, _ = query.shape
    width = value.shape[3]
    out = query.new_empty(B, H, L, width)
    units, inverses = (query.new_zeros(B, H, L, 1, dtype=call.dtype) for _ in range(2))
    ends: list[list[Tensor]] = []
    for block in call.blocks():
        rights = None if block.tail(1) is None else Rights(block)
        scan = Scan(block, -1, True, call.layout.offset)
        if state:
            scan.sums.load([x[block.block].flatten(0, 1) for x in state])
        for index, span in enumerate(call.bias.queries):
            scans = [] if rights is None else [rights.at(index)]
            tiles = [block.keys(x) for x in call.band(span)]
            if scan.tail is not None:
                absorb(block, scan, scan.to(*call.edges(span, True)))
                scans.append(scan)
            scans = [x for x in scans if x.sums.some]
            q, rows = block.queries(span), block.empty_rows(span)
            top = largest([x.shift for x in tiles] + [x.highest(span) for x in scans], block)
            base, size = block.tiles.base(q, top)
            for x in scans:
                read(x, base, top, span, size, rows)
            for group in side_by_side(tiles, span[1] - span[0], call):
                meet(block, group, base, top, span, size, rows)
            y, inverse, lost = finish(block, rows, q, size)
            if bool(lost.any()):
                lost &= sees_some(block, tiles, scans, span)
            if bool(lost.any()):
                rescue(block, span, lost.squeeze(2), y, inverse, state)
            block.put(out, y, span)
            block.note(units, size, span)
            block.note(inverses, inverse, span)
        if keep >= 0:
            ends.append(end_sums(block, scan, keep))
    if keep >= 0 and not ends:  # of no samples
        return out, units, inverses, _empty_sums(query, value, tensors, spec)
    return out, units, inverses, [torch.cat(x) for x in zip(*ends, strict=True)] if ends else []


def _empty_sums(query: Tensor, value: Tensor, tensors: Sequence[Tensor], spec: str) -> list[Tensor]:
    """Room for the sums (B, H, ...) of a call: shift, kv, ks and ns."""
    known = lookup(spec)
    features, width = known.feature_dim(tensors, query.shape[3]), value.shape[3]
    sizes = ((1, features if known.family == "positive" else 1), (features, width), (features, 1), (1, 1))
    return [query.new_empty(*query.shape[:2], *x, dtype=compute_dtype(query.dtype)) for x in sizes]


@_forward.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    tensors: list[Tensor],
    bias: Tensor,
    slope: Tensor | None,
    state: list[Tensor],
    spec: str,
    scale: float,
    is_causal: bool,
    window: int,
    layout: list[int],
    unit: bool,
    keep: int,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    like = query.new_empty(*query.shape[:3], 1, dtype=compute_dtype(query.dtype))
    sums = _empty_sums(query, value, tensors, spec) if keep >= 0 else []
    return query.new_empty(*query.shape[:3], value.shape[3]), like, torch.empty_like(like), sums


@torch.library.custom_op("kernelformer::relative_attention_backward", mutates_args=())
def _backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    tensors: list[Tensor],
    bias: Tensor,
    slope: Tensor | None,
    state: list[Tensor],
    out: Tensor,
    units: Tensor,
    inverses: Tensor,
    spec: str,
    scale: float,
    is_causal: bool,
    window: int,
    layout: list[int],
    unit: bool,
    learn: bool,
    learn_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    call = Call(
        query, key, value, key_mask, tensors, bias, slope, spec, scale, is_causal, window, layout, unit, learn_bias
    )
    grads = [torch.zeros(x.shape, dtype=call.dtype, device=x.device) for x in (query, key, value)]
    totals = [torch.zeros_like(x) for x in tensors] if learn else []
    for block in call.blocks(learn):
        Backward(block, grad, out, units, inverses, grads).run(state)
        if learn:
            gather_grads(totals, block.map.tensor_grads(), block.block, block.count, call.heads)
    dq, dk, dv = (x.to(y.dtype) for x, y in zip(grads, (query, key, value), strict=True))
    d_bias = call.bias.grad
    return dq, dk, dv, torch.zeros_like(bias) if d_bias is None else d_bias.view(bias.shape).to(bias.dtype), totals


@_backward.register_fake
def _(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    tensors: list[Tensor],
    bias: Tensor,
    slope: Tensor | None,
    state: list[Tensor],
    out: Tensor,
    units: Tensor,
    inverses: Tensor,
    spec: str,
    scale: float,
    is_causal: bool,
    window: int,
    layout: list[int],
    unit: bool,
    learn: bool,
    learn_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    made = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, key, value, bias)]
    return made[0], made[1], made[2], made[3], [torch.empty_like(x) for x in tensors] if learn else []


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    query, key, value, key_mask, tensors, bias, slope, state, ctx.spec, ctx.scale, *rest = inputs
    ctx.is_causal, ctx.window, ctx.layout, ctx.unit, _ = rest
    out, units, inverses, _ = output
    ctx.set_materialize_grads(False)
    ctx.counts = (len(tensors), len(state))
    ctx.learn = (any(x.requires_grad for x in tensors), bias.requires_grad)
    ctx.save_for_backward(query, key, value, key_mask, bias, slope, out, units, inverses, *tensors, *state)


def _grad(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Any, ...]:
    tensors, states = ctx.counts
    if grad is None:
        return (None,) * 4 + ([None] * tensors, None, None, [None] * states) + (None,) * 7
    query, key, value, key_mask, bias, slope, out, units, inverses, *rest = ctx.saved_tensors
    dq, dk, dv, d_bias, totals = _backward(
        grad,
        query,
        key,
        value,
        key_mask,
        rest[:tensors],
        bias,
        slope,
        rest[tensors:],
        out,
        units,
        inverses,
        ctx.spec,
        ctx.scale,
        ctx.is_causal,
        ctx.window,
        ctx.layout,
        ctx.unit,
        *ctx.learn,
    )
    learned = totals if ctx.learn[0] else [None] * tensors
    return (dq, dk, dv, None, learned, d_bias if ctx.learn[1] else None, None, [None] * states) + (None,) * 7


_forward.register_autograd(_grad, setup_context=_save)


def relative_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor,
    *,
    spec: str,
    tensors: Sequence[Tensor],
    scale: float,
    key_mask: Tensor | None = None,
    is_causal: bool = False,
    window: int | None = None,
    slope: Tensor | None = None,
    layout: Layout | None = None,
    unit: bool = False,
    state: Sequence[Tensor] = (),
    keep: int | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """Attend with a relative bias, by tiles; with a window, the rest by sums.

    Args:
        query: (B, H, L, D).
        key: (B, H, S, D).
        value: (B, H, S, E).
        bias: (H, L + S - 1) over distances j - i, or (H, 2R - 1, 2C - 1) on a grid; -inf = hidden.
        spec: of the map, as `contract.register` names it.
        tensors: of the map, (B or 1, H or 1, ...) in the dtype of the arithmetic.
        scale: the map sees ``sqrt(scale) x``.
        key_mask: (B, S) bool, True = attend.
        is_causal: key j is visible to query i iff j <= i + layout.offset.
        window: the bias is a straight line beyond this distance on each side; None: nothing is known of it. The
            gradient of a tail goes to the entry at the window.
        slope: (H), the fall of that line per token; None: it is level.
        layout: of the tokens; default: a sequence whose queries start with the keys.
        unit: divide queries and keys by their L2 norm first.
        state: sums of earlier keys, all of them beyond the window, as this function returned them.
        keep: also return the sums of all keys but the last ``keep``.

    Returns:
        (B, H, L, E) in the dtype of the query, zero where no key is visible, and the sums (B, H, ...), or [].
    """
    no_tangents(query=query, key=key, value=value, a_parameter_of_the_feature_map=tensors)
    no_tangents(bias=bias, slope=slope, state=state)
    layout = layout or Layout(query.shape[2], key.shape[2])
    place = [layout.L, layout.S, layout.offset, layout.rows, layout.cols, layout.prefix]
    out, _, _, end = _forward(
        query,
        key,
        value,
        key_mask,
        list(tensors),
        bias,
        slope,
        list(state),
        spec,
        scale,
        is_causal,
        NO_WINDOW if window is None else window,
        place,
        unit,
        -1 if keep is None else keep,
    )
    return out, end
