"""One token at a time, with a state whose size does not depend on how many came before.

A step takes one key into the sums of the state, then answers the queries of one token. Tokens that the queries attend
to one by one, those of a window and the sinks, come with their logits (`NearTokens`): of a positive map, whose features
are like keys with the logits ``log phi_m(q) + log mass_m`` and the means as values, all are one softmax.

Plain, differentiable operations of torch: a step can be exported, compiled and differentiated as it stands.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernelformer.attention.positive import EMPTY
from kernelformer.attention.reference import GUARD
from kernelformer.contract import PositiveSpec, SignedSpec, Spec, wide_dtype


@dataclass(frozen=True)
class NearTokens:
    """Tokens that the queries of a step attend to one by one.

    Args:
        logits: (B, G, R, n) each, on the scale of the kernel itself; EMPTY where a token is hidden.
        values: (B, G, n, E) each; those of hidden tokens are 0.
        factor: the log factor of the sums, (G, R, 1) or None.
        fades: whether the sums lose weight from token to token, so that those of every map have a log scale.
        may_hide: whether a token whose value is not 0 may be hidden.
    """

    logits: Sequence[Tensor]
    values: Sequence[Tensor]
    factor: Tensor | None = None
    fades: bool = False
    may_hide: bool = False

    def attend(self) -> Tensor:
        """Attend to these tokens alone: (B, G, R, E)."""
        logits = torch.cat(list(self.logits), -1)
        shares = logits.softmax(-1)
        if self.may_hide:
            shares = shares.masked_fill(logits < EMPTY / 2, 0)
        parts = shares.split_with_sizes([x.shape[2] for x in self.values], -1)
        out: Tensor = parts[0] @ self.values[0]
        for share, x in zip(parts[1:], self.values[1:], strict=True):
            out = out + share @ x
        return out


def step(
    spec: Spec,
    tensors: Sequence[Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    state: Sequence[Tensor],
    *,
    scale: float,
    key_mask: Tensor | None = None,
    normalize: bool = True,
    near: NearTokens | None = None,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Take one key and value into the state, then answer the queries of one token.

    Args:
        spec: of the map.
        tensors: of the map.
        query: (B, H, 1, D) in the dtype of the arithmetic.
        key: (B, G, 1, D), likewise.
        value: (B, G, 1, E), likewise.
        state: tensors of the state before, (B, G, ...).
        scale: the map sees ``sqrt(scale) x``.
        key_mask: (B, 1) bool, True = attend.
        normalize: divide by the sum of the weights.
        near: tokens that are not in the sums, under the same normalization.

    Returns:
        (B, H, 1, E) and the tensors of the state after.

    Cost: O(M (D + E)) time and memory per head.
    """
    hidden = None if key_mask is None else ~key_mask[:, None, :, None]
    if hidden is not None:
        key, value = key.masked_fill(hidden, 0), value.masked_fill(hidden, 0)
    batch, heads, _, width = query.shape
    groups = key.shape[1]
    rows = query  # (B, G, R, D): the queries of a group
    if heads != groups:
        rows = query.reshape(batch, groups, heads // groups, width)
    after: tuple[Tensor, ...]
    if isinstance(spec, PositiveSpec):
        new, logits = map_positive(spec, tensors, rows, key, scale, shares=normalize and near is None)
        out, after = step_positive(new, logits, value, state, hidden=hidden, normalize=normalize, near=near)
    else:
        assert isinstance(spec, SignedSpec)
        cancels = normalize and near is None
        fades = near is not None and near.fades
        after = _take_signed(spec, tensors, key, value, state, scale, hidden, cancels, normalize, fades)
        phi_q, factor = spec.features(rows, tensors, scale, "query", cancels)
        if near is None:
            out = answer_signed(spec, phi_q, factor, after, normalize)
        else:
            out = _merge_signed(spec, phi_q, factor, after, near)
    return (out if heads == groups else out.reshape(batch, heads, 1, value.shape[-1])), after


def map_positive(
    spec: PositiveSpec, tensors: Sequence[Tensor], rows: Tensor, key: Tensor, scale: float, *, shares: bool
) -> tuple[Tensor, Tensor]:
    """Log features of keys (B, G, n, M) and of queries (B, G, R, M); by one product where they are tied.

    Args:
        spec: of the map.
        tensors: of the map.
        rows: queries (B, G, R, D).
        key: (B, G, n, D).
        scale: the map sees ``sqrt(scale) x``.
        shares: leave out what cancels under normalization.
    """
    features = spec.log_shares if shares else spec.log_features
    if not spec.tied:
        return features(key, tensors, scale, "key"), features(rows, tensors, scale, "query")
    both = features(torch.cat((key, rows), 2), tensors, scale, "key")
    new, logits = both.split_with_sizes((key.shape[2], rows.shape[2]), 2)
    return new, logits


def step_positive(
    new: Tensor,
    logits: Tensor,
    value: Tensor,
    state: Sequence[Tensor],
    *,
    hidden: Tensor | None = None,
    normalize: bool = True,
    near: NearTokens | None = None,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """The `step` of a positive map, from the log features of the key and of the queries.

    Args:
        new: of the key, (B, G, 1, M).
        logits: of the queries, (B, G, R, M).
        value: (B, G, 1, E).
        state: log masses (B, G, M, 1) and means (B, G, M, E) of the features.
        hidden: (B, 1, 1, 1) bool, whether the key is not to be taken in; its value is 0 then.
        normalize: divide by the sum of the weights.
        near: see `step`.

    Returns:
        (B, G, R, E) and the state after.
    """
    log_mass, mean = state
    if hidden is not None:
        new = new.masked_fill(hidden, EMPTY)
    # A logarithm of 10 in float32 cannot tell 1,000,000 tokens from 1,000,001, and loses digits long before.
    log_mass = log_mass.to(wide_dtype(new))
    new = new.transpose(-1, -2)
    total = log_add(log_mass, new)
    mean = torch.lerp(mean, value, (new - log_mass).to(mean.dtype).sigmoid())
    if near is None:
        return answer_positive(logits, total, mean, normalize), (total, mean)
    logits = logits + total.to(mean.dtype).transpose(-1, -2)
    logits = logits if near.factor is None else logits + near.factor
    every = NearTokens([*near.logits, logits], [*near.values, mean], may_hide=near.may_hide)
    return every.attend(), (total, mean)


def log_add(a: Tensor, b: Tensor) -> Tensor:
    """``log(e^a + e^b)``; in an exported graph by what ONNX does without leaving float range."""
    if not torch.compiler.is_exporting():
        return torch.logaddexp(a, b)
    return torch.maximum(a, b) + torch.log1p((-(a - b).abs()).exp())


def answer_positive(logits: Tensor, log_mass: Tensor, mean: Tensor, normalize: bool) -> Tensor:
    """(B, G, R, M) log features of queries, and what the keys have left -> (B, G, R, E)."""
    logits = logits + log_mass.to(mean.dtype).transpose(-1, -2)
    out = logits.softmax(-1) @ mean
    if normalize:
        return out
    root = (0.5 * logits.logsumexp(-1, keepdim=True)).exp()  # twice: the size itself may lie beyond float range
    return out * root * root


def _take_signed(
    spec: SignedSpec,
    tensors: Sequence[Tensor],
    key: Tensor,
    value: Tensor,
    state: Sequence[Tensor],
    scale: float,
    hidden: Tensor | None,
    cancels: bool,
    guard: bool,
    fades: bool,
) -> tuple[Tensor, ...]:
    """The state with a key (B, G, 1, D) in it."""
    log_scale, kv, k_sum, norm_sum = state
    phi_k, factor = spec.features(key, tensors, scale, "key", cancels)
    if fades and factor is None:
        factor = torch.zeros_like(phi_k[..., :1])
    if hidden is not None:
        phi_k = phi_k.masked_fill(hidden, 0)
        factor = None if factor is None else factor.masked_fill(hidden, EMPTY)
    norm_k = _lengths(spec, phi_k, cancels)
    if hidden is not None:
        norm_k = norm_k.masked_fill(hidden, 0)
    if factor is not None:
        top = torch.maximum(log_scale, factor)
        decay, size = (log_scale - top).exp(), (factor - top).exp()
        phi_k, norm_k = phi_k * size, norm_k * size
        log_scale, kv, k_sum, norm_sum = top, kv * decay, k_sum * decay, norm_sum * decay
    column = phi_k.transpose(-1, -2)
    kv = torch.addcmul(kv, column, value)
    k_sum = k_sum + column
    if guard and spec.guarded:
        norm_sum = norm_sum + norm_k
    return log_scale, kv, k_sum, norm_sum


def _lengths(spec: SignedSpec, phi: Tensor, cancels: bool) -> Tensor:
    """``|phi|`` of rows (..., 1), as the guard takes it."""
    length = spec.length(cancels)
    return phi.norm(dim=-1, keepdim=True) if length is None else phi.new_full((*phi.shape[:-1], 1), length)


def _merge_signed(
    spec: SignedSpec, phi: Tensor, factor: Tensor | None, state: Sequence[Tensor], near: NearTokens
) -> Tensor:
    """Attend to near tokens and to the sums of the state by features (B, G, R, M) of the queries: (B, G, R, E)."""
    log_scale, kv, k_sum, norm_sum = state
    den = phi @ k_sum
    guard = _lengths(spec, phi, False) * norm_sum if spec.guarded else None
    empty = den == 0 if guard is None else (den == 0) & (guard == 0)
    log = torch.zeros_like(den) if factor is None else factor
    log = log if factor is None and not near.fades else log + log_scale
    log = log if near.factor is None else log + near.factor
    log, log_near = log.masked_fill(empty, EMPTY), torch.cat(list(near.logits), -1).logsumexp(-1, keepdim=True)
    top = torch.maximum(log, log_near)
    left, right = (log_near - top).exp(), (log - top).exp()
    num, total = near.attend() * left + phi @ kv * right, left + den * right
    if guard is not None:
        total = torch.maximum(total, GUARD * (left + guard * right))
    some = (top > EMPTY / 2) & (total > torch.finfo(total.dtype).tiny)
    return torch.where(some, num / torch.where(some, total, 1.0), 0.0)


def answer_signed(
    spec: SignedSpec, phi_q: Tensor, factor: Tensor | None, state: Sequence[Tensor], normalize: bool
) -> Tensor:
    """(B, G, R, M) features of queries, and what the keys have left -> (B, G, R, E)."""
    log_scale, kv, k_sum, norm_sum = state
    out = phi_q @ kv
    if not normalize:
        if factor is None:
            return out
        root = (0.5 * (factor + log_scale)).exp()
        return out * root * root
    den = phi_q @ k_sum
    if spec.guarded:
        length = spec.length(normalize)
        norm_q = phi_q.norm(dim=-1, keepdim=True) if length is None else length
        den = torch.maximum(den, GUARD * norm_q * norm_sum)
    some = ~(den <= 0)  # NaN stays NaN
    return torch.where(some, out / torch.where(some, den, 1.0), 0.0)


def read(
    spec: Spec,
    tensors: Sequence[Tensor],
    query: Tensor,
    state: Sequence[Tensor],
    *,
    scale: float,
    normalize: bool = True,
) -> Tensor:
    """Answer queries (B, H, L, D) from a state alone, which stays as it is -> (B, H, L, E).

    Cost: O(L M (D + E)) time, whatever the number of keys in the state.
    """
    batch, heads, length, width = query.shape
    groups = state[1].shape[1]
    rows = query.reshape(batch, groups, heads // groups * length, width)
    if isinstance(spec, PositiveSpec):
        features = spec.log_shares if normalize else spec.log_features
        out = answer_positive(features(rows, tensors, scale, "query"), state[0], state[1], normalize)
    else:
        assert isinstance(spec, SignedSpec)
        phi_q, factor = spec.features(rows, tensors, scale, "query", normalize)
        out = answer_signed(spec, phi_q, factor, state, normalize)
    return out.reshape(batch, heads, length, out.shape[-1])
