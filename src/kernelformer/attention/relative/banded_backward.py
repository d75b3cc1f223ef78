"""The backward pass of `banded`, for one block of samples: it maps everything again.

With ``g_num, g_den`` the gradients of a row's numerator and denominator, a pair's weight has the gradient
``a_ij = g_num_i . v_j + g_den_i``. Far keys get theirs through the sums: the gradient of a block's sums is that of the
far sums of all chunks that see it there. What chunks ask of keys beyond the blocks of their own segment is summed up
per segment (`_Asked`) and given out at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from kernelformer.attention.relative.banded import Banded, Segment, Tokens
from kernelformer.attention.relative.bias_view import diagonal_sums
from kernelformer.attention.relative.rescue import AGAIN, RowGrads, rescue_backward
from kernelformer.attention.relative.windows import BAND_CHUNK, Block


@dataclass
class _Asked:
    """What the chunks of one segment ask of keys on both sides of its blocks."""

    low: int  # position of the first key of its blocks
    high: int  # and of that after the last
    shift: Tensor  # (N, M, 1)
    kv: Tensor  # (N, M, E)
    ks: Tensor  # (N, M, 1)


class BandedBackward:
    """The backward pass of one block.

    Args:
        block: the samples.
        grad: (B, H, L, E), of the outputs.
        out: (B, H, L, E), the outputs.
        inverses: (B, H, L, 1), 1 / denominators.
        grads: of queries, keys and values, to be added to.
    """

    def __init__(self, block: Block, grad: Tensor, out: Tensor, inverses: Tensor, grads: Sequence[Tensor]) -> None:
        self.banded, self.block, self.call = Banded(block, keeps=True), block, block.call
        self.grad, self.out, self.inverses = grad, out, inverses
        self.dq, self.dk, self.dv = grads
        self.take = self.call.work.take
        self.learns_bias = self.call.bias.grad is not None
        self.d_factors = torch.zeros_like(self.banded.factors) if self.learns_bias else None  # of their logarithms

    def run(self) -> None:
        """Go over the segments from left to right, then over the keys for what other segments ask of them."""
        b = self.banded
        sums, asked = b.first_sums(), []
        for place, right in zip(b.segments(), b.right_sums(), strict=True):
            s = b.segment(place, sums, right)
            asked.append(self._segment(place, s))
            sums = b.sums_after(s)
        self._give(asked)
        self._give_states(asked)
        self._collect()

    def _segment(self, place: tuple[int, int], s: Segment) -> _Asked:
        """Gradients between the queries of a segment, the keys of its blocks, and the sums of all others."""
        b, take, (chunks, _, size, _) = self.banded, self.take, s.left.shape
        last = s.first + chunks * size
        g, out = (b.load(x, s.first, last, n, blocks=True) for x, n in ((self.grad, "band_g"), (self.out, "band_o")))
        inverse = b.load(self.inverses, s.first, last, "band_i", blocks=True)
        lost = inverse == AGAIN
        g_num = g.mul_(inverse.masked_fill_(lost, 0))
        g_den = torch.linalg.vecdot(g_num, out).neg_().unsqueeze(3)
        d_left = take("band_d_left", *s.left.shape)
        d_far, d_far_ks = take("band_d_far", *s.far.shape), torch.empty_like(s.far_ks)
        for part in b.parts(chunks):
            left, num, den = (x[part].flatten(0, 1) for x in (s.left, g_num, g_den))
            torch.bmm(num, s.far[part].flatten(0, 1).transpose(1, 2), out=d_left[part].flatten(0, 1))
            d_left[part].addcmul_(g_den[part], s.far_ks[part].transpose(2, 3))
            torch.bmm(left.transpose(1, 2), num, out=d_far[part].flatten(0, 1))
            d_far_ks[part] = torch.bmm(left.transpose(1, 2), den).view(d_far_ks[part].shape)
        d_phi, d_v = self._from_sums(s, d_far, d_far_ks)
        self._band(s, g_num, g_den, d_left, d_phi, d_v)
        low, high = b.edges(place)
        self._put_keys(s.keys, d_phi, s.phi, d_v, low)
        self._put_queries(s, d_left, lost)
        return _Asked(low, high, s.shift, d_far.sum(0), d_far_ks.sum(0))

    def _from_sums(self, s: Segment, d_far: Tensor, d_far_ks: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of the blocks' features (blocks, N, M, C) and values from those of the far sums."""
        (d_kv, left, right), (d_ks, left_ks, right_ks) = self._block_grads(s, d_far, d_far_ks)
        for entry, total in zip(self.banded.entries, (left + left_ks, right + right_ks), strict=True):
            if self.call.bias.grad is not None:
                self.call.bias.grad[:, entry] += total.view(-1, self.call.heads).sum(0)
        d_phi, d_v = self.take("band_d_phi", *s.phi.shape), self.take("band_d_v", *s.keys.v.shape)
        flat_kv, v = d_kv.flatten(0, 1), s.keys.v.flatten(0, 1)
        torch.bmm(flat_kv, v.transpose(1, 2), out=d_phi.flatten(0, 1))
        d_phi += d_ks
        torch.bmm(s.phi.flatten(0, 1).transpose(1, 2), flat_kv, out=d_v.flatten(0, 1))
        return d_phi, d_v

    def _block_grads(self, s: Segment, *d_fars: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
        """For kv and for ks: gradients of the blocks' sums, and those of the log factors of both tails, (N)."""
        behind, ahead = self.banded.tails
        assert behind is not None
        results = []
        names = ("band_dkv", "band_dks")
        for name, d_far, blocks, old, new in zip(names, d_fars, (s.kv, s.ks), s.before, s.after, strict=True):
            chunks, grads = d_far.shape[0], self.take(name, *blocks.shape).zero_()
            total = torch.zeros_like(old)
            for i in range(chunks - 1, 0, -1):
                total += d_far[i]
                torch.mul(total, behind, out=grads[i - 1])
            left = (grads * blocks).sum((0, 2, 3)) if self.learns_bias else total.new_zeros(total.shape[0])
            left += ((total + d_far[0]) * old * behind).sum((1, 2))
            right = torch.zeros_like(left)
            if ahead is not None:
                total.zero_()
                for i in range(chunks - 1):
                    total += d_far[i]
                    grads[i + self.banded.band].addcmul_(total, ahead)
                    right += (total * blocks[i + self.banded.band] * ahead).sum((1, 2))
                right += ((total + d_far[chunks - 1]) * new * ahead).sum((1, 2))
            results.append((grads, left, right))
        return results

    def _band(self, s: Segment, g_num: Tensor, g_den: Tensor, d_left: Tensor, d_phi: Tensor, d_v: Tensor) -> None:
        """Add the gradients of the pairs in the bands."""
        b = self.banded
        for part in b.parts(s.left.shape[0]):
            left, num, den, d_rows = (x[part].flatten(0, 1) for x in (s.left, g_num, g_den, d_left))
            for k in range(b.band):
                near = slice(part.start + k, part.stop + k)
                phi, v = s.phi[near].flatten(0, 1), s.keys.v[near].flatten(0, 1)
                size = (left.shape[0], BAND_CHUNK, BAND_CHUNK)
                weights = b.weigh(torch.bmm(left, phi, out=self.take("band_weights", *size)), k)
                d_v[near].flatten(0, 1).baddbmm_(weights.transpose(1, 2), num)
                slopes = torch.baddbmm(den, num, v.transpose(1, 2), out=self.take("band_slopes", *size))
                if self.d_factors is not None:
                    self.d_factors[k] += weights.mul_(slopes).view(-1, self.call.heads, *size[1:]).sum(0)
                b.weigh(slopes, k)
                d_rows.baddbmm_(slopes, phi.transpose(1, 2))
                d_phi[near].flatten(0, 1).baddbmm_(left.transpose(1, 2), slopes)

    def _put_keys(self, t: Tokens, d_phi: Tensor, phi: Tensor, d_v: Tensor, low: int) -> None:
        """Pull the gradients of features (blocks, N, M, C) and values back, and add them to those of the keys."""
        b, length = self.banded, self.call.layout.S
        d_logs = self.take("band_logs", *t.logs.shape)
        torch.mul(d_phi.permute(1, 2, 0, 3), phi.permute(1, 2, 0, 3), out=d_logs.unflatten(2, (-1, BAND_CHUNK)))
        dx = b.map.pull_keys(t.x, d_logs, self.take("band_dx", *t.x.shape))
        dx = b.tiles.through(dx, t.x, t.size)
        dv = d_v.transpose(0, 1).reshape(*t.x.shape[:2], -1)
        if t.hidden is not None:
            dx, dv = (x.masked_fill_(t.hidden.unsqueeze(2), 0) for x in (dx, dv))
        first, last = max(low, 0), min(low + t.x.shape[1], length)
        if first < last:
            for target, rows in ((self.dk, dx), (self.dv, dv)):
                piece = target[self.block.block, :, first:last]
                piece += rows.view(*piece.shape[:2], *rows.shape[1:])[:, :, first - low : last - low]

    def _put_queries(self, s: Segment, d_left: Tensor, lost: Tensor) -> None:
        """Pull the gradients of ``left`` back, write those of the queries, and add those of rescued rows."""
        b, (chunks, _, size, features) = self.banded, s.left.shape
        d_logs = self.take("band_logs", *s.x.shape[:2], features)
        rows = d_logs.unflatten(1, (chunks, size))
        torch.mul(d_left.transpose(0, 1), s.left.transpose(0, 1), out=rows)
        dx = b.map.pull_queries(s.x, d_logs, self.take("band_dx", *s.x.shape))
        dx = b.tiles.through(dx, s.x, s.size)
        last = min(s.first + chunks * size, self.call.layout.L)
        piece = self.dq[self.block.block, :, s.first : last]
        piece.copy_(dx[:, : last - s.first].view(*piece.shape))
        for i in lost.flatten(1).any(1).nonzero().squeeze(1).tolist():
            self._rescue(s.first + i * size, lost[i].squeeze(2))

    def _rescue(self, start: int, lost: Tensor) -> None:
        """Gradients of rescued rows (N, C) of a chunk; `rescue_backward` takes them in reverse order."""
        span = (start, min(start + BAND_CHUNK, self.call.layout.L))
        lost = lost[:, : span[1] - start]
        g, out = self.block.take(self.grad, span), self.block.take(self.out, span)
        dq = torch.zeros(*g.shape[:2], self.dq.shape[3], dtype=g.dtype, device=g.device)
        rescue_backward(self.block, span, lost.flip(1), g, out, RowGrads(dq, self.dk, self.dv))
        self.block.put(self.dq, dq, span, add=True)

    def _give(self, asked: list[_Asked]) -> None:
        """Gradients of the keys that segments see beyond their blocks: those before ``low``, and from ``high`` on."""
        b, length = self.banded, self.call.layout.S
        edges = {min(max(x, 0), length) for a in asked for x in (a.low, a.high)}
        cuts = sorted({0, length, *edges})
        for low, high in pairwise(cuts):
            behind = [a for a in asked if a.low >= high]
            ahead = [a for a in asked if a.high <= low] if b.tails[1] is not None else []
            if behind or ahead:
                self._give_range(low, high, behind, ahead)

    def _give_range(self, low: int, high: int, behind: list[_Asked], ahead: list[_Asked]) -> None:
        b = self.banded
        shift = (behind or ahead)[0].shift  # the least: that of a later causal segment covers more keys
        kv = ks = torch.zeros((), dtype=shift.dtype, device=shift.device)
        for tail, several in zip(b.tails, (behind, ahead), strict=True):
            for a in several:
                assert tail is not None
                size = (shift - a.shift).exp_() * tail
                kv, ks = kv + a.kv * size, ks + a.ks * size
        step = b.together * BAND_CHUNK
        for first in range(low, high, step):
            last = min(first + step, high)
            t = b.keys(first, first + -(-(last - first) // BAND_CHUNK) * BAND_CHUNK)
            t.logs[:, :, last - first :] = -torch.inf
            phi = b.features_of(t, shift)
            d_phi = torch.matmul(kv, t.v.transpose(2, 3)).add_(ks)
            self._put_keys(t, d_phi, phi, torch.matmul(phi.transpose(2, 3), kv), first)

    def _give_states(self, asked: list[_Asked]) -> None:
        """Gradients of the states on both sides, which every segment sees."""
        for side, tail in zip((-1, 1), self.banded.tails, strict=True):
            grads = self.block.state_grads(side)
            if not grads:
                continue
            assert tail is not None
            shift = self.banded.state_sums(side).shift
            for a in asked:
                size = (shift - a.shift).exp_() * tail
                grads[0].addcmul_(a.kv, size)
                grads[1].addcmul_(a.ks, size)

    def _collect(self) -> None:
        """Add up the gradients of the bias along the diagonals of the bands."""
        grad = self.call.bias.grad
        if self.d_factors is None or grad is None:
            return
        heads = self.call.heads
        # A later query is an earlier distance: in reverse order the entry of row a and column c is a + c.
        slopes = self.d_factors.flip(2).permute(1, 2, 0, 3).reshape(heads, BAND_CHUNK, -1, 1)
        sums = diagonal_sums(slopes).squeeze(2)
        middle = self.call.layout.L - 1 + self.call.layout.offset
        start = middle - self.banded.before * BAND_CHUNK - (BAND_CHUNK - 1)
        index = torch.arange(start, start + sums.shape[1], device=sums.device).clamp_(0, grad.shape[1] - 1)
        grad.index_add_(1, index, sums)
