"""Affine log features: the linear part ``z = W x`` of a map, and positive random features of the softmax and Gaussian
kernels (Performer, Sec. 2.3, Lemma 1, Theorem 1)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernelformer.contract import PositiveChunks, PositiveSpec, Role
from kernelformer.errors import choice, flag, positive_int
from kernelformer.feature_maps.base import FeatureMap


@dataclass(frozen=True)
class Dense:
    """Product with one matrix W; tensors: omega (B or 1, H or 1, M, D). Mirrored: W and -W, one below the other."""

    mirrored: bool = False

    def width(self, tensors: Sequence[Tensor]) -> int:
        """Number of entries of z."""
        return tensors[0].shape[-2] * (2 if self.mirrored else 1)

    def matrix(self, omega: Tensor) -> Tensor:
        """Matrix W, (..., M, D)."""
        return torch.cat([omega, -omega], -2) if self.mirrored else omega

    def project(self, x: Tensor, tensors: Sequence[Tensor], factor: float, row: float = 0.0) -> Tensor:
        """Definition, ``factor W x + row |x|^2``: x (B, H, C, D) -> (B, H, C, M).

        One product for all heads at once if they share the frequencies.
        """
        omega = self.matrix(tensors[0])
        x, shared = x.to(omega.dtype), omega.shape[:-2].numel() == 1
        if shared and not torch.compiler.is_exporting():  # a flat view would fix the length
            flat, weight = x.reshape(-1, x.shape[-1]), omega.flatten(0, -2).t()
            if row:
                z = torch.addmm((flat * flat).sum(1, keepdim=True), flat, weight, beta=row, alpha=factor)
            else:
                z = (flat * factor) @ weight
            return z.view(*x.shape[:-1], z.shape[-1])
        z = F.linear(x * factor, omega.flatten(0, -2)) if shared else (x * factor) @ omega.transpose(-1, -2)
        return torch.add(z, (x * x).sum(-1, keepdim=True), alpha=row) if row else z

    def bind(
        self,
        tensors: Sequence[Tensor],
        factor: float,
        learn: bool,
        *,
        row: float = 0.0,
        constant: float = 0.0,
        units: int = 0,
    ) -> Affine:
        """Bind ``factor W x + b + row |x|^2 + constant`` for chunks; tensors: omega and, if there is one, b (N, M)."""
        omega = tensors[0]
        shared = omega.shape[0] > 1 and omega.stride(0) == 0  # all rows are views of one, which is scaled once
        weight = (omega[:1] if shared else omega) * factor
        if self.mirrored:
            weight = self.matrix(weight)
        weight = weight.expand(omega.shape[0], -1, -1) if shared else weight
        held = [weight, *tensors[1:]]
        grads = [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in held] if learn else []
        return Affine(self, held, grads, factor, row, constant, units)


DENSE = Dense()


@dataclass
class Affine:
    """Logarithms ``z = W x + b + row |x|^2 + constant`` on chunks, less the log-sum-exp of each unit of z.

    Each call is one matrix product into the caller's buffer, with what it can as its summand. ``dim`` is the axis of
    the features: 2, rows (N, C, M), or 1, columns (N, M, C).
    """

    dense: Dense
    tensors: list[Tensor]  # ``factor W`` (N, M, D) and, if there is one, b (N, M)
    grads: list[Tensor]  # of these, to be summed up; empty where nothing is learned
    factor: float
    row: float
    constant: float
    units: int  # into how many equal parts z goes, each divided by its sum; 0 leaves z as it is

    def logs(self, x: Tensor, dim: int, out: Tensor, shift: Tensor | None = None, norm: bool = True) -> Tensor:
        """Compute ``out = z + shift``, with ``norm=False`` without what depends on |x| alone."""
        last = shift if self.units else None
        shift = None if self.units else shift
        for b in self.tensors[1:]:
            b = b.unsqueeze(3 - dim)
            shift = b if shift is None else shift + b
        offset: Tensor | None = None
        if norm and (self.row or self.constant):
            offset = torch.linalg.vector_norm(x, dim=-1).square_().mul_(self.row)
            offset = (offset.add_(self.constant) if self.constant else offset).unsqueeze(dim)
        if shift is None:
            shift, offset = offset, None
        weight = self.tensors[0]
        if dim == 1:
            x = x.transpose(1, 2)
            torch.bmm(weight, x, out=out) if shift is None else torch.baddbmm(shift, weight, x, out=out)
        elif x.shape[0] > 1 and weight.stride(0) == 0 and x.is_contiguous() and out.is_contiguous():
            torch.mm(x.flatten(0, 1), weight[0].t(), out=out.flatten(0, 1))
            if shift is not None:
                out.add_(shift)
        else:
            weight = weight.transpose(1, 2)
            torch.bmm(x, weight, out=out) if shift is None else torch.baddbmm(shift, x, weight, out=out)
        if offset is not None:
            out.add_(offset)
        if self.units:
            parts = out.unflatten(dim, (self.units, -1))
            parts.sub_(parts.logsumexp(dim + 1, keepdim=True))
        return out if last is None else out.add_(last)

    def vjp(self, x: Tensor, dim: int, grad: Tensor, out: Tensor, norm: bool = True) -> Tensor:
        """Gradient of `logs` at x, (N, C, D), written into out; adds to the gradients of the tensors."""
        if self.units:
            logs = self.logs(x, dim, torch.empty_like(grad))
            shares, parts = (y.unflatten(dim, (self.units, -1)) for y in (logs, grad))
            total = parts.sum(dim + 1, keepdim=True)
            grad = torch.addcmul(parts, shares.exp_(), total, value=-1).flatten(dim, dim + 1)
        rows = grad if dim == 2 else grad.transpose(1, 2)
        if self.grads:
            self.grads[0].baddbmm_(rows.transpose(1, 2), x)
        for b in self.grads[1:]:
            b += grad.sum(3 - dim)
        torch.bmm(rows, self.tensors[0], out=out)
        return out.addcmul_(x, grad.sum(dim).unsqueeze(2), value=2 * self.row) if norm and self.row else out

    def at(self, row: int) -> Affine:
        """Row ``row`` of N as views, so that gradients are summed in the whole."""
        tensors, grads = ([x[row : row + 1] for x in some] for some in (self.tensors, self.grads))
        return Affine(self.dense, tensors, grads, self.factor, self.row, self.constant, self.units)

    def tensor_grads(self) -> list[Tensor]:
        """Gradients of omega and b: undo the folded factor, and both signs of a mirrored W."""
        grad = self.grads[0] * self.factor
        if self.dense.mirrored:
            plus, minus = grad.chunk(2, dim=1)
            grad = plus - minus
        return [grad, *self.grads[1:]]


class AffineChunks(PositiveChunks):
    """Positive map with affine log features of queries and keys on chunks, which may be the same object.

    ``group`` is R where the R query heads of a row have maps of their own, N R of them; 1 where they share the row's.
    """

    def __init__(self, query: Affine, key: Affine, normalize: bool, group: int = 1) -> None:
        self.query, self.key, self.norm, self.group = query, key, not normalize, group

    def _by_head(self, x: Tensor) -> Tensor:
        """View rows (N, R C, X) with a map for each head as (N R, C, X)."""
        return x if self.group == 1 else x.view(x.shape[0] * self.group, -1, x.shape[2])

    def queries(self, x: Tensor, shift: Tensor, out: Tensor) -> Tensor:
        """See `PositiveChunks`."""
        shift = shift if self.group == 1 else shift.repeat_interleave(self.group, 0)
        self.query.logs(self._by_head(x), 2, self._by_head(out), shift, self.norm)
        return out

    def keys(self, x: Tensor, out: Tensor) -> Tensor:
        """See `PositiveChunks`."""
        return self.key.logs(x, 1, out)

    def key_rows(self, x: Tensor, out: Tensor) -> Tensor:
        """See `PositiveChunks`."""
        return self.key.logs(x, 2, out)

    def vjp_queries(self, x: Tensor, grad: Tensor, out: Tensor) -> Tensor:
        """See `PositiveChunks`."""
        self.query.vjp(self._by_head(x), 2, self._by_head(grad), self._by_head(out), self.norm)
        return out

    def vjp_keys(self, x: Tensor, grad: Tensor, out: Tensor) -> Tensor:
        """See `PositiveChunks`."""
        return self.key.vjp(x, 1, grad, out)

    def at(self, row: int, head: int = 0) -> AffineChunks:
        """See `PositiveChunks`."""
        query = self.query.at(row * self.group + (head if self.group > 1 else 0))
        return AffineChunks(query, query if self.key is self.query else self.key.at(row), not self.norm)

    def tensor_grads(self) -> list[Tensor]:
        """See `PositiveChunks`."""
        same = self.key is self.query
        queries = self.query.tensor_grads()
        if self.group > 1:
            queries = [x.unflatten(0, (-1, self.group)) for x in queries]
        return queries if same else [*queries, *self.key.tensor_grads()]


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
