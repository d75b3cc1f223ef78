"""How cores attend where a sequence is split over ranks: what each asks of the others, and what it makes of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kernelformer.attention import State
from kernelformer.attention.near import Sinks
from kernelformer.attention.relative.bias_view import Layout
from kernelformer.attention.relative.call import RelativeCall
from kernelformer.attention.relative.direct import relative_attention
from kernelformer.attention.relative.sums import sums_of_state
from kernelformer.attention.sums import read_sums
from kernelformer.contract import compute_dtype, no_autocast
from kernelformer.modules.bad_tokens import BadTokens
from kernelformer.modules.bias import check_tail
from kernelformer.modules.call import Bias, Call
from kernelformer.modules.near_far import Far, NearFarAttention
from kernelformer.modules.near_stream import NO_SINK, Stream
from kernelformer.modules.split_parts import Form, Side
from kernelformer.modules.streaming import prepare_map

if TYPE_CHECKING:
    from kernelformer.modules.core import AttentionCore
    from kernelformer.modules.kernel import KernelCore
    from kernelformer.modules.local import LocalCore


class CoreSplit(ABC):
    """One call of a core on a rank.

    Args:
        core: the method.
        call: checked, with the tokens of this rank; keys are normalized where the core does that.
        tokens: queries and keys on all ranks.
        start: keys on the ranks before this one.

    Attributes:
        form: what is asked of the other ranks.
    """

    core: AttentionCore

    def __init__(self, core: Any, call: Call, tokens: tuple[int, int], start: int) -> None:
        self.core, self.start = core, start
        self.call = call
        if call.bias is not None:
            # Tokens before this rank's: all where packed rows count positions, else those that are one by one.
            is_packed = call.segment_ids is not None
            past = start if core.has_near and is_packed else min(call.bias.window or 0, start)
            later = max(0, tokens[1] - start - call.key.shape[2])
            self.call = replace(call, bias=around(call.bias, call, core, tokens, past, later))
        self.form = self._form()

    @staticmethod
    def refusal(core: Any, call: Call) -> ValueError | None:
        """Why a core cannot make this call over ranks; None where it can."""
        bias = call.bias
        if bias is not None and (bias.layout.rows or bias.window is None):
            what = "a bias on a grid" if bias.layout.rows else "a bias of which no max_distance is known"
            return ValueError(
                f"{what} needs all keys of {core.method!r} one by one, and they are on several ranks; give positions "
                f"with max_distance=..., or scheme='alibi'."
            )
        if call.algorithm == "parallel":
            return ValueError("algorithm='parallel' is for one process; leave it out, or take 'chunked'.")
        if bias is not None and bias.algorithm not in (None, "windowed"):
            return ValueError(f"algorithm={bias.algorithm!r} is for one process; leave it out, or take 'windowed'.")
        return None

    @abstractmethod
    def _form(self) -> Form: ...

    @abstractmethod
    def state(self, left: Side, sinks: Sinks | None) -> State:
        """The state before this rank's tokens."""

    def goes_on(self) -> bool:
        """Whether a causal call is also a case of `between`, with nothing after it, in less time than by a state."""
        return False

    @abstractmethod
    def between(self, call: Call, own: Sequence[Tensor], sides: tuple[Side, Side], sinks: Sinks | None) -> Tensor:
        """Attend to a call's keys and to those on both sides, whose sums in the middle are ``own``: (B, H, L, E)."""


