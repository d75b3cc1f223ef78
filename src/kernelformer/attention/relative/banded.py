"""The windowed algorithm for positive maps under a bias that is constant beyond a distance, several chunks at a time.

Queries go in chunks of C, keys in blocks of C that are aligned with them. A chunk meets the few blocks around its own,
its band, one key at a time; all others by their sums. With ``phi_j = exp(l(k_j) - shift)`` and, per query,
``left_i = softmax_m (l_m(q_i) + shift_m)``

    num_i = sum_{j in band} e^(b_{j-i}) (left_i . phi_j) v_j + left_i . far
    far = e^(b_-w) sum_{j before} phi_j v_j^T + e^(b_w) sum_{j after} phi_j v_j^T

and the denominator is the same with v = 1. The scale of a row cancels. The shift is that of all that a segment of
chunks sees, the sums included, so that nothing exceeds 1; a row that sees less than `LOST` is marked `AGAIN`, to be
done again key by key. The bias of a band is the same (C, band) matrix for every chunk, made once per call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from kernelformer.attention.blocks import BUFFER, spans, spread
from kernelformer.attention.plain.pairs import BiasPairs
from kernelformer.attention.positive import EMPTY, LOST
from kernelformer.attention.relative.call import RelativeCall
from kernelformer.contract import PositiveSpec, Workspace, compute_dtype, lookup

BAND_CHUNK = 64  # tokens of a chunk: the band of a chunk is wider by one chunk than the windows in it
MATRICES = 64  # (C, C) matrices that are worked on at once: 1 MiB in float32
MOST_CAUSAL = 512  # tokens of a causal segment, whose rows share a scale with later ones
TINY = 1e-12  # a row shorter than this is not made longer than itself times 1e12, as `torch.nn.functional.normalize`
AGAIN = torch.inf  # in the place of 1 / denominator: the row is to be done again, key by key


class BandedCall:
    """One call with what its blocks share: sizes, buffers, and the bias.

    Args:
        inputs: the call, of a positive map, with a window and without a slope.
        learn_bias: collect the gradient of the bias.
        learn_state: collect those of the states.
    """

    def __init__(self, inputs: RelativeCall, learn_bias: bool = False, learn_state: bool = False) -> None:
        self.inputs, query, spec = inputs, inputs.query, lookup(inputs.spec)
        assert isinstance(spec, PositiveSpec)
        assert inputs.window is not None
        self.spec, self.window, self.layout, self.is_causal = spec, inputs.window, inputs.layout, inputs.is_causal
        self.query, self.key, self.value, self.key_mask = query, inputs.key, inputs.value, inputs.key_mask
        self.states = {-1: inputs.state, 1: inputs.right_state}
        self.state_grads = {
            side: [torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in state[1:]] if learn_state else []
            for side, state in self.states.items()
        }
        self.heads, self.dtype = query.shape[1], compute_dtype(query.dtype)
        self.features = spec.feature_dim(inputs.tensors, query.shape[3])
        self.work = Workspace(self.dtype, query.device)
        self.like = query.new_empty(0, dtype=self.dtype)
        self.bias = BiasPairs.of(inputs)
        self.bias_grad = torch.zeros_like(self.bias.factors) if learn_bias else None
        self.band_factors: Tensor | None = None

    def blocks(self, learn: bool = False) -> list[Block]:
        """Blocks of as many samples as fill a buffer."""
        batch, longest = self.query.shape[0], -(-self.layout.L // BAND_CHUNK) * BAND_CHUNK
        size = longest * max(self.features, self.value.shape[3])
        samples = max(1, min(batch, BUFFER // (self.heads * size)))
        return [Block(self, first, last, learn) for first, last in spans(batch, samples)]


class Block:
    """Some samples of a call, with the map bound to their rows."""

    def __init__(self, call: BandedCall, first: int, last: int, learn: bool) -> None:
        self.call, self.block, self.count = call, slice(first, last), last - first
        self.n = self.count * call.heads
        bound = spread(call.inputs.tensors, self.block, self.count, call.heads)
        self.map = call.spec.bind(bound, call.inputs.scale, True, learn)

    def state(self, side: int) -> list[Tensor]:
        """Sums of the keys before (-1) or after (1) those of the call: shift, kv, ks and ns, (N, ...), or nothing."""
        tensors = [x[self.block].flatten(0, 1) for x in self.call.states[side]]
        return [tensors[0].clamp_min(EMPTY), *tensors[1:]] if tensors else []

    def state_grads(self, side: int) -> list[Tensor]:
        """Views (N, ...) of what gradients of kv, ks and ns on that side are added to; nothing where none is wanted."""
        return [x[self.block].flatten(0, 1) for x in self.call.state_grads[side]]


def through(grad: Tensor, x: Tensor, size: Tensor | None) -> Tensor:
    """The gradient at rows from that at their directions x, in place; size is their norm, None: they were not moved."""
    if size is None:
        return grad
    return grad.addcmul_(x, torch.linalg.vecdot(grad, x).unsqueeze(-1), value=-1).div_(size)


def diagonal_sums(x: Tensor) -> Tensor:
    """``out_t = sum over a + c = t`` of x (N, A, C): (N, A + C - 1)."""
    n, a, c = x.shape
    # A row of this buffer is one entry longer than a row of the result, so that the same memory, read with the shorter
    # rows, has row a moved to the right by a.
    padded = F.pad(x, (0, a)).view(n, -1)
    sums: Tensor = padded[:, : a * (a + c - 1)].view(n, a, a + c - 1).sum(1)
    return sums


@dataclass
class KeySums:
    """``sum_j phi_j v_j`` and ``sum_j phi_j`` in units of exp(shift)."""

    shift: Tensor  # (N, M, 1)
    kv: Tensor  # (N, M, E)
    ks: Tensor  # (N, M, 1)

    def at(self, shift: Tensor) -> tuple[Tensor, Tensor]:
        """Both sums in units of another shift."""
        keep = (self.shift - shift).exp_()
        return self.kv * keep, self.ks * keep

    def plus(self, other: KeySums) -> KeySums:
        """The sums over both sets of keys."""
        shift = torch.maximum(self.shift, other.shift)
        (a, b), (c, d) = self.at(shift), other.at(shift)
        return KeySums(shift, a.add_(c), b.add_(d))

    def state(self, block: Block) -> list[Tensor]:
        """The four tensors of a state: shift (B, H, 1, M), kv, ks and, of no use to positive maps, ns."""
        tensors = (self.shift.transpose(1, 2), self.kv, self.ks, self.ks.new_zeros(block.n, 1, 1))
        return [x.unflatten(0, (block.count, block.call.heads)) for x in tensors]


@dataclass
class Tokens:
    """Keys and values of a stretch of T positions; those outside of the sequence are zero, with features of zero."""

    x: Tensor  # (N, T, D)
    size: Tensor | None  # (N, T, 1): what x was divided by
    v: Tensor  # (blocks, N, C, E)
    hidden: Tensor | None  # (N, T) bool: masked
    logs: Tensor  # (N, M, T)
    first: int  # position


@dataclass
class Segment:
    """Some consecutive chunks of queries, mapped, with the blocks of their bands and the sums of all other keys."""

    first: int  # query
    x: Tensor  # (N, c C, D)
    size: Tensor | None
    left: Tensor  # (c, N, C, M)
    keys: Tokens
    phi: Tensor  # (blocks, N, M, C)
    shift: Tensor  # (N, M, 1)
    kv: Tensor  # (blocks, N, M, E)
    ks: Tensor  # (blocks, N, M, 1)
    far: Tensor  # (c, N, M, E): what every chunk sees beyond its band, with the factors of the tails
    far_ks: Tensor  # (c, N, M, 1)
    before: tuple[Tensor, Tensor]  # sums of what is left of the blocks, in their units
    after: tuple[Tensor, Tensor]  # and right of them


class Banded:
    """The geometry of one block of samples, and the forward pass over it.

    Args:
        block: the samples.
        keeps: keep keys and queries as they were mapped, which the backward pass needs; else they share a buffer.
    """

    def __init__(self, block: Block, keeps: bool = False) -> None:
        self.block, self.call, self.take = block, block.call, block.call.work.take
        self.map, layout = block.map, block.call.layout
        self.keeps = keeps
        self.rows, self.features, self.width = block.n, block.call.features, block.call.value.shape[3]
        size = BAND_CHUNK
        self.pad = -layout.offset % size  # empty positions before the first key, so that blocks and chunks are aligned
        self.ahead = (layout.offset + self.pad) // size  # the block of the first chunk
        self.chunks, blocks = -(-layout.L // size), -(-(layout.S + self.pad) // size)
        reach = max(0, -(-(self.call.window - 1) // size))  # a block so far away has the tail's bias for all of a chunk
        self.before = min(reach, self.ahead + self.chunks - 1)
        self.after = 0 if self.call.is_causal else min(reach, max(0, blocks - 1 - self.ahead))
        self.band = self.before + 1 + self.after
        together = max(1, BUFFER // (self.rows * size * max(self.features, self.width)))
        if self.call.is_causal:
            together = min(together, max(1, MOST_CAUSAL // size))
        self.together = min(together, self.chunks)
        table, middle = self.call.bias.factors, layout.L - 1 + layout.offset
        self.entries = [min(max(middle + x * self.call.window, 0), table.shape[1] - 1) for x in (-1, 1)]
        self.tails: list[Tensor | None] = [table[:, x].repeat(block.count).view(-1, 1, 1) for x in self.entries]
        if self.call.is_causal:
            self.tails[1] = None
        if self.call.band_factors is None:
            self.call.band_factors = self.call.bias.factors[:, self._distances()].transpose(0, 1).contiguous()
        self.factors = self.call.band_factors  # (band, H, C, C)
        self.step = max(1, MATRICES // self.rows)

    def _distances(self) -> Tensor:
        """Entries of the bias between a chunk and the blocks of its band, (band, C, C); those of no pair are any."""
        size, device = BAND_CHUNK, self.call.like.device
        key = torch.arange(-self.before * size, (1 + self.after) * size, device=device)
        middle = self.call.layout.L - 1 + self.call.layout.offset
        index = key - torch.arange(size, device=device).unsqueeze(1) + middle
        return index.clamp_(0, max(0, self.call.bias.logs.shape[1] - 1)).view(size, -1, size).transpose(0, 1)

    def segments(self) -> list[tuple[int, int]]:
        """First chunk and end of every segment."""
        return [(x, min(x + self.together, self.chunks)) for x in range(0, self.chunks, self.together)]

    def edges(self, segment: tuple[int, int]) -> tuple[int, int]:
        """Positions of the first key of a segment's bands and of that after the last, in the sequence or beyond it."""
        low = (self.ahead + segment[0] - self.before) * BAND_CHUNK - self.pad
        return low, low + (segment[1] - segment[0] - 1 + self.band) * BAND_CHUNK

    def load(self, source: Tensor, low: int, high: int, name: str, blocks: bool = False) -> Tensor:
        """Positions low to high of (B, H, T, X) in a buffer, zeros outside of it: (N, T, X), or (blocks, N, C, X)."""
        first = min(max(low, 0), high)
        last = max(min(high, source.shape[2]), first)
        piece, width = source[self.block.block, :, first:last], source.shape[3]
        begin, end, size = first - low, last - low, BAND_CHUNK
        if not blocks:
            buffer = self.take(name, self.rows, high - low, width)
            buffer[:, :begin].zero_()
            buffer[:, end:].zero_()
            buffer.view(self.block.count, -1, *buffer.shape[1:])[:, :, begin:end].copy_(piece)
            return buffer
        if begin % size or end % size:
            piece = F.pad(piece, (0, 0, begin % size, -end % size))
        begin, end = begin // size, -(-end // size)
        buffer = self.take(name, (high - low) // size, self.rows, size, width)
        buffer[:begin].zero_()
        buffer[end:].zero_()
        rows = buffer[begin:end].unflatten(1, (self.block.count, -1))
        rows.copy_(piece.unflatten(2, (end - begin, size)).movedim(2, 0))
        return buffer

    def _directions(self, x: Tensor) -> Tensor | None:
        """Divide rows by their norm, in place, where that is asked for; returns the norms."""
        if not self.call.inputs.normalize_qk:
            return None
        size: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp_min_(TINY)
        x.div_(size)
        return size

    def keys(self, low: int, high: int) -> Tokens:
        """Map the keys of positions low to high, to logarithms; -inf where there is none or it is hidden."""
        call, length = self.call, self.call.layout.S
        x, v = self.load(call.key, low, high, "band_k"), self.load(call.value, low, high, "band_v", blocks=True)
        hidden = None
        if call.key_mask is not None:
            places = torch.arange(low, high, device=x.device).clamp_(0, length - 1)
            hidden = ~call.key_mask[self.block.block][:, places]
            hidden = hidden.unsqueeze(1).expand(-1, call.heads, -1).flatten(0, 1)
            x.masked_fill_(hidden.unsqueeze(2), 0)
            v.masked_fill_(by_blocks(hidden, 1).unsqueeze(3), 0)
        size = self._directions(x)
        logs = self.map.keys(x, self.take("band_logs", self.rows, self.features, high - low))
        if hidden is not None:
            logs.masked_fill_(hidden.unsqueeze(1), -torch.inf)
        logs[:, :, : max(0, -low)] = -torch.inf
        logs[:, :, max(0, length - low) :] = -torch.inf
        return Tokens(x, size, v, hidden, logs, low)

    def no_sums(self) -> KeySums:
        """Sums over no keys."""
        like, size = self.call.like, (self.rows, self.features)
        return KeySums(like.new_full((*size, 1), EMPTY), like.new_zeros(*size, self.width), like.new_zeros(*size, 1))

    def state_sums(self, side: int) -> KeySums:
        """Sums of the state on one side."""
        state = self.block.state(side)
        return KeySums(state[0].transpose(1, 2), *state[1:3]) if state else self.no_sums()

    def sum_keys(self, low: int, high: int, sums: KeySums) -> KeySums:
        """Sums with the keys of positions low to high."""
        step = self.together * BAND_CHUNK
        for first in range(max(low, 0), high, step):
            last = min(first + step, high)
            t = self.keys(first, first + -(-(last - first) // BAND_CHUNK) * BAND_CHUNK)
            t.logs[:, :, last - first :] = -torch.inf
            shift = t.logs.amax(2, keepdim=True).clamp_min_(EMPTY)
            kv, ks = self._block_sums(self.features_of(t, shift), t.v)
            sums = sums.plus(KeySums(shift, kv.sum(0), ks.sum(0)))
        return sums

    def features_of(self, t: Tokens, shift: Tensor) -> Tensor:
        """``phi = exp(l - shift)`` by blocks, (blocks, N, M, C)."""
        out = self.take("band_phi", *t.v.shape[:2], self.features, BAND_CHUNK)
        return torch.sub(by_blocks(t.logs, 2), shift, out=out).exp_()

    def _block_sums(self, phi: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """``sum_j phi_j v_j`` and ``sum_j phi_j`` of every block, (blocks, N, M, E) and (blocks, N, M, 1)."""
        kv = self.take("band_kv", *phi.shape[:3], self.width)
        torch.bmm(phi.flatten(0, 1), v.flatten(0, 1), out=kv.flatten(0, 1))
        return kv, phi.sum(3, keepdim=True)

    def first_sums(self) -> KeySums:
        """Sums of the state and of all keys before the first segment's blocks."""
        return self.sum_keys(0, self.edges(self.segments()[0])[0], self.state_sums(-1))

    def right_sums(self) -> list[KeySums]:
        """Sums of all keys behind the blocks of each segment, and of the state on the right."""
        sums, end = self.state_sums(1), self.call.layout.S
        if self.tails[1] is None:
            return [sums] * len(self.segments())
        result = []
        for segment in reversed(self.segments()):
            start = self.edges(segment)[1]
            sums = self.sum_keys(start, end, sums)
            end = min(end, start)
            result.append(sums)
        return result[::-1]

    def segment(self, place: tuple[int, int], before: KeySums, after: KeySums) -> Segment:
        """Map a segment and sum up what its chunks see beyond their bands."""
        size, chunks = BAND_CHUNK, place[1] - place[0]
        t = self.keys(*self.edges(place))
        shift = torch.maximum(t.logs.amax(2, keepdim=True), torch.maximum(before.shift, after.shift)).clamp_min_(EMPTY)
        phi = self.features_of(t, shift)
        kv, ks = self._block_sums(phi, t.v)
        old, new = before.at(shift), after.at(shift)
        far, far_ks = (
            self._far(name, a, b, c, chunks)
            for name, a, b, c in zip(("far_kv", "far_ks"), (kv, ks), old, new, strict=True)
        )
        x = self.load(self.call.query, place[0] * size, place[1] * size, "band_q" if self.keeps else "band_k")
        divided = self._directions(x)
        logits = self.map.queries(x, shift.transpose(1, 2), self.take("band_logs", *x.shape[:2], self.features))
        left = self.take("band_left", chunks, self.rows, size, self.features)
        left.copy_(by_blocks(torch.softmax(logits, -1, out=logits), 1))
        return Segment(place[0] * size, x, divided, left, t, phi, shift, kv, ks, far, far_ks, old, new)

    def _far(self, name: str, blocks: Tensor, before: Tensor, after: Tensor, chunks: int) -> Tensor:
        """Sums of the keys beyond the band of each chunk, (c, N, M, X), from those of blocks and around them."""
        far = self.take(name, chunks, *blocks.shape[1:])
        behind, ahead = self.tails
        assert behind is not None
        total = before.clone()
        for i in range(chunks):
            torch.mul(total, behind, out=far[i])
            total += blocks[i]
        if ahead is not None:
            total = after.clone()
            for i in reversed(range(chunks)):
                far[i].addcmul_(total, ahead)
                total += blocks[i + self.band - 1]
        return far

    def sums_after(self, s: Segment) -> KeySums:
        """Sums of all keys before the blocks of the next segment."""
        chunks = s.left.shape[0]
        return KeySums(s.shift, s.kv[:chunks].sum(0).add_(s.before[0]), s.ks[:chunks].sum(0).add_(s.before[1]))

    def parts(self, chunks: int) -> list[slice]:
        """Chunks whose matrices are worked on at once."""
        return [slice(x, min(x + self.step, chunks)) for x in range(0, chunks, self.step)]

    def weigh(self, matrices: Tensor, block: int) -> Tensor:
        """Multiply matrices (c N, C, C) between chunks and block number ``block`` of their bands by the bias."""
        matrices.view(-1, self.call.heads, *matrices.shape[1:]).mul_(self.factors[block])
        return matrices

    def forward(self, out: Tensor, inverses: Tensor, keep: int) -> KeySums | None:
        """Write the outputs and 1 / denominators of the samples; with ``keep`` the sums of all keys but the last."""
        sums, rights = self.first_sums(), self.right_sums()
        stop, kept = self.call.layout.S - keep, (0, sums)
        for place, right in zip(self.segments(), rights, strict=True):
            low = self.edges(place)[0]
            if low <= stop:
                kept = (max(low, 0), sums)
            s = self.segment(place, sums, right)
            y, den = self._read(s)
            self._put(s, y, den, out, inverses)
            sums = self.sums_after(s) if place[1] < self.chunks else sums
        return None if keep < 0 else self.sum_keys(kept[0], stop, kept[1])

    def _read(self, s: Segment) -> tuple[Tensor, Tensor]:
        """Numerators (c, N, C, E) and denominators (c, N, C, 1) of a segment."""
        chunks, rows, size, _ = s.left.shape
        y, den = self.take("band_logs", chunks, rows, size, self.width), s.left.new_empty(chunks, rows, size, 1)
        for part in self.parts(chunks):
            left, num, mass = (x[part].flatten(0, 1) for x in (s.left, y, den))
            torch.bmm(left, s.far[part].flatten(0, 1), out=num)
            shares = self.take("band_weights", *left.shape)
            torch.mul(left, s.far_ks[part].flatten(0, 1).transpose(1, 2), out=shares)
            torch.sum(shares, 2, keepdim=True, out=mass)
            for k in range(self.band):
                near = slice(part.start + k, part.stop + k)
                weights = self.take("band_weights", left.shape[0], size, size)
                self.weigh(torch.bmm(left, s.phi[near].flatten(0, 1), out=weights), k)
                num.baddbmm_(weights, s.keys.v[near].flatten(0, 1))
                mass += weights.sum(2, keepdim=True)
        return y, den

    def _put(self, s: Segment, y: Tensor, den: Tensor, out: Tensor, inverses: Tensor) -> None:
        """Divide, mark rows that are to be done again, and write them."""
        inverse = torch.where(den > 0, den.reciprocal(), 0.0)
        y.mul_(inverse)
        lost = (den < LOST) & (s.shift.amax(1, keepdim=True) > EMPTY / 2)
        for i in lost.flatten(1).any(1).nonzero().squeeze(1).tolist():
            inverse[i].masked_fill_(lost[i] & self._sees_some(s, i), AGAIN)
        self.store(y, out, s.first)
        self.store(inverse, inverses, s.first)

    def store(self, blocks: Tensor, target: Tensor, first: int) -> None:
        """Write (c, N, C, X) into the positions from ``first`` on of (B, H, T, X); the inverse of `load`."""
        full, rest = divmod(min(target.shape[2] - first, blocks.shape[0] * BAND_CHUNK), BAND_CHUNK)
        rows = blocks.unflatten(1, (self.block.count, -1)).movedim(0, 2)
        end = first + full * BAND_CHUNK
        target[self.block.block, :, first:end].unflatten(2, (full, BAND_CHUNK)).copy_(rows[:, :, :full])
        if rest:
            target[self.block.block, :, end : end + rest].copy_(rows[:, :, full, :rest])

    def _sees_some(self, s: Segment, i: int) -> Tensor:
        """Mask of the rows of chunk i of a segment that see a key, (N, C, 1); others are zero."""
        size = BAND_CHUNK
        at = slice(i * size, (i + self.band) * size)
        place = torch.arange(at.start, at.stop, device=s.left.device) + s.keys.first
        shown = (place >= 0) & (place < self.call.layout.S)
        shown = shown.expand(self.rows, -1) if s.keys.hidden is None else shown & ~s.keys.hidden[:, at]
        real = shown.to(s.left)  # (N, band C)
        # By the bias, not by its factors, which underflow where entries differ by much.
        shown_by = self.call.bias.logs > -torch.inf
        pairs = shown_by[:, self._distances()].to(real).permute(0, 2, 1, 3).flatten(2)  # (H, C, band C)
        seen = (pairs @ real.view(self.block.count, -1, real.shape[1], 1)).flatten(0, 1) > 0
        sides = ((s.before[1], s.ks[:i]), (s.after[1], s.ks[i + self.band :]))
        for (sums, blocks), entry, tail in zip(sides, self.entries, self.tails, strict=True):
            if tail is not None:
                some = (sums + blocks.sum(0) > 0).any(1, keepdim=True)
                seen = seen | (some & shown_by[:, entry].repeat(self.block.count).view(-1, 1, 1))
        return seen


def by_blocks(x: Tensor, axis: int) -> Tensor:
    """(N, ..., T, ...) with T at ``axis`` as (blocks, N, ..., C, ...), a view."""
    blocks: Tensor = x.unflatten(axis, (-1, BAND_CHUNK)).movedim(axis, 0)
    return blocks


@dataclass
class _Asked:
    """Gradients of the sums on both sides of a segment's blocks."""

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
        self.learns_bias = self.call.bias_grad is not None
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
        g_num = g.mul_(inverse.masked_fill_(inverse == AGAIN, 0))
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
        self._put_queries(s, d_left)
        return _Asked(low, high, s.shift, d_far.sum(0), d_far_ks.sum(0))

    def _from_sums(self, s: Segment, d_far: Tensor, d_far_ks: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of the blocks' features (blocks, N, M, C) and values from those of the far sums."""
        (d_kv, left, right), (d_ks, left_ks, right_ks) = self._block_grads(s, d_far, d_far_ks)
        for entry, total in zip(self.banded.entries, (left + left_ks, right + right_ks), strict=True):
            if self.call.bias_grad is not None:
                self.call.bias_grad[:, entry] += total.view(-1, self.call.heads).sum(0)
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
        dx = b.map.vjp_keys(t.x, d_logs, self.take("band_dx", *t.x.shape))
        dx = through(dx, t.x, t.size)
        dv = d_v.transpose(0, 1).reshape(*t.x.shape[:2], -1)
        if t.hidden is not None:
            dx, dv = (x.masked_fill_(t.hidden.unsqueeze(2), 0) for x in (dx, dv))
        first, last = max(low, 0), min(low + t.x.shape[1], length)
        if first < last:
            for target, rows in ((self.dk, dx), (self.dv, dv)):
                piece = target[self.block.block, :, first:last]
                piece += rows.view(*piece.shape[:2], *rows.shape[1:])[:, :, first - low : last - low]

    def _put_queries(self, s: Segment, d_left: Tensor) -> None:
        """Pull the gradients of ``left`` back, and write those of the queries."""
        b, (chunks, _, size, features) = self.banded, s.left.shape
        d_logs = self.take("band_logs", *s.x.shape[:2], features)
        rows = d_logs.unflatten(1, (chunks, size))
        torch.mul(d_left.transpose(0, 1), s.left.transpose(0, 1), out=rows)
        dx = b.map.vjp_queries(s.x, d_logs, self.take("band_dx", *s.x.shape))
        dx = through(dx, s.x, s.size)
        last = min(s.first + chunks * size, self.call.layout.L)
        piece = self.dq[self.block.block, :, s.first : last]
        piece.copy_(dx[:, : last - s.first].view(*piece.shape))

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
        grad = self.call.bias_grad
        if self.d_factors is None or grad is None:
            return
        heads = self.call.heads
        # A later query is an earlier distance: in reverse order the entry of row a and column c is a + c.
        sums = diagonal_sums(self.d_factors.flip(2).permute(1, 2, 0, 3).reshape(heads, BAND_CHUNK, -1))
        middle = self.call.layout.L - 1 + self.call.layout.offset
        start = middle - self.banded.before * BAND_CHUNK - (BAND_CHUNK - 1)
        index = torch.arange(start, start + sums.shape[1], device=sums.device).clamp_(0, grad.shape[1] - 1)
        grad.index_add_(1, index, sums)
