"""Generalized attention: an elementwise function of a projection, or of the input itself (Performer, Sec. 2.2, App. D).

`exp` and `elu + 1` cannot be negative and can be tiny or huge, so they are positive maps in log space; the others are
bounded below by eps or signed, and speak by their values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kernelformer.contract import PositiveChunks, PositiveSpec, Role, SignedChunks, SignedSpec
from kernelformer.errors import choice, flag, number, positive_int
from kernelformer.feature_maps.base import FeatureMap
from kernelformer.feature_maps.projection import Dense, Identity, Projection, Transform


@dataclass(frozen=True)
class Activation:
    """f; f written into its argument; and a gradient multiplied in place by f', from z or from y + eps = f(z) + eps."""

    f: Callable[[Tensor], Tensor]
    f_: Callable[[Tensor], Tensor]
    back_: Callable[[Tensor, Tensor, float], Tensor]  # gradient, z or y + eps, eps
    needs_z: bool = False
    nonnegative: bool = False


def _gelu_slope(z: Tensor) -> Tensor:
    density = torch.exp(-0.5 * z.square()) / math.sqrt(2 * math.pi)
    return torch.addcmul(torch.special.ndtr(z), z, density)


ACTIVATIONS: dict[str, Activation] = {
    "relu": Activation(torch.relu, torch.relu_, lambda g, y, eps: g.masked_fill_(y <= eps, 0), nonnegative=True),
    "sigmoid": Activation(
        torch.sigmoid, torch.sigmoid_, lambda g, y, eps: g.mul_(y - eps).mul_(1 + eps - y), nonnegative=True
    ),
    "abs": Activation(torch.abs, torch.abs_, lambda g, z, _: g.mul_(z.sign()), needs_z=True, nonnegative=True),
    "gelu": Activation(F.gelu, lambda z: z.copy_(F.gelu(z)), lambda g, z, _: g.mul_(_gelu_slope(z)), needs_z=True),
    "cos": Activation(torch.cos, torch.cos_, lambda g, z, _: g.mul_(z.sin().neg_()), needs_z=True),
    "tanh": Activation(torch.tanh, torch.tanh_, lambda g, y, eps: g.mul_(1 - (y - eps).square())),
    "identity": Activation(torch.clone, lambda z: z, lambda g, y, eps: g),
}


