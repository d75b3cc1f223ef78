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
    CHUNK,
    RowSums,
    causal_chunk,
    cut,
    hidden_keys,
    of_samples,
    recomputed,
    sample_blocks,
    spans,
    whole_chunks,
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

    def faded(self, keys: Mapped, log: Tensor) -> Mapped:
        """Mapped keys times ``exp(log)``, (N, S, 1)."""

    def padded(self, keys: Mapped, before: int, after: int) -> Mapped:
        """Mapped keys with so many that nobody sees around them."""

    def load(self, state: Sequence[Tensor]) -> Kept:
        """Sums from the tensors of a state, (B, G, ...) each, in the dtype of the arithmetic."""

    def store(self, kept: Kept, groups: int) -> list[Tensor]:
        """The tensors of a state from sums."""

    def absorb(self, keys: Mapped, before: Kept | None) -> Kept:
        """Sums of keys and of those before them."""

    def read(self, queries: Mapped, kept: Kept) -> RowSums:
        """Read of all keys of the sums."""

    def causal(self, queries: Mapped, keys: Mapped, before: Kept | None, size: int) -> tuple[RowSums, Kept]:
        """Read of as many keys up to each query's own and of earlier sums, in chunks of ``size``."""

    def finish(self, part: RowSums) -> Tensor:
        """Outputs (N, L, R, E)."""


def make_map(
    spec: Spec, tensors: Sequence[Tensor], scale: float, normalize: bool, parts: bool = False, fades: bool = False
) -> PlainMap:
    """Bind a spec to its tensors, (B or 1, G or 1, ...) each.

    Args:
        spec: the map.
        tensors: its own.
        scale: the map sees ``sqrt(scale) x``.
        normalize: divide by the sum of the weights.
        parts: its rows are merged with others.
        fades: weights fall with distance.
    """
    if isinstance(spec, PositiveSpec):
        return PositiveMap(spec, tensors, scale, normalize, parts)
    assert isinstance(spec, SignedSpec)
    return SignedMap(spec, tensors, scale, normalize, parts, fades)


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
    blocks = sample_blocks(query, max(query.shape[2], key.shape[2]), numbers)
    if len(blocks) > 1:
        how: dict[str, Any] = {"spec": spec, "scale": scale, "normalize": normalize}
        parts = [
            plain_linear_attention(
                query[b], key[b], value[b], tensors=of_samples(tensors, b), key_mask=_part(key_mask, b), **how
            )
            for b in blocks
        ]
        return torch.cat(parts)
    length = query.shape[2]
    if torch.compiler.is_exporting():  # also where a length is a formula: all tokens of a text and one before them
        (query,), _ = whole_chunks((query,), (), CHUNK)
        (key, value), (key_mask,) = whole_chunks((key, value), [key_mask], CHUNK)
    phi = make_map(lookup(spec), tensors, scale, normalize)
    numbers = numbers * query.shape[0]
    kept = _sums_of(phi, key, value, key_mask, numbers, tensors)
    queries = cut(query, spans(query, numbers, 1))
    outs = [recomputed(partial(_read, phi, key.shape[1]), x, kept, learned=tensors) for x in queries]
    return join_segments(outs).narrow(2, 0, length)


def _sums_of(
    phi: PlainMap,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    numbers: int,
    tensors: Sequence[Tensor],
    fade: Tensor | None = None,
) -> Kept:
    """Sums of all keys; ``fade`` (B, G, S, 1) is what their log weights have beside."""
    kept: Kept | None = None
    segments = spans(key, numbers, 1)
    fades = [None] * len(segments) if fade is None else cut(fade, segments)
    for (start, end), k, v, log in zip(segments, cut(key, segments), cut(value, segments), fades, strict=True):
        kept = recomputed(partial(_absorb, phi), k, v, hidden_keys(key_mask, start, end), log, kept, learned=tensors)
    return kept


def plain_key_sums(
    key: Tensor,
    value: Tensor,
    *,
    spec: str,
    tensors: Sequence[Tensor],
    scale: float,
    key_mask: Tensor | None = None,
    normalize: bool = True,
    parts: bool = False,
    slope: Tensor | None = None,
    mirror: bool = False,
) -> list[Tensor]:
    """The state of some keys; arguments and result as those of `linear.key_sums`.

    Args:
        slope: (G), key j of S loses ``slope (S - j)`` of its log weight; it takes no gradient.
        mirror: it loses ``slope (j + 1)`` instead.
    """
    phi, fade = make_map(lookup(spec), tensors, scale, normalize, parts, slope is not None), None
    if slope is not None:
        place = torch.arange(key.shape[2], device=key.device, dtype=compute_dtype(key.dtype))
        steps = -(place + 1) if mirror else place - key.shape[2]
        fade = (slope.to(steps.dtype).view(-1, 1, 1) * steps.view(-1, 1)).expand(key.shape[0], -1, -1, -1)
    numbers = key.shape[0] * key.shape[1] * lookup(spec).feature_dim(tensors, key.shape[3])
    return phi.store(_sums_of(phi, key, value, key_mask, numbers, tensors, fade), key.shape[1])


