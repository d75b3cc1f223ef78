"""What a stream with near keys keeps, and the sinks that it begins with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kernelformer.attention import State
from kernelformer.attention.decomposed import is_exporting
from kernelformer.attention.near import Sinks
from kernelformer.attention.near_keys import NearKeys, Tokens
from kernelformer.modules.call import Call
from kernelformer.modules.checks import can_look

NO_SINK = -1  # position of a sink that a sample does not have yet


@dataclass(frozen=True)
class Stream:
    """What a stream keeps.

    Args:
        sums: of the far keys, (B, G, ...) each; nothing where there is no far part.
        tokens: the last keys (B, G, n, D), values (B, G, n, E) and their mask (B, n), at most a window of them.
        sinks: their positions are counted from the start of the stream; None where there are none.
        length: tokens so far.
    """

    sums: Sequence[Tensor]
    tokens: Tokens
    sinks: Sinks | None
    length: int

    @staticmethod
    def of(state: State, has_sinks: bool) -> Stream:
        """What a state holds."""
        tensors = list(state.tensors)
        sinks = None
        if has_sinks:
            *tensors, key, value, position = tensors
            sinks = Sinks(key, value, position, position)  # visible where the position is not negative
        *sums, key, value, mask = tensors
        return Stream(sums, (key, value, mask), sinks, state.length)

    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors of a state."""
        return (*self.sums, *self.tokens, *(() if self.sinks is None else self.sinks[:3]))

    def has_sinks(self, buffers: object | None) -> bool:
        """Whether every sample has all of its sinks; streams in buffers have."""
        return self.sinks is None or isinstance(buffers, Buffers) or bool((self.sinks.position >= 0).all())


@dataclass(frozen=True)
class Buffers:
    """The buffers that the last tokens of a stream lie in, and what is known of the tokens without looking.

    Args:
        keys: the buffers.
        visible: no token was ever hidden since the buffers were made, nor one that they began with.
        last_sink: the largest position of a sink.
    """

    keys: NearKeys
    visible: bool
    last_sink: int


def first_tokens(count: int, call: Call, before: Sinks | None, offset: int = 0, past: int = 0) -> Sinks | None:
    """The first visible tokens of each sample: those that a stream has, then new ones, by position in the call.

    Args:
        count: of sinks.
        call: whose keys, ``offset`` of which are a stream's last ones.
        before: the sinks of the stream, or None.
        offset: keys of the call that are not new.
        past: tokens of the stream before the call.
    """
    if not count:
        return None
    key, value, mask = call.key, call.value, call.key_mask
    if not call.in_stream:
        key, value = key.detach(), value.detach()  # see `NearFarCall.own_sinks`
    batch, length = key.shape[0], key.shape[2]
    if before is not None:
        before = before._replace(position=before.position - (past - offset))
        if can_look(key) and bool(before.visible.all()):
            return before
    if before is None and mask is None and not is_exporting() and count <= length:  # a graph is of any length
        position = torch.arange(count, device=key.device).expand(batch, -1)
        first = [x[:, :, :count] for x in (key, value)]
        if call.in_stream:  # views would keep all of a prompt
            first = [x.clone() for x in first]
        return Sinks(first[0], first[1], position, torch.ones_like(position, dtype=torch.bool))
    number = torch.arange(1, count + 1, device=key.device).expand(batch, -1)
    made = number.new_zeros(batch, 1) if before is None else before.visible.sum(1, keepdim=True)
    new = key.new_ones(batch, length - offset, dtype=torch.bool) if mask is None else mask[:, offset:]
    if is_exporting():  # what a search gives, by operations that ONNX has
        position = (new.cumsum(1).unsqueeze(1) < (number - made).unsqueeze(2)).sum(2) + offset
    else:
        position = torch.searchsorted(new.cumsum(1).contiguous(), (number - made).contiguous()) + offset
    visible = (position < length) & (number > made)
    index = position.clamp(0, max(0, length - 1))[:, None, :, None].expand(-1, key.shape[1], -1, -1)
    picked = []
    for x in (key, value):
        if length == 0:
            picked.append(x.new_zeros(batch, x.shape[1], count, x.shape[3]))
            continue
        rows = x.gather(2, index.expand(-1, -1, -1, x.shape[3]))
        picked.append(rows.masked_fill(~visible[:, None, :, None], 0))
    sinks = Sinks(picked[0], picked[1], position, visible)
    if before is None:
        return sinks
    old = before.visible
    rows_old = old[:, None, :, None]
    return Sinks(
        torch.where(rows_old, before.key.to(key.dtype), sinks.key),
        torch.where(rows_old, before.value.to(value.dtype), sinks.value),
        torch.where(old, before.position, position),
        old | visible,
    )


def without_sinks(sinks: Sinks, key: Tensor, mask: Tensor | None) -> Tensor:
    """Which keys (B, S) are visible and no sinks."""
    batch, length = key.shape[0], key.shape[2]
    whole = key.new_ones(batch, length, dtype=torch.bool) if mask is None else mask
    inside = sinks.visible & (sinks.position >= 0) & (sinks.position < length)
    index = torch.where(inside, sinks.position, length)  # one more column takes what is elsewhere
    return F.pad(whole, (0, 1)).scatter(1, index, False)[:, :length]
