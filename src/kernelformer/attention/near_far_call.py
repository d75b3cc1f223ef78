"""One call of near/far attention, its flat form, which the torch operators take, and the passes over its groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernelformer.attention.blocks import (
    Pieces,
    Shapes,
    gather_grads,
    grouped,
    hidden_rows,
    rows_of,
    spans,
    spread,
    visible_pair,
)
from kernelformer.attention.engine import CausalGrads, Chunks, Engine, Merged, Part
from kernelformer.attention.fading import fading
from kernelformer.attention.families import make_engine
from kernelformer.attention.near import Near, NearBias, Sinks, shapes_of
from kernelformer.attention.positive import EMPTY
from kernelformer.attention.reference import GUARD
from kernelformer.contract import SignedSpec, Workspace, compute_dtype, lookup

# The operators' arguments for a call, in the order of `NearFarCall.tensor_arguments` and `NearFarCall.settings`.
TENSORS = (
    "Tensor query, Tensor key, Tensor value, Tensor? key_mask, Tensor? far_mask, Tensor[] sinks, Tensor[] bias, "
    "Tensor? seed, Tensor[] tensors, Tensor? beta, Tensor[] state, Tensor[] right_state"
)
SETTINGS = (
    "str spec, float scale, float far_scale, bool is_causal, SymInt window, SymInt offset, float dropout, "
    "bool own_sinks"
)
NAMES = [x.split(" ")[1] for x in f"{TENSORS}, {SETTINGS}".split(", ")]
NUM_TENSORS = TENSORS.count(", ") + 1


@dataclass(frozen=True, kw_only=True)
class NearFarCall:
    """The inputs of one call.

    Args:
        query: (B, H, L, D).
        key: (B, G, S, D), G divides H; query i stands at key i + offset.
        value: (B, G, S, E).
        key_mask: (B, S) bool, True = attend.
        far_mask: the same without the sinks.
        sinks: what `near.Sinks` holds, or nothing.
        bias: what `near.NearBias` holds, or nothing.
        seed: of the dropped weights, () int64; None: none are dropped.
        tensors: of the map, (B or 1, G or 1, ...) in the dtype of the arithmetic.
        beta: (H), the logarithm of a factor of the far part.
        state: sums of earlier far keys, (B, G, ...) each; nothing: there are none, or no far part. With a slope their
            logarithms are relative to the key that comes ``window`` before the first query.
        right_state: sums of later far keys, mirrored: relative to the key ``max(window, 1)`` after the last query.
        spec: of the map, as `contract.intern_formula` names it; empty: there is no far part.
        scale: of q . k in the near part.
        far_scale: the map sees ``sqrt(far_scale) x``.
        is_causal: key j is visible to query i iff j <= i + offset.
        window: w; 0 for sinks alone.
        offset: keys before the first query.
        dropout: share of the near weights that is dropped.
        own_sinks: the sinks are keys of this call, and what they get goes to those. The gradient of picking them would
            be a tensor as large as the keys.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    key_mask: Tensor | None
    far_mask: Tensor | None
    sinks: Sequence[Tensor]
    bias: Sequence[Tensor]
    seed: Tensor | None
    tensors: Sequence[Tensor]
    beta: Tensor | None
    state: Sequence[Tensor]
    right_state: Sequence[Tensor]
    spec: str
    scale: float
    far_scale: float
    is_causal: bool
    window: int
    offset: int
    dropout: float
    own_sinks: bool

    @property
    def tensor_arguments(self) -> tuple[Any, ...]:
        """The arguments of an operator that `TENSORS` declares."""
        given = (getattr(self, name) for name in NAMES[:NUM_TENSORS])
        return tuple(list(x) if isinstance(x, list | tuple) else x for x in given)

    @property
    def settings(self) -> tuple[Any, ...]:
        """The arguments of an operator that `SETTINGS` declares."""
        return tuple(getattr(self, name) for name in NAMES[NUM_TENSORS:])

    @staticmethod
    def of(arguments: Sequence[Any]) -> NearFarCall:
        """The call that an operator's arguments stand for."""
        return NearFarCall(**dict(zip(NAMES, arguments, strict=True)))

    @property
    def sides(self) -> tuple[bool, ...]:
        """The passes of the far part: from the left, and mirrored."""
        return () if not self.spec else (False,) if self.is_causal else (False, True)

    @property
    def features(self) -> int:
        """M; 0 without a far part."""
        return lookup(self.spec).feature_dim(self.tensors, self.query.shape[3]) if self.spec else 0

    @property
    def shapes(self) -> Shapes:
        """Sizes of the call, by its widest buffer."""
        sinks = self.sinks[2].shape[1] if self.sinks else 0
        return shapes_of(self.query, self.key, self.value, self.features, self.window, self.is_causal, sinks)

    @property
    def guarded(self) -> bool:
        """Whether a row may be divided by the guard of a signed map."""
        known = lookup(self.spec) if self.spec else None
        return isinstance(known, SignedSpec) and known.guarded


