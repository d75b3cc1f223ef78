"""Near exactly, far by a feature map, in one normalization, all chunks at once.

    out_i = ( sum_near e^(s_ij) v_j + e^(beta + tail) sum_far phi(q_i) . phi(k_j) v_j ) / ( the same sums with v = 1 )

The same function as `near_far.near_far_attention`. The far part is causal attention, with keys that come a window
later, and its mirror image where keys after the query count too: rows beside the others in one pass, where the call is
one segment of self-attention. Every part knows the logarithm of its largest weight; the sums of all
parts are brought to the largest of these, so that the denominator is at least 1 for positive maps.

Memory beyond inputs and outputs: as causal attention (`attend`), twice that where both sides are one pass, with the
scores of the near part (`near`) beside it, and E + 2 numbers a query and side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernelformer.attention.near_far_call import NearBias, NearFarCall
from kernelformer.attention.plain.attend import Kept, Mapped, PlainMap, by_head, join_segments, make_map
from kernelformer.attention.plain.layout import (
    RowSums,
    causal_chunk,
    clamp,
    of_samples,
    recomputed,
    sample_blocks,
    spans,
    whole_chunks,
    with_ones,
)
from kernelformer.attention.plain.near import NearRows, PlainRows, near_block, near_numbers
from kernelformer.attention.plain.positive import LEAST, KeySums, PositiveMap
from kernelformer.attention.plain.signed import SignedMap, own_scale
from kernelformer.attention.positive import EMPTY
from kernelformer.attention.reference import GUARD
from kernelformer.contract import compute_dtype, lookup


class _Run(NamedTuple):
    """One call, its map if it has a far part, tokens of a chunk, and how many sinks are its first keys."""

    call: NearFarCall
    phi: PlainMap | None
    size: int
    leading: int

    @property
    def is_whole(self) -> bool:
        """True if queries and keys are the same tokens, all of a sequence."""
        call = self.call
        sums = call.state or call.right_state
        return call.window > 0 and not call.offset and not sums and call.query.shape[2] == call.key.shape[2] > 0

    @property
    def is_plain(self) -> bool:
        """True if the near part of such a call is the softmax of all keys of its window."""
        call = self.call
        whole = call.key_mask is None and not call.bias and not call.dropout
        return whole and (not call.sinks or self.leading > 0)


def plain_near_far_attention(
    call: NearFarCall, *, leading: int = 0, streams: bool = True
) -> tuple[Tensor, list[Tensor]]:
    """Attend; call and results as those of `near_far.near_far_attention`.

    Args:
        call: the inputs.
        leading: number of sinks that are known to be the first keys of the call and visible; they may be in its
            ``far_mask``.
        streams: whether the sums after the last key are wanted.
    """
    batch, heads, length, _ = call.query.shape
    numbers = heads * max(call.features * (1 if call.is_causal else 2), near_numbers(call))
    blocks = sample_blocks(call.query, length, numbers)
    if len(blocks) > 1:
        parts = [plain_near_far_attention(_samples(call, b), leading=leading, streams=streams) for b in blocks]
        return torch.cat([x for x, _ in parts]), [torch.cat(x) for x in zip(*(y for _, y in parts), strict=True)]
    if torch.compiler.is_exporting():
        call = _whole_blocks(call)
    phi = None
    if call.spec:
        phi = make_map(lookup(call.spec), call.tensors, call.far_scale, True, parts=True, fades=len(call.bias) > 2)
    run = _Run(call, phi, causal_chunk(call.query.shape[2]), leading)
    segments, learned = spans(call.query, batch * numbers, run.size), _tensors(call)
    if len(segments) == 1 and run.is_whole:
        out, kept = recomputed(partial(_attend_whole, run), learned=learned)
        return out.narrow(2, 0, length), _stored(run, kept) if streams else []
    rights: list[RowSums] = []
    kept = phi.load(call.right_state) if phi is not None and call.right_state else None
    for segment in reversed(segments) if phi is not None and not call.is_causal else ():
        right, kept = recomputed(partial(_side, run, segment, True), kept, learned=learned)
        rights.append(right)
    kept = phi.load(call.state) if phi is not None and call.state else None
    outs = []
    for segment in segments:
        right_rows = rights.pop() if rights else None
        out, kept = recomputed(partial(_attend, run, segment), right_rows, kept, learned=learned)
        outs.append(out)
    return join_segments(outs).narrow(2, 0, length), _stored(run, kept) if streams else []


def plain_outputs(keep: bool, **inputs: Any) -> tuple[Tensor, list[Tensor]] | None:
    """The outputs of `near_far.near_far_attention` from its operator's inputs; None with dropout, which is another."""
    call = NearFarCall(**inputs)
    return None if call.dropout else plain_near_far_attention(call, streams=call.is_causal)