def around(bias: Bias, call: Call, core: AttentionCore, tokens: tuple[int, int], past: int, later: int) -> Bias:
    """A bias for the tokens of this rank and those next to them, from one over the whole sequence.

    Args:
        bias: over all distances, (H, queries + keys - 1) on all ranks, or up to the window, (H, 2 w + 1).
        call: of this rank.
        core: which may have a window of its own.
        tokens: queries and keys on all ranks.
        past: tokens before this rank's that it has to be for.
        later: tokens after this rank's, of which as many as the window are its neighbours.
    """
    assert bias.window is not None
    window, entries = bias.window, bias.table.shape[1]
    queries, keys = tokens
    whole = max(0, queries + keys - 1)
    if entries == whole:  # first: of a cross-attention both may be as many
        middle = queries - 1
        check_tail(bias.table, middle, window, bias.slope, call.is_causal)
    elif entries == 2 * window + 1:
        middle = window
    else:
        raise ValueError(
            f"bias must be over all distances of the whole sequence, (heads, {whole}) for {queries} "
            f"queries and {keys} keys on all ranks, or up to max_distance={window}, (heads, {2 * window + 1}), got "
            f"{tuple(bias.table.shape)}."
        )
    near = getattr(core, "near", None)
    if isinstance(near, NearFarAttention):  # by the whole bias, so that all ranks see the same
        near.check_bias(replace(bias, layout=Layout(middle + 1, entries - middle, 0)), call.is_causal)
    length, count = call.query.shape[2], call.key.shape[2]
    if not call.is_causal:
        count += min(window, later)
    reach = past + count  # keys that the bias is for
    distance = torch.arange(max(0, length + reach - 1), device=bias.table.device) - (past + length - 1)
    index = (middle + distance.clamp(-window, window)).clamp(0, max(0, entries - 1))
    table = bias.table[:, index]
    if bias.slope is not None:
        beyond = (distance.abs() - window).clamp_min(0)
        table = table - bias.slope.to(table.dtype).unsqueeze(1) * beyond
    return replace(bias, table=table, layout=Layout(length, reach, past))


def near_state(left: Side, sinks: Sinks | None, start: int, made_by: tuple[tuple[str, object], ...]) -> State:
    """A stream's state, from what is on the left."""
    if sinks is not None:
        sinks = sinks._replace(position=sinks.position.masked_fill(~sinks.visible, NO_SINK))
    return State(Stream(left.sums, left.tokens, sinks, start).tensors(), start, made_by)


def joined(form: Form, call: Call, sides: tuple[Side, Side]) -> Call:
    """The call with the tokens next to it on both sides, in the dtype of the arithmetic."""
    dtype = compute_dtype(call.query.dtype)
    before, after = (x.tokens for x in sides)
    key, value = (
        torch.cat([x, y.to(dtype), z], 2) for x, y, z in zip(before[:2], (form.key, form.value), after[:2], strict=True)
    )
    mask = None
    if call.key_mask is not None or not bool(before[2].all() & after[2].all()):
        own = before[2].new_ones(key.shape[0], call.key.shape[2]) if call.key_mask is None else call.key_mask
        mask = torch.cat([before[2], own, after[2]], 1)
    return replace(call, query=call.query.to(dtype), key=key, value=value, key_mask=mask)


def near_between(
    near: NearFarAttention,
    far: Far | None,
    form: Form,
    call: Call,
    sides: tuple[Side, Side],
    sinks: Sinks | None,
    start: int,
) -> Tensor:
    """Near tokens exactly, this rank's and those next to them; far ones by the sums on either side."""
    offset = sides[0].tokens[2].shape[1]
    if sinks is not None:
        sinks = sinks._replace(position=sinks.position - (start - offset))
    later = sides[1].sums
    if not near.window:  # the first key on the right is one away, not none
        later = form.fade(later, -1)
    out, _ = near.run(joined(form, call, sides), far, sinks, sides[0].sums, offset, later)
    return out


class LocalSplit(CoreSplit):
    """Near tokens alone."""

    core: LocalCore

    def _form(self) -> Form:
        return Form(self.call.key, self.call.value, reach=self.core.window, sinks=self.core.sinks)

    def state(self, left: Side, sinks: Sinks | None) -> State:
        """See `CoreSplit`."""
        made_by = self.core._made_by(self.call.scale) + self.core.near.made_by(self.call)
        return near_state(left, sinks, self.start, made_by)

    def goes_on(self) -> bool:
        """See `CoreSplit`: no mask has to be made where nothing is hidden; bad tokens are a stream's to deal with."""
        return BadTokens.of(self.call) is None

    def between(self, call: Call, own: Sequence[Tensor], sides: tuple[Side, Side], sinks: Sinks | None) -> Tensor:
        """See `CoreSplit`."""
        with no_autocast(call.query.device.type):
            return near_between(self.core.near, None, self.form, call, sides, sinks, self.start)


