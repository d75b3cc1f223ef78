"""Groups of causal chunks of a map by its values: their rows, and the recurrence of the sums over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernelformer.attention.positive import EMPTY
from kernelformer.attention.reference import GUARD
from kernelformer.contract import Workspace

Tensors = Sequence[Tensor]


@dataclass
class Rows:
    """How the sums of some queries become outputs."""

    scale: Tensor  # (N, C, 1): 1 / denominator, 0 where there is none, or the size of an unnormalized row
    guarded: Tensor | None  # (N, C, 1) bool: the guard is the denominator

    def split(self, g: Tensor, out: Tensor, normalize: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Gradients of the numerator (N, C, E), the denominator (N, C, 1) and the guard's product of norms (N, C,
        1)."""
        g_num = g * self.scale
        if not normalize:
            return g_num, None, None
        g_den = torch.linalg.vecdot(g_num, out).neg_().unsqueeze(2)
        if self.guarded is None:
            return g_num, g_den, None
        return g_num, g_den.masked_fill(self.guarded, 0), g_den.masked_fill(~self.guarded, 0) * GUARD


def make_rows(den: Tensor | None, bound: Tensor | None, factor: Tensor | None, like: Tensor) -> Rows:
    """Rows from their denominators (N, C, 1) and bounds, or, where there are none, from the log of their sizes."""
    if den is None:
        size = like.new_ones(*like.shape[:2], 1) if factor is None else factor.exp()
        return Rows(size, None)
    guarded = None
    if bound is not None:
        guarded = den < bound
        den = torch.maximum(den, bound)
    return Rows(torch.where(den > torch.finfo(den.dtype).tiny, den.reciprocal(), 0.0), guarded)


@dataclass
class Group:
    """Some consecutive chunks of a causal sequence, mapped: rows are (row of the block, chunk)."""

    phi_q: Tensor  # (N c, R C, M)
    phi_k: Tensor  # (N c, C, M), without the factor
    norm_q: Tensor | None  # (N c, R C, 1)
    norm_k: Tensor  # (N c, C, 1)
    norms: Tensor | None  # (N c, R C, 1): sum of the norms that a row sees
    factor: Tensor | None  # (N c, C, 1): log factors of the keys
    visible: Tensor  # (N c or 1, R C, C): the mask times the keys' factors relative to the row's scale
    share: Tensor | None  # (N c, R C, 1): factor of the past at the row's scale, None = 1
    keys: Tensor | None  # (N c, C, 1): factor of a key at the scale after the chunk, None = 1
    decay: Tensor | None  # (N c, 1, 1): factor of the past at the scale after the chunk, None = 1
    old: list[Tensor]  # (N c, ...): kv, k_sum, norm_sum before the chunk
    scores: Tensor  # (N c, R C, C)
    rows: Rows
    factor_q: Tensor | None  # (N c, R C, 1): log factor of the query, and of the scale of what it sees
    den: Tensor | None  # (N c, R C, 1)
    state: list[Tensor]  # (N, ...) after the group

    def sums(self) -> tuple[Tensor, Tensor | None]:
        """The denominator of a part and the product of norms for its guard, (N c, R C) each."""
        assert self.den is not None
        guard = None
        if self.norm_q is not None and self.norms is not None:
            guard = (self.norm_q * self.norms).squeeze(2)
        return self.den.squeeze(2), guard

    def log(self) -> Tensor:
        """The scale of a part's sums, (N c, R C); EMPTY where there is nothing to sum."""
        den, guard = self.sums()
        log = torch.zeros_like(den) if self.factor_q is None else self.factor_q.squeeze(2)
        empty = den == 0 if guard is None else (den == 0) & (guard == 0)
        return log.masked_fill(empty, EMPTY)


def times(x: Tensor, factor: Tensor | None) -> Tensor:
    """The product; None means 1."""
    return x if factor is None else x * factor


def running_sums(
    start: Tensors, adds: Sequence[Tensor], decay: Tensor | None, rows: int, work: Workspace
) -> tuple[list[Tensor], list[Tensor]]:
    """Sums before each chunk, (N c, ...), and after the last, (N, ...)."""
    old, end = [], []
    for index, (now, add) in enumerate(zip(start, adds, strict=True)):
        steps = add.unflatten(0, (rows, -1))
        before = work.take(f"before{index}", *steps.shape)
        for c in range(steps.shape[1]):
            before[:, c] = now
            now = steps[:, c] + (now if decay is None else now * decay.view(rows, -1, 1, 1)[:, c])
        old.append(before.flatten(0, 1))
        end.append(now)
    return old, end


def later_grads(
    grads: list[Tensor], local: Sequence[Tensor], decay: Tensor | None, rows: int, work: Workspace
) -> tuple[list[Tensor], list[Tensor]]:
    """The same backwards: gradients of the sums after each chunk, (N c, ...), and before the first, (N, ...)."""
    later, before = [], []
    for index, (now, own) in enumerate(zip(grads, local, strict=True)):
        steps = own.unflatten(0, (rows, -1))
        after = work.take(f"after{index}", *steps.shape)
        for c in reversed(range(steps.shape[1])):
            after[:, c] = now
            now = steps[:, c] + (now if decay is None else now * decay.view(rows, -1, 1, 1)[:, c])
        later.append(after.flatten(0, 1))
        before.append(now)
    return later, before
