"""The groups of chunks that a causal algorithm goes through: their places, and the tensors cut to them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernelformer.attention.blocks import Shapes, chunk_rows, hidden_rows, put_chunks, spans, tail_hidden
from kernelformer.contract import Workspace


class Pieces:
    """Query i sees the keys up to i + shift.

    Args:
        s: sizes of the call.
        key_mask: (B, S) bool, or None.
        work: buffers.
        length: number of queries to go through.
        shift: the key that comes with query 0; keys before it are not in any piece. Negative: keys are delayed.
        mirror: read both sequences from their ends.
    """

    def __init__(
        self,
        s: Shapes,
        key_mask: Tensor | None,
        work: Workspace,
        *,
        length: int,
        shift: int = 0,
        mirror: bool = False,
    ) -> None:
        self.s, self.key_mask, self.work = s, key_mask, work
        self.length, self.shift, self.mirror = length, shift, mirror
        self.samples = s.samples()
        self.size, self.together = s.causal(self.samples)
        self.mask = torch.ones(self.size, self.size, dtype=work.dtype, device=work.device).tril_().repeat(s.R, 1)

    def groups(self) -> list[tuple[int, int]]:
        """The start and end of every group."""
        return list(spans(self.length, self.size * self.together))

    def rows(self, name: str, x: Tensor, block: slice, start: int, end: int) -> Tensor:
        """A piece of queries (B, G, R, L, X) as rows of chunks, in the buffer of that name."""
        return chunk_rows(self._cut(x[block], start, end), name, self.work, self.together, self.size)

    def key_rows(self, name: str, x: Tensor, block: slice, start: int, end: int) -> Tensor:
        """The keys (B, G, 1, S, X) that come with the queries of a piece, as rows of chunks; zeros beyond the ends."""
        first, last, before = self._keys(start, end)
        piece = self._cut(x[block], first, last)
        if before:
            piece = F.pad(piece, (0, 0, before, 0))
        return chunk_rows(piece, name, self.work, self.together, self.size)

    def _keys(self, start: int, end: int) -> tuple[int, int, int]:
        """The first key of a piece and the one after the last, and how many places before the first are empty."""
        low, high = (min(max(x + self.shift, 0), self.s.S) for x in (start, end))
        return low, high, min(max(0, -self.shift - start), end - start)

    def _cut(self, x: Tensor, start: int, end: int) -> Tensor:
        if not self.mirror:
            return x[:, :, :, start:end]
        total = x.shape[3]
        return x[:, :, :, total - end : total - start].flip(3)

    def hidden(self, block: slice, count: int, start: int, end: int) -> Tensor | None:
        """The keys of a piece that do not count, (b G chunks, size) bool, or None."""
        first, last, before = self._keys(start, end)
        if self.key_mask is None and not before:
            return tail_hidden(last - first, self.together, self.size, count * self.s.G, self.work.device)
        if self.key_mask is None:
            mask = torch.ones(count, last - first, dtype=torch.bool, device=self.work.device)
        elif self.mirror:
            mask = self.key_mask[block, self.s.S - last : self.s.S - first].flip(1)
        else:
            mask = self.key_mask[block, first:last]
        if before:
            mask = F.pad(mask, (before, 0), value=False)
        elif bool(mask.all()):  # most masks hide keys in a few pieces only, and looking costs less than hiding
            return tail_hidden(last - first, self.together, self.size, count * self.s.G, self.work.device)
        return hidden_rows(mask, slice(None), slice(None), self.s.G, self.together, self.size)

    def put(self, target: Tensor, rows: Tensor, block: slice, start: int, end: int, add: bool = False) -> None:
        """Write rows of chunks back to (B, G, R, L, X), or add them."""
        if self.mirror:
            total = target.shape[3]
            piece = target[block, :, :, total - end : total - start]
            back = torch.empty_like(piece)
            put_chunks(back, rows, self.together, self.size)
            back = back.flip(3)
            piece.add_(back) if add else piece.copy_(back)
        else:
            put_chunks(target[block, :, :, start:end], rows, self.together, self.size, add)

    def add_keys(self, target: Tensor, rows: Tensor, block: slice, start: int, end: int) -> None:
        """Add rows of `key_rows` to (B, G, 1, S, X)."""
        first, last, before = self._keys(start, end)
        if last <= first:
            return
        b, g = target[block].shape[:2]
        whole = rows.view(b, g, 1, self.together * self.size, -1)
        piece = whole[:, :, :, before : before + last - first]
        if self.mirror:
            target[block, :, :, self.s.S - last : self.s.S - first].add_(piece.flip(3))
        else:
            target[block, :, :, first:last].add_(piece)