def plain_read_sums(
    query: Tensor,
    state: Sequence[Tensor],
    *,
    spec: str,
    tensors: Sequence[Tensor],
    scale: float,
    normalize: bool = True,
) -> Tensor:
    """Attend to the keys of a state; arguments and result as those of `linear.read_sums`."""
    phi, numbers = (
        make_map(lookup(spec), tensors, scale, normalize),
        query.shape[0] * query.shape[1] * state[1].shape[2],
    )
    kept = phi.load([x.to(compute_dtype(query.dtype)) for x in state])
    function = partial(_read, phi, state[0].shape[1])
    queries = cut(query, spans(query, numbers, 1))
    return join_segments([recomputed(function, x, kept, learned=tensors) for x in queries])


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
    decay: Tensor | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """Attend to the keys up to one's own position; arguments and results as those of `causal.causal_attention`.

    Where nothing ``streams``, there is no state after the last key.

    Args:
        decay: (B, G, S), what each key adds to the logarithms of all earlier weights, at most 0; for signed maps.
    """
    numbers = query.shape[1] * lookup(spec).feature_dim(tensors, query.shape[3])
    blocks = sample_blocks(query, query.shape[2], numbers)
    if len(blocks) > 1:
        how: dict[str, Any] = {"spec": spec, "scale": scale, "normalize": normalize, "streams": streams}
        parts = [
            plain_causal_attention(
                query[b], key[b], value[b], tensors=of_samples(tensors, b), key_mask=_part(key_mask, b),
                state=None if state is None else [x[b] for x in state], decay=_part(decay, b), **how,
            )
            for b in blocks
        ]  # fmt: skip
        return torch.cat([x for x, _ in parts]), [torch.cat(x) for x in zip(*(y for _, y in parts), strict=True)]
    phi, length = make_map(lookup(spec), tensors, scale, normalize), query.shape[2]
    if torch.compiler.is_exporting():
        (query, key, value), (key_mask,) = whole_chunks((query, key, value), [key_mask], CHUNK)
    numbers = numbers * query.shape[0]
    kept = None if state is None else phi.load([x.to(compute_dtype(query.dtype)) for x in state])
    size, outs = causal_chunk(query.shape[2]), []
    segments = spans(query, numbers, size)
    decays = [None] * len(segments) if decay is None else cut(decay.unsqueeze(3), segments)
    pieces = zip(segments, *(cut(x, segments) for x in (query, key, value)), decays, strict=True)
    for (start, end), q, k, v, log in pieces:
        hidden = hidden_keys(key_mask, start, end)
        out, kept = recomputed(partial(_causal, phi, size), q, k, v, hidden, log, kept, learned=tensors)
        outs.append(out)
    assert kept is not None
    return join_segments(outs).narrow(2, 0, length), phi.store(kept, key.shape[1]) if streams else []


def _part(x: Tensor | None, block: slice) -> Tensor | None:
    return None if x is None else x[block]


def _absorb(
    phi: PlainMap, key: Tensor, value: Tensor, hidden: Tensor | None, fade: Tensor | None, kept: Kept | None
) -> Kept:
    keys = phi.keys(key, value, hidden)
    return phi.absorb(keys if fade is None else phi.faded(keys, fade.flatten(0, 1)), kept)


def _read(phi: PlainMap, groups: int, query: Tensor, kept: Kept) -> Tensor:
    return by_head(phi.finish(phi.read(phi.queries(query, groups), kept)), query)


def _causal(
    phi: PlainMap,
    size: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    hidden: Tensor | None,
    decay: Tensor | None,
    kept: Kept | None,
) -> tuple[Tensor, Kept]:
    missing = query.shape[2] - key.shape[2]
    if missing > 0:  # queries beyond the last key: keys that nobody sees
        if hidden is None:
            hidden = torch.zeros(1, 1, key.shape[2], 1, dtype=torch.bool, device=key.device)
        hidden = F.pad(hidden, (0, 0, 0, missing), value=True)
        key, value = (F.pad(x, (0, 0, 0, missing)) for x in (key, value))
        decay = None if decay is None else F.pad(decay, (0, 0, 0, missing))
    mapped = phi.queries(query, key.shape[1])
    mapped_keys = phi.keys(key, value, hidden)
    if decay is None:
        part, after = phi.causal(mapped, mapped_keys, kept, size)
    else:
        assert isinstance(phi, SignedMap)
        part, after = phi.causal(mapped, mapped_keys, kept, size, decay.flatten(0, 1))
    return by_head(phi.finish(part), query), after


def by_head(rows: Tensor, query: Tensor) -> Tensor:
    """Rows (N, L, R, E) as (B, H, L, E), in the dtype of the queries."""
    return rows.transpose(1, 2).reshape(*query.shape[:3], rows.shape[3]).to(query.dtype)


def join_segments(parts: Sequence[Tensor]) -> Tensor:
    """Outputs (B, H, T, E) of consecutive segments as one."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), 2)
