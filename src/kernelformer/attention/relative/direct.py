"""The backward pass of `direct`, for one block of samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernelformer.attention.blocks import gather_grads, visible_pair
from kernelformer.attention.positive import EMPTY, LOST
from kernelformer.attention.reference import GUARD
from kernelformer.attention.relative.banded import Banded, BandedBackward
from kernelformer.attention.relative.call import (
    CHUNK,
    NO_WINDOW,
    NUM_SETTINGS,
    NUM_TENSORS,
    SETTINGS,
    TENSORS,
    RelativeCall,
    Span,
    flatten,
    unflatten,
)
from kernelformer.attention.relative.rescue import AGAIN, RowGrads, rescue, rescue_backward
from kernelformer.attention.relative.tiles import Block, Keys, Queries, Rows, Scan, TiledCall
from kernelformer.contract import compute_dtype, lookup, no_tangents

HELD = 1 << 23  # numbers of sums that are kept while their chunks wait: 32 MiB in float32


@dataclass
class Chunk:
    """Some queries with what they have summed up so far."""

    block: Block
    span: Span
    queries: Queries
    top: Tensor  # (N, 1 or C, M or 1): no shift of what the chunk meets exceeds it
    base: Tensor  # (N, C, M): ``left`` for what is in units of exp(top)
    row_scale: Tensor  # (N, C, 1): log of what the rows are divided by
    rows: Rows

    @staticmethod
    def of(block: Block, span: Span, shifts: Sequence[Tensor]) -> Chunk:
        """Map the queries of a span, which will meet tiles and sums of these shifts."""
        queries, rows, top = block.queries(span), block.empty_rows(span), _largest(shifts, block)
        return Chunk(block, span, queries, top, *block.tiles.base(queries, top), rows)

    def add_sums(self, scan: Scan) -> None:
        """Add what running sums of keys give."""
        left, tilt = scan.left(self.base, self.top, self.span)
        self.rows.num.baddbmm_(left, scan.sums.kv)
        self.rows.den.add_(left.mul_(scan.sums.ks.transpose(1, 2)).sum(2, keepdim=True))
        if self.rows.ns is not None:
            self.rows.ns.addcmul_((scan.sums.shift + tilt - self.row_scale).exp_(), scan.sums.ns)

    def add_tiles(self, tiles: Sequence[Keys]) -> None:
        """Add what some adjacent tiles give; several are put side by side, so that fewer and larger products do."""
        block, base, rows = self.block, self.base, self.rows
        call, take = block.call, block.call.work.take
        key = (tiles[0].span[0], tiles[-1].span[1])
        size = (base.shape[0], base.shape[1], key[1] - key[0])
        if len(tiles) == 1:
            tile = tiles[0]
            weights = torch.bmm(block.tiles.at(base, tile.shift, self.top), tile.phi, out=take("weights", *size))
            v = tile.v
        else:
            phi = take("phi", base.shape[0], base.shape[2], size[2])
            for tile in tiles:
                at = slice(tile.span[0] - key[0], tile.span[1] - key[0])
                torch.mul(tile.phi, (tile.shift - self.top).exp_().transpose(1, 2), out=phi[:, :, at])
            weights = torch.bmm(base, phi, out=take("weights", *size))
            v = block.rows(call.value, key) if call.key_mask is None else torch.cat([x.v for x in tiles], 1)
        call.bias.weigh(weights, self.span, key)
        rows.num.baddbmm_(weights, v)
        rows.den.add_(weights.sum(2, keepdim=True))
        if rows.ns is not None:
            for tile in tiles:
                assert tile.norms is not None
                lengths = call.bias.row_sums(tile.norms, self.span, tile.span)
                rows.ns.addcmul_((tile.shift - self.row_scale).exp_(), lengths)

    def finish(self) -> tuple[Tensor, Tensor, Tensor]:
        """Outputs (N, C, E), 1 / denominator (N, C, 1), negative where that is the guard, and rows that are lost."""
        rows = self.rows
        den, size, guarded = rows.den, rows.den, None
        if rows.ns is not None:
            assert self.queries.norms is not None
            size, bound = rows.ns, GUARD * self.queries.norms * rows.ns
            guarded = den < bound
            den = torch.maximum(den, bound)
        lost = (size < LOST) & (self.row_scale > EMPTY / 2)
        inverse = torch.where(den > 0, den.reciprocal(), 0.0)
        out = rows.num * inverse
        return out, inverse if guarded is None else torch.where(guarded, -inverse, inverse), lost


def _largest(shifts: Sequence[Tensor], block: Block) -> Tensor:
    """The shift that none of these exceeds."""
    if not shifts:
        return block.tiles.empty_shift(block.n, block.call.features, block.call.like)
    top = shifts[0]
    for shift in shifts[1:]:
        top = torch.maximum(top, shift)
    return top


def absorb(block: Block, scan: Scan, behind: Sequence[Span]) -> None:
    """Take tiles into the sums; nobody meets them again."""
    assert scan.tail is not None
    for key in behind:
        tile = block.cache.pop(key, None) or block.map_keys(key)
        scan.sums.add_keys(tile, scan.tail.fade(scan.distance(key, False), True))


def side_by_side(tiles: Sequence[Keys], rows: int, call: TiledCall) -> list[list[Keys]]:
    """Adjacent tiles that make one matrix of at most `CHUNK` x `CHUNK`.

    Tiles of a grid stay apart, and so do all where a slope gives every row its own shift.
    """
    groups: list[list[Keys]] = []
    joins = not call.layout.rows and call.slope is None
    for tile in tiles:
        if groups and joins and rows * (tile.span[1] - groups[-1][0].span[0]) <= CHUNK**2:
            groups[-1].append(tile)
        else:
            groups.append([tile])
    return groups


def sees_some(block: Block, tiles: Sequence[Keys], scans: Sequence[Scan], span: Span) -> Tensor:
    """Which rows see any key at all, (N, C, 1): where there is none, zero is the answer and nothing was lost."""
    bias, like = block.call.bias, block.call.like
    count = like.new_zeros(block.n, span[1] - span[0], 1)
    for tile in tiles:
        real = like.new_ones(block.n, 1, tile.v.shape[1])
        if tile.hidden is not None:
            real = real.masked_fill(tile.hidden.unsqueeze(1), 0)
        count += bias.row_sums(real, span, tile.span, visible=True)
    for scan in scans:
        assert scan.tail is not None
        some = (scan.sums.ks.abs().amax(1, keepdim=True) > 0) & (scan.sums.shift.amax(2, keepdim=True) > EMPTY / 2)
        count += (some & (scan.tail.value > -torch.inf)).to(count.dtype)
    return count > 0


class RightSums:
    """Sums of the keys beyond the window on the right of each chunk: scanned from right to left, read the other way.

    As many are kept as fit into `HELD` numbers. Longer sequences go in segments: a first pass keeps the sums at their
    ends, and each segment is scanned again when it is its turn.
    """

    def __init__(self, block: Block) -> None:
        self.block, call = block, block.call
        self.spans = call.bias.queries
        size = block.n * call.features * (call.value.shape[3] + 2)
        self.room = max(1, HELD // max(size, 1))
        self.kept: dict[int, Scan] = {}
        self.ends: dict[int, Scan] = {}
        scan = Scan.over_state(block, 1)
        if len(self.spans) > self.room:
            for index in reversed(range(self.room, len(self.spans))):
                absorb(block, scan, scan.to(*call.edges(self.spans[index], True)))
                if index % self.room == 0:
                    self.ends[index // self.room] = scan.copy()
        else:
            self.ends[1] = scan

    def at(self, index: int) -> Scan:
        """The sums for chunk number ``index``; to be asked for in rising order."""
        if index not in self.kept:
            segment = index // self.room
            self.kept = {}
            last = min(len(self.spans), (segment + 1) * self.room)
            scan = self.ends.pop(segment + 1, None) or Scan.over_state(self.block, 1)
            for i in reversed(range(index, last)):
                absorb(self.block, scan, scan.to(*self.block.call.edges(self.spans[i], True)))
                self.kept[i] = scan.copy()
        return self.kept.pop(index)


def end_sums(block: Block, scan: Scan, keep: int) -> list[Tensor]:
    """The sums after the last key, but for the last ``keep`` keys; relative to the position after the last."""
    call = block.call
    stop = call.layout.S - keep
    if scan.tail is not None:  # without entries in the table there is no query, and no key that is not kept
        behind = scan.waiting
        scan.waiting = []
        scan.to(call.layout.S, call.layout.S)
        for first, last in behind:
            if first < stop:
                part = (first, min(last, stop))
                scan.sums.add_keys(block.map_keys(part), scan.tail.fade(scan.distance(part, False), True))
    return [x.unflatten(0, (block.count, call.heads)) for x in scan.sums.tensors]


@dataclass
class _Chunk:
    """A chunk of queries with the gradients of its sums."""

    span: Span
    q: Queries
    row_scale: Tensor  # (N, C, 1): log of what the rows are divided by
    g_num: Tensor  # (N, C, E): gradient of the numerator
    g_den: Tensor  # (N, C, 1): of the denominator
    g_guard: Tensor | None  # (N, C, 1): of the guard's product of lengths
    lost: Tensor  # (N, C) bool: done by `rescue`


class Backward:
    """The backward pass of one block.

    Args:
        block: the samples.
        grad: (B, H, L, E), of the outputs.
        outputs: of the forward pass: out (B, H, L, E), row_scale and 1 / denominator (B, H, L, 1).
        grads: of queries, keys and values, to be added to.
    """

    def __init__(self, block: Block, grad: Tensor, outputs: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        self.block, self.call, self.work = block, block.call, block.call.work
        self.grad, (self.out, self.row_scale, self.inverses) = grad, outputs
        self.dq, self.dk, self.dv = grads

    def chunk(self, span: Span) -> _Chunk:
        """A chunk of queries with the gradients of its sums."""
        block = self.block
        g, out = block.take(self.grad, span), block.take(self.out, span)
        row_scale, inverse = block.rows(self.row_scale, span), block.rows(self.inverses, span)
        q = block.queries(span)
        q.grad = torch.zeros_like(q.phi)
        lost = inverse == AGAIN
        inverse = inverse.masked_fill(lost, 0)
        g_num = g * inverse.abs()
        g_den = torch.linalg.vecdot(g_num, out).neg_().unsqueeze(2)
        if not block.tiles.guard:
            return _Chunk(span, q, row_scale, g_num, g_den, None, lost.squeeze(2))
        assert q.norms is not None
        q.norm_grad = torch.zeros_like(q.norms)
        guarded = inverse < 0
        g_guard = g_den.masked_fill(~guarded, 0) * GUARD
        return _Chunk(span, q, row_scale, g_num, g_den.masked_fill(guarded, 0), g_guard, lost.squeeze(2))

    def band(self, c: _Chunk) -> None:
        """Gradients between a chunk and the tiles near it."""
        block, bias, take = self.block, self.call.bias, self.work.take
        near = self.call.band(c.span)
        if self.call.window != NO_WINDOW:
            for key in [x for x in block.cache if x not in near]:
                self.flush(block.cache.pop(key))
        for key in near:
            tile = block.keys(key)
            tile.start()
            assert tile.grad is not None
            assert tile.dv is not None
            left = block.tiles.left(c.q, tile.shift, c.row_scale)
            size = (*left.shape[:2], tile.phi.shape[2])
            weights = torch.bmm(left, tile.phi, out=take("weights", *size))
            bias.weigh(weights, c.span, key)
            tile.dv.baddbmm_(weights.transpose(1, 2), c.g_num)
            slopes = torch.bmm(c.g_num, tile.v.transpose(1, 2), out=take("slopes", *size)).add_(c.g_den)
            if bias.grad is not None:
                bias.collect(weights.mul_(slopes), c.span, key)
            bias.weigh(slopes, c.span, key)
            tile.grad.baddbmm_(left.transpose(1, 2), slopes)
            slope = torch.bmm(slopes, tile.phi.transpose(1, 2), out=take("slope", *left.shape))
            block.tiles.add_left(c.q, left, slope, tile.shift, c.row_scale)
            if c.g_guard is not None:
                self._guard(c, c.g_guard, tile)
            if key not in block.cache:
                self.flush(tile)

    def _guard(self, c: _Chunk, g_guard: Tensor, tile: Keys) -> None:
        """Gradients of rows whose denominator is the guard, a product of lengths."""
        assert c.q.norms is not None
        assert c.q.norm_grad is not None
        assert tile.norms is not None
        assert tile.norm_grad is not None
        bias = self.call.bias
        size = (tile.shift - c.row_scale).exp_() * g_guard
        weights = (size * c.q.norms).repeat(1, 1, tile.norms.shape[2])
        bias.weigh(weights, c.span, tile.span)
        tile.norm_grad.add_(weights.sum(1, keepdim=True))
        bias.collect(weights.mul_(tile.norms), c.span, tile.span)
        c.q.norm_grad.addcmul_(size, bias.row_sums(tile.norms, c.span, tile.span))

    def ahead(self, scan: Scan, c: _Chunk) -> None:
        """Gradients of queries that read sums of keys, and of the tail's bias."""
        sums = scan.sums
        assert scan.tail is not None
        own = c.row_scale - scan.tail.rows(scan.distance(c.span, True), False)
        left = self.block.tiles.left(c.q, sums.shift, own)
        slope = torch.bmm(c.g_num, sums.kv.transpose(1, 2), out=self.work.take("slope", *left.shape))
        slope.addcmul_(c.g_den, sums.ks.transpose(1, 2))
        self._to_state(scan, c, left, own)
        total = torch.linalg.vecdot(slope, left).sum(1) if self.call.bias.grad is not None else None
        self.block.tiles.add_left(c.q, left, slope, sums.shift, own)
        if c.g_guard is not None:
            assert c.q.norms is not None
            assert c.q.norm_grad is not None
            asked = c.g_guard * (sums.shift - own).exp_() * sums.ns
            c.q.norm_grad.add_(asked)
            total = None if total is None else total + (asked * c.q.norms).sum((1, 2))
        if total is not None:
            assert self.call.bias.grad is not None
            assert scan.tail is not None
            self.call.bias.grad[:, scan.tail.entry] += total.view(-1, self.call.heads).sum(0)

    def _to_state(self, scan: Scan, c: _Chunk, left: Tensor, own: Tensor) -> None:
        """Gradients of the state that the sums of keys began with, which queries read by ``left``."""
        grads, began = self.block.state_grads(scan.side), scan.sums.loaded
        if not grads:
            return
        assert began is not None
        gain = (began - scan.sums.shift).exp_().transpose(1, 2)
        for target, asked in zip(grads, (c.g_num, c.g_den), strict=False):
            target.addcmul_(torch.bmm(left.transpose(1, 2), asked), gain)
        if c.g_guard is not None:
            assert c.q.norms is not None
            grads[2].add_((c.g_guard * c.q.norms * (began - own).exp_()).sum(1, keepdim=True))

    def leave(self, scan: Scan, span: Span) -> None:
        """Sum up what a chunk of queries asks of the keys ahead of it."""
        assert scan.tail is not None
        c, sums = self.chunk(span), scan.sums
        own = c.row_scale - scan.tail.rows(scan.distance(span, True), True)
        new = sums.raise_to(self.block.tiles.top(c.q, own))
        left = self.block.tiles.left(c.q, -new, own)
        sums.kv.baddbmm_(left.transpose(1, 2), c.g_num)
        sums.ks.baddbmm_(left.transpose(1, 2), c.g_den)
        if c.g_guard is not None:
            assert c.q.norms is not None
            sums.ns.add_((c.g_guard * c.q.norms * (-new - own).exp_()).sum(1, keepdim=True))

    def asked(self, scan: Scan, tile: Keys) -> None:
        """Gradients of keys from the sums of queries behind them."""
        assert scan.tail is not None
        sums = scan.sums
        fade = scan.tail.fade(scan.distance(tile.span, False), False)
        _to_keys(tile, (sums.kv, sums.ks, sums.ns), tile.shift + sums.shift, fade)

    def through_end(self, end: Sequence[Tensor], keep: int) -> None:
        """Gradients of keys and of the state from those of the sums that the call returned.

        Args:
            end: (B, H, ...): the shift of the sums, and the gradients of kv, ks and ns.
            keep: the number of last keys that are not in the sums.
        """
        block, layout, tail = self.block, self.call.layout, self.block.tail(-1)
        shift, *asked = (x[block.block].flatten(0, 1) for x in end)
        targets = block.state_grads(-1)
        if targets:
            decay = None if tail is None else tail.decay(layout.S - layout.offset)
            size = block.state(-1)[0] - shift
            gain = (size if decay is None else size - decay).exp_().transpose(1, 2)
            for target, x in zip(targets[: 3 if block.tiles.guard else 2], asked, strict=False):
                target.addcmul_(x, gain)
        if tail is None:  # no key is in the sums, see `end_sums`
            return
        for first, last in self.call.bias.keys:
            span = (first, min(last, layout.S - keep))
            if span[0] < span[1]:
                tile = block.map_keys(span)
                tile.start()
                # The factor of the nearest key first: that of the whole distance may be out of range without it.
                size, decay = tile.shift - shift, tail.decay(layout.S + 1 - span[1] - tail.window)
                within = (span[1] - 1 - self.call.positions(span, False)).to(size)
                _to_keys(tile, asked, size if decay is None else size - decay, tail.fade(within, False))
                self.flush(tile)

    def flush(self, tile: Keys) -> None:
        """Write the gradients of a tile that nobody will meet again."""
        assert tile.dv is not None
        parts = visible_pair(self.block.tiles.vjp_keys(tile), tile.dv, tile.hidden)
        for target, part in zip((self.dk, self.dv), parts, strict=True):
            piece = target[self.block.block, :, tile.span[0] : tile.span[1]]
            piece.add_(part.view(piece.shape))

    def run(self) -> None:
        """Go from left to right with the band, then from right to left for what is far on the other side."""
        for side in (-1, 1):
            if side < 0 or self.call.window != NO_WINDOW:
                self._queries(side)
                self._keys(side)

    def _queries(self, side: int) -> None:
        """Gradients of queries from the sums behind them; on the first way, of the band too."""
        call, block = self.call, self.block
        scan = Scan.over_state(block, side)
        if side > 0 and scan.tail is None:
            return
        spans = call.bias.queries if side < 0 else list(reversed(call.bias.queries))
        for span in spans:
            c = self.chunk(span)
            if side < 0:
                self.band(c)
            if scan.tail is not None:
                for key in scan.to(*call.edges(span, True)):
                    scan.sums.add_keys(block.map_keys(key), scan.tail.fade(scan.distance(key, False), True))
                self.ahead(scan, c)
            dq = block.tiles.vjp_queries(c.q)
            if side < 0 and bool(c.lost.any()):
                g, out = block.take(self.grad, span), block.take(self.out, span)
                dq = dq.clone()  # its buffer is the map's, which is needed again
                rescue_backward(block, span, c.lost, g, out, RowGrads(dq, self.dk, self.dv))
            block.put(self.dq, dq, span, add=side > 0)
        for tile in block.cache.values():
            self.flush(tile)
        block.cache.clear()

    def _keys(self, side: int) -> None:
        """Gradients of keys from the sums of the queries behind them."""
        call, block = self.call, self.block
        scan = Scan(block, side, False, call.layout.offset)
        if scan.tail is None:
            return
        for span in call.bias.keys if side < 0 else reversed(call.bias.keys):
            for behind in scan.to(*call.edges(span, False)):
                self.leave(scan, behind)
            tile = block.map_keys(span)
            tile.start()
            self.asked(scan, tile)
            self.flush(tile)


