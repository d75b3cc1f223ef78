"""Near keys exactly and far keys through a feature map, all at once or as a stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from kernelformer.attention import State
from kernelformer.attention.dispatch import attend_near_far, is_exporting
from kernelformer.attention.engine import Part
from kernelformer.attention.near import NearKeys, Sinks, Tokens, join
from kernelformer.attention.near_far_call import NearFarCall, finish, merge
from kernelformer.attention.positive import EMPTY
from kernelformer.attention.state import MadeBy
from kernelformer.attention.step import far_logits, far_step
from kernelformer.contract import PositiveSpec, compute_dtype, lookup
from kernelformer.modules.bias import check_tail
from kernelformer.modules.checks import Bias, Call, can_read, readable_without_sync

if TYPE_CHECKING:
    from kernelformer.modules.core import AttentionCore

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
        if readable_without_sync(key) and bool(before.visible.all()):
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


@dataclass(frozen=True)
class Far:
    """The far part of a call: a feature map and a factor for each head.

    Args:
        spec: of the map, as `contract.intern_formula` names it.
        tensors: of the map, as prepared for the call.
        beta: (H), the logarithm of the factor; None means 0.
    """

    spec: str
    tensors: Sequence[Tensor]
    beta: Tensor | None

    @property
    def is_positive(self) -> bool:
        """Whether its features are positive."""
        return isinstance(lookup(self.spec), PositiveSpec)


class NearFarAttention:
    """The part of a core that attends to near keys exactly, and to far ones by a kernel if it has one.

        near(i) = { j visible to i : |i - j| < window, or j among the first visible tokens, the sinks }
        out_i = ( sum_near e^(s_ij) v_j + e^beta sum_far phi(q_i) . phi(k_j) v_j ) / ( the same sums with v = 1 )

    with ``s_ij = scale q_i . k_j + b_(j-i)``. A bias must be constant, or a straight line, beyond a distance of at most
    the window.

    Args:
        method: for messages.
        window: tokens on each side, one's own included, that are attended to exactly; 0: none.
        sinks: number of first visible tokens that are attended to exactly.
        scale: of q . k; None: that of the call.
        dropout: share of the near weights that is dropped.
    """

    def __init__(self, method: str, *, window: int, sinks: int, scale: float | None, dropout: float = 0.0) -> None:
        self.method, self.window, self.sinks, self.scale, self.dropout = method, window, sinks, scale, dropout

    def scale_of(self, scale: float) -> float:
        """The scale of the near scores in a call of this scale."""
        return scale if self.scale is None else self.scale

    def not_plain(self) -> str | None:
        """What the algorithm for accelerators does not cover; None where it covers all."""
        return f"attention_dropout={self.dropout:g}" if self.dropout else None

    def attend(self, call: Call, far: Far | None, *, plain: bool = False) -> tuple[Tensor, tuple[Tensor, ...] | None]:
        """Attend to all keys of a call, and in a stream to those before them.

        Args:
            call: keys and values have as many heads as the far part's sums.
            far: or None.
            plain: by the algorithm for accelerators.

        Returns:
            (B, H, L, E), and in a stream the tensors of the state after the keys.
        """
        if not call.in_stream:
            sinks = None
            # Else sinks are the first keys, and where they are needs no tensor.
            if not plain or call.key_mask is not None or call.bias is not None:
                sinks = first_tokens(self.sinks, call, None)
            out, _ = self.run(call, far, sinks, None, 0, plain=plain)
            return out, None
        if is_exporting():
            return attend_stream(self, call, far)
        dtype = compute_dtype(call.query.dtype)
        key, value, mask = call.key.to(dtype), call.value.to(dtype), call.key_mask
        sums: Sequence[Tensor] = ()
        before = Stream.of(call.state, self.sinks > 0) if call.state is not None else None
        if before is not None and before.sinks is not None:
            known = before.sinks
            before = replace(before, sinks=known._replace(visible=known.position >= 0))
        offset, past = 0, 0
        if before is not None:
            offset, past, sums = before.tokens[0].shape[2], before.length, before.sums
            new = before.tokens[2].new_ones(key.shape[0], key.shape[2]) if mask is None else mask
            key, value, mask = (
                torch.cat(pair, axis) for *pair, axis in zip(before.tokens, (key, value, new), (2, 2, 1), strict=True)
            )
        call = replace(call, query=call.query.to(dtype), key=key, value=value, key_mask=mask)
        sinks = first_tokens(self.sinks, call, None if before is None else before.sinks, offset, past)
        out, after = self.run(call, far, sinks, [x.to(dtype) for x in sums], offset, plain=plain)
        first = max(0, key.shape[2] - self.window)
        kept = key.new_ones(key.shape[0], key.shape[2], dtype=torch.bool) if mask is None else mask
        tokens = [key[:, :, first:], value[:, :, first:], kept[:, first:]]
        if mask is not None:  # what is hidden may hold anything
            tokens[:2] = (x.masked_fill(~tokens[2][:, None, :, None], 0) for x in tokens[:2])
        length = past + call.query.shape[2]
        if sinks is not None:
            position = (sinks.position + past - offset).masked_fill(~sinks.visible, NO_SINK)
            sinks = sinks._replace(position=position)
        keep = (tokens[0].clone(), tokens[1].clone(), tokens[2].clone())  # views would keep all of a prompt
        return out, Stream(after, keep, sinks, length).tensors()

    def run(
        self,
        call: Call,
        far: Far | None,
        sinks: Sinks | None,
        sums: Sequence[Tensor] | None,
        offset: int,
        later: Sequence[Tensor] = (),
        plain: bool = False,
    ) -> tuple[Tensor, list[Tensor]]:
        """Attend to the keys of a call, of which ``offset`` are before the first query.

        Args:
            call: with keys and values for each head of the sums.
            far: or None.
            sinks: at positions among the keys of the call, or before them.
            sums: of far keys before those of the call.
            offset: number of keys before the first query.
            later: sums of far keys after those of the call.
            plain: by the algorithm for accelerators.
        """
        leading = 0
        if plain and call.key_mask is None and not offset and call.state is None:
            leading = min(self.sinks, call.key.shape[2])
        far_mask = call.key_mask
        if sinks is not None and not leading:
            far_mask = without_sinks(sinks, call.key, call.key_mask)
        return attend_near_far(
            NearFarCall(
                query=call.query,
                key=call.key,
                value=call.value,
                key_mask=call.key_mask,
                far_mask=far_mask,
                sinks=sinks or (),
                bias=() if call.bias is None else self._bias(call.bias, call.is_causal),
                seed=torch.randint(1 << 62, ()) if self.dropout else None,
                tensors=() if far is None else far.tensors,
                beta=None if far is None else far.beta,
                state=sums or (),
                right_state=later,
                spec="" if far is None else far.spec,
                scale=self.scale_of(call.scale),
                far_scale=call.scale,
                is_causal=call.is_causal,
                window=self.window,
                offset=offset,
                dropout=self.dropout,
                own_sinks=sinks is not None and sums is None and call.key.shape[2] > 0,
            ),
            plain=plain,
            leading=leading,
            streams=call.in_stream,
        )

    def check_bias(self, bias: Bias, is_causal: bool) -> None:
        """Check that a bias can go with the window."""
        if bias.layout.rows:
            raise ValueError(
                f"a window counts positions along the sequence, got a bias on a grid for {self.method!r} with "
                f"window={self.window}; leave the window out, or give relative='1d'."
            )
        if bias.window is None:
            raise ValueError(
                f"{self.method!r} with window={self.window} has one factor for all far keys: the bias must be constant "
                f"(max_distance=...) or fall by a slope beyond the window, and nothing is known of it; give "
                f"max_distance={self.window} or less."
            )
        if bias.window > self.window and bias.slope is not None:
            check_tail(bias.table, bias.layout.L - 1 + bias.layout.offset, self.window, bias.slope, is_causal)
        elif bias.window > self.window:
            raise ValueError(
                f"the bias must be constant beyond the window, got max_distance={bias.window} and "
                f"window={self.window}; make the window at least {bias.window}, or max_distance at most {self.window}."
            )

    def _bias(self, bias: Bias, is_causal: bool = True) -> tuple[Tensor, ...]:
        """What `near.NearBias` holds: the bias within the window, at the window, and the slope."""
        self.check_bias(bias, is_causal)
        distances = torch.arange(min(0, 1 - self.window), self.window, device=bias.table.device)
        # A key's own distance belongs to the left: without a window, the right begins at 1.
        # Both by a range: a list of numbers would have to be copied to the device.
        last = max(self.window, 1)
        ends = torch.arange(-self.window, last + 1, self.window + last, device=bias.table.device)
        tails = self._at(bias, ends).T
        near = self._at(bias, distances) if self.window else bias.table[:, :0]
        return (near, tails) if bias.slope is None else (near, tails, bias.slope)

    @staticmethod
    def _at(bias: Bias, distance: Tensor) -> Tensor:
        """The bias (H, n) at distances (n); what lies beyond its window is the entry at the window, or a line."""
        assert bias.window is not None
        middle = bias.layout.L - 1 + bias.layout.offset
        index = (middle + distance.clamp(-bias.window, bias.window)).clamp(0, max(0, bias.table.shape[1] - 1))
        if bias.table.shape[1] == 0:  # of no queries
            return bias.table.new_zeros(bias.table.shape[0], len(distance))
        entries = bias.table[:, index]
        if bias.slope is None:
            return entries
        beyond = (distance.abs() - bias.window).clamp_min(0).to(entries.dtype)
        return entries - bias.slope.to(entries.dtype).unsqueeze(1) * beyond

    def step(self, call: Call, far: Far | None) -> tuple[Tensor, tuple[Tensor, ...], Buffers | None]:
        """Attend with one token; also returns the buffers that the last keys lie in.

        In a few whole operations where nothing is differentiated, else as any other call.
        """
        if is_exporting() and call.state is not None:
            return *step_stream(self, call, far), None
        state, buffers = call.state, None if call.state is None else call.state.near
        is_plain = can_read(call.query) and not torch.is_grad_enabled() and not self.dropout
        before = None if state is None else Stream.of(state, self.sinks > 0)
        if before is None or not is_plain or not self.window or not before.has_sinks(buffers):
            out, after = self.attend(call, far)
            assert after is not None
            return out, after, None
        dtype = compute_dtype(call.query.dtype)
        query, key, value = call.query, call.key, call.value
        if query.dtype != dtype:
            query, key, value = (x.to(dtype) for x in (query, key, value))
        mask = call.key_mask
        if mask is None:
            known = isinstance(buffers, Buffers) and buffers.visible and before.tokens[2].shape[1] > 0
            mask = before.tokens[2][:, -1:] if known else before.tokens[2].new_ones(key.shape[0], 1)
        else:
            key, value = (x.masked_fill(~mask[:, None, :, None], 0) for x in (key, value))
        given = buffers.keys if isinstance(buffers, Buffers) else None
        joined, keys = join(before.tokens, (key, value, mask), given, window=self.window)
        facts = self._buffers(keys, before, buffers, call.key_mask is not None)
        rows = query.reshape(
            query.shape[0], key.shape[1], query.shape[1] // key.shape[1], query.shape[3]
        )  # (B, G, R, D)
        first = max(0, joined[2].shape[1] - self.window)
        tokens = (joined[0][:, :, first:], joined[1][:, :, first:], joined[2][:, first:])
        simple = facts is not None and facts.visible and call.bias is None
        simple = simple and facts is not None and before.length - facts.last_sink > self.window
        gone = (joined[0][:, :, :1], joined[1][:, :, :1])
        if simple and (far is None or far.is_positive):
            out, sums = self._quick(call, rows, tokens, before, far, gone if first else None)
        else:
            near = self._near(call, rows, tokens, before)
            out, sums = finish(near)[0], before.sums
            if far is not None:
                leaving = (*gone, self._gone(joined[2], first, before))
                out, sums = self._merged(call, far, rows, leaving, near, before.sums)
        after_stream = Stream(sums, tokens, before.sinks, before.length + 1)
        return out.reshape(query.shape[0], query.shape[1], 1, value.shape[3]), after_stream.tensors(), facts

    def _buffers(self, keys: NearKeys | None, before: Stream, buffers: object | None, masked: bool) -> Buffers | None:
        """The buffers of the state after a step, with what is known of the tokens in them."""
        if keys is None:
            return None
        if isinstance(buffers, Buffers):
            visible = buffers.visible and not masked
            return buffers if keys is buffers.keys and visible == buffers.visible else replace(
                buffers, keys=keys, visible=visible
            )  # fmt: skip
        some = before.sinks is not None and before.sinks.position.numel() > 0
        last = int(before.sinks.position.max()) if some and before.sinks is not None else -self.window
        return Buffers(keys, not masked and bool(before.tokens[2].all()), last)

    def _quick(
        self,
        call: Call,
        rows: Tensor,
        tokens: Tokens,
        before: Stream,
        far: Far | None,
        gone: tuple[Tensor, Tensor] | None,
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """One softmax over near keys, sinks and positive features, whose values are the means that they have summed up.

        Where all tokens are visible, sinks are beyond the window, and there is no bias. ``gone`` is what has left the
        window; before that there is no far part. Returns (B, G, R, E) and the sums.
        """
        scaled = rows * self.scale_of(call.scale)
        logits, values, sums = [scaled @ tokens[0].mT], [tokens[1]], before.sums
        if before.sinks is not None:
            logits.append(scaled @ before.sinks.key.mT)
            values.append(before.sinks.value)
        if far is not None and gone is not None:
            spec = cast(PositiveSpec, lookup(far.spec))
            features, after = far_logits(spec, far.tensors, rows, (*gone, None), sums, call.scale)
            logits.append(
                features if far.beta is None else features + far.beta.to(rows.dtype).view(*rows.shape[1:3], 1)
            )
            values.append(after[1])
            sums = after
        shares = torch.cat(logits, 3).softmax(3).split([x.shape[2] for x in values], 3)
        out = shares[0] @ values[0]
        for share, x in zip(shares[1:], values[1:], strict=True):
            out = out + share @ x
        return out, sums

    def _gone(self, mask: Tensor, first: int, before: Stream) -> Tensor | None:
        """Whether the token that leaves the window is not to be taken in, (B, 1, 1, 1) bool."""
        hidden = ~mask[:, :1] if first else torch.ones_like(mask[:, :1])
        if before.sinks is not None:
            leaving = before.length - self.window
            hidden = hidden | (before.sinks.position == leaving).any(1, keepdim=True)
        return hidden[:, :, None, None]

    def _near(self, call: Call, rows: Tensor, tokens: Tokens, before: Stream) -> Part:
        """Exact softmax of one query (B, G, R, D) on the last tokens and the sinks."""
        scale, count = self.scale_of(call.scale), tokens[2].shape[1]
        scores = rows @ tokens[0].mT * scale
        values, sinks = tokens[1], before.sinks
        heads = scores.shape[1:3]
        bias = None if call.bias is None else self._bias(call.bias)
        if bias is not None:
            near = bias[0][:, self.window - count : self.window]  # distances -(count - 1) to 0
            scores = scores + near.to(scores.dtype).clamp_min(EMPTY).unflatten(0, heads).unsqueeze(0)[:, :, :, :]
        scores = scores.masked_fill(~tokens[2][:, None, None, :], EMPTY)
        if sinks is not None:
            more = rows @ sinks.key.to(rows.dtype).mT * scale
            distance = before.length - sinks.position  # (B, s)
            if bias is not None:
                tail = bias[1][0].to(scores.dtype).clamp_min(EMPTY).view(1, *heads, 1)
                if len(bias) > 2:
                    beyond = (distance - self.window).to(scores.dtype)[:, None, None, :]
                    tail = tail - bias[2].to(scores.dtype).view(1, *heads, 1) * beyond
                more = more + tail
            more = more.masked_fill((distance < self.window)[:, None, None, :], EMPTY)
            scores = torch.cat([scores, more], 3)
            values = torch.cat([values, sinks.value.to(values.dtype)], 2)
        log = scores.logsumexp(3)
        out = (scores - log.unsqueeze(3)).exp_() @ values
        empty = log < EMPTY / 2
        return Part(out.masked_fill(empty.unsqueeze(3), 0), log.masked_fill(empty, EMPTY))

    def _merged(
        self,
        call: Call,
        far: Far,
        rows: Tensor,
        gone: tuple[Tensor, Tensor, Tensor | None],
        near: Part,
        sums: Sequence[Tensor],
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """Take in the key that leaves the window, and merge what the far keys give: (B, G, R, E), and their sums."""
        fades = call.bias is not None and call.bias.slope is not None
        added, after = far_step(lookup(far.spec), far.tensors, rows, gone, sums, call.scale, fades)
        log, heads = added.log, rows.shape[1:3]
        if far.beta is not None:
            log = log + far.beta.to(rows.dtype).view(heads)
        if call.bias is not None:
            _, tails, *rest = self._bias(call.bias)
            log = log + tails[0].to(rows.dtype).clamp_min(EMPTY).view(heads)
            if rest:
                after = (after[0] - rest[0].to(after[0].dtype).view(1, -1, 1, 1), *after[1:])
        if added.den is None:  # of two means with log masses the logistic function has the share
            return torch.lerp(near.num, added.num, torch.sigmoid(log - near.log).unsqueeze(3)), after
        return finish(merge(near, added._replace(log=log)))[0], after

    def forget(self, state: State, samples: Tensor) -> State:
        """A state whose near keys are hidden, far sums empty and sinks to come again, for some samples (B) bool."""
        kept = Stream.of(state, self.sinks > 0)
        values = [EMPTY, *[0.0] * len(kept.sums)][: len(kept.sums)] + [0.0] * 3
        values += [] if kept.sinks is None else [0.0, 0.0, NO_SINK]
        return replace(state.fill(samples, values), near=None)

    def made_by(self, call: Call) -> MadeBy:
        """What a stream that starts with this call depends on besides the settings."""
        return (("bias", call.bias is not None), ("slope", call.bias is not None and call.bias.slope is not None))
