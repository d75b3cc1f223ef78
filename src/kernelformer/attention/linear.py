"""Linear attention: the sums of the keys, and queries that read them; together, or for keys that lie elsewhere.

    state = sum_j phi(k_j) (v_j, 1)          out_i = phi(q_i) . state

`key_sums` gives the state of some keys, (log_mass, mean); `merge_sums` puts the states of several parts of the keys
together; `read_sums` answers queries; `linear_attention` is one after the other. Gradients flow through all of them.
A state may also be where `causal_attention` or near/far attention goes on from.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from kernelformer.attention.blocks import (
    Shapes,
    blocks,
    empty_rows,
    gather_grads,
    grouped,
    hidden_rows,
    put_rows,
    rows_of,
    spans,
    spread,
    visible_pair,
)
from kernelformer.attention.operator import Operator
from kernelformer.attention.plain.attend import plain_key_sums, plain_read_sums
from kernelformer.attention.positive import EMPTY, PositiveSums, bind_sums
from kernelformer.contract import Workspace, compute_dtype, lookup


class _Blocks:
    """The arguments of an operator with what its blocks of samples share."""

    spec: Any
    tensors: Sequence[Tensor]
    scale: float
    normalize: bool
    s: Shapes
    work: Workspace
    parts = False

    def sums(self, block: slice, learn: bool) -> PositiveSums:
        """Sums of the map, bound to the rows of a block of samples."""
        bound = spread(self.tensors, block, block.stop - block.start, self.s.G)
        return bind_sums(self.spec, bound, self.scale, self.normalize, learn, self.work, self.parts)


class _Keys(_Blocks):
    """The arguments of `key_sums`."""

    def __init__(self, arguments: Sequence[Any]) -> None:
        self.key, self.value, self.key_mask, self.tensors, spec, self.scale, self.normalize, self.parts = arguments
        self.spec = lookup(spec)
        B, G, S, D = self.key.shape
        self.s = Shapes(B, G, G, S, S, D, self.value.shape[3], self.spec.feature_dim(self.tensors, D))
        self.work = Workspace(compute_dtype(self.key.dtype), self.key.device)

    def chunks(self, block: slice) -> Iterator[tuple[slice, Tensor, Tensor, Tensor | None]]:
        """The place of each chunk, its keys (N, C, D) and values (N, C, E), and a mask of the hidden ones (N, C)."""
        s, hidden, mask = self.s, None, self.key_mask
        k5, v5 = grouped(self.key[block], s.G), grouped(self.value[block], s.G)
        for start, end in spans(s.S, s.chunk(block.stop - block.start, s.G)):
            at = slice(start, end)
            k, v = rows_of(k5[:, :, :, at], "k", self.work), rows_of(v5[:, :, :, at], "v", self.work)
            if mask is not None:  # most masks hide keys in a few chunks only
                hidden = None if bool(mask[block, at].all()) else hidden_rows(mask, block, at, s.G, 1, end - start)
            yield at, *((k, v) if hidden is None else visible_pair(k, v, hidden)), hidden


def _sums(*arguments: Any) -> list[Tensor]:
    call = _Keys(arguments)
    like = call.key.new_empty(0, dtype=call.work.dtype)
    state = PositiveSums.empty((call.s.B, call.s.G), call.s.M, call.s.E, like)
    for block in blocks(call.s):
        sums, rows = call.sums(block, False), [state[0][block].flatten(0, 1), state[1][block].flatten(0, 1)]
        for _, k, v, hidden in call.chunks(block):
            sums.absorb(rows, k, v, hidden)
    return state


def _fake_sums(*arguments: Any) -> list[Tensor]:
    call = _Keys(arguments)
    like = call.key.new_empty(0, dtype=call.work.dtype)
    return [like.new_empty(call.s.B, call.s.G, call.s.M, x) for x in (1, call.s.E)]


def _sums_backward(*arguments: Any) -> tuple[Tensor, Tensor, list[Tensor]]:
    given, state, *rest, learn = arguments
    call = _Keys(rest)
    dk, dv = (empty_rows(x, x.shape[-1]) for x in (call.key, call.value))
    totals = [torch.zeros_like(x) for x in call.tensors] if learn else []
    for block in blocks(call.s):
        sums = call.sums(block, learn)
        rows, grads = ([x[block].flatten(0, 1) for x in y] for y in (state, given))
        grads, targets = sums.grads_in(rows, grads), [grouped(x[block], call.s.G) for x in (dk, dv)]
        for at, k, v, hidden in call.chunks(block):
            pair = visible_pair(*sums.absorb_backward(rows, grads, k, v, hidden), hidden)
            for target, part in zip(targets, pair, strict=True):
                put_rows(target[:, :, :, at], part)
        if learn:
            gather_grads(totals, sums.chunks.tensor_grads(), block, block.stop - block.start, call.s.G)
    return dk, dv, totals


SUMS = Operator(
    "key_sums",
    inputs="Tensor key, Tensor value, Tensor? key_mask, Tensor[] tensors, str spec, float scale, bool normalize, "
    "bool parts",
    outputs="Tensor[] state",
    forward=_sums,
    fake=_fake_sums,
    backward=_sums_backward,
    learned="key, value, tensors",
    plain=plain_key_sums,
)


class _Queries(_Blocks):
    """The arguments of `read_sums`."""

    def __init__(self, arguments: Sequence[Any]) -> None:
        self.query, self.tensors, self.state, spec, self.scale, self.normalize = arguments
        self.spec = lookup(spec)
        B, H, L, D = self.query.shape
        _, G, M, E = self.state[1].shape
        self.s = Shapes(B, H, G, L, L, D, E, M)
        self.work = Workspace(compute_dtype(self.query.dtype), self.query.device)

    def chunks(self, block: slice, *tensors: Tensor) -> Iterator[tuple[slice, list[Tensor]]]:
        """The place of each chunk, and its rows (N, R C, X) of tensors (B, H, L, X)."""
        pieces = [grouped(x[block], self.s.G) for x in tensors]
        for start, end in spans(self.s.L, self.s.chunk(block.stop - block.start, self.s.H)):
            at = slice(start, end)
            yield at, [rows_of(x[:, :, :, at], f"rows {i}", self.work) for i, x in enumerate(pieces)]


def _read(*arguments: Any) -> Tensor:
    call = _Queries(arguments)
    out = empty_rows(call.query, call.s.E)
    for block in blocks(call.s):
        sums, rows = call.sums(block, False), [x[block].flatten(0, 1) for x in call.state]
        target = grouped(out[block], call.s.G)
        for at, (x,) in call.chunks(block, call.query):
            put_rows(target[:, :, :, at], sums.read(rows, x))
    return out


def _fake_read(*arguments: Any) -> Tensor:
    call = _Queries(arguments)
    return empty_rows(call.query, call.s.E)


def _read_backward(*arguments: Any) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    grad, out, *rest, learn = arguments
    call = _Queries(rest)
    dq, state_grads = empty_rows(call.query, call.s.D), [torch.empty_like(x) for x in call.state]
    totals = [torch.zeros_like(x) for x in call.tensors] if learn else []
    for block in blocks(call.s):
        sums, rows = call.sums(block, learn), [x[block].flatten(0, 1) for x in call.state]
        grads, target = sums.zero_grads(rows), grouped(dq[block], call.s.G)
        for at, (x, g, y) in call.chunks(block, call.query, grad, out):
            put_rows(target[:, :, :, at], sums.read_backward(rows, grads, x, g, y))
        for whole, part in zip(state_grads, sums.grads_out(rows, grads), strict=True):
            whole[block] = part.view(whole[block].shape)
        if learn:
            gather_grads(totals, sums.chunks.tensor_grads(), block, block.stop - block.start, call.s.G)
    return dq, totals, state_grads


READ = Operator(
    "read_sums",
    inputs="Tensor query, Tensor[] tensors, Tensor[] state, str spec, float scale, bool normalize",
    outputs="Tensor out",
    forward=_read,
    fake=_fake_read,
    backward=_read_backward,
    learned="query, tensors, state",
    plain=plain_read_sums,
)


def key_sums(
    key: Tensor,
    value: Tensor,
    *,
    spec: str,
    tensors: Sequence[Tensor],
    scale: float,
    key_mask: Tensor | None = None,
    normalize: bool = True,
    parts: bool = False,
) -> list[Tensor]:
    """The state of some keys, (B, G, ...) each: log_mass and mean; arguments as those of `linear_attention`.

    With ``parts`` it will be merged with weights of another kind, so that nothing is left out that would cancel.
    """
    state: list[Tensor] = SUMS.forward(key, value, key_mask, list(tensors), spec, scale, normalize, parts)
    return state


def read_sums(
    query: Tensor,
    state: Sequence[Tensor],
    *,
    spec: str,
    tensors: Sequence[Tensor],
    scale: float,
    normalize: bool = True,
) -> Tensor:
    """Attend to the keys of a state: (B, H, L, D) -> (B, H, L, E); arguments as those of `key_sums`."""
    dtype = compute_dtype(query.dtype)
    out: Tensor = READ.forward(query, list(tensors), [x.to(dtype) for x in state], spec, scale, normalize)
    return out


def linear_attention(
    query: Tensor, key: Tensor, value: Tensor, *, key_mask: Tensor | None = None, **how: Any
) -> Tensor:
    """Attend to all keys.

    Args:
        query: (B, H, L, D).
        key: (B, G, S, D), G divides H.
        value: (B, G, S, E).
        spec: of the map, as `contract.intern_formula` names it.
        tensors: of the map, (B or 1, G or 1, ...) in the dtype of the arithmetic.
        scale: the map sees ``sqrt(scale) x``.
        key_mask: (B, S) bool, True = attend.
        normalize: divide by the sum of the weights.

    Returns:
        (B, H, L, E) in the dtype of the query; rows without a visible key are zero.
    """
    return read_sums(query, key_sums(key, value, key_mask=key_mask, **how), **how)


def _linear(*arguments: Any) -> tuple[Tensor, list[Tensor]]:
    query, key, value, key_mask, tensors, spec, scale, normalize = arguments
    state = SUMS.forward(key, value, key_mask, tensors, spec, scale, normalize, False)
    return READ.forward(query, tensors, state, spec, scale, normalize), state


# The name in graphs of earlier versions.
_library = torch.library.Library("kernelformer", "FRAGMENT")
_library.define(
    "linear_attention(Tensor query, Tensor key, Tensor value, Tensor? key_mask, Tensor[] tensors, str spec, "
    "float scale, bool normalize) -> (Tensor, Tensor[])"
)
_library.impl("linear_attention", _linear, "CompositeImplicitAutograd")


def merge_sums(states: Sequence[Tensor], used: Tensor, positive: bool) -> list[Tensor]:
    """The state of several parts of the keys together.

        log_mass = logsumexp_r log_mass_r          mean = sum_r e^(log_mass_r - log_mass) mean_r

    or, of a map by its values, sums that are brought to the largest log scale among them. The tensors of ``states`` are
    (R, B, G, ...) of R parts, of which those ``used``, (R) or (R, B) bool, count; none gives the state of no keys.
    """
    used = used.view(*used.shape, *[1] * (states[0].dim() - used.dim()))
    if positive:
        log_mass = torch.where(used, states[0], EMPTY)
        mean = (log_mass.softmax(0) * torch.where(used, states[1], 0)).sum(0)
        # Above EMPTY a sum of masses; the logarithm of how many parts are empty must not show.
        return [log_mass.logsumexp(0), mean]
    # The output depends on e^log_scale times the sums only: the scale is no degree of freedom and has no gradient.
    scales = torch.where(used, states[0].detach(), EMPTY)
    top = scales.amax(0)
    factor = torch.where(used, (scales - top).exp(), 0)
    return [top, *((factor * torch.where(used, x, 0)).sum(0) for x in states[1:])]


def faded(state: Sequence[Tensor], decay: Tensor) -> list[Tensor]:
    """The state with ``decay`` (G, or what goes with (B, G)) taken off the logarithms of all its weights."""
    log = state[0] - decay.view(*decay.shape, 1, 1).to(state[0].dtype)
    return [log.clamp_min(EMPTY), *state[1:]]
