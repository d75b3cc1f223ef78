"""Attention with a relative bias: by strips where a positive map has a level bias beyond a window, by pairs elsewhere.

The second is one operator for compiled graphs, which see no loop over segments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from kernelformer.attention.near_far import near_far_attention
from kernelformer.attention.near_far_call import NearFarCall
from kernelformer.attention.operator import plain_grads
from kernelformer.attention.plain.layout import autograd_inside
from kernelformer.attention.plain.pairs import pairs_attention
from kernelformer.attention.relative.call import (
    NUM_SETTINGS,
    NUM_TENSORS,
    SETTINGS,
    TENSORS,
    RelativeCall,
    state_of_sums,
    sums_of_state,
)
from kernelformer.contract import PositiveSpec, compute_dtype, lookup, no_tangents, transforms_active

OUTPUTS = "Tensor out, Tensor units, Tensor inverses"  # as the operators name what the backward pass needs of them
FORWARD = f"({TENSORS}, {SETTINGS}, SymInt keep) -> (Tensor, Tensor, Tensor, Tensor[])"
# `end` is empty, or the shift of the returned sums and the gradients of the other three; what comes back last are the
# gradients of kv, ks and ns of the state, then of the state on the right. `units` and `inverses` are of no use.
BACKWARD = (
    f"(Tensor grad, {TENSORS}, {OUTPUTS}, Tensor[] end, {SETTINGS}, SymInt keep, "
    f"bool learn, bool learn_bias, bool learn_state) -> (Tensor, Tensor, Tensor, Tensor, Tensor[], Tensor[])"
)
Gradients = tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor], list[Tensor]]


def is_level(call: RelativeCall, keep: int | None) -> bool:
    """True if strips serve a call: a positive map, and a bias that is constant beyond a window."""
    layout, window = call.layout, call.window
    if window is None or call.slope is not None or not isinstance(lookup(call.spec), PositiveSpec):
        return False
    streams = call.is_causal and keep == window > 0 and layout.offset + layout.L == layout.S
    return min(layout.L, layout.S) > 0 and (keep is None or streams)


def _by_strips(call: RelativeCall, streams: bool) -> tuple[Tensor, list[Tensor]]:
    """The call as one of near/far attention without near keys."""
    assert call.window is not None
    (query, key), last = call.normalized(), call.bias.shape[1] - 1
    reach = max(1, min(call.window, last + 1))
    entries = torch.arange(-reach, reach + 1, device=query.device) + (call.layout.L - 1 + call.layout.offset)
    table = call.bias[:, entries.clamp_(0, last)].to(compute_dtype(call.query.dtype))
    states = [state_of_sums(x) if x else [] for x in (call.state, call.right_state)]
    out, end = near_far_attention(
        NearFarCall(
            query=query,
            key=key,
            value=call.value,
            key_mask=call.key_mask,
            far_mask=call.key_mask,
            sinks=[],
            bias=[table[:, 1:-1], table[:, :: 2 * reach].T],
            seed=None,
            tensors=call.tensors,
            beta=None,
            state=states[0],
            right_state=states[1],
            spec=call.spec,
            scale=1.0,
            far_scale=call.scale,
            is_causal=call.is_causal,
            window=0,
            offset=call.layout.offset,
            dropout=0.0,
            own_sinks=False,
        )
    )
    return out.to(call.query.dtype), sums_of_state(end, True) if streams else []


def _split(arguments: Sequence[Any], *counts: int) -> list[Sequence[Any]]:
    """Arguments in pieces of these lengths."""
    ends = [sum(counts[: i + 1]) for i in range(len(counts))]
    return [arguments[end - count : end] for end, count in zip(ends, counts, strict=True)]


def _leaves(call: RelativeCall) -> tuple[RelativeCall, list[Tensor]]:
    """The call with tensors of its own that autograd follows: inputs, bias, the map's tensors and the states' sums."""

    def leaf(x: Tensor) -> Tensor:
        return x.detach().requires_grad_()

    state, right = ([x if i == 0 else leaf(x) for i, x in enumerate(y)] for y in (call.state, call.right_state))
    query, key, value, bias = (leaf(x) for x in (call.query, call.key, call.value, call.bias))
    tensors = [leaf(x) for x in call.tensors]
    own = replace(call, query=query, key=key, value=value, bias=bias, tensors=tensors, state=state, right_state=right)
    return own, [query, key, value, bias, *tensors, *state[1:], *right[1:]]


@torch.library.custom_op("kernelformer::relative_attention", mutates_args=(), schema=FORWARD)
def _forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    tensor_arguments, settings, (keep,) = _split(arguments, NUM_TENSORS, NUM_SETTINGS, 1)
    call = RelativeCall.of(tensor_arguments, settings)
    nothing = call.query.new_empty(0, dtype=compute_dtype(call.query.dtype))
    out, end = pairs_attention(call, keep=None if keep < 0 else keep)
    return out, nothing, nothing.clone(), [x.clone() for x in end]


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
    nothing = query.new_empty(0, dtype=compute_dtype(query.dtype))
    sums = _empty_sums(call) if keep >= 0 else []
    return query.new_empty(*query.shape[:3], call.value.shape[3]), nothing, torch.empty_like(nothing), sums


@torch.library.custom_op("kernelformer::relative_attention_backward", mutates_args=(), schema=BACKWARD)
def _backward(*arguments: Any) -> Gradients:
    (grad,), tensor_arguments, _, (end,), settings, (keep, learn, _, learn_state) = _split(
        arguments, 1, NUM_TENSORS, 3, 1, NUM_SETTINGS, 4
    )
    call = RelativeCall.of(tensor_arguments, settings)
    found = _recomputed_grads(call, grad, end, keep)
    count = 4 + len(call.tensors)
    dq, dk, dv, d_bias = found[:4]
    return dq, dk, dv, d_bias, found[4:count] if learn else [], found[count:] if learn_state else []


def _shifted(sums: Sequence[Tensor], shift: Tensor) -> list[Tensor]:
    """kv, ks and ns as they are at another shift, which is a gauge; those of positive maps have no ns."""
    gain = (sums[0] - shift.detach()).exp().mT
    return [sums[1] * gain, sums[2] * gain, sums[3] * gain if gain.shape[2] == 1 else sums[3]]


def _outputs(call: RelativeCall, end: Sequence[Tensor], keep: int) -> list[Tensor]:
    """The outputs that have gradients, by plain operations; the sums at the shift ``end[0]``, if there is one."""
    out, sums = pairs_attention(call, keep=keep if end else None)
    return [out, *(_shifted(sums, end[0]) if end else [])]


def _recomputed_grads(call: RelativeCall, grad: Tensor, end: Sequence[Tensor], keep: int) -> list[Tensor]:
    """Gradients of all `_leaves`; ``end`` is the shift of the returned sums and the gradients of the others, or ()."""
    with autograd_inside():
        own, leaves = _leaves(call)
        pairs = [(x, g) for x, g in zip(_outputs(own, end, keep), [grad, *end[1:]], strict=True) if x.requires_grad]
        if not pairs:
            return [torch.zeros_like(x) for x in leaves]
        found = torch.autograd.grad([x for x, _ in pairs], leaves, [g for _, g in pairs], allow_unused=True)
    # An operator may not return one tensor twice, nor its input.
    return [torch.zeros_like(x) if g is None else g.clone() for x, g in zip(leaves, found, strict=True)]


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
    flat, ctx.structure = tree_flatten([*tensor_arguments, *output])
    ctx.save_for_backward(*flat)


def _grad(ctx: Any, grad: Tensor | None, _: Any, __: Any, d_end: Sequence[Tensor | None]) -> tuple[Any, ...]:
    *arguments, out, row_scale, inverses, end = tree_unflatten(ctx.saved_tensors, ctx.structure)
    grads: list[Any] = [[None] * len(x) if isinstance(x, list) else None for x in arguments]
    asked = [*d_end[1:]]  # not of the shift, which is a gauge
    if grad is not None or any(x is not None for x in asked):
        grad = torch.zeros_like(out) if grad is None else grad
        sums = [torch.zeros_like(y) if x is None else x for x, y in zip(asked, end[1:], strict=True)]
        given = [end[0], *sums] if any(x is not None for x in asked) else []
        if torch.is_grad_enabled():  # create_graph=True: by pairs, whose gradients have gradients

            def plain(arguments: Sequence[Any]) -> list[Tensor]:
                return _outputs(RelativeCall.of(arguments, ctx.attention_settings), given, ctx.keep)

            found = plain_grads(plain, {"arguments": arguments}, [grad, *given[1:]])
            if found is not None:
                return (*found["arguments"], *[None] * (NUM_SETTINGS + 1))
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
    """Attend with a relative bias, pair by pair; with a window, what lies beyond it by sums.

    Returns:
        (B, H, L, E) in the dtype of the query, zero where no key is visible, and with ``keep`` the sums (B, H, ...) of
        the state and of all keys but the last ``keep``: the state of a call that comes right after the last key.
    """
    if call.right_state and call.is_causal:
        raise ValueError("right_state holds keys that a causal call does not see; leave it out, or is_causal=False.")
    if (call.state or call.right_state) and call.window is None:
        raise ValueError("sums of keys have the bias beyond a window, got window=None; give window=, or all keys.")
    level = is_level(call, keep)
    if transforms_active() or not (torch.compiler.is_compiling() or level):
        return pairs_attention(call, keep=keep)
    tensors = {"query": call.query, "key": call.key, "value": call.value, "bias": call.bias, "slope": call.slope}
    no_tangents(**tensors, a_parameter_of_the_feature_map=call.tensors, state=call.state, right_state=call.right_state)
    if level:
        return _by_strips(call, keep is not None)
    out, _, _, end = _forward(*call.tensor_arguments, *call.settings, -1 if keep is None else keep)
    return out, end