class KernelSplit(CoreSplit):
    """Sums of a feature map, and near tokens where there are any: of a window, or of a bias."""

    core: KernelCore

    @staticmethod
    def refusal(core: Any, call: Call) -> ValueError | None:
        """Why a core cannot make this call over ranks; None where it can."""
        phi = core.feature_map
        if phi.sees_sequence:
            return ValueError(
                f"{core.method!r} takes its landmarks from the whole sequence, which is on several ranks; use "
                f"{core.causal_way}, or a method such as 'favor+'."
            )
        if phi.aligns:
            return ValueError(
                f"{core.method!r} with align=True moves keys by a mean over the whole sequence, which is on several "
                f"ranks; build it with align=False."
            )
        return CoreSplit.refusal(core, call)

    def _form(self) -> Form:
        core, call = self.core, self.call
        with no_autocast(call.query.device.type):
            tensors = prepare_map(core, call).tensors
        slope = None if call.bias is None else call.bias.slope
        near = core.near
        if near is not None:
            call, far = core._with_far(call, tensors)
            return Form(
                call.key,
                call.value,
                reach=near.window,
                sinks=near.sinks,
                spec=far.spec,
                tensors=far.tensors,
                scale=call.scale,
                parts=True,
                slope=slope,
            )
        repeat = core.biased.per_head if call.bias is not None else core._per_map_head
        return Form(
            repeat(call.key),
            repeat(call.value),
            reach=0 if call.bias is None else call.bias.window or 0,
            spec=core.feature_map.spec_id if call.bias is None else core.feature_map.spread_spec_id,
            tensors=tensors,
            scale=call.scale,
            normalize=core.normalize,
            slope=slope,
        )

    def state(self, left: Side, sinks: Sinks | None) -> State:
        """See `CoreSplit`."""
        core, call = self.core, self.call
        made_by = core._made_by(call.scale)
        if core.near is not None:
            return near_state(left, sinks, self.start, made_by + core.near.made_by(call))
        if call.bias is None:
            return State(tuple(left.sums), self.start, made_by)
        sums = sums_of_state(left.sums, self.form.positive)
        key, value, mask = left.tokens
        return State((*sums, key, value, mask), mask.shape[1], made_by + core.biased.made_by(call))

    def goes_on(self) -> bool:
        """See `CoreSplit`: no mask has to be made where nothing is hidden; bad tokens are a stream's to deal with."""
        return self.core.has_near and BadTokens.of(self.call) is None

    def between(self, call: Call, own: Sequence[Tensor], sides: tuple[Side, Side], sinks: Sinks | None) -> Tensor:
        """See `CoreSplit`."""
        core, form = self.core, self.form
        with no_autocast(call.query.device.type):
            if core.near is not None:
                far = Far(form.spec, form.tensors, core.beta)
                return near_between(core.near, far, form, call, sides, sinks, self.start)
            if call.bias is not None:
                return self._with_bias(call, call.bias, sides)
            state = form.merged([sides[0].sums, own, sides[1].sums])
            return read_sums(
                call.query, state, spec=form.spec, tensors=form.tensors, scale=form.scale, normalize=form.normalize
            )

    def _with_bias(self, call: Call, bias: Bias, sides: tuple[Side, Side]) -> Tensor:
        form, whole = self.form, joined(self.form, call, sides)
        left, right = (sums_of_state(x.sums, form.positive) for x in sides)
        relative = RelativeCall(
            query=whole.query,
            key=whole.key,
            value=whole.value,
            bias=bias.table,
            spec=form.spec,
            tensors=form.tensors,
            scale=form.scale,
            layout=bias.layout,
            key_mask=whole.key_mask,
            window=bias.window,
            slope=bias.slope,
            state=left,
            right_state=right,
        )
        return relative_attention(relative)[0]
