"""Linear attention with all chunks of a segment at once: bidirectional, and causal with a state.

    out_i = phi(q_i)^T sum_j phi(k_j) v_j^T / phi(q_i)^T sum_j phi(k_j)          (Performer, Eq. 4 and 11)

The same function as `linear.linear_attention` and `causal.causal_attention`, whose loops run over chunks: theirs is the
least memory, this one the fewest operators, whose number grows with log L within a segment (`layout`). All of it is
plain differentiable torch.

Memory beyond inputs and outputs, in numbers of a segment's mapped queries, U = B H T M <= `layout.SEGMENT`, for a map
that needs no more itself: bidirectional 3 U; causal 14 U, most of it keys that are mapped once for each query of their
block of 8, and 2 U (E + 1) / 64 for the sums of the chunks. The backward pass keeps the inputs and a state per segment,
and goes through one segment at a time, with twice as much, and in a causal call three times.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from kernelformer.attention.plain.layout import (
    RowSums,
    causal_chunk,
    hidden_keys,
    of_samples,
    recomputed,
    sample_blocks,
    spans,
)
from kernelformer.attention.plain.positive import PositiveMap
from kernelformer.attention.plain.signed import SignedMap
from kernelformer.contract import PositiveSpec, SignedSpec, Spec, compute_dtype, lookup

Mapped = Any  # queries or keys as a family maps them: tensors or tuples of tensors
Kept = Any  # what a family keeps of keys: a tuple of tensors


class PlainMap(Protocol):
    """A feature map with its tensors, and sums over all of its keys or over those up to each query.

    Shapes: N rows of samples and key heads, L queries of R heads each.
    """

    def queries(self, x: Tensor, groups: int) -> Mapped:
        """Map queries (B, H, L, D) of ``groups`` key heads."""

    def keys(self, x: Tensor, value: Tensor, hidden: Tensor | None) -> Mapped:
        """Map keys (B, G, S, D), of which those at ``hidden`` (B, 1, S, 1) do not count, and take their values."""

    def padded(self, keys: Mapped, before: int, after: int) -> Mapped:
        """Mapped keys with so many that nobody sees around them."""

    def load(self, state: Sequence[Tensor]) -> Kept:
        """Sums from the tensors of a state, (B, G, ...) each, in the dtype of the arithmetic."""

    def store(self, kept: Kept, groups: int) -> list[Tensor]:
        """The tensors of a state from sums."""

    def absorb(self, keys: Mapped, before: Kept | None) -> Kept:
        """Sums of keys and of those before them."""

    def read(self, queries: Mapped, kept: Kept) -> RowSums:
        """What queries get from all keys of the sums."""

    def causal(self, queries: Mapped, keys: Mapped, before: Kept | None, size: int) -> tuple[RowSums, Kept]:
        """What queries get from as many keys up to their own and from earlier sums, in chunks of ``size``."""

    def finish(self, part: RowSums) -> Tensor:
        """Outputs (N, L, R, E)."""


def make_map(spec: Spec, tensors: Sequence[Tensor], scale: float, normalize: bool, parts: bool = False) -> PlainMap:
    """Bind a spec to its tensors, (B or 1, G or 1, ...) each; with ``parts`` its rows are merged with others."""
    if isinstance(spec, PositiveSpec):
        return PositiveMap(spec, tensors, scale, normalize, parts)
    assert isinstance(spec, SignedSpec)
    return SignedMap(spec, tensors, scale, normalize, parts)


def plain_linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    spec: str,
    tensors: Sequence[Tensor],
    scale: float,
    key_mask: Tensor | None = None,
    normalize: bool = True,
) -> Tensor:
    """Attend to all keys, of which there are some; arguments and result as those of `linear.linear_attention`."""
    numbers = query.shape[1] * lookup(spec).feature_dim(tensors, query.shape[3])
    blocks = sample_blocks(query.shape[0], max(query.shape[2], key.shape[2]), numbers)
    if len(blocks) > 1:
        how: dict[str, Any] = {"spec": spec, "scale": scale, "normalize": normalize}
        parts = [
            plain_linear_attention(
                query[b], key[b], value[b], tensors=of_samples(tensors, b), key_mask=_part(key_mask, b), **how
            )
            for b in blocks
        ]
        return torch.cat(parts)
    phi = make_map(lookup(spec), tensors, scale, normalize)
    numbers = numbers * query.shape[0]
    kept: Kept | None = None
    for start, end in spans(key.shape[2], numbers, 1):
        k, v, hidden = key[:, :, start:end], value[:, :, start:end], hidden_keys(key_mask, start, end)
        kept = recomputed(partial(_absorb, phi), k, v, hidden, kept, learned=tensors)
    outs = []
    for start, end in spans(query.shape[2], numbers, 1):
        outs.append(recomputed(partial(_read, phi, key.shape[1]), query[:, :, start:end], kept, learned=tensors))
    return join_segments(outs)


def plain_causal_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    spec: str,
    tensors: Sequence[Tensor],
    scale: float,
    key_mask: Tensor | None = None,
    normalize: bool = True,
    state: Sequence[Tensor] | None = None,
    streams: bool = True,
) -> tuple[Tensor, list[Tensor]]:
    """Attend to the keys up to one's own position; arguments and results as those of `causal.causal_attention`.

    Where nothing ``streams``, there is no state after the last key.
    """
    numbers = query.shape[1] * lookup(spec).feature_dim(tensors, query.shape[3])
    blocks = sample_blocks(query.shape[0], query.shape[2], numbers)
    if len(blocks) > 1:
        how: dict[str, Any] = {"spec": spec, "scale": scale, "normalize": normalize, "streams": streams}
        parts = [
            plain_causal_attention(
                query[b], key[b], value[b], tensors=of_samples(tensors, b), key_mask=_part(key_mask, b),
                state=None if state is None else [x[b] for x in state], **how,
            )
            for b in blocks
        ]  # fmt: skip
        return torch.cat([x for x, _ in parts]), [torch.cat(x) for x in zip(*(y for _, y in parts), strict=True)]
    phi, length = make_map(lookup(spec), tensors, scale, normalize), query.shape[2]
    numbers = numbers * query.shape[0]
    kept = None if state is None else phi.load([x.to(compute_dtype(query.dtype)) for x in state])
    size, outs = causal_chunk(length), []
    for start, end in spans(length, numbers, size):
        inputs = (x[:, :, start:end] for x in (query, key, value))
        hidden = hidden_keys(key_mask, start, end)
        out, kept = recomputed(partial(_causal, phi, size), *inputs, hidden, kept, learned=tensors)
        outs.append(out)
    assert kept is not None
    return join_segments(outs), phi.store(kept, key.shape[1]) if streams else []


def _part(key_mask: Tensor | None, block: slice) -> Tensor | None:
    return None if key_mask is None else key_mask[block]


def _absorb(phi: PlainMap, key: Tensor, value: Tensor, hidden: Tensor | None, kept: Kept | None) -> Kept:
    return phi.absorb(phi.keys(key, value, hidden), kept)


def _read(phi: PlainMap, groups: int, query: Tensor, kept: Kept) -> Tensor:
    return by_head(phi.finish(phi.read(phi.queries(query, groups), kept)), query)


def _causal(
    phi: PlainMap, size: int, query: Tensor, key: Tensor, value: Tensor, hidden: Tensor | None, kept: Kept | None
) -> tuple[Tensor, Kept]:
    missing = query.shape[2] - key.shape[2]
    if missing > 0:  # queries beyond the last key: keys that nobody sees
        if hidden is None:
            hidden = torch.zeros(1, 1, key.shape[2], 1, dtype=torch.bool, device=key.device)
        hidden = F.pad(hidden, (0, 0, 0, missing), value=True)
        key, value = (F.pad(x, (0, 0, 0, missing)) for x in (key, value))
    mapped = phi.queries(query, key.shape[1])
    part, after = phi.causal(mapped, phi.keys(key, value, hidden), kept, size)
    return by_head(phi.finish(part), query), after


def by_head(rows: Tensor, query: Tensor) -> Tensor:
    """Rows (N, L, R, E) as (B, H, L, E), in the dtype of the queries."""
    return rows.transpose(1, 2).reshape(*query.shape[:3], rows.shape[3]).to(query.dtype)


def join_segments(parts: Sequence[Tensor]) -> Tensor:
    """Outputs (B, H, T, E) of consecutive segments as one."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), 2)
