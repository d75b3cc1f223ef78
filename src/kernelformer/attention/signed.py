"""Chunk arithmetic of maps by their values, which may be negative.

    out_i = phi(q_i)^T sum_j phi(k_j) v_j^T / max(phi(q_i)^T sum_j phi(k_j), GUARD |phi(q_i)| sum_j |phi(k_j)|)

The second argument of the maximum is the guard of signed maps: their denominator can vanish or change sign, the bound
cannot. Maps without negative features need none. Where keys carry log factors ``r_j`` (`SignedSpec.has_factor`), sums
are kept relative to the largest so far, ``log_scale``; a causal row is relative to the largest that it can see, so
that no later key can push it out of range.

The state: log_scale (N, 1, 1), kv (N, M, E), k_sum (N, M, 1) and, for the guard, norm_sum (N, 1, 1); its gradients are
those of the last three.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernelformer.attention.engine import CausalGrads, Chunks, Engine, Merged, Part
from kernelformer.attention.positive import EMPTY
from kernelformer.attention.reference import GUARD
from kernelformer.contract import Role, SignedChunks, Workspace

Tensors = Sequence[Tensor]


@dataclass
class Rows:
    """How the sums of some queries become outputs."""

    scale: Tensor  # (N, C, 1): 1 / denominator, 0 where there is none, or the size of an unnormalized row
    guarded: Tensor | None  # (N, C, 1) bool: the guard is the denominator

    def split(self, g: Tensor, out: Tensor, normalize: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Gradients of the numerator (N, C, E), the denominator (N, C, 1) and the guard's product of norms (N, C,
        1)."""
        g_num = g * self.scale
        if not normalize:
            return g_num, None, None
        g_den = torch.linalg.vecdot(g_num, out).neg_().unsqueeze(2)
        if self.guarded is None:
            return g_num, g_den, None
        return g_num, g_den.masked_fill(self.guarded, 0), g_den.masked_fill(~self.guarded, 0) * GUARD


def make_rows(den: Tensor | None, bound: Tensor | None, factor: Tensor | None, like: Tensor) -> Rows:
    """Rows from their denominators (N, C, 1) and bounds, or, where there are none, from the log of their sizes."""
    if den is None:
        size = like.new_ones(*like.shape[:2], 1) if factor is None else factor.exp()
        return Rows(size, None)
    guarded = None
    if bound is not None:
        guarded = den < bound
        den = torch.maximum(den, bound)
    return Rows(torch.where(den > torch.finfo(den.dtype).tiny, den.reciprocal(), 0.0), guarded)


@dataclass
class Group:
    """Some consecutive chunks of a causal sequence, mapped: rows are (row of the block, chunk)."""

    phi_q: Tensor  # (N c, R C, M)
    phi_k: Tensor  # (N c, C, M), without the factor
    norm_q: Tensor | None  # (N c, R C, 1)
    norm_k: Tensor  # (N c, C, 1)
    norms: Tensor | None  # (N c, R C, 1): sum of the norms that a row sees
    factor: Tensor | None  # (N c, C, 1): log factors of the keys
    visible: Tensor  # (N c or 1, R C, C): the mask times the keys' factors relative to the row's scale
    share: Tensor | None  # (N c, R C, 1): factor of the past at the row's scale, None = 1
    keys: Tensor | None  # (N c, C, 1): factor of a key at the scale after the chunk, None = 1
    decay: Tensor | None  # (N c, 1, 1): factor of the past at the scale after the chunk, None = 1
    old: list[Tensor]  # (N c, ...): kv, k_sum, norm_sum before the chunk
    scores: Tensor  # (N c, R C, C)
    rows: Rows
    factor_q: Tensor | None  # (N c, R C, 1): log factor of the query, and of the scale of what it sees
    den: Tensor | None  # (N c, R C, 1)
    state: list[Tensor]  # (N, ...) after the group

    def sums(self) -> tuple[Tensor, Tensor | None]:
        """The denominator of a part and the product of norms for its guard, (N c, R C) each."""
        assert self.den is not None
        guard = None
        if self.norm_q is not None and self.norms is not None:
            guard = (self.norm_q * self.norms).squeeze(2)
        return self.den.squeeze(2), guard

    def log(self) -> Tensor:
        """The scale of a part's sums, (N c, R C); EMPTY where there is nothing to sum."""
        den, guard = self.sums()
        log = torch.zeros_like(den) if self.factor_q is None else self.factor_q.squeeze(2)
        empty = den == 0 if guard is None else (den == 0) & (guard == 0)
        return log.masked_fill(empty, EMPTY)


