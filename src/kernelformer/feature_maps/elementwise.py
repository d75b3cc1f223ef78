"""Generalized attention: a pointwise function of a projection, or of the input itself (Performer, Sec. 2.2 and App. D).

`exp` and `elu + 1` cannot be negative and can be tiny or huge, so they are positive maps in log space; the others are
bounded below by eps or signed, and are maps by their values. All share one table and one way through a chunk.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernelformer.contract import PositiveChunks, PositiveSpec, Role, SignedChunks, SignedSpec
from kernelformer.errors import choice, flag, number, positive_int
from kernelformer.feature_maps.base import FeatureMap
from kernelformer.feature_maps.projection import Dense, Identity, Projection


@dataclass(frozen=True)
class Activation:
    """A pointwise function: y = f(z) + eps, or its logarithm.

    Args:
        value: y from z and eps, differentiable.
        value_: the same, written into z where that is possible.
        back: the gradient at z from that of y, which may be overwritten, from y, or z if it needs z, and from eps.
        needs_z: whether the gradient cannot be told from y.
        nonnegative: whether f cannot be negative.
        log: whether y is the logarithm.
    """

    value: Callable[[Tensor, float], Tensor]
    value_: Callable[[Tensor, float], Tensor]
    back: Callable[[Tensor, Tensor, float], Tensor]
    needs_z: bool = False
    nonnegative: bool = False
    log: bool = False


def _by_value(
    f: Callable[[Tensor], Tensor],
    f_: Callable[[Tensor], Tensor],
    back: Callable[[Tensor, Tensor, float], Tensor],
    *,
    needs_z: bool = False,
    nonnegative: bool = False,
) -> Activation:
    """Build an `Activation` from f, and f written into its argument."""
    return Activation(
        lambda z, eps: f(z) + eps,
        lambda z, eps: f_(z).add_(eps) if eps else f_(z),
        back,
        needs_z=needs_z,
        nonnegative=nonnegative,
    )


def _by_log(value: Callable[[Tensor, float], Tensor], slope: Callable[[Tensor, float], Tensor]) -> Activation:
    """Build an `Activation` from ``y = log(f(z) + eps)``, and its derivative in terms of y."""
    return Activation(value, value, lambda g, y, eps: slope(y, eps).mul_(g), nonnegative=True, log=True)


def _gelu_slope(z: Tensor) -> Tensor:
    density = torch.exp(-0.5 * z.square()) / math.sqrt(2 * math.pi)
    return torch.addcmul(torch.special.ndtr(z), z, density)


def _log_exp(z: Tensor, eps: float) -> Tensor:
    return torch.logaddexp(z, z.new_full((), math.log(eps))) if eps else z


def _log_elu(z: Tensor, _: float) -> Tensor:
    # log(elu(z) + 1) = z below zero and log(1 + z) above: nothing is rounded to zero, in any dtype.
    return z.clamp_max(0) + torch.log1p(z.clamp_min(0))


ACTIVATIONS: dict[str, Activation] = {
    "relu": _by_value(torch.relu, torch.relu_, lambda g, y, eps: g.masked_fill_(y <= eps, 0), nonnegative=True),
    "exp": _by_log(_log_exp, lambda y, eps: -torch.expm1((math.log(eps) if eps else -math.inf) - y)),
    "sigmoid": _by_value(
        torch.sigmoid, torch.sigmoid_, lambda g, y, eps: g.mul_(y - eps).mul_(1 + eps - y), nonnegative=True
    ),
    "abs": _by_value(torch.abs, torch.abs_, lambda g, z, _: g.mul_(z.sign()), needs_z=True, nonnegative=True),
    "gelu": _by_value(F.gelu, lambda z: z.copy_(F.gelu(z)), lambda g, z, _: g.mul_(_gelu_slope(z)), needs_z=True),
    "cos": _by_value(torch.cos, torch.cos_, lambda g, z, _: g.mul_(z.sin().neg_()), needs_z=True),
    "tanh": _by_value(torch.tanh, torch.tanh_, lambda g, y, eps: g.mul_(1 - (y - eps).square())),
    "identity": _by_value(torch.clone, lambda z: z, lambda g, y, eps: g),
    "elu": _by_log(_log_elu, lambda y, _: torch.exp(-y.clamp_min(0))),
}


@dataclass(frozen=True)
class _Pointwise:
    """``phi_i(x) = (f(w_i . x) + eps) / sqrt(m)``; tensors: those of the transform x -> W x."""

    activation: str
    eps: float
    amplitude: float
    transform: Dense | Identity

    @property
    def function(self) -> Activation:
        """Activation f, by its name."""
        return ACTIVATIONS[self.activation]

    def feature_dim(self, tensors: Sequence[Tensor], head_dim: int) -> int:
        """One feature per frequency, or per coordinate."""
        return self.transform.width(tensors, head_dim)

    def values(self, x: Tensor, tensors: Sequence[Tensor], scale: float) -> Tensor:
        """Compute ``f(W x) + eps``, or its logarithm: the formula without the amplitude."""
        return self.function.value(self.transform.project(x, tensors, math.sqrt(scale)), self.eps)


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

    def bind(self, tensors: Sequence[Tensor], scale: float, normalize: bool, learn: bool) -> SignedChunks:
        """Bind for chunks."""
        projection = self.transform.bind(tensors, math.sqrt(scale), learn)
        return ElementwiseChunks(self, projection, 1.0 if normalize else self.amplitude)


class ElementwiseChunks(SignedChunks):
    """`ElementwiseSpec` on chunks."""

    def __init__(self, spec: ElementwiseSpec, projection: Projection, amplitude: float) -> None:
        self.f, self.eps = spec.function, spec.eps
        self.projection, self.amplitude = projection, amplitude

    def features(self, x: Tensor, role: Role, out: Tensor) -> None:
        """Projection, activation and eps, all in the caller's buffer."""
        self.f.value_(self.projection.rows(x, out), self.eps)
        if self.amplitude != 1:
            out.mul_(self.amplitude)

    def vjp(self, x: Tensor, role: Role, phi: Tensor, grad: Tensor, log_grad: Tensor | None, out: Tensor) -> Tensor:
        """Differentiate f by its own value where that is enough, else by the projection computed again."""
        known = phi
        if self.f.needs_z or self.amplitude != 1:  # dividing it out would round an inactive feature to an active one
            known = self.projection.rows(x, torch.empty_like(phi))
            known = known if self.f.needs_z else self.f.value_(known, self.eps)
        grad = self.f.back(grad, known, self.eps)
        return self.projection.vjp_rows(x, grad if self.amplitude == 1 else grad.mul_(self.amplitude), out)

    def tensor_grads(self) -> list[Tensor]:
        """Gradients of the transform's tensors."""
        return self.projection.tensor_grads()


