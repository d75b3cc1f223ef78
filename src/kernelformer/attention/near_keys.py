"""The last tokens of a stream, one by one: in tensors of their own, or in buffers that are written in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import is_
from threading import Lock
from typing import NamedTuple

import torch
from torch import Tensor

ROOM = 64  # tokens, at least, that buffers take in before the window is copied

Tokens = tuple[Tensor, Tensor, Tensor]  # keys (B, G, n, D), values (B, G, n, E), mask (B, n) bool
Mapping = Callable[[Tensor, Tensor], Sequence[Tensor]]  # of keys and mask, (B, G, n, X) each


class NearKeys:
    """Append-only buffers for the last keys, values and mask of a stream, and for what a map makes of the keys.

    The first continuation of a state takes the next place; a second one finds it taken. Threads claim places one at a
    time.

    Args:
        kept: the tokens so far, n of them, which are copied.
        window: how many tokens a stream keeps, at least n. The buffers hold twice as many, and `ROOM` more at least.
        mapping: what is kept of each key beside itself, so that a step maps one key only; None: nothing.

    Cost: O(1) per token, and O(window) once in max(window, `ROOM`) tokens.
    """

    __slots__ = ("_buffers", "_count", "_lock", "_writable")

    def __init__(self, kept: Tokens, window: int, mapping: Mapping | None = None) -> None:
        key, value, mask = kept
        parts = [key, value, *(() if mapping is None else mapping(key, mask))]
        capacity, self._count = window + max(window, ROOM), mask.shape[1]
        self._buffers = [x.new_empty(*x.shape[:2], capacity, x.shape[3]) for x in parts]
        self._buffers.append(mask.new_ones(mask.shape[0], capacity))
        # What a state sees never changes. Autograd is not to believe it did: these have version counters of their own.
        self._writable = [x.data for x in self._buffers]
        self._lock = Lock()
        for x, part in zip(self._writable, [*parts, mask], strict=True):
            (x[:, : self._count] if x.dim() == 2 else x[:, :, : self._count]).copy_(part)

    def append(
        self, last: int, key: Tensor, value: Tensor, mask: Tensor | None, mapping: Mapping | None = None
    ) -> bool:
        """Write a token to place ``last``; False where that cannot be done in place. A mask of None is True."""
        if self._buffers[0].is_inference() and not torch.is_inference_mode_enabled():
            return False
        with self._lock:
            if self._count != last or last == self._buffers[0].shape[2]:
                return False
            self._count = last + 1
        parts = [key, value]
        if mapping is not None:
            parts += mapping(key, key.new_ones(key.shape[0], 1, dtype=torch.bool) if mask is None else mask)
        for x, part in zip(self._writable, parts, strict=False):
            x.narrow(2, last, 1).copy_(part)
        if mask is not None:
            self._writable[-1].narrow(1, last, 1).copy_(mask)
        return True

    def pairs(self, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Views of keys and values."""
        return self._buffers[0].narrow(2, first, last - first), self._buffers[1].narrow(2, first, last - first)

    def mask(self, first: int, last: int) -> Tensor:
        """View of the mask."""
        return self._buffers[-1].narrow(1, first, last - first)

    def mapped(self, first: int, last: int) -> list[Tensor]:
        """Views of what the map has made of the keys."""
        return [x.narrow(2, first, last - first) for x in self._buffers[2:-1]]


class Place(NamedTuple):
    """The place of a state's tokens in buffers.

    Args:
        buffers: which ones.
        last: the place after the last token.
        tokens: the very tensors of the state: one that was made of others has no place.
        visible: no token was ever hidden since the buffers were made, nor one that they began with.
    """

    buffers: NearKeys
    last: int
    tokens: Tokens
    visible: bool

    def mapped(self) -> list[Tensor]:
        """The mapped keys of the tokens."""
        return self.buffers.mapped(self.last - self.tokens[2].shape[1], self.last)


class Pushed(NamedTuple):
    """The tokens of a state after one or more new ones.

    Args:
        tokens: the last of them, a window at most.
        gone: those before them, of which only the mask is left out where all are visible.
        place: of the tokens in buffers, or None.
    """

    tokens: Tokens
    gone: tuple[Tensor, Tensor, Tensor | None]
    place: Place | None


def push(
    kept: Tokens,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    place: Place | None = None,
    *,
    window: int | None,
    mapping: Mapping | None = None,
) -> Pushed:
    """Add new tokens to those of a state.

    One token at a time goes into buffers; several, those of a graph or of a transform, and streams that keep no tokens
    or all of them get tensors of their own.

    Args:
        kept: the tokens of the state, n of them.
        key: c new keys (B, G, c, D), in the same dtype; hidden ones are 0.
        value: (B, G, c, E), likewise.
        mask: (B, c) bool, True = visible; None: all are.
        place: of the state's tokens in buffers, if they are in any.
        window: how many tokens are kept afterwards; None: all of them.
        mapping: what else is wanted of each key, see `Place.mapped`; a stream has one mapping throughout.
    """
    count, new = kept[2].shape[1], key.shape[2]
    total = count + new
    first = 0 if window is None else max(0, total - window)
    if not window or new != 1 or not _is_plain((key, value)):
        marks = kept[2].new_ones(kept[2].shape[0], new) if mask is None else mask
        key, value = (torch.cat(pair, 2) for pair in zip(kept[:2], (key, value), strict=True))
        marks = torch.cat((kept[2], marks), 1)
        gone = key[:, :, :first], value[:, :, :first], marks[:, :first]
        return Pushed((key[:, :, first:], value[:, :, first:], marks[:, first:]), gone, None)
    if place is not None and not all(map(is_, place.tokens, kept)):
        place = None
    if place is None or not place.buffers.append(place.last, key, value, mask, mapping):
        place = Place(NearKeys(kept, window, mapping), count, kept, mask is None and bool(kept[2].all()))
        place.buffers.append(count, key, value, mask, mapping)
    last, visible = place.last + 1, place.visible and mask is None
    buffers, start = place.buffers, last - total
    marks = kept[2] if visible and first else buffers.mask(start + first, last)  # all of them True
    tokens = (*buffers.pairs(start + first, last), marks)
    hidden = None if visible else buffers.mask(start, start + first)
    return Pushed(tokens, (*buffers.pairs(start, start + first), hidden), Place(buffers, last, tokens, visible))


def _is_plain(tensors: Sequence[Tensor]) -> bool:
    """True if the tensors can be written into one another: with data, not wrapped or part of a graph."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    return all(type(x) is Tensor and not x.is_meta for x in tensors)
