"""Trigonometric random features (Performer, Sec. 2.3; random kitchen sinks)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernelformer.contract import Role, SignedChunks, SignedSpec, Workspace
from kernelformer.errors import choice, positive_int
from kernelformer.feature_maps.base import FeatureMap
from kernelformer.feature_maps.projection import Dense, Projection, Transform

_ROW = {"softmax": 0.5, "gaussian": 0.0}


@dataclass(frozen=True)
class FourierSpec(SignedSpec):
    """``phi(x) = exp(row |x|^2) [amplitude cos(w_i . x), amplitude sin(w_i . x), sqrt(smoothing)]``.

    The last feature is there if smoothing is not 0. Tensors: those of the transform x -> W x.
    """

    row: float
    amplitude: float
    transform: Transform
    smoothing: float = 0.0

    @property
    def has_factor(self) -> bool:
        """True for the softmax kernel: ``exp(|x|^2 / 2)`` overflows from |x| ~ 13, so it is kept as a logarithm."""
        return self.row != 0

    def feature_dim(self, tensors: Sequence[Tensor], head_dim: int) -> int:
        """One cosine and one sine per frequency, and the constant."""
        return 2 * self.transform.width(tensors, head_dim) + (self.smoothing > 0)

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
        parts = [wave * angle.cos(), wave * angle.sin()]
        if self.smoothing:
            parts.append(angle.new_full((*angle.shape[:-1], 1), constant))
        factor = self.row * scale * x.square().sum(-1, keepdim=True) if self.has_factor else None
        return torch.cat(parts, -1), factor

    def bind(self, tensors: Sequence[Tensor], scale: float, normalize: bool, learn: bool) -> SignedChunks:
        """Bind for chunks, with the scale folded into the frequencies once."""
        projection = self.transform.bind(tensors, math.sqrt(scale), learn)
        if projection is None:
            return super().bind(tensors, scale, normalize, learn)
        return FourierChunks(self, projection, scale, normalize)


class FourierChunks(SignedChunks):
    """`FourierSpec` on chunks."""

    def __init__(self, spec: FourierSpec, projection: Projection, scale: float, normalize: bool) -> None:
        self.spec, self.projection, self.normalize = spec, projection, normalize
        self.row = spec.row * scale
        self.wave, self.constant = spec.sizes(normalize)
        self.work: Workspace | None = None

    def features(self, x: Tensor, role: Role, out: Tensor) -> Tensor | None:
        """One product, then cosine and sine of it into the two halves."""
        half = out.shape[-1] // 2
        self.work = self.work or Workspace(x.dtype, x.device)
        angle = self.projection.rows(x, self.work.take("angle", *x.shape[:2], half))
        wave = self.work.take("wave", *x.shape[:2], half)
        for first, function in ((0, torch.cos), (half, torch.sin)):
            # Straight into the half of a wider row these functions are five times slower.
            out[..., first : first + half] = function(angle, out=wave)
        out[..., 2 * half :] = self.constant
        if self.wave != 1:
            out[..., : 2 * half].mul_(self.wave)
        if not self.spec.has_factor or (role == "query" and self.normalize):
            return None
        norm: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return norm.square_().mul_(self.row)

    def vjp(self, x: Tensor, role: Role, phi: Tensor, grad: Tensor, log_grad: Tensor | None, out: Tensor) -> Tensor:
        """Use ``d cos = -sin``, ``d sin = cos``: phi holds both, so nothing is computed again."""
        half = phi.shape[-1] // 2
        cos, sin = phi[..., :half], phi[..., half : 2 * half]
        assert self.work is not None  # phi came from here
        slope = self.work.take("angle", *x.shape[:2], half)
        torch.mul(cos, grad[..., half : 2 * half], out=slope)
        slope.addcmul_(sin, grad[..., :half], value=-1)
        self.projection.vjp_rows(x, slope, out)
        return out if log_grad is None else out.addcmul_(x, log_grad, value=2 * self.row)

    def tensor_grads(self) -> list[Tensor]:
        """Gradients of the transform's tensors."""
        return self.projection.tensor_grads()


class TrigonometricMap(FeatureMap):
    """Trigonometric features: signed, unbiased, and of large variance where the kernel is small.

        phi(x) = exp(|x|^2 / 2) / sqrt(m) [cos(w_i . x), sin(w_i . x)]     softmax kernel    (Performer, Eq. 5)
        phi(x) = 1 / sqrt(m) [cos(w_i . x), sin(w_i . x)]                  Gaussian kernel

    M = 2 num_features.

    Args:
        kernel: ``softmax`` or ``gaussian``.

    The others are those of `FeatureMap`.
    """

    def __init__(
        self,
        *,
        num_features: int = 256,
        kernel: str = "softmax",
        **common: Any,
    ) -> None:
        num_features = positive_int("num_features", num_features)
        choice("kernel", kernel, _ROW)
        transform = Dense()
        super().__init__(
            FourierSpec(row=_ROW[kernel], amplitude=1 / math.sqrt(num_features), transform=transform),
            num_features=num_features,
            settings={"kernel": kernel},
            **common,
        )
        self._start()
