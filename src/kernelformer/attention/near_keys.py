"""The last keys of a stream, in buffers that are written in place.

A state is a value: it may be continued twice, and both continuations agree. Tokens are therefore only ever written
behind all that any state sees, and the tensors of a state are views of its last tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Lock

import torch
from torch import Tensor

ROOM = 64  # tokens, at least, that buffers take in before the window is copied
AXES = (2, 2, 1, 2)  # of the tokens, in keys, values, mask and mapped keys

Tokens = tuple[Tensor, Tensor, Tensor]  # keys (B, G, n, D), values (B, G, n, E), mask (B, n) bool
Mapping = Callable[[Tensor, Tensor], Tensor]  # of keys and mask, (B, G, n, M)


class NearKeys:
    """Append-only buffers for the last keys, values and mask of a stream, and for what a map makes of the keys.

    The first continuation of a state takes the next place; a second one finds it taken. Threads claim places one at a
    time. A copy of a state, pickled or not, has no buffers.

    Args:
        kept: the tokens so far, n of them, which are copied.
        window: how many tokens a stream keeps, at least n. The buffers hold twice as many, and `ROOM` more at least.
        mapping: what is kept of each key beside itself, so that a step maps one key only; None: nothing.

    Cost: O(1) per token, and O(window) once in max(window, `ROOM`) tokens.
    """

    __slots__ = ("_buffers", "_count", "_lock", "_writable")

    def __init__(self, kept: Tokens, window: int, mapping: Mapping | None = None) -> None:
        parts = [*kept] if mapping is None else [*kept, mapping(kept[0], kept[2])]
        capacity, self._count = window + max(window, ROOM), kept[2].shape[1]
        sizes = [[*x.shape[:axis], capacity, *x.shape[axis + 1 :]] for x, axis in zip(parts, AXES, strict=False)]
        self._buffers = [x.new_empty(size) for x, size in zip(parts, sizes, strict=True)]
        # What a state sees never changes. Autograd is not to believe it did: these have version counters of their own.
        self._writable = [x.data for x in self._buffers]
        self._write(0, parts)
        self._lock = Lock()

    def _write(self, first: int, parts: Sequence[Tensor]) -> None:
        last = first + parts[2].shape[1]
        for x, part in zip(_cut(self._writable, first, last), parts, strict=True):
            x.copy_(part)

    def tokens(self, first: int, last: int) -> list[Tensor]:
        """Views of keys, values, mask and, where there is a map, mapped keys."""
        return _cut(self._buffers, first, last)

    def append(self, kept: Tokens, token: Tokens, mapping: Mapping | None = None) -> list[Tensor] | None:
        """Write a token behind those of a state; n + 1 tokens as views, or None where that cannot be done in place.

        Args:
            kept: the last n tokens of the state.
            token: the new one, in tensors of its own.
            mapping: the map that the buffers were made with.
        """
        count = kept[2].shape[1]
        last = self._end(kept, count)
        if last is None or (self._buffers[0].is_inference() and not torch.is_inference_mode_enabled()):
            return None
        with self._lock:
            if self._count != last or last == self._buffers[2].shape[1]:
                return None
            self._count = last + 1
        self._write(last, token if mapping is None else [*token, mapping(token[0], token[2])])
        return self.tokens(last - count, last + 1)

    def _end(self, kept: Tokens, count: int) -> int | None:
        """The place after the last of these tokens; None where they are not views of these buffers."""
        if count == 0:
            return 0
        first = int(kept[2].storage_offset())  # of the mask, whose tokens are one number each
        same = all(map(Tensor.is_set_to, kept, _cut(self._buffers[:3], first, first + count)))
        return first + count if same else None


def join(
    kept: Tokens, new: Tokens, near: NearKeys | None = None, *, window: int | None, mapping: Mapping | None = None
) -> tuple[list[Tensor], NearKeys | None]:
    """The tokens of a state followed by new ones, and the buffers in which they lie.

    One token at a time goes into buffers; several, those of a graph or of a transform, and streams that keep no tokens
    or all of them get tensors of their own.

    Args:
        kept: n tokens of the state.
        new: c tokens in the same dtypes.
        near: the buffers that the state came with, if any; a stream has one mapping throughout.
        window: how many tokens are kept afterwards; None: all of them.
        mapping: what else is wanted of each key.

    Returns:
        n + c tokens: keys, values, mask and, with buffers and a mapping, mapped keys; and the buffers for the state
        after them, or None.
    """
    if not window or new[2].shape[1] != 1 or not _is_plain((*kept, *new)):
        return [torch.cat(pair, axis) for *pair, axis in zip(kept, new, AXES, strict=False)], None
    joined = None if near is None else near.append(kept, new, mapping)
    if joined is None:
        near, count = NearKeys(kept, window, mapping), kept[2].shape[1]
        key, value, mask = near.tokens(0, count)[:3]
        joined = near.append((key, value, mask), new, mapping)
        assert joined is not None
    return joined, near


def _cut(tensors: Sequence[Tensor], first: int, last: int) -> list[Tensor]:
    """Tokens from first to last, as views."""
    return [x[:, first:last] if x.dim() == 2 else x[:, :, first:last] for x in tensors]


def _is_plain(tensors: Sequence[Tensor]) -> bool:
    """Whether these are tensors that can be written into one another: with data, not wrapped or part of a graph."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    return all(type(x) is Tensor and not x.is_meta and not wrapped(x) for x in tensors)
