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
from kernelformer.attention.reference import GUARD
from kernelformer.attention.relative.call import Span
from kernelformer.attention.relative.tiles import Block, PositiveTiles, Queries, SignedTiles

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


@dataclass
class _State:
    """The sums of a state on one side, as a chunk of queries in reverse order sees them."""

    side: int
    entry: int  # of the table: the bias of its keys
    far: Tensor  # (N, C, 1): log factor of the queries, the bias with it
    shift: Tensor  # (N, 1, M or 1)
    kv: Tensor
    ks: Tensor
    ns: Tensor

    @staticmethod
    def both(block: Block, span: Span) -> list[_State]:
        """Those of both sides, where there are some."""
        call, states = block.call, []
        for side in (-1, 1):
            tensors, tail = block.state(side), block.tail(side)
            if tensors and tail is not None:
                positions = call.positions(span, True)
                distance = (positions - call.edge(side)).abs().to(call.dtype)
                far = tail.rows(distance, False) + block.per_head(call.bias.peak)
                far = far.expand(-1, positions.shape[0], -1)
                states.append(_State(side, tail.entry, far, *tensors))
        return states

    def mean(self, n: int) -> Tensor:
        """The mean values (M, E) of the keys for one row n, by the features of a positive map."""
        ks = self.ks[n]
        return self.kv[n] / ks.clamp_min(torch.finfo(ks.dtype).tiny)


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
            y[n, index] = rows.out
            inverse[n, index] = AGAIN


@dataclass
class _PositiveRows:
    """Some queries of one row n in log space."""

    lq: Tensor  # (l, M)
    tiles: list[_Weights]
    states: list[tuple[_State, Tensor, Tensor]]  # and their shares (l, M), of kv and ks times ks, and of each alone
    out: Tensor  # (l, E)


def _positive(block: Block, span: Span, n: int, index: Tensor) -> _PositiveRows | None:
    """Queries ``index`` of a chunk with the shares of all that they see; None if nothing is visible."""
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
    values, states = [t.v[0] for t in tiles], _State.both(block, span)
    units = [(lq + s.shift[n] + s.far[n, index]).masked_fill(s.shift[n] < EMPTY / 2, -torch.inf) for s in states]
    for s, unit in zip(states, units, strict=True):
        logits.append(unit + s.ks[n].log().squeeze(1))
        values.append(s.mean(n))
    total = torch.cat(logits, 1).logsumexp(1, keepdim=True)
    if bool((total == -torch.inf).all()):
        return None
    total = total.masked_fill(total == -torch.inf, 0)
    shares = [(z - total).exp() for z in logits]
    for t, share in zip(tiles, shares, strict=False):
        t.weights = share
    alone = [(x - total).exp().clamp_max(torch.finfo(x.dtype).max) for x in units]
    out = shares[0] @ values[0]
    for share, value in zip(shares[1:], values[1:], strict=True):
        out.addmm_(share, value)
    return _PositiveRows(lq, tiles, list(zip(states, shares[len(tiles) :], alone, strict=True)), out)


