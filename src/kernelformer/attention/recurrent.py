"""One token at a time, with a state whose size does not depend on how many came before."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from kernelformer.attention.engine import Part
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
        near: the buffers that its last keys lie in, where a stream writes them in place.
        last_id: (B), the segment that each sample is in, of a stream of packed sequences; the tensors hold no other.
    """

    tensors: tuple[Tensor, ...]
    length: int
    made_by: MadeBy
    fits: tuple[object, ...] = ()
    near: object | None = None
    last_id: Tensor | None = None

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
        last_id = None if self.last_id is None else self.last_id.to(device)
        return replace(self, tensors=tuple(x.to(device) for x in self.tensors), fits=(), last_id=last_id)

    def detach(self) -> State:
        """The same, cut off from the graph: gradients of later tokens stop here."""
        return replace(self, tensors=tuple(x.detach() for x in self.tensors))

    def reorder(self, index: Tensor | Sequence[int]) -> State:
        """Samples by their index, repeats allowed: what beam search does between steps."""
        order = torch.as_tensor(index)
        order = order if order.numel() else order.long()  # torch takes [] for floats
        tensors = tuple(x.index_select(0, order.to(x.device)) for x in self.tensors)
        last_id = None if self.last_id is None else self.last_id[order.to(self.last_id.device)]
        return replace(self, tensors=tensors, fits=(), last_id=last_id)

    def fill(self, samples: Tensor, values: Sequence[float]) -> State:
        """The same with ``values[n]`` in all of tensor n of some samples, (B) bool."""
        pairs = zip(self.tensors, values, strict=True)
        return replace(self, tensors=tuple(x.masked_fill(samples.view(-1, *[1] * (x.dim() - 1)), y) for x, y in pairs))


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
    return _answer_positive(logits, *after, normalize), after


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
    total = torch.logaddexp(log_mass.to(new.dtype), new)
    return total, torch.lerp(mean, value, (new - total).to(mean.dtype).exp())  # old and new shares add up to 1


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
    after = _take_signed(spec, tensors, key, value, state, scale, hidden, normalize, guard=normalize)
    phi_q, factor = spec.features(query, tensors, scale, "query", normalize)
    return _answer_signed(spec, phi_q, factor, after, normalize), after


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
    if guard and not spec.nonnegative:
        norm_sum = norm_sum + norm_k
    return log_scale, kv, k_sum, norm_sum


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
    if not spec.nonnegative:
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
        out = _answer_positive(features(rows, tensors, scale, "query"), state[0], state[1], normalize)
    else:
        signed = cast(SignedSpec, spec)
        phi_q, factor = signed.features(rows, tensors, scale, "query", normalize)
        out = _answer_signed(signed, phi_q, factor, state, normalize)
    return out.reshape(batch, heads, length, out.shape[-1])


def step_near(
    spec: PositiveSpec,
    tensors: Sequence[Tensor],
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    bias: Tensor,
    sums: Sequence[Tensor],
    *,
    scale: float,
    slope: Tensor | None = None,
) -> tuple[Tensor, list[Tensor]] | None:
    """One query with a relative bias: near keys one by one, older ones by their sums (see `relative`).

    Args:
        spec: of a positive map.
        tensors: of the map.
        query: (B, H, 1, D) in the dtype of the arithmetic.
        keys: (B, H, n, D), the last one at distance 0; the first one leaves for the sums, if there are any.
        values: (B, H, n, E).
        mask: (B, n) bool, or None.
        bias: (H, n) at distances n - 1 to 0; older keys have the first one's.
        sums: shift (B, H, 1, M), kv (B, H, M, E), ks (B, H, M, 1), ns; or nothing, while no key is older.
        scale: the map sees ``sqrt(scale) x``.
        slope: (H), what the bias of the sums falls by per token.

    Returns:
        (B, H, 1, E) and the sums after the step, or None where a row is too small for float range: then `relative` does
        it.
    """
    logits = spec.log_shares(query, tensors, scale, "query")
    logs = spec.log_shares(keys, tensors, scale, "key")
    if mask is not None:
        logs = logs.masked_fill(~mask[:, None, :, None], -torch.inf)
    top = logs.amax(2, keepdim=True).clamp_min(EMPTY)
    if sums:
        top = torch.maximum(top, sums[0])
    left = logits + top
    left = (left - left.amax(3, keepdim=True)).exp()
    peak = bias.amax(1, keepdim=True).clamp_min(EMPTY)
    factors = (bias - peak).exp()
    weights = left @ (logs - top).exp().transpose(2, 3) * factors.unsqueeze(1)
    num, den = weights @ values, weights.sum(3, keepdim=True)
    if sums:
        shift, kv, ks, ns = sums
        far = left * (shift - top).exp() * factors[:, :1].unsqueeze(1)
        num, den = num + far @ kv, den + far @ ks
    if bool((den < LOST).any()):
        return None
    if not sums:
        return num / den, []
    gone = logs[:, :, :1]
    new = torch.maximum(shift, gone.clamp_min(EMPTY))
    keep, add = ((x - new).exp().transpose(2, 3) for x in (shift, gone))
    after = [new, kv * keep + add * values[:, :, :1], ks * keep + add, ns]
    if slope is not None:
        after[0] = new - slope.to(new).view(1, -1, 1, 1)
    return num / den, after
