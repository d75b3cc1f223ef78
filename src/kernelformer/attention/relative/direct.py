"""Attention with a relative bias, exact, in tiles: `direct` over all keys, `windowed` with sums for the far ones.

    out_i = sum_j w_ij v_j / sum_j w_ij       w_ij = exp(b_{j-i}) phi(q_i) . phi(k_j)       (NPRF with RPE, Eq. 10)

`direct` costs O(L S (M + E)) and makes tiles only. Where the bias goes on as a straight line beyond a distance w, keys
farther away are summed up: that is `windowed`, O(L (w + M) (M + E)), one pass for the keys on the right, another for
those on the left and the band of tiles between. Positive maps under a level tail have a faster way of their own for it
(`banded`); signed maps, and tails with a slope, go tile by tile.

The backward pass maps everything again. Sums run the same way, over keys for the queries ahead of them and over queries
for the keys ahead of those, so that nothing of the size of the sequence is kept beside a scale and a denominator per
row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kernelformer.attention.blocks import gather_grads
from kernelformer.attention.relative.backward import Backward
from kernelformer.attention.relative.banded import Banded
from kernelformer.attention.relative.banded_backward import BandedBackward
from kernelformer.attention.relative.call import (
    NUM_SETTINGS,
    NUM_TENSORS,
    SETTINGS,
    TENSORS,
    RelativeCall,
    flatten,
    unflatten,
)
from kernelformer.attention.relative.forward import Chunk, RightSums, absorb, end_sums, sees_some, side_by_side
from kernelformer.attention.relative.rescue import rescue
from kernelformer.attention.relative.windows import Block, Scan, TiledCall
from kernelformer.contract import compute_dtype, lookup, no_tangents

OUTPUTS = "Tensor out, Tensor units, Tensor inverses"  # as the operators name what the backward pass needs of them
FORWARD = f"({TENSORS}, {SETTINGS}, SymInt keep) -> (Tensor, Tensor, Tensor, Tensor[])"
# `end` is empty, or the shift of the returned sums and the gradients of the other three; what comes back last are the
# gradients of kv, ks and ns of the state, then of the state on the right.
BACKWARD = (
    f"(Tensor grad, {TENSORS}, {OUTPUTS}, Tensor[] end, {SETTINGS}, SymInt keep, "
    f"bool learn, bool learn_bias, bool learn_state) -> (Tensor, Tensor, Tensor, Tensor, Tensor[], Tensor[])"
)
Gradients = tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor], list[Tensor]]


def _split(arguments: Sequence[Any], *counts: int) -> list[Sequence[Any]]:
    """Arguments in pieces of these lengths."""
    ends = [sum(counts[: i + 1]) for i in range(len(counts))]
    return [arguments[end - count : end] for end, count in zip(ends, counts, strict=True)]


@torch.library.custom_op("kernelformer::relative_attention", mutates_args=(), schema=FORWARD)
def _forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    tensor_arguments, settings, (keep,) = _split(arguments, NUM_TENSORS, NUM_SETTINGS, 1)
    call = TiledCall(RelativeCall.of(tensor_arguments, settings))
    B, H, L, _ = call.query.shape
    out = call.query.new_empty(B, H, L, call.value.shape[3])
    row_scale, inverses = (call.query.new_zeros(B, H, L, 1, dtype=call.dtype) for _ in range(2))
    ends: list[list[Tensor]] = []
    for block in call.blocks():
        if call.is_banded:
            sums = Banded(block).forward(out, inverses, keep)
            ends += [] if sums is None else [sums.state(block)]
            continue
        scan = _forward_block(block, out, row_scale, inverses)
        if keep >= 0:
            ends.append(end_sums(block, scan, keep))
    if keep >= 0 and not ends:  # of no samples
        return out, row_scale, inverses, _empty_sums(call.inputs)
    return out, row_scale, inverses, [torch.cat(x) for x in zip(*ends, strict=True)] if ends else []


def _forward_block(block: Block, out: Tensor, row_scale: Tensor, inverses: Tensor) -> Scan:
    """Write the outputs of some samples; returns the sums of the keys on the left."""
    call = block.call
    rights = None if block.tail(1) is None else RightSums(block)
    scan = Scan.over_state(block, -1)
    for index, span in enumerate(call.bias.queries):
        scans = [] if rights is None else [rights.at(index)]
        tiles = [block.keys(x) for x in call.band(span)]
        if scan.tail is not None:
            absorb(block, scan, scan.to(*call.edges(span, True)))
            scans.append(scan)
        scans = [x for x in scans if x.sums.some]
        chunk = Chunk.of(block, span, [x.shift for x in tiles] + [x.highest(span) for x in scans])
        for x in scans:
            chunk.add_sums(x)
        for group in side_by_side(tiles, span[1] - span[0], call):
            chunk.add_tiles(group)
        y, inverse, lost = chunk.finish()
        if bool(lost.any()):
            lost &= sees_some(block, tiles, scans, span)
        if bool(lost.any()):
            rescue(block, span, lost.squeeze(2), y, inverse)
        block.put(out, y, span)
        block.write_rows(row_scale, chunk.row_scale, span)
        block.write_rows(inverses, inverse, span)
    return scan


def _empty_sums(call: RelativeCall) -> list[Tensor]:
    """Room for the sums (B, H, ...) of a call: shift, kv, ks and ns."""
    query, spec = call.query, lookup(call.spec)
    features, width = spec.feature_dim(call.tensors, query.shape[3]), call.value.shape[3]
    sizes = ((1, features if spec.family == "positive" else 1), (features, width), (features, 1), (1, 1))
    return [query.new_empty(*query.shape[:2], *x, dtype=compute_dtype(query.dtype)) for x in sizes]


@_forward.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    tensor_arguments, settings, (keep,) = _split(arguments, NUM_TENSORS, NUM_SETTINGS, 1)
    call = RelativeCall.of(tensor_arguments, settings)
    query = call.query
    like = query.new_empty(*query.shape[:3], 1, dtype=compute_dtype(query.dtype))
    sums = _empty_sums(call) if keep >= 0 else []
    return query.new_empty(*query.shape[:3], call.value.shape[3]), like, torch.empty_like(like), sums


@torch.library.custom_op("kernelformer::relative_attention_backward", mutates_args=(), schema=BACKWARD)
def _backward(*arguments: Any) -> Gradients:
    (grad,), tensor_arguments, outputs, (end,), settings, (keep, learn, *learns) = _split(
        arguments, 1, NUM_TENSORS, 3, 1, NUM_SETTINGS, 4
    )
    call = TiledCall(RelativeCall.of(tensor_arguments, settings), *learns)
    inputs = (call.query, call.key, call.value)
    grads = [torch.zeros(x.shape, dtype=call.dtype, device=x.device) for x in inputs]
    totals = [torch.zeros_like(x) for x in call.tensors] if learn else []
    for block in call.blocks(learn):
        if call.is_banded:
            BandedBackward(block, grad, outputs[0], outputs[2], grads).run()
        else:
            Backward(block, grad, outputs, grads).run()
        if end:
            Backward(block, grad, outputs, grads).through_end(end, keep)
        if learn:
            gather_grads(totals, block.map.tensor_grads(), block.block, block.count, call.heads)
    dq, dk, dv = (x.to(y.dtype) for x, y in zip(grads, inputs, strict=True))
    bias, d_bias = call.inputs.bias, call.bias.grad
    d_bias = torch.zeros_like(bias) if d_bias is None else d_bias.view(bias.shape).to(bias.dtype)
    return dq, dk, dv, d_bias, totals, [*call.state_grads[-1], *call.state_grads[1]]


@_backward.register_fake
def _(*arguments: Any) -> Gradients:
    _, (query, key, value, _, tensors, bias, _, *states), *_, (_, learn, _, learn_state) = _split(
        arguments, 1, NUM_TENSORS, 3, 1, NUM_SETTINGS, 4
    )
    made = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, key, value, bias)]
    sums = [x for state in states for x in state[1:]] if learn_state else []
    d_sums = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in sums]
    return made[0], made[1], made[2], made[3], [torch.empty_like(x) for x in tensors] if learn else [], d_sums


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    tensor_arguments, ctx.attention_settings, (ctx.keep,) = _split(inputs, NUM_TENSORS, NUM_SETTINGS, 1)
    call = RelativeCall.of(tensor_arguments, ctx.attention_settings)
    ctx.set_materialize_grads(False)
    learns_state = any(x.requires_grad for x in (*call.state, *call.right_state))
    ctx.learn = (any(x.requires_grad for x in call.tensors), call.bias.requires_grad, learns_state)
    flat, ctx.lengths = flatten([*tensor_arguments, *output])
    ctx.save_for_backward(*flat)


def _grad(ctx: Any, grad: Tensor | None, _: Any, __: Any, d_end: Sequence[Tensor | None]) -> tuple[Any, ...]:
    *arguments, out, row_scale, inverses, end = unflatten(ctx.saved_tensors, ctx.lengths)
    grads: list[Any] = [[None] * len(x) if isinstance(x, list) else None for x in arguments]
    asked = [*d_end[1:]]  # not of the shift, which is a gauge
    if grad is not None or any(x is not None for x in asked):
        grad = torch.zeros_like(out) if grad is None else grad
        sums = [torch.zeros_like(y) if x is None else x for x, y in zip(asked, end[1:], strict=True)]
        given = [end[0], *sums] if any(x is not None for x in asked) else []
        *inputs, d_bias, totals, d_state = _backward(
            grad, *arguments, out, row_scale, inverses, given, *ctx.attention_settings, ctx.keep, *ctx.learn
        )
        grads[:3] = inputs
        if ctx.learn[0]:
            grads[4] = totals
        if ctx.learn[1]:
            grads[5] = d_bias
        if ctx.learn[2]:
            count = len(arguments[7][1:])
            grads[7:9] = ([None, *x] if x else [] for x in (d_state[:count], d_state[count:]))
    return (*grads, *[None] * (NUM_SETTINGS + 1))


_forward.register_autograd(_grad, setup_context=_save)


def relative_attention(call: RelativeCall, *, keep: int | None = None) -> tuple[Tensor, list[Tensor]]:
    """Attend with a relative bias, by tiles; with a window, the rest by sums.

    Args:
        call: the inputs.
        keep: also return the sums of the state and of all keys but the last ``keep``.

    Returns:
        (B, H, L, E) in the dtype of the query, zero where no key is visible, and the sums (B, H, ...), or []: the state
        of a call whose first query comes right after the last key.
    """
    if call.right_state and call.is_causal:
        raise ValueError("right_state holds keys that a causal call does not see; leave it out, or is_causal=False.")
    if (call.state or call.right_state) and call.window is None:
        raise ValueError("sums of keys have the bias beyond a window, got window=None; give window=, or all keys.")
    no_tangents(query=call.query, key=call.key, value=call.value, a_parameter_of_the_feature_map=call.tensors)
    no_tangents(bias=call.bias, slope=call.slope, state=call.state, right_state=call.right_state)
    out, _, _, end = _forward(*call.tensor_arguments, *call.settings, -1 if keep is None else keep)
    return out, end