def _to_keys(tile: Keys, asked: Sequence[Tensor], log_gain: Tensor, fade: Tensor | None) -> None:
    """Add what gradients of sums give to the keys in them.

    Args:
        tile: of keys.
        asked: gradients of kv (N, M, E), ks (N, M, 1) and ns (N, 1, 1).
        log_gain: (N, 1, M) or (N, 1, 1), log of the tile's units over those of the sums; changed.
        fade: (N, 1, C), factors of the keys.
    """
    assert tile.grad is not None
    assert tile.dv is not None
    kv, ks, ns = asked
    gain = log_gain.exp_().transpose(1, 2)
    slope = torch.baddbmm(ks, kv, tile.v.transpose(1, 2)).mul_(gain)
    phi = tile.phi if fade is None else tile.phi * fade
    tile.grad.add_(slope if fade is None else slope.mul_(fade))
    tile.dv.baddbmm_(phi.transpose(1, 2), kv * gain)
    if tile.norm_grad is not None:
        tile.norm_grad.add_(ns * gain if fade is None else ns * gain * fade)


OUTPUTS = "Tensor out, Tensor units, Tensor inverses"  # as the operators name what the backward pass needs of them
FORWARD = f"({TENSORS}, {SETTINGS}, SymInt keep) -> (Tensor, Tensor, Tensor, Tensor[])"
# `end` is empty, or the shift of the returned sums and the gradients of the other three; what comes back last are the
# gradients of kv, ks and ns of the state, then of the state on the right.
BACKWARD = (
    f"(Tensor grad, {TENSORS}, {OUTPUTS}, Tensor[] end, {SETTINGS}, SymInt keep, "
    f"bool learn, bool learn_bias, bool learn_state) -> (Tensor, Tensor, Tensor, Tensor, Tensor[], Tensor[])"
)
Gradients = tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor], list[Tensor]]


