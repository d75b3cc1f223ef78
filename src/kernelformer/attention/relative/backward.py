"""The backward pass of `direct`, for one block of samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernelformer.attention.blocks import visible_pair
from kernelformer.attention.relative.bias_view import Span
from kernelformer.attention.relative.call import NO_WINDOW
from kernelformer.attention.relative.rescue import AGAIN, RowGrads, rescue_backward
from kernelformer.attention.relative.tiles import Keys, Queries
from kernelformer.attention.relative.windows import Block, Scan
from kernelformer.attention.signed import GUARD


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
        parts = visible_pair(self.block.tiles.pull_keys(tile), tile.dv, tile.hidden)
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
            dq = block.tiles.pull_queries(c.q)
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
