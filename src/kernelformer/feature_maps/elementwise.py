"""Generalized attention: a pointwise function of a projection, or of the input itself (Performer, Sec. 2.2 and App. D).

`exp` and `elu + 1` cannot be negative and can be tiny or huge, so they are positive maps in log space; the others are
bounded below by eps or signed, and are maps by their values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernelformer.contract import PositiveSpec, Role, SignedSpec
from kernelformer.errors import choice, flag, number, positive_int
from kernelformer.feature_maps.base import FeatureMap
from kernelformer.feature_maps.exponential import DENSE


@dataclass(frozen=True)
class Activation:
    """Pointwise function y = f(z) + eps, differentiable, or its logarithm where ``log`` says so."""

    value: Callable[[Tensor, float], Tensor]
    nonnegative: bool = True
    log: bool = False


def _plus_eps(f: Callable[[Tensor], Tensor], nonnegative: bool = True) -> Activation:
    return Activation(lambda z, eps: f(z) + eps if eps else f(z), nonnegative)


def _log_exp(z: Tensor, eps: float) -> Tensor:
    return torch.logaddexp(z, z.new_full((), math.log(eps))) if eps else z


def _log_elu(z: Tensor, _: float) -> Tensor:
    # log(elu(z) + 1) = z below zero and log(1 + z) above: nothing is rounded to zero, in any dtype.
    # The slope at zero is 1, which that of relu is not.
    return torch.where(z > 0, torch.log1p(z.clamp_min(0)), z)


ACTIVATIONS: dict[str, Activation] = {
    "relu": _plus_eps(torch.relu),
    "exp": Activation(_log_exp, log=True),
    "sigmoid": _plus_eps(torch.sigmoid),
    "abs": _plus_eps(torch.abs),
    "gelu": _plus_eps(F.gelu, nonnegative=False),
    "cos": _plus_eps(torch.cos, nonnegative=False),
    "tanh": _plus_eps(torch.tanh, nonnegative=False),
    "sign": _plus_eps(torch.sign, nonnegative=False),  # angular kernel; without a gradient to queries and keys
    "identity": _plus_eps(lambda z: z, nonnegative=False),
    "elu": Activation(_log_elu, log=True),
}


@dataclass(frozen=True)
class _Pointwise:
    """``phi_i(x) = (f(w_i . x) + eps) / sqrt(m)``; tensors: omega, or none for f of x itself."""

    activation: str
    eps: float
    amplitude: float

    @property
    def function(self) -> Activation:
        """Activation f, by its name."""
        return ACTIVATIONS[self.activation]

    def feature_dim(self, tensors: Sequence[Tensor], head_dim: int) -> int:
        """One feature per frequency, or per coordinate."""
        return DENSE.width(tensors) if tensors else head_dim

    def values(self, x: Tensor, tensors: Sequence[Tensor], scale: float) -> Tensor:
        """Compute ``f(W x) + eps``, or its logarithm: the formula without the amplitude."""
        root = math.sqrt(scale)
        return self.function.value(DENSE.project(x, tensors, root) if tensors else x * root, self.eps)


@dataclass(frozen=True)
class ElementwiseSpec(_Pointwise, SignedSpec):
    """Pointwise map by its values."""

    @property
    def nonnegative(self) -> bool:
        """True if neither f nor eps can be negative."""
        return self.function.nonnegative and self.eps >= 0

    def features(
        self, x: Tensor, tensors: Sequence[Tensor], scale: float, role: Role, normalize: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Evaluate the formula; the amplitude cancels under normalization and is left out there."""
        phi = self.values(x, tensors, scale)
        return (phi if normalize else phi * self.amplitude), None


@dataclass(frozen=True)
class LogElementwiseSpec(_Pointwise, PositiveSpec):
    """Pointwise map in log space."""

    def log_features(self, x: Tensor, tensors: Sequence[Tensor], scale: float, role: Role) -> Tensor:
        """The logarithm of the formula."""
        return self.values(x, tensors, scale) + math.log(self.amplitude)


class GeneralizedMap(FeatureMap):
    """Generalized attention.

        phi(x) = (f(w_i . x) + eps) / sqrt(m)          (Performer, Sec. 2.2; f = relu and eps = 1e-3 in its App. A)

    Args:
        activation: f: relu, exp, sigmoid, abs, gelu, cos, tanh, identity, or elu for elu(x) + 1 (which takes no eps).
        projection: draw frequencies w_i; else f acts on the coordinates of x and M = D.
        eps: added to f, default 1e-3; elu takes none.

    The others are those of `FeatureMap`. Maps that can be negative are signed.
    """

    def __init__(
        self,
        *,
        head_dim: int,
        num_features: int = 256,
        activation: str = "relu",
        projection: bool = True,
        eps: float | None = None,
        **common: Any,
    ) -> None:
        choice("activation", activation, ACTIVATIONS)
        if flag("projection", projection):
            num_features = positive_int("num_features", num_features)
        if activation == "elu" and eps is not None:
            raise ValueError(f"elu(x) + 1 takes no eps, got {eps}; leave it out.")
        eps = 1e-3 if eps is None else number("eps", eps, at_least=0)
        width = num_features if projection else head_dim
        kind = LogElementwiseSpec if ACTIVATIONS[activation].log else ElementwiseSpec
        super().__init__(
            kind(activation, eps, 1 / math.sqrt(width)),
            head_dim=head_dim,
            num_features=num_features if projection else 0,
            settings={"activation": activation, "projection": projection, "eps": eps},
            **common,
        )
        self._start()
