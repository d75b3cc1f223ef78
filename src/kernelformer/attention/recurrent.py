"""One token at a time, with a state whose size does not depend on how many came before."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from kernelformer.attention.near_keys import NearKeys
from kernelformer.attention.positive import EMPTY, LOST
from kernelformer.attention.reference import GUARD
from kernelformer.contract import PositiveSpec, SignedSpec, Spec, wide_dtype
from kernelformer.formatting import human_bytes

MadeBy = tuple[tuple[str, object], ...]


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Memory that tensors keep, in bytes: all of what they are views of, and what they share once."""
    storages = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in tensors}
    return sum(storages.values())


@dataclass(frozen=True, eq=False)
class Prepared:
    """A map's tensors for the calls of a stream, and what they were made from.

    Weights are compared by their numbers, all in one go: versions do not count what is written through ``.data``.
    """

    tensors: tuple[Tensor, ...]
    weights: tuple[Tensor, ...] | None = None  # views of them; None: not to be kept
    how: tuple[object, ...] = ()  # what else they depend on
    flat: tuple[Tensor, ...] = ()  # the weights, (n) each, where there is something to compare
    numbers: Tensor | None = None  # what they held

    @staticmethod
    def of(tensors: Sequence[Tensor], weights: Sequence[Tensor], how: tuple[object, ...]) -> Prepared:
        """To be kept as long as the weights stay what they are, if that can be seen without waiting for a device."""
        if not all(x.device.type == "cpu" and x.is_contiguous() for x in weights):
            return Prepared(tuple(tensors))
        views = tuple(x.detach() for x in weights)
        if not weights or {x.data_ptr() for x in tensors} <= {x.data_ptr() for x in weights}:
            return Prepared(tuple(tensors), views, how)  # the tensors are views, too, and change with the weights
        flat = tuple(x.view(-1) for x in views)
        return Prepared(tuple(tensors), views, how, flat, torch.cat(flat))

    def made_from(self, weights: Sequence[Tensor], how: tuple[object, ...]) -> bool:
        """Whether these are still the weights, in the same memory and with the same numbers, and all else is too."""
        if self.weights is None or len(self.weights) != len(weights) or self.how != how:
            return False
        if not all(map(Tensor.is_set_to, weights, self.weights)):
            return False
        return self.numbers is None or torch.cat(self.flat).sub_(self.numbers).abs_().sum().item() == 0


@dataclass(frozen=True, eq=False)
class State:
    """What an attention core keeps of the keys and values so far.

    Immutable: a step returns a new state, so an old one can be stepped from again. Picklable, and small: M (E + 1)
    numbers per key head.

    Args:
        tensors: (B, G, ...) each; their meaning is the method's own.
        length: number of tokens taken in, padding included.
        made_by: the core that made it, by its settings and its draw: another one cannot go on from it. Learned weights
            are not looked at: after they have changed, start anew.
        fits: sizes and types of inputs that are known to go with it, so that a stream is checked once.
        near: the buffers that its near keys are views of, if any; see `near_keys`.
    """

    tensors: tuple[Tensor, ...]
    length: int
    made_by: MadeBy
    fits: tuple[object, ...] = ()
    near: NearKeys | None = None

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "fits": (), "near": None}

    def __repr__(self) -> str:
        """One line: the method, how many tokens, and the tensors' shapes, size, types and devices."""
        methods = " and ".join(str(x) for name, x in self.made_by if name == "method")
        shapes = ", ".join(str(tuple(x.shape)) for x in self.tensors)
        kinds = [str(x.dtype).removeprefix("torch.") for x in self.tensors] + [str(x.device) for x in self.tensors]
        said = [methods or "unknown method", f"{self.length} tokens", f"shapes {shapes or 'none'}"]
        return f"{type(self).__name__}({', '.join([*said, human_bytes(self.nbytes), *dict.fromkeys(kinds)])})"

    @property
    def batch(self) -> int:
        """The number of samples, B."""
        return self.tensors[0].shape[0]

    @property
    def nbytes(self) -> int:
        """Memory that it keeps, in bytes, see `storage_bytes`."""
        return storage_bytes(self.tensors)

    def to(self, device: torch.device | str) -> State:
        """The same on another device."""
        return replace(self, tensors=tuple(x.to(device) for x in self.tensors), fits=())

    def detach(self) -> State:
        """The same, cut off from the graph: gradients of later tokens stop here."""
        return replace(self, tensors=tuple(x.detach() for x in self.tensors))

    def reorder(self, index: Tensor | Sequence[int]) -> State:
        """Samples by their index, repeats allowed: what beam search does between steps."""
        order = torch.as_tensor(index)
        order = order if order.numel() else order.long()  # torch takes [] for floats
        return replace(self, tensors=tuple(x.index_select(0, order.to(x.device)) for x in self.tensors), fits=())


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
    log_mass, mean = state
    features = spec.log_shares if normalize else spec.log_features
    if spec.tied:
        both = features(torch.cat([key, query], 2), tensors, scale, "key")
        new, logits = both[:, :, :1], both[:, :, 1:]
    else:
        new, logits = features(key, tensors, scale, "key"), features(query, tensors, scale, "query")
    new = new.transpose(-1, -2)  # (B, G, M, 1)
    if hidden is not None:
        new = new.masked_fill(hidden, EMPTY)
    # A logarithm of 10 in float32 cannot tell 1,000,000 tokens from 1,000,001, and loses digits long before.
    new = new.to(wide_dtype(new))
    total = torch.logaddexp(log_mass.to(new.dtype), new)
    mean = torch.lerp(mean, value, (new - total).to(mean.dtype).exp())  # the shares of old and new add up to 1
    return _answer_positive(logits, total, mean, normalize), (total, mean)


def _answer_positive(logits: Tensor, log_mass: Tensor, mean: Tensor, normalize: bool) -> Tensor:
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
    log_scale, kv, k_sum, norm_sum = state
    phi_k, factor = spec.features(key, tensors, scale, "key", normalize)
    phi_q, query_factor = spec.features(query, tensors, scale, "query", normalize)
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
    if normalize and not spec.nonnegative:
        norm_sum = norm_sum + norm_k
    after = (log_scale, kv, k_sum, norm_sum)
    return _answer_signed(spec, phi_q, query_factor, after, normalize), after


def _answer_signed(
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
    if not spec.nonnegative:
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
    if spec.family == "positive":
        positive = cast(PositiveSpec, spec)
        features = positive.log_shares if normalize else positive.log_features
        out = _answer_positive(features(rows, tensors, scale, "query"), state[0], state[1], normalize)
    else:
        signed = cast(SignedSpec, spec)
        phi_q, factor = signed.features(rows, tensors, scale, "query", normalize)
        out = _answer_signed(signed, phi_q, factor, state, normalize)
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
