"""One token at a time, with a state whose size does not depend on how many came before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor

from kernelformer.attention.engine import Part
from kernelformer.attention.positive import EMPTY, LOST
from kernelformer.attention.reference import GUARD
from kernelformer.contract import PositiveSpec, SignedSpec, Spec, wide_dtype


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
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Take in one key and value, then answer one query.

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

    Returns:
        (B, H, 1, E) and the tensors of the state after.

    Cost: O(M (D + E)) time and memory per head.
    """
    hidden = None if key_mask is None else ~key_mask[:, None, :, None]
    if hidden is not None:
        key, value = key.masked_fill(hidden, 0), value.masked_fill(hidden, 0)
    batch, heads, _, width = query.shape
    groups = key.shape[1]
    query = query.reshape(batch, groups, heads // groups, width)  # (B, G, R, D): the group's queries as rows
    if spec.family == "positive":
        out, after = _positive(cast(PositiveSpec, spec), tensors, query, key, value, state, scale, hidden, normalize)
    else:
        out, after = _signed(cast(SignedSpec, spec), tensors, query, key, value, state, scale, hidden, normalize)
    return out.reshape(batch, heads, 1, value.shape[-1]), after


def _positive(
    spec: PositiveSpec,
    tensors: Sequence[Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    state: Sequence[Tensor],
    scale: float,
    hidden: Tensor | None,
    normalize: bool,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    new, logits = _map_positive(spec, tensors, query, key, scale, normalize)
    after = _take_positive(new, value, state, hidden)
    return answer_positive(logits, *after, normalize), after


def _map_positive(
    spec: PositiveSpec, tensors: Sequence[Tensor], query: Tensor, key: Tensor, scale: float, normalize: bool
) -> tuple[Tensor, Tensor]:
    """Log features of a key, (B, G, M, 1), and of the queries (B, G, R, M); by one product where they are tied."""
    features = spec.log_shares if normalize else spec.log_features
    if spec.tied:
        both = features(torch.cat([key, query], 2), tensors, scale, "key")
        new, logits = both[:, :, :1], both[:, :, 1:]
    else:
        new, logits = features(key, tensors, scale, "key"), features(query, tensors, scale, "query")
    return new.transpose(-1, -2), logits


def _take_positive(new: Tensor, value: Tensor, state: Sequence[Tensor], hidden: Tensor | None) -> tuple[Tensor, Tensor]:
    """The state with a key in it, by its log features (B, G, M, 1)."""
    log_mass, mean = state
    if hidden is not None:
        new = new.masked_fill(hidden, EMPTY)
    # A logarithm of 10 in float32 cannot tell 1,000,000 tokens from 1,000,001, and loses digits long before.
    new = new.to(wide_dtype(new))
    total = log_add(log_mass.to(new.dtype), new)
    return total, torch.lerp(mean, value, (new - total).to(mean.dtype).exp())  # old and new shares add up to 1


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


def _signed(
    spec: SignedSpec,
    tensors: Sequence[Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    state: Sequence[Tensor],
    scale: float,
    hidden: Tensor | None,
    normalize: bool,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    after = _take_signed(spec, tensors, key, value, state, scale, hidden, normalize, guard=normalize)
    phi_q, factor = spec.features(query, tensors, scale, "query", normalize)
    return answer_signed(spec, phi_q, factor, after, normalize), after


def _take_signed(
    spec: SignedSpec,
    tensors: Sequence[Tensor],
    key: Tensor,
    value: Tensor,
    state: Sequence[Tensor],
    scale: float,
    hidden: Tensor | None,
    normalize: bool,
    guard: bool = True,
    fades: bool = False,
) -> tuple[Tensor, ...]:
    """The state with a key (B, G, 1, D) in it."""
    log_scale, kv, k_sum, norm_sum = state
    phi_k, factor = spec.features(key, tensors, scale, "key", normalize)
    if fades and factor is None:
        factor = torch.zeros_like(phi_k[..., :1])
    if hidden is not None:
        phi_k = phi_k.masked_fill(hidden, 0)
        factor = None if factor is None else factor.masked_fill(hidden, EMPTY)
    length = spec.length(normalize)
    norm_k = phi_k.norm(dim=-1, keepdim=True) if length is None else phi_k.new_full((*phi_k.shape[:-1], 1), length)
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


def far_logits(
    spec: PositiveSpec,
    tensors: Sequence[Tensor],
    query: Tensor,
    token: tuple[Tensor, Tensor, Tensor | None],
    state: Sequence[Tensor],
    scale: float,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """As `far_step` of a positive map, whose features are like keys: log weights (B, G, R, M) of the state's means."""
    key, value, hidden = token
    new, logits = _map_positive(spec, tensors, query, key, scale, False)
    total, mean = _take_positive(new, value, state, hidden)
    return logits + total.to(mean.dtype).transpose(-1, -2), (total, mean)


def far_step(
    spec: Spec,
    tensors: Sequence[Tensor],
    query: Tensor,
    token: tuple[Tensor, Tensor, Tensor | None],
    state: Sequence[Tensor],
    scale: float,
    fades: bool = False,
) -> tuple[Part, tuple[Tensor, ...]]:
    """Take in a key and value, then sum up what the state gives to queries, on the scale of the kernel itself.

    Args:
        spec: of the map.
        tensors: of the map.
        query: (B, G, R, D) in the dtype of the arithmetic.
        token: key (B, G, 1, D), value (B, G, 1, E), and whether it is hidden, (B, 1, 1, 1) bool or None.
        state: tensors of the state before, (B, G, ...).
        scale: the map sees ``sqrt(scale) x``.
        fades: whether the sums lose weight from token to token, so that those of every map have a log scale.

    Returns:
        sums (B, G, R, ...), and the tensors of the state after.
    """
    key, value, hidden = token
    if isinstance(spec, PositiveSpec):
        logits, (total, mean) = far_logits(spec, tensors, query, token, state, scale)
        return Part(logits.softmax(-1) @ mean, logits.logsumexp(-1)), (total, mean)
    assert isinstance(spec, SignedSpec)
    after = _take_signed(spec, tensors, key, value, state, scale, hidden, False, fades=fades)
    phi, factor = spec.features(query, tensors, scale, "query", False)
    log_scale, kv, k_sum, norm_sum = after
    den, guard = (phi @ k_sum).squeeze(-1), None
    empty = den == 0
    if spec.guarded:
        length = spec.length(False)
        norm = phi.norm(dim=-1) if length is None else phi.new_full(phi.shape[:-1], length)
        guard = norm * norm_sum.squeeze(-1)
        empty = empty & (guard == 0)
    if fades and factor is None:
        factor = torch.zeros_like(phi[..., :1])
    log = torch.zeros_like(den) if factor is None else (factor + log_scale).squeeze(-1)
    return Part(phi @ kv, log.masked_fill(empty, EMPTY), den, guard), after


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
    if spec.family == "positive":
        positive = cast(PositiveSpec, spec)
        features = positive.log_shares if normalize else positive.log_features
        out = answer_positive(features(rows, tensors, scale, "query"), state[0], state[1], normalize)
    else:
        signed = cast(SignedSpec, spec)
        phi_q, factor = signed.features(rows, tensors, scale, "query", normalize)
        out = answer_signed(signed, phi_q, factor, state, normalize)
    return out.reshape(batch, heads, length, out.shape[-1])


def step_near(
    logits: Tensor,
    logs: Tensor,
    values: Tensor,
    bias: Tensor,
    sums: Sequence[Tensor],
    *,
    slope: Tensor | None = None,
) -> tuple[Tensor, list[Tensor]] | None:
    """One query with a relative bias: near keys one by one, older ones by their sums (see `relative`).

    Args:
        logits: (B, H, 1, M), log features of the query under a positive map.
        logs: (B, H, n, M), those of near keys, the last one at distance 0; the first one leaves for the sums. -inf
            where a key is hidden.
        values: (B, H, n, E).
        bias: (H, n) at distances n - 1 to 0; older keys have the first one's.
        sums: shift (B, H, 1, M), kv (B, H, M, E), ks (B, H, M, 1), ns.
        slope: (H), what the bias of the sums falls by per token.

    Returns:
        (B, H, 1, E) and the sums after the step, or None where a row is too small for float range: then `relative` does
        it.
    """
    shift, kv, ks, ns = sums
    top = torch.maximum(logs.amax(2, keepdim=True), shift).clamp_min_(EMPTY)
    left = logits + top
    left = left.sub_(left.amax(3, keepdim=True)).exp_()
    peak = bias.amax(1, keepdim=True).clamp_min_(EMPTY)
    factors = (bias - peak).exp_().unsqueeze(1)
    weights = (left @ (logs - top).exp_().transpose(2, 3)).mul_(factors)
    far = (shift - top).exp_().mul_(factors[:, :, :1]).mul_(left)
    num, den = (weights @ values).add_(far @ kv), weights.sum(3, keepdim=True).add_(far @ ks)
    if bool((den < LOST).any()):
        return None
    gone = logs[:, :, :1]
    new = torch.maximum(shift, gone)
    keep, add = (shift - new).exp_().transpose(2, 3), (gone - new).exp_().transpose(2, 3)
    after = [new, torch.addcmul(kv * keep, add, values[:, :, :1]), torch.addcmul(add, ks, keep), ns]
    if slope is not None:
        after[0] = new - slope.to(new).view(1, -1, 1, 1)
    return num.div_(den), after


Logs = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def log_rows(spec: PositiveSpec, tensors: Sequence[Tensor], scale: float) -> Logs:
    """A function of a key (B, G, 1, D) and queries (B, H, 1, D) that gives their `log_shares`, (B G, M) and (B H, M).

    They are in memory of their own.
    """
    product = spec.bind_rows(tensors, scale)

    def by_product(key: Tensor, query: Tensor) -> tuple[Tensor, Tensor]:
        assert product is not None
        width = key.shape[3]
        keys = key.reshape(-1, width)
        both = product(torch.cat((keys, query.reshape(-1, width))))
        return both[: keys.shape[0]], both[keys.shape[0] :]

    def by_formula(key: Tensor, query: Tensor) -> tuple[Tensor, Tensor]:
        batch, groups, _, width = key.shape
        rows = query.reshape(batch, groups, query.shape[1] // groups, width)
        if spec.tied:
            both = spec.log_shares(torch.cat((key, rows), 2), tensors, scale, "key")
            new, logits = both[:, :, :1], both[:, :, 1:]
        else:  # copies, since a formula may give its argument back, and what it gives is written to
            new = spec.log_shares(key.clone(), tensors, scale, "key")
            logits = spec.log_shares(rows.clone(), tensors, scale, "query")
        return new.reshape(batch * groups, new.shape[3]), logits.reshape(-1, logits.shape[3])

    return by_formula if product is None else by_product


def quick_step(
    logs: Logs, query: Tensor, key: Tensor, value: Tensor, state: Sequence[Tensor]
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Take in one key and value, then answer one query.

    Args:
        logs: see `log_rows`.
        query: (B, H, 1, D) in the dtype of the arithmetic.
        key: (B, G, 1, D), likewise.
        value: (B, G, 1, E), likewise.
        state: log_mass (B, G, M, 1) and mean (B, G, M, E) before it.

    Returns:
        (B, H, 1, E) and the tensors of the state after.
    """
    new, logits = logs(key, query)
    rows, features = new.shape  # B G, M
    log_mass, mean = state
    before = log_mass.reshape(rows, features)
    if before.dtype != torch.float64:  # as after a prefill; see `recurrent`
        before = before.double()
    total = torch.logaddexp(before, new)
    share = new.sub_(before).sigmoid_()
    width = mean.shape[3]
    means = torch.lerp(mean.reshape(rows, features, width), value.reshape(rows, 1, width), share.unsqueeze(2))
    groups = query.shape[1] // key.shape[1]
    if groups == 1:
        weights = logits.add_(total).softmax(1).unsqueeze(1)
    else:
        weights = logits.view(rows, groups, features).add_(total.unsqueeze(1)).softmax(2)
    out = torch.bmm(weights, means).view(*query.shape[:2], 1, width)
    return out, (total.view(log_mass.shape), means.view(mean.shape))
