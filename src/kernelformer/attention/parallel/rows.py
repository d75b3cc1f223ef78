"""Rows of queries under a positive map that see the keys up to their own, all chunks at once; see `positive`."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from kernelformer.attention.parallel.layout import RADIX, in_chunks
from kernelformer.attention.parallel.scan import GROUP, filled_up, later_than, running_sums
from kernelformer.attention.positive import EMPTY

# Multiplies scores (X, a, b) of queries and keys at consecutive places by numbers of their distance.
Weigh = Callable[[Tensor, tuple[int, int], tuple[int, int]], Tensor]


class KeySums(NamedTuple):
    """What is kept of some keys.

    Args:
        top: (N, M), the largest log feature, at least EMPTY; no gradient.
        sums: (N, M, E + 1), ``sum_j exp(l(k_j) - top) [v_j, 1]``.
    """

    top: Tensor
    sums: Tensor


class CausalRows:
    """Queries and as many keys, in chunks.

    Args:
        logs: of the queries, (N, L, R, M).
        keys: their log features (N, L, M), -inf where hidden, and their values (N, L, E + 1).
        before: sums of earlier keys, which all queries see.
        size: tokens of a chunk.
    """

    def __init__(self, logs: Tensor, keys: tuple[Tensor, Tensor], before: KeySums | None, size: int) -> None:
        self.length, self.size, self.before = logs.shape[1], size, before
        self.queries = in_chunks(logs, size)  # (N, n, C, R, M)
        self.keys, self.value = in_chunks(keys[0], size, -torch.inf), in_chunks(keys[1], size)
        self.chunks, self.later = self.keys.shape[1], later_than(GROUP, logs.device)
        # The sums before the first chunk, and room to fill up groups.
        self.more = filled_up(self.chunks + 1) - self.chunks
        self.top, self.edges = self._tops()
        self.scale = (self.queries.detach() + self.top.unsqueeze(3)).amax(4).clamp_min(EMPTY / 2)

    def _tops(self) -> tuple[Tensor, Tensor]:
        """The largest log feature up to each key, (N, n, C, M), and up to each edge of a chunk, (N, n + more, M)."""
        inside = self.keys.detach().cummax(2).values
        empty = inside.new_full((inside.shape[0], self.more, inside.shape[3]), EMPTY)
        first = empty[:, :1] if self.before is None else self.before.top.unsqueeze(1)
        edges = torch.cat([first, inside[:, :, -1], empty[:, 1:]], 1).cummax(1).values
        return torch.maximum(inside, edges[:, : self.chunks].unsqueeze(2)), edges

    @property
    def log(self) -> Tensor:
        """The logarithm of the largest weight of a feature that a row sees, (N, L, R); no gradient."""
        return self.scale.flatten(1, 2)[:, : self.length]

    def relative(self, log: Tensor | None = None) -> Tensor:
        """Queries (N, n, C, R, M) without their own logarithm, or without ``log`` (N, L, R), which is no smaller."""
        log = self.scale if log is None else in_chunks(log, self.size, -EMPTY)
        return self.queries - log.unsqueeze(4)

    def running(self) -> Tensor:
        """Sums of all keys up to each edge of a chunk, (N, n + more, M, E + 1), relative to ``edges``."""
        sums = (self.keys - self.edges[:, 1 : self.chunks + 1].unsqueeze(2)).exp_().mT @ self.value
        zeros = sums.new_zeros(sums.shape[0], self.more, *sums.shape[2:])
        first = zeros[:, :1] if self.before is None else self.before.sums.unsqueeze(1)
        return running_sums(torch.cat([first, sums, zeros[:, 1:]], 1), self.edges, self.later)

    def read(self, queries: Tensor, sums: Tensor, lag: int = 0) -> Tensor:
        """What queries get from all keys up to ``lag`` chunks before their own, (N, n, C R, E + 1)."""
        if lag:
            place = (torch.arange(self.chunks, device=sums.device) - lag).clamp_(0)
            edges, sums = self.edges.index_select(1, place), sums.index_select(1, place)
        else:
            edges, sums = self.edges[:, : self.chunks], sums[:, : self.chunks]
        return (queries + edges[:, :, None, None]).exp_().flatten(2, 3) @ sums

    def inside(self, out: Tensor, queries: Tensor, weigh: Weigh | None = None) -> Tensor:
        """``out``, which is changed, with what queries get from the keys of their own chunk up to theirs."""
        block = self.size // RADIX
        while block > 1:
            self._add_quarters(out, queries, block, weigh)
            block //= RADIX
        return self._with_tokens(out, queries, weigh)

    def sums(self, log: Tensor | None = None) -> tuple[Tensor, KeySums]:
        """What the rows sum up, (N, L, R, E + 1), and the sums after the last key.

        Args:
            log: (N, L, R), what a row's sums shall be relative to, at least its own; default that. Its gradient is
                that of a factor ``exp(-log)``.
        """
        queries, sums = self.relative(log), self.running()
        out = self.inside(self.read(queries, sums), queries)
        after = KeySums(self.edges[:, self.chunks], sums[:, self.chunks])
        return self.by_token(out), after

    def by_token(self, out: Tensor) -> Tensor:
        """Rows of chunks as (N, L, R, E + 1)."""
        rows, chunks, _, repeats, _ = self.queries.shape
        return out.view(rows, chunks * self.size, repeats, self.value.shape[3])[:, : self.length]

    def _add_quarters(self, out: Tensor, queries: Tensor, block: int, weigh: Weigh | None) -> None:
        """Add what the 2nd to 4th of four blocks get from the blocks before them to (N, n, C R, W)."""
        others, features, width = RADIX - 1, self.keys.shape[3], self.value.shape[3]
        edge = self.top.view(-1, RADIX, block, features)[:, :-1, -1]  # (X, 3, M), before the 2nd, 3rd and 4th block
        limit = edge.unsqueeze(2).masked_fill(self.later[:others, :others, None], torch.inf)  # (X, query, key block, M)
        keys = self.keys.reshape(-1, 1, RADIX, block, features)[:, :, :-1] - limit.unsqueeze(3)
        rows = queries.view(-1, RADIX, block * queries.shape[3], features)[:, 1:] + edge.unsqueeze(2)
        count = rows.shape[2]
        scores = torch.bmm(rows.exp_().flatten(0, 1), keys.exp_().view(-1, others * block, features).mT)
        scores = scores.view(-1, others * count, others * block)
        if weigh is not None:
            scores = weigh(scores, (block, RADIX * block), (0, others * block))
        added = torch.bmm(scores, self.value.reshape(-1, RADIX * block, width)[:, :-block])
        out.view(-1, RADIX, count, width)[:, 1:].add_(added.view(-1, others, count, width))

    def _with_tokens(self, out: Tensor, queries: Tensor, weigh: Weigh | None) -> Tensor:
        """(N, n, C R, W) and what tokens get from themselves and from those before them in their block of four."""
        (repeats, features), width = queries.shape[3:], self.value.shape[3]
        edge = self.top.view(-1, RADIX, 1, features)
        keys = self.keys.reshape(-1, 1, RADIX, features) - edge.masked_fill(self.later[:RADIX, :RADIX, None], torch.inf)
        rows = queries.view(-1, RADIX, repeats, features) + edge
        scores = torch.bmm(rows.exp_().flatten(0, 1), keys.exp_().flatten(0, 1).mT).view(-1, RADIX * repeats, RADIX)
        if weigh is not None:
            scores = weigh(scores, (0, RADIX), (0, RADIX))
        value = self.value.reshape(-1, RADIX, width)
        return torch.baddbmm(out.view(-1, RADIX * repeats, width), scores, value)