class Run:
    """One call with what its groups share: buffers, tensors by key head, and the near part."""

    def __init__(self, call: NearFarCall) -> None:
        self.call, self.s = call, call.shapes
        self.dtype = compute_dtype(call.query.dtype)
        self.work = Workspace(self.dtype, call.query.device)
        self.q5, self.k5, self.v5 = (grouped(x, self.s.G) for x in (call.query, call.key, call.value))
        self.pieces = Pieces(self.s, None, self.work, length=self.s.L)
        self.sinks = Sinks(*call.sinks) if call.sinks else None
        self.bias = NearBias(*call.bias) if call.bias else None
        self.near = Near(
            self.pieces,
            scale=call.scale,
            window=call.window,
            offset=call.offset,
            is_causal=call.is_causal,
            key_mask=call.key_mask,
            sinks=self.sinks,
            bias=self.bias,
            dropout=call.dropout,
            seed=0 if call.seed is None else int(call.seed),
        )
        # The log factor of the far part on each side of a query, (2, H).
        self.far_logs = call.query.new_zeros(2, self.s.H, dtype=self.dtype)
        if call.beta is not None:
            self.far_logs = self.far_logs + call.beta.to(self.dtype)
        if self.bias is not None:
            self.far_logs = self.far_logs + self.bias.tails.to(self.dtype).clamp_min(EMPTY)

    def blocks(self) -> list[slice]:
        """Blocks of samples."""
        return [slice(first, last) for first, last in spans(self.s.B, self.pieces.samples)]

    def windows(self, block: slice, start: int) -> tuple[Tensor, Tensor]:
        """The near keys and values of a group, in buffers that the far part takes when the near part is done."""
        sinks = (None, None) if self.sinks is None else self.sinks[:2]
        k, v = (
            self.near.windows(name, x, sink, block, start)
            for name, x, sink in zip(("keys", "queries"), (self.call.key, self.call.value), sinks, strict=True)
        )
        return k, v

    def by_key_head(self, x: Tensor) -> Tensor:
        """A number per query (B, H, L) as (B, G, R, L, 1), a view."""
        return grouped(x.unsqueeze(3), self.s.G)


