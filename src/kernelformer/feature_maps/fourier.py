"""Trigonometric random features (Performer, Sec. 2.3; random kitchen sinks)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernelformer.contract import Role, SignedSpec, transforms_active
from kernelformer.errors import choice, positive_int
from kernelformer.feature_maps.base import FeatureMap
from kernelformer.feature_maps.exponential import DENSE, Dense

_ROW = {"softmax": 0.5, "gaussian": 0.0}


class _Waves(torch.autograd.Function):
    """``[cos a, sin a]`` without copies of both; they are each other's derivatives, so that no others are computed."""

    @staticmethod
    def forward(ctx: Any, angle: Tensor) -> Tensor:
        count = angle.shape[-1]
        phi = angle.new_empty(*angle.shape[:-1], 2 * count)
        torch.cos(angle, out=phi[..., :count])
        torch.sin(angle, out=phi[..., count:])
        ctx.save_for_backward(phi)
        return phi

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (cos, sin), (by_cos, by_sin) = (x.chunk(2, -1) for x in (ctx.saved_tensors[0], grad))
        return (cos * by_sin).addcmul_(sin, by_cos, value=-1)


@dataclass(frozen=True)
class FourierSpec(SignedSpec):
    """``phi(x) = exp(row |x|^2) [amplitude cos(w_i . x), amplitude sin(w_i . x), sqrt(smoothing)]``.

    The last feature is there if smoothing is not 0. Tensors: those of the transform x -> W x.
    """

    row: float
    amplitude: float
    transform: Dense = DENSE
    smoothing: float = 0.0

    @property
    def has_factor(self) -> bool:
        """True for the softmax kernel: ``exp(|x|^2 / 2)`` overflows from |x| ~ 13, so it is kept as a logarithm."""
        return self.row != 0

    def feature_dim(self, tensors: Sequence[Tensor], head_dim: int) -> int:
        """One cosine and one sine per frequency, and the constant."""
        return 2 * self.transform.width(tensors) + (self.smoothing > 0)

    def sizes(self, normalize: bool) -> tuple[float, float]:
        """Amplitudes of a wave and of the constant feature; under normalization relative to the former."""
        root = math.sqrt(self.smoothing)
        return (1.0, root / self.amplitude) if normalize else (self.amplitude, root)

    def length(self, normalize: bool) -> float:
        """Length of the features: cosine and sine of one angle have length 1."""
        size = math.sqrt(1 + self.smoothing)
        return size / self.amplitude if normalize else size

    def features(
        self, x: Tensor, tensors: Sequence[Tensor], scale: float, role: Role, normalize: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Evaluate the formula."""
        wave, constant = self.sizes(normalize)
        angle = self.transform.project(x, tensors, math.sqrt(scale))
        if torch.compiler.is_compiling() or transforms_active():
            phi = torch.cat([angle.cos(), angle.sin()], -1)
        else:
            phi = _Waves.apply(angle)  # type: ignore[no-untyped-call]
        if wave != 1:
            phi = wave * phi
        if self.smoothing:
            phi = F.pad(phi, (0, 1), value=constant)
        return phi, self.row * scale * x.square().sum(-1, keepdim=True) if self.has_factor else None


class TrigonometricMap(FeatureMap):
    """Trigonometric features: signed, unbiased, and of large variance where the kernel is small.

        phi(x) = exp(|x|^2 / 2) / sqrt(m) [cos(w_i . x), sin(w_i . x)]     softmax kernel    (Performer, Eq. 5)
        phi(x) = 1 / sqrt(m) [cos(w_i . x), sin(w_i . x)]                  Gaussian kernel

    M = 2 num_features.

    Args:
        kernel: ``softmax`` or ``gaussian``.

    The others are those of `FeatureMap`.
    """

    def __init__(self, *, num_features: int = 256, kernel: str = "softmax", **common: Any) -> None:
        num_features = positive_int("num_features", num_features)
        choice("kernel", kernel, _ROW)
        super().__init__(
            FourierSpec(row=_ROW[kernel], amplitude=1 / math.sqrt(num_features)),
            num_features=num_features,
            settings={"kernel": kernel},
            **common,
        )
        self._start()
