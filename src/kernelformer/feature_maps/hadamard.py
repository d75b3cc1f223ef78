"""The fast Walsh-Hadamard transform, and FastFood's product of it with diagonals and a permutation.

H_d = H_a (x) H_b for d = a b: a transform of length d is one of length a over one of length b. Taken down to factors
of two that is the textbook butterfly; factors of at most `RADIX`, each one small matrix product, pass over memory
fewer times. Cost: O(d log d) either way.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernelformer.contract import Workspace
from kernelformer.feature_maps.projection import Projection, Transform

RADIX = 16  # fastest factors on a CPU, and flat around it


def padded_dim(dim: int) -> int:
    """d', the next power of two."""
    return 1 << (dim - 1).bit_length()


def hadamard(dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The unnormalized Walsh-Hadamard matrix of a power of two, entries +-1, in Sylvester's order."""
    signs = [[-1.0 if (i & j).bit_count() % 2 else 1.0 for j in range(dim)] for i in range(dim)]
    return torch.tensor(signs, dtype=dtype, device=device)


def _factors(dim: int) -> list[int]:
    """Powers of two of at most `RADIX`, as equal as can be, with product ``dim``."""
    bits = dim.bit_length() - 1
    stages = -(-bits // (RADIX.bit_length() - 1))
    return [1 << (bits // stages + (i < bits % stages)) for i in range(stages)]


def fwht(x: Tensor) -> Tensor:
    """``H x`` over the last axis but one, (..., d, C) with d a power of two; H unnormalized, so ``H H = d I``.

    Differentiable, without a Python loop over rows. Cost: O(d log d) per column.
    """
    *lead, dim, width = x.shape
    if dim & (dim - 1):
        raise ValueError(f"the transform needs a power of two, got {dim} (shape {tuple(x.shape)}); pad with zeros.")
    inner = 1
    for size in _factors(dim):
        x = hadamard(size, x.dtype, x.device) @ x.reshape(*lead, dim // (inner * size), size, inner * width)
        inner *= size
    return x.reshape(*lead, dim, width)


class FastHadamard:
    """`fwht` between two buffers of the caller, for chunks.

    Args:
        dim: d', a power of two.
        like: dtype and device.
    """

    def __init__(self, dim: int, like: Tensor) -> None:
        self.stages = [hadamard(size, like.dtype, like.device) for size in _factors(dim)]

    def __call__(self, x: Tensor, spare: Tensor) -> tuple[Tensor, Tensor]:
        """``H x`` over the axis before the last; the result is in one of the two buffers, the other is spare."""
        inner = x.shape[-1]
        for h in self.stages:
            size = h.shape[0]
            stage, into = x.view(-1, size, inner), spare.view(-1, size, inner)
            torch.bmm(h.expand(stage.shape[0], size, size), stage, out=into)
            x, spare = spare, x
            inner *= size
        return x, spare


def fastfood(x: Tensor, scale: Tensor, gauss: Tensor, signs: Tensor, permutation: Tensor) -> Tensor:
    """``S H G P H B x / sqrt(d')`` block by block (KL-Transformer, Eq. 6, with sigma = 1).

    Args:
        x: (..., D, C).
        scale: S, (..., blocks, d').
        gauss: G, likewise.
        signs: B, likewise.
        permutation: P, likewise: row i of ``P u`` is row ``permutation[i]`` of u.

    Returns:
        (..., blocks d', C).

    Cost: O(M log d') per column.
    """
    dim = scale.shape[-1]
    padded = torch.nn.functional.pad(x, (0, 0, 0, dim - x.shape[-2])).unsqueeze(-3)
    u = fwht(padded * signs.unsqueeze(-1))
    index = permutation.long().unsqueeze(-1).expand(u.shape)
    y = fwht(u.gather(-2, index) * gauss.unsqueeze(-1))
    z: Tensor = y * (scale * dim**-0.5).unsqueeze(-1)
    return z.flatten(-3, -2)


@dataclass(frozen=True)
class FastFood(Transform):
    """`fastfood` as a transform; tensors: scale, gauss, signs, permutation, (B or 1, H or 1, blocks, d') each."""

    def width(self, tensors: Sequence[Tensor], head_dim: int) -> int:
        """The number of rows of all blocks, blocks d'."""
        return tensors[0].shape[-2] * tensors[0].shape[-1]

    def project(
        self, x: Tensor, tensors: Sequence[Tensor], factor: float, offset: Tensor | None = None, weight: float = 1.0
    ) -> Tensor:
        """The definition, by the fast transform of the rows."""
        x = (x.to(tensors[0].dtype) * factor).transpose(-1, -2)
        z = fastfood(x, *tensors).transpose(-1, -2)
        return z if offset is None else torch.add(z, offset, alpha=weight)

    def bind(self, tensors: Sequence[Tensor], factor: float, learn: bool) -> Projection:
        """The same for chunks, with buffers of their own for the passes."""
        grads = None
        if learn:
            grads = [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in tensors]
        return FastFoodProjection(tensors, factor, grads)


class FastFoodProjection(Projection):
    """`FastFood` on chunks, in columns, so that every pass runs along contiguous memory."""

    def __init__(self, tensors: Sequence[Tensor], factor: float, grads: list[Tensor] | None) -> None:
        self.tensors, self.grads = list(tensors), grads
        self.scale, self.gauss, self.signs = (x.unsqueeze(-1) for x in tensors[:3])  # (N, blocks, d', 1)
        self.factor = factor * self.dim**-0.5
        self.work = Workspace(self.scale.dtype, self.scale.device)

    @property
    def dim(self) -> int:
        """The length of a padded row, d'."""
        return self.tensors[0].shape[-1]

    def _take(self, name: str, width: int) -> Tensor:
        """A buffer (N, blocks, d', C)."""
        return self.work.take(name, *self.scale.shape[:3], width)

    def _over_all(self, order: Tensor) -> Tensor:
        """Orders within the blocks as one index over all rows (N blocks d')."""
        first = torch.arange(0, order.numel(), self.dim, device=order.device).view(*order.shape[:-1], 1)
        return (order + first).reshape(-1)

    @functools.cached_property
    def _hadamard(self) -> FastHadamard:
        return FastHadamard(self.dim, self.scale)

    @functools.cached_property
    def _index(self) -> Tensor:
        return self._over_all(self.tensors[3].long())

    @functools.cached_property
    def _inverse(self) -> Tensor:
        return self._over_all(self.tensors[3].argsort(-1))

    def _forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``y = H G P H B x`` and, where G learns, ``p = P H B x``, (N, blocks, d', C), and a spare buffer."""
        width, depth = x.shape[1], x.shape[2]
        u, spare = self._take("a", width), self._take("b", width)
        torch.mul(x.transpose(1, 2).unsqueeze(1), self.signs[:, :, :depth], out=u[:, :, :depth])
        u[:, :, depth:].zero_()
        u, p = self._hadamard(u, spare)
        torch.index_select(u.view(-1, width), 0, self._index, out=p.view(-1, width))
        t = torch.mul(p, self.gauss, out=u)
        y, spare = self._hadamard(t, p if self.grads is None else self._take("c", width))
        return y, p, spare

    def columns(self, x: Tensor, out: Tensor, shift: Tensor | None = None) -> Tensor:
        """Two transforms, a gather and three diagonals."""
        y, _, _ = self._forward(x)
        torch.mul(y, self.scale * self.factor, out=out.view(y.shape))
        return out if shift is None else out.add_(shift)

    def rows(self, x: Tensor, out: Tensor, shift: Tensor | None = None) -> Tensor:
        """The same as `columns`, transposed in the last pass."""
        y, _, _ = self._forward(x)
        z = y.mul_(self.scale * self.factor).flatten(1, 2).transpose(1, 2)
        return out.copy_(z) if shift is None else torch.add(z, shift, out=out)

    def pull_columns(self, x: Tensor, grad: Tensor, out: Tensor) -> Tensor:
        """The same backwards: ``B H P^T G H S``; H is symmetric. y and p are computed again where a diagonal learns."""
        width, depth = x.shape[1], x.shape[2]
        grad = grad.reshape(*self.scale.shape[:3], width)
        if self.grads is None:
            y, p, spare = self._take("a", width), None, self._take("b", width)
        else:
            y, p, spare = self._forward(x)
            self.grads[0] += y.mul_(grad).sum(-1).mul_(self.factor)
        g, spare = self._hadamard(torch.mul(grad, self.scale * self.factor, out=y), spare)
        if self.grads is not None and p is not None:
            self.grads[1] += torch.mul(g, p, out=spare).sum(-1)
        torch.index_select(g.mul_(self.gauss).view(-1, width), 0, self._inverse, out=spare.view(-1, width))
        g = self._hadamard(spare, g)[0][:, :, :depth]
        if self.grads is not None:
            self.grads[2][..., :depth] += (g * x.transpose(1, 2).unsqueeze(1)).sum(-1)
        return out.copy_(g.mul_(self.signs[:, :, :depth]).sum(1).transpose(1, 2))

    def pull_rows(self, x: Tensor, grad: Tensor, out: Tensor) -> Tensor:
        """The same for a transposed gradient."""
        return self.pull_columns(x, grad.transpose(1, 2).contiguous(), out)

    def at(self, row: int) -> Projection:
        """Row ``row`` as views."""
        one = slice(row, row + 1)
        grads = None if self.grads is None else [x[one] for x in self.grads]
        return FastFoodProjection([x[one] for x in self.tensors], self.factor * self.dim**0.5, grads)

    def tensor_grads(self) -> list[Tensor]:
        """Gradients of scale, gauss and signs; a permutation has none."""
        assert self.grads is not None
        return list(self.grads)
