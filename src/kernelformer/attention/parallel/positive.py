"""Positive maps, all chunks at once: exact, without eps, and without a row that has to be computed again.

With ``l(x) = log phi(x)`` and the running maximum of the keys, feature by feature,

    top_im = max_{j <= i} l_m(k_j)        log_i = max_m (l_m(q_i) + top_im) = max_{j <= i, m} (l_m(q_i) + l_m(k_j))
    sums_i = sum_{j <= i} sum_m exp(l_m(q_i) + l_m(k_j) - log_i) [v_j, 1]

is at least 1 in its last entry, which is the denominator. A block of queries and a block of keys before it meet in a
product, split at what is the largest up to the edge between them,

    exp(l_m(q_i) + edge_m - log_i) exp(l_m(k_j) - edge_m)        l_m(k_j) <= edge_m <= top_im

Both factors are at most 1, so that nothing overflows, and what underflows is nothing against the denominator: a later
key, however large, is in none of the three. Blocks are the state before a chunk, and within a chunk of 64 the blocks of
8 and the tokens in these: products of 8 x 56 and 1 x 8, each for all chunks at once.

All maxima are gauges, which cancel: no gradient goes through them.

Memory: keys are mapped 6 times for the blocks, and then 8 times for the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from kernelformer.attention.parallel.layout import RowSums, in_chunks, with_ones
from kernelformer.attention.parallel.rows import CausalRows, KeySums
from kernelformer.attention.positive import EMPTY
from kernelformer.contract import PositiveSpec, compute_dtype

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

    @staticmethod
    def absorb(keys: tuple[Tensor, Tensor], before: KeySums | None) -> KeySums:
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
        self,
        logs: Tensor,
        keys: tuple[Tensor, Tensor],
        before: KeySums | None,
        size: int,
        slope: Tensor | None = None,
    ) -> tuple[RowSums, KeySums]:
        """What queries (N, L, R, M) get from the keys (N, L, M) up to their own, and from those before.

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
