"""Layout of a call for plain operations: rows, chunks, segments, and what the backward pass keeps.

A call goes segment by segment, and all chunks of a segment at once. A segment has so many tokens, and before that so
many samples, that one mapped tensor of it has at most `SEGMENT` numbers (on a CPU `CPU_SEGMENT`),

    b = SEGMENT / (H M min(L, SHORTEST)) samples        T = SEGMENT / (b H M) tokens, a whole number of chunks

so that calls up to B H L M = SEGMENT are one segment, and larger ones bound their memory by it: they have
B H L M / SEGMENT segments, rounded up in samples and in tokens.

A graph of `torch.export` has no loop: it is one segment, whose length is a symbol (`whole_chunks`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

SEGMENT = 1 << 24  # numbers of a mapped tensor on an accelerator: 64 MiB in float32
CPU_SEGMENT = 1 << 20  # on a CPU: its caches hold what a segment works on
ACCELERATORS = ("cuda", "mps", "xpu")  # devices that wait for launches rather than for arithmetic
SHORTEST = 1024  # tokens; samples are taken apart before segments become shorter
CHUNK = 64  # tokens of a causal chunk
BLOCK = 8  # tokens of a block of a chunk

T = TypeVar("T")


class RowSums(NamedTuple):
    """Sums of some keys as rows of queries weigh them.

    Args:
        log: (N, L, R), the scale of a row's sums, without a gradient: the product is what counts.
        sums: (N, L, R, E + 1), ``exp(-log) sum_j w_ij [v_j, 1]``.
        guard: (N, L, R, 1), ``exp(-log) |phi(q_i)| sum_j |phi(k_j)|``; None: no guard.
    """

    log: Tensor
    sums: Tensor
    guard: Tensor | None = None


def causal_chunk(length: int) -> int:
    """Tokens of a chunk: `CHUNK`, or for short sequences the next power of two, at least a `BLOCK`."""
    size = BLOCK
    while size < CHUNK and size < length:
        size *= 2
    return size


def readable_without_sync(x: Tensor) -> bool:
    """Return True if reading a number needs no synchronization with a device and no compiled graph is traced."""
    return not torch.compiler.is_compiling() and x.device.type == "cpu"


def segment_numbers(device: torch.device) -> int:
    """Numbers of a mapped tensor of a segment."""
    return SEGMENT if device.type in ACCELERATORS else CPU_SEGMENT


def spans(like: Tensor, row_numbers: int, multiple: int, axis: int = 2) -> list[tuple[int, int]]:
    """The start and end of every segment of a tensor's tokens, at least one; ``row_numbers`` is B H M."""
    length, most = like.shape[axis], segment_numbers(like.device)
    if torch.compiler.is_exporting():
        return [(0, length)]
    step = max(multiple, most // max(1, row_numbers) // multiple * multiple)
    return [(start, min(start + step, length)) for start in range(0, max(1, length), step)]


def cut(x: Tensor, segments: Sequence[tuple[int, int]]) -> Sequence[Tensor]:
    """The tokens (B, G, S, X) of consecutive segments, as far as there are any: one gradient for all of them."""
    if torch.compiler.is_exporting():
        return [x]
    ends = [0, *(min(end, x.shape[2]) for _, end in segments)]
    sizes = [b - a for a, b in pairwise(ends)]
    parts: Sequence[Tensor] = x.split([*sizes, x.shape[2] - ends[-1]], 2)
    return parts[: len(sizes)]


def sample_blocks(like: Tensor, length: int, token_numbers: int) -> list[slice]:
    """Blocks of samples; ``token_numbers`` is H M."""
    if torch.compiler.is_exporting():
        return [slice(None)]
    step = max(1, segment_numbers(like.device) // max(1, token_numbers * min(length, SHORTEST)))
    return [slice(start, start + step) for start in range(0, like.shape[0], step)]


def of_samples(tensors: Sequence[Tensor], block: slice) -> list[Tensor]:
    """Tensors (B or 1, ...) of some samples."""
    return [x if x.shape[0] == 1 else x[block] for x in tensors]


def in_chunks(x: Tensor, size: int, fill: float = 0.0) -> Tensor:
    """(N, L, ...) -> (N, n, size, ...), the last chunk filled up; n is at least 1."""
    length = x.shape[1]
    missing = -length % size if length else size
    if missing:
        x = F.pad(x, (*[0, 0] * (x.dim() - 2), 0, missing), value=fill)
    chunks: Tensor = x.unflatten(1, (-1, size))
    return chunks


def whole_chunks(
    tokens: Sequence[Tensor], masks: Sequence[Tensor | None], size: int, least: int = 1
) -> tuple[list[Tensor], list[Tensor]]:
    """Pad tokens (B, H, L, D) and masks (B, L) of a graph by hidden tokens to whole chunks, ``least`` or more.

    The number of chunks is read from a tensor, so that it is a symbol of its own in the graph. As a formula of the
    length, which the solver of guards would have to reason about, it ends in a graph for one length.
    """
    batch, _, length, _ = tokens[0].shape
    count: Any = torch.full((), (length + size - 1) // size, device=tokens[0].device).clamp_min(least).item()
    torch._check(count >= least)
    torch._check(length <= count * size)
    missing = count * size - length
    given = [tokens[0].new_ones(batch, length, dtype=torch.bool) if x is None else x for x in masks]
    whole = [F.pad(x, (0, missing)) for x in given]
    return [F.pad(x, (0, 0, 0, missing)) for x in tokens], whole


def clamp(x: int, least: int, most: int) -> int:
    """A number within bounds; a graph decides comparisons of sizes, but keeps their `min` and `max` as formulas."""
    return least if x < least else most if x > most else x


def hidden_keys(key_mask: Tensor | None, start: int, end: int) -> Tensor | None:
    """Mask of a segment's hidden keys, (B, 1, n, 1) bool, or None."""
    return None if key_mask is None else ~key_mask[:, None, start:end, None]


def with_ones(value: Tensor) -> Tensor:
    """Values (..., E) as (..., E + 1): the sum of the ones is the denominator."""
    return F.pad(value, (0, 1), value=1.0)


def recomputed(function: Callable[..., T], *arguments: Any, learned: Sequence[Tensor] = ()) -> T:
    """``function(*arguments)``, of which the backward pass keeps the arguments alone and computes the rest again.

    Transforms of `torch.func` do not know how to; there everything is kept.

    Args:
        function: of tensors, tuples of tensors and other things.
        arguments: its own.
        learned: other tensors that it uses.
    """
    flat = [y for x in (*arguments, learned) for y in (x if isinstance(x, tuple | list) else (x,))]
    needs_grad = torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in flat)
    if not needs_grad or (not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack()):
        return function(*arguments)
    result: T = checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)
    return result


@contextmanager
def autograd_inside() -> Iterator[None]:
    """Let autograd see what the implementation of an operator does; torch takes it away from there."""
    include, exclude = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    for key in (torch._C.DispatchKey.AutogradFunctionality, torch._C.DispatchKey.ADInplaceOrView):
        exclude = exclude.remove(key)
    with torch._C._ForceDispatchKeyGuard(include, exclude), torch.enable_grad():
        yield


def by_distance(entries: Tensor, rows: int, columns: int) -> Tensor:
    """A tile whose entry at row i and column j is ``entries[:, j - i + rows]``.

    Copies of the entries, one after the other, are read in rows that are one entry shorter than they: each begins one
    entry earlier than the last.

    Args:
        entries: (H, rows + columns, ...); the first one is not used.
        rows: of the tile.
        columns: of the tile.

    Returns:
        (H, rows, columns, ...), a view of the copies.
    """
    heads, count, *rest = entries.shape
    copies = entries.unsqueeze(1).expand(-1, rows + 1, *[-1] * (entries.dim() - 1)).flatten(1, 2)
    return copies[:, rows : rows + rows * (count - 1)].view(heads, rows, count - 1, *rest)[:, :, :columns]