def times(x: Tensor, factor: Tensor | None) -> Tensor:
    """The product; None means 1."""
    return x if factor is None else x * factor


def running_sums(
    start: Tensors, adds: Sequence[Tensor], decay: Tensor | None, rows: int, work: Workspace
) -> tuple[list[Tensor], list[Tensor]]:
    """Sums before each chunk, (N c, ...), and after the last, (N, ...)."""
    old, end = [], []
    for index, (now, add) in enumerate(zip(start, adds, strict=True)):
        steps = add.unflatten(0, (rows, -1))
        before = work.take(f"before{index}", *steps.shape)
        for c in range(steps.shape[1]):
            before[:, c] = now
            now = steps[:, c] + (now if decay is None else now * decay.view(rows, -1, 1, 1)[:, c])
        old.append(before.flatten(0, 1))
        end.append(now)
    return old, end


def later_grads(
    grads: list[Tensor], local: Sequence[Tensor], decay: Tensor | None, rows: int, work: Workspace
) -> tuple[list[Tensor], list[Tensor]]:
    """The same backwards: gradients of the sums after each chunk, (N c, ...), and before the first, (N, ...)."""
    later, before = [], []
    for index, (now, own) in enumerate(zip(grads, local, strict=True)):
        steps = own.unflatten(0, (rows, -1))
        after = work.take(f"after{index}", *steps.shape)
        for c in reversed(range(steps.shape[1])):
            after[:, c] = now
            now = steps[:, c] + (now if decay is None else now * decay.view(rows, -1, 1, 1)[:, c])
        later.append(after.flatten(0, 1))
        before.append(now)
    return later, before


