"""Queries against tiles of keys, for each family of maps: what `relative` multiplies, sums and takes gradients of.

Between a chunk of queries and a tile of keys the weights are a product of two small matrices,

    phi(q_i) . phi(k_j)  =  exp(r_i) left_i . phi_j          left (N, Cq, M), phi (N, M, Ck)

where ``phi`` is divided by exp(``shift``), per feature for positive maps, per tile for signed ones, and ``r`` is the
``row_scale``: it is no less than anything the row sees, so ``left`` and ``phi`` stay below 1 for positive maps.
Normalization takes ``exp(r)`` away, and with it the gradients of all these scales.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernelformer.attention.positive import EMPTY
from kernelformer.attention.relative.bias_view import Span
from kernelformer.contract import PositiveChunks, PositiveSpec, SignedChunks, SignedSpec, Spec, Workspace

TINY = 1e-12  # a row shorter than this is not made longer than itself times 1e12, as `torch.nn.functional.normalize`


@dataclass
class Keys:
    """A tile of keys, mapped."""

    span: Span
    x: Tensor  # (N, C, D)
    v: Tensor  # (N, C, E)
    hidden: Tensor | None  # (N, C) bool
    phi: Tensor  # (N, M, C) in units of shift
    shift: Tensor  # (N, 1, M) or (N, 1, 1)
    size: Tensor | None = None  # (N, C, 1): what x was divided by, if it was
    norms: Tensor | None = None  # (N, 1, C), for the guard, in the same units
    raw: Tensor | None = None  # (N, C, M): signed features without their factor
    factor: Tensor | None = None  # (N, C, 1)
    grad: Tensor | None = None  # of phi, (N, M, C)
    dv: Tensor | None = None  # (N, C, E)
    norm_grad: Tensor | None = None  # (N, 1, C)

    def start(self) -> None:
        """Collect gradients from here on."""
        if self.grad is None:
            self.grad, self.dv = torch.zeros_like(self.phi), torch.zeros_like(self.v)
            self.norm_grad = None if self.norms is None else torch.zeros_like(self.norms)


@dataclass
class Queries:
    """A chunk of queries, mapped."""

    x: Tensor  # (N, C, D)
    phi: Tensor  # (N, C, M): logarithms for positive maps, values for signed ones
    size: Tensor | None = None  # (N, C, 1): what x was divided by, if it was
    norms: Tensor | None = None  # (N, C, 1), for the guard
    grad: Tensor | None = None  # of phi
    norm_grad: Tensor | None = None


class Tiles(ABC):
    """A map bound to the rows of a block."""

    guard = False

    def __init__(self, work: Workspace, normalize_qk: bool) -> None:
        self.work, self.normalize_qk = work, normalize_qk

    def directions(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Rows (N, C, D) as the map sees them, and what they were divided by; with ``normalize_qk``, their L2 norm."""
        if not self.normalize_qk:
            return x, None
        size = torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp_min_(TINY)
        return x / size, size

    @staticmethod
    def through(grad: Tensor, x: Tensor, size: Tensor | None) -> Tensor:
        """The gradient at the rows themselves, from that at their directions x; in place."""
        if size is None:
            return grad
        return grad.addcmul_(x, torch.linalg.vecdot(grad, x).unsqueeze(-1), value=-1).div_(size)

    @abstractmethod
    def keys(self, span: Span, x: Tensor, v: Tensor, hidden: Tensor | None, features: int) -> Keys:
        """Map a tile (N, C, D); hidden keys (N, C) get features of zero."""

    @abstractmethod
    def queries(self, x: Tensor, features: int) -> Queries:
        """Map a chunk (N, C, D)."""

    @abstractmethod
    def base(self, queries: Queries, top: Tensor) -> tuple[Tensor, Tensor]:
        """``left`` for what is in units of ``top``, and the row_scale (N, Cq, 1) of rows that see nothing beyond it."""

    def at(self, base: Tensor, shift: Tensor, top: Tensor) -> Tensor:
        """``left`` for what is in units of ``shift``, from that of ``top``, (N, Cq, M)."""
        return torch.mul(base, (shift - top).exp_(), out=self.work.take("left", *base.shape))

    @abstractmethod
    def left(self, queries: Queries, shift: Tensor, row_scale: Tensor) -> Tensor:
        """``left`` for what is in units of ``shift``, (N, Cq, M)."""

    @abstractmethod
    def top(self, queries: Queries, row_scale: Tensor) -> Tensor:
        """The largest ``phi(q_i) / exp(r_i)`` of the rows, as a shift: log, (N, 1, M) or (N, 1, 1)."""

    @abstractmethod
    def add_left(self, queries: Queries, left: Tensor, slope: Tensor, shift: Tensor, row_scale: Tensor) -> None:
        """Add the gradient of ``left`` (N, Cq, M; may be overwritten) to the queries'."""

    @abstractmethod
    def pull_queries(self, queries: Queries) -> Tensor:
        """Gradient at x, (N, C, D)."""

    @abstractmethod
    def pull_keys(self, keys: Keys) -> Tensor:
        """Gradient at x, (N, C, D)."""

    def empty_shift(self, rows: int, features: int, like: Tensor) -> Tensor:
        """The shift of sums over no keys."""
        return like.new_full((rows, 1, features), EMPTY)


