"""Rows of queries under a positive map that see the keys up to their own, all chunks at once; see `positive`.

A graph of `torch.export` has no running maxima, which ONNX lacks, and any number of chunks. Its sums over chunks are
one cumulative sum in float64, and so are the weights of the pairs of a chunk: a key whose features are smaller than
those of a later one by up to e^1000 is exact, and beyond that it counts as nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernelformer.attention.plain.layout import BLOCK, RowSums, in_chunks, with_ones
from kernelformer.attention.positive import EMPTY
from kernelformer.contract import PositiveSpec, compute_dtype, wide_dtype

GROUP = 160  # chunks that are summed up by one product at most: a triangle costs n r numbers a feature


def group_size(count: int) -> int:
    """Chunks of a group: the least with which so many levels do that groups of `GROUP` would need."""
    levels, reach = 1, GROUP
    while reach < count:
        levels, reach = levels + 1, reach * GROUP
    group = 1
    while group**levels < count:
        group += 1
    return group


HEADROOM = 300.0  # factors of up to e^300, products of two up to e^600: float64 reaches from e^-708 to e^709


def largest_so_far(x: Tensor, dim: int) -> Tensor:
    """The largest number up to each chunk; in a graph the logarithm of the sum of their exponentials up to it."""
    if not torch.compiler.is_exporting():
        return x.cummax(dim).values
    wide = x.to(wide_dtype(x))
    top = wide.amax(dim, keepdim=True) - HEADROOM
    sums = (wide - top).exp().cumsum(dim)  # 0 beyond its range: there the largest of the chunk alone
    return torch.maximum(sums.log() + top, wide.clamp_min(EMPTY)).to(x.dtype)


def later_than(size: int, like: Tensor) -> Tensor:
    """Matrix (size, size) that hides later keys when subtracted: inf above the diagonal, 0 elsewhere."""
    return like.new_full((size, size), torch.inf).triu_(1)


def states_before(sums: Tensor, edges: Tensor, later: Tensor, fade: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Sums over all chunks before each one, and over all of them.

    Args:
        sums: (N, n, M, W), that of chunk c relative to ``exp(edges_{c+1})``.
        edges: (N, n + 1, M), or (N, n + 1, 1) for all features; rises along n but for the fade. No gradient.
        later: `later_than` of `GROUP` + 1 or more.
        fade: (N, 1, 1), what sums lose in the logarithm from one edge to the next; None means nothing.

    Returns:
        (N, n, M, W), that of chunk c relative to ``exp(edges_c)``, and (N, M, W), relative to ``exp(edges_n)``.

    Cost: O(n r M W) time for r = n^(1/levels), at most `GROUP`.
    """
    rows, count, features, width = sums.shape
    if torch.compiler.is_exporting():
        return _cumulative(sums, edges)
    group = group_size(count)
    if group == count:
        all_of_them = _triangle(sums, edges.mT, later, fade)  # (N, M, n + 1, W)
        return all_of_them[:, :, :-1].transpose(1, 2), all_of_them[:, :, -1]
    groups = -(-count // group)
    missing = groups * group - count
    if missing:  # chunks after the last, with nothing in them
        sums = torch.cat([sums, sums.new_zeros(rows, missing, features, width)], 1)
        last = edges[:, -1:].expand(-1, missing, -1)
        if fade is not None:
            last = last - fade * torch.arange(1, missing + 1, device=fade.device).unsqueeze(1)
        edges = torch.cat([edges, last], 1)
    tops = edges.unfold(1, group + 1, group)  # (N, groups, M, group + 1)
    per_group = None if fade is None else fade.repeat_interleave(groups, 0)
    inside = _triangle(sums.reshape(-1, group, features, width), tops.flatten(0, 1), later, per_group)
    inside = inside.unflatten(0, (rows, groups))
    of_groups = None if fade is None else group * fade
    before, whole = states_before(inside[:, :, :, -1], edges[:, ::group], later, of_groups)
    gaps = tops[..., :1] - tops[..., :-1]
    if fade is not None:
        gaps = gaps - fade.unsqueeze(3) * torch.arange(group, device=fade.device)
    states = inside[:, :, :, :-1]
    states.addcmul_(gaps.exp_().to(states.dtype).unsqueeze(-1), before.unsqueeze(3))
    return states.transpose(2, 3).flatten(1, 2)[:, :count], whole


def _cumulative(sums: Tensor, edges: Tensor) -> tuple[Tensor, Tensor]:
    """`states_before` for graphs, by one cumulative sum in float64 at one scale."""
    edges = edges.to(wide_dtype(edges)).unsqueeze(3)  # (N, n + 1, M or 1, 1)
    size = (edges - (edges.amax(1, keepdim=True) - HEADROOM)).exp()
    totals = F.pad((sums * size[:, 1:]).cumsum(1), (0, 0, 0, 0, 1, 0))
    states = (totals / torch.where(size > 0, size, 1.0)).to(sums.dtype)
    return states[:, :-1], states[:, -1]


def _triangle(sums: Tensor, tops: Tensor, later: Tensor, fade: Tensor | None) -> Tensor:
    """The sums before each chunk of one group and after the last, (N, M, r + 1, W); tops are (N, M or 1, r + 1)."""
    count = sums.shape[1]
    gaps = tops[..., 1:].unsqueeze(-2) - tops.unsqueeze(-1)  # (N, M or 1, r + 1, r)
    hidden = later[: count + 1, 1 : count + 1]
    if fade is not None:
        places = torch.arange(count + 1, device=fade.device)
        hidden = hidden + fade.unsqueeze(3) * (places.unsqueeze(1) - places[1:])
    decay = gaps.sub_(hidden).exp_().to(sums.dtype)
    if tops.shape[1] == 1:  # one decay for all features
        return (decay.squeeze(1) @ sums.flatten(2)).view(-1, count + 1, *sums.shape[2:]).transpose(1, 2)
    return decay @ sums.transpose(1, 2)


# Multiplies scores (X, a, b) of queries and keys at consecutive places by numbers of their distance.
Weigh = Callable[[Tensor, tuple[int, int], tuple[int, int]], Tensor]


class KeySums(NamedTuple):
    """Sums of some keys.

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
        self.chunks, self.later = self.keys.shape[1], later_than(max(GROUP, BLOCK) + 1, keys[0])
        self.slope, self.fade = slope, None if slope is None else slope * size
        if slope is not None:
            line = slope.unsqueeze(3) * torch.arange(size, device=slope.device).unsqueeze(1)  # (N, 1, C, 1)
            self.queries, self.keys = self.queries - line.unsqueeze(3), self.keys + line
        self.top, self.edges = self._tops()
        self.scale = (self.queries.detach() + self.top.unsqueeze(3)).amax(4)  # about EMPTY where no key is seen
        if torch.compiler.is_exporting():
            self.pairs, self.unit = self._wide_pairs()
            log = (self.pairs.detach().sum(3).log() + self.unit.squeeze(3)).to(self.scale.dtype)
            self.scale = torch.maximum(self.scale, log.view_as(self.scale))

    def _tops(self) -> tuple[Tensor, Tensor]:
        """The largest log feature up to each key, (N, n, C, M), and up to each edge of a chunk, (N, n + 1, M)."""
        keys, in_graph = self.keys.detach(), torch.compiler.is_exporting()
        inside = keys.amax(2, keepdim=True) if in_graph else keys.cummax(2).values
        if self.before is None:
            first = inside.new_full((inside.shape[0], 1, inside.shape[3]), EMPTY)
        else:
            first = self.before.top.unsqueeze(1)
        edges = torch.cat([first.mT, inside[:, :, -1].mT], 2)  # chunks last in memory, as the scan wants them
        if self.fade is None:
            edges = largest_so_far(edges, 2).mT
        else:  # as if all counted from the start of the first chunk, and back
            steps = self.fade * torch.arange(self.chunks + 1, device=edges.device)
            edges = ((edges + (steps - self.fade).clamp_min_(0)).cummax(2).values - steps).mT
        before = edges[:, :-1].unsqueeze(2)
        return before if in_graph else torch.maximum(inside, before), edges

    def _wide_pairs(self) -> tuple[Tensor, Tensor]:
        """Weights of a chunk's queries and keys in float64, (N, n, C R, C), and the log of their unit, (N, n, C R, 1).

        For graphs: the largest of a chunk takes the place of the largest so far.
        """
        peak = self.keys.detach().amax(2, keepdim=True).clamp_min(EMPTY).to(wide_dtype(self.keys))
        rows = self.queries.flatten(2, 3) + peak
        unit = rows.detach().amax(3, keepdim=True)
        pairs = (rows - (unit - HEADROOM)).exp() @ (self.keys - (peak - HEADROOM)).exp().mT
        seen = (self.later[: self.size, : self.size] == 0).unsqueeze(1)
        return (pairs.unflatten(2, (self.size, -1)) * seen).flatten(2, 3), unit - 2 * HEADROOM

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
        """Reads by queries from chunk ``lag`` on of all keys up to so many chunks before theirs, (N, ., C R, E + 1).

        With ``lag`` there are fewer chunks by that number; earlier queries see none of these keys.
        """
        edges = self.edges[:, : self.chunks - lag, None, None]
        if lag and self.fade is not None:
            edges = edges - lag * self.fade[:, :, None, None]
        return (queries[:, lag:] + edges).exp_().flatten(2, 3) @ states[:, : self.chunks - lag]

    def read_before(self, queries: Tensor, count: int) -> Tensor:
        """Reads by the first ``count`` chunks of the keys before the first, (N, count, C R, E + 1)."""
        assert self.before is not None
        top = self.before.top[:, None, None, None]
        if self.fade is not None:
            top = top - (self.fade * torch.arange(count, device=top.device).unsqueeze(1))[:, :, None, None]
        return (queries[:, :count] + top).exp_().flatten(2, 3) @ self.before.sums.unsqueeze(1)

    def inside(self, out: Tensor, queries: Tensor, weigh: Weigh | None = None) -> Tensor:
        """``out``, which is changed, with what queries get from the keys of their own chunk up to theirs."""
        if torch.compiler.is_exporting():
            share = (self.unit - self.scale.flatten(2, 3).unsqueeze(3)).clamp_max(700.0).exp()  # finite for no keys
            return out + (self.pairs * share).to(out.dtype) @ self.value
        if self.size > BLOCK:
            self._add_blocks(out, queries, weigh)
        return self._add_tokens(out, queries, weigh)

    def sums(self) -> tuple[Tensor, KeySums]:
        """Sums of the rows relative to their `log`, (N, L, R, E + 1), and the sums after the last key."""
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


LEAST = 1e-6  # between the denominator of a row that sees a key, which is 1 or more up to rounding, and 0
KEYS = 1024  # keys of a product where all are seen: more of them at once occupy a device better than longer ones


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
        self.tensors, self.scale, self.normalize, self.tied = tensors, scale, normalize, spec.tied
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

    def joint(self, query: Tensor, key: Tensor) -> Tensor:
        """Log features (N, R + 1, L, M) of the queries of a group and of as many keys, by one product of a tied map."""
        batch, groups, length, width = key.shape
        query, key = (x.to(compute_dtype(x.dtype)).view(batch, groups, -1, length, width) for x in (query, key))
        both = torch.cat([query, key], 2)
        logs = self.features(both.flatten(2, 3), self.tensors, self.scale, "key")
        return logs.view(batch * groups, both.shape[2], length, logs.shape[3])

    @staticmethod
    def padded(keys: tuple[Tensor, Tensor], before: int, after: int) -> tuple[Tensor, Tensor]:
        """Keys with so many that nobody sees around them."""
        if not before and not after:
            return keys
        ends = (0, 0, before, after)
        return F.pad(keys[0], ends, value=-torch.inf), F.pad(keys[1], ends)

    @staticmethod
    def faded(keys: tuple[Tensor, Tensor], log: Tensor) -> tuple[Tensor, Tensor]:
        """Keys times ``exp(log)``, (N, S, 1)."""
        return keys[0] + log, keys[1]

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
        if torch.compiler.is_exporting():  # as after a step
            log_mass = log_mass.to(wide_dtype(log_mass))
        return [x.unflatten(0, (-1, groups)) for x in (log_mass, mean)]

    @staticmethod
    def absorb(keys: tuple[Tensor, Tensor], before: KeySums | None) -> KeySums:
        """Sums of all keys, and of those before them."""
        logs, value = keys
        if torch.compiler.is_exporting():  # all at once: there are none before
            top = logs.detach().amax(1).clamp_min(EMPTY)
            return KeySums(top, (logs - top.unsqueeze(1)).exp_().mT @ value)
        size = min(KEYS, max(1, logs.shape[1]))
        logs, value = in_chunks(logs, size, -torch.inf), in_chunks(value, size)
        top = logs.detach().amax((1, 2))
        top = top.clamp_min(EMPTY) if before is None else torch.maximum(top, before.top)
        sums = ((logs - top[:, None, None]).exp_().mT @ value).sum(1)
        if before is not None:
            sums = torch.addcmul(sums, before.sums, (before.top - top).exp().unsqueeze(2))
        return KeySums(top, sums)

    def read(self, logs: Tensor, kept: KeySums) -> RowSums:
        """Reads of sums by queries (N, L, R, M)."""
        logs = logs + kept.top[:, None, None]
        scale = logs.detach().amax(-1).clamp_min(EMPTY / 2)
        rows = (logs - scale.unsqueeze(3)).exp_()
        return RowSums(scale, (rows.flatten(1, 2) @ kept.sums).view(*rows.shape[:3], kept.sums.shape[2]))

    def causal(
        self,
        logs: Tensor,
        keys: tuple[Tensor, Tensor],
        before: KeySums | None,
        size: int,
        slope: Tensor | None = None,
    ) -> tuple[RowSums, KeySums]:
        """Reads by queries (N, L, R, M) of the keys (N, L, M) up to their own, and of those before.

        Args:
            logs: of the queries.
            keys: as `keys` returned them; as many as there are queries.
            before: sums of earlier keys.
            size: tokens of a chunk.
            slope: (N, 1, 1), what the logarithm of a weight loses per token of distance; earlier sums are relative to
                the first query, and those that are returned to the one after the last.

        Returns:
            the rows' sums, and the sums after the last key.
        """
        rows = CausalRows(logs, keys, before, size, slope)
        sums, after = rows.sums()
        return RowSums(rows.log, sums), after

    def finish(self, part: RowSums) -> Tensor:
        """Outputs (N, L, R, E); zero where no key is seen."""
        num = part.sums[..., :-1]
        if self.normalize:
            return num / part.sums[..., -1:].clamp_min(LEAST)
        root = (0.5 * part.log).exp_().unsqueeze(3)  # twice: the size itself may lie beyond float range
        return num * root * root
