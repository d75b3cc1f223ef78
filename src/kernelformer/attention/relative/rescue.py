"""Rows of attention with a bias that were divided by too large a number: done again, key by key, each by its own.

The scale of a row is that of the whole tile: a key that the row cannot see (a later one, or one that the bias hides)
may dwarf all that it does see. Such rows are rare; here they cost O(S M) each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kernelformer.attention.positive import EMPTY
from kernelformer.attention.relative.bias_view import Span
from kernelformer.attention.relative.tiles import PositiveTiles, SignedTiles
from kernelformer.attention.relative.windows import Block
from kernelformer.attention.signed import GUARD

AGAIN = torch.inf  # in the place of 1 / denominator: the backward pass does this row again, too
TOGETHER = 16


@dataclass
class _Weights:
    """What some queries of one row n (or all rows) give to one tile."""

    key: Span
    x: Tensor  # (1 or N, C, D)
    v: Tensor
    hidden: Tensor | None
    weights: Tensor  # (l, C) or (N, Cq, C): normalized
    phi: Tensor  # (M, C) logarithms, or (N, C, M) values
    extra: Tensor | None = None
    size: Tensor | None = None


def _piece(block: Block, n: int, key: Span) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """Keys and what they were divided by, values and hidden of one row of the block."""
    call = block.call
    sample, head = block.block.start + n // call.heads, n % call.heads
    at = slice(key[0], key[1])
    k, v = (x[sample, head, at].to(call.dtype).unsqueeze(0) for x in (call.key, call.value))
    hidden = None
    if call.key_mask is not None:
        hidden = ~call.key_mask[sample, at]
        k, v = (x.masked_fill(hidden.view(1, -1, 1), 0) for x in (k, v))
    return *block.tiles.directions(k), v, hidden


def _lost_rows(lost: Tensor) -> Iterator[tuple[int, Tensor]]:
    for n in lost.any(1).nonzero().squeeze(1).tolist():
        for index in lost[n].nonzero().squeeze(1).split(TOGETHER):
            yield n, index


def rescue(block: Block, span: Span, lost: Tensor, y: Tensor, inverse: Tensor) -> None:
    """Outputs of the rows ``lost`` (N, C), written into y (N, C, E); marks them in ``inverse`` (N, C, 1)."""
    if isinstance(block.tiles, SignedTiles):
        out, seen = _signed(block, span)
        y.copy_(torch.where(lost.unsqueeze(2), out, y))
        inverse.masked_fill_((lost & seen).unsqueeze(2), AGAIN)
        return
    for n, index in _lost_rows(lost):
        rows = _positive(block, span, n, index)
        if rows is None:
            y[n, index] = 0
            inverse[n, index] = 0
        else:
            y[n, index] = rows[2]
            inverse[n, index] = AGAIN


def _positive(block: Block, span: Span, n: int, index: Tensor) -> tuple[Tensor, list[_Weights], Tensor] | None:
    """Logarithms of the queries (l, M), the tiles with their shares, and the outputs; None if nothing is visible."""
    assert isinstance(block.tiles, PositiveTiles)
    call = block.call
    one = block.tiles.chunks.at(n)
    x, _ = block.tiles.directions(block.rows(call.query, span).flip(1)[n : n + 1, index])
    features = call.features
    lq = one.queries(x, x.new_zeros(1, 1, features), x.new_empty(1, x.shape[1], features))[0]
    tiles, logits = [], []
    for key in call.bias.keys:
        if not call.bias.sees(span, key):
            continue
        k, size, v, hidden = _piece(block, n, key)
        lk = one.keys(k, k.new_empty(1, features, k.shape[1]))[0]
        if hidden is not None:
            lk = lk.masked_fill(hidden, -torch.inf)
        scores = (lq.unsqueeze(2) + lk).logsumexp(1) + call.bias.log_rows(span, key)[n % call.heads, index]
        tiles.append(_Weights(key, k, v, hidden, scores, lk, size=size))
        logits.append(scores)
    values = [t.v[0] for t in tiles]
    if call.state:
        shift, kv, ks, _ = (z[block.block].flatten(0, 1)[n] for z in call.state)
        tail = block.tail(-1)
        assert tail is not None
        distance = (call.positions(span, True) - call.layout.offset).to(lq)
        far = (tail.rows(distance, False)[n] + call.bias.peak[n % call.heads]).expand(distance.shape[0], 1)
        logits.append(lq + shift + ks.log().squeeze(1) + far[index])
        values.append(kv / ks.clamp_min(torch.finfo(ks.dtype).tiny))
    total = torch.cat(logits, 1).logsumexp(1, keepdim=True)
    if bool((total == -torch.inf).all()):
        return None
    total = total.clamp_min(torch.finfo(total.dtype).min)
    shares = [(z - total).exp() for z in logits]
    for t, share in zip(tiles, shares, strict=False):
        t.weights = share
    return lq, tiles, sum(a @ b for a, b in zip(shares, values, strict=True))  # type: ignore[return-value]


def _signed(block: Block, span: Span) -> tuple[Tensor, Tensor]:
    """Outputs of all rows of a chunk, each in the scale of what it sees, and which see anything (N, C)."""
    rows = _SignedRows(block, span)
    num = torch.zeros_like(block.empty_rows(span).num)
    for w in rows.tiles:
        num += w.weights @ w.v
    if rows.before is not None:
        num += rows.before.share * rows.inverse * (rows.q.phi @ rows.before.kv)
    return num, rows.seen.squeeze(2)


@dataclass
class _Before:
    """What a state adds to some queries."""

    share: Tensor  # (N, C, 1): its scale over the row's
    kv: Tensor  # (N, M, E)
    ks: Tensor  # (N, M, 1)


class _SignedRows:
    """A chunk against all tiles, weights divided by the denominator."""

    def __init__(self, block: Block, span: Span) -> None:
        assert isinstance(block.tiles, SignedTiles)
        call = block.call
        self.tiles: list[_Weights] = []
        self.q = block.queries(span)
        row_scale = self.q.phi.new_full((*self.q.phi.shape[:2], 1), -torch.inf)
        for key in call.bias.keys:
            if call.bias.sees(span, key):
                tile = block.map_keys(key)
                assert tile.raw is not None
                factor = tile.raw.new_zeros(*tile.raw.shape[:2], 1) if tile.factor is None else tile.factor
                if tile.hidden is not None:
                    factor = factor.masked_fill(tile.hidden.unsqueeze(2), -torch.inf)
                logs = factor.transpose(1, 2) + call.bias.log_rows(span, key).repeat(block.count, 1, 1)
                row_scale = torch.maximum(row_scale, logs.amax(2, keepdim=True))
                self.tiles.append(_Weights(key, tile.x, tile.v, tile.hidden, logs, tile.raw))
        self.before = far = None
        if call.state:
            shift, kv, ks, lengths = (z[block.block].flatten(0, 1) for z in call.state)
            tail = block.tail(-1)
            assert tail is not None
            distance = (call.positions(span, True) - call.layout.offset).to(row_scale)
            far = shift + tail.rows(distance, False) + block.per_head(call.bias.peak)
            row_scale = torch.maximum(row_scale, far.masked_fill(shift < EMPTY / 2, -torch.inf))
        self.seen = row_scale > -torch.inf
        row_scale = row_scale.masked_fill(~self.seen, 0)
        den, ns = torch.zeros_like(row_scale), torch.zeros_like(row_scale)
        if far is not None:
            self.before = _Before((far - row_scale).exp_(), kv, ks)
            den += self.before.share * (self.q.phi @ ks)
            ns += self.before.share * lengths
        for t in self.tiles:
            t.extra = (t.weights - row_scale).exp_()  # factors of the pairs
            t.weights = (self.q.phi @ t.phi.transpose(1, 2)).mul_(t.extra)
            den += t.weights.sum(2, keepdim=True)
            if block.tiles.guard:
                ns += t.extra @ block.tiles.lengths(t.phi)
        self.guarded, self.ns = torch.zeros_like(den, dtype=torch.bool), ns
        if block.tiles.guard:
            assert self.q.norms is not None
            bound = GUARD * self.q.norms * ns
            self.guarded, den = den < bound, torch.maximum(den, bound)
        self.inverse = torch.where(den > 0, den.reciprocal(), 0.0)
        for t in self.tiles:
            t.weights = t.weights * self.inverse


@dataclass
class RowGrads:
    """Where the gradients go."""

    dq: Tensor  # (N, C, D): of the chunk, in reverse order
    dk: Tensor  # (B, H, S, D)
    dv: Tensor


def rescue_backward(block: Block, span: Span, lost: Tensor, g: Tensor, out: Tensor, grads: RowGrads) -> None:
    """Gradients of the rows ``lost`` (N, C), added to all others; g and out (N, C, E)."""
    if isinstance(block.tiles, SignedTiles):
        _signed_backward(block, span, g.masked_fill(~lost.unsqueeze(2), 0), out, grads)
        return
    assert isinstance(block.tiles, PositiveTiles)
    call = block.call
    for n, index in _lost_rows(lost):
        rows = _positive(block, span, n, index)
        assert rows is not None
        lq, tiles, _ = rows
        one = block.tiles.chunks.at(n)
        mine = g[n, index]
        delta = torch.linalg.vecdot(mine, out[n, index]).unsqueeze(1)
        dlq = torch.zeros_like(lq)
        sample, head = block.block.start + n // call.heads, n % call.heads
        for t in tiles:
            slopes = t.weights * (mine @ t.v[0].T - delta)
            pairs = lq.unsqueeze(2) + t.phi  # (l, M, C)
            pairs = (pairs - pairs.logsumexp(1, keepdim=True)).nan_to_num_(nan=-torch.inf).exp_()
            pairs.mul_(slopes.unsqueeze(1))
            dlq += pairs.sum(2)
            at = slice(t.key[0], t.key[1])
            dk = one.pull_keys(t.x, pairs.sum(0, keepdim=True), torch.empty_like(t.x))
            dk = block.tiles.through(dk, t.x, t.size)[0]
            dv = t.weights.T @ mine
            if t.hidden is not None:
                dk, dv = (z.masked_fill(t.hidden.unsqueeze(1), 0) for z in (dk, dv))
            grads.dk[sample, head, at] += dk
            grads.dv[sample, head, at] += dv
            whole = slopes.new_zeros(block.n, span[1] - span[0], at.stop - at.start)
            whole[n, index] = slopes
            call.bias.collect(whole, span, t.key)
        if call.state:
            shift, kv, ks, _ = (z[block.block].flatten(0, 1)[n] for z in call.state)
            tail = block.tail(-1)
            assert tail is not None
            rest = 1 - sum(t.weights.sum(1, keepdim=True) for t in tiles)  # the share of what came before
            far = (lq + shift + ks.log().squeeze(1)).softmax(1) * rest
            mean = kv / ks.clamp_min(torch.finfo(ks.dtype).tiny)
            dlq += far * (mine @ mean.T - delta)
        x, size = block.tiles.directions(block.rows(call.query, span).flip(1)[n : n + 1, index])
        dx = one.pull_queries(x, dlq.unsqueeze(0), torch.empty_like(x))
        grads.dq[n, index] += block.tiles.through(dx, x, size)[0]


def _signed_backward(block: Block, span: Span, g: Tensor, out: Tensor, grads: RowGrads) -> None:
    assert isinstance(block.tiles, SignedTiles)
    call, rows = block.call, _SignedRows(block, span)
    q = rows.q
    g_num = g * rows.inverse
    g_den = torch.linalg.vecdot(g_num, out).neg_().unsqueeze(2)
    g_guard = g_den.masked_fill(~rows.guarded, 0) * GUARD
    g_den = g_den.masked_fill(rows.guarded, 0)
    q.grad = torch.zeros_like(q.phi)
    q.norm_grad = g_guard * rows.ns if block.tiles.guard else None
    if rows.before is not None:
        slope = g_num @ rows.before.kv.transpose(1, 2) + g_den * rows.before.ks.transpose(1, 2)
        q.grad.addcmul_(slope, rows.before.share)
    for t in rows.tiles:
        assert t.extra is not None
        tile = block.map_keys(t.key)
        slopes = torch.baddbmm(g_den, g_num, t.v.transpose(1, 2)).mul_(t.extra)
        products = q.phi @ t.phi.transpose(1, 2)
        logs = slopes * products
        q.grad.baddbmm_(slopes, t.phi)
        grad = slopes.transpose(1, 2) @ q.phi
        if block.tiles.guard:
            assert q.norms is not None
            asked = t.extra * (g_guard * q.norms)
            lengths = block.tiles.lengths(t.phi)
            logs = logs + asked * lengths.transpose(1, 2)
            if block.tiles.length is None:
                along = asked.sum(1).unsqueeze(2)
                grad = grad + along * t.phi / lengths.clamp_min(torch.finfo(lengths.dtype).tiny)
        log_grad = logs.sum(1).unsqueeze(2) if tile.factor is not None else None
        dk = block.tiles.chunks.pull(t.x, "key", t.phi, grad, log_grad, torch.empty_like(t.x))
        dk = block.tiles.through(dk, tile.x, tile.size)
        dv = t.weights.transpose(1, 2) @ g
        for target, part in ((grads.dk, dk), (grads.dv, dv)):
            if t.hidden is not None:
                part = part.masked_fill(t.hidden.unsqueeze(2), 0)
            piece = target[block.block, :, t.key[0] : t.key[1]]
            piece.add_(part.view(piece.shape))
        call.bias.collect(logs, span, t.key)
    grads.dq.add_(block.tiles.pull_queries(q))