def _split(arguments: Sequence[Any], *counts: int) -> list[Sequence[Any]]:
    """Arguments in pieces of these lengths."""
    ends = [sum(counts[: i + 1]) for i in range(len(counts))]
    return [arguments[end - count : end] for end, count in zip(ends, counts, strict=True)]


@torch.library.custom_op("kernelformer::relative_attention", mutates_args=(), schema=FORWARD)
def _forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    tensor_arguments, settings, (keep,) = _split(arguments, NUM_TENSORS, NUM_SETTINGS, 1)
    call = TiledCall(RelativeCall.of(tensor_arguments, settings))
    B, H, L, _ = call.query.shape
    out = call.query.new_empty(B, H, L, call.value.shape[3])
    row_scale, inverses = (call.query.new_zeros(B, H, L, 1, dtype=call.dtype) for _ in range(2))
    ends: list[list[Tensor]] = []
    for block in call.blocks():
        if call.is_banded:
            sums = Banded(block).forward(out, inverses, keep)
            ends += [] if sums is None else [sums.state(block)]
            continue
        scan = _forward_block(block, out, row_scale, inverses)
        if keep >= 0:
            ends.append(end_sums(block, scan, keep))
    if keep >= 0 and not ends:  # of no samples
        return out, row_scale, inverses, _empty_sums(call.inputs)
    return out, row_scale, inverses, [torch.cat(x) for x in zip(*ends, strict=True)] if ends else []