def _stored(run: _Run, kept: Kept | None) -> list[Tensor]:
    """The tensors of a state, none where there is no far part."""
    return [] if run.phi is None or kept is None else run.phi.store(kept, run.call.key.shape[1])


def _whole_blocks(call: NearFarCall) -> NearFarCall:
    """The call with hidden tokens after the last one, up to whole blocks and more than a window."""
    size, masks = near_block(call.window), (call.key_mask, call.far_mask)
    (query, key, value), (key_mask, far_mask) = whole_chunks(
        (call.query, call.key, call.value), masks, size, call.window // size + 1
    )
    if call.is_causal:  # the state has no keys of the last window
        far_mask = far_mask & (torch.arange(key.shape[2], device=key.device) < call.key.shape[2] - call.window)
    return replace(call, query=query, key=key, value=value, key_mask=key_mask, far_mask=far_mask)


def _samples(call: NearFarCall, block: slice) -> NearFarCall:
    """Some samples of a call."""
    key_mask, far_mask = (None if x is None else x[block] for x in (call.key_mask, call.far_mask))
    return replace(
        call,
        query=call.query[block],
        key=call.key[block],
        value=call.value[block],
        sinks=[x[block] for x in call.sinks],
        tensors=of_samples(call.tensors, block),
        state=[x[block] for x in call.state],
        right_state=[x[block] for x in call.right_state],
        key_mask=key_mask,
        far_mask=far_mask,
    )


def _tensors(call: NearFarCall) -> list[Tensor]:
    """All that may have a gradient."""
    single = [call.query, call.key, call.value] + ([] if call.beta is None else [call.beta])
    return [*single, *call.sinks, *call.bias, *call.tensors, *call.state, *call.right_state]


def _attend(
    run: _Run, segment: tuple[int, int], right: RowSums | None, kept: Kept | None
) -> tuple[Tensor, Kept | None]:
    """Outputs (B, H, T, E) of some queries, and the sums of the far keys on their left."""
    far = [] if right is None else [right]
    if run.phi is not None:
        left, kept = _side(run, segment, False, kept)
        far.append(left)
    return _merged(run, NearRows(run.call, *segment, run.leading), far, segment), kept


def _attend_whole(run: _Run) -> tuple[Tensor, Kept | None]:
    """The same of a whole call of self-attention."""
    call, phi, segment, kept = run.call, run.phi, (0, run.call.query.shape[2]), None
    far: list[RowSums] = []
    value, hidden = call.value.to(compute_dtype(call.value.dtype)), None
    if call.far_mask is not None:
        hidden = ~call.far_mask[:, None, :, None]
        value = value.masked_fill(hidden, 0)
    value = with_ones(value).flatten(0, 1)
    if isinstance(phi, PositiveMap) and phi.tied:
        far, kept = _both_sides(run, phi, value, hidden)
    elif phi is not None:
        gone = None if call.far_mask is None else ~call.far_mask[:, None, :, None]
        both = phi.queries(call.query, call.key.shape[1]), phi.keys(call.key, call.value, gone)  # for both sides
        left, kept = _side(run, segment, False, None, both)
        far = [left] if call.is_causal else [left, _side(run, segment, True, None, both)[0]]
    near = PlainRows(call, value, run.leading) if run.is_plain else NearRows(call, *segment, run.leading)
    return _merged(run, near, far, segment), kept


