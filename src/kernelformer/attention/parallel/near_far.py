"""Near exactly, far by a positive map, in one normalization, all chunks at once.

    out_i = ( sum_near e^(s_ij) v_j + e^(beta + tail) sum_far phi(q_i) . phi(k_j) v_j ) / ( the same sums with v = 1 )

The same function as `near_far.near_far_attention`. The far part is that of `positive`, with keys that come a window
later, and its mirror image where keys after the query count too. Every part brings the logarithm of its largest weight;
the largest of these is what all parts are brought to, so that the denominator is at least 1.

Memory beyond inputs and outputs: as causal attention (`attend`), with the scores of the near part (`near`) beside it,
and between the parts E + 2 numbers a query.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from kernelformer.attention.near import NearBias
from kernelformer.attention.near_far import near_far_attention
from kernelformer.attention.near_far_call import NearFarCall
from kernelformer.attention.parallel.attend import by_head, has_numbers, join_segments
from kernelformer.attention.parallel.layout import RowSums, causal_chunk, recomputed, spans
from kernelformer.attention.parallel.near import hidden_between, near_numbers, near_part, tokens_between
from kernelformer.attention.parallel.positive import LEAST, KeySums, PositiveMap
from kernelformer.attention.positive import EMPTY
from kernelformer.contract import PositiveSpec, compute_dtype, lookup


def parallel_near_far_attention(call: NearFarCall) -> tuple[Tensor, list[Tensor]]:
    """Attend; argument and results as those of `near_far.near_far_attention`.

    The map is positive, weights are not dropped, and a bias has no slope.
    """
    if not has_numbers(call.query, call.key, call.value):
        return near_far_attention(call)
    length, groups = call.query.shape[2], call.key.shape[1]
    phi, end_state = None, []
    numbers = call.query.shape[0] * call.query.shape[1] * max(call.features, near_numbers(call))
    size = causal_chunk(length)
    segments = list(spans(length, numbers, size))
    learned = _tensors(call)
    if call.spec:
        spec = lookup(call.spec)
        assert isinstance(spec, PositiveSpec)
        phi = PositiveMap(spec, call.tensors, call.far_scale, True, parts=True)
    kept = phi.load(call.state) if phi is not None and call.state else None
    parts: list[RowSums] = []
    for segment in segments:
        part, kept = recomputed(partial(_near_and_left, call, phi, size, segment), kept, learned=learned)
        parts.append(part)
    if phi is not None and kept is not None:
        end_state = phi.store(kept, groups)
    if phi is not None and not call.is_causal:
        kept = None
        for number, segment in reversed(list(enumerate(segments))):
            rows, kept = recomputed(partial(_right, call, phi, size, segment), parts[number], kept, learned=learned)
            parts[number] = rows
    outs = [by_head(x.sums[..., :-1] / x.sums[..., -1:].clamp_min(LEAST), call.query) for x in parts]
    return join_segments(outs), end_state


def _tensors(call: NearFarCall) -> list[Tensor]:
    """All that may have a gradient."""
    lists: Sequence[Sequence[Tensor]] = (call.sinks, call.bias, call.tensors)
    single = [call.query, call.key, call.value] + ([] if call.beta is None else [call.beta])
    return single + [x for some in lists for x in some]


def _near_and_left(
    call: NearFarCall, phi: PositiveMap | None, size: int, segment: tuple[int, int], kept: KeySums | None
) -> tuple[RowSums, KeySums | None]:
    near = near_part(call, *segment)
    if phi is None:
        return near, None
    far, kept = _far(call, phi, size, segment, kept, mirror=False)
    return _merge(near, far), kept


def _right(
    call: NearFarCall, phi: PositiveMap, size: int, segment: tuple[int, int], part: RowSums, kept: KeySums | None
) -> tuple[RowSums, KeySums]:
    far, kept = _far(call, phi, size, segment, kept, mirror=True)
    return _merge(part, far), kept


def _far(
    call: NearFarCall,
    phi: PositiveMap,
    size: int,
    segment: tuple[int, int],
    kept: KeySums | None,
    mirror: bool,
) -> tuple[RowSums, KeySums]:
    """The far keys on one side of some queries, and the sums after them; mirrored, the last segment comes first."""
    (start, end), groups = segment, call.key.shape[1]
    shift = call.offset + max(call.window, 1) if mirror else call.offset - call.window
    if mirror and end == call.query.shape[2]:  # keys that every query sees come before the first
        kept = _beyond(call, phi, end + shift, call.key.shape[2], kept)
    elif not mirror and start == 0:
        kept = _beyond(call, phi, 0, shift, kept)
    low, high = start + shift, end + shift
    hidden = hidden_between(call.far_mask, call.key, low, high)
    query = call.query[:, :, start:end]
    key, value = (tokens_between(x, low, high) for x in (call.key, call.value))
    if mirror:
        query, key, value = (x.flip(2) for x in (query, key, value))
        hidden = None if hidden is None else hidden.flip(2)
    rows, after = phi.causal(phi.queries(query, groups), phi.keys(key, value, hidden), kept, size)
    if mirror:
        rows = RowSums(rows.log.flip(1), rows.sums.flip(1))
    return rows._replace(log=rows.log + _far_log(call, mirror)), after


def _beyond(call: NearFarCall, phi: PositiveMap, low: int, high: int, kept: KeySums | None) -> KeySums | None:
    """Sums with the keys low to high, if there are any."""
    low, high = max(low, 0), min(high, call.key.shape[2])
    if low >= high:
        return kept
    hidden = hidden_between(call.far_mask, call.key, low, high)
    return phi.absorb(phi.keys(call.key[:, :, low:high], call.value[:, :, low:high], hidden), kept)


def _far_log(call: NearFarCall, mirror: bool) -> Tensor:
    """The logarithm of a factor of the far part, (N or 1, 1, R)."""
    heads, groups = call.query.shape[1], call.key.shape[1]
    log = call.query.new_zeros(heads, dtype=compute_dtype(call.query.dtype))
    if call.beta is not None:
        log = log + call.beta.to(log.dtype)
    if call.bias:
        log = log + NearBias(*call.bias).tails[int(mirror)].to(log.dtype).clamp_min(EMPTY)
    return log.view(groups, 1, -1).repeat(call.query.shape[0], 1, 1)


def _merge(a: RowSums, b: RowSums) -> RowSums:
    """The sums of both."""
    log = torch.maximum(a.log, b.log).detach()
    left, right = ((x.log - log).exp_().unsqueeze(3) for x in (a, b))
    return RowSums(log, torch.addcmul(a.sums * left, b.sums, right))
