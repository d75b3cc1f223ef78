"""Positive maps, all chunks at once: exact, without eps, and without a row that has to be computed again.

With ``l(x) = log phi(x)`` and the running maximum of the keys, feature by feature,

    top_im = max_{j <= i} l_m(k_j)        log_i = max_m (l_m(q_i) + top_im) = max_{j <= i, m} (l_m(q_i) + l_m(k_j))
    sums_i = sum_{j <= i} sum_m exp(l_m(q_i) + l_m(k_j) - log_i) [v_j, 1]

is at least 1 in its last entry, which is the denominator. A block of queries and a block of keys before it meet in a
product, split at what is the largest up to the edge between them,

    exp(l_m(q_i) + edge_m - log_i) exp(l_m(k_j) - edge_m)        l_m(k_j) <= edge_m <= top_im

Both factors are at most 1, so that nothing overflows, and what underflows is nothing against the denominator: a later
key, however large, is in none of the three. Blocks are the state before a chunk, and within a chunk of 64 the quarters,
their quarters, and the tokens in these: products of 16 x 48, 4 x 12 and 1 x 4, each for all chunks at once.

All maxima are gauges, which cancel: no gradient goes through them.

Memory: keys are mapped 2.25 + 2.25 + 4 times for the three sizes of blocks, one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kernelformer.attention.parallel.layout import RADIX, RowSums, in_chunks, with_ones
from kernelformer.attention.parallel.scan import GROUP, filled_up, later_than, running_sums
from kernelformer.attention.positive import EMPTY
from kernelformer.contract import PositiveSpec, compute_dtype

# Multiplies scores (X, a, b) of queries and keys at consecutive places by numbers of their distance.
Weigh = Callable[[Tensor, tuple[int, int], tuple[int, int]], Tensor]
LEAST = 1e-6  # between the denominator of a row that sees a key, which is 1 or more up to rounding, and 0
KEYS = 1024  # keys of a product where all are seen: more of them at once occupy a device better than longer ones


class KeySums(NamedTuple):
    """What is kept of some keys.

    Args:
        top: (N, M), the largest log feature, at least EMPTY; no gradient.
        sums: (N, M, E + 1), ``sum_j exp(l(k_j) - top) [v_j, 1]``.
    """

    top: Tensor
    sums: Tensor


class PositiveMap:
    """A positive map with its tensors, and its sums.

    Args:
        spec: the map.
        tensors: (B or 1, G or 1, ...) each.
        scale: the map sees ``sqrt(scale) x``.
        normalize: divide by the sum of the weights.
        parts: rows are merged with others, so that nothing may be left out of the features.
    """

    def __init__(
        self, spec: PositiveSpec, tensors: Sequence[Tensor], scale: float, normalize: bool, parts: bool = False
    ) -> None:
        self.tensors, self.scale, self.normalize = tensors, scale, normalize
        self.features = spec.log_shares if normalize and not parts else spec.log_features

    def queries(self, x: Tensor, groups: int) -> Tensor:
        """(B, H, L, D) -> (N, L, R, M)."""
        batch, heads, length, width = x.shape
        x = x.to(compute_dtype(x.dtype)).reshape(batch, groups, heads // groups * length, width)
        logs = self.features(x, self.tensors, self.scale, "query")
        return logs.reshape(batch * groups, heads // groups, length, logs.shape[3]).transpose(1, 2).contiguous()

    def keys(self, x: Tensor, value: Tensor, hidden: Tensor | None) -> tuple[Tensor, Tensor]:
        """(B, G, S, D) -> (N, S, M), -inf where hidden (B, 1, S, 1), and values (N, S, E + 1)."""
        dtype = compute_dtype(x.dtype)
        x, value = x.to(dtype), value.to(dtype)
        if hidden is not None:  # it may hold anything, NaN too
            x, value = x.masked_fill(hidden, 0), value.masked_fill(hidden, 0)
        logs = self.features(x, self.tensors, self.scale, "key")
        logs = logs if hidden is None else logs.masked_fill(hidden, -torch.inf)
        return logs.flatten(0, 1), with_ones(value).flatten(0, 1)

    @staticmethod
    def load(state: Sequence[Tensor]) -> KeySums:
        """From log_mass (B, G, M, 1) and mean (B, G, M, E)."""
        log_mass, mean = (x.flatten(0, 1) for x in state)
        top = log_mass.detach().clamp_min(EMPTY)
        return KeySums(top.squeeze(2), with_ones(mean) * (log_mass - top).exp())

    @staticmethod
    def store(kept: KeySums, groups: int) -> list[Tensor]:
        """To log_mass and mean."""
        mass = kept.sums[..., -1:].clamp_min(LEAST)
        log_mass, mean = kept.top.unsqueeze(2) + mass.log(), kept.sums[..., :-1] / mass
        return [x.unflatten(0, (-1, groups)) for x in (log_mass, mean)]

    def absorb(self, keys: tuple[Tensor, Tensor], before: KeySums | None) -> KeySums:
        """Sums of all keys, and of those before them."""
        logs, value = keys
        size = min(KEYS, max(1, logs.shape[1]))
        logs, value = in_chunks(logs, size, -torch.inf), in_chunks(value, size)
        top = logs.detach().amax((1, 2))
        top = top.clamp_min(EMPTY) if before is None else torch.maximum(top, before.top)
        sums = ((logs - top[:, None, None]).exp_().mT @ value).sum(1)
        if before is not None:
            sums = torch.addcmul(sums, before.sums, (before.top - top).exp().unsqueeze(2))
        return KeySums(top, sums)

    def read(self, logs: Tensor, kept: KeySums) -> RowSums:
        """What queries (N, L, R, M) get from sums."""
        logs = logs + kept.top[:, None, None]
        scale = logs.detach().amax(-1).clamp_min(EMPTY / 2)
        rows = (logs - scale.unsqueeze(3)).exp_()
        return RowSums(scale, (rows.flatten(1, 2) @ kept.sums).view(*rows.shape[:3], kept.sums.shape[2]))

    def causal(
        self, logs: Tensor, keys: tuple[Tensor, Tensor], before: KeySums | None, size: int
    ) -> tuple[RowSums, KeySums]:
        """What queries (N, L, R, M) get from the keys (N, L, M) up to their own, and from those before.

        Args:
            logs: of the queries.
            keys: as `keys` returned them; as many as there are queries.
            before: sums of earlier keys.
            size: tokens of a chunk.

        Returns:
            the rows' sums, and the sums after the last key.
        """
        (rows, length, repeats, features), width = logs.shape, keys[1].shape[2]
        queries = in_chunks(logs, size)  # (N, n, C, R, M)
        lk, value = in_chunks(keys[0], size, -torch.inf), in_chunks(keys[1], size)
        chunks, later = lk.shape[1], later_than(GROUP, lk.device)
        more = filled_up(chunks + 1) - chunks  # the sums before the first chunk, and room to fill up groups
        top, edges = running_tops(lk.detach(), before, more)
        scale = (queries.detach() + top.unsqueeze(3)).amax(4).clamp_min(EMPTY / 2)
        queries = queries - scale.unsqueeze(4)
        sums = (lk - edges[:, 1 : chunks + 1].unsqueeze(2)).exp_().mT @ value
        zeros = lk.new_zeros(rows, more, features, width)
        first = zeros[:, :1] if before is None else before.sums.unsqueeze(1)
        sums = running_sums(torch.cat([first, sums, zeros[:, 1:]], 1), edges, later)
        out = (queries + edges[:, :chunks, None, None]).exp_().flatten(2, 3) @ sums[:, :chunks]
        block = size // RADIX
        while block > 1:
            add_quarters(out, queries, lk, value, top, later, block)
            block //= RADIX
        out = with_tokens(out, queries, lk, value, top, later)
        out = out.view(rows, chunks * size, repeats, width)[:, :length]
        return RowSums(scale.flatten(1, 2)[:, :length], out), KeySums(edges[:, chunks], sums[:, chunks])

    def finish(self, part: RowSums) -> Tensor:
        """Outputs (N, L, R, E); zero where no key is seen."""
        num = part.sums[..., :-1]
        if self.normalize:
            return num / part.sums[..., -1:].clamp_min(LEAST)
        root = (0.5 * part.log).exp_().unsqueeze(3)  # twice: the size itself may lie beyond float range
        return num * root * root


def running_tops(logs: Tensor, before: KeySums | None, more: int) -> tuple[Tensor, Tensor]:
    """The largest log feature up to each key, (N, n, C, M), and up to each edge of a chunk, (N, n + more, M)."""
    inside = logs.cummax(2).values
    empty = logs.new_full((logs.shape[0], more, logs.shape[3]), EMPTY)
    first = empty[:, :1] if before is None else before.top.unsqueeze(1)
    edges = torch.cat([first, inside[:, :, -1], empty[:, 1:]], 1).cummax(1).values
    return torch.maximum(inside, edges[:, : logs.shape[1]].unsqueeze(2)), edges


def add_quarters(
    out: Tensor,
    queries: Tensor,
    logs: Tensor,
    value: Tensor,
    top: Tensor,
    later: Tensor,
    block: int,
    weigh: Weigh | None = None,
) -> None:
    """Add what the 2nd to 4th of four blocks get from the blocks before them to (N, n, C R, W)."""
    others, features, width = RADIX - 1, logs.shape[3], value.shape[3]
    edge = top.view(-1, RADIX, block, features)[:, :-1, -1]  # (X, 3, M), before the 2nd, 3rd and 4th block
    limit = edge.unsqueeze(2).masked_fill(later[:others, :others, None], torch.inf)  # (X, query block, key block, M)
    keys = logs.reshape(-1, 1, RADIX, block, features)[:, :, :-1] - limit.unsqueeze(3)
    rows = queries.view(-1, RADIX, block * queries.shape[3], features)[:, 1:] + edge.unsqueeze(2)
    count = rows.shape[2]
    scores = torch.bmm(rows.exp_().flatten(0, 1), keys.exp_().view(-1, others * block, features).mT)
    seen = value.reshape(-1, RADIX * block, width)[:, :-block]
    scores = scores.view(-1, others * count, others * block)
    if weigh is not None:
        scores = weigh(scores, (block, RADIX * block), (0, others * block))
    added = torch.bmm(scores, seen)
    out.view(-1, RADIX, count, width)[:, 1:].add_(added.view(-1, others, count, width))


def with_tokens(
    out: Tensor,
    queries: Tensor,
    logs: Tensor,
    value: Tensor,
    top: Tensor,
    later: Tensor,
    weigh: Weigh | None = None,
) -> Tensor:
    """(N, n, C R, W) and what tokens get from themselves and from those before them in their block of four."""
    (repeats, features), width = queries.shape[3:], value.shape[3]
    edge = top.view(-1, RADIX, 1, features)
    keys = logs.reshape(-1, 1, RADIX, features) - edge.masked_fill(later[:RADIX, :RADIX, None], torch.inf)
    rows = queries.view(-1, RADIX, repeats, features) + edge
    scores = torch.bmm(rows.exp_().flatten(0, 1), keys.exp_().flatten(0, 1).mT)
    scores = scores.view(-1, RADIX * repeats, RADIX)
    if weigh is not None:
        scores = weigh(scores, (0, RADIX), (0, RADIX))
    return torch.baddbmm(out.view(-1, RADIX * repeats, width), scores, value.reshape(-1, RADIX, width))