def _merged(run: _Run, near: NearRows | PlainRows, far: Sequence[RowSums], segment: tuple[int, int]) -> Tensor:
    """Near and far parts in one normalization, (B, H, T, E)."""
    log, shares = near.log, near.log.unsqueeze(0)[:0]
    if far:
        logs = torch.stack([x.log for x in far]) if len(far) > 1 else far[0].log.unsqueeze(0)
        log = torch.maximum(log, logs.detach().amax(0) if len(far) > 1 else logs[0].detach())
    if not near.sees_keys:
        log = log.clamp_min(EMPTY / 2)
    if far:
        shares = (logs - log).exp_().unsqueeze(4)
    sums = near.sums(log)
    bound = sums[..., -1:] if any(x.guard is not None for x in far) else None
    for part, share in zip(far, shares, strict=True):
        if bound is not None:
            bound = torch.addcmul(bound, part.sums[..., -1:] if part.guard is None else part.guard, share)
        sums = torch.addcmul(sums, part.sums, share)
    den = sums[..., -1:]
    if bound is not None:
        den = torch.maximum(den, GUARD * bound)
    if bound is not None or not near.sees_keys:
        den = den.clamp_min(LEAST)
    return by_head(sums[..., :-1] / den, run.call.query[:, :, slice(*segment)])


def _both_sides(run: _Run, phi: PositiveMap, value: Tensor, hidden: Tensor | None) -> tuple[list[RowSums], Kept]:
    """Reads by all queries of far keys on their left, and on their right: mirrored rows beside the others.

    Args:
        run: of as many queries as keys.
        phi: a tied map.
        value: (N, L, E + 1), with ones; 0 where hidden.
        hidden: (B, 1, L, 1), far keys that do not count; None: there are none but the leading sinks.
    """
    call, slope = run.call, _slope(run.call)
    logs = phi.joint(call.query, call.key if hidden is None else call.key.masked_fill(hidden, 0))  # (N, R + 1, L, M)
    rows, length = logs.shape[0], logs.shape[2]
    if not call.is_causal:
        logs, value = torch.cat([logs, logs.flip(2)]), torch.cat([value, value.flip(1)])
        slope = None if slope is None else torch.cat([slope, slope])
    away = clamp(call.window, 0, length)
    keys = logs[:, -1, : length - away]
    if hidden is not None:
        gone = hidden.expand(-1, call.key.shape[1], -1, -1).flatten(0, 1)
        gone = gone if call.is_causal else torch.cat([gone, gone.flip(1)])
        keys = keys.masked_fill(gone[:, : length - away], -torch.inf)
    keys = F.pad(keys, (0, 0, away, 0), value=-torch.inf)
    if run.leading:
        keys[:rows, away : away + run.leading].fill_(-torch.inf)
    if run.leading > away and not call.is_causal:
        keys[rows:, length + away - run.leading :].fill_(-torch.inf)
    # What is rolled to the front belongs to hidden keys.
    part, kept = phi.causal(logs[:, :-1].transpose(1, 2), (keys, value.roll(away, 1)), None, run.size, slope)
    if not call.bias:
        part = _times_factor(call, part, mirror=False)  # that of both sides
    sides = [RowSums(part.log[:rows], part.sums[:rows])]
    if not call.is_causal:
        sides.append(RowSums(part.log[rows:].flip(1), part.sums[rows:].flip(1)))
    if call.bias:
        sides = [_times_factor(call, side, mirror=bool(number)) for number, side in enumerate(sides)]
    return sides, KeySums(kept.top[:rows], kept.sums[:rows])


def _side(
    run: _Run,
    segment: tuple[int, int],
    mirror: bool,
    kept: Kept | None,
    both: tuple[Mapped, Mapped] | None = None,
) -> tuple[RowSums, Kept]:
    """Reads by some queries of the far keys on one side, and the sums of these; mirrored, from the end.

    ``both`` are these queries and all keys, mapped.
    """
    (call, phi, size, _), (start, end) = run, segment
    assert phi is not None
    shift = call.offset + max(call.window, 1) if mirror else call.offset - call.window
    if mirror and end == call.query.shape[2]:  # keys that every query sees come before the first
        kept = _beyond(run, end + shift, call.key.shape[2], kept, mirror)
    elif not mirror and start == 0:
        kept = _beyond(run, 0, shift, kept, mirror)
    queries = both[0] if both else phi.queries(call.query[:, :, start:end], call.key.shape[1])
    keys, slope = _keys(run, start + shift, end + shift, both[1] if both else None), _slope(call)
    if mirror:
        queries, keys = (_each(x, lambda part: part.flip(1)) for x in (queries, keys))
    if isinstance(phi, SignedMap):
        part, kept = _signed_side(phi, queries, keys, kept, size, slope)
    else:
        more = {} if slope is None else {"slope": slope}
        part, kept = phi.causal(queries, keys, kept, size, **more)
    if mirror:
        part = RowSums(*(None if x is None else x.flip(1) for x in part))  # type: ignore[arg-type]
    return _times_factor(call, part, mirror), kept


