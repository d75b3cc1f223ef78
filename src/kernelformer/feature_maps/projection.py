"""The linear part ``z = W x`` of a map: the definition of W, and its products with chunks.

A `Transform` is part of a spec and says how W follows from the map's tensors; bound to them it is a `Projection`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kernelformer.contract import scaled


class Projection(ABC):
    """Transform bound to the rows of a block; letters as in `contract`."""

    @abstractmethod
    def rows(self, x: Tensor, out: Tensor, shift: Tensor | None = None) -> Tensor:
        """Compute ``out = W x + shift`` by rows: x (N, C, D), shift broadcastable to out (N, C, M); returns out."""

    @abstractmethod
    def columns(self, x: Tensor, out: Tensor, shift: Tensor | None = None) -> Tensor:
        """Compute `rows` transposed: shift broadcastable to out (N, M, C)."""

    @abstractmethod
    def vjp_rows(self, x: Tensor, grad: Tensor, out: Tensor) -> Tensor:
        """Gradient of `rows` at x, grad (N, C, M) -> out (N, C, D); adds to `tensor_grads` if bound to learn."""

    @abstractmethod
    def vjp_columns(self, x: Tensor, grad: Tensor, out: Tensor) -> Tensor:
        """Gradient of `columns` at x, grad (N, M, C) -> out (N, C, D); adds to `tensor_grads` as well."""

    @abstractmethod
    def at(self, row: int) -> Projection:
        """Return the same for one row of N, by views, so that gradients are summed in the whole."""

    def tensor_grads(self) -> list[Tensor]:
        """Return the gradients of the bound tensors, (N, ...) each, summed over all vector-Jacobian products so far."""
        raise TypeError(f"{type(self).__name__} has no tensors to learn.")


@dataclass(frozen=True)
class Transform(ABC):
    """Linear map from x to z, given the map's tensors."""

    @abstractmethod
    def width(self, tensors: Sequence[Tensor], head_dim: int) -> int:
        """Number of entries of z."""

    @abstractmethod
    def project(
        self, x: Tensor, tensors: Sequence[Tensor], factor: float, offset: Tensor | None = None, weight: float = 1.0
    ) -> Tensor:
        """Definition, ``factor W x + weight offset``: x (B, H, C, D), offset (B, H, C, 1) -> (B, H, C, M)."""

    def bind(self, tensors: Sequence[Tensor], factor: float, learn: bool) -> Projection | None:
        """Bind ``factor W`` for chunks; tensors (N, ...). None, the default: chunks go through `project`."""
        return None


@dataclass(frozen=True)
class Dense(Transform):
    """Transform by one matrix W; tensors: omega (B or 1, H or 1, M, D). Mirrored: W and -W, one below the other."""

    mirrored: bool = False

    def width(self, tensors: Sequence[Tensor], head_dim: int) -> int:
        """One row per frequency, two if mirrored."""
        return tensors[0].shape[-2] * (2 if self.mirrored else 1)

    def matrix(self, omega: Tensor) -> Tensor:
        """Matrix W, (..., M, D)."""
        return torch.cat([omega, -omega], -2) if self.mirrored else omega

    def project(
        self, x: Tensor, tensors: Sequence[Tensor], factor: float, offset: Tensor | None = None, weight: float = 1.0
    ) -> Tensor:
        """One product, for all heads at once if they share the frequencies."""
        omega = self.matrix(tensors[0])
        x = x.to(omega.dtype)
        if omega.shape[:-2].numel() == 1 and torch.compiler.is_exporting():  # a flat view would fix the length
            z = F.linear(x * factor, omega.view(omega.shape[-2:]))
            return z if offset is None else torch.add(z, offset, alpha=weight)
        if omega.shape[:-2].numel() == 1:
            flat, omega = x.reshape(-1, x.shape[-1]), omega.view(omega.shape[-2:]).t()
            if offset is None:
                z = (flat * factor) @ omega
            else:
                z = torch.addmm(offset.reshape(-1, 1), flat, omega, beta=weight, alpha=factor)
            return z.view(*x.shape[:-1], z.shape[-1])
        z = (x * factor) @ omega.transpose(-1, -2)
        return z if offset is None else torch.add(z, offset, alpha=weight)

    def bind(self, tensors: Sequence[Tensor], factor: float, learn: bool) -> Projection:
        """Fold the factor into the matrix once."""
        weight = scaled(tensors[0], factor, self.matrix)
        grads = torch.zeros_like(weight, memory_format=torch.contiguous_format) if learn else None
        return DenseProjection(weight, grads, factor, self.mirrored)


