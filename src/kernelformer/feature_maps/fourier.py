"""Trigonometric random features (performer Sec. 2.3; random kitchen sinks)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernelformer.contract import Role, SignedChunks, SignedSpec, scaled
from kernelformer.errors import choice, positive_int
from kernelformer.feature_maps.base import FeatureMap

_ROW = {"softmax": 0.5, "gaussian": 0.0}


@dataclass(frozen=True)
class FourierSpec(SignedSpec):
    """``phi(x) = exp(row |x|^2) amplitude [cos(w_i . x), sin(w_i . x)]``; tensors: omega (B or 1, H or 1, M / 2, D)."""

    row: float
    amplitude: float

    @property
    def nonnegative(self) -> bool:
        """Cosines are signed."""
        return False

    @property
    def has_factor(self) -> bool:
        """``exp(|x|^2 / 2)`` of the softmax kernel overflows from |x| ~ 13, so it travels as a logarithm."""
        return self.row != 0

    def feature_dim(self, tensors: Sequence[Tensor], head_dim: int) -> int:
        """A cosine and a sine per frequency."""
        return 2 * tensors[0].shape[-2]

    def features(
        self, x: Tensor, tensors: Sequence[Tensor], scale: float, role: Role, normalize: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """The formula as it stands."""
        x = x.to(tensors[0].dtype) * math.sqrt(scale)
        angle = x @ tensors[0].transpose(-1, -2)
        phi = self.amplitude * torch.cat([angle.cos(), angle.sin()], -1)
        return phi, self.row * x.square().sum(-1, keepdim=True) if self.has_factor else None

    def bind(self, tensors: Sequence[Tensor], scale: float, normalize: bool, learn: bool) -> SignedChunks:
        """In chunks, the scale folded into the frequencies once."""
        return FourierChunks(self, scaled(tensors[0], math.sqrt(scale)), scale, normalize, learn)


class FourierChunks(SignedChunks):
    """`FourierSpec` on chunks."""

    def __init__(self, spec: FourierSpec, weight: Tensor, scale: float, normalize: bool, learn: bool) -> None:
        self.spec, self.weight, self.scale, self.normalize = spec, weight, scale, normalize
        self.row = spec.row * scale
        self.grads = torch.zeros_like(weight, memory_format=torch.contiguous_format) if learn else None

    def features(self, x: Tensor, role: Role, out: Tensor) -> Tensor | None:
        """One product, then cosine and sine of it into the two halves."""
        half = self.weight.shape[1]
        angle = torch.bmm(x, self.weight.transpose(1, 2))
        torch.cos(angle, out=out[..., :half])
        torch.sin(angle, out=out[..., half:])
        out.mul_(self.spec.amplitude)
        if not self.spec.has_factor or (role == "query" and self.normalize):
            return None
        norm: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return norm.square_().mul_(self.row)

    def pull(self, x: Tensor, role: Role, phi: Tensor, grad: Tensor, log_grad: Tensor | None, out: Tensor) -> Tensor:
        """``d cos = -sin``, ``d sin = cos``: phi holds both, so nothing is computed again."""
        half = self.weight.shape[1]
        angle_grad = phi[..., :half] * grad[..., half:] - phi[..., half:] * grad[..., :half]
        if self.grads is not None:
            self.grads.baddbmm_(angle_grad.transpose(1, 2), x)
        torch.bmm(angle_grad, self.weight, out=out)
        return out if log_grad is None else out.addcmul_(x, log_grad, value=2 * self.row)

    def tensor_grads(self) -> list[Tensor]:
        """Of omega: undo the folded scale."""
        assert self.grads is not None
        return [self.grads * math.sqrt(self.scale)]


class TrigonometricMap(FeatureMap):
    """Trigonometric features: signed, unbiased, and of large variance where the kernel is small.

        phi(x) = exp(|x|^2 / 2) / sqrt(m) [cos(w_i . x), sin(w_i . x)]     softmax kernel    (performer Eq. 5)
        phi(x) = 1 / sqrt(m) [cos(w_i . x), sin(w_i . x)]                  Gaussian kernel

    M = 2 num_features. Arguments as `PositiveMap`.
    """

    def __init__(
        self,
        *,
        head_dim: int,
        num_heads: int,
        num_features: int = 256,
        kernel: str = "softmax",
        seed: int = 0,
        draw: str = "orthogonal",
        norms: str | None = None,
        per_head: bool = False,
    ) -> None:
        positive_int("num_features", num_features)
        choice("kernel", kernel, _ROW)
        super().__init__(
            FourierSpec(row=_ROW[kernel], amplitude=1 / math.sqrt(num_features)),
            head_dim=head_dim,
            num_heads=num_heads,
            num_features=num_features,
            seed=seed,
            draw=draw,
            norms=norms,
            per_head=per_head,
        )
