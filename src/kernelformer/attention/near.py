"""Exact softmax on the keys near a query and on the sinks, by blocks, with its log mass.

    near(i) = { j : |i - j| < w } and the sinks          s_ij = scale q_i . k_j + b_(j-i)
    log_i = logsumexp_near s_ij                          out_i = sum_near e^(s_ij - log_i) v_j

A chunk of C queries meets the sinks and the blocks of C keys around it that its window reaches into: one batched
product for all chunks of a group. Sinks that lie in the window of a query count there, once.

Cost: O(L (w + C + sinks) (D + E)) time, and buffers for one group of chunks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernelformer.attention.blocks import Pieces, Shapes
from kernelformer.attention.engine import Merged, Part
from kernelformer.attention.positive import EMPTY, softmax_mass
from kernelformer.attention.reference import GUARD


class Sinks(NamedTuple):
    """The first visible tokens of each sample.

    Args:
        key: (B, G, s, D).
        value: (B, G, s, E).
        position: (B, s), among the keys of the call; those before them are negative.
        visible: (B, s) bool; False where a sample has not so many tokens.
    """

    key: Tensor
    value: Tensor
    position: Tensor
    visible: Tensor


class NearBias(NamedTuple):
    """A relative bias of the near part.

    Args:
        band: (H, 2 w - 1) over distances j - i from -(w - 1) to w - 1.
        tails: (2, H), at distance w on the left and, at least 1, on the right, for sinks beyond the window.
        slope: (H), what the tails fall by per token, or None.
    """

    band: Tensor
    tails: Tensor
    slope: Tensor | None = None


def near_blocks(window: int, size: int, is_causal: bool) -> tuple[int, int]:
    """How many blocks of ``size`` keys a chunk of queries reaches into on its left and on its right."""
    left = -(-max(0, window - 1) // size)
    return left, 0 if is_causal else left


def near_width(window: int, size: int, is_causal: bool, sinks: int) -> int:
    """The number of keys, sinks included, that a chunk meets."""
    left, right = near_blocks(window, size, is_causal)
    return sinks + (size * (left + 1 + right) if window else 0)


class NearGrads(NamedTuple):
    """Gradients of a group: of the queries' rows, and of the keys' and values' windows, sinks first."""

    query: Tensor
    key: Tensor
    value: Tensor


