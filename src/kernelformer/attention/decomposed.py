"""The fast algorithms by plain operations of torch, for `torch.export` and what comes after it, ONNX.

An exported graph has no operator of ours, no loop over chunks and no branch on numbers, and its length is a symbol. All
chunks are worked on at once, whole mapped tensors included: O(L M) memory, where the operators take O(M E).

The sums before each chunk are one cumulative sum in float64, at one scale for the whole sequence. A chunk's own keys
are weighed in float64 too. A key whose features are smaller than those of a later one by up to e^1000 is exact
therefore (e^700 for signed maps), where float32 alone spans e^87; beyond that it counts as nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from kernelformer.attention.near_far_call import NearFarCall, Sinks, near_blocks
from kernelformer.attention.positive import EMPTY
from kernelformer.attention.reference import GUARD
from kernelformer.attention.step import answer_positive, answer_signed, log_add
from kernelformer.contract import PositiveSpec, SignedSpec, Spec, compute_dtype, lookup, wide_dtype


class Part(NamedTuple):
    """What some keys give to c chunks of queries, to be merged with what other keys give (`merge`).

    Args:
        num: (N c, R C, E), ``exp(-log) sum_j w_ij v_j``.
        log: (N c, R C), the scale of the row's sums; EMPTY where it sees no key.
        den: (N c, R C), ``exp(-log) sum_j w_ij``; None means 1.
        guard: (N c, R C), ``exp(-log) |phi(q_i)| sum_j |phi(k_j)|``; None: the same as den.
    """

    num: Tensor
    log: Tensor
    den: Tensor | None = None
    guard: Tensor | None = None


CHUNK = 64  # tokens; a chunk's own keys cost C (M + E) a token, sums of all chunks L / C times M E numbers


class Chunking:
    """A sequence of any length in chunks.

    The number of chunks is read from a tensor, so that it is a symbol of its own in the graph. As a formula of the
    length, which the solver of guards would have to reason about, it ends in a graph for one length.

    Args:
        like: (*, L, X), for its length and device.
    """

    def __init__(self, like: Tensor) -> None:
        self.length = like.shape[-2]
        self.count = cast(int, torch.full((), (self.length + CHUNK - 1) // CHUNK, device=like.device).item())
        torch._check(self.count >= 1)
        torch._check(self.length <= self.count * CHUNK)

    def chunks(self, x: Tensor, fill: float | bool = 0) -> Tensor:
        """(*, L, X) -> (*, n, C, X), the end filled up."""
        rest = x.new_full((*x.shape[:-2], self.count * CHUNK - self.length, x.shape[-1]), fill)
        whole: Tensor = torch.cat([x, rest], -2).unflatten(-2, (self.count, CHUNK))
        return whole

    def by_chunk(self, x: Tensor) -> Tensor:
        """Queries (B, G, R, L, X), those of a key head together: (B, G, n, R C, X)."""
        return self.chunks(x).transpose(2, 3).flatten(3, 4)

    def by_head(self, x: Tensor) -> Tensor:
        """The inverse of `by_chunk`: (B, G, n, R C, X) -> (B, H, L, X)."""
        rows: Tensor = (
            x.clone(memory_format=torch.contiguous_format)
            .unflatten(3, (-1, CHUNK))
            .transpose(2, 3)
            .flatten(3, 4)
            .flatten(1, 2)
        )
        return rows.narrow(2, 0, self.length)

    def rows_by_head(self, part: Part) -> Part:
        """Rows of chunks (B, G, n, R C) as rows of the sequence (B, H, L)."""
        rest = (None if x is None else self.by_head(x.unsqueeze(4)).squeeze(3) for x in part[1:])
        return Part(self.by_head(part.num), *rest)  # type: ignore[arg-type]


HEADROOM = 300.0  # factors of up to e^300, products of two up to e^600: float64 reaches from e^-708 to e^709


def in_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The same in another dtype; a conversion that does nothing would still be two nodes of the graph."""
    return x if x.dtype == dtype else x.to(dtype)