class PositiveTiles(Tiles):
    """By logarithms, with a shift per feature."""

    def __init__(self, chunks: PositiveChunks, work: Workspace, normalize_qk: bool) -> None:
        super().__init__(work, normalize_qk)
        self.chunks = chunks

    def keys(self, span: Span, x: Tensor, v: Tensor, hidden: Tensor | None, features: int) -> Keys:
        """``phi = exp(l(k) - shift)``, shift the largest of the tile."""
        x, size = self.directions(x)
        logs = self.chunks.keys(x, x.new_empty(x.shape[0], features, x.shape[1]))
        if hidden is not None:
            logs.masked_fill_(hidden.unsqueeze(1), -torch.inf)
        shift = logs.amax(2, keepdim=True).clamp_min(EMPTY)
        return Keys(span, x, v, hidden, logs.sub_(shift).exp_(), shift.transpose(1, 2), size)

    def queries(self, x: Tensor, features: int) -> Queries:
        """Logarithms."""
        x, size = self.directions(x)
        zero = x.new_zeros(1, 1, features).expand(x.shape[0], 1, features)
        return Queries(x, self.chunks.queries(x, zero, self.work.take("lq", *x.shape[:2], features)), size)

    def base(self, queries: Queries, top: Tensor) -> tuple[Tensor, Tensor]:
        """``r = max_m (l_m(q_i) + top_m)``."""
        logs = torch.add(queries.phi, top, out=self.work.take("base", *queries.phi.shape))
        row_scale = logs.amax(2, keepdim=True)
        return logs.sub_(row_scale).exp_(), row_scale

    def left(self, queries: Queries, shift: Tensor, row_scale: Tensor) -> Tensor:
        """``exp(l(q) + shift - r)``."""
        return torch.add(queries.phi, shift, out=self.work.take("left", *queries.phi.shape)).sub_(row_scale).exp_()

    def top(self, queries: Queries, row_scale: Tensor) -> Tensor:
        """``max_i (l_m(q_i) - r_i)``."""
        return torch.sub(queries.phi, row_scale, out=self.work.take("row_scale", *queries.phi.shape)).amax(
            1, keepdim=True
        )

    def add_left(self, queries: Queries, left: Tensor, slope: Tensor, shift: Tensor, row_scale: Tensor) -> None:
        """The gradient of a logarithm is that of the value times the value."""
        assert queries.grad is not None
        queries.grad.addcmul_(slope, left)

    def pull_queries(self, queries: Queries) -> Tensor:
        """Through the map."""
        assert queries.grad is not None
        grad = self.chunks.pull_queries(queries.x, queries.grad, self.work.take("dxq", *queries.x.shape))
        return self.through(grad, queries.x, queries.size)

    def pull_keys(self, keys: Keys) -> Tensor:
        """Through the map."""
        assert keys.grad is not None
        grad = self.chunks.pull_keys(keys.x, keys.grad.mul_(keys.phi), self.work.take("dxk", *keys.x.shape))
        return self.through(grad, keys.x, keys.size)