def _signed(block: Block, span: Span) -> tuple[Tensor, Tensor]:
    """Outputs of all rows of a chunk, each in the scale of what it sees, and which see anything (N, C)."""
    rows = _SignedRows(block, span)
    num = torch.zeros_like(block.empty_rows(span).num)
    for w in rows.tiles:
        num += w.weights @ w.v
    for s, share in zip(rows.states, rows.shares, strict=True):
        num += share * rows.inverse * (rows.q.phi @ s.kv)
    return num, rows.seen.squeeze(2)


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
        self.states = _State.both(block, span)
        for s in self.states:
            row_scale = torch.maximum(row_scale, (s.far + s.shift).masked_fill(s.shift < EMPTY / 2, -torch.inf))
        self.seen = row_scale > -torch.inf
        row_scale = row_scale.masked_fill(~self.seen, 0)
        den, ns = torch.zeros_like(row_scale), torch.zeros_like(row_scale)
        self.shares = [(s.far + s.shift - row_scale).exp_() for s in self.states]  # (N, C, 1): scales over the row's
        for s, share in zip(self.states, self.shares, strict=True):
            den += share * (self.q.phi @ s.ks)
            ns += share * s.ns
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
        lq = rows.lq
        one = block.tiles.chunks.at(n)
        mine = g[n, index]
        delta = torch.linalg.vecdot(mine, out[n, index]).unsqueeze(1)
        dlq = torch.zeros_like(lq)
        sample, head = block.block.start + n // call.heads, n % call.heads
        for t in rows.tiles:
            slopes = t.weights * (mine @ t.v[0].T - delta)
            pairs = lq.unsqueeze(2) + t.phi  # (l, M, C)
            pairs = (pairs - pairs.logsumexp(1, keepdim=True)).nan_to_num_(nan=-torch.inf).exp_()
            pairs.mul_(slopes.unsqueeze(1))
            dlq += pairs.sum(2)
            at = slice(t.key[0], t.key[1])
            dk = one.vjp_keys(t.x, pairs.sum(0, keepdim=True), torch.empty_like(t.x))
            dk = block.tiles.through(dk, t.x, t.size)[0]
            dv = t.weights.T @ mine
            if t.hidden is not None:
                dk, dv = (z.masked_fill(t.hidden.unsqueeze(1), 0) for z in (dk, dv))
            grads.dk[sample, head, at] += dk
            grads.dv[sample, head, at] += dv
            whole = slopes.new_zeros(block.n, span[1] - span[0], at.stop - at.start)
            whole[n, index] = slopes
            call.bias.collect(whole, span, t.key)
        for s, share, alone in rows.states:
            slopes = share * (mine @ s.mean(n).T - delta)
            dlq += slopes
            if call.bias.grad is not None:
                call.bias.grad[head, s.entry] += slopes.sum()
            for target, asked in zip(block.state_grads(s.side), (mine, -delta), strict=False):
                target[n] += alone.T @ asked
        x, size = block.tiles.directions(block.rows(call.query, span).flip(1)[n : n + 1, index])
        dx = one.vjp_queries(x, dlq.unsqueeze(0), torch.empty_like(x))
        grads.dq[n, index] += block.tiles.through(dx, x, size)[0]


def _signed_state(block: Block, state: _State, share: Tensor, q: Queries, asked: tuple[Tensor, Tensor, Tensor]) -> None:
    """Gradients of a state, of the bias of its keys, and of the queries that see it (added to ``q.grad``).

    Args:
        block: the samples.
        state: on one side.
        share: (N, C, 1), its scale over that of the rows.
        q: the chunk.
        asked: gradients of the rows' numerators (N, C, E), denominators and guards (N, C, 1).
    """
    assert q.grad is not None
    g_num, g_den, g_guard = asked
    slope = (g_num @ state.kv.transpose(1, 2) + g_den * state.ks.transpose(1, 2)).mul_(share)
    q.grad.add_(slope)
    lengths = torch.zeros_like(share) if q.norms is None else g_guard * q.norms * share
    bias = block.call.bias
    if bias.grad is not None:
        total = (slope * q.phi).sum((1, 2)) + (lengths * state.ns).sum((1, 2))
        bias.grad[:, state.entry] += total.view(-1, block.call.heads).sum(0)
    left = (q.phi * share).transpose(1, 2)
    changes = (left @ g_num, left @ g_den, lengths.sum(1, keepdim=True))
    for target, change in zip(block.state_grads(state.side), changes, strict=False):
        target += change


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
    for s, share in zip(rows.states, rows.shares, strict=True):
        _signed_state(block, s, share, q, (g_num, g_den, g_guard))
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
        dk = block.tiles.chunks.vjp(t.x, "key", t.phi, grad, log_grad, torch.empty_like(t.x))
        dk = block.tiles.through(dk, tile.x, tile.size)
        dv = t.weights.transpose(1, 2) @ g
        for target, part in ((grads.dk, dk), (grads.dv, dv)):
            if t.hidden is not None:
                part = part.masked_fill(t.hidden.unsqueeze(2), 0)
            piece = target[block.block, :, t.key[0] : t.key[1]]
            piece.add_(part.view(piece.shape))
        call.bias.collect(logs, span, t.key)
    grads.dq.add_(block.tiles.vjp_queries(q))
