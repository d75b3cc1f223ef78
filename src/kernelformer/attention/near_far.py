"""Near exactly, far by a kernel, in one normalization, at linear cost.

    out_i = ( sum_near e^(s_ij) v_j + e^(beta + tail) sum_far phi(q_i) . phi(k_j) v_j ) / ( the same sums with v = 1 )

The near part is exact softmax on the last w keys and the sinks (`near`). The far part is causal linear attention over
keys that are delayed by w (`engine`), and its mirror image where keys after the query count too; never all keys minus
the near ones, which would cancel. The parts are merged in log space (`merge`), group by group, in one output.

The backward pass keeps the inputs, the output, the log of what each row was divided by, a number per row and side, and
one state per group of chunks. It works from the output: with the share of a pair in all of its row, every part has the
gradient of a softmax.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernelformer.attention import strips
from kernelformer.attention.blocks import Pieces, empty_rows
from kernelformer.attention.engine import Merged, Part
from kernelformer.attention.families import engine_class
from kernelformer.attention.near import NearBias
from kernelformer.attention.near_far_call import (
    SETTINGS,
    TENSORS,
    NearFarCall,
    Run,
    Side,
    finish,
    merge,
)
from kernelformer.attention.operator import Operator
from kernelformer.attention.plain.near_far import plain_outputs
from kernelformer.contract import SignedSpec, compute_dtype, lookup, no_tangents

RESULTS = "Tensor out, Tensor total, Tensor guarded, Tensor[] row_scales, Tensor[] end_state, Tensor[] kept"
NUM_RESULTS = RESULTS.count(", ") + 1
# Of query, key, value, sinks, bias, tensors, beta, state and right_state.
Gradients = tuple[Tensor, Tensor, Tensor, list[Tensor], list[Tensor], list[Tensor], Tensor, list[Tensor], list[Tensor]]


class Results(NamedTuple):
    """What the forward pass returns.

    Args:
        out: (B, H, L, E).
        total: (B, H, L), the log of what a row was divided by.
        guarded: (B, H, L) bool, whether that is the guard; (B, H, 0) where there is none.
        row_scales: (B, H, L) for each side, see `Engine.causal`; for the backward pass.
        end_state: sums of the far keys on the left, (B, G, ...) each.
        kept: (groups, B, G, ...), the sums before each group, side after side; for the backward pass.
    """

    out: Tensor
    total: Tensor
    guarded: Tensor
    row_scales: list[Tensor]
    end_state: list[Tensor]
    kept: list[Tensor]

    @staticmethod
    def empty(call: NearFarCall, keep: bool) -> Results:
        """Room for them."""
        s, dtype, query = call.shapes, compute_dtype(call.query.dtype), call.query
        lead = (s.B, s.H, s.L)
        shapes = engine_class(lookup(call.spec)).state_shapes(call.features, s.E) if call.spec else []
        states = [query.new_empty(s.B, s.G, *x, dtype=dtype) for x in shapes]
        rows, together = s.causal(s.samples())
        groups = -(-s.L // (rows * together))
        return Results(
            empty_rows(query, s.E),
            query.new_empty(lead, dtype=dtype),
            query.new_empty(lead if call.guarded else (s.B, s.H, 0), dtype=torch.bool),
            [query.new_empty(lead, dtype=dtype) for _ in call.sides] if keep else [],
            states,
            [x.new_empty(groups, *x.shape) for _ in call.sides for x in states] if keep else [],
        )

    def states(self, side: int) -> list[Tensor]:
        """The sums that were kept of one side."""
        count = len(self.end_state)
        return self.kept[side * count : (side + 1) * count]


class _Sums:
    """What the rows of a call have summed up between its passes, in the place of its results."""

    def __init__(self, run: Run, results: Results) -> None:
        call, total = run.call, results.total
        self.run, self.results = run, results
        two = len(call.sides) > 1
        self.num = results.out if results.out.dtype == run.dtype else torch.empty_like(results.out, dtype=run.dtype)
        numbers = [total] + ([torch.empty_like(total)] if two else []) + (
            [torch.empty_like(total)] if two and call.guarded else []
        )  # fmt: skip
        self.num5 = self.num.unflatten(1, (run.s.G, -1))
        self.numbers5 = [run.by_key_head(x) for x in numbers]

    def put(self, pieces: Pieces, part: Part, block: slice, span: tuple[int, int]) -> None:
        """Keep the sums of a group for the next pass."""
        pieces.put(self.num5, part.num, block, *span)
        for target, x in zip(self.numbers5, part[1:], strict=False):
            assert x is not None
            pieces.put(target, x.unsqueeze(2), block, *span)

    def take(self, pieces: Pieces, block: slice, span: tuple[int, int]) -> Part:
        """The sums of a group."""
        num = pieces.rows("num", self.num5, block, *span)
        return Part(num, *(pieces.rows(f"sum{i}", x, block, *span).squeeze(2) for i, x in enumerate(self.numbers5)))

    def finish(self, pieces: Pieces, part: Part, block: slice, span: tuple[int, int]) -> None:
        """Write the outputs of a group, and what they were divided by."""
        y, total, guarded = finish(part)
        pieces.put(self.num5, y, block, *span)
        pieces.put(self.numbers5[0], total.unsqueeze(2), block, *span)
        if guarded is not None:
            pieces.put(self.run.by_key_head(self.results.guarded), guarded.unsqueeze(2), block, *span)


def _forward(*arguments: Any) -> tuple[Any, ...]:
    *inputs, keep = arguments
    if in_strips(NearFarCall.of(inputs)):
        return _forward_strips(NearFarCall.of(inputs), keep)
    run = Run(NearFarCall.of(inputs))
    results = Results.empty(run.call, keep)
    sums = _Sums(run, results)
    for block in run.blocks():
        for number in range(max(1, len(run.call.sides))):
            _pass(run, sums, block, number)
    if sums.num is not results.out:
        results.out.copy_(sums.num)
    return tuple(results)


def _pass(run: Run, sums: _Sums, block: slice, number: int) -> None:
    """Go over some samples: the near part and the far keys on the left, or the far keys on the right."""
    results, sides = sums.results, run.call.sides
    side = Side(run, block, sides[number]) if sides else None
    pieces = run.pieces if side is None else side.pieces
    rows = [] if side is None else side.begin()
    for group, span in enumerate(pieces.groups()):
        xq = pieces.rows("q", run.q5, block, *span)
        if number:
            part = sums.take(pieces, block, span)
        else:
            part = run.near.attend(xq, *run.windows(block, span[0]), block, span[0])
        if side is not None:
            for whole, x in zip(results.states(number), rows, strict=False):
                whole[group, block] = x.view(whole[group, block].shape)
            far, row_scale, rows = side.attend(rows, xq, *span)
            part = merge(part, far)
            if results.row_scales:
                scales = run.by_key_head(results.row_scales[number])
                pieces.put(scales, row_scale.unsqueeze(2), block, *span)
        if number + 1 < len(sides):
            sums.put(pieces, part, block, span)
        else:
            sums.finish(pieces, part, block, span)
    for whole, x in zip(results.end_state, rows if number == 0 else (), strict=False):
        whole[block] = x.view(whole[block].shape)


def _fake(*arguments: Any) -> tuple[Any, ...]:
    *inputs, keep = arguments
    if in_strips(NearFarCall.of(inputs)):
        return _unguarded(strips.Results.empty(NearFarCall.of(inputs), keep))
    return tuple(Results.empty(NearFarCall.of(inputs), keep))


def in_strips(call: NearFarCall) -> bool:
    """Whether the far part is positive, and one state stands for both sides of a block."""
    known = lookup(call.spec) if call.spec else None
    slope = NearBias(*call.bias).slope if call.bias else None
    return not isinstance(known, SignedSpec) and (known is None or call.is_causal or slope is None)


def _unguarded(results: strips.Results) -> tuple[Any, ...]:
    nothing = torch.empty_like(results.total[:, :, :0], dtype=torch.bool)
    return results.out, results.total, nothing, *results[2:]


def _forward_strips(call: NearFarCall, keep: bool) -> tuple[Any, ...]:
    results, st = strips.Results.empty(call, keep), strips.Strips(call)
    for block in st.sample_blocks():
        strips.Pass(st, block).forward(results)
    return _unguarded(results)


class _Grads:
    """Gradients of a call."""

    def __init__(self, run: Run, learn: bool) -> None:
        call = run.call
        self.run = run
        self.query, self.key, self.value = (
            torch.zeros_like(x, dtype=run.dtype) for x in (call.query, call.key, call.value)
        )
        self.sinks = [torch.zeros_like(x, dtype=run.dtype) for x in call.sinks[:2]]
        self.tensors = [torch.zeros_like(x) for x in call.tensors] if learn else []
        self.states = [[torch.zeros_like(x) for x in given] for given in (call.state, call.right_state)]
        self.far_logs = torch.zeros_like(run.far_logs)

    def add_near(self, parts: Sequence[Tensor], block: slice, start: int) -> None:
        """Add what a group gives to its near keys and values."""
        for target, sinks, rows in zip((self.key, self.value), self.sinks or (None, None), parts, strict=True):
            self.run.near.add_windows(target, sinks, rows, block, start)

    def results(self) -> Gradients:
        """In the order and the dtypes of the operator."""
        call, near = self.run.call, self.run.near
        given = (call.query, call.key, call.value)
        if call.own_sinks:
            index = call.sinks[2].masked_fill(~call.sinks[3], 0)[:, None, :, None]  # a sink that is not there got 0
            for target, x in zip((self.key, self.value), self.sinks, strict=True):
                target.scatter_add_(2, index.expand(x.shape), x)
        dq, dk, dv = (x.to(y.dtype) for x, y in zip((self.query, self.key, self.value), given, strict=True))
        sinks = [x.to(y.dtype) for x, y in zip(self.sinks, call.sinks, strict=False)]
        bias = [near.band_grad(), near.grad_tails + self.far_logs] if call.bias else []
        left, right = self.states
        return dq, dk, dv, sinks, bias, self.tensors, self.far_logs.sum(0), left, right


def _backward(*arguments: Any) -> Gradients:
    (grad, state_grads), rest, learn = arguments[:2], arguments[2:-2], arguments[-1]
    call = NearFarCall.of(rest[NUM_RESULTS:])
    if in_strips(call):
        st, found = strips.Strips(call, learn), strips.Grads(call, learn)
        kept = strips.Results(*rest[:2], *rest[3:NUM_RESULTS])
        for block in st.sample_blocks():
            strips.Pass(st, block).backward(kept, found, grad, state_grads)
        return found.results()
    results, run = Results(*rest[:NUM_RESULTS]), Run(call)
    grads = _Grads(run, learn)
    for block in run.blocks():
        for number in range(max(1, len(run.call.sides))):
            _backward_pass(run, results, grads, (grad, state_grads), block, number)
    return grads.results()


def _backward_pass(
    run: Run, results: Results, grads: _Grads, given: tuple[Tensor, list[Tensor]], block: slice, number: int
) -> None:
    """The same backwards; every pass has the queries' gradients of its own part."""
    s, sides, grad = run.s, run.call.sides, given[0].unflatten(1, (run.s.G, -1))
    out5, dq5 = (x.unflatten(1, (s.G, -1)) for x in (results.out, grads.query))
    side = Side(run, block, sides[number], bool(grads.tensors)) if sides else None
    pieces = run.pieces if side is None else side.pieces
    states = results.states(number)
    wanted = [] if side is None else _end_grads(side, results, given[1])
    for group, span in reversed(list(enumerate(pieces.groups()))):
        named = {"q": run.q5, "g": grad, "o": out5, "total": run.by_key_head(results.total)}
        xq, g, y, total = (pieces.rows(n, x, block, *span) for n, x in named.items())
        merged = Merged(total.squeeze(2))
        if run.call.guarded:
            flags = pieces.rows("guarded", run.by_key_head(results.guarded), block, *span)
            merged = merged._replace(guarded=flags.squeeze(2) > 0)
        dq = None
        if number == 0:
            near = run.near.backward((xq, *run.windows(block, span[0])), g, y, merged, block, span[0])
            grads.add_near(near[1:], block, span[0])
            dq = near.query
        if side is not None:
            rows = [x[group, block].flatten(0, 1) for x in states]
            scales = pieces.rows("row_scale", run.by_key_head(results.row_scales[number]), block, *span)
            far = side.backward(rows, wanted, (xq, g, y), scales.squeeze(2), merged, span)
            wanted = far.state
            assert far.log is not None
            grads.far_logs[number] += far.log.view(side.count, s.G, -1, s.R, pieces.size).sum((0, 2, 4)).flatten()
            dq = far.query if dq is None else dq.add_(far.query)
            for target, part in ((grads.key, far.key), (grads.value, far.value)):
                pieces.add_keys(target.unsqueeze(2), part, block, *span)
        assert dq is not None
        pieces.put(dq5, dq, block, *span, add=number > 0)
    if side is not None and s.L:
        first = [x[0, block].flatten(0, 1) for x in states]
        start = side.begin_backward(first, wanted, grads.key, grads.value)
        for whole, x in zip(grads.states[number], start, strict=False):
            whole[block] = x.view(whole[block].shape)
        side.add_tensor_grads(grads.tensors)