def _norm(phi: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(phi, dim=-1, keepdim=True)
    return norm


def _unit(phi: Tensor, norm: Tensor) -> Tensor:
    return phi / norm.clamp_min(torch.finfo(phi.dtype).tiny)


class SignedEngine(Engine):
    """Plain sums of features; see `Engine` for the methods."""

    def __init__(
        self,
        chunks: SignedChunks,
        normalize: bool,
        work: Workspace,
        parts: bool,
        guarded: bool,
        length: float | None,
    ) -> None:
        super().__init__(normalize, work, parts)
        self.chunks, self.length = chunks, length
        self.guard = normalize and guarded

    @staticmethod
    def state_shapes(features: int, width: int) -> list[tuple[int, int]]:
        """The shapes of log_scale, kv, k_sum and norm_sum."""
        return [(1, 1), (features, width), (features, 1), (1, 1)]

    @staticmethod
    def empty(lead: tuple[int, ...], features: int, width: int, like: Tensor) -> list[Tensor]:
        """Zeros, at a scale that anything exceeds."""
        shapes = SignedEngine.state_shapes(features, width)
        return [like.new_full((*lead, 1, 1), EMPTY), *(like.new_zeros(*lead, *x) for x in shapes[1:])]

    @staticmethod
    def zero_grads(state: Tensors) -> list[Tensor]:
        """Zeros for kv, k_sum and norm_sum."""
        return [torch.zeros_like(x) for x in state[1:]]

    @staticmethod
    def grads_in(state: Tensors, grads: Tensors) -> list[Tensor]:
        """The scale's own gradient follows from the others' by scaling and is not a degree of freedom."""
        return [x.clone() for x in grads[1:]]

    @staticmethod
    def grads_out(state: Tensors, grads: Tensors) -> list[Tensor]:
        """The scale enters as a factor of all sums."""
        d_scale = sum((g * x).sum((-2, -1), keepdim=True) for g, x in zip(grads, state[1:], strict=True))
        assert isinstance(d_scale, Tensor)
        return [d_scale, *grads]

    def _map(self, x: Tensor, role: Role, features: int, hidden: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        phi = self.work.take(role, *x.shape[:2], features)
        factor = self.chunks.features(x, role, phi)
        if hidden is not None:
            phi.masked_fill_(hidden.unsqueeze(2), 0)
            factor = None if factor is None else factor.masked_fill_(hidden.unsqueeze(2), EMPTY)
        return phi, factor

    def _norms(self, phi: Tensor, hidden: Tensor | None = None, size: Tensor | None = None) -> Tensor:
        """``|phi|`` of the rows, (N, C, 1), 0 for hidden ones; ``size`` is what phi has been multiplied by."""
        if self.length is None:
            return _norm(phi)
        norms = phi.new_full((*phi.shape[:2], 1), self.length) if size is None else size * self.length
        return norms if hidden is None else norms.masked_fill_(hidden.unsqueeze(2), 0)

    def _add_norm_slope(self, slope: Tensor, weights: Tensor, phi: Tensor, norm: Tensor) -> None:
        """Add the gradient of ``weights |phi|`` to that of phi; along a constant length there is none."""
        if self.length is None:
            slope.addcmul_(weights, _unit(phi, norm))

    def absorb(self, state: list[Tensor], x: Tensor, v: Tensor, hidden: Tensor | None) -> None:
        """Add the chunk's sums, after moving the old ones to the new scale."""
        scale, kv, k_sum, norm_sum = state
        phi, factor = self._map(x, "key", kv.shape[1], hidden)
        size = None
        if factor is not None:
            top = torch.maximum(scale, factor.amax(1, keepdim=True))
            size = (factor - top).exp_()
            phi.mul_(size)
            for total in (kv, k_sum, norm_sum):
                total.mul_((scale - top).exp_())
            scale.copy_(top)
        kv.baddbmm_(phi.transpose(1, 2), v)
        k_sum.add_(phi.sum(1).unsqueeze(2))
        if self.guard:
            norm_sum.add_(self._norms(phi, hidden, size).sum(1, keepdim=True))

    def _read(self, state: Tensors, x: Tensor) -> tuple[Tensor, Rows]:
        scale, kv, k_sum, norm_sum = state
        phi, factor = self._map(x, "query", kv.shape[1])
        den = self._dot(phi, k_sum) if self.normalize else None
        bound = self._norms(phi) * (GUARD * norm_sum) if self.guard else None
        if factor is not None:
            factor = factor + scale
        return phi, make_rows(den, bound, factor, x)

    def read(self, state: Tensors, x: Tensor) -> Tensor:
        """Numerator times 1 / denominator."""
        phi, rows = self._read(state, x)
        return torch.bmm(phi, state[1], out=self.work.take("out", *x.shape[:2], state[1].shape[2])).mul_(rows.scale)

    def _dot(self, phi: Tensor, weights: Tensor) -> Tensor:
        """``phi weights``, (N, C, M) by (N, M, 1); batched products with one column are slow."""
        return torch.mul(phi, weights.transpose(1, 2), out=self.work.take("dot", *phi.shape)).sum(2, keepdim=True)

    def _sum(self, phi: Tensor, weights: Tensor) -> Tensor:
        """``phi^T weights``, (N, C, M) by (N, C, 1) -> (N, M, 1)."""
        return torch.mul(phi, weights, out=self.work.take("dot", *phi.shape)).sum(1).unsqueeze(2)

    def read_backward(self, state: Tensors, grads: list[Tensor], x: Tensor, g: Tensor, out: Tensor) -> Tensor:
        """Product and quotient rule; a guarded row's denominator is the guard."""
        _, kv, k_sum, norm_sum = state
        d_kv, d_k_sum, d_norm = grads
        phi, rows = self._read(state, x)
        g_num, g_den, g_guard = rows.split(g, out, self.normalize)
        slope = torch.bmm(g_num, kv.transpose(1, 2), out=self.work.take("slope", *phi.shape))
        d_kv.baddbmm_(phi.transpose(1, 2), g_num)
        if g_den is not None:
            slope.addcmul_(g_den, k_sum.transpose(1, 2))
            d_k_sum.add_(self._sum(phi, g_den))
        if g_guard is not None:
            norm = self._norms(phi)
            self._add_norm_slope(slope, g_guard * norm_sum, phi, norm)
            d_norm.add_((g_guard * norm).sum(1, keepdim=True))
        log_grad = None if self.normalize else torch.linalg.vecdot(g, out).unsqueeze(2)
        return self.chunks.vjp(x, "query", phi, slope, log_grad, self.work.take("dxq", *x.shape))

    def absorb_backward(
        self, state: Tensors, grads: Tensors, x: Tensor, v: Tensor, hidden: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The gradients of the sums, at each of their terms."""
        d_kv, d_k_sum, d_norm = grads
        phi, factor = self._map(x, "key", d_kv.shape[1], hidden)
        size = None if factor is None else (factor - state[0]).exp_()
        slope = torch.bmm(v, d_kv.transpose(1, 2), out=self.work.take("slope", *phi.shape)).add_(
            d_k_sum.transpose(1, 2)
        )
        norm_grad = None
        if self.guard:
            norms = self._norms(phi, hidden)
            self._add_norm_slope(slope, d_norm, phi, norms)
            norm_grad = times(d_norm * norms, size)
        dv = torch.bmm(phi, d_kv, out=self.work.take("dv", *v.shape))
        slope = slope if size is None else slope.mul_(size)
        return self._vjp_keys(x, phi, slope, factor, norm_grad, hidden), times(dv, size)

    def _vjp_keys(
        self,
        x: Tensor,
        phi: Tensor,
        slope: Tensor,
        factor: Tensor | None,
        norm_grad: Tensor | None,
        hidden: Tensor | None,
    ) -> Tensor:
        """From the gradient at phi, without its factor; that of the factor is ``phi . slope``, since it scales phi.

        A length that is not measured has its own part in it, ``norm_grad`` (N, C, 1).
        """
        if hidden is not None:
            slope.masked_fill_(hidden.unsqueeze(2), 0)
        log_grad = None if factor is None else torch.linalg.vecdot(phi, slope).unsqueeze(2)
        if log_grad is not None and self.length is not None and norm_grad is not None:
            log_grad = log_grad + norm_grad
        return self.chunks.vjp(x, "key", phi, slope, log_grad, self.work.take("dxk", *x.shape))

    def _group(self, state: Tensors, inputs: Chunks) -> Group:
        """Map a group of chunks, run the recurrence of the state over them, and take the chunks' own scores."""
        xq, xk, v, hidden, mask = inputs
        rows, features, width = state[1].shape
        many, size = xk.shape[0], xk.shape[1]
        phi_k, factor = self._map(xk, "key", features, hidden)
        norm_k = self._norms(phi_k, hidden) if self.guard else phi_k.new_zeros(1, 1, 1)
        if factor is None:
            visible, share, keys = mask.unsqueeze(0), None, None
            decay, scale = None, state[0]
        else:
            scales = torch.cat([state[0], factor.view(rows, -1, size).amax(2).unsqueeze(2)], 1).cummax(1).values
            before, after = (x.reshape(many, 1, 1) for x in (scales[:, :-1], scales[:, 1:]))
            own = torch.maximum(before, factor.cummax(1).values)
            gaps = (factor.transpose(1, 2) - own).clamp_max_(0).exp_()
            repeat = xq.shape[1] // size
            visible = gaps.repeat(1, repeat, 1).mul_(mask)
            share = (before - own).exp_().repeat(1, repeat, 1)
            keys, decay, scale = (factor - after).exp_(), (before - after).exp_(), scales[:, -1:].clone()
        scaled = phi_k if keys is None else phi_k * keys
        sums = [
            torch.bmm(scaled.transpose(1, 2), v, out=self.work.take("kv", many, features, width)),
            scaled.sum(1).unsqueeze(2),
            (norm_k if keys is None else norm_k * keys).sum(1, keepdim=True).expand(many, 1, 1),
        ]
        old, end = running_sums(state[1:], sums, decay, rows, self.work)
        phi_q, factor_q = self._map(xq, "query", features)
        norm_q = self._norms(phi_q) if self.guard else None
        products = torch.bmm(phi_q, phi_k.transpose(1, 2), out=self.work.take("products", many, xq.shape[1], size))
        scores = torch.mul(products, visible, out=self.work.take("scores", *products.shape))
        den = bound = norms = None
        if self.normalize:
            den = times(self._dot(phi_q, old[1]), share).add_(scores.sum(2, keepdim=True))
        if norm_q is not None:
            norms = times(old[2], share) + torch.matmul(visible, norm_k)
            bound = GUARD * norm_q * norms
        if factor_q is not None and factor is not None:
            factor_q = factor_q + own.repeat(1, xq.shape[1] // size, 1)
        row = make_rows(den, bound, factor_q, xq)
        return Group(
            phi_q, phi_k, norm_q, norm_k, norms, factor, visible, share, keys, decay, old, scores, row,
            factor_q, den, [scale, *end],
        )  # fmt: skip

    def causal(self, state: Tensors, inputs: Chunks) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Past by the state, present by a small masked matrix; a row scale is not needed."""
        xq, v = inputs.xq, inputs.v
        t = self._group(state, inputs)
        past = torch.bmm(t.phi_q, t.old[0], out=self.work.take("out", *xq.shape[:2], v.shape[2]))
        out = times(past, t.share).baddbmm_(t.scores, v)
        return out.mul_(t.rows.scale), out.new_zeros(out.shape[:2]), t.state

    def causal_part(self, state: Tensors, inputs: Chunks) -> tuple[Part, Tensor, list[Tensor]]:
        """Numerator, denominator and what the guard is a share of, at the scale of the row's factors."""
        xq, v = inputs.xq, inputs.v
        t = self._group(state, inputs)
        past = torch.bmm(t.phi_q, t.old[0], out=self.work.take("out", *xq.shape[:2], v.shape[2]))
        num = times(past, t.share).baddbmm_(t.scores, v)
        den, guard = t.sums()
        return Part(num, t.log(), den, guard), num.new_zeros(num.shape[:2]), t.state

    def causal_backward(
        self,
        state: Tensors,
        grads: list[Tensor],
        inputs: Chunks,
        g: Tensor,
        out: Tensor,
        row_scale: Tensor,
        merged: Merged | None = None,
    ) -> CausalGrads:
        """As `read_backward` and `absorb_backward`, with the chunk's own keys by the small matrix."""
        xq, xk, v = inputs[:3]
        t = self._group(state, inputs)
        rows = t.rows
        if merged is not None:
            guarded = None if merged.guarded is None or not self.guard else merged.guarded.unsqueeze(2)
            rows = Rows((t.log() - merged.total).exp_().unsqueeze(2), guarded)
        g_num, g_den, g_guard = rows.split(g, out, self.normalize)
        slopes = torch.bmm(g_num, v.transpose(1, 2), out=self.work.take("products", *t.scores.shape))
        if g_den is not None:
            slopes.add_(g_den)
        slopes.mul_(t.visible)

        past = times(t.phi_q, t.share)
        slope = times(torch.bmm(g_num, t.old[0].transpose(1, 2), out=self.work.take("slope", *t.phi_q.shape)), t.share)
        local_kv = torch.bmm(past.transpose(1, 2), g_num, out=self.work.take("local", *t.old[0].shape))
        local = [local_kv, torch.zeros_like(t.old[1]), torch.zeros_like(t.old[2])]
        if g_den is not None:
            slope.addcmul_(times(g_den, t.share), t.old[1].transpose(1, 2))
            local[1] = self._sum(past, g_den)
        slope.baddbmm_(slopes, t.phi_k)
        unit_k = norm_grad = None
        if g_guard is not None:
            assert t.norm_q is not None
            assert t.norms is not None
            self._add_norm_slope(slope, g_guard * t.norms, t.phi_q, t.norm_q)
            asked = g_guard * t.norm_q  # of the sum of norms that a row sees
            local[2] = times(asked, t.share).sum(1, keepdim=True)
            unit_k = _unit(t.phi_k, t.norm_k) if self.length is None else None
            norm_slope = torch.matmul(t.visible.transpose(1, 2), asked)
        log_grad = None if self.normalize else torch.linalg.vecdot(g, out).unsqueeze(2)
        if merged is not None:  # a factor scales phi; a length that is not measured has its own part in it
            log_grad = torch.linalg.vecdot(t.phi_q, slope).unsqueeze(2)
            if g_guard is not None and self.length is not None and t.norms is not None:
                log_grad = log_grad + asked * t.norms
        dxq = self.chunks.vjp(xq, "query", t.phi_q, slope, log_grad, self.work.take("dxq", *xq.shape))

        later, before = later_grads(grads, local, t.decay, state[1].shape[0], self.work)
        dv = torch.bmm(t.phi_k, later[0], out=self.work.take("dv", *v.shape))
        dv = times(dv, t.keys).baddbmm_(t.scores.transpose(1, 2), g_num)
        slope = torch.bmm(v, later[0].transpose(1, 2), out=self.work.take("slope", *t.phi_k.shape))
        slope.add_(later[1].transpose(1, 2))
        if unit_k is not None:
            slope.addcmul_(later[2], unit_k)
        slope = times(slope, t.keys).baddbmm_(slopes.transpose(1, 2), t.phi_q)
        if g_guard is not None:
            norm_grad = (times(later[2], t.keys) + norm_slope) * t.norm_k
        if unit_k is not None:
            slope.addcmul_(norm_slope, unit_k)
        dxk = self._vjp_keys(xk, t.phi_k, slope, t.factor, norm_grad, inputs.hidden)
        return CausalGrads(dxq, dxk, dv, before, None if log_grad is None else log_grad.squeeze(2))
