"""Positive maps under a relative bias that is constant beyond a distance, all chunks at once.

    out_i = sum_j w_ij v_j / sum_j w_ij      w_ij = exp(b_{j-i}) phi(q_i) . phi(k_j)      (NPRF with RPE, Eq. 10)

A chunk of queries meets the keys of its own chunk and of those around it that the window reaches one by one, and all
others by their sums, times the factor of the tail. Bidirectional rows see every key, so that one largest log feature
serves all of them, and sums are plain ones. Causal rows are those of `positive`, whose small products take the factors
``exp(b_{j-i} - max b)``.

Beyond the window a causal bias may be a falling line, ``b = r - slope d``. Then the rows fade as they are (`rows`), and
r, which is constant beyond the window, takes the place of b.

Denominators are at least ``exp(min b - max b)``, so that entries of the table may differ by `SPREAD`, and none may be
-inf: such a bias, which can hide the largest key of a row, needs `pairs`, which computes rows again (`covers`). Where
the table cannot be read without waiting for a device, all rows of the head become NaN, where float32 shows it.

Memory beyond inputs and outputs, in numbers of mapped queries, U = B H L M: that of `attend`, and in a causal call
2 w / 64 U more for the chunks before a query's own. Samples go one after the other where all of them exceed `SEGMENT`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from kernelformer.attention.plain.layout import (
    CHUNK,
    by_distance,
    in_chunks,
    of_samples,
    readable_without_sync,
    recomputed,
    spans,
)
from kernelformer.attention.plain.positive import CausalRows, KeySums, PositiveMap
from kernelformer.attention.positive import EMPTY
from kernelformer.attention.relative.call import RelativeCall
from kernelformer.contract import PositiveSpec, compute_dtype, lookup

SPREAD = 60.0  # of a table: exp(-60) times a key that float32 can hold is a number
LEAST = 1e-30  # between the denominator of a row that sees a key and 0
OVERFLOW = 89.0 / SPREAD  # exp of more than 88.7 is inf in float32


def level(call: RelativeCall) -> tuple[Tensor, int]:
    """The bias without its slope within the window (H, n), all that any pair has, and the place of distance 0."""
    assert call.window is not None
    middle, table = call.layout.L - 1 + call.layout.offset, call.bias.to(compute_dtype(call.query.dtype))
    last = table.shape[1] - 1
    ends = [min(max(middle + side * call.window, 0), last) for side in (-1, 1)]
    ends[1] = middle if call.is_causal else ends[1]
    used = table[:, ends[0] : ends[1] + 1]
    if call.slope is not None:
        away = torch.arange(middle - ends[0], middle - ends[1] - 1, -1, dtype=used.dtype, device=used.device)
        used = torch.addcmul(used, call.slope.to(used.dtype).unsqueeze(1), away)
    return used, middle - ends[0]


def covers(call: RelativeCall) -> bool:
    """True if a call has a positive map, a window, a slope only if causal, and entries that are known to be close."""
    fades_both_ways = call.slope is not None and not call.is_causal
    if call.window is None or fades_both_ways or not isinstance(lookup(call.spec), PositiveSpec):
        return False
    if not readable_without_sync(call.bias):
        return True
    least, most = level(call)[0].detach().aminmax(dim=1)
    return float((most - least).max()) <= SPREAD  # False for inf, and for NaN, where all entries are -inf


class Factors:
    """``exp(b_{j-i} - max b)`` of places i and j, where b is without its slope.

    Args:
        call: whose bias it is.
        chunks_left: so many chunks before a query's own meet it one by one; without causality as many after it.
    """

    def __init__(self, call: RelativeCall, chunks_left: int) -> None:
        used, before = level(call)
        self.batch = call.query.shape[0]
        least, most = used.detach().aminmax(dim=1, keepdim=True)
        # NaN where entries differ by too much or are -inf: inf times 0.
        most = torch.add(most, ((most - least) * OVERFLOW).exp_(), alpha=0)
        self.factors = (used - most).exp()
        self.own = chunks_left * CHUNK  # the column of a chunk's first token
        columns = self.own + CHUNK + (0 if call.is_causal else self.own)
        first = before - self.own - CHUNK
        index = torch.arange(first, first + CHUNK + columns, device=used.device).clamp_(0, used.shape[1] - 1)
        self.tile = by_distance(self.factors.index_select(1, index), CHUNK, columns)  # (H, C, K)

    def weigh(self, scores: Tensor, rows: tuple[int, int], columns: tuple[int, int]) -> Tensor:
        """Scores (B H X, a, b) times the factors of places in a chunk, which are those of all X."""
        tile = self.tile[:, rows[0] : rows[1], self.own + columns[0] : self.own + columns[1]]
        heads = len(tile)
        by_head = scores.view(self.batch, heads, len(scores) // (self.batch * heads), *tile.shape[1:])
        return (by_head * tile.unsqueeze(1)).view(scores.shape)

    def add_tail(self, out: Tensor, far: Tensor, side: int) -> None:
        """Add what far keys before (-1) or after (1) a query give to (B H, n, X, Y), in place, with their factor."""
        tail, heads = self.factors[:, 0 if side < 0 else -1], len(self.factors)
        out.unflatten(0, (-1, heads)).addcmul_(far.unflatten(0, (-1, heads)), tail[:, None, None, None])


def plain_biased_attention(call: RelativeCall, *, streams: bool = False) -> tuple[Tensor, list[Tensor]]:
    """Attend; the call has a window, a slope only if it is causal, and sums of keys before it only if it streams.

    Args:
        call: the inputs.
        streams: whether the sums of all keys but the last, a window of them, are wanted.

    Returns:
        (B, H, L, E) in the dtype of the query, zero where no key is visible; and shift, kv, ks and ns, as
        `RelativeCall` has them.
    """
    _, heads, length, width = call.query.shape
    numbers = heads * max(length, call.key.shape[2]) * lookup(call.spec).feature_dim(call.tensors, width)
    learned = [call.query, call.key, call.value, call.bias, *call.tensors, *call.state]
    parts = [
        recomputed(partial(_attend, _samples(call, *span), streams), learned=learned)
        for span in spans(call.query, numbers, 1, axis=0)
    ]
    if len(parts) == 1:
        return parts[0][0], list(parts[0][1])
    return torch.cat([x for x, _ in parts]), [torch.cat(x) for x in zip(*(y for _, y in parts), strict=True)]


def _samples(call: RelativeCall, first: int, last: int) -> RelativeCall:
    """Some samples of a call."""
    query, key, value = (x[first:last] for x in (call.query, call.key, call.value))
    mask = None if call.key_mask is None else call.key_mask[first:last]
    tensors = of_samples(call.tensors, slice(first, last))
    state = [x[first:last] for x in call.state]
    return replace(call, query=query, key=key, value=value, key_mask=mask, tensors=tensors, state=state)


def _attend(call: RelativeCall, streams: bool) -> tuple[Tensor, list[Tensor]]:
    spec, window = lookup(call.spec), call.window
    assert isinstance(spec, PositiveSpec)
    assert window is not None
    phi, (query, key), value = PositiveMap(spec, call.tensors, call.scale, True), call.normalized(), call.value
    hidden = None if call.key_mask is None else ~call.key_mask[:, None, :, None]
    seen = call.layout.offset + query.shape[2]
    if call.is_causal:
        key, value, hidden = key[:, :, :seen], value[:, :, :seen], None if hidden is None else hidden[:, :, :seen]
    logs = phi.queries(query, query.shape[1]).squeeze(2)  # (N, L, M)
    keys = phi.keys(key, value, hidden)
    left = -(-max(0, window - 1) // CHUNK)  # chunks so far away have the tail's bias for all pairs
    factors, state = Factors(call, left), []
    if call.is_causal:
        before = _loaded(call, window)
        sums = _causal(logs, keys, before, factors, left, _slope(call))
        state = _after(call, keys, before, window) if streams else []
    else:
        sums = _bidirectional(logs, keys, factors, left)
    out = sums[..., :-1] / sums[..., -1:].clamp_min(LEAST)
    return out.view(*query.shape[:2], *out.shape[1:])[:, :, : query.shape[2]].to(call.query.dtype), state


def _slope(call: RelativeCall) -> Tensor | None:
    """Decrease of the log weights per token, (N, 1, 1); None means 0."""
    if call.slope is None:
        return None
    return call.slope.to(compute_dtype(call.query.dtype)).repeat(call.query.shape[0])[:, None, None]


def _loaded(call: RelativeCall, window: int) -> KeySums | None:
    """The sums before a call, relative to a query at its first key."""
    if not call.state:
        return None
    shift, kv, ks, _ = (x.to(compute_dtype(call.query.dtype)).flatten(0, 1) for x in call.state)
    top, slope = shift.detach().squeeze(1).clamp_min(EMPTY), _slope(call)
    if slope is not None:  # the state counts from the window of the first query
        top = top + slope.squeeze(2) * (call.layout.offset - window)
    return KeySums(top, torch.cat([kv, ks], 2))


def _after(call: RelativeCall, keys: tuple[Tensor, Tensor], before: KeySums | None, window: int) -> list[Tensor]:
    """The sums of all keys but the last, a window of them, for a query after the last one: shift, kv, ks and ns."""
    slope, count = _slope(call), keys[0].shape[1]
    first = max(0, count - window)
    logs, value = keys[0][:, :first], keys[1][:, :first]
    if slope is not None:
        logs = logs - slope * torch.arange(first, 0, -1, device=slope.device).unsqueeze(1)
        before = None if before is None else KeySums(before.top + slope.squeeze(2) * (window - count), before.sums)
    if first:
        end = PositiveMap.absorb((logs, value), before)
    elif before is None:
        end = KeySums(logs.new_full((len(logs), logs.shape[2]), EMPTY), value.new_zeros(len(logs), *_shape(keys)))
    else:
        end = before
    kv, ks = end.sums[..., :-1], end.sums[..., -1:]
    tensors = (end.top.unsqueeze(1), kv, ks, ks.new_zeros(len(ks), 1, 1))
    return [x.unflatten(0, call.query.shape[:2]) for x in tensors]


def _shape(keys: tuple[Tensor, Tensor]) -> tuple[int, int]:
    return keys[0].shape[2], keys[1].shape[2]


def _bidirectional(logs: Tensor, keys: tuple[Tensor, Tensor], factors: Factors, left: int) -> Tensor:
    """Sums (N, n C, E + 1) of rows that see all keys."""
    top = keys[0].detach().amax(1, keepdim=True).clamp_min(EMPTY)
    logs = logs + top
    rows = in_chunks((logs - logs.detach().amax(2, keepdim=True).clamp_min(EMPTY / 2)).exp_(), CHUNK)
    mapped, value = in_chunks((keys[0] - top).exp_(), CHUNK), in_chunks(keys[1], CHUNK)
    chunks, count = rows.shape[1], mapped.shape[1]
    sums = mapped.mT @ value
    before, after = F.pad(sums.cumsum(1), (0, 0, 0, 0, 1, 0)), F.pad(sums.flip(1).cumsum(1).flip(1), (0, 0, 0, 0, 0, 1))
    places = torch.arange(chunks, device=rows.device)
    reach, size = left * CHUNK, (2 * left + 1) * CHUNK
    ends = (0, 0, reach, max(0, chunks - count + left) * CHUNK)  # zeros: keys that add nothing
    near, near_value = (F.pad(x.flatten(1, 2), ends).unfold(1, size, CHUNK)[:, :chunks] for x in (mapped, value))
    scores = factors.weigh(torch.bmm(rows.flatten(0, 1), near.flatten(0, 1)), (0, CHUNK), (-reach, reach + CHUNK))
    out = torch.bmm(scores, near_value.flatten(0, 1).mT).view(*rows.shape[:3], -1)
    factors.add_tail(out, rows @ before.index_select(1, (places - left).clamp_(0, count)), -1)
    factors.add_tail(out, rows @ after.index_select(1, (places + left + 1).clamp_(0, count)), 1)
    return out.flatten(1, 2)


def _causal(
    logs: Tensor,
    keys: tuple[Tensor, Tensor],
    before: KeySums | None,
    factors: Factors,
    left: int,
    slope: Tensor | None,
) -> Tensor:
    """Sums (N, L, E + 1) of rows that see the keys up to their own; the last of each stand at the same place."""
    missing, offset = max(0, logs.shape[1] - keys[0].shape[1]), max(0, keys[0].shape[1] - logs.shape[1])
    keys = PositiveMap.padded(keys, 0, missing)  # queries beyond the last key
    if offset:  # keys before the first query: rows that nobody wants
        logs = F.pad(logs, (0, 0, offset, 0))
    rows = CausalRows(logs.unsqueeze(2), keys, before, CHUNK, slope)
    queries, (states, _), chunks = rows.relative(), rows.states(), rows.chunks
    lag = min(left, chunks)
    out = _near_chunks(rows, queries, factors, left)
    if lag < chunks:
        factors.add_tail(out[:, lag:], rows.read(queries, states, lag), -1)
    if lag and before is not None:
        factors.add_tail(out[:, :lag], rows.read_before(queries, lag), -1)
    return rows.by_token(rows.inside(out, queries, factors.weigh)).squeeze(2)[:, offset:]


def _near_chunks(rows: CausalRows, queries: Tensor, factors: Factors, left: int) -> Tensor:
    """Reads by queries of the keys of so many chunks before their own, (N, n, C, E + 1)."""
    size, edge = left * CHUNK, rows.edges[:, : rows.chunks].unsqueeze(2)
    if not left:
        return rows.value.new_zeros(*queries.shape[:3], rows.value.shape[3])
    near, value = (
        F.pad(x[:, :-1].flatten(1, 2), (0, 0, size, 0), value=fill).unfold(1, size, CHUNK)
        for x, fill in ((rows.keys, -torch.inf), (rows.value, 0.0))
    )
    if rows.fade is not None:  # keys count from the start of their own chunk
        chunks_away = torch.arange(left, 0, -1, device=edge.device).repeat_interleave(CHUNK)
        near = near - rows.fade.unsqueeze(3) * chunks_away
    mapped = (near - edge.mT).exp_().flatten(0, 1)
    scores = torch.bmm((queries.squeeze(3) + edge).exp_().flatten(0, 1), mapped)
    scores = factors.weigh(scores, (0, CHUNK), (-size, 0))
    return torch.bmm(scores, value.flatten(0, 1).mT).view(*queries.shape[:3], -1)