@dataclass(frozen=True)
class ElementwiseSpec(SignedSpec):
    """``phi_i(x) = (f(w_i . x) + eps) / sqrt(m)``; tensors: those of the transform x -> W x."""

    activation: str
    eps: float
    amplitude: float
    transform: Transform

    @property
    def nonnegative(self) -> bool:
        """Whether neither f nor eps can be negative."""
        return ACTIVATIONS[self.activation].nonnegative and self.eps >= 0

    @property
    def has_factor(self) -> bool:
        """No exponentials, no factor."""
        return False

    def feature_dim(self, tensors: Sequence[Tensor], head_dim: int) -> int:
        """One feature per frequency, or per coordinate."""
        return self.transform.width(tensors, head_dim)

    def features(
        self, x: Tensor, tensors: Sequence[Tensor], scale: float, role: Role, normalize: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """The formula as it stands."""
        phi = ACTIVATIONS[self.activation].f(self.transform.project(x, tensors, math.sqrt(scale))) + self.eps
        return (phi if normalize else phi * self.amplitude), None

    def bind(self, tensors: Sequence[Tensor], scale: float, normalize: bool, learn: bool) -> SignedChunks:
        """In chunks; the amplitude cancels under normalization and is left out there."""
        return ElementwiseChunks(
            self, self.transform.bind(tensors, math.sqrt(scale), learn), 1.0 if normalize else self.amplitude
        )


class ElementwiseChunks(SignedChunks):
    """`ElementwiseSpec` on chunks."""

    def __init__(self, spec: ElementwiseSpec, projection: Projection, amplitude: float) -> None:
        self.f, self.eps = ACTIVATIONS[spec.activation], spec.eps
        self.projection, self.amplitude = projection, amplitude

    def features(self, x: Tensor, role: Role, out: Tensor) -> None:
        """Projection, function and summand, all in the caller's buffer."""
        self.f.f_(self.projection.rows(x, out))
        if self.eps:
            out.add_(self.eps)
        if self.amplitude != 1:
            out.mul_(self.amplitude)

    def pull(self, x: Tensor, role: Role, phi: Tensor, grad: Tensor, log_grad: Tensor | None, out: Tensor) -> Tensor:
        """Through f by its own value where that is enough, else by the projection computed again."""
        if self.f.needs_z:
            grad = self.f.back_(grad, self.projection.rows(x, torch.empty_like(phi)), self.eps).mul_(self.amplitude)
        elif self.amplitude != 1:  # dividing it out would round an inactive feature to an active one
            y = self.f.f_(self.projection.rows(x, torch.empty_like(phi)))
            grad = self.f.back_(grad, y.add_(self.eps), self.eps).mul_(self.amplitude)
        else:
            grad = self.f.back_(grad, phi, self.eps)
        return self.projection.pull_rows(x, grad, out)

    def tensor_grads(self) -> list[Tensor]:
        """Of the transform's tensors."""
        return self.projection.tensor_grads()


def _log_exp(z: Tensor, log_eps: float) -> Tensor:
    return z if log_eps == -math.inf else torch.logaddexp(z, z.new_full((), log_eps))


def _log_elu(z: Tensor) -> Tensor:
    # log(elu(z) + 1) = z below zero and log(1 + z) above: nothing is rounded to zero, in any dtype.
    return z.clamp_max(0) + torch.log1p(z.clamp_min(0))


@dataclass(frozen=True)
class LogElementwiseSpec(PositiveSpec):
    """``phi_i(x) = (f(w_i . x) + eps) / sqrt(m)`` for f = exp, or elu(x) + 1 with eps = 0, in log space."""

    activation: str
    log_eps: float
    constant: float
    transform: Transform

    def feature_dim(self, tensors: Sequence[Tensor], head_dim: int) -> int:
        """One feature per frequency, or per coordinate."""
        return self.transform.width(tensors, head_dim)

    def log_f(self, z: Tensor) -> Tensor:
        """``log(f(z) + eps)``."""
        return _log_elu(z) if self.activation == "elu" else _log_exp(z, self.log_eps)

    def slope(self, log_f: Tensor) -> Tensor:
        """The derivative of `log_f` at z, from its value there."""
        if self.activation == "elu":
            return torch.exp(-log_f.clamp_min(0))
        return -torch.expm1(self.log_eps - log_f)

    def log_features(self, x: Tensor, tensors: Sequence[Tensor], scale: float, role: Role) -> Tensor:
        """The formula as it stands."""
        return self.log_f(self.transform.project(x, tensors, math.sqrt(scale))) + self.constant

    def bind(self, tensors: Sequence[Tensor], scale: float, normalize: bool, learn: bool) -> PositiveChunks:
        """In chunks."""
        width = self.transform.width(tensors, tensors[0].shape[-1] if tensors else 0)
        return LogElementwiseChunks(self, self.transform.bind(tensors, math.sqrt(scale), learn), width)


class LogElementwiseChunks(PositiveChunks):
    """`LogElementwiseSpec` on chunks."""

    def __init__(self, spec: LogElementwiseSpec, projection: Projection, width: int) -> None:
        self.spec, self.projection, self.width = spec, projection, width

    def _log_f(self, x: Tensor) -> Tensor:
        z = x.new_empty(*x.shape[:-1], self.width or x.shape[-1])
        return self.spec.log_f(self.projection.rows(x, z))

    def queries(self, x: Tensor, shift: Tensor, out: Tensor) -> Tensor:
        """See `PositiveChunks`."""
        return torch.add(self._log_f(x), shift + self.spec.constant, out=out)

    def keys(self, x: Tensor, out: Tensor) -> Tensor:
        """See `PositiveChunks`."""
        return torch.add(self._log_f(x).transpose(1, 2), self.spec.constant, out=out)

    def pull_queries(self, x: Tensor, grad: Tensor, out: Tensor) -> Tensor:
        """The value of log f, computed again, tells its slope."""
        return self.projection.pull_rows(x, self.spec.slope(self._log_f(x)).mul_(grad), out)

    def pull_keys(self, x: Tensor, grad: Tensor, out: Tensor) -> Tensor:
        """The same for a transposed gradient."""
        return self.pull_queries(x, grad.transpose(1, 2), out)

    def at(self, row: int, head: int = 0) -> PositiveChunks:
        """Row ``row`` of the projection."""
        return LogElementwiseChunks(self.spec, self.projection.at(row), self.width)

    def tensor_grads(self) -> list[Tensor]:
        """Of the transform's tensors."""
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
        num_heads: int,
        num_features: int = 256,
        activation: str = "relu",
        projection: bool = True,
        eps: float | None = None,
        seed: int = 0,
        draw: str = "orthogonal",
        norms: str | None = None,
        per_head: bool = False,
        num_key_heads: int | None = None,
    ) -> None:
        choice("activation", activation, (*ACTIVATIONS, "exp", "elu"))
        if flag("projection", projection):
            num_features = positive_int("num_features", num_features)
        if activation == "elu" and eps is not None:
            raise ValueError(f"elu(x) + 1 takes no eps, got {eps}; leave it out.")
        eps = 1e-3 if eps is None else number("eps", eps, at_least=0)
        width = num_features if projection else head_dim
        transform: Transform = Dense() if projection else Identity()
        spec: ElementwiseSpec | LogElementwiseSpec
        if activation in ("exp", "elu"):
            log_eps = math.log(eps) if activation == "exp" and eps > 0 else -math.inf
            spec = LogElementwiseSpec(activation, log_eps, -0.5 * math.log(width), transform)
        else:
            spec = ElementwiseSpec(activation, eps, 1 / math.sqrt(width), transform)
        super().__init__(
            spec,
            head_dim=head_dim,
            num_heads=num_heads,
            num_features=num_features if projection else 0,
            seed=seed,
            draw=draw,
            norms=norms,
            per_head=per_head,
            num_key_heads=num_key_heads,
            settings={"activation": activation, "projection": projection, "eps": eps},
        )
        self._start()
