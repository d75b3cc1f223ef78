"""Positive random features of the softmax and Gaussian kernels (Performer, Sec. 2.3, Lemma 1, Theorem 1)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kernelformer.contract import PositiveChunks, PositiveSpec, Role
from kernelformer.errors import choice, flag, positive_int
from kernelformer.feature_maps.base import FeatureMap
from kernelformer.feature_maps.projection import DENSE, AffineChunks, Dense

_ROW = {"softmax": -0.5, "gaussian": -1.0}


@dataclass(frozen=True)
class ExponentialSpec(PositiveSpec):
    """``log phi_i(x) = w_i . x + row |x|^2 + constant``; tensors: those of the transform x -> W x."""

    row: float
    constant: float
    transform: Dense = DENSE

    def feature_dim(self, tensors: Sequence[Tensor], head_dim: int) -> int:
        """One feature per entry of W x."""
        return self.transform.width(tensors)

    def log_features(self, x: Tensor, tensors: Sequence[Tensor], scale: float, role: Role) -> Tensor:
        """Evaluate the formula."""
        return self.log_shares(x, tensors, scale, role) + self.constant

    def log_shares(self, x: Tensor, tensors: Sequence[Tensor], scale: float, role: Role) -> Tensor:
        """Formula without its constant, which cancels."""
        return self.transform.project(x, tensors, math.sqrt(scale), self.row * scale)

    def bind(self, tensors: Sequence[Tensor], scale: float, normalize: bool, learn: bool) -> PositiveChunks:
        """Bind for chunks, with the scale folded into the frequencies once."""
        if type(self.transform) is not Dense:
            return super().bind(tensors, scale, normalize, learn)
        constant = 0.0 if normalize else self.constant
        both = self.transform.bind(tensors, math.sqrt(scale), learn, row=self.row * scale, constant=constant)
        return AffineChunks(both, both, normalize)


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
        super().__init__(
            ExponentialSpec(row=_ROW[kernel], constant=-0.5 * math.log(width), transform=Dense(mirrored=hyperbolic)),
            num_features=num_features,
            settings={"kernel": kernel, "hyperbolic": hyperbolic, "regularized": regularized},
            norms=norms,
            **common,
        )
        self._start()
