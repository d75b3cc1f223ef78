"""Pieces of (B, H, L, D) that fit the caches, and their way back.

A block is a few samples with all of their heads; a chunk is a stretch of the sequence. Rows N of a block are
(sample, key head), times the number of chunks where several are worked on at once; the queries of one key head's group
lie one after the other in the row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kernelformer.contract import Workspace

# Numbers in one (N, C, M) buffer: 2 MiB in float32. Fastest on a CPU whose cores have 1 MiB of L2 each, and flat
# around it.
BUFFER = 1 << 19
# Rows of a causal chunk: the quadratic part costs C (M + E) a row, the rest does not depend on C, and matrices below 64
# rows leave the arithmetic idle.
CAUSAL_CHUNK = 64


@dataclass(frozen=True)
class Shapes:
    """The sizes of one call."""

    B: int
    H: int
    G: int
    L: int
    S: int
    D: int
    E: int
    M: int

    @property
    def R(self) -> int:
        """Query heads per key head."""
        return self.H // self.G

    @staticmethod
    def of(query: Tensor, key: Tensor, value: Tensor, features: int) -> Shapes:
        """Read off q (B, H, L, D), k (B, G, S, D), v (B, G, S, E)."""
        B, H, L, D = query.shape
        return Shapes(B, H, key.shape[1], L, key.shape[2], D, value.shape[3], features)

    def samples(self) -> int:
        """The number of samples of a block."""
        return max(1, min(self.B, BUFFER // (self.M * self.H * max(self.L, self.S, 1))))

    def chunk(self, samples: int, heads: int) -> int:
        """The number of tokens of so many samples and heads that fill a buffer."""
        return max(32, BUFFER // (self.M * samples * heads))

    def causal(self, samples: int) -> tuple[int, int]:
        """(rows of a chunk, chunks worked on at once) of the causal algorithm."""
        rows = max(1, min(CAUSAL_CHUNK, max(self.L, self.S)))
        return rows, max(1, min(-(-max(self.L, self.S) // rows), self.chunk(samples, self.H) // rows))

    def groups(self, samples: int) -> int:
        """The number of groups of chunks of the causal algorithm."""
        rows, together = self.causal(samples)
        return -(-min(self.L, self.S) // (rows * together))


def spans(length: int, step: int) -> list[tuple[int, int]]:
    """Consecutive (start, end) of at most ``step``."""
    if 0 < length <= step:
        return [(0, length)]
    return [(start, min(start + step, length)) for start in range(0, length, step)]


def blocks(s: Shapes) -> list[slice]:
    """Blocks of samples."""
    step = s.samples()
    return [slice(0, s.B)] if step == s.B else [slice(first, last) for first, last in spans(s.B, step)]


def empty_rows(x: Tensor, width: int) -> Tensor:
    """Room for (B, H, L, width) in the order of x in memory.

    Projections give (B, L, H, D) seen as (B, H, L, D). What comes out in the same order needs no copy when heads are
    put together again.
    """
    B, H, L, _ = x.shape
    if x.stride(1) < x.stride(2):
        return x.new_empty(B, L, H, width).transpose(1, 2)
    return x.new_empty(B, H, L, width)


def grouped(x: Tensor, key_heads: int) -> Tensor:
    """Query heads by their key head, (B, H, L, X) -> (B, G, R, L, X), a view."""
    groups: Tensor = x.unflatten(1, (key_heads, -1))
    return groups


def rows_of(x: Tensor, name: str, work: Workspace) -> Tensor:
    """A piece (b, G, R, T, X) as rows (b G, R T, X) in the dtype of the arithmetic: a view, or a copy in a buffer."""
    b, g, r, t, width = x.shape
    if x.dtype == work.dtype and b == 1 and r == 1:
        return x[0, :, 0]
    if x.dtype == work.dtype and x.is_contiguous():
        return x.view(b * g, r * t, width)
    work.take(name, b, g, r, t, width).copy_(x)
    return work.take(name, b * g, r * t, width)


def chunk_rows(x: Tensor, name: str, work: Workspace, chunks: int, size: int) -> Tensor:
    """A piece (b, G, R, T, X), T <= chunks * size, as rows (b G chunks, R size, X) in a buffer, zeros beyond T."""
    b, g, r, t, width = x.shape
    rows = work.take(name, b, g, chunks, r, size, width).transpose(2, 3)
    full, rest = divmod(t, size)
    rows[:, :, :, :full].copy_(x[..., : full * size, :].unflatten(3, (full, size)))
    if full < chunks:
        rows[:, :, :, full:].zero_()
        rows[:, :, :, full, :rest].copy_(x[..., full * size :, :])
    return work.take(name, b * g * chunks, r * size, width)


def room_for_rows(target: Tensor, name: str, work: Workspace) -> Tensor:
    """Room for what `put_rows` will write into a piece (b, G, R, T, X): the piece itself, or a buffer (b G, R T, X)."""
    b, g, r, t, width = target.shape
    if target.dtype == work.dtype and target.is_contiguous():
        return target.view(b * g, r * t, width)
    return work.take(name, b * g, r * t, width)


def put_rows(target: Tensor, rows: Tensor) -> None:
    """The inverse of `rows_of`: write rows (b G, R T, X) into a piece (b, G, R, T, X), unless they are in it."""
    if rows.data_ptr() != target.data_ptr():
        target.copy_(rows.view(target.shape))


def put_chunks(target: Tensor, rows: Tensor, chunks: int, size: int) -> None:
    """The inverse of `chunk_rows`; what was beyond T is dropped."""
    b, g, r, t, width = target.shape
    whole = rows.view(b, g, chunks, r, size, width).transpose(2, 3)
    if t == chunks * size:
        target = target.unflatten(3, (chunks, size))
    else:
        whole = whole.reshape(b, g, r, chunks * size, width)[..., :t, :]
    target.copy_(whole)


def hidden_rows(
    key_mask: Tensor | None, block: slice, span: slice, heads: int, chunks: int, size: int
) -> Tensor | None:
    """Mask of a piece's hidden keys, (b G chunks, size) bool: masked ones and those beyond the end, or None."""
    if key_mask is None:
        return None
    hidden = ~key_mask[block, span]
    b, t = hidden.shape
    if t < chunks * size:
        hidden = F.pad(hidden, (0, chunks * size - t), value=True)
    return hidden.view(b, 1, chunks, size).expand(b, heads, chunks, size).reshape(-1, size)


