"""Maps by their values, which may be negative, all chunks at once.

    out_i = phi(q_i)^T sum_j phi(k_j) v_j^T / max(phi(q_i)^T sum_j phi(k_j), GUARD |phi(q_i)| sum_j |phi(k_j)|)

Where keys carry log factors ``r_j``, a causal row is relative to the largest that it sees, so that no later key can
push it out of range: factors are numbers per key, and those of all pairs of a chunk, ``exp(r_j - max_{j' <= i} r_j')``,
fit into one triangle. There is nothing to cut into quarters.

A decay per token is a factor, too: relative to the start of its chunk a key has ``r_j - G_j``, where G sums up the log
decays so far. Sums of whole chunks are counted from the start of the segment, in float64 where the device has it.

The guard's sum of lengths is kept as one more row of the sums, of which the column of ones alone counts. Factors of
keys are multiplied with their values, which are fewer numbers than their features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernelformer.attention.plain.layout import RowSums, in_chunks, with_ones
from kernelformer.attention.plain.positive import GROUP, largest_so_far, later_than, states_before
from kernelformer.attention.positive import EMPTY
from kernelformer.attention.reference import GUARD
from kernelformer.contract import SignedSpec, compute_dtype, wide_dtype


class SignedQueries(NamedTuple):
    """Mapped queries: phi (N, L, R, M), and where it counts their log factors (N, L, R, 1)."""

    phi: Tensor
    factor: Tensor | None


class SignedKeys(NamedTuple):
    """Mapped keys.

    Args:
        phi: (N, S, M).
        factor: log factors (N, S, 1), or None.
        value: (N, S, E + 1), values and 1.
        length: ``|phi|`` (N, S, 1) where there is a guard, else None.
    """

    phi: Tensor
    factor: Tensor | None
    value: Tensor
    length: Tensor | None

    def factors(self) -> Tensor:
        """Log factors (N, S, 1) for maps with and without them, -inf for keys that do not count."""
        if self.factor is not None:
            return self.factor
        ones = self.value[..., -1:]
        return torch.zeros_like(ones).masked_fill(ones == 0, -torch.inf)

    def sums(self, size: Tensor | None) -> Tensor:
        """``sum_j size_j phi_j [v_j, 1]``, (N, M, E + 1), and with a guard one row more, the same of the lengths."""
        value = self.value if size is None else self.value * size
        lengths = [] if self.length is None else [self.length.mT @ value]
        return torch.cat([self.phi.mT @ value, *lengths], -2)


class SignedSums(NamedTuple):
    """Sums of some keys.

    Args:
        top: (N, 1), the largest log factor, at least EMPTY; no gradient.
        sums: (N, M, E + 1), or with a guard (N, M + 1, E + 1), relative to ``exp(top)``.
    """

    top: Tensor
    sums: Tensor


class SignedMap:
    """A map by its values with its tensors, and its sums; arguments as those of `positive.PositiveMap`.

    Args:
        fades: sums lose weight with distance, so that they have a scale even if the map has no log factor.
    """

    def __init__(
        self,
        spec: SignedSpec,
        tensors: Sequence[Tensor],
        scale: float,
        normalize: bool,
        parts: bool = False,
        fades: bool = False,
    ) -> None:
        self.spec, self.tensors, self.scale, self.normalize = spec, tensors, scale, normalize
        self.scaled = spec.has_factor or fades
        self.cancels = normalize and not parts  # what queries, or all rows, share
        self.guard, self.length = normalize and spec.guarded, spec.length(self.cancels)

    def lengths(self, phi: Tensor) -> Tensor:
        """``|phi|``, (..., 1)."""
        if self.length is not None:
            return phi.new_full((*phi.shape[:-1], 1), self.length)
        norm: Tensor = torch.linalg.vector_norm(phi, dim=-1, keepdim=True)
        return norm

    def queries(self, x: Tensor, groups: int) -> SignedQueries:
        """(B, H, L, D) -> rows (N, L, R, ...); a factor cancels under normalization."""
        batch, heads, length, width = x.shape
        repeats = heads // groups
        x = x.to(compute_dtype(x.dtype)).reshape(batch, groups, repeats * length, width)
        phi, factor = self.spec.features(x, self.tensors, self.scale, "query", self.cancels)
        phi = phi.reshape(batch * groups, repeats, length, phi.shape[-1]).transpose(1, 2)
        if factor is None or self.cancels:
            return SignedQueries(phi, None)
        return SignedQueries(phi, factor.reshape(batch * groups, repeats, length, 1).transpose(1, 2))

    def keys(self, x: Tensor, value: Tensor, hidden: Tensor | None) -> SignedKeys:
        """(B, G, S, D) -> rows (N, S, ...), zero where hidden (B, 1, S, 1)."""
        dtype = compute_dtype(x.dtype)
        x, value = x.to(dtype), value.to(dtype)
        if hidden is not None:  # it may hold anything, NaN too
            x, value = x.masked_fill(hidden, 0), value.masked_fill(hidden, 0)
        phi, factor = self.spec.features(x, self.tensors, self.scale, "key", self.cancels)
        length = self.lengths(phi) if self.guard else None
        value = with_ones(value)
        if hidden is not None:  # without a factor nothing but the value makes a key count
            value = value.masked_fill(hidden, 0)
            factor = None if factor is None else factor.masked_fill(hidden, -torch.inf)
        rows = (None if x is None else x.flatten(0, 1) for x in (phi, factor, value, length))
        return SignedKeys(*rows)  # type: ignore[arg-type]

    @staticmethod
    def padded(keys: SignedKeys, before: int, after: int) -> SignedKeys:
        """Keys with so many that nobody sees around them."""
        if not before and not after:
            return keys
        ends = (0, 0, before, after)
        factor = None if keys.factor is None else F.pad(keys.factor, ends, value=-torch.inf)
        length = None if keys.length is None else F.pad(keys.length, ends)
        return SignedKeys(F.pad(keys.phi, ends), factor, F.pad(keys.value, ends), length)

    def load(self, state: Sequence[Tensor]) -> SignedSums:
        """From log_scale (B, G, 1, 1), kv (B, G, M, E), k_sum (B, G, M, 1) and norm_sum (B, G, 1, 1)."""
        scale, kv, k_sum, norm_sum = (x.flatten(0, 1) for x in state)
        sums = torch.cat([kv, k_sum], 2)
        if self.guard:
            sums = torch.cat([sums, F.pad(norm_sum, (kv.shape[2], 0))], 1)
        if not self.scaled:  # sums are in units of 1
            scale = torch.zeros_like(scale)
        top = scale.detach().clamp_min(EMPTY)
        return SignedSums(top.squeeze(2), sums * (scale - top).exp())

    def store(self, kept: SignedSums, groups: int) -> list[Tensor]:
        """To the four tensors of a state."""
        features = kept.sums.shape[1] - int(self.guard)
        sums, width = kept.sums[:, :features], kept.sums.shape[2] - 1
        norm_sum = kept.sums[:, features:, width:] if self.guard else sums.new_zeros(sums.shape[0], 1, 1)
        top = kept.top if self.scaled else torch.full_like(kept.top, EMPTY)
        tensors = (top.unsqueeze(2), sums[..., :width], sums[..., width:], norm_sum)
        return [x.unflatten(0, (x.shape[0] // groups, groups)) for x in tensors]

    def absorb(self, keys: SignedKeys, before: SignedSums | None) -> SignedSums:
        """Sums of all keys, and of those before them."""
        top, size = self._empty_top(keys.phi) if before is None else before.top, None
        if keys.factor is not None and keys.phi.shape[1]:
            top = torch.maximum(top, keys.factor.detach().amax(1))
            size = (keys.factor - top.unsqueeze(1)).exp_()
        kept = None if before is None else before.sums * (before.top - top).exp().unsqueeze(2)
        sums = keys.sums(size)  # last: the backward pass computes again up to the last product, and not that
        return SignedSums(top, sums if kept is None else kept + sums)

    def read(self, queries: SignedQueries, kept: SignedSums) -> RowSums:
        """Reads of sums by queries."""
        phi, features = queries.phi, queries.phi.shape[3]
        sums = (phi.flatten(1, 2) @ kept.sums[:, :features]).view(*phi.shape[:3], kept.sums.shape[2])
        guard = self.lengths(phi) * kept.sums[:, None, features:, -1:] if self.guard else None
        return RowSums(self._log(queries, kept.top.view(-1, 1, 1)), sums, guard)

    @staticmethod
    def _log(queries: SignedQueries, top: Tensor) -> Tensor:
        """The log of the size of a row."""
        return top if queries.factor is None else top + queries.factor.squeeze(3)

    def _empty_top(self, like: Tensor) -> Tensor:
        """The largest log factor of no keys, (N, 1)."""
        return like.new_full((like.shape[0], 1), EMPTY if self.scaled else 0.0)

    @staticmethod
    def faded(keys: SignedKeys, log: Tensor) -> SignedKeys:
        """Keys times ``exp(log)``, (N, S, 1)."""
        return keys._replace(factor=keys.factors() + log)

    def causal(
        self,
        queries: SignedQueries,
        keys: SignedKeys,
        before: SignedSums | None,
        size: int,
        decay: Tensor | None = None,
    ) -> tuple[RowSums, SignedSums]:
        """Sums of the keys up to each query's own and of those before, as the queries weigh them.

        Args:
            queries: mapped queries.
            keys: as many mapped keys.
            before: sums of earlier keys.
            size: tokens of a chunk.
            decay: (N, L, 1), what each token adds to the logarithms of all earlier weights; at most 0.

        Returns:
            the rows' sums, and the sums after the last key.
        """
        (rows, length, repeats, features), width = queries.phi.shape, keys.value.shape[2]
        phi_q, phi_k, value = (in_chunks(x, size) for x in (queries.phi, keys.phi, keys.value))
        chunked = SignedKeys(phi_k, None, value, None if keys.length is None else in_chunks(keys.length, size))
        first_top = self._empty_top(keys.phi) if before is None else before.top
        chunks, later = phi_k.shape[1], later_than(max(GROUP + 1, size), phi_k)
        if keys.factor is None and decay is None:
            visible, share = (later[:size, :size] == 0).to(phi_k.dtype), None
            own, last = first_top.view(-1, 1, 1), first_top
            own_sums = chunked.sums(None)
            first = torch.zeros_like(own_sums[:, :1]) if before is None else before.sums.unsqueeze(1)
            sums = torch.cat([first, own_sums], 1).cumsum(1)
            states, after = sums[:, :-1], sums[:, -1]
        else:
            factor, past = in_chunks(keys.factors(), size, -torch.inf), None
            if decay is not None:
                past = in_chunks(decay, size).cumsum(2)
                factor = factor - past
            over_chunk, later_keys = None if past is None else past[:, :, -1], later[:size, :size]
            top, edges, starts = _tops(factor.detach(), first_top, over_chunk, later_keys)
            share, last = (edges[:, :-1].unsqueeze(2) - top).exp(), edges[:, -1]
            visible = (factor.mT - top).sub_(later_keys).exp()
            ends = edges[:, 1:] if past is None else edges[:, 1:] - past[:, :, -1]
            sums = chunked.sums((factor - ends.unsqueeze(2)).exp())
            if before is not None:  # one more chunk, before the first
                sums = torch.cat([before.sums.unsqueeze(1), sums], 1)
                starts = torch.cat([starts[:, :1], starts], 1)
            states, after = states_before(sums, starts, later)
            states = states[:, states.shape[1] - chunks :]
            own = (top if past is None else top + past).flatten(1, 2)[:, :length]  # (N, L, 1)
        flat = phi_q.flatten(2, 3)
        past = flat @ states[:, :, :features]
        scores = (flat @ phi_k.mT).unflatten(2, (size, repeats)) * visible.unsqueeze(-2)
        past = past if share is None else _per_row(past, share, repeats)
        out = (past + scores.flatten(2, 3) @ value).view(rows, chunks * size, repeats, width)[:, :length]
        guard = None
        if chunked.length is not None:
            lengths = states[:, :, features:, -1:]
            lengths = (lengths if share is None else lengths * share) + visible @ (chunked.length * value[..., -1:])
            guard = (self.lengths(phi_q) * lengths.unsqueeze(3)).flatten(1, 2)[:, :length]
        return RowSums(self._log(queries, own), out, guard), SignedSums(last, after)

    def finish(self, part: RowSums) -> Tensor:
        """Outputs (N, L, R, E); zero where the denominator is not positive."""
        num = part.sums[..., :-1]
        if not self.normalize:
            root = (0.5 * part.log).exp().unsqueeze(3)  # twice: the size itself may lie beyond float range
            return num * root * root
        den = part.sums[..., -1:]
        den = den if part.guard is None else torch.maximum(den, GUARD * part.guard)
        return num / torch.where(den > torch.finfo(den.dtype).tiny, den, torch.inf)


def _tops(factor: Tensor, first: Tensor, past: Tensor | None, later: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The largest log factor up to each key (N, n, C, 1), and up to each edge of a chunk (N, n + 1, 1) in two ways.

    Args:
        factor: (N, n, C, 1), counted from the start of a chunk.
        first: (N, 1), the largest before the first chunk.
        past: (N, n, 1), the log decay over each chunk; None: none.
        later: `later_than` of C.

    Returns:
        the largest up to each key; up to each edge, counted from there; and counted from the first edge.
    """
    inside = (factor.mT - later).amax(3, keepdim=True)
    if past is None:
        edges = largest_so_far(torch.cat([first.unsqueeze(1), inside[:, :, -1]], 1), 1)
        return torch.maximum(inside, edges[:, :-1].unsqueeze(2)), edges, edges
    sums = F.pad(past.detach().to(wide_dtype(past)).cumsum(1), (0, 0, 1, 0))  # (N, n + 1, 1)
    starts = largest_so_far(torch.cat([first.unsqueeze(1).to(sums.dtype), inside[:, :, -1] - sums[:, :-1]], 1), 1)
    edges = (starts + sums).to(factor.dtype)
    sums = F.pad(past.to(sums.dtype).cumsum(1), (0, 0, 1, 0))  # which the sums of chunks have their gradients from
    return torch.maximum(inside, edges[:, :-1].unsqueeze(2)), edges, edges.to(sums.dtype) - sums


def _per_row(x: Tensor, share: Tensor, repeats: int) -> Tensor:
    """Rows (N, n, C R, W) times a number per token (N, n, C, 1)."""
    rows: Tensor = x.unflatten(2, (share.shape[2], repeats))
    return (rows * share.unsqueeze(3)).flatten(2, 3)


def own_scale(part: RowSums) -> RowSums:
    """Rows relative to their denominator or guard, so that what they are added to stays a number where they are not."""
    size = part.sums[..., -1].detach().abs()
    if part.guard is not None:
        size = torch.maximum(size, part.guard.detach().squeeze(3))
    some = size > 0
    log, size = torch.where(some, size.log() + part.log, EMPTY), torch.where(some, size, 1.0).unsqueeze(3)
    return RowSums(log, part.sums / size, None if part.guard is None else part.guard / size)
