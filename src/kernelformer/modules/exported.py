"""What `torch.export` can trace of a core, and streams with near keys as an exported graph has them.

The state of a graph has one shape from the first token on: a window of keys, whose first places are hidden until there
are tokens for them. It has no length, which would be a number of the graph: the positions of sinks are counted from its
end, so that they fall by 1 with every token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from kernelformer.attention.decomposed import is_exporting
from kernelformer.attention.merge import finish
from kernelformer.attention.near import Sinks
from kernelformer.contract import compute_dtype
from kernelformer.modules.call import Call
from kernelformer.modules.near_stream import Stream, first_tokens

if TYPE_CHECKING:
    from kernelformer.modules.core import AttentionCore
    from kernelformer.modules.near_far import Far, NearFarAttention

NO_SINK_YET = 1 << 40  # position of a sink that a sample does not have; it stays beyond any window's reach


def check_export(core: AttentionCore, call: Call) -> None:
    """Raise a ValueError where `torch.export` traces a call of any length, or a step, that it cannot."""
    if not is_exporting() or not (isinstance(call.query.shape[2], torch.SymInt) or call.state is not None):
        return
    reason = core.export_refusal
    if not reason and call.bias is not None:
        reason = "attends with a relative position bias, whose table is as long as the sequence"
    if reason:
        raise ValueError(
            f"{core.method!r} {reason}: it cannot be exported with a dynamic length. Use a method such as 'favor+' or "
            f"'loglinear' without a bias, or export the graph for one length."
        )


def attend_stream(near: NearFarAttention, call: Call, far: Far | None) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Attend to a whole prompt, and make the state that `step_stream` goes on from; see `NearFarAttention.attend`."""
    if call.state is not None:
        raise ValueError("an exported graph attends to a prompt from its start, or by step to one token after a state.")
    _check_window(near)
    dtype, length, window = compute_dtype(call.query.dtype), call.key.shape[2], near.window
    sinks = first_tokens(near.sinks, call, None)
    out, sums = near.run(call, far, sinks, None, 0)
    mask = call.key.new_ones(call.key.shape[0], length, dtype=torch.bool) if call.key_mask is None else call.key_mask
    hidden = ~mask[:, None, :, None]
    pair = (x.to(dtype).masked_fill(hidden, 0) for x in (call.key, call.value))
    key, value = (F.pad(x, (0, 0, window, 0)).narrow(2, length, window) for x in pair)
    kept = F.pad(mask, (window, 0)).narrow(1, length, window)
    if sinks is not None:
        position = torch.where(sinks.visible, sinks.position - length, NO_SINK_YET)
        sinks = Sinks(sinks.key.to(dtype), sinks.value.to(dtype), position, sinks.visible)
    return out, Stream(sums, (key, value, kept), sinks, 0).tensors()


def step_stream(near: NearFarAttention, call: Call, far: Far | None) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Attend with one token after a state of `attend_stream`; see `NearFarAttention.step`."""
    assert call.state is not None
    _check_window(near)
    before, dtype = Stream.of(call.state, near.sinks > 0), compute_dtype(call.query.dtype)
    query, key, value = (x.to(dtype) for x in (call.query, call.key, call.value))
    mask = before.tokens[2].new_ones(key.shape[0], 1) if call.key_mask is None else call.key_mask
    if call.key_mask is not None:
        key, value = (x.masked_fill(~mask[:, None, :, None], 0) for x in (key, value))
    keys, values = (torch.cat(pair, 2) for pair in zip(before.tokens[:2], (key, value), strict=True))
    marks = torch.cat([before.tokens[2], mask], 1)
    sinks = None if before.sinks is None else _with_new_sink(before.sinks, key, value, mask)
    tokens = (keys[:, :, 1:], values[:, :, 1:], marks[:, 1:])
    stream = Stream(before.sums, tokens, sinks, 0)
    rows = query.reshape(query.shape[0], key.shape[1], -1, query.shape[3])  # (B, G, R, D)
    part, sums = near._near(call, rows, tokens, stream), before.sums
    if far is None:
        out = finish(part)[0]
    else:
        gone = (keys[:, :, :1], values[:, :, :1], near._gone(marks, 1, stream))
        out, sums = near._merged(call, far, rows, gone, part, sums)
    if sinks is not None:
        sinks = sinks._replace(position=sinks.position - 1)
    out = out.reshape(query.shape[0], query.shape[1], 1, value.shape[3])
    return out, Stream(sums, tokens, sinks, 0).tensors()


def _with_new_sink(sinks: Sinks, key: Tensor, value: Tensor, mask: Tensor) -> Sinks:
    """The sinks of a sample with the token at position 0 among them, where one is missing and the token visible."""
    number = torch.arange(sinks.position.shape[1], device=key.device)
    there = (sinks.position < NO_SINK_YET // 2).sum(1, keepdim=True)
    new = (number == there) & mask  # (B, s)
    rows = new[:, None, :, None]
    position = torch.where(new, 0, sinks.position)
    return Sinks(torch.where(rows, key, sinks.key), torch.where(rows, value, sinks.value), position, position)


def _check_window(near: NearFarAttention) -> None:
    if not near.window:
        raise ValueError(
            f"{near.method!r} with sinks={near.sinks} and no window cannot be exported as a stream; give window=1."
        )
