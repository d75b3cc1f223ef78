"""The last keys of a stream, in buffers that are written in place.

A state is a value: it may be continued twice, and both continuations agree. Tokens are therefore only ever written
behind all that any state sees, and the tensors of a state are views of its last tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock

import torch
from torch import Tensor

ROOM = 64  # tokens, at least, that buffers take in before the window is copied
AXES = (2, 2, 1)  # of the tokens

Tokens = tuple[Tensor, Tensor, Tensor]  # keys (B, G, n, D), values (B, G, n, E), mask (B, n) bool


class NearKeys:
    """Append-only buffers for the last keys, values and mask of a stream.

    The first continuation of a state takes the next place; a second one finds it taken. Threads claim places one at a
    time. A copy of a state, pickled or not, has no buffers.

    Args:
        kept: the tokens so far, n of them, which are copied.
        window: how many tokens a stream keeps, at least n. The buffers hold twice as many, and `ROOM` more at least.

    Cost: O(1) per token, and O(window) once in max(window, `ROOM`) tokens.
    """

    __slots__ = ("_buffers", "_count", "_lock", "_writable")

    def __init__(self, kept: Tokens, window: int) -> None:
        capacity, count = window + max(window, ROOM), kept[2].shape[1]
        sizes = [[*x.shape[:axis], capacity, *x.shape[axis + 1 :]] for x, axis in zip(kept, AXES, strict=True)]
        self._buffers = tuple(x.new_empty(size) for x, size in zip(kept, sizes, strict=True))
        # What a state sees never changes. Autograd is not to believe it did: these have version counters of their own.
        self._writable = tuple(x.data for x in self._buffers)
        for x, part in zip(self._views(self._writable, 0, count), kept, strict=True):
            x.copy_(part)
        self._count = count
        self._lock = Lock()

    @staticmethod
    def _views(buffers: Sequence[Tensor], first: int, last: int) -> Tokens:
        key, value, mask = buffers
        return key[:, :, first:last], value[:, :, first:last], mask[:, first:last]

    def append(self, kept: Tokens, token: Tokens) -> Tokens | None:
        """Write a token behind those of a state; n + 1 tokens as views, or None where that cannot be done in place.

        Args:
            kept: the last n tokens of the state.
            token: the new one, tensors of its own.
        """
        count = kept[2].shape[1]
        last = self._end(kept, count)
        if last is None or (self._buffers[0].is_inference() and not torch.is_inference_mode_enabled()):
            return None
        with self._lock:
            if self._count != last or last == self._buffers[2].shape[1]:
                return None
            self._count = last + 1
        for x, part in zip(self._views(self._writable, last, last + 1), token, strict=True):
            x.copy_(part)
        return self._views(self._buffers, last - count, last + 1)

    def _end(self, kept: Tokens, count: int) -> int | None:
        """The place after the last of these tokens; None where they are not views of these buffers."""
        if count == 0:
            return 0
        first = kept[2].storage_offset()  # of the mask, whose tokens are one number each
        same = all(map(Tensor.is_set_to, kept, self._views(self._buffers, first, first + count)))
        return first + count if same else None


def join(
    kept: Tokens, new: Tokens, near: NearKeys | None = None, *, window: int | None
) -> tuple[Tokens, NearKeys | None]:
    """The tokens of a state followed by new ones, and the buffers in which they lie.

    One token at a time goes into buffers; several, those of a graph or of a transform, and streams that keep no tokens
    or all of them get tensors of their own.

    Args:
        kept: n tokens of the state.
        new: c tokens in the same dtypes.
        near: the buffers that the state came with, if any.
        window: how many tokens are kept afterwards; None: all of them.

    Returns:
        n + c tokens, and the buffers for the state after them; None where there are none.
    """
    if not window or new[2].shape[1] != 1 or not _is_plain((*kept, *new)):
        key, value, mask = (torch.cat(pair, axis) for *pair, axis in zip(kept, new, AXES, strict=True))
        return (key, value, mask), None
    joined = None if near is None else near.append(kept, new)
    if joined is None:
        near = NearKeys(kept, window)
        joined = near.append(near._views(near._buffers, 0, kept[2].shape[1]), new)
        assert joined is not None
    return joined, near


def _is_plain(tensors: Sequence[Tensor]) -> bool:
    """Whether these are tensors that can be written into one another: not traced, wrapped or part of a graph."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    return all(type(x) is Tensor and not wrapped(x) for x in tensors)