@dataclass(frozen=True)
class LogElementwiseSpec(_Pointwise, PositiveSpec):
    """Pointwise map in log space."""

    @property
    def constant(self) -> float:
        """The logarithm of the amplitude."""
        return math.log(self.amplitude)

    def log_features(self, x: Tensor, tensors: Sequence[Tensor], scale: float, role: Role) -> Tensor:
        """The logarithm of the formula."""
        return self.values(x, tensors, scale) + self.constant

    def bind(self, tensors: Sequence[Tensor], scale: float, normalize: bool, learn: bool) -> PositiveChunks:
        """Bind for chunks."""
        width = self.transform.width(tensors, tensors[0].shape[-1] if tensors else 0)
        return LogElementwiseChunks(self, self.transform.bind(tensors, math.sqrt(scale), learn), width)


class LogElementwiseChunks(PositiveChunks):
    """`LogElementwiseSpec` on chunks."""

    def __init__(self, spec: LogElementwiseSpec, projection: Projection, width: int) -> None:
        self.spec, self.projection, self.width = spec, projection, width

    def _values(self, x: Tensor) -> Tensor:
        z = x.new_empty(*x.shape[:-1], self.width or x.shape[-1])
        return self.spec.function.value_(self.projection.rows(x, z), self.spec.eps)

    def queries(self, x: Tensor, shift: Tensor, out: Tensor) -> Tensor:
        """See `PositiveChunks`."""
        return torch.add(self._values(x), shift + self.spec.constant, out=out)

    def keys(self, x: Tensor, out: Tensor) -> Tensor:
        """See `PositiveChunks`."""
        return torch.add(self._values(x).transpose(1, 2), self.spec.constant, out=out)

    def vjp_queries(self, x: Tensor, grad: Tensor, out: Tensor) -> Tensor:
        """Differentiate by the logarithm, computed again."""
        return self.projection.vjp_rows(x, self.spec.function.back(grad, self._values(x), self.spec.eps), out)

    def vjp_keys(self, x: Tensor, grad: Tensor, out: Tensor) -> Tensor:
        """The same for a transposed gradient."""
        return self.vjp_queries(x, grad.transpose(1, 2), out)

    def at(self, row: int, head: int = 0) -> PositiveChunks:
        """Row ``row`` of the projection."""
        return LogElementwiseChunks(self.spec, self.projection.at(row), self.width)

    def tensor_grads(self) -> list[Tensor]:
        """Gradients of the transform's tensors."""
        return self.projection.tensor_grads()


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
        transform: Dense | Identity = Dense() if projection else Identity()
        super().__init__(
            kind(activation, eps, 1 / math.sqrt(width), transform),
            head_dim=head_dim,
            num_features=num_features if projection else 0,
            settings={"activation": activation, "projection": projection, "eps": eps},
            **common,
        )
        self._start()