class SignedTiles(Tiles):
    """By values, with one shift per tile for the keys' log factors, and the guard's sums of lengths."""

    def __init__(
        self, chunks: SignedChunks, work: Workspace, normalize_qk: bool, guarded: bool, length: float | None
    ) -> None:
        super().__init__(work, normalize_qk)
        self.chunks, self.guard, self.length = chunks, guarded, length

    def empty_shift(self, rows: int, features: int, like: Tensor) -> Tensor:
        """One for all features."""
        return super().empty_shift(rows, 1, like)

    def lengths(self, phi: Tensor) -> Tensor:
        """What the guard takes for the length of rows (N, C, M), (N, C, 1)."""
        if self.length is not None:
            return phi.new_full((*phi.shape[:2], 1), self.length)
        norms: Tensor = torch.linalg.vector_norm(phi, dim=-1, keepdim=True)
        return norms

    def keys(self, span: Span, x: Tensor, v: Tensor, hidden: Tensor | None, features: int) -> Keys:
        """``phi = phi(k) exp(f - shift)``."""
        x, divided = self.directions(x)
        raw = x.new_empty(*x.shape[:2], features)
        factor = self.chunks.features(x, "key", raw)
        if hidden is not None:
            raw.masked_fill_(hidden.unsqueeze(2), 0)
            factor = None if factor is None else factor.masked_fill_(hidden.unsqueeze(2), EMPTY)
        norms = self.lengths(raw) if self.guard else None
        if norms is not None and hidden is not None:
            norms = norms.masked_fill(hidden.unsqueeze(2), 0)
        if factor is None:
            shift = x.new_zeros(x.shape[0], 1, 1)
            return Keys(span, x, v, hidden, raw.transpose(1, 2), shift, divided, _across(norms), raw)
        factor = factor.clone()
        shift = factor.amax(1, keepdim=True)
        size = (factor - shift).exp_()
        norms = None if norms is None else norms * size
        return Keys(span, x, v, hidden, (raw * size).transpose(1, 2), shift, divided, _across(norms), raw, factor)

    def queries(self, x: Tensor, features: int) -> Queries:
        """Values."""
        x, size = self.directions(x)
        phi = self.work.take("lq", *x.shape[:2], features)
        self.chunks.features(x, "query", phi)
        return Queries(x, phi, size, self.lengths(phi) if self.guard else None)

    def base(self, queries: Queries, top: Tensor) -> tuple[Tensor, Tensor]:
        """The row_scale is the shift itself."""
        return queries.phi, top.expand(-1, queries.phi.shape[1], -1).contiguous()

    def left(self, queries: Queries, shift: Tensor, row_scale: Tensor) -> Tensor:
        """``phi(q) exp(shift - r)``."""
        return torch.mul(queries.phi, (shift - row_scale).exp_(), out=self.work.take("left", *queries.phi.shape))

    def top(self, queries: Queries, row_scale: Tensor) -> Tensor:
        """``max_i -r_i``."""
        return -row_scale.amin(1, keepdim=True)

    def add_left(self, queries: Queries, left: Tensor, slope: Tensor, shift: Tensor, row_scale: Tensor) -> None:
        """A factor per row."""
        assert queries.grad is not None
        queries.grad.addcmul_(slope, (shift - row_scale).exp_())

    def pull_queries(self, queries: Queries) -> Tensor:
        """With the guard's share along the feature vector, unless its length is constant."""
        assert queries.grad is not None
        if queries.norm_grad is not None and self.length is None:
            assert queries.norms is not None
            queries.grad.addcmul_(queries.norm_grad, _direction(queries.phi, queries.norms))
        out = self.work.take("dxq", *queries.x.shape)
        grad = self.chunks.pull(queries.x, "query", queries.phi, queries.grad, None, out)
        return self.through(grad, queries.x, queries.size)

    def pull_keys(self, keys: Keys) -> Tensor:
        """Of the features and of their log factor."""
        assert keys.grad is not None
        assert keys.raw is not None
        grad, log_grad = keys.grad, None
        if keys.factor is not None:
            log_grad = (grad * keys.phi).sum(1).unsqueeze(2)
            grad = grad * (keys.factor - keys.shift).exp_().transpose(1, 2)
        grad = grad.transpose(1, 2).contiguous()
        if keys.norm_grad is not None:
            assert keys.norms is not None
            if keys.factor is not None and log_grad is not None:
                log_grad += (keys.norm_grad * keys.norms).transpose(1, 2)
            if self.length is None:
                along = keys.norm_grad.transpose(1, 2)
                size = 1.0 if keys.factor is None else (keys.factor - keys.shift).exp_()
                grad.add_(along * size * _direction(keys.raw, self.lengths(keys.raw)))
        if keys.hidden is not None:
            grad.masked_fill_(keys.hidden.unsqueeze(2), 0)
        out = self.work.take("dxk", *keys.x.shape)
        return self.through(self.chunks.pull(keys.x, "key", keys.raw, grad, log_grad, out), keys.x, keys.size)


def _across(norms: Tensor | None) -> Tensor | None:
    return None if norms is None else norms.transpose(1, 2)


def _direction(phi: Tensor, norm: Tensor) -> Tensor:
    return phi / norm.clamp_min(torch.finfo(phi.dtype).tiny)


def make_tiles(
    spec: Spec, tensors: Sequence[Tensor], scale: float, learn: bool, work: Workspace, normalize_qk: bool
) -> tuple[Tiles, PositiveChunks | SignedChunks]:
    """Bind a spec to the rows of a block, normalized; also the bound map, whose `tensor_grads` can be asked."""
    if isinstance(spec, PositiveSpec):
        positive = spec.bind(tensors, scale, True, learn)
        return PositiveTiles(positive, work, normalize_qk), positive
    assert isinstance(spec, SignedSpec)
    signed = spec.bind(tensors, scale, True, learn)
    return SignedTiles(signed, work, normalize_qk, spec.guarded, spec.length(True)), signed