def by_token(mask: Tensor) -> Tensor:
    """A mask (B, S) over rows (B, G, S, X); an index with None would take four nodes."""
    return mask.unsqueeze(1).unsqueeze(3)


def visible_tokens(key: Tensor, value: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Keys and values (B, G, S, X) in the dtype of the arithmetic; hidden ones, which may hold anything, are 0."""
    dtype = compute_dtype(key.dtype)
    key, value = in_dtype(key, dtype), in_dtype(value, dtype)
    if key_mask is None:
        return key, value
    hidden = by_token(~key_mask)
    return key.masked_fill(hidden, 0), value.masked_fill(hidden, 0)


def linear(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    spec: str,
    tensors: Sequence[Tensor],
    scale: float,
    key_mask: Tensor | None = None,
    normalize: bool = True,
) -> Tensor:
    """Attend to all keys; see `linear.linear_attention` for the arguments.

    Of a positive map by two softmaxes, see `positive`. Cost: O((L + S) M (D + E)) time, O((L + S) M) memory.
    """
    known = lookup(spec)
    key, value = visible_tokens(key, value, key_mask)
    state = _sums(known, tensors, key, value, key_mask, scale, normalize)
    rows = _rows(in_dtype(query, key.dtype), key.shape[1])
    if isinstance(known, PositiveSpec):
        logits = _log_features(known, tensors, rows, scale, "query", normalize)
        out = answer_positive(logits, state[0], state[1], normalize)
    else:
        signed = cast(SignedSpec, known)
        out = answer_signed(signed, *signed.features(rows, tensors, scale, "query", normalize), state, normalize)
    return in_dtype(_by_query_head(out, query).flatten(1, 2), query.dtype)


def _rows(query: Tensor, groups: int) -> Tensor:
    """Queries of a key head's group one after the other, (B, H, L, D) -> (B, G, R L, D).

    A copy, here and in `_by_query_head`: of a view of a view the exporter asks what holds for some lengths only.
    """
    rows: Tensor = query.unflatten(1, (groups, -1)).flatten(2, 3).clone(memory_format=torch.contiguous_format)
    return rows


def _by_query_head(rows: Tensor, query: Tensor) -> Tensor:
    """The inverse of `_rows`, (B, G, R L, X) -> (B, G, R, L, X)."""
    heads: Tensor = rows.clone(memory_format=torch.contiguous_format).unflatten(
        2, (query.shape[1] // rows.shape[1], query.shape[2])
    )
    return heads


def _sums(
    spec: Spec,
    tensors: Sequence[Tensor],
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    scale: float,
    normalize: bool,
) -> list[Tensor]:
    """The state after all keys, (B, G, ...) each; see `recurrent`."""
    hidden = None if key_mask is None else by_token(~key_mask)
    if isinstance(spec, PositiveSpec):
        logits = _log_features(spec, tensors, key, scale, "key", normalize)
        logits = (logits if hidden is None else logits.masked_fill(hidden, EMPTY)).transpose(2, 3)  # (B, G, M, S)
        return [logits.logsumexp(3, keepdim=True), logits.softmax(3) @ value]
    known = cast(SignedSpec, spec)
    phi, factor = known.features(key, tensors, scale, "key", normalize)
    phi = phi if hidden is None else phi.masked_fill(hidden, 0)
    top = phi.new_zeros(*phi.shape[:2], 1, 1)
    if factor is not None:
        factor = factor if hidden is None else factor.masked_fill(hidden, EMPTY)
        top = factor.amax(2, keepdim=True)
    norm = _lengths(known, phi, hidden, normalize)
    if factor is not None:
        size = (factor - top).exp()
        phi, norm = phi * size, norm * size
    return [top, phi.transpose(2, 3) @ value, phi.sum(2).unsqueeze(3), norm.sum(2, keepdim=True)]


def _log_features(
    spec: PositiveSpec, tensors: Sequence[Tensor], x: Tensor, scale: float, role: str, normalize: bool
) -> Tensor:
    formula = spec.log_shares if normalize else spec.log_features
    return formula(x, tensors, scale, "key" if role == "key" else "query")


def _lengths(spec: SignedSpec, phi: Tensor, hidden: Tensor | None, normalize: bool) -> Tensor:
    """``|phi|`` of rows, (..., 1), as the guard takes it; 0 for hidden ones."""
    length = spec.length(normalize)
    norm = phi.norm(dim=-1, keepdim=True) if length is None else phi.new_full((*phi.shape[:-1], 1), length)
    return norm if hidden is None else norm.masked_fill(hidden, 0)


def causal(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    spec: str,
    tensors: Sequence[Tensor],
    scale: float,
    key_mask: Tensor | None = None,
    normalize: bool = True,
    state: Sequence[Tensor] | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """Attend to the keys up to one's own position, and to those in the state; see `causal.causal_attention`.

    Cost: as `causal_part`. The state's logarithm is in float64, as after a step.
    """
    if query.shape[2] != key.shape[2]:
        raise ValueError(
            f"causal attention is exported with a key for each query, got {query.shape[2]} queries and {key.shape[2]} "
            f"keys."
        )
    key, value = visible_tokens(key, value, key_mask)
    hidden = None if key_mask is None else ~key_mask
    common: dict[str, Any] = {"scale": scale, "normalize": normalize, "state": state}
    part, after = causal_part(lookup(spec), tensors, in_dtype(query, key.dtype), key, value, hidden, **common)
    if normalize:
        out = finish(part._replace(num=part.num.clone()))[0]
    else:
        root = (0.5 * part.log).exp().unsqueeze(-1)  # twice: the size itself may lie beyond float range
        out = part.num * root * root
    return in_dtype(out, query.dtype), after


def causal_part(
    spec: Spec,
    tensors: Sequence[Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    hidden: Tensor | None,
    *,
    scale: float,
    normalize: bool,
    state: Sequence[Tensor] | None = None,
    cut: Chunking | None = None,
) -> tuple[Part, list[Tensor]]:
    """What keys up to each query's own give it.

    Args:
        spec: of the map.
        tensors: of the map.
        query: (B, H, L, D) in the dtype of the arithmetic.
        key: (B, G, L, D); hidden ones are 0.
        value: (B, G, L, E); hidden ones are 0.
        hidden: (B, L) bool, or None.
        scale: the map sees ``sqrt(scale) x``.
        normalize: whether what cancels under normalization may be left out.
        state: sums before the first key, (B, G, ...) each.
        cut: that of the sequence, where there is one already.

    Returns:
        sums of the rows (B, H, L, ...), and the state after the last key, its logarithm in float64.

    Cost: O(L (M + C) (D + E)) time; O(L M + L / C M E) memory.
    """
    covered = None if hidden is None else by_token(hidden)
    arguments = (tensors, query, key, value, covered, scale, normalize, state, cut or Chunking(key))
    if isinstance(spec, PositiveSpec):
        return _positive_part(spec, *arguments)
    return _signed_part(cast(SignedSpec, spec), *arguments)


def _running(own: Tensor, before: Tensor | None) -> Tensor:
    """Sums (B, G, n, ...) of chunks -> those before each chunk and after the last, (B, G, n + 1, ...)."""
    first = torch.zeros_like(own[:, :, :1]) if before is None else before.unsqueeze(2)
    sums = in_dtype(torch.cat([first, own], 2), wide_dtype(own)).cumsum(2)
    return in_dtype(sums, own.dtype)


def _positive_part(
    spec: PositiveSpec,
    tensors: Sequence[Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    covered: Tensor | None,
    scale: float,
    normalize: bool,
    state: Sequence[Tensor] | None,
    cut: Chunking,
) -> tuple[Part, list[Tensor]]:
    """Past chunks by the means of features, the chunk itself by its weights; both by their logarithms."""
    groups, wide = key.shape[1], wide_dtype(key)
    new = _log_features(spec, tensors, key, scale, "key", normalize)
    new = cut.chunks(new if covered is None else new.masked_fill(covered, EMPTY), EMPTY)  # (B, G, n, C, M)
    v = cut.chunks(value)
    logits = _log_features(spec, tensors, _rows(query, groups), scale, "query", normalize)
    logits = cut.by_chunk(_by_query_head(logits, query))  # (B, G, n, R C, M)

    peak = new.amax(3, keepdim=True)  # (B, G, n, 1, M)
    size = (new - peak).exp()
    peaks = in_dtype(peak, wide)
    top = peaks.amax(2, keepdim=True)
    if state is not None:
        top = torch.maximum(top, in_dtype(state[0], wide).transpose(2, 3).unsqueeze(2))
    top = top - HEADROOM
    # A value of 1 stands beside the values: one product and one sum are mass and mean of a feature.
    columns = torch.cat([v, torch.ones_like(v[..., :1])], 4)
    own = in_dtype(size.transpose(3, 4) @ columns, wide) * (peaks - top).exp().transpose(3, 4)  # (B, G, n, M, E + 1)
    end = top.transpose(3, 4).squeeze(2)  # (B, G, M, 1)
    old = None
    if state is not None:
        mean = in_dtype(state[1], wide)
        old = (in_dtype(state[0], wide) - end).exp() * torch.cat([mean, torch.ones_like(mean[..., :1])], 3)
    log_mass, mean = _masses(_running(own, old), end)
    past_logits = logits + in_dtype(log_mass[:, :, :-1], logits.dtype).transpose(3, 4)
    mean = in_dtype(mean, v.dtype)
    past = Part(past_logits.softmax(4) @ mean[:, :, :-1], past_logits.logsumexp(4))

    here = in_dtype(logits, wide) + peaks
    row = here.amax(4, keepdim=True) - HEADROOM
    raised = (in_dtype(new - peak, wide) + HEADROOM).exp()
    scores = (here - row).exp() @ raised.transpose(3, 4)  # (B, G, n, R C, C)
    scores = scores * _lower(scores, query.shape[1] // groups)
    seen = scores.sum(4, keepdim=True)
    log = in_dtype(_logs(seen, row - HEADROOM), v.dtype).squeeze(4)
    part = _joined(past, Part(in_dtype(_ratio(scores, seen), v.dtype) @ v, log))
    return cut.rows_by_head(part), [log_mass[:, :, -1], mean[:, :, -1]]


def _masses(totals: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of means and masses (B, G, n + 1, M, E + 1) at the scale ``end`` -> log masses and means."""
    mass = totals[..., -1:]
    return _logs(mass, end.unsqueeze(2)), _ratio(totals[..., :-1], mass)


def _logs(mass: Tensor, scale: Tensor) -> Tensor:
    """``log mass + scale``, and EMPTY where there is no mass; at the scale of no key it is EMPTY, too."""
    return torch.where(mass > 0, _or_one(mass).log() + scale, EMPTY)


def _ratio(sums: Tensor, mass: Tensor) -> Tensor:
    """``sums / mass``, and 0 where there is no mass."""
    return sums / _or_one(mass)


def _or_one(mass: Tensor) -> Tensor:
    """The mass, and 1 where there is none: ONNX has float32 constants, in which no bound is small enough."""
    return torch.where(mass > 0, mass, 1.0)


def _lower(like: Tensor, repeats: int) -> Tensor:
    """(R C, C), 1 where a query of a chunk sees the key."""
    return torch.ones(CHUNK, CHUNK, dtype=like.dtype, device=like.device).tril().repeat(repeats, 1)


def _joined(a: Part, b: Part) -> Part:
    """Two means with log masses, by the share that the logistic function has of them."""
    num = torch.lerp(a.num, b.num, torch.sigmoid(b.log - a.log).unsqueeze(-1))
    return Part(num, log_add(a.log, b.log))


def _signed_part(
    spec: SignedSpec,
    tensors: Sequence[Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    covered: Tensor | None,
    scale: float,
    normalize: bool,
    state: Sequence[Tensor] | None,
    cut: Chunking,
) -> tuple[Part, list[Tensor]]:
    """Plain sums of features, at the largest factor of all keys.

    Features with factors are float64 numbers, others have one scale and are multiplied as they are. Sums over chunks
    are float64 always.
    """
    groups = key.shape[1]
    phi, factor = spec.features(key, tensors, scale, "key", normalize)
    wide = key.dtype if factor is None else wide_dtype(key)
    phi = phi if covered is None else phi.masked_fill(covered, 0)
    norm = _lengths(spec, phi, covered, normalize)
    phi_q, factor_q = spec.features(_rows(query, groups), tensors, scale, "query", normalize)
    norm_q = _lengths(spec, phi_q, None, normalize)

    # A value of 1 and the length of phi stand beside the values: one product and one sum serve all three.
    ones = torch.ones_like(value[..., :1])
    columns, phi, norm = (in_dtype(x, wide) for x in (torch.cat([value, ones], 3), phi, norm))
    top = phi.new_zeros(*phi.shape[:2], 1, 1)
    if factor is not None:
        factor = factor if covered is None else factor.masked_fill(covered, EMPTY)
        top = in_dtype(factor.amax(2, keepdim=True), wide)
        top = top if state is None else torch.maximum(top, in_dtype(state[0], wide))
        size = (in_dtype(factor, wide) - top).exp()
        phi, norm = phi * size, norm * size
    old = None if state is None else [in_dtype(x, wide) for x in state[1:]]
    if old is not None and state is not None and factor is not None:
        old = [(in_dtype(state[0], wide) - top).exp() * x for x in old]
    x, y, lengths = cut.chunks(phi), cut.chunks(columns), cut.chunks(norm)
    sums = _running(x.transpose(3, 4) @ y, None if old is None else torch.cat(old[:2], 3))
    sizes = _running(lengths.sum(3, keepdim=True), None if old is None else old[2])

    q = in_dtype(cut.by_chunk(_by_query_head(phi_q, query)), wide)
    lower = _lower(q, query.shape[1] // groups)
    both = q @ sums[:, :, :-1] + (q @ x.transpose(3, 4) * lower) @ y
    den = both[..., -1:]
    own = in_dtype(cut.by_chunk(_by_query_head(norm_q, query)), wide)
    guard = own * (sizes[:, :, :-1] + lower @ lengths)
    log = torch.zeros_like(den) + top.unsqueeze(2)
    if factor_q is not None:
        log = log + in_dtype(cut.by_chunk(_by_query_head(factor_q, query)), wide)
    unit = torch.maximum(den.abs(), guard)
    log, dtype = in_dtype(_logs(unit, log), value.dtype), value.dtype
    num, den, guard = (in_dtype(_ratio(z, unit), dtype) for z in (both[..., :-1], den, guard))
    part = Part(num, log.squeeze(4), den.squeeze(4), guard.squeeze(4) if spec.guarded else None)
    last = in_dtype(sums[:, :, -1], dtype)
    after = [in_dtype(top, dtype), last[..., :-1], last[..., -1:], in_dtype(sizes[:, :, -1], dtype)]
    return cut.rows_by_head(part), after


def near_far(call: NearFarCall) -> tuple[Tensor, list[Tensor]]:
    """Attend to a whole sequence; see `near_far.near_far_attention`.

    Without a bias, dropout and sums of other keys: a graph starts its sequence.

    Cost: O(L (w + C) (D + E) + L M (D + E)) time and O(L (w + C + M)) memory.
    """
    query = in_dtype(call.query, compute_dtype(call.query.dtype))
    key, value = visible_tokens(call.key, call.value, call.key_mask)
    cut = Chunking(query)
    part, state = near_part(call, query, key, value, cut), list[Tensor]()
    if call.spec:
        sides, state = _far_parts(call, query, key, value, cut)
        for far in sides:
            part = merge(part, far)
    return in_dtype(finish(part)[0], call.query.dtype), state


def near_part(call: NearFarCall, query: Tensor, key: Tensor, value: Tensor, cut: Chunking) -> Part:
    """Exact softmax on the keys within the window and the sinks, rows (B, H, L, ...); see `near`."""
    groups = key.shape[1]
    rows = cut.by_chunk((query * call.scale).unflatten(1, (groups, -1)))  # (B, G, n, R C, D)
    repeats, count = query.shape[1] // groups, cut.count
    scores, values = list[Tensor](), list[Tensor]()
    if call.window:
        left, right = near_blocks(call.window, CHUNK, call.is_causal)
        k, v = (_blocks(cut.chunks(x), left, right, count) for x in (key, value))
        real = key.new_ones(key.shape[0], cut.length, dtype=torch.bool) if call.key_mask is None else call.key_mask
        real = _blocks(cut.chunks(by_token(real), False), left, right, count).transpose(3, 4)  # (B, 1, n, 1, W)
        seen = real & _band(call, left, right, query.device).repeat(repeats, 1)
        scores.append((rows @ k.transpose(3, 4)).masked_fill(~seen, EMPTY))
        values.append(v)
    if call.sinks:
        sinks = Sinks(*call.sinks)
        seen = _sees_sinks(call, sinks, count).repeat(1, 1, 1, repeats, 1)
        sink_key, sink_value = (in_dtype(x, query.dtype).unsqueeze(2) for x in sinks[:2])
        scores.append((rows @ sink_key.transpose(3, 4)).masked_fill(~seen, EMPTY))
        values.append(sink_value)
    logits = torch.cat(scores, 4)
    shares = logits.softmax(4).split([x.shape[4] for x in scores], 4)
    out = shares[0] @ values[0]
    for share, x in zip(shares[1:], values[1:], strict=True):
        out = out + share @ x
    log = logits.logsumexp(4, keepdim=True)
    log = log.masked_fill(log < EMPTY / 2, EMPTY)
    return cut.rows_by_head(Part(out, log.squeeze(4)))


def _blocks(chunks: Tensor, left: int, right: int, count: int) -> Tensor:
    """Each chunk with those around it, (B, G, n, C, X) -> (B, G, n, (left + 1 + right) C, X)."""
    padded = F.pad(chunks, (0, 0, 0, 0, left, right))
    return torch.cat([padded.narrow(2, i, count) for i in range(left + 1 + right)], 3)


def _band(call: NearFarCall, left: int, right: int, device: torch.device) -> Tensor:
    """(C, (left + 1 + right) C) bool, whether a key is within the window of a query."""
    i = torch.arange(CHUNK, device=device).unsqueeze(1) + left * CHUNK
    distance = torch.arange((left + 1 + right) * CHUNK, device=device) - i
    near = distance.abs() < call.window
    return near & (distance <= 0) if call.is_causal else near


def _sees_sinks(call: NearFarCall, sinks: Sinks, count: int) -> Tensor:
    """(B, 1, n, C, s) bool, whether a query sees a sink beyond its window."""
    i = torch.arange(count * CHUNK, device=sinks.position.device).view(1, 1, count, CHUNK, 1)
    distance = i - _by_row(sinks.position)
    beyond = distance >= call.window if call.is_causal else distance.abs() >= call.window
    return beyond & _by_row(sinks.visible)


def _by_row(x: Tensor) -> Tensor:
    """A number or mark per sink, (B, s) -> (B, 1, 1, 1, s)."""
    return x.unsqueeze(1).unsqueeze(1).unsqueeze(1)


def _far_parts(
    call: NearFarCall, query: Tensor, key: Tensor, value: Tensor, cut: Chunking
) -> tuple[list[Part], list[Tensor]]:
    """Sums of the keys beyond the window on each side, and the state after those on the left.

    A causal call with delayed keys; with its mirror image, where keys after the query count, as more samples of it.
    """
    real = key.new_ones(key.shape[0], key.shape[2], dtype=torch.bool) if call.far_mask is None else call.far_mask
    tokens = _delayed(key, value, real, call.window)
    if not call.is_causal:
        mirrored = _delayed(key.flip(2), value.flip(2), real.flip(1), max(call.window, 1))
        tokens = [torch.cat(pair, 0) for pair in zip(tokens, mirrored, strict=True)]
        query = torch.cat([query, query.flip(2)], 0)
    part, state = causal_part(
        lookup(call.spec), call.tensors, query, *tokens, scale=call.far_scale, normalize=False, cut=cut
    )
    if call.beta is not None:
        part = part._replace(log=part.log + in_dtype(call.beta, part.log.dtype).view(1, -1, 1))
    if call.is_causal:
        return [part], state
    count = key.shape[0]
    left = Part(*(None if x is None else x.narrow(0, 0, count) for x in part))  # type: ignore[arg-type]
    right = Part(*(None if x is None else x.narrow(0, count, count).flip(2) for x in part))  # type: ignore[arg-type]
    return [left, right], state


def _delayed(key: Tensor, value: Tensor, real: Tensor, delay: int) -> list[Tensor]:
    """Keys, values and which of them are hidden, all of them so many tokens later; hidden ones are 0."""
    length = key.shape[2]
    pair = (x.masked_fill(by_token(~real), 0) for x in (key, value))
    key, value = (F.pad(x, (0, 0, delay, 0)).narrow(2, 0, length) for x in pair)
    return [key, value, ~F.pad(real, (delay, 0)).narrow(1, 0, length)]


NOTHING = -EMPTY  # log denominator of a row that sees no key: no weight is anything against it


def merge(a: Part, b: Part) -> Part:
    """The sums of both; ``a.num`` and ``b.num`` may be overwritten."""
    log = torch.maximum(a.log, b.log)
    left, right = (a.log - log).exp_(), (b.log - log).exp_()
    den = _sum(left, a.den, right, b.den)
    guard = None
    if a.guard is not None or b.guard is not None:
        guard = _sum(left, a.den if a.guard is None else a.guard, right, b.den if b.guard is None else b.guard)
    num = a.num.mul_(left.unsqueeze(-1)).addcmul_(b.num, right.unsqueeze(-1))
    return Part(num, log, den, guard)


def _sum(left: Tensor, a: Tensor | None, right: Tensor, b: Tensor | None) -> Tensor:
    return (left if a is None else left * a) + (right if b is None else right * b)


def finish(part: Part) -> tuple[Tensor, Tensor, Tensor | None]:
    """Outputs, in the place of the numerators; the log of what they were divided by; where that is the guard.

    Shapes (*, L, E), (*, L) and (*, L). A row that sees no key is zero, and its log denominator is `NOTHING`.
    """
    num, log, den, guard = part
    seen = log > EMPTY / 2
    if den is None:
        return num.mul_(seen.unsqueeze(-1)), log.masked_fill(~seen, NOTHING), None
    guarded = None
    if guard is not None:
        bound = GUARD * guard
        guarded = den < bound
        den = torch.maximum(den, bound)
    seen = seen & (den > torch.finfo(den.dtype).tiny)
    inverse = den.reciprocal().masked_fill_(~seen, 0)
    total = den.log().add_(log).masked_fill_(~seen, NOTHING)
    return num.mul_(inverse.unsqueeze(-1)), total, guarded