def _forward_block(block: Block, out: Tensor, row_scale: Tensor, inverses: Tensor) -> Scan:
    """Write the outputs of some samples; returns the sums of the keys on the left."""
    call = block.call
    rights = None if block.tail(1) is None else RightSums(block)
    scan = Scan.over_state(block, -1)
    for index, span in enumerate(call.bias.queries):
        scans = [] if rights is None else [rights.at(index)]
        tiles = [block.keys(x) for x in call.band(span)]
        if scan.tail is not None:
            absorb(block, scan, scan.to(*call.edges(span, True)))
            scans.append(scan)
        scans = [x for x in scans if x.sums.some]
        chunk = Chunk.of(block, span, [x.shift for x in tiles] + [x.highest(span) for x in scans])
        for x in scans:
            chunk.add_sums(x)
        for group in side_by_side(tiles, span[1] - span[0], call):
            chunk.add_tiles(group)
        y, inverse, lost = chunk.finish()
        if bool(lost.any()):
            lost &= sees_some(block, tiles, scans, span)
        if bool(lost.any()):
            rescue(block, span, lost.squeeze(2), y, inverse)
        block.put(out, y, span)
        block.write_rows(row_scale, chunk.row_scale, span)
        block.write_rows(inverses, inverse, span)
    return scan


