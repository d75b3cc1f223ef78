"""Random feature attention: Fourier features of unit vectors with a learned scale, and a gate that forgets (Peng et
al.).

    S_t = g_t S_{t-1} + (1 - g_t) phi(k_t) v_t^T          z_t = g_t z_{t-1} + (1 - g_t) phi(k_t)

Unrolled, key j weighs ``(1 - g_j) g_{j+1} ... g_i`` for query i. What depends on i cancels in the ratio, so that a
gate is one log factor per key, ``log(1 - g_j) - sum_{u <= j} log g_u``, which signed maps know how to carry.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernelformer.contract import Role, SignedChunks, SignedSpec
from kernelformer.errors import positive_int
from kernelformer.feature_maps.base import parameter
from kernelformer.feature_maps.fourier import FourierSpec
from kernelformer.feature_maps.projection import Dense
from kernelformer.feature_maps.spectral import SpectralMap


class ScaledFourierMap(SpectralMap):
    """Fourier features with a learned scale for every coordinate of the frequencies.

        phi(x) = 1 / sqrt(m) [cos(w_i . x), sin(w_i . x)],      w_i = sigma * n_i,  n_i ~ N(0, I)

    Meant for unit vectors, where the Gaussian kernel is the softmax kernel up to a factor. M = 2 num_features.

    Parameters: sigma (heads, D), at first 1.
    """

    def __init__(
        self,
        *,
        head_dim: int,
        num_features: int = 256,
        per_head: bool = True,
        **common: Any,
    ) -> None:
        num_features = positive_int("num_features", num_features)
        super().__init__(
            "rks",
            num_features,
            0.0,
            {},
            Dense(),
            head_dim=head_dim,
            num_features=num_features,
            per_head=per_head,
            **common,
        )
        self.sigma = parameter(self.heads, head_dim)
        self._start()

    def _reset_learned(self) -> None:
        self.sigma.fill_(1.0)

    def frequencies(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The frequencies sigma * n, (heads, num_features, D)."""
        return self.noise.to(dtype) * self.sigma.to(dtype).unsqueeze(1)


@dataclass(frozen=True)
class GatedSpec(SignedSpec):
    """A Fourier map of all coordinates but the last, which is the log weight of a key."""

    inner: FourierSpec

    @property
    def has_factor(self) -> bool:
        """Keys carry their last coordinate as log factor."""
        return True

    def length(self, normalize: bool) -> float | None:
        """That of the Fourier features."""
        return self.inner.length(normalize)

    def feature_dim(self, tensors: Sequence[Tensor], head_dim: int) -> int:
        """That of the Fourier features."""
        return self.inner.feature_dim(tensors, head_dim - 1)

    def features(
        self, x: Tensor, tensors: Sequence[Tensor], scale: float, role: Role, normalize: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """The formula as it stands."""
        phi, _ = self.inner.features(x[..., :-1], tensors, scale, role, normalize)
        return phi, x[..., -1:] if role == "key" or not normalize else None

    def bind(self, tensors: Sequence[Tensor], scale: float, normalize: bool, learn: bool) -> SignedChunks:
        """The same in chunks."""
        return GatedChunks(self.inner.bind(tensors, scale, normalize, learn), normalize)


class GatedChunks(SignedChunks):
    """`GatedSpec` on chunks."""

    def __init__(self, inner: SignedChunks, normalize: bool) -> None:
        self.inner, self.normalize = inner, normalize

    def features(self, x: Tensor, role: Role, out: Tensor) -> Tensor | None:
        """The log weight beside the features."""
        self.inner.features(x[..., :-1], role, out)
        return x[..., -1:].clone() if role == "key" or not self.normalize else None

    def pull(self, x: Tensor, role: Role, phi: Tensor, grad: Tensor, log_grad: Tensor | None, out: Tensor) -> Tensor:
        """The gradient of the log weight is that of the factor."""
        inner = self.inner.pull(x[..., :-1], role, phi, grad, None, x.new_empty(*x.shape[:2], x.shape[2] - 1))
        out[..., :-1] = inner
        out[..., -1:] = 0 if log_grad is None else log_grad
        return out

    def tensor_grads(self) -> list[Tensor]:
        """Gradients of the tensors of the Fourier map."""
        return self.inner.tensor_grads()
