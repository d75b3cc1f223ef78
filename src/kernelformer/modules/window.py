"""Near keys exactly and far keys through a feature map, all at once or as a stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernelformer.attention import State
from kernelformer.attention.dispatch import attend_near_far
from kernelformer.attention.near_far_call import NearFarCall, Sinks
from kernelformer.attention.near_keys import Place, Tokens, push
from kernelformer.attention.plain.layout import readable_without_sync
from kernelformer.attention.positive import EMPTY
from kernelformer.attention.state import MadeBy
from kernelformer.attention.step import NearTokens, step
from kernelformer.contract import compute_dtype, lookup
from kernelformer.modules.bias import check_tail
from kernelformer.modules.checks import Bias, Call

NO_SINK = -1  # position of a sink that a sample does not have yet


class Stream(NamedTuple):
    """Far sums, last tokens and sinks of a stream."""

    sums: Sequence[Tensor]  # of the far keys, (B, G, ...) each; nothing where there is no far part
    tokens: Tokens  # the last keys (B, G, n, D), values (B, G, n, E) and their mask (B, n), at most a window of them
    sinks: Sinks | None  # their positions are counted from the start of the stream

    @staticmethod
    def of(state: State, has_sinks: bool) -> Stream:
        """Read the tensors of a state."""
        tensors, sinks = state.tensors, None
        if has_sinks:
            *tensors, key, value, position = tensors  # type: ignore[assignment]
            sinks = Sinks(key, value, position, position)  # visible where the position is not negative
        return Stream(tensors[:-3], (tensors[-3], tensors[-2], tensors[-1]), sinks)

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors of a state."""
        return (*self.sums, *self.tokens, *(() if self.sinks is None else self.sinks[:3]))


class Known(NamedTuple):
    """Facts about a stream in buffers, so that a step need not look for them in its tensors."""

    place: Place
    last_sink: int | None  # the largest position of a sink, once every sample has all of its sinks


def first_tokens(count: int, call: Call, before: Sinks | None, offset: int = 0, past: int = 0) -> Sinks | None:
    """The first visible tokens of each sample: those that a stream has, then new ones, by position in the call.

    ``offset`` keys of the call are not new, and ``past`` tokens of the stream come before it.
    """
    if not count:
        return None
    key, value, mask, in_stream = call.key, call.value, call.key_mask, call.streams or call.state is not None
    if not in_stream:
        key, value = key.detach(), value.detach()  # see `NearFarCall.own_sinks`
    batch, length = key.shape[0], key.shape[2]
    if before is not None:
        before = before._replace(position=before.position - (past - offset))
        if readable_without_sync(key) and bool(before.visible.all()):
            return before
    traced = torch.compiler.is_exporting()
    if before is None and mask is None and not traced and count <= length:  # a graph is of any length
        position = torch.arange(count, device=key.device).expand(batch, -1)
        first = [x[:, :, :count] for x in (key, value)]
        if in_stream:  # views would keep all of a prompt
            first = [x.clone() for x in first]
        return Sinks(first[0], first[1], position, torch.ones_like(position, dtype=torch.bool))
    number = torch.arange(1, count + 1, device=key.device).expand(batch, -1)
    made = number.new_zeros(batch, 1) if before is None else before.visible.sum(1, keepdim=True)
    new = key.new_ones(batch, length - offset, dtype=torch.bool) if mask is None else mask[:, offset:]
    if traced:  # what a search gives, by operations that ONNX has
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
    """Mask of the keys (B, S) that are visible and no sinks."""
    batch, length = key.shape[0], key.shape[2]
    whole = key.new_ones(batch, length, dtype=torch.bool) if mask is None else mask
    inside = sinks.visible & (sinks.position >= 0) & (sinks.position < length)
    index = torch.where(inside, sinks.position, length)  # one more column takes what is elsewhere
    return F.pad(whole, (0, 1)).scatter(1, index, False)[:, :length]


NO_SINK_YET = 1 << 40  # position of a sink that a sample does not have; it stays beyond any window's reach