def _end_grads(side: Side, results: Results, state_grads: list[Tensor]) -> list[Tensor]:
    """Gradients of the sums after the last group; nobody sees those of a mirrored pass."""
    rows = [x[side.block].flatten(0, 1) for x in results.end_state]
    if side.mirror:
        return side.engine.zero_grads(rows)
    return side.engine.grads_in(rows, [x[side.block].flatten(0, 1) for x in state_grads])


def _fake_backward(*arguments: Any) -> Gradients:
    call, learn = NearFarCall.of(arguments[2 + NUM_RESULTS : -2]), arguments[-1]
    dtype = compute_dtype(call.query.dtype)
    made = [torch.empty_like(x) for x in (call.query, call.key, call.value)]
    return (
        made[0],
        made[1],
        made[2],
        [torch.empty_like(x) for x in call.sinks[:2]],
        [torch.empty_like(x, dtype=dtype) for x in call.bias[:2]],
        [torch.empty_like(x) for x in call.tensors] if learn else [],
        call.query.new_empty(call.query.shape[1], dtype=dtype),
        [torch.empty_like(x) for x in call.state],
        [torch.empty_like(x) for x in call.right_state],
    )


OPERATOR = Operator(
    "near_far_attention",
    inputs=f"{TENSORS}, {SETTINGS}, bool keep",
    outputs=RESULTS,
    forward=_forward,
    fake=_fake,
    backward=_backward,
    learned="query, key, value, sinks, bias, tensors, beta, state, right_state",
    given="out, end_state",
    fake_backward=_fake_backward,
    plain=plain_outputs,
)


def near_far_attention(call: NearFarCall) -> tuple[Tensor, list[Tensor]]:
    """Attend to near keys exactly and to far ones through a feature map.

    Args:
        call: the inputs.

    Returns:
        (B, H, L, E) in the dtype of the query, zero where no key is visible, and the sums of the far keys after a
        causal call, (B, G, ...) each.

    Cost: O(L (w + C) (D + E) + L M (D + E)) time for chunks of C queries; memory beyond inputs and outputs is a few
    buffers and a number per row.
    """
    no_tangents(query=call.query, key=call.key, value=call.value, a_parameter_of_the_feature_map=call.tensors)
    no_tangents(bias=call.bias, state=[*call.state, *call.right_state], beta=call.beta, sinks=call.sinks)
    arguments = call.tensor_arguments
    keep = torch.is_grad_enabled() and any(
        x.requires_grad for y in arguments if y is not None for x in (y if isinstance(y, list) else [y])
    )
    out, _, _, _, end, _ = OPERATOR(*arguments, *call.settings, keep)
    return out, end
