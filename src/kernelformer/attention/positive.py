"""Chunk arithmetic of positive maps: exact, without eps, and without a denominator to divide by.

With ``l_m(x) = log phi_m(x)`` the attention of a positive map is a mixture: feature m spreads over the keys by a
softmax, a query spreads over the features by another one,

    p(j | m) = softmax_j l_m(k_j)      log_mass_m = logsumexp_j l_m(k_j)      mean_m = sum_j p(j | m) v_j
    p(m | i) = softmax_m (l_m(q_i) + log_mass_m)                              out_i = sum_m p(m | i) mean_m

which is the ratio of sums of phi(q) . phi(k_j), rearranged. ``(log_mass, mean)`` is the whole state: a running
log-sum-exp and a running mean, merged chunk by chunk as online softmax does. Nothing over- or underflows, and the
fused softmax of torch is faster than an exponential of its own.

In a causal chunk a query sees only part of the chunk's mass: ``seen_i``, what it sees of the mixture that it was
normalized by, divides. A later, far larger key of the same chunk can push it below float range; such rows are done
again in log space (`_rescue`), forward and backward.

Without normalization a row is its mixture times its size, ``sum_m exp(l_m(q_i) + log_mass_m)``, which may lie beyond
float range where its product with small values does not: its root is multiplied with twice.

Gradients are taken of sums: ``(d_kv, d_mass)`` are those of ``sum_j phi_m(k_j) v_j`` and ``sum_j phi_m(k_j)``, in
units in which the current mass is 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kernelformer.contract import PositiveChunks, PositiveSpec, Spec, Workspace

EMPTY = -1e30  # log mass of no keys: vanishes against any real one, and differences of it stay finite


def sees_some(before: Tensor, hidden: Tensor | None, size: int, queries: int) -> Tensor:
    """Mask of the query rows (N c, R C) that see a key."""
    earlier = before.amax(1) > EMPTY / 2
    if hidden is None:
        return torch.ones_like(earlier)
    here = (~hidden).cumsum(1) > 0
    return (here | earlier).repeat(1, queries // size)


def rescued_rows(lost: Tensor, size: int) -> list[tuple[int, Tensor]]:
    """The rows n with lost queries, a few queries of one head at a time, so that (queries, M, C) stays small.

    Args:
        lost: (N c, R C) bool.
        size: C.
    """
    return [
        (row, head * size + part)
        for row in lost.any(1).nonzero().squeeze(1).tolist()
        for head, queries in enumerate(lost[row].split(size))
        if bool(queries.any())
        for part in queries.nonzero().squeeze(1).split(32)
    ]


@dataclass
class Rescue:
    """Some queries of one chunk, feature by feature and key by key: what they were too small for is exact here."""

    chunks: PositiveChunks
    xq: Tensor  # (1, r, D)
    xk: Tensor  # (1, C, D)
    shares: Tensor  # (r, M, C) of the keys of the chunk; unnormalized, their weights divided by the root
    shares_before: Tensor  # (r, M) of what came before it
    mean: Tensor  # (M, E) before it
    root: Tensor  # (r, 1) of the row's size, unnormalized; else 1
    log: Tensor  # (r) of the row's size

    def sums(self, v: Tensor) -> Tensor:
        """The rows' outputs (r, E), for values (C, E)."""
        return (self.shares_before @ self.mean + self.shares.sum(1) @ v) * self.root


@dataclass
class RescueGrads:
    """Gradients of a rescue."""

    query: Tensor  # (r, M), of the log features
    key: Tensor  # (M, C), of the log features
    pair: Tensor  # (r, C), of the log weights of pairs
    value: Tensor  # (C, E)
    kv_before: Tensor  # (M, E)
    mass_before: Tensor  # (M, 1)