def attend_stream(near: NearFarAttention, call: Call, far: Far | None) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Attend to a whole prompt in an export, and make the state for a step; see `NearFarAttention.attend`."""
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
    return out, Stream(sums, (key, value, kept), sinks).tensors()


def _with_new_sink(
    sinks: Sinks, ago: Tensor, token: tuple[Tensor, Tensor, Tensor | None], past: int
) -> tuple[Sinks, Tensor]:
    """The sinks with a token, at position ``past``, among them where one is missing and the token is visible.

    Also the tokens since each sink, before and after: negative where there is none.
    """
    key, value, mask = token
    new = torch.arange(ago.shape[1], device=key.device) == (ago >= 0).sum(1, keepdim=True)
    new = new if mask is None else new & mask  # (B, s)
    rows, position = new[:, None, :, None], torch.where(new, past, sinks.position)
    sinks = Sinks(torch.where(rows, key, sinks.key), torch.where(rows, value, sinks.value), position, position)
    return sinks, ago.masked_fill(new, 0)


def _check_window(near: NearFarAttention) -> None:
    if not near.window:
        raise ValueError(
            f"{near.method!r} with sinks={near.sinks} and no window cannot be exported as a stream; give window=1."
        )


class Far(NamedTuple):
    """The far part of a call: a feature map and a factor for each head."""

    spec: str
    tensors: Sequence[Tensor]
    beta: Tensor | None  # (H), the logarithm of the factor; None means 0


class NearFarAttention:
    """The part of a core that attends to near keys exactly, and to far ones by a kernel if it has one.

        near(i) = { j visible to i : |i - j| < window, or j among the first visible tokens, the sinks }
        out_i = ( sum_near e^(s_ij) v_j + e^beta sum_far phi(q_i) . phi(k_j) v_j ) / ( the same sums with v = 1 )

    with ``s_ij = scale q_i . k_j + b_(j-i)``. A bias must be constant, or a straight line, beyond a distance of at most
    the window, which counts a token's own place; the scale of q . k is by default that of the call.
    """

    def __init__(self, method: str, *, window: int, sinks: int, scale: float | None) -> None:
        self.method, self.window, self.sinks, self.scale = method, window, sinks, scale

    def scale_of(self, scale: float) -> float:
        """The scale of the near scores in a call of this scale."""
        return scale if self.scale is None else self.scale

    def attend(self, call: Call, far: Far | None, *, plain: bool = False) -> tuple[Tensor, tuple[Tensor, ...] | None]:
        """Attend to all keys of a call, for each head of the far part's sums, and in a stream to those before them."""
        if not call.streams and call.state is None:
            sinks = None
            # Else sinks are the first keys, and where they are needs no tensor.
            if not plain or call.key_mask is not None or call.bias is not None:
                sinks = first_tokens(self.sinks, call, None)
            out, _ = self.run(call, far, sinks, None, 0, plain=plain)
            return out, None
        if torch.compiler.is_exporting():
            return attend_stream(self, call, far)
        dtype = compute_dtype(call.query.dtype)
        key, value, mask = call.key.to(dtype), call.value.to(dtype), call.key_mask
        sums: Sequence[Tensor] = ()
        before = Stream.of(call.state, self.sinks > 0) if call.state is not None else None
        if before is not None and before.sinks is not None:
            known = before.sinks
            before = before._replace(sinks=known._replace(visible=known.position >= 0))
        offset, past = 0, 0
        if before is not None and call.state is not None:
            offset, past, sums = before.tokens[0].shape[2], call.state.length, before.sums
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
        if sinks is not None:
            position = (sinks.position + past - offset).masked_fill(~sinks.visible, NO_SINK)
            sinks = sinks._replace(position=position)
        keep = (tokens[0].clone(), tokens[1].clone(), tokens[2].clone())  # views would keep all of a prompt
        return out, Stream(after, keep, sinks).tensors()

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
        """Attend to the keys of a call, for each head of the sums, of which ``offset`` are before the first query.

        ``sums`` are those of far keys before the call, ``later`` of those after it. Positions of sinks are among the
        keys of the call, or before them.
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
                seed=torch.randint(1 << 62, ()) if call.dropout else None,
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
                dropout=call.dropout,
                own_sinks=sinks is not None and sums is None and call.key.shape[2] > 0,
            ),
            plain=plain,
            leading=leading,
            streams=call.streams or call.state is not None,
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
        """Tensors of `near.NearBias`: the bias within the window, at the window, and the slope."""
        self.check_bias(bias, is_causal)
        distances = torch.arange(min(0, 1 - self.window), self.window, device=bias.table.device)
        # A key's own distance belongs to the left: without a window, the right begins at 1.
        # Both by a range: a list of numbers would have to be copied to the device.
        last = max(self.window, 1)
        ends = torch.arange(-self.window, last + 1, self.window + last, device=bias.table.device)
        tails = self.at(bias, ends).T
        near = self.at(bias, distances) if self.window else bias.table[:, :0]
        return (near, tails) if bias.slope is None else (near, tails, bias.slope)

    @staticmethod
    def at(bias: Bias, distance: Tensor) -> Tensor:
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

    def step(self, call: Call, far: Far | None) -> tuple[Tensor, tuple[Tensor, ...], Known | None]:
        """Attend with one token; also returns what is known of the stream after it."""
        if call.state is None or call.dropout:
            out, after = self.attend(call, far)
            assert after is not None
            return out, after, None
        traced, dtype = torch.compiler.is_exporting(), compute_dtype(call.query.dtype)
        if traced:
            _check_window(self)
        before, past = Stream.of(call.state, self.sinks > 0), 0 if traced else call.state.length
        known = call.state.near if isinstance(call.state.near, Known) else None
        query, key, value, mask = call.query, call.key, call.value, call.key_mask
        if query.dtype != dtype:
            query, key, value = (x.to(dtype) for x in (query, key, value))
        if mask is not None:
            key, value = (x.masked_fill(~mask[:, None, :, None], 0) for x in (key, value))
        place = None if known is None else known.place
        tokens, (gone, gone_value, shown), place = push(before.tokens, key, value, mask, place, window=self.window)
        sinks, ago = before.sinks, None
        slope = None if call.bias is None else call.bias.slope
        last_sink = -self.window if sinks is None else None if known is None else known.last_sink
        if sinks is not None and (last_sink is None or past - last_sink <= self.window or slope is not None):
            ago = past - sinks.position  # tokens since each sink; negative where there is none yet
            ago = ago if traced else ago.masked_fill(sinks.position < 0, -1)
            if last_sink is None:
                sinks, ago = _with_new_sink(sinks, ago, (key, value, mask), past)
        rows = query.reshape(*key.shape[:2], query.shape[1] // key.shape[1], query.shape[3])  # (B, G, R, D)
        near = self._near(call, far, rows, tokens, sinks, ago, masked=place is None or not place.visible)
        sums = before.sums
        if far is None or gone.shape[2] == 0:
            out = near.attend()
        else:
            if ago is not None:  # a sink that leaves the window is not taken in
                other = ~(ago == self.window).any(1, keepdim=True)
                shown = other if shown is None else shown & other
            how: dict[str, Any] = {"scale": call.scale, "key_mask": shown, "near": near}
            out, sums = step(lookup(far.spec), far.tensors, query, gone, gone_value, sums, **how)
            if slope is not None:
                sums = (sums[0] - slope.to(sums[0].dtype).view(1, -1, 1, 1), *sums[1:])
        if traced and sinks is not None:
            sinks = sinks._replace(position=sinks.position - 1)
        after = Stream(sums, tokens, sinks).tensors()
        if place is None:
            return out.reshape(*query.shape[:3], value.shape[3]), after, None
        if last_sink is None and sinks is not None and bool((sinks.position >= 0).all()):
            last_sink = int(sinks.position.max()) if sinks.position.numel() else -self.window
        return out.reshape(*query.shape[:3], value.shape[3]), after, Known(place, last_sink)

    def _near(
        self,
        call: Call,
        far: Far | None,
        rows: Tensor,
        tokens: Tokens,
        sinks: Sinks | None,
        ago: Tensor | None,
        *,
        masked: bool,
    ) -> NearTokens:
        """Return the last tokens and the sinks, as queries (B, G, R, D) see them.

        Tokens since each sink are ``ago``, (B, s), or None where all are beyond the window.
        """
        scaled, count, heads = rows * self.scale_of(call.scale), tokens[2].shape[1], rows.shape[1:3]
        bias = () if call.bias is None else self._bias(call.bias)
        near, tail, factor = scaled @ tokens[0].mT, None, None
        if far is not None and far.beta is not None:
            factor = far.beta.to(rows.dtype).view(*heads, 1)
        if bias:
            table, tail = (x.to(rows.dtype).clamp_min(EMPTY) for x in (bias[0], bias[1][0].view(*heads, 1)))
            near = near + table[:, self.window - count : self.window].unflatten(0, heads)  # distances count - 1 to 0
            factor = tail if factor is None else factor + tail
        if masked:
            near = near.masked_fill(~tokens[2][:, None, None, :], EMPTY)
        logits, values = [near], [tokens[1]]
        if sinks is not None:
            first = scaled @ sinks.key.mT
            first = first if tail is None else first + tail
            if len(bias) > 2 and ago is not None:
                beyond = (ago - self.window).to(first.dtype)[:, None, None, :]
                first = first - bias[2].to(first.dtype).view(*heads, 1) * beyond
            if ago is not None:
                first = first.masked_fill((ago < self.window)[:, None, None, :], EMPTY)
            logits.append(first)
            values.append(sinks.value)
        return NearTokens(logits, values, factor=factor, fades=len(bias) > 2, may_hide=bool(bias))

    def forget(self, state: State, samples: Tensor) -> State:
        """A state whose near keys are hidden, far sums empty and sinks to come again, for some samples (B) bool."""
        kept = Stream.of(state, self.sinks > 0)
        values = [EMPTY, *[0.0] * len(kept.sums)][: len(kept.sums)] + [0.0] * 3
        values += [] if kept.sinks is None else [0.0, 0.0, NO_SINK]
        return replace(state.fill(samples, values), near=None)

    def made_by(self, call: Call) -> MadeBy:
        """Facts of a stream that starts with this call, besides the settings."""
        return (("bias", call.bias is not None), ("slope", call.bias is not None and call.bias.slope is not None))