def tail_hidden(length: int, chunks: int, size: int, rows: int, device: torch.device) -> Tensor | None:
    """The same without a mask: None, or the keys beyond ``length`` of a piece."""
    if length == chunks * size:
        return None
    hidden = torch.arange(chunks * size, device=device) >= length
    return hidden.view(1, chunks, size).expand(rows, chunks, size).reshape(-1, size)


def visible_pair(k: Tensor, v: Tensor, hidden: Tensor | None) -> tuple[Tensor, Tensor]:
    """Keys and values (N, C, X) with hidden rows zeroed: they may hold anything, NaN too."""
    if hidden is None:
        return k, v
    gone = hidden.unsqueeze(2)
    return k.masked_fill(gone, 0), v.masked_fill(gone, 0)


def spread(tensors: Sequence[Tensor], block: slice, samples: int, heads: int, chunks: int = 1) -> list[Tensor]:
    """A map's tensors (B or 1, H or 1, ...) as rows (samples heads chunks, ...) of a block; views where all are the
    same."""
    out = []
    for x in tensors:
        rest = x.shape[2:]
        if x.shape[:2] == (1, 1):
            out.append(x[0, 0].expand(samples * heads * chunks, *rest))
            continue
        x = x if x.shape[0] == 1 else x[block]
        out.append(x.unsqueeze(2).expand(samples, heads, chunks, *rest).reshape(-1, *rest))
    return out


def gather_grads(totals: Sequence[Tensor], grads: Sequence[Tensor], block: slice, samples: int, heads: int) -> None:
    """Add gradients of the rows of `spread` to those of the tensors."""
    for total, grad in zip(totals, grads, strict=True):
        rows = grad.view(samples, heads, -1, *grad.shape[1:]).sum(2)
        if total.shape[1] == 1:
            rows = rows.sum(1, keepdim=True)
        if total.shape[0] == 1:
            total += rows.sum(0, keepdim=True)
        else:
            total[block] += rows


class Pieces:
    """The groups of chunks of a causal call, in which query i sees the keys up to i."""

    def __init__(self, s: Shapes, key_mask: Tensor | None, work: Workspace) -> None:
        self.s, self.key_mask, self.work = s, key_mask, work
        self.samples = s.samples()
        self.size, self.together = s.causal(self.samples)
        self.mask = torch.ones(self.size, self.size, dtype=work.dtype, device=work.device).tril_().repeat(s.R, 1)

    def groups(self) -> list[tuple[int, int]]:
        """The start and end of every group."""
        return list(spans(min(self.s.L, self.s.S), self.size * self.together))

    def rows(self, name: str, x: Tensor, block: slice, start: int, end: int) -> Tensor:
        """A piece of (B, G, R, L, X) as rows of chunks, in the buffer of that name."""
        return chunk_rows(x[block, :, :, start:end], name, self.work, self.together, self.size)

    def hidden(self, block: slice, start: int, end: int) -> Tensor | None:
        """The keys of a piece that do not count, (b G chunks, size) bool, or None."""
        # Most masks hide keys in a few pieces only, and looking costs less than hiding.
        if self.key_mask is None or bool(self.key_mask[block, start:end].all()):
            rows = (block.stop - block.start) * self.s.G
            return tail_hidden(end - start, self.together, self.size, rows, self.work.device)
        return hidden_rows(self.key_mask, block, slice(start, end), self.s.G, self.together, self.size)

    def put(self, target: Tensor, rows: Tensor, block: slice, start: int, end: int) -> None:
        """Write rows of chunks back to (B, G, R, L, X)."""
        put_chunks(target[block, :, :, start:end], rows, self.together, self.size)