def rescue_backward(r: Rescue, g: Tensor, out: Tensor, v: Tensor, normalize: bool) -> RescueGrads:
    """Gradients of a rescue, from that of its outputs, g (r, E)."""
    delta = -(g * out).sum(1, keepdim=True) if normalize else g.new_zeros(g.shape[0], 1)
    g = g * r.root
    pairs = r.shares * (g @ v.T + delta).unsqueeze(1)
    past = r.shares_before * (g @ r.mean.T + delta)
    value = r.shares.sum(1).T @ g
    return RescueGrads(
        pairs.sum(2) + past, pairs.sum(0), pairs.sum(1), value, r.shares_before.T @ g, r.shares_before.T @ delta
    )


LOST = 1e-30  # a causal row that sees less of its mixture than this is computed again in log space

Tensors = Sequence[Tensor]  # log_mass (N, M, 1), mean (N, M, E)


def _key_logits(chunks: PositiveChunks, x: Tensor, hidden: Tensor | None, fill: float, out: Tensor) -> Tensor:
    logits = chunks.keys(x, out)
    return logits if hidden is None else logits.masked_fill_(hidden.unsqueeze(1), fill)


def softmax_mass(logits: Tensor, dim: int = -1) -> Tensor:
    """Softmax over an axis, in place; returns the log of the sum, read off the largest entry before and after."""
    peak = logits.amax(dim, keepdim=True)
    torch.softmax(logits, dim, out=logits)
    return peak.sub_(logits.amax(dim, keepdim=True).log_())


def weigh(weights: Tensor, column: Tensor) -> Tensor:
    """``weights^T column``, (N, C, M) by (N, C, 1) -> (N, M, 1): as a row, since products with one column are slow."""
    return torch.bmm(column.transpose(1, 2), weights).transpose(1, 2)


@dataclass
class _Group:
    """Some consecutive chunks of a causal sequence, mapped: rows are (row of the block, chunk)."""

    p: Tensor  # (N c, M, C) keys' share of the mixture up to and with their chunk
    weights: Tensor  # (N c, R C, M) p(m | i) under that mixture
    mass: Tensor | None  # (N c, R C, 1) logarithm of the rows' sizes under that mixture, where it is wanted
    before: Tensor  # (N c, M, 1) log mass before the chunk
    decay: Tensor  # (N c, M, 1) share of the mixture from before the chunk
    kv: Tensor  # (N c, M, E) what the chunk adds
    old: Tensor  # (N c, M, E) decay * mean before the chunk
    state: list[Tensor]  # (N, ...) after the group


class CausalChunks(NamedTuple):
    """Inputs of c consecutive chunks for each of N rows, queries of R heads to each key head.

    Args:
        xq: (N c, R C, D) queries.
        xk: (N c, C, D) keys; hidden ones are 0.
        v: (N c, C, E) values; hidden ones are 0.
        hidden: (N c, C) bool, or None.
        mask: (R C, C) of ones and zeros, 1 = visible.
    """

    xq: Tensor
    xk: Tensor
    v: Tensor
    hidden: Tensor | None
    mask: Tensor


class CausalGrads(NamedTuple):
    """Gradients of a causal group: of queries, keys, values, and the state before it."""

    query: Tensor
    key: Tensor
    value: Tensor
    state: list[Tensor]


