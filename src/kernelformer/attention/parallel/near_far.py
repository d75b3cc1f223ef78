"""Near exactly, far by a positive map, in one normalization, all chunks at once.

    out_i = ( sum_near e^(s_ij) v_j + e^(beta + tail) sum_far phi(q_i) . phi(k_j) v_j ) / ( the same sums with v = 1 )

The same function as `near_far.near_far_attention`. The far part is that of `positive`, with keys that come a window
later, and its mirror image where keys after the query count too. Every part knows the logarithm of its largest weight;
the sums of all parts are taken relative to the largest of these, so that the denominator is at least 1.

Memory beyond inputs and outputs: as causal attention (`attend`), with the scores of the near part (`near`) beside it,
and for the mirror image E + 2 numbers a query.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernelformer.attention.near import NearBias
from kernelformer.attention.near_far import near_far_attention
from kernelformer.attention.near_far_call import NearFarCall
from kernelformer.attention.parallel.attend import by_head, has_numbers, join_segments
from kernelformer.attention.parallel.layout import RowSums, causal_chunk, of_samples, recomputed, sample_blocks, spans
from kernelformer.attention.parallel.near import NearRows, near_numbers
from kernelformer.attention.parallel.positive import LEAST, PositiveMap
from kernelformer.attention.parallel.rows import CausalRows, KeySums
from kernelformer.attention.positive import EMPTY
from kernelformer.contract import PositiveSpec, compute_dtype, lookup


class _Run(NamedTuple):
    """One call, its map if it has a far part, tokens of a chunk, and how many sinks are its first keys."""

    call: NearFarCall
    phi: PositiveMap | None
    size: int
    leading: int


def parallel_near_far_attention(
    call: NearFarCall, *, leading: int = 0, streams: bool = True
) -> tuple[Tensor, list[Tensor]]:
    """Attend; call and results as those of `near_far.near_far_attention`.

    The map is positive, weights are not dropped, and a bias has no slope.

    Args:
        call: the inputs.
        leading: number of sinks that are known to be the first keys of the call and visible; they may be in its
            ``far_mask``.
        streams: whether the sums after the last key are wanted.
    """
    if not has_numbers(call.query, call.key, call.value):
        return near_far_attention(call)
    batch, heads, length, _ = call.query.shape
    numbers = heads * max(call.features, near_numbers(call))
    blocks = sample_blocks(batch, length, numbers)
    if len(blocks) > 1:
        parts = [parallel_near_far_attention(_samples(call, b), leading=leading, streams=streams) for b in blocks]
        return torch.cat([x for x, _ in parts]), [torch.cat(x) for x in zip(*(y for _, y in parts), strict=True)]
    phi = None
    if call.spec:
        spec = lookup(call.spec)
        assert isinstance(spec, PositiveSpec)
        phi = PositiveMap(spec, call.tensors, call.far_scale, True, parts=True)
    run = _Run(call, phi, causal_chunk(length), leading)
    segments = list(spans(length, batch * numbers, run.size))
    learned = _tensors(call)
    rights: dict[tuple[int, int], RowSums] = {}
    kept = None
    for segment in reversed(segments) if phi is not None and not call.is_causal else ():
        rights[segment], kept = recomputed(partial(_right, run, segment), kept, learned=learned)
    kept = phi.load(call.state) if phi is not None and call.state else None
    outs = []
    for segment in segments:
        out, kept = recomputed(partial(_attend, run, segment), rights.get(segment), kept, learned=learned)
        outs.append(out)
    end = phi.store(kept, call.key.shape[1]) if phi is not None and kept is not None and streams else []
    return join_segments(outs), end


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
        key_mask=key_mask,
        far_mask=far_mask,
    )


def _tensors(call: NearFarCall) -> list[Tensor]:
    """All that may have a gradient."""
    single = [call.query, call.key, call.value] + ([] if call.beta is None else [call.beta])
    return [*single, *call.sinks, *call.bias, *call.tensors]


def _attend(
    run: _Run, segment: tuple[int, int], right: RowSums | None, kept: KeySums | None
) -> tuple[Tensor, KeySums | None]:
    """Outputs (B, H, T, E) of some queries, and the sums of the far keys on their left."""
    near = NearRows(run.call, *segment, run.leading)
    log, factor = near.log, None
    if run.phi is not None:
        far, factor = _far(run, segment, kept, mirror=False), _far_log(run.call, mirror=False)
        own = far.log if factor is None else far.log + factor.detach()
        log = torch.maximum(log, own)
    if right is not None:
        log = torch.maximum(log, right.log.detach())
    sums = near.sums(log)
    if run.phi is not None:
        added, kept = far.sums(log if factor is None else log - factor)
        sums = sums + added
    if right is not None:
        sums = torch.addcmul(sums, right.sums, (right.log - log).exp_().unsqueeze(3))
    return by_head(sums[..., :-1] / sums[..., -1:].clamp_min(LEAST), run.call.query[:, :, slice(*segment)]), kept


def _right(run: _Run, segment: tuple[int, int], kept: KeySums | None) -> tuple[RowSums, KeySums]:
    """What some queries get from far keys after them, and the sums of these, from the last segment to the first."""
    rows, factor = _far(run, segment, kept, mirror=True), _far_log(run.call, mirror=True)
    sums, after = rows.sums()
    log = rows.log.flip(1)
    return RowSums(log if factor is None else log + factor, sums.flip(1)), after


def _far(run: _Run, segment: tuple[int, int], kept: KeySums | None, mirror: bool) -> CausalRows:
    """Some queries with the far keys on one side; mirrored, both come from the end."""
    (call, phi, size, _), (start, end) = run, segment
    assert phi is not None
    shift = call.offset + max(call.window, 1) if mirror else call.offset - call.window
    if mirror and end == call.query.shape[2]:  # keys that every query sees come before the first
        kept = _beyond(run, end + shift, call.key.shape[2], kept)
    elif not mirror and start == 0:
        kept = _beyond(run, 0, shift, kept)
    logs, keys = phi.queries(call.query[:, :, start:end], call.key.shape[1]), _keys(run, start + shift, end + shift)
    if mirror:
        logs, keys = logs.flip(1), (keys[0].flip(1), keys[1].flip(1))
    return CausalRows(logs, keys, kept, size)


def _keys(run: _Run, low: int, high: int) -> tuple[Tensor, Tensor]:
    """Mapped far keys low to high and their values, (N, n, ...): nothing where there are none, and for sinks."""
    call, phi = run.call, run.phi
    assert phi is not None
    first = min(max(low, run.leading), call.key.shape[2])
    last = max(first, min(high, call.key.shape[2]))
    hidden = None if call.far_mask is None else ~call.far_mask[:, None, first:last, None]
    logs, value = phi.keys(call.key[:, :, first:last], call.value[:, :, first:last], hidden)
    before = min(max(first - low, 0), high - low)
    ends = (0, 0, before, high - low - before - (last - first))
    if any(ends):
        logs, value = F.pad(logs, ends, value=-torch.inf), F.pad(value, ends)
    return logs, value


def _beyond(run: _Run, low: int, high: int, kept: KeySums | None) -> KeySums | None:
    """Sums with the keys low to high, if there are any."""
    low, high = max(low, 0), min(high, run.call.key.shape[2])
    if low >= high or run.phi is None:
        return kept
    return run.phi.absorb(_keys(run, low, high), kept)


def _far_log(call: NearFarCall, mirror: bool) -> Tensor | None:
    """The logarithm of a factor of the far part, (N, 1, R); None means 0."""
    parts = [] if call.beta is None else [call.beta]
    if call.bias:
        parts.append(NearBias(*call.bias).tails[int(mirror)].clamp_min(EMPTY))
    if not parts:
        return None
    dtype = compute_dtype(call.query.dtype)
    log = parts[0].to(dtype) if len(parts) == 1 else parts[0].to(dtype) + parts[1].to(dtype)
    return log.view(call.key.shape[1], 1, -1).repeat(call.query.shape[0], 1, 1)
