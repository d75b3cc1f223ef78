"""Near exactly, far by a kernel, in one normalization, at linear cost.

    out_i = ( sum_near e^(s_ij) v_j + e^(beta + tail) sum_far phi(q_i) . phi(k_j) v_j ) / ( the same sums with v = 1 )

The near part is exact softmax on the keys of a window and on the sinks, the far part linear attention to all other
keys; never to all keys minus the near ones, which would cancel. `strips` has the arithmetic for positive maps, and for
no map. The backward pass keeps the inputs, the output, the log of what each row was divided by, a number per row, and
the sums of the far keys once per group of blocks. It works from the output: with the share of a pair in all of its
row, every part has the gradient of a softmax.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernelformer.attention.near_far_call import SETTINGS, TENSORS, NearFarCall
from kernelformer.attention.operator import Operator
from kernelformer.attention.plain.near_far import plain_near_far_attention, plain_outputs
from kernelformer.attention.plain.pairs import pairs_attention
from kernelformer.attention.relative.call import Layout, RelativeCall, state_of_sums, sums_of_state
from kernelformer.attention.strips import Grads, Pass, Results, Strips
from kernelformer.contract import compute_dtype

NUM_RESULTS = len(Results._fields)


def _forward(*arguments: Any) -> tuple[Any, ...]:
    *inputs, keep = arguments
    call = NearFarCall.of(inputs)
    results = Results.empty(call, keep)
    if len(call.bias) > 2:  # a slope, in graphs of earlier versions
        out, end = plain_near_far_attention(call, streams=call.is_causal)
        return tuple(results._replace(out=out, end_state=end))
    st = Strips(call)
    for block in st.sample_blocks():
        Pass(st, block).forward(results)
    return tuple(results)


def _fake(*arguments: Any) -> tuple[Any, ...]:
    *inputs, keep = arguments
    return tuple(Results.empty(NearFarCall.of(inputs), keep))


def _backward(*arguments: Any) -> tuple[Any, ...]:
    (grad, state_grads), rest, learn = arguments[:2], arguments[2:-2], arguments[-1]
    call = NearFarCall.of(rest[NUM_RESULTS:])
    if len(call.bias) > 2:
        raise ValueError(
            "a graph of an earlier version with a relative bias that falls has no gradient; export the model again."
        )
    st, found = Strips(call, learn), Grads(call, learn)
    for block in st.sample_blocks():
        Pass(st, block).backward(Results(*rest[:NUM_RESULTS]), found, grad, state_grads)
    return found.results()


def _fake_backward(*arguments: Any) -> tuple[Any, ...]:
    call, learn = NearFarCall.of(arguments[2 + NUM_RESULTS : -2]), arguments[-1]
    dtype = compute_dtype(call.query.dtype)
    made = [torch.empty_like(x) for x in (call.query, call.key, call.value)]
    return (
        made[0],
        made[1],
        made[2],
        [torch.empty_like(x) for x in call.sinks[:2]],
        [torch.empty_like(x, dtype=dtype) for x in call.bias[:2]],
        [torch.empty_like(x) for x in call.tensors] if learn else [],
        call.query.new_empty(call.query.shape[1], dtype=dtype),
        [torch.empty_like(x) for x in call.state],
        [torch.empty_like(x) for x in call.right_state],
    )


def _plain(keep: bool, **inputs: Any) -> tuple[Tensor, list[Tensor]] | None:
    call = NearFarCall(**inputs)
    if not call.is_level:
        return plain_outputs(keep, **inputs)
    s, reach, (band, (left, right)) = call.shapes, call.reach, call.bias
    distance = torch.arange(1 - s.L, s.S, device=call.query.device) - call.offset
    table = torch.cat([left.unsqueeze(1), band, right.unsqueeze(1)], 1)
    out, end = pairs_attention(
        RelativeCall(
            query=call.query,
            key=call.key,
            value=call.value,
            bias=table[:, distance.add_(reach).clamp_(0, 2 * reach)],
            spec=call.spec,
            tensors=call.tensors,
            scale=call.far_scale,
            layout=Layout(s.L, s.S, call.offset),
            key_mask=call.key_mask,
            is_causal=call.is_causal,
            window=reach,
            state=sums_of_state(call.state, True) if call.state else (),
            right_state=sums_of_state(call.right_state, True) if call.right_state else (),
        ),
        keep=max(0, s.S - call.offset - s.L + reach) if call.is_causal else None,
    )
    return out, state_of_sums(end) if end else []


OPERATOR = Operator(
    "near_far_attention",
    inputs=f"{TENSORS}, {SETTINGS}, bool keep",
    outputs="Tensor out, Tensor total, Tensor guarded, Tensor[] row_scales, Tensor[] end_state, Tensor[] kept",
    forward=_forward,
    fake=_fake,
    backward=_backward,
    learned="query, key, value, sinks, bias, tensors, beta, state, right_state",
    given="out, end_state",
    fake_backward=_fake_backward,
    plain=_plain,
)


def near_far_attention(call: NearFarCall) -> tuple[Tensor, list[Tensor]]:
    """Attend to near keys exactly and to far ones through a feature map.

    Args:
        call: the inputs.

    Returns:
        (B, H, L, E) in the dtype of the query, zero where no key is visible, and the sums of the far keys after a
        causal call, (B, G, ...) each.

    Cost: O(L (w + C) (D + E) + L M (D + E)) time for chunks of C queries; memory beyond inputs and outputs is a few
    buffers and a number per row.
    """
    arguments = call.tensor_arguments
    keep = torch.is_grad_enabled() and any(
        x.requires_grad for y in arguments if y is not None for x in (y if isinstance(y, list) else [y])
    )
    out, _, _, _, end, _ = OPERATOR.forward(*arguments, *call.settings, keep)
    return out, end
