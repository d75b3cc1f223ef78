"""Positive random features of the softmax and Gaussian kernels (Performer, Sec. 2.3, Lemma 1, Theorem 1)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernelformer.contract import PositiveChunks, PositiveSpec, Role
from kernelformer.errors import choice, flag, positive_int
from kernelformer.feature_maps.base import FeatureMap
from kernelformer.feature_maps.projection import Dense, Projection, Transform

_ROW = {"softmax": -0.5, "gaussian": -1.0}


@dataclass(frozen=True)
class ExponentialSpec(PositiveSpec):
    """``log phi_i(x) = w_i . x + row |x|^2 + constant``; tensors: those of the transform x -> W x."""

    row: float
    constant: float
    transform: Transform

    def feature_dim(self, tensors: Sequence[Tensor], head_dim: int) -> int:
        """One feature per frequency."""
        return self.transform.width(tensors, head_dim)

    def log_features(self, x: Tensor, tensors: Sequence[Tensor], scale: float, role: Role) -> Tensor:
        """Evaluate the formula."""
        return self.log_shares(x, tensors, scale, role) + self.constant

    def log_shares(self, x: Tensor, tensors: Sequence[Tensor], scale: float, role: Role) -> Tensor:
        """Formula without its constant, which cancels."""
        norm = torch.linalg.vecdot(x, x).unsqueeze(-1)
        return self.transform.project(x, tensors, math.sqrt(scale), norm, self.row * scale)

    def bind(self, tensors: Sequence[Tensor], scale: float, normalize: bool, learn: bool) -> PositiveChunks:
        """Bind for chunks, with the scale folded into the frequencies once."""
        projection = self.transform.bind(tensors, math.sqrt(scale), learn)
        if projection is None:
            return super().bind(tensors, scale, normalize, learn)
        return ExponentialChunks(projection, self, scale, normalize)


class ExponentialChunks(PositiveChunks):
    """`ExponentialSpec` on chunks."""

    def __init__(self, projection: Projection, spec: ExponentialSpec, scale: float, normalize: bool) -> None:
        self.projection, self.spec, self.scale, self.normalize = projection, spec, scale, normalize
        self.row = spec.row * scale

    def _offset(self, x: Tensor) -> Tensor:
        norm: Tensor = torch.linalg.vector_norm(x, dim=-1)
        offset = norm.square_().mul_(self.row)
        return offset if self.normalize else offset.add_(self.spec.constant)

    def queries(self, x: Tensor, shift: Tensor, out: Tensor) -> Tensor:
        """Projection; the row's own offset cancels under normalization and is left out there."""
        self.projection.rows(x, out, shift)
        return out if self.normalize else out.add_(self._offset(x).unsqueeze(2))

    def keys(self, x: Tensor, out: Tensor) -> Tensor:
        """Projection with the offset as the summand of the product."""
        return self.projection.columns(x, out, self._offset(x).unsqueeze(1))

    def key_rows(self, x: Tensor, out: Tensor) -> Tensor:
        """Same as `keys`, row by row."""
        return self.projection.rows(x, out, self._offset(x).unsqueeze(2))

    def vjp_queries(self, x: Tensor, grad: Tensor, out: Tensor) -> Tensor:
        """Compute ``grad W + 2 row x sum(grad)``; the sum is zero under normalization."""
        self.projection.vjp_rows(x, grad, out)
        return out if self.normalize else out.addcmul_(x, grad.sum(2, keepdim=True), value=2 * self.row)

    def vjp_keys(self, x: Tensor, grad: Tensor, out: Tensor) -> Tensor:
        """The same for a transposed gradient."""
        self.projection.vjp_columns(x, grad, out)
        return out.addcmul_(x, grad.sum(1).unsqueeze(2), value=2 * self.row)

    def at(self, row: int, head: int = 0) -> PositiveChunks:
        """Row ``row`` of the projection."""
        return ExponentialChunks(self.projection.at(row), self.spec, self.scale, self.normalize)

    def tensor_grads(self) -> list[Tensor]:
        """Gradients of the transform's tensors."""
        return self.projection.tensor_grads()


class PositiveMap(FeatureMap):
    """Positive features of FAVOR+.

        phi(x) = exp(-|x|^2 / 2) / sqrt(m) [exp(w_i . x)]                     softmax kernel   (Performer, Eq. 7)
        phi(x) = exp(-|x|^2) / sqrt(m) [exp(w_i . x)]                         Gaussian kernel
        hyperbolic: [exp(w_i . x), exp(-w_i . x)] / sqrt(2m) instead of [exp(w_i . x)] / sqrt(m)   (Performer, Lemma 1)
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
        num_features: int = 256,
        kernel: str = "softmax",
        hyperbolic: bool = False,
        regularized: bool = False,
        norms: str | None = None,
        **common: Any,
    ) -> None:
        num_features = positive_int("num_features", num_features)
        choice("kernel", kernel, _ROW)
        if flag("regularized", regularized):
            if norms == "chi":
                raise ValueError(
                    "favor+regularized has frequencies of norm sqrt(head_dim), got norms='chi'; use favor+."
                )
            norms = "sqrt"
        width = 2 * num_features if flag("hyperbolic", hyperbolic) else num_features
        transform = Dense(mirrored=True) if hyperbolic else Dense()
        super().__init__(
            ExponentialSpec(row=_ROW[kernel], constant=-0.5 * math.log(width), transform=transform),
            num_features=num_features,
            settings={"kernel": kernel, "hyperbolic": hyperbolic, "regularized": regularized},
            norms=norms,
            **common,
        )
        self._start()