class DenseProjection(Projection):
    """`Dense` on chunks: each call is one matrix product into the caller's buffer."""

    def __init__(self, weight: Tensor, grads: Tensor | None, factor: float, mirrored: bool) -> None:
        self.weight, self.grads, self.factor, self.mirrored = weight, grads, factor, mirrored

    def rows(self, x: Tensor, out: Tensor, shift: Tensor | None = None) -> Tensor:
        """One product with the shift as its summand."""
        weight = self.weight.transpose(1, 2)
        if x.shape[0] > 1 and weight.stride(0) == 0 and x.is_contiguous() and out.is_contiguous():
            torch.mm(x.flatten(0, 1), weight[0], out=out.flatten(0, 1))
            return out if shift is None else out.add_(shift)
        return torch.bmm(x, weight, out=out) if shift is None else torch.baddbmm(shift, x, weight, out=out)

    def columns(self, x: Tensor, out: Tensor, shift: Tensor | None = None) -> Tensor:
        """One product with the shift as its summand."""
        x = x.transpose(1, 2)
        return torch.bmm(self.weight, x, out=out) if shift is None else torch.baddbmm(shift, self.weight, x, out=out)

    def vjp_rows(self, x: Tensor, grad: Tensor, out: Tensor) -> Tensor:
        """Multiply the gradient by W."""
        if self.grads is not None:
            self.grads.baddbmm_(grad.transpose(1, 2), x)
        return torch.bmm(grad, self.weight, out=out)

    def vjp_columns(self, x: Tensor, grad: Tensor, out: Tensor) -> Tensor:
        """The same for a transposed gradient."""
        if self.grads is not None:
            self.grads.baddbmm_(grad, x)
        return torch.bmm(grad.transpose(1, 2), self.weight, out=out)

    def at(self, row: int) -> Projection:
        """Row ``row`` as views."""
        one = slice(row, row + 1)
        grads = None if self.grads is None else self.grads[one]
        return DenseProjection(self.weight[one], grads, self.factor, self.mirrored)

    def tensor_grads(self) -> list[Tensor]:
        """Gradient of omega: undo the folded factor, and both signs of a mirrored one."""
        assert self.grads is not None
        grad = self.grads * self.factor
        if self.mirrored:
            plus, minus = grad.chunk(2, dim=1)
            grad = plus - minus
        return [grad]


@dataclass(frozen=True)
class Identity(Transform):
    """Transform z = x, without tensors."""

    def width(self, tensors: Sequence[Tensor], head_dim: int) -> int:
        """Head dimension."""
        return head_dim

    def project(
        self, x: Tensor, tensors: Sequence[Tensor], factor: float, offset: Tensor | None = None, weight: float = 1.0
    ) -> Tensor:
        """Multiply by the factor."""
        return x * factor if offset is None else torch.add(x * factor, offset, alpha=weight)

    def bind(self, tensors: Sequence[Tensor], factor: float, learn: bool) -> Projection:
        """Bind the factor."""
        return IdentityProjection(factor)


class IdentityProjection(Projection):
    """`Identity` on chunks."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def rows(self, x: Tensor, out: Tensor, shift: Tensor | None = None) -> Tensor:
        """Multiply by the factor."""
        torch.mul(x, self.factor, out=out)
        return out if shift is None else out.add_(shift)

    def columns(self, x: Tensor, out: Tensor, shift: Tensor | None = None) -> Tensor:
        """Multiply by the factor and transpose."""
        return self.rows(x.transpose(1, 2), out, shift)

    def vjp_rows(self, x: Tensor, grad: Tensor, out: Tensor) -> Tensor:
        """Multiply by the factor."""
        return torch.mul(grad, self.factor, out=out)

    def vjp_columns(self, x: Tensor, grad: Tensor, out: Tensor) -> Tensor:
        """Multiply by the factor and transpose."""
        return torch.mul(grad.transpose(1, 2), self.factor, out=out)

    def at(self, row: int) -> Projection:
        """Return itself: all rows are the same."""
        return self