def _empty_sums(call: RelativeCall) -> list[Tensor]:
    """Room for the sums (B, H, ...) of a call: shift, kv, ks and ns."""
    query, spec = call.query, lookup(call.spec)
    features, width = spec.feature_dim(call.tensors, query.shape[3]), call.value.shape[3]
    sizes = ((1, features if spec.family == "positive" else 1), (features, width), (features, 1), (1, 1))
    return [query.new_empty(*query.shape[:2], *x, dtype=compute_dtype(query.dtype)) for x in sizes]


@_forward.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    tensor_arguments, settings, (keep,) = _split(arguments, NUM_TENSORS, NUM_SETTINGS, 1)
    call = RelativeCall.of(tensor_arguments, settings)
    query = call.query
    like = query.new_empty(*query.shape[:3], 1, dtype=compute_dtype(query.dtype))
    sums = _empty_sums(call) if keep >= 0 else []
    return query.new_empty(*query.shape[:3], call.value.shape[3]), like, torch.empty_like(like), sums


@torch.library.custom_op("kernelformer::relative_attention_backward", mutates_args=(), schema=BACKWARD)
def _backward(*arguments: Any) -> Gradients:
    (grad,), tensor_arguments, outputs, (end,), settings, (keep, learn, *learns) = _split(
        arguments, 1, NUM_TENSORS, 3, 1, NUM_SETTINGS, 4
    )
    call = TiledCall(RelativeCall.of(tensor_arguments, settings), *learns)
    inputs = (call.query, call.key, call.value)
    grads = [torch.zeros(x.shape, dtype=call.dtype, device=x.device) for x in inputs]
    totals = [torch.zeros_like(x) for x in call.tensors] if learn else []
    for block in call.blocks(learn):
        if call.is_banded:
            BandedBackward(block, grad, outputs[0], outputs[2], grads).run()
        else:
            Backward(block, grad, outputs, grads).run()
        if end:
            Backward(block, grad, outputs, grads).through_end(end, keep)
        if learn:
            gather_grads(totals, block.map.tensor_grads(), block.block, block.count, call.heads)
    dq, dk, dv = (x.to(y.dtype) for x, y in zip(grads, inputs, strict=True))
    bias, d_bias = call.inputs.bias, call.bias.grad
    d_bias = torch.zeros_like(bias) if d_bias is None else d_bias.view(bias.shape).to(bias.dtype)
    return dq, dk, dv, d_bias, totals, [*call.state_grads[-1], *call.state_grads[1]]


