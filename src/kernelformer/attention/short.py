"""Attention of short sequences by the matrix of weights, made from features.

    w_ij = phi(q_i) . phi(k_j)        out_i = sum_j w_ij v_j / sum_j w_ij

The same numbers as `linear` and `causal`, which sum over keys first: that costs M E operations a key and a query, and
a state of M E numbers a sequence; the matrix costs M + E a pair. Where keys are few that is less
(`dispatch.prefers_direct`), and no state is made.

Cost: O((L + S) M D + L S (M + E)) time; memory beyond inputs and outputs is a few buffers of `blocks.BUFFER` numbers,
or those of one sample. The backward pass keeps the inputs, the output and one number per query, and maps all again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from kernelformer.attention.blocks import (
    Shapes,
    empty_rows,
    gather_grads,
    grouped,
    hidden_rows,
    put_rows,
    room_for_rows,
    rows_of,
    spans,
    spread,
    visible_pair,
)
from kernelformer.attention.operator import Operator
from kernelformer.attention.plain.attend import plain_causal_attention, plain_linear_attention
from kernelformer.attention.positive import EMPTY, Rescue, rescue_backward, rescued_rows
from kernelformer.contract import PositiveChunks, PositiveSpec, Workspace, compute_dtype, lookup

LOST = 1e-20  # rows with less are weighed again: one over it times gradients stays within float32


class DirectWeights:
    """Attention of N rows (sample, key head) of whole sequences, by a map that is bound to them under normalization.

    A query may see a key where ``visible`` (R L, S) is 1, not 0, unless ``hidden`` (N, S) is True for it.
    """

    def __init__(
        self, chunks: PositiveChunks, s: Shapes, visible: Tensor | None, hidden: Tensor | None, work: Workspace
    ) -> None:
        self.chunks, self.s, self.visible, self.hidden, self.work = chunks, s, visible, hidden, work

    def _weights(self, xq: Tensor, xk: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Features p (N, R L, M) and r (N, S, M), and weights w (N, R L, S), 0 where hidden."""
        take, features = self.work.take, self.s.M
        r = self.chunks.key_rows(xk, take("keys", *xk.shape[:2], features))
        gone = None if self.hidden is None else self.hidden.unsqueeze(2)
        if gone is not None:
            r.masked_fill_(gone, EMPTY)
        top = r.amax(1, keepdim=True)
        r.sub_(top).exp_()
        if gone is not None:
            r.masked_fill_(gone, 0)
        p = self.chunks.queries(xq, top, take("queries", *xq.shape[:2], features))
        torch.softmax(p, -1, out=p)
        weights = torch.bmm(p, r.transpose(1, 2), out=take("weights", *xq.shape[:2], xk.shape[1]))
        return p, r, weights if self.visible is None else weights.mul_(self.visible)

    def attend(self, xq: Tensor, xk: Tensor, v: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
        """Write outputs (N, R L, E); returns them and what the weights of a row are to be multiplied with, (N, R L).

        That is 0 for a row that sees no key, and -1 for one that was rescued.
        """
        _, _, weights = self._weights(xq, xk)
        torch.bmm(weights, v, out=out)
        total = weights.sum(2)
        lost = total < LOST
        row_scale = total.reciprocal_()
        if not bool(lost.any()):
            return out.mul_(row_scale.unsqueeze(2)), row_scale
        out.mul_(row_scale.masked_fill_(lost, 0).unsqueeze(2))
        for row, index, rescue in self._rescues(lost & self._sees_some(lost), xq, xk, v):
            out[row, index] = rescue.sums(v[row])
            row_scale[row, index] = -1
        return out, row_scale

    def backward(
        self, inputs: tuple[Tensor, Tensor, Tensor], g: Tensor, out: Tensor, row_scale: Tensor, room: Sequence[Tensor]
    ) -> Sequence[Tensor]:
        """Gradients at xq, xk and v, which are written into ``room``, from that of the outputs.

        d w_ij = (g_i . v_j - g_i . out_i) / sum_j w_ij
        d l_m(q_i) = p_im sum_j d w_ij r_jm      d l_m(k_j) = r_jm sum_i d w_ij p_im
        """
        take, (xq, xk, v), (dxq, dxk, dv) = self.work.take, inputs, room
        p, r, weights = self._weights(xq, xk)
        share = row_scale.clamp_min(0).unsqueeze(2)
        torch.bmm(weights.mul_(share).transpose(1, 2), g, out=dv)
        delta = torch.mul(g, out, out=take("product", *g.shape)).sum(2, keepdim=True)
        slopes = torch.bmm(g, v.transpose(1, 2), out=take("slopes", *weights.shape)).sub_(delta).mul_(share)
        if self.visible is not None:
            slopes.mul_(self.visible)
        slope = torch.bmm(slopes, r, out=take("slope", *p.shape)).mul_(p)
        self.chunks.vjp_queries(xq, slope, dxq)
        slope = torch.bmm(slopes.transpose(1, 2), p, out=take("slope", *r.shape)).mul_(r)
        self.chunks.vjp_keys(xk, slope.transpose(1, 2), dxk)
        rescued = row_scale < 0
        for row, index, rescue in self._rescues(rescued, xq, xk, v) if bool(rescued.any()) else ():
            d = rescue_backward(rescue, g[row, index], out[row, index], v[row], True)
            one, q, k = rescue.chunks, rescue.xq, rescue.xk
            dxq[row, index] += one.vjp_queries(q, d.query.unsqueeze(0), torch.empty_like(q))[0]
            dxk[row] += one.vjp_keys(k, d.key.unsqueeze(0), torch.empty_like(k))[0]
            dv[row] += d.value
        return room

    def _sees_some(self, like: Tensor) -> Tensor:
        """Mask of the rows that see any key, (N, R L)."""
        if self.hidden is None:
            return torch.ones_like(like)
        seen = ~self.hidden.unsqueeze(1)
        return (seen if self.visible is None else seen & (self.visible > 0)).any(2).expand_as(like)

    def _rescues(self, which: Tensor, xq: Tensor, xk: Tensor, v: Tensor) -> Iterator[tuple[int, Tensor, Rescue]]:
        """Weigh every pair (feature, visible key) of some rows in log space, a few queries of one head at a time."""
        for row, index in rescued_rows(which, self.s.L):
            q, k = xq[row, index].unsqueeze(0), xk[row : row + 1]
            one = self.chunks.at(row, int(index[0]) // self.s.L)
            shape = (1, q.shape[1], self.s.M)
            lq = one.queries(q, q.new_zeros(1, 1, self.s.M), q.new_empty(shape))[0]
            lk = one.keys(k, k.new_empty(1, self.s.M, self.s.S))[0]
            if self.hidden is not None:
                lk.masked_fill_(self.hidden[row], EMPTY)
            pairs = lq.unsqueeze(2) + lk
            if self.visible is not None:
                pairs.masked_fill_((self.visible[index] == 0).unsqueeze(1), -torch.inf)
            log = pairs.flatten(1).logsumexp(1)
            shares = pairs.flatten(1).softmax(1).view_as(pairs)  # not by `log`, whose rounding they would have
            nothing, none = torch.zeros_like(lq), v.new_zeros(self.s.M, v.shape[2])
            yield row, index, Rescue(one, q, k, shares, nothing, none, torch.ones_like(log).unsqueeze(1), log)


class _Block:
    """Some samples of a call, as rows."""

    def __init__(self, s: Shapes, key_mask: Tensor | None, block: slice, work: Workspace) -> None:
        self.s, self.block, self.work = s, block, work
        self.hidden = None
        if key_mask is not None and not bool(key_mask[block].all()):
            self.hidden = hidden_rows(key_mask, block, slice(None), s.G, 1, s.S)

    def rows(self, name: str, x: Tensor) -> Tensor:
        """A tensor (B, G, R, T, X) as rows (N, R T, X)."""
        return rows_of(x[self.block], name, self.work)

    def pair(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values as rows, hidden ones zero."""
        return visible_pair(self.rows("k", key), self.rows("v", value), self.hidden)

    def room(self, name: str, target: Tensor) -> Tensor:
        """Room for what `put` will write into (B, G, R, T, X)."""
        return room_for_rows(target[self.block], name, self.work)

    def put(self, target: Tensor, rows: Tensor) -> None:
        """Write rows into (B, G, R, T, X)."""
        put_rows(target[self.block], rows)


def _blocks(learn: bool, *arguments: Any) -> Iterator[tuple[_Block, DirectWeights]]:
    """The blocks of samples of a call, each with its attention."""
    query, key, value, key_mask, tensors, spec, scale, is_causal = arguments
    known = lookup(spec)
    assert isinstance(known, PositiveSpec)
    s = Shapes.of(query, key, value, known.feature_dim(tensors, query.shape[-1]))
    work = Workspace(compute_dtype(query.dtype), query.device)
    past = torch.ones(s.L, s.S, dtype=work.dtype, device=work.device).tril_().repeat(s.R, 1) if is_causal else None
    for first, last in spans(s.B, s.samples()):
        block = _Block(s, key_mask, slice(first, last), work)
        chunks = known.bind(spread(tensors, block.block, last - first, s.G), scale, True, learn)
        yield block, DirectWeights(chunks, s, past, block.hidden, work)


def _fake(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    row_scales = query.new_empty(query.shape[:3], dtype=compute_dtype(query.dtype))
    return empty_rows(query, value.shape[-1]), row_scales


def _forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    out, row_scales = _fake(*arguments)
    tensors = (*arguments[:3], out, row_scales.unsqueeze(3))
    q5, k5, v5, out5, scales5 = (grouped(x, arguments[1].shape[1]) for x in tensors)
    for block, weights in _blocks(False, *arguments):
        y, row_scale = weights.attend(block.rows("q", q5), *block.pair(k5, v5), block.room("out", out5))
        block.put(out5, y)
        block.put(scales5, row_scale.unsqueeze(2))
    return out, row_scales


def _backward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    grad, out, row_scales, *inputs, learn = arguments
    query, key, value, _, tensors, *_ = inputs
    heads = key.shape[1]
    dq, dk, dv = (empty_rows(x, x.shape[-1]) for x in (query, key, value))
    totals = [torch.zeros_like(x) for x in tensors] if learn else []
    q5, k5, v5, g5, out5 = (grouped(x, heads) for x in (query, key, value, grad, out))
    scales5 = grouped(row_scales.unsqueeze(3), heads)
    targets = [grouped(x, heads) for x in (dq, dk, dv)]
    for block, weights in _blocks(learn, *inputs):
        given = (block.rows("g", g5), block.rows("o", out5), block.rows("row_scale", scales5).squeeze(2))
        room = [block.room(name, x) for name, x in zip(("dq", "dk", "dv"), targets, strict=True)]
        grads = weights.backward((block.rows("q", q5), *block.pair(k5, v5)), *given, room)
        for target, rows in zip(targets, grads, strict=True):
            block.put(target, rows)
        if learn:
            samples = block.block.stop - block.block.start
            gather_grads(totals, weights.chunks.tensor_grads(), block.block, samples, heads)
    return dq, dk, dv, totals


def _plain(is_causal: bool, **inputs: Any) -> Tensor:
    return plain_causal_attention(**inputs, streams=False)[0] if is_causal else plain_linear_attention(**inputs)


OPERATOR = Operator(
    "direct_attention",
    inputs="Tensor query, Tensor key, Tensor value, Tensor? key_mask, Tensor[] tensors, str spec, float scale, "
    "bool is_causal",
    outputs="Tensor out, Tensor row_scales",
    forward=_forward,
    fake=_fake,
    backward=_backward,
    learned="query, key, value, tensors",
    plain=_plain,
)


def direct_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    spec: str,
    tensors: Sequence[Tensor],
    scale: float,
    key_mask: Tensor | None = None,
    is_causal: bool = False,
) -> Tensor:
    """Attend to all keys, or to those up to one's own position, under normalization by a positive map.

    Arguments and result as `linear.linear_attention`; causal: key j is visible to query i iff j <= i.
    """
    out: Tensor = OPERATOR.forward(query, key, value, key_mask, list(tensors), spec, scale, is_causal)[0]
    return out
