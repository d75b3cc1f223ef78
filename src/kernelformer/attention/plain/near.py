"""Exact softmax on the keys near a query and on the sinks, all blocks of queries at once.

    near(i) = { j : |i - j| < w } and the sinks          s_ij = scale q_i . k_j + b_(j-i)

A block of C queries meets the keys that the windows of its queries reach, its own block and those before and after it.
The windows of all blocks are one strided view of the keys. Where nothing is masked, keys that are not there are at the
ends of the sequence only, and sinks are its first keys, hidden from the first queries by a triangle.

Memory: two numbers per query and key of its block's windows, L (w + C) pairs for a causal call.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernelformer.attention.near_far_call import NearBias, NearFarCall, Sinks, near_blocks
from kernelformer.attention.plain.layout import by_distance, clamp, in_chunks, with_ones
from kernelformer.attention.positive import EMPTY
from kernelformer.contract import compute_dtype


def near_block(window: int) -> int:
    """Queries of a block: so many that windows overlap little, and that the rows of a block share most of theirs."""
    return 64 * max(1, -(-window // 128))


def near_numbers(call: NearFarCall) -> int:
    """Scores of a query."""
    size = near_block(call.window)
    left, right = near_blocks(call.window, size, call.is_causal)
    return size * (left + 1 + right)


class NearRows:
    """Queries from ``start`` to ``end`` with their near keys and the sinks.

    Args:
        call: the call.
        start: the first query.
        end: after the last one.
        leading: number of sinks that are the first keys of the call and visible; 0: where they are is in the call.
    """

    sees_keys = False  # a row may have none

    def __init__(self, call: NearFarCall, start: int, end: int, leading: int) -> None:
        self.call, self.start, self.length, self.leading = call, start, end - start, leading
        self.groups, self.size = call.key.shape[1], near_block(call.window)
        self.left, self.right = near_blocks(call.window, self.size, call.is_causal)
        batch, heads, _, width = call.query.shape
        dtype = compute_dtype(call.query.dtype)
        rows = call.query[:, :, start:end].to(dtype).reshape(batch * self.groups, heads // self.groups, -1, width)
        self.queries = in_chunks(rows.transpose(1, 2) * call.scale, self.size).flatten(2, 3)  # (N, n, C R, D)
        self.rows, self.chunks = self.queries.shape[:2]
        self.repeats = self.queries.shape[2] // self.size
        self.logits: list[Tensor] = []
        self.values: list[Tensor] = []
        if call.window:
            self._add_window()
        if call.sinks or leading:
            self._add_sinks()
        self.both = self.logits[0] if len(self.logits) == 1 else torch.cat(self.logits, -1)
        self.log = self.both.detach().amax(-1).flatten(1, 2)[:, : self.length]  # (N, L, R)

    def sums(self, log: Tensor) -> Tensor:
        """Sums of the rows relative to ``log`` (N, L, R), which is no smaller than their own: (N, L, R, E + 1)."""
        log = in_chunks(log, self.size, -EMPTY).unsqueeze(-1)
        both = (self.both - log).exp_().flatten(2, 3)
        weights = self._dropped(both).split([x.shape[-1] for x in self.logits], -1)
        sums: Tensor = weights[0] @ self.values[0]
        for share, value in zip(weights[1:], self.values[1:], strict=True):
            sums = sums + share @ value
        if self.call.dropout:  # of the weights of values, not of what they are divided by
            sums = torch.cat([sums[..., :-1], both.sum(-1, keepdim=True)], -1)
        return sums.view(self.rows, self.chunks * self.size, self.repeats, sums.shape[-1])[:, : self.length]

    def _dropped(self, weights: Tensor) -> Tensor:
        """Weights with some of them 0 and the others divided by what is left, the same whenever they are asked for."""
        call = self.call
        if not call.dropout or call.seed is None:
            return weights
        keep, generator = 1 - call.dropout, torch.Generator(weights.device)
        generator.manual_seed((int(call.seed) + 1_000_003 * self.start) % (1 << 62))
        drops = torch.empty_like(weights).bernoulli_(keep, generator=generator)
        return weights * drops.mul_(1 / keep if keep else 0.0)

    def _add_window(self) -> None:
        call, size = self.call, self.size
        low = self.start + call.offset - self.left * size
        high, width = low + (self.left + self.chunks + self.right) * size, (self.left + 1 + self.right) * size
        hidden = None
        if call.key_mask is not None:
            hidden = ~tokens_between(call.key_mask[:, None, :, None], low, high)
        key = _rows(call.key, hidden, low, high)
        scores = (self.queries @ key.unfold(1, width, size)).unflatten(2, (size, self.repeats))
        outside = self._outside(width)  # (C, 1, K)
        if call.bias:
            scores = scores + self._band(width).to(scores.dtype)
        if hidden is None:
            scores.masked_fill_(outside, -torch.inf)
            self._hide_ends(scores, low, width)
        else:
            gone = hidden.flatten(1).unfold(1, width, size)[:, None, :, None, None]  # (B, 1, n, 1, 1, K)
            scores = scores.unflatten(0, (-1, self.groups)).masked_fill(gone | outside, -torch.inf).flatten(0, 1)
        self.logits.append(scores)
        self.values.append(with_ones(_rows(call.value, hidden, low, high)).unfold(1, width, size).mT)

    def _hide_ends(self, scores: Tensor, low: int, width: int) -> None:
        """Hide keys before the first and after the last one, in place: a slice of each block that reaches there."""
        beyond, size = self.call.key.shape[2] - low, self.size  # places from there on have no keys
        for block in range(min(self.chunks, -(-max(0, -low) // size))):
            scores[:, block, :, :, : -low - block * size].fill_(-torch.inf)
        whole = max(0, -(-beyond // size))  # blocks from there on have none at all
        for block in range(max(0, (beyond - width) // size + 1), min(self.chunks, whole)):
            scores[:, block, :, :, beyond - block * size :].fill_(-torch.inf)
        if whole < self.chunks:
            scores[:, whole:].fill_(-torch.inf)

    def _outside(self, width: int) -> Tensor:
        """Mask of the places of a block's keys outside the window of each query, (C, 1, K) bool."""
        own, window = self.left * self.size, self.call.window
        inside = torch.ones(self.size, width, dtype=torch.bool, device=self.queries.device)
        inside.tril_(own + (0 if self.call.is_causal else window - 1)).triu_(own - window + 1)
        return inside.logical_not_().unsqueeze(1)

    def _band(self, width: int) -> Tensor:
        """The bias of a block's keys, (N, 1, C, R, K)."""
        device, window = self.queries.device, self.call.window
        distance = torch.arange(width, device=device) - torch.arange(self.size, device=device).unsqueeze(1)
        index = (distance + (window - 1 - self.left * self.size)).clamp_(0, 2 * window - 2)
        band = NearBias(*self.call.bias).band.index_select(1, index.flatten()).view(-1, self.size, width)
        band = band.view(self.groups, self.repeats, self.size, width).transpose(1, 2)  # (G, C, R, K)
        return band.repeat(self.rows // self.groups, 1, 1, 1).unsqueeze(1)

    def _add_sinks(self) -> None:
        call, dtype = self.call, self.queries.dtype
        sinks = self._sinks()
        key, value = (x.to(dtype).flatten(0, 1) for x in sinks[:2])
        flat = self.queries.flatten(1, 2)
        scores = (flat @ key.mT).view(self.rows, self.chunks, self.size, self.repeats, key.shape[1])
        if self.leading and not call.bias:
            self._hide_near_sinks(scores)
        else:
            bias = self._sink_bias(sinks).to(dtype)
            scores = (scores.unflatten(0, (-1, self.groups)) + bias).flatten(0, 1)
        self.logits.append(scores)
        self.values.append(with_ones(value).unsqueeze(1))

    def _sinks(self) -> Sinks:
        """The sinks; those that are keys of the call are picked again, so that they have gradients."""
        call = self.call
        if self.leading:
            key, value = (x[:, :, : self.leading] for x in (call.key, call.value))
            position = torch.arange(self.leading, device=key.device).expand(len(key), -1)
            return Sinks(key, value, position, torch.ones_like(position, dtype=torch.bool))
        sinks = Sinks(*call.sinks)
        if not call.own_sinks:
            return sinks
        gone = ~sinks.visible[:, None, :, None]
        index = sinks.position.masked_fill(~sinks.visible, 0)[:, None, :, None]
        key, value = (
            x.gather(2, index.expand(-1, x.shape[1], -1, x.shape[3])).masked_fill(gone, 0)
            for x in (call.key, call.value)
        )
        return sinks._replace(key=key, value=value)

    def _hide_near_sinks(self, scores: Tensor) -> None:
        """Hide leading sinks from the queries in whose window they are, and from earlier ones if causal, in place."""
        call, count = self.call, self.leading
        rows = min(self.chunks * self.size, max(0, call.window + count - self.start))
        if not rows:
            return
        hidden = torch.ones(rows, count, dtype=torch.bool, device=scores.device).triu_(self.start + 1 - call.window)
        if not call.is_causal:
            hidden.tril_(self.start + call.window - 1)
        scores.view(self.rows, self.chunks * self.size, self.repeats, count)[:, :rows].masked_fill_(
            hidden.unsqueeze(1), -torch.inf
        )

    def _sink_bias(self, sinks: Sinks) -> Tensor:
        """Summand of the scores of sinks, (B, G or 1, n, C, R or 1, s): -inf in the window and where hidden."""
        call, length = self.call, self.chunks * self.size
        query = torch.arange(self.start, self.start + length, device=self.queries.device) + call.offset
        distance = sinks.position.unsqueeze(1) - query.view(1, -1, 1)  # (B, n C, s)
        hidden = (distance.abs() < call.window) | ~sinks.visible.unsqueeze(1)
        if call.is_causal:
            hidden = hidden | (distance > 0)
        hidden = hidden.unflatten(1, (self.chunks, -1))[:, None, :, :, None]
        if not call.bias:
            zeros = torch.zeros(hidden.shape, dtype=self.queries.dtype, device=hidden.device)
            return zeros.masked_fill_(hidden, -torch.inf)
        bias = NearBias(*call.bias)
        tails = bias.tails.view(2, 1, self.groups, 1, 1, -1, 1)  # (2, 1, G, 1, 1, R, 1)
        distance = distance.unflatten(1, (self.chunks, -1))[:, None, :, :, None]
        added = torch.where(distance <= 0, tails[0], tails[1])
        if bias.slope is not None:
            beyond = distance.abs() - torch.where(distance <= 0, call.window, max(call.window, 1))
            added = added - bias.slope.view(self.groups, 1, 1, -1, 1) * beyond
        return added.masked_fill(hidden, -torch.inf)


def tokens_between(x: Tensor, low: int, high: int) -> Tensor:
    """Tokens low to high of (B, G, S, X), which may lie outside of the sequence: zeros there."""
    first, last = (clamp(at, 0, x.shape[2]) for at in (low, high))
    before = clamp(-low, 0, high - low)
    after = high - low - before - (last - first)
    inside = x[:, :, first:last]
    return F.pad(inside, (0, 0, before, after)) if before or after else inside


def _rows(x: Tensor, hidden: Tensor | None, low: int, high: int) -> Tensor:
    """Keys or values (N, n, X); what is hidden may hold anything, NaN too."""
    x = tokens_between(x, low, high).to(compute_dtype(x.dtype))
    return (x if hidden is None else x.masked_fill(hidden, 0)).flatten(0, 1)


class PlainRows:
    """All queries of a call with their near keys and the sinks; the interface is that of `near.NearRows`.

    Args:
        call: queries and keys are the same tokens, all visible, without a bias, and the window is not empty.
        value: (N, L, E + 1), with ones.
        leading: number of sinks, the first keys.
    """

    sees_keys = True

    def __init__(self, call: NearFarCall, value: Tensor, leading: int) -> None:
        self.call, self.leading, self.size = call, leading, near_block(call.window)
        self.left, self.right = near_blocks(call.window, self.size, call.is_causal)
        batch, heads, self.length, width = call.query.shape
        groups, dtype = call.key.shape[1], compute_dtype(call.query.dtype)
        rows = call.query.to(dtype).reshape(batch * groups, heads // groups, self.length, width)
        queries = in_chunks(rows.transpose(1, 2) * call.scale, self.size)  # (N, n, C, R, D)
        self.chunks, self.repeats = queries.shape[1], queries.shape[3]
        key = call.key.to(dtype).flatten(0, 1)
        self.value = self._values(value)
        self.scores = (queries.flatten(2, 3) @ self._keys(key)).unflatten(2, (self.size, self.repeats))
        self._hide()
        self.log = self.scores.detach().amax(-1).flatten(1, 2)[:, : self.length]  # (N, L, R)

    def sums(self, log: Tensor) -> Tensor:
        """Sums of the rows relative to ``log`` (N, L, R), which is no smaller than their own: (N, L, R, E + 1)."""
        weights = (self.scores - in_chunks(log, self.size).unsqueeze(-1)).exp_()
        sums: Tensor = weights.flatten(2, 3) @ self.value
        return sums.view(len(sums), self.chunks * self.size, self.repeats, -1)[:, : self.length]

    @property
    def _width(self) -> int:
        return (self.left + 1 + self.right) * self.size

    def _ends(self) -> tuple[int, int]:
        """Places before the first key and after the last one."""
        return self.left * self.size, (self.chunks + self.right) * self.size - self.length

    def _keys(self, key: Tensor) -> Tensor:
        """(N, n, D, K + s)."""
        before, after = self._ends()
        ends = [x.expand(-1, count, -1) for x, count in ((key[:, :1], before), (key[:, -1:], after))]
        windows = torch.cat([ends[0], key, ends[1]], 1).unfold(1, self._width, self.size)
        return self._with_sinks(windows, key[:, : self.leading])

    def _values(self, value: Tensor) -> Tensor:
        """(N, n, K + s, E + 1)."""
        before, after = self._ends()
        before += self.leading
        zeros = value.new_zeros(len(value), max(before, after), value.shape[2])
        whole = torch.cat([zeros[:, :before], value[:, self.leading :], zeros[:, :after]], 1)
        return self._with_sinks(whole.unfold(1, self._width, self.size), value[:, : self.leading]).mT

    def _with_sinks(self, windows: Tensor, sinks: Tensor) -> Tensor:
        if not self.leading:
            return windows
        return torch.cat([windows, sinks.mT.unsqueeze(1).expand(-1, self.chunks, -1, -1)], 3)

    def _hide(self) -> None:
        """Hide what is not in the window, and sinks from earlier rows, in place."""
        call, width = self.call, self._width
        own, reach = self.left * self.size, 0 if call.is_causal else call.window - 1
        far = self.scores.new_full((1, self.size + width), -torch.inf)
        middle = own + self.size  # the entry of distance 0
        far[:, middle - call.window + 1 : middle + reach + 1].fill_(0)
        self.scores[..., :width].add_(by_distance(far, self.size, width).unsqueeze(2))
        if self.leading and call.is_causal:
            count = self.leading
            later = self.scores.new_full((count, count), -torch.inf).triu_(1).unsqueeze(1)
            rows = self.scores.flatten(1, 2)[:, :count]
            rows[..., width:].add_(later[: rows.shape[1]])
