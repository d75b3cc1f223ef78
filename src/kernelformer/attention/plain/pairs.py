"""A relative bias by pairs of queries and keys: tables, grids, slopes, signed maps, hidden distances.

    out_i = sum_j w_ij v_j / sum_j w_ij      w_ij = exp(b_{j-i}) phi(q_i) . phi(k_j)      (NPRF with RPE, Eq. 10)

Queries go in segments. A segment meets all keys, or with a window those that it reaches, pair by pair; the keys beyond
the window come as sums that fade with the slope (`RelativeCall.state` has their convention). Parts of a row are sums on
scales of their own (`RowSums`), merged at the largest.

A row of a signed map is relative to the largest exponent that it sees, ``f_j + b_{j-i}``, so that nothing it does not
see can dwarf it. A row of a positive map is relative to the largest features of its segment's keys: one that sees less
than `LOST` of that is done again, key by key in log space (`_exact_rows`). Such rows are rare; they cost O(S M) each.

Plain differentiable operations, each segment recomputed in the backward pass.

Cost: O(L S (M + E)) time without a window, O(L (w + T) (M + E) + L M E) with one, for segments of T tokens; memory of
one segment's pairs, and without a window of all mapped keys of some samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernelformer.attention.plain.layout import RowSums, by_distance, of_samples, recomputed
from kernelformer.attention.plain.positive import KeySums, PositiveMap
from kernelformer.attention.plain.signed import SignedKeys, SignedMap, SignedSums
from kernelformer.attention.positive import EMPTY, LOST
from kernelformer.attention.reference import GUARD
from kernelformer.attention.relative.call import Layout, RelativeCall, Span
from kernelformer.contract import PositiveSpec, compute_dtype, lookup

CHUNK = 256  # tokens of a segment of queries
PAIRS = 1 << 22  # numbers of a segment's pairs, from which on segments become shorter, and samples are taken apart
KEYS = 1024  # tokens that are taken into sums at once
TOGETHER = 16  # rows that are done again at once

Kept = KeySums | SignedSums


def pairs_of(layout: Layout, table: Tensor, rows: Span, columns: Span, zero: Tensor) -> Tensor:
    """Entries for the pairs of some queries and keys, (H, T, K).

    Args:
        layout: of the tokens; on a grid, rows and columns are prefix tokens or whole rows of it.
        table: (H, *layout.table), the bias or a function of it.
        rows: queries.
        columns: keys; on a grid from the first one.
        zero: (H, 1, 1), what the function makes of a bias of 0, which tokens before a grid have.
    """
    (a, b), (low, high), heads = rows, columns, table.shape[0]
    if not layout.rows:
        first = low - b + layout.L
        return by_distance(F.pad(table[:, first : first + b - a + high - low - 1], (1, 0)), b - a, high - low)
    prefix, size = layout.prefix, layout.cols
    before = zero.expand(heads, b - a, min(high, prefix))
    if a < prefix or high <= prefix:
        return zero.expand(heads, b - a, high)
    top, down, across = (a - prefix) // size, (b - a) // size, (high - prefix) // size
    first = layout.rows - top - down
    entries = table[:, first : first + down + across - 1].flatten(0, 1)  # of pairs of grid rows
    tiles = by_distance(F.pad(entries, (1, 0)), size, size).reshape(heads, -1, size * size)
    grid = by_distance(F.pad(tiles, (0, 0, 1, 0)), down, across).view(heads, down, across, size, size)
    inner = grid.transpose(2, 3).reshape(heads, down * size, across * size)
    return torch.cat([before, inner], 2) if prefix else inner


class BiasPairs:
    """A bias (H, *layout.table) and ``exp(b - peak)`` for pairs of segments."""

    def __init__(self, is_causal: bool, layout: Layout, table: Tensor) -> None:
        self.is_causal, self.layout = is_causal, layout
        self.logs = layout.hide_future(table) if is_causal else table
        flat = self.logs.detach().flatten(1)
        peak = flat.amax(1) if flat.shape[1] else flat.new_zeros(len(flat))
        peak = peak.clamp_min(0) if self.layout.prefix else peak
        self.peak = peak.masked_fill(peak == -torch.inf, 0).view(-1, 1, 1)
        self.factors = (self.logs - self.peak.view(-1, *[1] * (self.logs.dim() - 1))).exp()

    @staticmethod
    def of(call: RelativeCall) -> BiasPairs:
        """The factors of a call, in the dtype of the arithmetic."""
        return BiasPairs(call.is_causal, call.layout, call.bias.to(compute_dtype(call.query.dtype)))

    def log(self, rows: Span, columns: Span) -> Tensor:
        """b (H, T, K), -inf where hidden."""
        return self._tile(self.logs, rows, columns, torch.zeros_like(self.peak), -torch.inf)

    def factor(self, rows: Span, columns: Span) -> Tensor:
        """``exp(b - peak)`` (H, T, K)."""
        return self._tile(self.factors, rows, columns, (-self.peak).exp(), 0.0)

    def row(self, head: int, i: int) -> Tensor:
        """b of one query and all keys, (S)."""
        layout, first, last = self.layout, i, i + 1
        if layout.rows:
            first, last = (0, layout.prefix) if i < layout.prefix else (i - (i - layout.prefix) % layout.cols, 0)
            last = last or first + layout.cols
        return self.log((first, last), (0, layout.S))[head, i - first]

    def _tile(self, table: Tensor, rows: Span, columns: Span, zero: Tensor, hidden: float) -> Tensor:
        tile = pairs_of(self.layout, table, rows, columns, zero)
        if not (self.is_causal and rows[0] < self.layout.prefix):
            return tile
        i, j = (torch.arange(*x, device=table.device) for x in (rows, columns))
        return tile.masked_fill(j > i.unsqueeze(1), hidden)

    def band(self, rows: int, left: int, columns: int, log: bool) -> Tensor:
        """(H, rows, columns) between consecutive queries and keys, the first of which is ``left`` before the first.

        Entries of distances that no pair of the call has are any.
        """
        table = self.logs if log else self.factors
        first = self.layout.L - 1 + self.layout.offset - left - rows
        index = torch.arange(first, first + rows + columns, device=table.device)
        return by_distance(table[:, index.clamp_(0, max(0, table.shape[1] - 1))], rows, columns)


class Rows:
    """Some samples of a call: their map, and the sums of parts of their rows.

    Args:
        call: of these samples.
        bias: of the whole call.
    """

    def __init__(self, call: RelativeCall, bias: BiasPairs) -> None:
        self.call, self.bias, spec = call, bias, lookup(call.spec)
        self.heads, self.dtype = call.query.shape[1], compute_dtype(call.query.dtype)
        self.phi: PositiveMap | SignedMap
        if isinstance(spec, PositiveSpec):
            self.phi = PositiveMap(spec, call.tensors, call.scale, True)
        else:
            self.phi = SignedMap(spec, call.tensors, call.scale, True)  # type: ignore[arg-type]
        self.slope = None if call.slope is None else self.by_head(call.slope.to(self.dtype))  # (N, 1, 1)
        self.window = call.window or 0
        self.is_signed = isinstance(self.phi, SignedMap)

    def by_head(self, x: Tensor) -> Tensor:
        """A number per head (H) for every row, (N, 1, 1)."""
        return x.repeat(self.call.query.shape[0]).view(-1, 1, 1)

    def queries(self, query: Tensor) -> Any:
        """Mapped queries (B, H, T, D)."""
        return self.phi.queries(query, self.heads)

    def keys(self, key: Tensor, value: Tensor, hidden: Tensor | None) -> Any:
        """Mapped keys; those of signed maps with their log factors, 0 where the map has none."""
        keys: Any = self.phi.keys(key, value, None if hidden is None else hidden[:, None, :, None])
        return keys if isinstance(self.phi, PositiveMap) else keys._replace(factor=keys.factors())

    def near(self, queries: Any, keys: Any, factors: Tensor) -> RowSums:
        """Reads by queries of keys one by one; ``factors`` (H, T, K) are those of a positive map, or b."""
        if isinstance(self.phi, PositiveMap):
            (logs, value), queries = keys, queries.squeeze(2)
            top = logs.detach().amax(1, keepdim=True).clamp_min(EMPTY)
            queries = queries + top
            scale = queries.detach().amax(2, keepdim=True).clamp_min(EMPTY / 2)
            weights = torch.bmm((queries - scale).exp_(), (logs - top).exp_().mT).unflatten(0, (-1, self.heads))
            weights = weights * factors if torch.is_grad_enabled() else weights.mul_(factors)
            scale = (scale.unflatten(0, (-1, self.heads)) + self.bias.peak.unsqueeze(0)).flatten(0, 1)
            return RowSums(scale, torch.bmm(weights.flatten(0, 1), value).unsqueeze(2))
        logs = keys.factor.mT.unflatten(0, (-1, self.heads)) + factors
        scale = logs.detach().amax(3, keepdim=True).clamp_min(EMPTY)
        shares, scale = logs.sub_(scale).exp_().flatten(0, 1), scale.flatten(0, 1)
        weights = torch.bmm(queries.phi.squeeze(2), keys.phi.mT)
        weights = weights * shares if torch.is_grad_enabled() else weights.mul_(shares)
        guard = None
        if keys.length is not None:
            guard = self.phi.lengths(queries.phi) * torch.bmm(shares, keys.length).unsqueeze(2)
        return RowSums(scale, torch.bmm(weights, keys.value).unsqueeze(2), guard)

    def far(self, queries: Any, kept: Kept, first: int, step: int, tail: Tensor) -> RowSums:
        """Reads of sums by queries, the first of them ``first`` tokens away and the others ``step`` more each."""
        part, log = self.phi.read(queries, kept), tail.clamp_min(EMPTY)  # type: ignore[arg-type]
        if self.slope is not None:
            away = torch.arange(part.sums.shape[1], device=tail.device) * step + first
            log = log - self.slope * away.view(1, -1, 1)
        # Sums over no keys stay below everything.
        top = part.log if isinstance(self.phi, PositiveMap) else kept.top.unsqueeze(1).expand(-1, part.log.shape[1], -1)
        return part._replace(log=(top + log).clamp_min(EMPTY))

    def tail(self, side: int) -> Tensor:
        """The bias at the window before (-1) or after (1) a query, (N, 1, 1)."""
        table, layout = self.bias.logs, self.call.layout
        entry = min(max(layout.L - 1 + layout.offset + side * self.window, 0), table.shape[1] - 1)
        return self.by_head(table[:, entry])

    def absorb(self, keys: Any, kept: Kept, distance: Tensor) -> Kept:
        """Sums with keys at these distances (K) from where the sums are read."""
        if self.slope is not None:
            fade = self.slope * (distance - self.window).view(1, -1, 1)
            if isinstance(self.phi, PositiveMap):
                keys = (keys[0] - fade, keys[1])
            else:
                keys = keys._replace(factor=keys.factor - fade)
        sums: Kept = self.phi.absorb(keys, kept)  # type: ignore[arg-type]
        return sums

    def moved(self, kept: Kept, tokens: int) -> Kept:
        """Sums as they are read so many tokens farther away."""
        if self.slope is None or not tokens:
            return kept
        return kept._replace(top=(kept.top - self.slope.squeeze(2) * tokens).clamp_min(EMPTY))

    def load(self, state: Sequence[Tensor]) -> Kept:
        """Sums from shift, kv, ks and ns (B, H, ...), or of no keys from none."""
        call = self.call
        width, rows = call.value.shape[3], call.query.shape[0] * self.heads
        positive = isinstance(self.phi, PositiveMap)
        if not state:
            features = lookup(call.spec).feature_dim(call.tensors, call.query.shape[3])
            like = call.query.new_empty(0, dtype=self.dtype)
            sums = like.new_zeros(rows, features + int(not positive and self._guarded), width + 1)
            top = like.new_full((rows, features if positive else 1), EMPTY)
        else:
            shift, kv, ks, ns = (x.flatten(0, 1).to(self.dtype) for x in state)
            top, sums = shift.detach().squeeze(1).clamp_min(EMPTY), torch.cat([kv, ks], 2)
            if not positive and self._guarded:
                sums = torch.cat([sums, F.pad(ns, (width, 0))], 1)
        return KeySums(top, sums) if positive else SignedSums(top, sums)

    @property
    def _guarded(self) -> bool:
        return isinstance(self.phi, SignedMap) and self.phi.guard

    def store(self, kept: Kept) -> list[Tensor]:
        """The inverse of `load`."""
        sums, width = kept.sums, self.call.value.shape[3]
        ns = sums.new_zeros(len(sums), 1, 1)
        if self._guarded:
            sums, ns = sums[:, :-1], sums[:, -1:, width:]
        tensors = (kept.top.unsqueeze(1), sums[..., :width], sums[..., width:], ns)
        return [x.unflatten(0, (-1, self.heads)) for x in tensors]

    def finish(self, parts: Sequence[RowSums], sees_some: Callable[[], Tensor]) -> tuple[Tensor, Tensor | None]:
        """Outputs (B, H, T, E) of merged parts, and which rows a positive map has lost (B, H, T); None: none.

        Args:
            parts: of the rows.
            sees_some: returns which rows see any key: where there is none, zero is the answer.
        """
        log = parts[0].log.detach()
        for part in parts[1:]:
            log = torch.maximum(log, part.log.detach())
        log, sums, guard = log.clamp_min(EMPTY / 2), None, None
        for part in parts:
            share = (part.log - log).exp().unsqueeze(3)
            sums = part.sums * share if sums is None else torch.addcmul(sums, part.sums, share)
            if part.guard is not None:
                guard = part.guard * share if guard is None else torch.addcmul(guard, part.guard, share)
        assert sums is not None
        num, den = sums[..., :-1], sums[..., -1:]
        den = den if guard is None else torch.maximum(den, GUARD * guard)
        lost = den < LOST if isinstance(self.phi, PositiveMap) else den <= torch.finfo(den.dtype).tiny
        out = (num / torch.where(lost, 1.0, den)).masked_fill(lost, 0)
        out = out.squeeze(2).unflatten(0, (-1, self.heads))
        if self.is_signed or lost.is_meta or not bool(lost.any()):
            return out, None
        lost = lost.flatten(1).unflatten(0, (-1, self.heads)) & sees_some()
        return out, lost if bool(lost.any()) else None


def pairs_attention(call: RelativeCall, *, keep: int | None = None) -> tuple[Tensor, list[Tensor]]:
    """Attend with a relative bias.

    Args:
        call: the inputs.
        keep: also return the sums of the state and of all keys but the last ``keep``.

    Returns:
        (B, H, L, E) in the dtype of the query, zero where no key is visible; and the sums (B, H, ...), or [].
    """
    inner = prepared(call)
    bias = BiasPairs.of(inner)
    outs, ends = [], []
    for block in _blocks(inner):
        out, end = _attend(Rows(block, bias), keep)
        outs.append(out)
        ends.append(end)
    if not outs:  # of no samples
        rows = Rows(inner, bias)
        return _nothing(inner).to(call.query.dtype), [] if keep is None else rows.store(rows.load(inner.state))
    joined = [torch.cat(x) if len(x) > 1 else x[0] for x in zip(*ends, strict=True)]
    return (torch.cat(outs) if len(outs) > 1 else outs[0]).to(call.query.dtype), joined


def prepared(call: RelativeCall) -> RelativeCall:
    """The call in the dtype of the arithmetic, hidden keys 0 and norms divided by."""
    query, key, value = (x.to(compute_dtype(call.query.dtype)) for x in (call.query, call.key, call.value))
    if call.key_mask is not None:  # what is hidden may hold anything, NaN too
        gone = ~call.key_mask[:, None, :, None]
        key, value = key.masked_fill(gone, 0), value.masked_fill(gone, 0)
    call = replace(call, query=query, key=key, value=value)
    query, key = call.normalized()
    return replace(call, query=query, key=key, normalize_qk=False)


def _blocks(call: RelativeCall) -> Iterator[RelativeCall]:
    """So many samples at once that pairs and mapped keys of a segment fill `PAIRS`."""
    batch, heads, _, width = call.query.shape
    length = max(1, call.key.shape[2])
    features = lookup(call.spec).feature_dim(call.tensors, width)
    step = max(1, PAIRS // (heads * length * max(features, CHUNK)))
    if step >= batch > 0:
        yield call
        return
    splits = [x.split(step) for x in (call.query, call.key, call.value)]
    for start, query, key, value in zip(range(0, batch, step), *splits, strict=False):
        block = slice(start, start + step)
        yield replace(
            call,
            query=query,
            key=key,
            value=value,
            key_mask=None if call.key_mask is None else call.key_mask[block],
            tensors=of_samples(call.tensors, block),
            state=[x[block] for x in call.state],
            right_state=[x[block] for x in call.right_state],
        )


def _attend(rows: Rows, keep: int | None) -> tuple[Tensor, list[Tensor]]:
    """Attend to the keys of some samples."""
    call = rows.call
    layout, has_sums = call.layout, bool(call.state or call.right_state)
    end = [] if keep is None else end_sums(rows, keep)
    if not layout.L or not (layout.S or has_sums):
        return _nothing(call), end
    if has_sums or (call.window is not None and call.window < max(layout.L + layout.offset, layout.S)):
        parts, spans = _windowed(rows)
    else:
        parts, spans = _whole(rows)
    out = torch.cat([x for x, _ in parts], 2) if len(parts) > 1 else parts[0][0]
    if any(x is not None for _, x in parts):
        lost = torch.zeros(out.shape[:3], dtype=torch.bool, device=out.device)
        for (a, b), (_, x) in zip(spans, parts, strict=True):
            if x is not None:
                lost[:, :, a:b] = x
        out = with_exact_rows(rows, out, lost)
    return out, end


def _nothing(call: RelativeCall) -> Tensor:
    """Zeros, with gradients of 0 to everything."""
    out = call.query.new_zeros(*call.query.shape[:3], call.value.shape[3])
    for x in (call.query, call.key, call.value, call.bias, *call.tensors):
        out = out + x.flatten()[:0].sum()
    return out


Parts = tuple[list[tuple[Tensor, Tensor | None]], list[Span]]


def segments(layout: Layout, step: int) -> list[Span]:
    """Queries of each segment; on a grid whole rows of it."""
    head = []
    if layout.rows:
        step = max(1, step // layout.cols) * layout.cols
        head = [(0, layout.prefix)] if layout.prefix else []
    return head + [(a, min(a + step, layout.L)) for a in range(layout.prefix, layout.L, step)]


def _whole(rows: Rows) -> Parts:
    """All keys that are visible, pair by pair."""
    call, layout = rows.call, rows.call.layout
    hidden = None if call.key_mask is None else ~call.key_mask
    keys = recomputed(rows.keys, call.key, call.value, hidden, learned=call.tensors)
    most = PAIRS // (call.query.shape[0] * rows.heads * max(1, layout.S))
    spans = segments(layout, min(CHUNK, max(64, most)))
    learned, parts = [*call.tensors, rows.bias.logs], []
    for (a, b), query in zip(spans, call.query.split([b - a for a, b in spans], 2), strict=True):
        high = layout.S if not call.is_causal else min(layout.S, max(1, layout.offset + b))
        seen = tuple(None if x is None else x[:, :high] for x in keys)
        part = recomputed(partial(_whole_segment, rows, (a, b), high), query, *seen, learned=learned)
        parts.append(rows.finish([part], partial(_sees_whole, rows, (a, b), high)))
    return parts, spans


def _whole_segment(rows: Rows, span: Span, high: int, query: Tensor, *keys: Any) -> RowSums:
    # The last product is not recomputed: nothing after it is saved.
    tile = (rows.bias.log if rows.is_signed else rows.bias.factor)(span, (0, high))
    return rows.near(rows.queries(query), SignedKeys(*keys) if rows.is_signed else keys, tile)


def _sees_whole(rows: Rows, span: Span, high: int) -> Tensor:
    mask = rows.call.key_mask
    return _sees_some(rows.bias.log(span, (0, high)) > -torch.inf, None if mask is None else ~mask[:, :high])


def _sees_some(tile: Tensor, hidden: Tensor | None) -> Tensor:
    """Mask of the rows that see a key, (B or 1, H, T), by a tile (H, T, K) bool and hidden keys (B, K)."""
    if hidden is None:
        return tile.any(2).unsqueeze(0)
    return (tile.float() @ (~hidden).float()[:, None, :, None]).squeeze(3) > 0


def _windowed(rows: Rows) -> Parts:
    """Keys within the window pair by pair, in blocks as long as a segment, and all others by sums.

    Segment s meets the blocks s - ``left`` to s + ``right``; those before and after them are in the sums.
    """
    call, layout, reach = rows.call, rows.call.layout, max(rows.window, 1)
    size = min(layout.L, CHUNK, max(CHUNK // 2, -(-reach * 4 // CHUNK) * CHUNK // 4))
    count = -(-layout.L // size)
    left = -(-(min(reach, layout.offset + layout.L) - 1) // size)
    right = 0 if call.is_causal else -(-(min(reach, max(1, layout.S - layout.offset)) - 1) // size)
    first, last = layout.offset - left * size, layout.offset + (count + right) * size
    blocks = _cut(call, first, last, size)
    learned, tile = (
        [*call.tensors, rows.bias.logs],
        rows.bias.band(size, left * size, (left + 1 + right) * size, rows.is_signed),
    )
    queries = call.query.split(size, 2)
    rights: dict[int, RowSums] = {}
    if not call.is_causal:
        kept = rows.moved(rows.load(call.right_state), layout.L - count * size)
        kept = _absorb_range(rows, kept, last, layout.S, last - right * size - 1)
        away = right * size + 1 + torch.arange(size, device=call.query.device)
        by_right = partial(_right_part, rows, (size - 1, -1), away)
        for s in reversed(range(count)):
            given = queries[s], kept, *blocks[s + left + right]
            rights[s], kept = recomputed(by_right, *given, learned=learned)
    kept = _absorb_range(rows, rows.load(call.state), 0, first, layout.offset)
    parts = []
    for s in range(count):
        around = [x for block in blocks[s : s + left + 1 + right] for x in block]
        function = partial(_window_segment, rows, left, size)
        part, far, kept = recomputed(function, queries[s], kept, tile, *around, learned=learned)
        known = [far, rights[s]] if rights else [far]
        parts.append(rows.finish([part, *known], partial(_sees_near, rows, left, size, around, known)))
    return parts, [(s * size, min((s + 1) * size, layout.L)) for s in range(count)]


Block = tuple[Tensor, Tensor, Tensor | None]  # keys (B, H, T, D), values (B, H, T, E), which are hidden (B, T)


def _cut(call: RelativeCall, first: int, last: int, size: int) -> list[Block]:
    """Keys first to last in blocks; those outside of the sequence are hidden."""
    count, (low, high) = call.key.shape[2], (max(first, 0), min(last, call.key.shape[2]))
    ends = (max(0, low - first), max(0, last - max(high, low)))
    low = min(low, count)
    pair = [F.pad(x[:, :, low:high], (0, 0, *ends)).split(size, 2) for x in (call.key, call.value)]
    hidden: list[Tensor | None] = [None] * len(pair[0])
    if call.key_mask is not None or any(ends):
        mask = call.key.new_ones(call.key.shape[0], count, dtype=torch.bool) if call.key_mask is None else call.key_mask
        marks = F.pad(~mask[:, low:high], ends, value=True).split(size, 1)
        known = call.key_mask is None
        hidden = [
            None if known and first + i * size >= 0 and first + (i + 1) * size <= count else x
            for i, x in enumerate(marks)
        ]
    return list(zip(*pair, hidden, strict=True))


def _absorb_range(rows: Rows, kept: Kept, first: int, last: int, place: int) -> Kept:
    """Sums with the keys first to last, which are read at a place."""
    call = rows.call
    first, last = max(first, 0), min(last, call.key.shape[2])
    for start in range(first, last, KEYS):
        at = slice(start, min(start + KEYS, last))
        distance = (torch.arange(at.start, at.stop, device=call.key.device) - place).abs()
        hidden = None if call.key_mask is None else ~call.key_mask[:, at]
        given = call.key[:, :, at], call.value[:, :, at], hidden
        kept = recomputed(partial(_absorb, rows, distance), kept, *given, learned=call.tensors)
    return kept


def _absorb(rows: Rows, distance: Tensor, kept: Kept, *block: Any) -> Kept:
    return rows.absorb(rows.keys(*block), kept, distance)


def _right_part(
    rows: Rows, steps: tuple[int, int], away: Tensor, query: Tensor, kept: Kept, *block: Any
) -> tuple[RowSums, Kept]:
    """Reads by a segment of the sums on its right, and the sums for the segment before it."""
    part = rows.far(rows.queries(query), kept, *steps, rows.tail(1))
    return part, rows.absorb(rows.keys(*block), rows.moved(kept, len(away)), away)


def _window_segment(
    rows: Rows, left: int, size: int, query: Tensor, kept: Kept, tile: Tensor, *around: Any
) -> tuple[RowSums, RowSums, Kept]:
    """Reads by a segment of near keys and of the sums on its left, and the sums on the left of the next."""
    queries, (key, value) = rows.queries(query), (torch.cat(around[i::3], 2) for i in range(2))
    keys = rows.keys(key, value, _hidden(around))
    away = torch.arange((left + 1) * size, left * size, -1, device=query.device)
    gone: list[Any] = [None if x is None else x[:, :size] for x in keys]
    after = rows.absorb(SignedKeys(*gone) if rows.is_signed else gone, rows.moved(kept, size), away)
    far = rows.far(queries, kept, 0, 1, rows.tail(-1))
    return rows.near(queries, keys, tile[:, : query.shape[2]]), far, after


def _hidden(around: Sequence[Any]) -> Tensor | None:
    """Mask of the hidden keys of some blocks, (B, K)."""
    if all(x is None for x in around[2::3]):
        return None
    shown = [x.new_zeros(x.shape[0], x.shape[2], dtype=torch.bool) for x in around[::3]]
    return torch.cat([y if x is None else x for x, y in zip(around[2::3], shown, strict=True)], 1)


def _sees_near(rows: Rows, left: int, size: int, around: Sequence[Any], far: Sequence[RowSums]) -> Tensor:
    # By the bias, not by its factors, which underflow where entries differ by much.
    tile = rows.bias.band(size, left * size, sum(x.shape[2] for x in around[::3]), True)
    seen = _sees_some(tile > -torch.inf, _hidden(around))[:, :, : far[0].sums.shape[1]]
    for side, part in zip((-1, 1), far, strict=False):
        some = (part.sums[..., -1] > 0) & (rows.tail(side) > -torch.inf)
        seen = seen | some.flatten(1).unflatten(0, (-1, rows.heads))
    return seen


def end_sums(rows: Rows, keep: int) -> list[Tensor]:
    """The sums of the state and of all keys but the last ``keep``, for a query right after the last key."""
    count = rows.call.key.shape[2]
    kept = rows.moved(rows.load(rows.call.state), count - rows.call.layout.offset)
    return rows.store(_absorb_range(rows, kept, 0, count - keep, count))


def with_exact_rows(rows: Rows, out: Tensor, lost: Tensor) -> Tensor:
    """Outputs (B, H, L, E) with those of lost rows (B, H, L) done again."""
    call, results = rows.call, []
    states = [*call.state, *call.right_state]
    at = lost.nonzero()
    for (sample, head, _), group in _groups(at):
        bias = torch.stack([rows.bias.row(head, i) for i in group.tolist()])
        learned = [call.query, call.key, call.value, bias, *call.tensors, *states]
        results.append(recomputed(partial(exact_rows, rows, sample, head, group, bias), learned=learned))
    return out.index_put(at.unbind(1), torch.cat(results).to(out.dtype))


def _groups(places: Tensor) -> Iterator[tuple[list[int], Tensor]]:
    """Places (n, 3) of samples, heads and queries, in order: some of one sample and head each time."""
    _, counts = places[:, :2].unique_consecutive(dim=0, return_counts=True)
    for own in places.split(counts.tolist()):
        for group in own.split(TOGETHER):
            yield group[0].tolist(), group[:, 2]


def exact_rows(rows: Rows, sample: int, head: int, index: Tensor, bias: Tensor) -> Tensor:
    """Outputs (l, E) of some queries of one head from all keys, and from the states feature by feature.

    log w_ij = log sum_m exp(l_m(q_i) + l_m(k_j)) + b_{j-i}
    """
    call, spec = rows.call, lookup(rows.call.spec)
    assert isinstance(spec, PositiveSpec)
    own = [x[min(sample, len(x) - 1), min(head, x.shape[1] - 1)][None, None] for x in call.tensors]
    query, key = call.query[sample, head, index][None, None], call.key[sample, head][None, None]
    lq = spec.log_shares(query, own, call.scale, "query")[0, 0]
    lk = spec.log_shares(key, own, call.scale, "key")[0, 0]
    logits, values = [(lq.unsqueeze(1) + lk).logsumexp(2) + bias], [call.value[sample, head]]
    if call.key_mask is not None:
        logits[0] = logits[0].masked_fill(~call.key_mask[sample], -torch.inf)
    for side, state in ((-1, call.state), (1, call.right_state)):
        if not state:
            continue
        shift, kv, ks = (x[sample, head].to(rows.dtype) for x in state[:3])
        log = rows.tail(side)[head].squeeze(0)
        if rows.slope is not None:
            away = index if side < 0 else call.layout.L - 1 - index
            log = log - rows.slope[head] * away.unsqueeze(1)
        some = (ks > 0) & (shift.mT > EMPTY / 2)
        mass = torch.where(some, ks, 1.0)
        logits.append((lq + shift.detach() + log + mass.log().mT).masked_fill(~some.mT, -torch.inf))
        values.append(torch.where(some, kv, 0.0) / mass)
    return torch.cat(logits, 1).softmax(1) @ torch.cat(values)