class Side:
    """One pass of the far part over some samples.

    Args:
        run: the call.
        block: of samples.
        mirror: over the keys after the query, from the end.
        learn: collect the gradients of the map's tensors.
    """

    def __init__(self, run: Run, block: slice, mirror: bool, learn: bool = False) -> None:
        call, s = run.call, run.s
        self.run, self.block, self.count, self.mirror, self.learn = run, block, block.stop - block.start, mirror, learn
        first = s.S - s.L - call.offset - max(call.window, 1) if mirror else call.offset - call.window
        self.pieces = Pieces(s, call.far_mask, run.work, length=s.L, shift=first, mirror=mirror)
        self.slope: Tensor | None = None  # (N, 1, 1), where the bias goes on falling
        if run.bias is not None and run.bias.slope is not None:
            self.slope = run.bias.slope.to(run.dtype).repeat(self.count).view(-1, 1, 1)
        self._tensor_grads: list[Callable[[], list[Tensor]]] = []
        self.engine = self._engine(self.pieces.together)

    def _engine(self, chunks: int) -> Engine:
        call, s = self.run.call, self.run.s
        bound = spread(call.tensors, self.block, self.count, s.G, chunks)
        spec, work = lookup(call.spec), self.run.work
        engine, grads = make_engine(spec, bound, call.far_scale, True, self.learn, work, parts=True)
        self._tensor_grads.append(grads)
        return engine if self.slope is None else fading(engine)

    def _fade(self, x: Tensor, first: int, sign: float, chunks: int = 1) -> Tensor:
        """Rows (N c, C, D) with ``sign slope t`` as their last coordinate, t counting tokens from ``first``."""
        if self.slope is None:
            return x
        tokens = torch.arange(first, first + chunks * x.shape[1], device=x.device, dtype=x.dtype)
        logs = (sign * self.slope.squeeze(2) * tokens).view(x.shape[0], -1, 1)
        return torch.cat([x, logs], 2)

    def add_tensor_grads(self, totals: list[Tensor]) -> None:
        """Add the gradients of the map's tensors, if they are to be learned."""
        for grads in self._tensor_grads if self.learn else ():
            gather_grads(totals, grads(), self.block, self.count, self.run.s.G)

    def begin(self) -> list[Tensor]:
        """The sums before the first group, (N, ...) each: the state's, and the keys that every query sees."""
        call = self.run.call
        given = call.right_state if self.mirror else call.state
        if given:
            rows = [x[self.block].flatten(0, 1) for x in given]
        else:
            like = call.query.new_empty(0, dtype=self.run.dtype)
            rows = self.engine.empty((self.count * self.run.s.G,), call.features, call.value.shape[3], like)
        if self.pieces.shift > 0:
            engine, rows = self._engine(1), [x.clone() for x in rows]
            for k, v, hidden, _ in self._first_keys():
                engine.absorb(rows, k, v, hidden)
        return rows

    def begin_backward(self, sums: Sequence[Tensor], grads: list[Tensor], dk: Tensor, dv: Tensor) -> list[Tensor]:
        """Gradients of the state, from those of the sums before the first group; adds to those of the first keys."""
        if self.pieces.shift > 0:
            engine = self._engine(1)
            for k, v, hidden, at in self._first_keys():
                pair = visible_pair(*engine.absorb_backward(sums, grads, k, v, hidden), hidden)
                for target, part in zip((dk, dv), pair, strict=True):
                    piece = target[self.block, :, at]
                    rows = part[..., : piece.shape[3]].reshape(piece.shape)
                    piece.add_(rows.flip(2) if self.mirror else rows)
        return self.engine.grads_out(sums, grads)

    def _first_keys(self) -> Iterator[tuple[Tensor, Tensor, Tensor | None, slice]]:
        """The keys that every query sees, chunk by chunk: keys, values, which are hidden, and where they are."""
        run, s = self.run, self.run.s
        for start, end in spans(max(0, min(self.pieces.shift, s.S)), s.chunk(self.count, s.G)):
            at = slice(s.S - end, s.S - start) if self.mirror else slice(start, end)
            hidden = hidden_rows(run.call.far_mask, self.block, at, s.G, 1, end - start)
            k, v = (rows_of(x[self.block, :, :, at], n, run.work) for x, n in ((run.k5, "k"), (run.v5, "v")))
            k, v = visible_pair(k, v, hidden)
            if self.mirror:
                k, v, hidden = k.flip(1), v.flip(1), None if hidden is None else hidden.flip(1)
            yield self._fade(k, start - self.pieces.shift, 1.0), v, hidden, at

    def _inputs(self, xq: Tensor, start: int, end: int) -> Chunks:
        hidden = self.pieces.hidden(self.block, self.count, start, end)
        named = (("k", self.run.k5), ("v", self.run.v5))
        k, v = (self.pieces.key_rows(n, x, self.block, start, end) for n, x in named)
        k, v = visible_pair(k, v, hidden)
        xq, k = (self._fade(x, 0, sign, self.pieces.together) for x, sign in ((xq, -1.0), (k, 1.0)))
        return Chunks(xq, k, v, hidden, self.pieces.mask)

    def _logs(self) -> Tensor:
        """The log factor of the rows of a group, (b G c, R C)."""
        s, p = self.run.s, self.pieces
        logs = self.run.far_logs[int(self.mirror)].view(1, s.G, 1, s.R, 1)
        return logs.expand(self.count, s.G, p.together, s.R, p.size).reshape(-1, s.R * p.size)

    def attend(self, rows: list[Tensor], xq: Tensor, start: int, end: int) -> tuple[Part, Tensor, list[Tensor]]:
        """The far part of a group, its row scale, and the sums after it."""
        part, row_scale, rows = self.engine.causal_part(rows, self._inputs(xq, start, end))
        if self.slope is not None:  # sums are relative to the next query
            rows = [rows[0] - self.slope * (end - start), *rows[1:]]
        return part._replace(log=part.log + self._logs()), row_scale, rows

    def backward(
        self,
        rows: Sequence[Tensor],
        grads: list[Tensor],
        queries: tuple[Tensor, Tensor, Tensor],
        row_scale: Tensor,
        merged: Merged,
        span: tuple[int, int],
    ) -> CausalGrads:
        """Gradients of a group, hidden keys' being 0.

        Args:
            rows: the sums before it.
            grads: of the sums after it.
            queries: queries, gradients of the output, and the output, (b G c, R C, ...) each.
            row_scale: as `attend` returned it.
            merged: what the rows were divided by.
            span: start and end of the group.
        """
        xq, g, y = queries
        inputs = self._inputs(xq, *span)
        own = merged._replace(total=merged.total - self._logs())
        result = self.engine.causal_backward(rows, grads, inputs, g, y, row_scale, own)
        key, value = visible_pair(result.key, result.value, inputs.hidden)
        width = xq.shape[2]
        return result._replace(query=result.query[..., :width], key=key[..., :width], value=value)


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
