"""Rows of queries under a positive map that see the keys up to their own, all chunks at once; see `positive`."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from kernelformer.attention.parallel.layout import BLOCK, in_chunks
from kernelformer.attention.parallel.scan import GROUP, later_than, states_before
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
    """Queries and as many keys, in chunks; log features count from the start of their chunk where they fade.

    Args:
        logs: of the queries, (N, L, R, M).
        keys: their log features (N, L, M), -inf where hidden, and their values (N, L, E + 1).
        before: sums of earlier keys, which all queries see.
        size: tokens of a chunk.
        slope: (N, 1, 1), what the logarithm of a weight loses with every token between query and key; ``before`` is
            relative to the first query.
    """

    def __init__(
        self,
        logs: Tensor,
        keys: tuple[Tensor, Tensor],
        before: KeySums | None,
        size: int,
        slope: Tensor | None = None,
    ) -> None:
        self.length, self.size, self.before = logs.shape[1], size, before
        self.queries = in_chunks(logs, size)  # (N, n, C, R, M)
        self.keys, self.value = in_chunks(keys[0], size, -torch.inf), in_chunks(keys[1], size)
        self.chunks, self.later = self.keys.shape[1], later_than(max(GROUP, BLOCK) + 1, logs)
        self.slope, self.fade = slope, None if slope is None else slope * size
        if slope is not None:
            line = slope.unsqueeze(3) * torch.arange(size, device=slope.device).unsqueeze(1)  # (N, 1, C, 1)
            self.queries, self.keys = self.queries - line.unsqueeze(3), self.keys + line
        self.top, self.edges = self._tops()
        self.scale = (self.queries.detach() + self.top.unsqueeze(3)).amax(4)  # about EMPTY where no key is seen

    def _tops(self) -> tuple[Tensor, Tensor]:
        """The largest log feature up to each key, (N, n, C, M), and up to each edge of a chunk, (N, n + 1, M)."""
        inside = self.keys.detach().cummax(2).values
        if self.before is None:
            first = inside.new_full((inside.shape[0], 1, inside.shape[3]), EMPTY)
        else:
            first = self.before.top.unsqueeze(1)
        edges = torch.cat([first.mT, inside[:, :, -1].mT], 2)  # chunks last in memory, as the scan wants them
        if self.fade is None:
            edges = edges.cummax(2).values.mT
        else:  # as if all counted from the start of the first chunk, and back
            steps = self.fade * torch.arange(self.chunks + 1, device=edges.device)
            edges = ((edges + (steps - self.fade).clamp_min_(0)).cummax(2).values - steps).mT
        return torch.maximum(inside, edges[:, :-1].unsqueeze(2)), edges

    @property
    def log(self) -> Tensor:
        """The logarithm of the largest weight of a feature that a row sees, (N, L, R); no gradient."""
        return self.scale.flatten(1, 2)[:, : self.length]

    def relative(self) -> Tensor:
        """Queries (N, n, C, R, M) without their own logarithm."""
        return self.queries - self.scale.unsqueeze(4)

    def states(self) -> tuple[Tensor, KeySums]:
        """Sums of all keys before each chunk, (N, n, M, E + 1), relative to ``edges``, and of all keys."""
        ends = self.edges[:, 1:]
        mapped = self.keys - (ends if self.fade is None else ends + self.fade).unsqueeze(2)
        sums, edges = mapped.exp_().mT @ self.value, self.edges
        if self.before is not None:  # one more chunk, before the first
            sums = torch.cat([self.before.sums.unsqueeze(1), sums], 1)
            edges = torch.cat([edges[:, :1], edges], 1)
        states, after = states_before(sums, edges, self.later, self.fade)
        top = self.edges[:, -1]
        if self.slope is not None:  # from the end of the last chunk back to that of the tokens
            top = top + self.slope.squeeze(2) * (self.chunks * self.size - self.length)
        return states[:, states.shape[1] - self.chunks :], KeySums(top, after)

    def read(self, queries: Tensor, states: Tensor, lag: int = 0) -> Tensor:
        """What queries from chunk ``lag`` on get from all keys up to so many chunks before theirs, (N, ., C R, E + 1).

        With ``lag`` there are fewer chunks by that number; earlier queries see none of these keys.
        """
        edges = self.edges[:, : self.chunks - lag, None, None]
        if lag and self.fade is not None:
            edges = edges - lag * self.fade[:, :, None, None]
        return (queries[:, lag:] + edges).exp_().flatten(2, 3) @ states[:, : self.chunks - lag]

    def read_before(self, queries: Tensor, count: int) -> Tensor:
        """What the queries of the first ``count`` chunks get from the keys before the first, (N, count, C R, E + 1)."""
        assert self.before is not None
        top = self.before.top[:, None, None, None]
        if self.fade is not None:
            top = top - (self.fade * torch.arange(count, device=top.device).unsqueeze(1))[:, :, None, None]
        return (queries[:, :count] + top).exp_().flatten(2, 3) @ self.before.sums.unsqueeze(1)

    def inside(self, out: Tensor, queries: Tensor, weigh: Weigh | None = None) -> Tensor:
        """``out``, which is changed, with what queries get from the keys of their own chunk up to theirs."""
        if self.size > BLOCK:
            self._add_blocks(out, queries, weigh)
        return self._add_tokens(out, queries, weigh)

    def sums(self) -> tuple[Tensor, KeySums]:
        """What the rows sum up relative to their `log`, (N, L, R, E + 1), and the sums after the last key."""
        queries, (states, after) = self.relative(), self.states()
        return self.by_token(self.inside(self.read(queries, states), queries)), after

    def by_token(self, out: Tensor) -> Tensor:
        """Rows of chunks as (N, L, R, E + 1)."""
        rows, chunks, _, repeats, _ = self.queries.shape
        return out.view(rows, chunks * self.size, repeats, self.value.shape[3])[:, : self.length]

    def _add_blocks(self, out: Tensor, queries: Tensor, weigh: Weigh | None) -> None:
        """Add what all blocks of a chunk but the first get from the blocks before them to (N, n, C R, W)."""
        parts, features, width = self.size // BLOCK, self.keys.shape[3], self.value.shape[3]
        others = parts - 1
        edge = self.top.view(-1, parts, BLOCK, features)[:, :-1, -1]  # (X, p - 1, M), before the 2nd block and so on
        limit = edge.unsqueeze(2) + self.later[:others, :others, None]  # (X, query block, key block, M)
        keys = self.keys.reshape(-1, 1, parts, BLOCK, features)[:, :, :-1] - limit.unsqueeze(3)
        rows = queries.reshape(-1, parts, BLOCK * queries.shape[3], features)[:, 1:] + edge.unsqueeze(2)
        count = rows.shape[2]
        scores = torch.bmm(rows.exp_().flatten(0, 1), keys.exp_().view(-1, others * BLOCK, features).mT)
        scores = scores.view(-1, others * count, others * BLOCK)
        if weigh is not None:
            scores = weigh(scores, (BLOCK, self.size), (0, self.size - BLOCK))
        added = torch.bmm(scores, self.value.reshape(-1, self.size, width)[:, :-BLOCK])
        out.view(-1, parts, count, width)[:, 1:].add_(added.view(-1, others, count, width))

    def _add_tokens(self, out: Tensor, queries: Tensor, weigh: Weigh | None) -> Tensor:
        """Add what tokens get from themselves and from those before them in their block, and return all as rows."""
        (repeats, features), width = queries.shape[3:], self.value.shape[3]
        edge = self.top.view(-1, BLOCK, 1, features)
        keys = (self.keys.reshape(-1, 1, BLOCK, features) - edge).sub_(self.later[:BLOCK, :BLOCK, None])
        rows = queries.reshape(-1, BLOCK, repeats, features) + edge
        scores = torch.bmm(rows.exp_().flatten(0, 1), keys.exp_().flatten(0, 1).mT).view(-1, BLOCK * repeats, BLOCK)
        if weigh is not None:
            scores = weigh(scores, (0, BLOCK), (0, BLOCK))
        return out.view(-1, BLOCK * repeats, width).baddbmm_(scores, self.value.reshape(-1, BLOCK, width))