class Near:
    """The near part of one call, group by group.

    Args:
        pieces: the groups.
        scale: of the product q . k.
        window: w; 0 for sinks alone.
        offset: query i stands at key i + offset.
        is_causal: whether keys after the query are hidden.
        key_mask: (B, S) bool, or None.
        sinks: or None.
        bias: or None.
        dropout: share of the weights that is dropped.
        seed: of the drops.
    """

    def __init__(
        self,
        pieces: Pieces,
        *,
        scale: float,
        window: int,
        offset: int,
        is_causal: bool,
        key_mask: Tensor | None,
        sinks: Sinks | None,
        bias: NearBias | None,
        dropout: float = 0.0,
        seed: int = 0,
    ) -> None:
        self.pieces, self.s, self.work = pieces, pieces.s, pieces.work
        self.scale, self.window, self.offset, self.is_causal = scale, window, offset, is_causal
        self.key_mask, self.sinks, self.bias, self.dropout, self.seed = key_mask, sinks, bias, dropout, seed
        self.count = 0 if sinks is None else sinks.position.shape[1]
        self.left, self.right = near_blocks(window, pieces.size, is_causal)
        self.width = near_width(window, pieces.size, is_causal, self.count)
        self.distance = self._distances()
        self.band = self._band()
        self.grad_band = torch.zeros_like(self.band) if bias is not None else self.band
        self.grad_tails = self.band.new_zeros(2, self.s.H)

    def _distances(self) -> Tensor:
        """j - i of a chunk's queries and the keys of its window, (C, K); sinks are not among them."""
        size, device = self.pieces.size, self.work.device
        keys = torch.arange(self.width - self.count, device=device) - self.left * size
        return keys - torch.arange(size, device=device).unsqueeze(1)

    def _band(self) -> Tensor:
        """What is added to the scores of every chunk, (1 or G, R C, s + K): 0 or the bias, EMPTY outside the window."""
        inside = self.distance.abs() < self.window
        if self.is_causal:
            inside &= self.distance <= 0
        if self.bias is None:
            band = torch.zeros_like(inside, dtype=self.work.dtype).masked_fill_(~inside, EMPTY)
            return F.pad(band, (self.count, 0)).repeat(self.s.R, 1).unsqueeze(0)
        index = (self.distance + self.window - 1).clamp(0, max(0, 2 * self.window - 2))
        table = self.bias.band.to(self.work.dtype)
        table = table[:, index.flatten()].view(self.s.H, *index.shape) if self.window else table.new_zeros(
            self.s.H, *index.shape
        )  # fmt: skip
        # A bias of -inf hides, as EMPTY does.
        band = table.clamp_min(EMPTY).masked_fill(~inside, EMPTY)
        return F.pad(band, (self.count, 0)).view(self.s.G, -1, self.width)

    def windows(self, name: str, x: Tensor, sinks: Tensor | None, block: slice, start: int) -> Tensor:
        """Keys or values (B, G, S, X) around the chunks of a group, sinks first: rows (b G c, s + K, X) in a buffer."""
        x = x[block]
        (b, g), width, chunks = x.shape[:2], x.shape[3], self.pieces.together
        rows = self.work.take(name, b, g, chunks, self.width, width)
        if self.width > self.count:
            span = self._span(name, x, block, start)
            rows[:, :, :, self.count :].copy_(span.unfold(2, self.width - self.count, self.pieces.size).mT)
        if sinks is not None:
            rows[:, :, :, : self.count].copy_(sinks[block].unsqueeze(2))
        return rows.view(b * g * chunks, self.width, width)

    def _ends(self, start: int) -> tuple[int, int]:
        """The first key of a group's windows and the one after the last, which may lie outside of the sequence."""
        size = self.pieces.size
        low = start + self.offset - self.left * size
        return low, low + (self.left + self.pieces.together + self.right) * size

    def _span(self, name: str, x: Tensor, block: slice, start: int) -> Tensor:
        """The keys of all windows of a group (b, G, T, X); zeros where there are none, and where they are hidden."""
        low, high = self._ends(start)
        first, last = (min(max(at, 0), self.s.S) for at in (low, high))
        inside = x[:, :, first:last]
        if (first, last) == (low, high) and self.key_mask is None:
            return inside
        span = self.work.take(f"{name}span", *x.shape[:2], high - low, x.shape[3])
        span[:, :, : first - low].zero_()
        span[:, :, last - low :].zero_()
        span[:, :, first - low : last - low].copy_(inside)
        if self.key_mask is not None:
            hidden = ~self.key_mask[block, first:last]
            span[:, :, first - low : last - low].masked_fill_(hidden[:, None, :, None], 0)
        return span

    def _hidden(self, block: slice, count: int, start: int) -> Tensor | None:
        """Keys of the windows that are not there or hidden, (b, c, K) bool; None where all are visible."""
        low, high = self._ends(start)
        first, last = (min(max(at, 0), self.s.S) for at in (low, high))
        if self.key_mask is None and (first, last) == (low, high):
            return None
        hidden = torch.ones(count, high - low, dtype=torch.bool, device=self.work.device)
        hidden[:, first - low : last - low] = False if self.key_mask is None else ~self.key_mask[block, first:last]
        return hidden.unfold(1, self.width - self.count, self.pieces.size)

    def _sink_bias(self, block: slice, start: int) -> Tensor:
        """What is added to the scores of sinks, (b, G or 1, c, R or 1, C, s): EMPTY in the window and where hidden."""
        assert self.sinks is not None
        chunks, size = self.pieces.together, self.pieces.size
        query = torch.arange(start, start + chunks * size, device=self.work.device) + self.offset
        distance = self.sinks.position[block].unsqueeze(1) - query.view(1, -1, 1)  # (b, c C, s)
        visible = self.sinks.visible[block].unsqueeze(1) & (distance.abs() >= self.window)
        if self.is_causal:
            visible = visible & (distance <= 0)
        if self.bias is None:
            bias = torch.zeros_like(distance, dtype=self.work.dtype).masked_fill_(~visible, EMPTY)
            return bias.view(-1, 1, chunks, 1, size, self.count)
        tails = self.bias.tails.to(self.work.dtype).view(2, 1, self.s.H, 1, 1)
        bias = torch.where(distance.unsqueeze(1) <= 0, tails[0], tails[1])
        if self.bias.slope is not None:
            start_of_tail = torch.where(distance <= 0, self.window, max(self.window, 1))
            beyond = (distance.abs() - start_of_tail).unsqueeze(1)
            bias = bias - self.bias.slope.to(bias).view(1, -1, 1, 1) * beyond
        bias = bias.clamp_min(EMPTY).masked_fill(~visible.unsqueeze(1), EMPTY)  # (b, H, c C, s)
        return bias.view(-1, self.s.G, self.s.R, chunks, size, self.count).transpose(2, 3)

    def _scores(self, xq: Tensor, keys: Tensor, block: slice, start: int) -> Tensor:
        """s_ij of a group, (b G c, R C, s + K), EMPTY where key j is not near."""
        scores = self.work.take("slope", *xq.shape[:2], self.width)
        if self.band.shape[0] == 1:
            torch.baddbmm(self.band, xq, keys.mT, alpha=self.scale, out=scores)
        else:
            torch.bmm(xq, keys.mT, out=scores).mul_(self.scale)
        count, size = block.stop - block.start, self.pieces.size
        whole = scores.view(count, self.s.G, self.pieces.together, self.s.R, size, self.width)
        if self.band.shape[0] > 1:
            whole.add_(self.band.view(1, self.s.G, 1, self.s.R, size, self.width))
        if self.width > self.count:
            hidden = self._hidden(block, count, start)
            if hidden is not None:
                whole[..., self.count :].masked_fill_(hidden[:, None, :, None, None], EMPTY)
        if self.count:
            whole[..., : self.count].add_(self._sink_bias(block, start))
        return scores

    def attend(self, xq: Tensor, keys: Tensor, values: Tensor, block: slice, start: int) -> Part:
        """Means and log masses of a group; keys and values are `windows`."""
        scores = self._scores(xq, keys, block, start)
        log = softmax_mass(scores).squeeze(2)
        drops = self._drops(block, start)
        if drops is not None:
            scores.mul_(drops)
        out = torch.bmm(scores, values, out=self.work.take("near out", *xq.shape[:2], values.shape[2]))
        empty = log < EMPTY / 2
        if bool(empty.any()):
            out.masked_fill_(empty.unsqueeze(2), 0)
            log = log.masked_fill(empty, EMPTY)
        return Part(out, log)

    def _drops(self, block: slice, start: int) -> Tensor | None:
        """Factors of the weights, 0 or 1 / (1 - dropout), the same for a group whenever they are asked for."""
        if not self.dropout:
            return None
        rows = (block.stop - block.start) * self.s.G * self.pieces.together
        drops = self.work.take("drops", rows, self.s.R * self.pieces.size, self.width)
        generator = torch.Generator(self.work.device)
        generator.manual_seed((self.seed + 1_000_003 * start + 7_368_787 * block.start) % (1 << 62))
        keep = 1 - self.dropout
        return drops.bernoulli_(keep, generator=generator).mul_(1 / keep if keep else 0.0)

    def backward(
        self,
        rows: tuple[Tensor, Tensor, Tensor],
        g: Tensor,
        out: Tensor,
        merged: Merged,
        block: slice,
        start: int,
    ) -> NearGrads:
        """Gradients of a group, from those of the whole output.

        Args:
            rows: queries (b G c, R C, D), keys and values (`windows`).
            g: (b G c, R C, E).
            out: the whole output, (b G c, R C, E).
            merged: what the rows were divided by.
            block: of samples.
            start: of the group.
        """
        xq, keys, values = rows
        shares = self._scores(xq, keys, block, start)
        # Not exp(scores - total): an exponential of EMPTY takes ten times as long as one of a number.
        log = softmax_mass(shares)
        shares.mul_(log.sub_(merged.total.unsqueeze(2)).exp_())
        delta = torch.linalg.vecdot(g, out).neg_()
        slope = torch.bmm(g, values.mT, out=self.work.take("kv", *shares.shape))
        drops = self._drops(block, start)
        if drops is not None:
            slope.mul_(drops)
        if merged.guarded is not None:  # the guard moves by GUARD of what the denominator would
            delta = torch.where(merged.guarded, GUARD * delta, delta)
        slope.add_(delta.unsqueeze(2)).mul_(shares)
        if drops is not None:
            shares.mul_(drops)
        dv = torch.bmm(shares.mT, g, out=self.work.take("old", *values.shape))
        if self.bias is not None:
            self._add_bias_grads(slope, block, start)
        slope.mul_(self.scale)
        dq = torch.bmm(slope, keys, out=self.work.take("near dq", *xq.shape))
        dk = torch.bmm(slope.mT, xq, out=self.work.take("dxk", *keys.shape))
        return NearGrads(dq, dk, dv)

    def _add_bias_grads(self, slope: Tensor, block: slice, start: int) -> None:
        count, size = block.stop - block.start, self.pieces.size
        whole = slope.view(count, self.s.G, self.pieces.together, self.s.R, size, self.width)
        self.grad_band += whole.sum((0, 2)).flatten(1, 2)
        if self.count and self.sinks is not None:
            query = torch.arange(start, start + self.pieces.together * size, device=slope.device) + self.offset
            left = self.sinks.position[block].unsqueeze(1) <= query.view(1, -1, 1)
            left = left.view(count, 1, self.pieces.together, 1, size, self.count)
            sinks = whole[..., : self.count]
            for side, here in enumerate((left, ~left)):
                self.grad_tails[side] += (sinks * here).sum((0, 2, 4, 5)).flatten()

    def band_grad(self) -> Tensor:
        """Gradient of the table (H, 2 w - 1) over all groups so far."""
        table = self.grad_band.new_zeros(self.s.H, max(0, 2 * self.window - 1))
        inside = self.distance.abs() < self.window
        index = (self.distance + self.window - 1)[inside]
        grads = self.grad_band[..., self.count :].reshape(self.s.H, *self.distance.shape)[:, inside]
        return table.index_add_(1, index, grads)

    def add_windows(self, target: Tensor, sinks: Tensor | None, rows: Tensor, block: slice, start: int) -> None:
        """Add gradients of `windows` to those of keys or values (B, G, S, X), and of the sinks (B, G, s, X)."""
        piece = target[block]
        (b, g), chunks, size = piece.shape[:2], self.pieces.together, self.pieces.size
        whole = rows.view(b, g, chunks, self.width, -1)
        if sinks is not None:
            sinks[block] += whole[:, :, :, : self.count].sum(2)
        if self.width == self.count:
            return
        low, high = self._ends(start)
        span = self.work.take("scores", b, g, (high - low) // size, size, whole.shape[-1]).zero_()
        for block_number in range(self.left + 1 + self.right):
            at = self.count + block_number * size
            span[:, :, block_number : block_number + chunks].add_(whole[:, :, :, at : at + size])
        first, last = (min(max(at, 0), self.s.S) for at in (low, high))
        piece[:, :, first:last].add_(span.flatten(2, 3)[:, :, first - low : last - low])


def shapes_of(
    query: Tensor, key: Tensor, value: Tensor, features: int, window: int, is_causal: bool, sinks: int
) -> Shapes:
    """Sizes of a call with so many features and near keys a row."""
    plain = Shapes.of(query, key, value, max(1, features))
    size = plain.causal(1)[0]
    width = near_width(window, size, is_causal, sinks)
    return Shapes.of(query, key, value, features + width)
