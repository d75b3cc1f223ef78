"""Positive random features of the softmax and Gaussian kernels (performer Sec. 2.3, Lemma 1, Theorem 1)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernelformer.contract import PositiveChunks, PositiveSpec, Role, scaled
from kernelformer.errors import choice, positive_int
from kernelformer.feature_maps.base import FeatureMap

_ROW = {"softmax": -0.5, "gaussian": -1.0}


@dataclass(frozen=True)
class ExponentialSpec(PositiveSpec):
    """``log phi_i(x) = w_i . x + row |x|^2 + constant``; tensors: omega (B or 1, H or 1, M, D)."""

    row: float
    constant: float
    mirrored: bool = False

    def feature_dim(self, tensors: Sequence[Tensor], head_dim: int) -> int:
        """One feature per frequency, two if mirrored."""
        return tensors[0].shape[-2] * (2 if self.mirrored else 1)

    def _frequencies(self, omega: Tensor) -> Tensor:
        return torch.cat([omega, -omega], -2) if self.mirrored else omega

    def log_features(self, x: Tensor, tensors: Sequence[Tensor], scale: float, role: Role) -> Tensor:
        """The formula as it stands."""
        return self.log_shares(x, tensors, scale, role) + self.constant

    def log_shares(self, x: Tensor, tensors: Sequence[Tensor], scale: float, role: Role) -> Tensor:
        """Without the constant."""
        omega, root, row = self._frequencies(tensors[0]), math.sqrt(scale), self.row * scale
        lead = x.shape[:-1]
        if omega.shape[:2] != (1, 1):
            return torch.add((x * root) @ omega.transpose(-1, -2), torch.linalg.vecdot(x, x).unsqueeze(-1), alpha=row)
        x = x.reshape(-1, x.shape[-1])  # one product for all heads
        omega = omega.view(omega.shape[2:])
        rows = torch.addmm(torch.linalg.vecdot(x, x).unsqueeze(-1), x, omega.t(), beta=row, alpha=root)
        return rows.view(*lead, -1)

    def bind(self, tensors: Sequence[Tensor], scale: float, normalize: bool, learn: bool) -> PositiveChunks:
        """In chunks, the scale folded into the frequencies once."""
        weight = scaled(tensors[0], math.sqrt(scale), self._frequencies)
        grads = torch.zeros_like(weight, memory_format=torch.contiguous_format) if learn else None
        return ExponentialChunks(weight, grads, self, scale, normalize)


class ExponentialChunks(PositiveChunks):
    """`ExponentialSpec` on chunks: each call is one matrix product into the caller's buffer."""

    def __init__(self, weight: Tensor, grads: Tensor | None, spec: ExponentialSpec, scale: float, normalize: bool):
        self.weight, self.grads, self.spec, self.scale, self.normalize = weight, grads, spec, scale, normalize
        self.row = spec.row * scale

    def _offset(self, x: Tensor) -> Tensor:
        norm: Tensor = torch.linalg.vector_norm(x, dim=-1)
        offset = norm.square_().mul_(self.row)
        return offset if self.normalize else offset.add_(self.spec.constant)

    def queries(self, x: Tensor, shift: Tensor, out: Tensor) -> Tensor:
        """The row's own offset cancels under normalization and is left out there."""
        torch.baddbmm(shift, x, self.weight.transpose(1, 2), out=out)
        return out if self.normalize else out.add_(self._offset(x).unsqueeze(2))

    def keys(self, x: Tensor, out: Tensor) -> Tensor:
        """The offset rides on the matrix product as its summand."""
        return torch.baddbmm(self._offset(x).unsqueeze(1), self.weight, x.transpose(1, 2), out=out)

    def pull_queries(self, x: Tensor, grad: Tensor, out: Tensor) -> Tensor:
        """``grad W + 2 row x sum(grad)``; the sum is zero under normalization."""
        if self.grads is not None:
            self.grads.baddbmm_(grad.transpose(1, 2), x)
        torch.bmm(grad, self.weight, out=out)
        return out if self.normalize else out.addcmul_(x, grad.sum(2, keepdim=True), value=2 * self.row)

    def pull_keys(self, x: Tensor, grad: Tensor, out: Tensor) -> Tensor:
        """The same for a transposed gradient."""
        if self.grads is not None:
            self.grads.baddbmm_(grad, x)
        torch.bmm(grad.transpose(1, 2), self.weight, out=out)
        return out.addcmul_(x, grad.sum(1).unsqueeze(2), value=2 * self.row)

    def at(self, row: int) -> PositiveChunks:
        """Row ``row`` as views, so that gradients land in the whole."""
        one = slice(row, row + 1)
        grads = None if self.grads is None else self.grads[one]
        return ExponentialChunks(self.weight[one], grads, self.spec, self.scale, self.normalize)

    def tensor_grads(self) -> list[Tensor]:
        """Of omega: undo the folded scale, and both signs of a mirrored one."""
        assert self.grads is not None
        grad = self.grads * math.sqrt(self.scale)
        if self.spec.mirrored:
            plus, minus = grad.chunk(2, dim=1)
            grad = plus - minus
        return [grad]


class PositiveMap(FeatureMap):
    """FAVOR+'s positive features.

        phi(x) = exp(-|x|^2 / 2) / sqrt(m) [exp(w_i . x)]                     softmax kernel   (performer Eq. 7)
        phi(x) = exp(-|x|^2) / sqrt(m) [exp(w_i . x)]                         Gaussian kernel
        hyperbolic: [exp(w_i . x), exp(-w_i . x)] / sqrt(2m) instead of [exp(w_i . x)] / sqrt(m)   (performer Lemma 1)
        regularized: w_i on the sphere of radius sqrt(d)                      SMREG, never above the softmax kernel

    Args:
        kernel: ``softmax`` or ``gaussian``.
        hyperbolic: two features per frequency; M = 2 num_features.
        regularized: rows of omega have norm sqrt(D) exactly, whatever the draw.

    The others are those of `FeatureMap`.
    """

    def __init__(
        self,
        *,
        head_dim: int,
        num_heads: int,
        num_features: int = 256,
        kernel: str = "softmax",
        hyperbolic: bool = False,
        regularized: bool = False,
        seed: int = 0,
        draw: str = "orthogonal",
        norms: str | None = None,
        per_head: bool = False,
    ) -> None:
        positive_int("num_features", num_features)
        choice("kernel", kernel, _ROW)
        if regularized:
            if norms == "chi":
                raise ValueError(
                    "favor+regularized has frequencies of norm sqrt(head_dim), got norms='chi'; use favor+."
                )
            norms = "sqrt"
        width = 2 * num_features if hyperbolic else num_features
        super().__init__(
            ExponentialSpec(row=_ROW[kernel], constant=-0.5 * math.log(width), mirrored=hyperbolic),
            head_dim=head_dim,
            num_heads=num_heads,
            num_features=num_features,
            seed=seed,
            draw=draw,
            norms=norms,
            per_head=per_head,
        )
