"""The forward pass of `relative`, chunk by chunk: what tiles and sums give to some queries."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernelformer.attention.positive import EMPTY, LOST
from kernelformer.attention.relative.bias_view import CHUNK, Span
from kernelformer.attention.relative.tiles import Keys, Queries
from kernelformer.attention.relative.windows import Block, Call, Rows, Scan
from kernelformer.attention.signed import GUARD

HELD = 1 << 23  # numbers of sums that are kept while their chunks wait: 32 MiB in float32


def read(scan: Scan, base: Tensor, top: Tensor, span: Span, unit: Tensor, rows: Rows) -> None:
    """Add what the sums give."""
    left, tilt = scan.left(base, top, span)
    rows.num.baddbmm_(left, scan.sums.kv)
    rows.den.add_(left.mul_(scan.sums.ks.transpose(1, 2)).sum(2, keepdim=True))
    if rows.ns is not None:
        rows.ns.addcmul_((scan.sums.shift + tilt - unit).exp_(), scan.sums.ns)


def absorb(block: Block, scan: Scan, behind: Sequence[Span]) -> None:
    """Take tiles into the sums; nobody meets them again."""
    assert scan.tail is not None
    for key in behind:
        tile = block.cache.pop(key, None) or block.map_keys(key)
        scan.sums.add_keys(tile, scan.tail.fade(scan.distance(key, False), True))


def meet(block: Block, tiles: Sequence[Keys], base: Tensor, top: Tensor, span: Span, unit: Tensor, rows: Rows) -> None:
    """Add what some adjacent tiles give; several are put side by side, so that fewer and larger products do."""
    call, take = block.call, block.call.work.take
    key = (tiles[0].span[0], tiles[-1].span[1])
    size = (base.shape[0], base.shape[1], key[1] - key[0])
    if len(tiles) == 1:
        tile = tiles[0]
        weights = torch.bmm(block.tiles.at(base, tile.shift, top), tile.phi, out=take("weights", *size))
        v = tile.v
    else:
        phi = take("phi", base.shape[0], base.shape[2], size[2])
        for tile in tiles:
            at = slice(tile.span[0] - key[0], tile.span[1] - key[0])
            torch.mul(tile.phi, (tile.shift - top).exp_().transpose(1, 2), out=phi[:, :, at])
        weights = torch.bmm(base, phi, out=take("weights", *size))
        v = block.rows(call.value, key) if call.key_mask is None else torch.cat([x.v for x in tiles], 1)
    call.bias.weigh(weights, span, key)
    rows.num.baddbmm_(weights, v)
    rows.den.add_(weights.sum(2, keepdim=True))
    if rows.ns is not None:
        for tile in tiles:
            assert tile.norms is not None
            rows.ns.addcmul_((tile.shift - unit).exp_(), call.bias.row_sums(tile.norms, span, tile.span))


def side_by_side(tiles: Sequence[Keys], rows: int, call: Call) -> list[list[Keys]]:
    """Adjacent tiles that make one matrix of at most `CHUNK` x `CHUNK`.

    Tiles of a grid stay apart, and so do all where a slope gives every row its own unit.
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
        some = scan.sums.ks.abs().amax(1, keepdim=True) > 0
        count += (some & (scan.tail.value > -torch.inf)).to(count.dtype)
    return count > 0


def largest(shifts: Sequence[Tensor], block: Block) -> Tensor:
    """The unit that no shift exceeds."""
    if not shifts:
        return block.tiles.empty_shift(block.n, block.call.features, block.call.like)
    top = shifts[0]
    for shift in shifts[1:]:
        top = torch.maximum(top, shift)
    return top


class Rights:
    """Sums of the keys beyond the window on the right of each chunk: scanned from right to left, read the other way.

    As many are kept as fit into `HELD` numbers. Longer sequences go in segments: a first way notes the sums at their
    ends, and each segment is scanned again when it is its turn.
    """

    def __init__(self, block: Block) -> None:
        self.block, call = block, block.call
        self.spans = call.bias.queries
        size = block.n * call.features * (call.value.shape[3] + 2)
        self.room = max(1, HELD // max(size, 1))
        self.kept: dict[int, Scan] = {}
        self.ends: dict[int, Scan] = {}
        scan = Scan(block, 1, True, call.layout.S)
        if len(self.spans) > self.room:
            for index in reversed(range(self.room, len(self.spans))):
                absorb(block, scan, scan.to(*call.edges(self.spans[index], True)))
                if index % self.room == 0:
                    self.ends[index // self.room] = scan.copy()
        else:
            self.ends[1] = scan

    def at(self, index: int) -> Scan:
        """For chunk number ``index``; to be asked in rising order."""
        if index not in self.kept:
            segment = index // self.room
            self.kept = {}
            last = min(len(self.spans), (segment + 1) * self.room)
            scan = self.ends.pop(segment + 1, None) or Scan(self.block, 1, True, self.block.call.layout.S)
            for i in reversed(range(index, last)):
                absorb(self.block, scan, scan.to(*self.block.call.edges(self.spans[i], True)))
                self.kept[i] = scan.copy()
        return self.kept.pop(index)


def finish(block: Block, rows: Rows, q: Queries, unit: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs (N, C, E), 1 / denominator (N, C, 1), negative where that is the guard, and rows that are lost."""
    den, size, guarded = rows.den, rows.den, None
    if rows.ns is not None:
        assert q.norms is not None
        size, bound = rows.ns, GUARD * q.norms * rows.ns
        guarded = den < bound
        den = torch.maximum(den, bound)
    lost = (size < LOST) & (unit > EMPTY / 2)
    inverse = torch.where(den > 0, den.reciprocal(), 0.0)
    out = rows.num * inverse
    return out, inverse if guarded is None else torch.where(guarded, -inverse, inverse), lost


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
