"""Packed sequences: several in one row, as segments that do not see each other.

A packed call becomes calls on the segments alone: they are sorted by length into batches, of which less than half is
padding, attended as any other padded batch, and put back. So every method means the same packed and apart, and no
algorithm knows of segments. A state is that of a row's last segment: what came before is hidden by a mask, or, where
it is in the state already, forgotten by the core's `_forget`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernelformer.attention import State
from kernelformer.attention.relative.call import Layout
from kernelformer.errors import shape
from kernelformer.modules.checks import Bias, Call, can_read
from kernelformer.modules.context import segment_before

if TYPE_CHECKING:
    from kernelformer.modules.core import AttentionCore

SHORT = 64  # tokens of segments that are done so fast that a call for more of them is worth some padding
NO_ID = torch.iinfo(torch.int64).min  # the last id of a stream without tokens


class Segments(NamedTuple):
    """Positions of N segments, by row and then by place; on the CPU."""

    row: Tensor  # (N)
    start: Tensor  # (N), in the row
    length: Tensor  # (N)

    @staticmethod
    def of(ids: Tensor) -> Segments:
        """Find the segments of ids (B, L), which must not decrease along a row."""
        ids = ids.cpu()
        left, right = ids[:, :-1], ids[:, 1:]
        if bool((right < left).any()):
            row, column = (right < left).nonzero()[0].tolist()
            raise ValueError(
                f"segment_ids must not decrease along a row, got {int(ids[row, column])} before "
                f"{int(ids[row, column + 1])} at token {column + 1} of row {row}; number the sequences of a row in "
                f"their order."
            )
        row, start = torch.cat([ids[:, :1] == ids[:, :1], left != right], 1).nonzero().unbind(1)
        ends = torch.cat([row * ids.shape[1] + start, torch.tensor([ids.numel()])])
        return Segments(row, start, ends.diff())

    def where(self, chosen: Tensor) -> Segments:
        """Select segments by a bool (N)."""
        return Segments(*(x[chosen] for x in self))

    def buckets(self) -> list[Segments]:
        """Group segments into batches; the longest is at most a third longer than the shortest, or 2x up to SHORT."""
        order = self.length.argsort(stable=True)
        lengths, parts = self.length[order].tolist(), []
        while lengths:
            longest = lengths[-1]
            first = bisect_left(lengths, longest // 2 + 1 if longest <= SHORT else -(-longest * 3 // 4))
            parts.append(self.where(order[first : len(lengths)]))
            del lengths[first:]
        return parts


def check_packed(core: AttentionCore, call: Call) -> None:
    """Check the segment ids of a call: integers (B, L) that fit the core, the bias and the state."""
    ids, state, bias = call.segment_ids, call.state, call.bias
    if state is not None and (state.last_id is None) != (ids is None):
        made, here = ("with", "none") if ids is None else ("without", "some")
        raise ValueError(
            f"the state was made {made} segment_ids, this call has {here}; give them from the start of a stream, or "
            f"start anew with state=None."
        )
    if ids is None:
        return
    if not isinstance(ids, Tensor):
        raise ValueError(f"segment_ids must be a tensor, got {type(ids).__name__}; convert it with torch.as_tensor().")
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise ValueError(f"segment_ids must be integers, got {ids.dtype}; convert them with .long().")
    queries, keys = call.query.shape[2], call.key.shape[2]
    if queries != keys:
        raise ValueError(
            f"segment_ids are for self-attention, where queries and keys are the same tokens, got {queries} queries "
            f"and {keys} keys; give each sequence a row of its own, with key_mask."
        )
    expected = (call.query.shape[0], queries)
    if tuple(ids.shape) != expected:
        raise ValueError(f"segment_ids must be (batch, length) = {expected}, got {shape(ids)}.")
    if ids.device != call.query.device:
        raise ValueError(f"segment_ids must be on the device of the queries, got {ids.device} and {call.query.device}.")
    if not core.takes_segments:
        raise ValueError(
            f"{core.method!r} mixes the tokens of a whole row, got segment_ids of shape {shape(ids)}; give each "
            f"sequence a row of its own, with key_mask, or use a method such as 'favor+'."
        )
    if bias is not None and (bias.layout.rows or bias.algorithm == "fft"):
        what = "a bias on a grid" if bias.layout.rows else "algorithm='fft'"
        raise ValueError(
            f"{what} is over whole rows, got segment_ids of shape {shape(ids)}; give each sequence a row of its own, "
            f"or leave {'the grid' if bias.layout.rows else 'the algorithm'} out."
        )


def attend_packed(core: AttentionCore, call: Call) -> tuple[Tensor, State | None]:
    """Attend within the segments of a call, and in a stream from the state, which is that of the last segment.

    Cost: that of the segments alone, with less than twice as many tokens by padding; in a stream twice.
    """
    assert call.segment_ids is not None
    segments, alone = Segments.of(call.segment_ids), replace(call, segment_ids=None)
    if not call.in_stream:
        if len(segments.row) <= call.query.shape[0]:  # one in each row, or no tokens at all
            return core._attend_alone(alone)
        return attend_apart(core, alone, segments), None
    out, after = _attend_stream(core, alone, call.segment_ids, segments)
    return out, None if after is None else replace(after, last_id=last_id(call))


def enter_segment(core: AttentionCore, call: Call) -> Call:
    """Return the call of a step, with the state of samples in another segment cleared."""
    if call.state is None or call.segment_ids is None:
        return call
    return replace(call, state=_continued(core, call.state, call.segment_ids))


def last_id(call: Call) -> Tensor:
    """Return the ids (B) of the last tokens of a call, or of the state before it if it has no tokens."""
    assert call.segment_ids is not None
    ids = call.segment_ids.long()
    before = ids.new_full(ids.shape[:1], NO_ID) if call.state is None else call.state.last_id
    assert before is not None
    return torch.cat([before.unsqueeze(1), ids], 1)[:, -1]


def _continued(core: AttentionCore, state: State, ids: Tensor) -> State:
    """Clear the state of samples that are in another segment somewhere in ids (B, L)."""
    assert state.last_id is not None
    others = (ids != state.last_id.unsqueeze(1)).any(1)
    return core._forget(state, others) if not can_read(others) or bool(others.any()) else state


def _attend_stream(core: AttentionCore, call: Call, ids: Tensor, segments: Segments) -> tuple[Tensor, State | None]:
    """Attend with a state before or after the call, by whole rows, so that the state has all distances.

    The last segment of each row makes the state. Of the others, the first one may go on from the state before.
    """
    before = call.state
    if ids.numel() == 0:
        return core._attend_alone(call)
    start = None if before is None else _continued(core, before, ids)
    last = _both(call.key_mask, ids == ids[:, -1:])
    out, after = core._attend_alone(replace(call, key_mask=last, state=start))
    others = segments.start + segments.length < ids.shape[1]
    if before is not None and before.last_id is not None:
        goes_on = (ids[:, 0] == before.last_id).cpu()[segments.row] & (segments.start == 0)
        first, others = segments.where(others & goes_on), others & ~goes_on
        out = _attend_first(core, call, first, out) if len(first.row) else out
    if bool(others.any()):
        out = attend_apart(core, replace(call, state=None, streams=False), segments.where(others), out)
    return out, after


def _attend_first(core: AttentionCore, call: Call, first: Segments, out: Tensor) -> Tensor:
    """Replace outputs (B, H, L, E) of segments at the start of rows, which continue from the state."""
    assert call.state is not None
    width, rows = int(first.length.max()), first.row.to(out.device)
    inside = torch.arange(out.shape[2], device=out.device) < first.length.to(out.device).unsqueeze(1)
    query, key, value = (x.index_select(0, rows)[:, :, :width] for x in (call.query, call.key, call.value))
    part = replace(
        call,
        query=query,
        key=key,
        value=value,
        gate=None if call.gate is None else call.gate.index_select(0, rows)[:, :, :width],
        key_mask=_both(None if call.key_mask is None else call.key_mask[rows, :width], inside[:, :width]),
        query_mask=None if call.query_mask is None else call.query_mask[rows, :width],
        bias=_cut(call.bias, width, call.state.length),
        state=call.state.reorder(rows),
        streams=False,
    )
    new = F.pad(core._attend_alone(part)[0], (0, 0, 0, out.shape[2] - width))
    return out.index_copy(0, rows, torch.where(inside[:, None, :, None], new, out.index_select(0, rows)))


def attend_apart(core: AttentionCore, call: Call, segments: Segments, others: Tensor | None = None) -> Tensor:
    """Attend within segments -> (B, H, L, E); tokens outside of all segments get those of ``others``."""
    if call.key_mask is not None:
        segments, call = _without_hidden(segments, call, call.key_mask)
    batches = Batches(segments, call.query)
    unmasked = call.is_causal and call.key_mask is None  # padding comes last, where causal queries do not see it
    parts = zip(
        *(batches.take(x) for x in (call.query, call.key, call.value)),
        batches.nothing if unmasked else batches.take_mask(call.key_mask),
        batches.take_mask(call.query_mask) if call.query_mask is not None else batches.nothing,
        batches.take(call.gate.unsqueeze(-1)) if call.gate is not None else batches.nothing,
        strict=True,
    )
    outs = []
    for query, key, value, key_mask, query_mask, gate in parts:
        part = replace(
            call,
            query=query,
            key=key,
            value=value,
            key_mask=key_mask,
            query_mask=query_mask,
            gate=None if gate is None else gate.squeeze(-1),
            bias=_cut(call.bias, query.shape[2], 0),
        )
        outs.append(core._attend_alone(part)[0])
    return batches.put(outs, others)


def _without_hidden(segments: Segments, call: Call, mask: Tensor) -> tuple[Segments, Call]:
    """Leave out segments without a visible key, whose outputs are zero, and the mask too if it hides nothing else."""
    seen = F.pad(mask.cpu().flatten().long().cumsum(0), (1, 0))
    first = segments.row * mask.shape[1] + segments.start
    counts = seen[first + segments.length] - seen[first]
    kept = counts > 0
    if not bool(kept.any()):  # then they stay, so that gradients of zero are those of a call
        return segments, call
    if bool((counts == segments.length)[kept].all()):
        call = replace(call, key_mask=None)
    return segments.where(kept), call


class Batches:
    """Segments of rows as padded batches, (n, w) tokens each, and back."""

    def __init__(self, segments: Segments, like: Tensor) -> None:
        self.rows, self.length = like.shape[0], like.shape[2]
        tokens, device = self.rows * self.length, like.device
        sources, self.full = [], []
        for part in segments.buckets():
            column = torch.arange(int(part.length.max()))
            source = (part.row * self.length + part.start).unsqueeze(1) + column
            sources.append(source.masked_fill(column >= part.length.unsqueeze(1), tokens))
            self.full.append(int(part.length.min()) == len(column))
        flat = torch.cat([x.flatten() for x in sources])
        places = torch.full((tokens + 1,), len(flat)).index_copy(0, flat, torch.arange(len(flat)))
        self.shapes = [x.shape for x in sources]
        self.source = flat.to(device)  # (P), the token of each place; padding takes one beyond the last
        self.place = places[:tokens].to(device)  # (B L), the place of each token; others take one beyond the last
        self.nothing = [None] * len(sources)

    def take(self, x: Tensor) -> list[Tensor]:
        """Gather tokens (B, h, L, d) into batches (n, h, w, d), padded with zeros."""
        tokens = F.pad(x.transpose(1, 2).flatten(0, 1), (0, 0, 0, 0, 0, 1))
        return [y.transpose(1, 2) for y in self._split(tokens.index_select(0, self.source))]

    def take_mask(self, mask: Tensor | None) -> list[Tensor | None]:
        """Gather a mask (B, L) into the padded batches (n, w); of no mask, None for batches without padding."""
        tokens = self.rows * self.length
        if mask is not None:
            return [*self._split(F.pad(mask.flatten(), (0, 1)).index_select(0, self.source))]
        inside = self._split(self.source < tokens)
        return [None if full else x for x, full in zip(inside, self.full, strict=True)]

    def put(self, outs: Sequence[Tensor], others: Tensor | None) -> Tensor:
        """Scatter batches (n, H, w, E) to rows (B, H, L, E), with ``others`` at tokens that are in none."""
        tokens = [x.transpose(1, 2).flatten(0, 1) for x in outs]
        zeros = tokens[0].new_zeros(1, *tokens[0].shape[1:])
        placed = torch.cat([*tokens, zeros]).index_select(0, self.place)
        rows: Tensor = placed.unflatten(0, (self.rows, self.length)).transpose(1, 2)
        if others is None:
            return rows
        inside = (self.place < len(self.source)).view(self.rows, 1, self.length, 1)
        return torch.where(inside, rows, others)

    def _split(self, x: Tensor) -> list[Tensor]:
        """Split (P, ...) into (n, w, ...) for each batch."""
        parts = x.split([n * w for n, w in self.shapes])
        return [y.unflatten(0, z) for y, z in zip(parts, self.shapes, strict=True)]


def _cut(bias: Bias | None, tokens: int, past: int) -> Bias | None:
    """Restrict a bias over whole rows to so many tokens after ``past`` others: distances are relative."""
    if bias is None:
        return None
    middle = bias.layout.L - 1 + bias.layout.offset
    table = bias.table[:, middle - (past + tokens - 1) : middle + tokens]
    return replace(bias, table=table, layout=Layout(tokens, tokens, past))


def _both(mask: Tensor | None, other: Tensor) -> Tensor:
    return other if mask is None else mask & other


def segment_positions(segment_ids: Tensor, real: Tensor | None = None) -> Tensor:
    """Positions (B, L) of real tokens, from 0 in every segment of packed rows, also of one begun on another rank."""
    real = torch.ones_like(segment_ids) if real is None else real.to(segment_ids)
    count = real.cumsum(1)
    first = torch.nn.functional.pad(segment_ids[:, 1:] != segment_ids[:, :-1], (1, 0), value=True)
    before = torch.where(first, count - real, 0).cummax(1).values  # real tokens before the segment
    carried = segment_before(segment_ids, real) * (segment_ids == segment_ids[:, :1])
    return (count - 1 - before + carried).clamp_min(0)
