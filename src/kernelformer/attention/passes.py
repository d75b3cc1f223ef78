"""The passes over keys and over queries that linear attention consists of, for one block of samples.

Bidirectional attention is a pass over the keys, which leaves a state, and one over the queries, which reads it. In one
operator they are `linear`, as operators of their own `sums`, for keys that are elsewhere than the queries.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kernelformer.attention.blocks import Shapes, hidden_rows, put_rows, rows_of, spans, visible_pair
from kernelformer.attention.engine import Engine
from kernelformer.contract import Workspace


@dataclass(frozen=True)
class Fade:
    """Keys that lose weight with their distance from an end of the sequence, by a log factor of their own.

    Key j of S has ``slope (j - S)``, or ``-slope (j + 1)`` from the start: the next token beyond that end would have 0.

    Args:
        slope: (N, 1), of every row.
        length: S.
        mirror: count from the start instead of the end.
    """

    slope: Tensor
    length: int
    mirror: bool

    def extend(self, x: Tensor, start: int) -> Tensor:
        """Keys (N, C, D) from ``start`` on with their log factor as the last coordinate, see `fading`."""
        place = torch.arange(start, start + x.shape[1], device=x.device, dtype=x.dtype)
        steps = -(place + 1) if self.mirror else place - self.length
        return torch.cat([x, (self.slope * steps).unsqueeze(2)], 2)


@dataclass(frozen=True)
class KeyPass:
    """All keys of some samples, chunk by chunk.

    Args:
        s: sizes of the call.
        key: (B, G, 1, S, D).
        value: (B, G, 1, S, E).
        key_mask: (B, S) bool, or None.
        block: of samples.
        work: buffers.
        fade: of the keys, or None.
    """

    s: Shapes
    key: Tensor
    value: Tensor
    key_mask: Tensor | None
    block: slice
    work: Workspace
    fade: Fade | None = None

    def _chunks(self) -> Iterator[tuple[slice, Tensor, Tensor, Tensor | None]]:
        """Where a chunk is, its keys (N, C, D) and values (N, C, E), and which are hidden (N, C)."""
        s, count = self.s, self.block.stop - self.block.start
        for start, end in spans(s.S, s.chunk(count, s.G)):
            at = slice(start, end)
            hidden = self._hidden(at)
            pair = ((self.key, "k"), (self.value, "v"))
            k, v = (rows_of(x[self.block, :, :, at], name, self.work) for x, name in pair)
            k, v = visible_pair(k, v, hidden)
            yield at, k if self.fade is None else self.fade.extend(k, start), v, hidden

    def _hidden(self, at: slice) -> Tensor | None:
        """The keys of a chunk that do not count, (N, C) bool; None where all do, as in most chunks under most masks."""
        if self.key_mask is None or bool(self.key_mask[self.block, at].all()):
            return None
        return hidden_rows(self.key_mask, self.block, at, self.s.G, 1, at.stop - at.start)

    def sums(self, engine: Engine) -> list[Tensor]:
        """The state after all keys."""
        s, count = self.s, self.block.stop - self.block.start
        state = engine.empty((count * s.G,), s.M, s.E, self.key.new_empty(0, dtype=self.work.dtype))
        for _, k, v, hidden in self._chunks():
            engine.absorb(state, k, v, hidden)
        return state

    def backward(self, engine: Engine, state: list[Tensor], grads: list[Tensor], dk: Tensor, dv: Tensor) -> None:
        """Write the gradients of keys and values, from those of the state."""
        for at, k, v, hidden in self._chunks():
            pair = visible_pair(*engine.absorb_backward(state, grads, k, v, hidden), hidden)
            for target, part in zip((dk, dv), pair, strict=True):
                put_rows(target[self.block, :, :, at], part[..., : target.shape[-1]])


@dataclass(frozen=True)
class QueryPass:
    """All queries of some samples, chunk by chunk.

    Args:
        s: sizes of the call.
        query: (B, G, R, L, D).
        block: of samples.
        work: buffers.
    """

    s: Shapes
    query: Tensor
    block: slice
    work: Workspace

    def _spans(self) -> Iterator[slice]:
        for start, end in spans(self.s.L, self.s.chunk(self.block.stop - self.block.start, self.s.H)):
            yield slice(start, end)

    def _rows(self, x: Tensor, name: str, at: slice) -> Tensor:
        return rows_of(x[self.block, :, :, at], name, self.work)

    def read(self, engine: Engine, state: list[Tensor], out: Tensor) -> None:
        """Write the outputs (B, G, R, L, E)."""
        for at in self._spans():
            put_rows(out[self.block, :, :, at], engine.read(state, self._rows(self.query, "q", at)))

    def backward(
        self, engine: Engine, state: list[Tensor], grads: list[Tensor], given: tuple[Tensor, Tensor], dq: Tensor
    ) -> None:
        """Write the gradients of the queries, from those of the outputs and the outputs; add to those of the state."""
        for at in self._spans():
            x, g, y = (self._rows(t, n, at) for t, n in zip((self.query, *given), ("q", "g", "o"), strict=True))
            put_rows(dq[self.block, :, :, at], engine.read_backward(state, grads, x, g, y))
