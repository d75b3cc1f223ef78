"""The forward pass of `direct`, chunk by chunk: what tiles and sums of keys give to some queries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernelformer.attention.positive import EMPTY, LOST
from kernelformer.attention.relative.bias_view import CHUNK, Span
from kernelformer.attention.relative.tiles import Keys, Queries
from kernelformer.attention.relative.windows import Block, Rows, Scan, TiledCall
from kernelformer.attention.signed import GUARD

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
