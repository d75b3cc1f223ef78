"""The matrix of weights of a positive map for some short sequences, forward and backward.

With ``l_m(x) = log phi_m(x)`` features are taken relative to what a feature has at most, ``top_m = max_j l_m(k_j)``,
and to what a query weighs them with in all:

    p_im = softmax_m (l_m(q_i) + top_m)      r_jm = exp(l_m(k_j) - top_m)      w_ij = sum_m p_im r_jm

So that nothing overflows, and a row that sees all keys sums to 1 / M at least. A causal row may see only keys that a
later one dwarfs in all of its features: such rows are done again in log space, as in `positive`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kernelformer.attention.blocks import Shapes
from kernelformer.attention.rescued import EMPTY, Rescue, rescue_backward, rescued_rows
from kernelformer.contract import PositiveChunks, Workspace

LOST = 1e-20  # rows with less are weighed again: one over it times gradients stays within float32


class DirectWeights:
    """Attention of N rows (sample, key head) of whole sequences.

    Args:
        chunks: the map, bound to the rows under normalization.
        s: sizes of the call.
        visible: (R L, S) of ones and zeros, 1 = a query may see the key; None means all.
        hidden: (N, S) bool, keys that nobody sees; None means none.
        work: buffers.
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
        self.chunks.pull_queries(xq, slope, dxq)
        slope = torch.bmm(slopes.transpose(1, 2), p, out=take("slope", *r.shape)).mul_(r)
        self.chunks.pull_keys(xk, slope.transpose(1, 2), dxk)
        rescued = row_scale < 0
        for row, index, rescue in self._rescues(rescued, xq, xk, v) if bool(rescued.any()) else ():
            d = rescue_backward(rescue, g[row, index], out[row, index], v[row], True)
            one, q, k = rescue.chunks, rescue.xq, rescue.xk
            dxq[row, index] += one.pull_queries(q, d.query.unsqueeze(0), torch.empty_like(q))[0]
            dxk[row] += one.pull_keys(k, d.key.unsqueeze(0), torch.empty_like(k))[0]
            dv[row] += d.value
        return room

    def _sees_some(self, like: Tensor) -> Tensor:
        """Which rows see any key, (N, R L) bool."""
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