class PositiveSums:
    """Sums over keys and reads by queries, chunk by chunk, for N rows (sample, key head) at once.

    A state is ``[log_mass, mean]``, (N, M, 1) and (N, M, E); its gradients are ``[d_kv, d_mass]`` between `grads_in`
    and `grads_out`.

    Args:
        chunks: the map, bound to the rows.
        normalize: divide by the sum of the weights.
        work: buffers.
    """

    def __init__(self, chunks: PositiveChunks, normalize: bool, work: Workspace) -> None:
        self.chunks, self.normalize, self.work = chunks, normalize, work
        self.turn = False

    @staticmethod
    def empty(lead: tuple[int, ...], features: int, width: int, like: Tensor) -> list[Tensor]:
        """No mass, and a mean that adds nothing."""
        return [like.new_full((*lead, features, 1), EMPTY), like.new_zeros(*lead, features, width)]

    @staticmethod
    def zero_grads(state: Tensors) -> list[Tensor]:
        """Zeros for ``[d_kv, d_mass]``."""
        return [torch.zeros_like(state[1]), torch.zeros_like(state[0])]

    @staticmethod
    def grads_in(state: Tensors, grads: Tensors) -> list[Tensor]:
        """From the gradients of a state's tensors: ``mean = kv / mass`` and ``log_mass = log mass``, at mass 1."""
        d_log_mass, d_mean = grads
        return [d_mean.clone(), d_log_mass - (d_mean * state[1]).sum(-1, keepdim=True)]

    @staticmethod
    def grads_out(state: Tensors, grads: Tensors) -> list[Tensor]:
        """The inverse of `grads_in`; a state of no keys has no gradient."""
        d_kv, d_mass = grads
        real = state[0] > EMPTY / 2
        return [(d_mass + (d_kv * state[1]).sum(-1, keepdim=True)) * real, d_kv * real]

    def absorb(self, state: list[Tensor], x: Tensor, v: Tensor, hidden: Tensor | None) -> None:
        """Merge the chunk's mass and mean into the running ones."""
        log_mass, mean = state
        buffer = self.work.take("keys", x.shape[0], mean.shape[1], x.shape[1])
        p = _key_logits(self.chunks, x, hidden, EMPTY, buffer)
        mass = softmax_mass(p)
        total = torch.logaddexp(log_mass, mass)
        new = torch.bmm(p, v, out=self.work.take("kv", *mean.shape))
        mean.mul_((log_mass - total).exp_()).addcmul_(new, mass.sub_(total).exp_())
        log_mass.copy_(total)

    def _weights(self, log_mass: Tensor, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Weights in proportion to ``p(m | i)``, and where it counts the log (N, C, 1) of what they were divided by."""
        out = self.work.take("queries", *x.shape[:2], log_mass.shape[1])
        weights = self.chunks.queries(x, log_mass.transpose(1, 2), out)
        if self.normalize:
            return torch.softmax(weights, -1, out=weights), None
        mass = softmax_mass(weights)
        return weights, mass

    def read(self, state: Tensors, x: Tensor) -> Tensor:
        """The mixture's mean, feature by feature as the query weighs them."""
        weights, mass = self._weights(state[0], x)
        out = torch.bmm(weights, state[1], out=self.work.take("out", *weights.shape[:2], state[1].shape[2]))
        if mass is None:
            return out
        root = mass.mul_(0.5).exp_()
        return out.mul_(root).mul_(root)

    def read_backward(self, state: Tensors, grads: list[Tensor], x: Tensor, g: Tensor, out: Tensor) -> Tensor:
        """Softmax's gradient: ``p (g . mean - g . out)``."""
        d_kv, d_mass = grads
        weights, mass = self._weights(state[0], x)
        slope = self.work.take("slope", *weights.shape)
        if mass is None:
            delta = self._delta(g, out)
            d_mass.add_(weigh(weights, delta))
            torch.baddbmm(delta, g, state[1].transpose(1, 2), out=slope)
        else:
            root = mass.mul_(0.5).exp_()
            weights.mul_(root)
            g = g * root
            torch.bmm(g, state[1].transpose(1, 2), out=slope)
        d_kv.baddbmm_(weights.transpose(1, 2), g)
        return self.chunks.vjp_queries(x, slope.mul_(weights), self.work.take("dxq", *x.shape))

    def absorb_backward(
        self, state: Tensors, grads: Tensors, x: Tensor, v: Tensor, hidden: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """``d l_m(k_j) = p(j | m) (d_kv_m . v_j + d_mass_m)``."""
        d_kv, d_mass = grads
        size = (x.shape[0], d_kv.shape[1], x.shape[1])
        p = _key_logits(self.chunks, x, hidden, -torch.inf, self.work.take("keys", *size))
        p.sub_(state[0]).exp_()
        dv = torch.bmm(p.transpose(1, 2), d_kv, out=self.work.take("dv", *v.shape))
        slope = torch.baddbmm(d_mass, d_kv, v.transpose(1, 2), out=self.work.take("slope", *size))
        return self.chunks.vjp_keys(x, slope.mul_(p), self.work.take("dxk", *x.shape)), dv

    def _delta(self, g: Tensor, out: Tensor) -> Tensor:
        """``-g . out``, (N, C, 1): what normalization takes back."""
        return torch.mul(g, out, out=self.work.take("product", *g.shape)).sum(2, keepdim=True).neg_()

    def _group(self, state: Tensors, xq: Tensor, xk: Tensor, v: Tensor, hidden: Tensor | None) -> _Group:
        """Map a group of chunks and run the recurrence of the state over them."""
        log_mass, mean = state
        rows, features, width = mean.shape
        many = xk.shape[0]
        p = _key_logits(self.chunks, xk, hidden, EMPTY, self.work.take("keys", many, features, xk.shape[1]))
        mass = softmax_mass(p)
        before, after, decay = (torch.empty_like(mass) for _ in range(3))
        ladder = [x.view(rows, -1, features, 1) for x in (mass, before, after, decay)]
        for new, past, total, _ in zip(*(x.unbind(1) for x in ladder), strict=True):
            past.copy_(log_mass)
            log_mass = torch.logaddexp(log_mass, new, out=total)
        torch.sub(before, after, out=decay).exp_()
        p.mul_(mass.sub_(after).exp_())
        kv = torch.bmm(p, v, out=self.work.take("kv", many, features, width))
        old = self.work.take("old", many, features, width)
        self.turn = not self.turn  # two buffers in turn: a rescue still wants the state from before the group
        mean = self.work.take(f"mean{self.turn}", rows, features, width).copy_(mean)
        for step, add, keep in zip(*(x.unflatten(0, (rows, -1)).unbind(1) for x in (old, kv, decay)), strict=True):
            torch.mul(mean, keep, out=step)
            torch.add(step, add, out=mean)
        weights, size = self._weights(after, xq)
        return _Group(p, weights, size, before, decay, kv, old, [log_mass, mean])

    def _sums(self, state: Tensors, inputs: CausalChunks) -> tuple[_Group, Tensor, Tensor]:
        """A group, what its rows sum up (N c, R C, E), and what they see of their mixture (N c, R C).

        Past by the state, present by a small masked matrix.
        """
        xq, xk, v, hidden, mask = inputs
        t = self._group(state, xq, xk, v, hidden)
        scores = torch.bmm(t.weights, t.p, out=self.work.take("scores", *xq.shape[:2], xk.shape[1])).mul_(mask)
        out = torch.bmm(t.weights, t.old, out=self.work.take("out", *xq.shape[:2], v.shape[2])).baddbmm_(scores, v)
        past = torch.mul(t.weights, t.decay.transpose(1, 2), out=self.work.take("slope", *t.weights.shape))
        return t, out, past.sum(2).add_(scores.sum(2))

    def causal(self, state: Tensors, inputs: CausalChunks) -> tuple[Tensor, Tensor, list[Tensor]]:
        """The mean of what a row sees, or its sum.

        The row scale is what ``weights`` must be multiplied with to give the row's true shares: 1 / seen, or the size
        of an unnormalized row. 0 marks a row that sees no key, -1 one that was rescued.
        """
        t, out, seen = self._sums(state, inputs)
        lost = seen < LOST
        if t.mass is None:
            row_scale = seen.reciprocal_()
        else:
            row_scale = (0.5 * t.mass).exp_().square_().squeeze(2)
            lost |= row_scale.isinf()
        if not bool(lost.any()):
            return out.mul_(row_scale.unsqueeze(2)), row_scale, t.state
        out.mul_(row_scale.masked_fill_(lost, 0).unsqueeze(2))
        for row, index, r in self._rescues(t, state, inputs, lost):
            out[row, index] = r.sums(inputs.v[row])
            row_scale[row, index] = -1
        return out, row_scale, t.state

    def _rescues(
        self, t: _Group, state: Tensors, inputs: CausalChunks, lost: Tensor
    ) -> Iterator[tuple[int, Tensor, Rescue]]:
        """Rescues of the lost rows that see a key, some queries of one head at a time."""
        xq, xk, _, hidden, _ = inputs
        for row, index in rescued_rows(lost & sees_some(t.before, hidden, xk.shape[1], xq.shape[1]), xk.shape[1]):
            yield row, index, self._rescue(t, state, row, index, xq, xk, hidden)

    def causal_backward(
        self,
        state: Tensors,
        grads: list[Tensor],
        inputs: CausalChunks,
        g: Tensor,
        out: Tensor,
        row_scale: Tensor,
    ) -> CausalGrads:
        """As `read_backward` and `absorb_backward`, with the chunk's own keys by the small matrix."""
        take = self.work.take
        xq, xk, v, hidden, mask = inputs
        t = self._group(state, xq, xk, v, hidden)
        weights = t.weights.mul_(row_scale.clamp_min(0).unsqueeze(2))
        score_size = (*xq.shape[:2], xk.shape[1])
        scores = torch.bmm(weights, t.p, out=take("scores", *score_size)).mul_(mask)
        kv_local = torch.bmm(weights.transpose(1, 2), g, out=take("kv_local", *t.kv.shape))
        delta, mass_local = None, torch.zeros_like(t.decay)
        slopes = torch.bmm(g, v.transpose(1, 2), out=take("slopes", *score_size))
        if self.normalize:
            delta = self._delta(g, out)
            slopes.add_(delta)
            mass_local = weigh(weights, delta)
        slopes.mul_(mask)
        slope = torch.bmm(g, t.old.transpose(1, 2), out=take("slope", *weights.shape))
        if delta is not None:
            slope.addcmul_(delta, t.decay.transpose(1, 2))
        slope.baddbmm_(slopes, t.p.transpose(1, 2)).mul_(weights)
        dxq = self.chunks.vjp_queries(xq, slope, take("dxq", *xq.shape))

        rescues = []
        if bool((row_scale < 0).any()):
            for row, index in rescued_rows(row_scale < 0, xk.shape[1]):
                r = self._rescue(t, state, row, index, xq, xk, hidden)
                rescues.append(
                    (row, index, r, rescue_backward(r, g[row, index], out[row, index], v[row], self.normalize))
                )
        later, later_mass, before = _later(t, grads, kv_local, mass_local, state[1].shape[0], rescues, take)

        dv = torch.bmm(t.p.transpose(1, 2), later, out=take("dv", *v.shape)).baddbmm_(scores.transpose(1, 2), g)
        slope = torch.baddbmm(later_mass, later, v.transpose(1, 2), out=take("slope", *t.p.shape))
        slope.baddbmm_(weights.transpose(1, 2), slopes).mul_(t.p)
        dxk = self.chunks.vjp_keys(xk, slope, take("dxk", *xk.shape))
        for row, index, r, d in rescues:
            dxq[row, index] += r.chunks.vjp_queries(r.xq, d.query.unsqueeze(0), torch.empty_like(r.xq))[0]
            dxk[row] += r.chunks.vjp_keys(r.xk, d.key.unsqueeze(0), torch.empty_like(r.xk))[0]
            dv[row] += d.value
        return CausalGrads(dxq, dxk, dv, before)

    def _rescue(
        self, t: _Group, state: Tensors, row: int, index: Tensor, xq: Tensor, xk: Tensor, hidden: Tensor | None
    ) -> Rescue:
        """Weigh every pair (feature, visible key) of the queries ``index`` of row ``row`` in log space.

        The queries are those of one head.
        """
        rows, features, _ = state[1].shape
        together = xk.shape[0] // rows
        before = state[1][row // together]
        for earlier in range(row // together * together, row):  # unscaled: `old` has lost what the large key dwarfs
            before = before * t.decay[earlier] + t.kv[earlier]
        q, k = xq[row, index].unsqueeze(0), xk[row : row + 1]
        size = k.shape[1]
        one = self.chunks.at(row, int(index[0]) // size)
        lq = one.queries(q, q.new_zeros(1, 1, features), q.new_empty(1, q.shape[1], features))[0]
        here = None if hidden is None else hidden[row : row + 1]
        lk = _key_logits(one, k, here, EMPTY, k.new_empty(1, features, size))[0]
        later = torch.arange(size, device=k.device) > (index % size).unsqueeze(1)
        pairs = (lq.unsqueeze(2) + lk).masked_fill_(later.unsqueeze(1), -torch.inf)
        past = lq + t.before[row, :, 0]
        # Relative to the largest: a logarithm of -1000 is rounded to 6e-5, and shares would not add up to 1.
        peak = torch.maximum(pairs.flatten(1).amax(1), past.amax(1))
        pairs.sub_(peak.view(-1, 1, 1))
        past.sub_(peak.unsqueeze(1))
        total = torch.logaddexp(pairs.flatten(1).logsumexp(1), past.logsumexp(1))
        log, root = peak + total, torch.ones_like(total)
        if not self.normalize:
            root = (log / 2).exp()
            total = log / 2 - peak
        shares = pairs.sub_(total.view(-1, 1, 1)).exp_()
        return Rescue(one, q, k, shares, past.sub_(total.unsqueeze(1)).exp_(), before, root.unsqueeze(1), log)


def _later(
    t: _Group,
    grads: list[Tensor],
    kv_local: Tensor,
    mass_local: Tensor,
    rows: int,
    rescues: list[tuple[int, Tensor, Rescue, RescueGrads]],
    take: Callable[..., Tensor],
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Gradients of each chunk's sums by later queries, (N c, M, E) and (N c, M, 1), and of the state before the group.

    Each in units of the mixture at that point: going back over a chunk multiplies by its decay.
    """
    d_kv, d_mass = take("d_kv", *grads[0].shape).copy_(grads[0]), grads[1].clone()
    together = t.decay.shape[0] // rows
    later, later_mass = take("later", *t.kv.shape), torch.empty_like(t.decay)
    by_chunk = [x.view(rows, together, *x.shape[1:]) for x in (later, later_mass, kv_local, mass_local, t.decay)]
    for c in reversed(range(together)):
        wanted, wanted_mass, kv, mass, keep = (x[:, c] for x in by_chunk)
        wanted.copy_(d_kv)
        wanted_mass.copy_(d_mass)
        d_kv.add_(kv).mul_(keep)
        d_mass.add_(mass).mul_(keep)
        for row, _, _, d in rescues:
            if row % together == c:
                d_kv[row // together] += d.kv_before
                d_mass[row // together] += d.mass_before
    return later, later_mass, [d_kv, d_mass]


def bind_sums(
    spec: Spec,
    tensors: Tensors,
    scale: float,
    normalize: bool,
    learn: bool,
    work: Workspace,
    parts: bool = False,
) -> PositiveSums:
    """Sums of a positive map.

    Args:
        spec: of the map.
        tensors: (N, ...) each.
        scale: the map sees ``sqrt(scale) x``.
        normalize: divide by the sum of the weights.
        learn: collect the gradients of the tensors.
        work: buffers.
        parts: the sums are merged with weights of another kind, so that nothing may be left out of the features.
    """
    if not isinstance(spec, PositiveSpec):
        raise TypeError(f"these sums are of positive maps, got {spec}; use attention.dispatch.attend, which takes all.")
    return PositiveSums(spec.bind(tensors, scale, normalize and not parts, learn), normalize, work)