@_backward.register_fake
def _(*arguments: Any) -> Gradients:
    _, (query, key, value, _, tensors, bias, _, *states), *_, (_, learn, _, learn_state) = _split(
        arguments, 1, NUM_TENSORS, 3, 1, NUM_SETTINGS, 4
    )
    made = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, key, value, bias)]
    sums = [x for state in states for x in state[1:]] if learn_state else []
    d_sums = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in sums]
    return made[0], made[1], made[2], made[3], [torch.empty_like(x) for x in tensors] if learn else [], d_sums


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    tensor_arguments, ctx.attention_settings, (ctx.keep,) = _split(inputs, NUM_TENSORS, NUM_SETTINGS, 1)
    call = RelativeCall.of(tensor_arguments, ctx.attention_settings)
    ctx.set_materialize_grads(False)
    learns_state = any(x.requires_grad for x in (*call.state, *call.right_state))
    ctx.learn = (any(x.requires_grad for x in call.tensors), call.bias.requires_grad, learns_state)
    flat, ctx.lengths = flatten([*tensor_arguments, *output])
    ctx.save_for_backward(*flat)


def _grad(ctx: Any, grad: Tensor | None, _: Any, __: Any, d_end: Sequence[Tensor | None]) -> tuple[Any, ...]:
    *arguments, out, row_scale, inverses, end = unflatten(ctx.saved_tensors, ctx.lengths)
    grads: list[Any] = [[None] * len(x) if isinstance(x, list) else None for x in arguments]
    asked = [*d_end[1:]]  # not of the shift, which is a gauge
    if grad is not None or any(x is not None for x in asked):
        grad = torch.zeros_like(out) if grad is None else grad
        sums = [torch.zeros_like(y) if x is None else x for x, y in zip(asked, end[1:], strict=True)]
        given = [end[0], *sums] if any(x is not None for x in asked) else []
        *inputs, d_bias, totals, d_state = _backward(
            grad, *arguments, out, row_scale, inverses, given, *ctx.attention_settings, ctx.keep, *ctx.learn
        )
        grads[:3] = inputs
        if ctx.learn[0]:
            grads[4] = totals
        if ctx.learn[1]:
            grads[5] = d_bias
        if ctx.learn[2]:
            count = len(arguments[7][1:])
            grads[7:9] = ([None, *x] if x else [] for x in (d_state[:count], d_state[count:]))
    return (*grads, *[None] * (NUM_SETTINGS + 1))


_forward.register_autograd(_grad, setup_context=_save)


def relative_attention(call: RelativeCall, *, keep: int | None = None) -> tuple[Tensor, list[Tensor]]:
    """Attend with a relative bias, by tiles; with a window, the rest by sums.

    Args:
        call: the inputs.
        keep: also return the sums of the state and of all keys but the last ``keep``.

    Returns:
        (B, H, L, E) in the dtype of the query, zero where no key is visible, and the sums (B, H, ...), or []: the state
        of a call whose first query comes right after the last key.
    """
    if call.right_state and call.is_causal:
        raise ValueError("right_state holds keys that a causal call does not see; leave it out, or is_causal=False.")
    if (call.state or call.right_state) and call.window is None:
        raise ValueError("sums of keys have the bias beyond a window, got window=None; give window=, or all keys.")
    no_tangents(query=call.query, key=call.key, value=call.value, a_parameter_of_the_feature_map=call.tensors)
    no_tangents(bias=call.bias, slope=call.slope, state=call.state, right_state=call.right_state)
    out, _, _, end = _forward(*call.tensor_arguments, *call.settings, -1 if keep is None else keep)
    return out, end