def _signed_side(
    phi: SignedMap, queries: Mapped, keys: Mapped, kept: Kept | None, size: int, slope: Tensor | None
) -> tuple[RowSums, Kept]:
    """The far rows of a signed map, whose sums before and after are relative to the next query."""
    if slope is None:
        part, kept = phi.causal(queries, keys, kept, size)
        return own_scale(part), kept
    decay = -slope.expand(-1, keys.phi.shape[1], -1)
    if kept is not None:
        kept = kept._replace(top=kept.top + slope.squeeze(2))
    part, after = phi.causal(queries, keys, kept, size, decay)
    return own_scale(part), after._replace(top=after.top - slope.squeeze(2))


def _each(mapped: Mapped, function: Callable[[Tensor], Tensor]) -> Mapped:
    """Apply a function to every tensor of mapped queries or keys."""
    if isinstance(mapped, Tensor):
        return function(mapped)
    parts = [None if x is None else function(x) for x in mapped]
    return type(mapped)(*parts) if hasattr(mapped, "_fields") else tuple(parts)


def _keys(run: _Run, low: int, high: int, mapped: Mapped | None = None) -> Mapped:
    """Mapped far keys low to high and their values, (N, n, ...): nothing where there are none, and for sinks."""
    call, phi = run.call, run.phi
    assert phi is not None
    first = clamp(max(low, run.leading), 0, call.key.shape[2])
    last = clamp(high, first, call.key.shape[2])
    before = clamp(first - low, 0, high - low)
    if mapped is None:
        hidden = None if call.far_mask is None else ~call.far_mask[:, None, first:last, None]
        keys = phi.keys(call.key[:, :, first:last], call.value[:, :, first:last], hidden)
    else:
        keys = _each(mapped, lambda x: x[:, first:last])
    return phi.padded(keys, before, high - low - before - (last - first))


def _beyond(run: _Run, low: int, high: int, kept: Kept | None, mirror: bool) -> Kept | None:
    """Sums with the keys low to high, if there are any, relative to the nearest query."""
    low, high = clamp(low, 0, run.call.key.shape[2]), clamp(high, 0, run.call.key.shape[2])
    if low >= high or run.phi is None:
        return kept
    keys, slope = _keys(run, low, high), _slope(run.call)
    if slope is not None:
        away = torch.arange(high - low, device=slope.device)
        away = away + 1 if mirror else high - low - away
        keys = run.phi.faded(keys, -slope * away.unsqueeze(1))
    return run.phi.absorb(keys, kept)


def _slope(call: NearFarCall) -> Tensor | None:
    """Decrease of far log weights per token, (N, 1, 1); None means 0."""
    slope = NearBias(*call.bias).slope if call.bias else None
    if slope is None:
        return None
    return slope.to(compute_dtype(call.query.dtype)).repeat(call.query.shape[0])[:, None, None]


def _times_factor(call: NearFarCall, part: RowSums, mirror: bool) -> RowSums:
    """Far rows with the factor of their head: beta, and the tail of a bias."""
    parts = [] if call.beta is None else [call.beta]
    if call.bias:
        parts.append(NearBias(*call.bias).tails[int(mirror)].clamp_min(EMPTY))
    if not parts:
        return part
    log = parts[0].to(part.log.dtype) if len(parts) == 1 else parts[0].to(part.log.dtype) + parts[1]
    by_group = part.log.unflatten(0, (-1, call.key.shape[1]))
    return part._replace(log=(by_group + log.view(call.key.shape[1], 1, -1)).flatten(0, 1))
