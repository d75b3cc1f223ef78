"""Attention over a sequence that is split over ranks: what goes around, and the call that is left to each rank.

1. signatures: a few integers, so that calls that differ are an error on every rank and never a hang;
   with sinks under a mask, or with packed sequences, also where they are
2. the exchange: sums of far tokens and the near ones themselves (`split_cores`)
3. the rank's own tokens, as any stream goes on from a state: causal attention from that of the ranks before, the
   bidirectional one with a state on each side
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import blake2b
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kernelformer.attention import State
from kernelformer.attention.dispatch import read_sums
from kernelformer.attention.near_far_call import Sinks
from kernelformer.attention.ranks import Ranks, RanksError
from kernelformer.attention.relative.call import RelativeCall, sums_of_state
from kernelformer.attention.relative.operator import relative_attention
from kernelformer.contract import compute_dtype, no_autocast
from kernelformer.modules.checks import Call
from kernelformer.modules.packed import NO_ID, Segments, attend_apart, attend_packed
from kernelformer.modules.split_cores import (
    ExchangePlan,
    Message,
    Neighbour,
    Segment,
    around,
    first_sinks,
    incoming,
    no_sums,
    outgoing,
    sums_both_ways,
    sums_one_way,
)
from kernelformer.modules.window import NO_SINK, Far, Stream

if TYPE_CHECKING:
    from kernelformer.modules.core import AttentionCore

FIRST, LAST = 0, 1


class EdgeSegments:
    """First and last segment of every rank's tokens; without segment ids both are all of them.

    Attributes:
        segments: the first and the last one of this rank.
        ids: (R, B, 2), of the first and the last token of every rank, the same number everywhere without segments.
        left: (R, B) bool, whose last segment is this rank's first one and before it.
        right: (R, B) bool, whose first segment is this rank's last one and after it.
        single: (R, B) bool, where both segments are one.
    """

    def __init__(self, call: Call, sinks: int, ranks: Ranks, masked: bool) -> None:
        self.count, device = sinks, call.key.device
        batch, length = call.key.shape[0], call.key.shape[2]
        segments, mask = call.segment_ids, call.key_mask
        if mask is None and (sinks or masked or segments is not None):
            mask = torch.ones(batch, length, dtype=torch.bool, device=device)
        ids = torch.zeros(batch, 2, dtype=torch.int64, device=device)
        masks = [mask, mask]
        if segments is not None:
            ids = torch.stack([segments[:, 0], segments[:, -1]], 1).long() if length else ids + NO_ID
            masks = [None if mask is None else mask & (segments == x.unsqueeze(1)) for x in ids.unbind(1)]
        every = ids.expand(ranks.size, -1, -1)
        index = [ids[:, :0]] * 2
        self.seen = self.index = every[..., :0]
        if sinks or segments is not None:
            if sinks:
                index = [_first_visible(x, sinks) for x in masks if x is not None]
            seen = [torch.zeros_like(ids[:, 0]) if x is None else x.sum(1) for x in masks]
            own = torch.cat([ids, torch.stack(seen, 1), *index], 1)
            numbers = ranks.gather_numbers(own.to(ranks.device)).to(device)
            every, self.seen, self.index = numbers.split([2, 2, 2 * sinks], 2)
            _check_order(every)
        self.ids, here = every, ranks.rank
        self.single = every[..., FIRST] == every[..., LAST]
        place = torch.arange(ranks.size, device=device).unsqueeze(1)
        self.left = (every[..., LAST] == every[here, :, FIRST]) & (place < here)
        self.right = (every[..., FIRST] == every[here, :, LAST]) & (place > here)
        fars = masks
        if sinks:
            before = (self.left * self.seen[..., LAST]).sum(0)  # tokens of the first segment on other ranks
            made = [before, before * self.single[here]]
            own_seen = self.seen[here].unbind(1)
            fars = [
                None if m is None else _without(m, i, n, b, sinks)
                for m, i, n, b in zip(masks, index, own_seen, made, strict=True)
            ]
        self.segments = [Segment(m, f, i) for m, f, i in zip(masks, fars, index, strict=True)]

    def first_visible(self, which: int, starts: list[int]) -> tuple[Tensor, Tensor]:
        """Mask of a segment's first tokens that exist, (R, B, sinks), and their positions in the sequence."""
        number = torch.arange(self.count, device=self.index.device)
        valid = number < self.seen[..., which].unsqueeze(2)
        place = self.index[..., which * self.count : (which + 1) * self.count]
        return valid, place + torch.tensor(starts[:-1], device=place.device).view(-1, 1, 1)


def _first_visible(mask: Tensor, count: int) -> Tensor:
    """Places (B, count) of the first visible tokens; where there are fewer, beyond the end."""
    number = torch.arange(1, count + 1, device=mask.device).expand(mask.shape[0], -1).contiguous()
    return torch.searchsorted(mask.cumsum(1).contiguous(), number)


def _without(mask: Tensor, index: Tensor, seen: Tensor, before: Tensor, count: int) -> Tensor:
    """A mask (B, S) without the sinks among its first tokens, where ``before`` (B) others come first."""
    number = torch.arange(count, device=mask.device)
    is_sink = (number < seen.unsqueeze(1)) & (number + before.unsqueeze(1) < count)
    length = mask.shape[1]
    place = torch.where(is_sink, index, length)  # one more column takes what is elsewhere
    return torch.nn.functional.pad(mask, (0, 1)).scatter(1, place, False)[:, :length]


def _check_order(ids: Tensor) -> None:
    """Raise on all ranks where segment ids decrease from one to the next."""
    last = None
    for rank, (first, end) in enumerate(zip(ids[..., FIRST], ids[..., LAST], strict=True)):
        if not bool((first > NO_ID).all()):  # no tokens
            continue
        if last is not None and bool((first < last[1]).any()):
            row = int((first < last[1]).nonzero()[0])
            raise ValueError(
                f"segment_ids must not decrease along a row, got {int(last[1][row])} at the end of rank {last[0]} and "
                f"{int(first[row])} at the start of rank {rank} in row {row}; number the sequences of a row in their "
                f"order over all ranks."
            )
        last = (rank, end)


Signature = dict[str, int]  # numbers that ranks compare before they exchange anything, by name
FREE = ("queries", "keys", "masked")  # of them may differ between ranks
METHOD, WEIGHTS = "the method or its settings", "the weights of their kernels"
BIAS = "the bias, its max_distance or its slope"
CODED = (METHOD, BIAS, WEIGHTS, "dtype")  # numbers that say nothing, so that a message leaves them out
GRADIENTS = "whether keys and values need gradients"


# Floating point types by integers of the same size.
_INTEGERS = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
}


def _digest(*values: object) -> int:
    """A number that stands for some values."""
    return int.from_bytes(blake2b(repr(values).encode(), digest_size=7).digest(), "little")


def _signature(core: AttentionCore, call: Call, is_checked: bool) -> Signature:
    q, k, v, bias = call.query, call.key, call.value, call.bias
    settings = dict(getattr(getattr(core, "feature_map", None), "identity", {}))
    seed, draw = (int(settings.pop(name, 0)) for name in ("seed", "draw number"))
    others = ("window", "sinks", "normalize", "normalize_qk", "near_scale", "attention_dropout")
    settings |= {name: getattr(core, name, None) for name in others}
    needs = torch.is_grad_enabled() and any(
        x.requires_grad for x in (k, v, *core.parameters(), *(() if bias is None else (bias.table,)))
    )
    table = () if bias is None else (tuple(bias.table.shape), bias.window, _checksum(bias.table, bias.slope))
    return {
        "the number of samples": q.shape[0],
        "query heads": q.shape[1],
        "key heads": k.shape[1],
        "head dim": q.shape[3],
        "value dim": v.shape[3],
        METHOD: _digest(core.method, settings, call.scale),
        "the seed of their features": seed,
        "the number of their draw": draw,
        "dtype": _digest(q.dtype),
        "is_causal": int(call.is_causal),
        BIAS: _digest(table),
        "whether segment_ids are given": int(call.segment_ids is not None),
        GRADIENTS: int(needs),
        "return_state": int(call.streams),
        WEIGHTS: 0 if is_checked else _checksum(*core.parameters(), *core.buffers()),
        "queries": q.shape[2],
        "keys": k.shape[2],
        "masked": int(call.key_mask is not None),
    }


def _checksum(*tensors: Tensor | None) -> int:
    """A number that stands for the numbers of some tensors, exactly and in any order; 0 where looking is waiting."""
    total = 0
    for x in tensors:
        if x is not None and x.device.type == "cpu" and x.numel() and x.dtype in _INTEGERS:
            total += int(x.detach().contiguous().view(_INTEGERS[x.dtype]).sum(dtype=torch.int64))
    return total % (1 << 62)


def _agree(ranks: Ranks, every: Sequence[Signature]) -> None:
    """Raise an error, on every rank, where the signatures of all of them differ."""
    for name, value in every[0].items():
        for rank, other in enumerate(x[name] for x in every):
            if other != value and name not in FREE:
                what = name + ("" if name in CODED else f": {value} and {other}")
                raise RanksError(
                    f"ranks 0 and {rank} of {ranks.size} do not make the same call: they differ in {what}; "
                    f"give all ranks of a sequence the same model, settings and samples, and each its own tokens."
                )


def attend_split(core: AttentionCore, make_call: Callable[[], Call], ranks: Ranks) -> tuple[Tensor, State | None]:
    """Attend to the tokens of all ranks, with the queries of this one; what ``make_call`` raises is raised on all."""
    call: Call | None = None
    problem: Exception | None = None
    try:
        call = make_call()
        problem = _refusal(core, call)
    except Exception as error:  # the others have to know, whatever it is
        problem = error
    # Weights are compared in the first call since the ranks met: sums over all of them in every call would cost more.
    signature = None if call is None or problem is not None else _signature(core, call, core in ranks.checked)
    numbers = ranks.meet("attention", [*(signature or {}).values()], problem)
    assert call is not None
    assert signature is not None
    every = [dict(zip(signature, x, strict=False)) for x in numbers]
    _agree(ranks, every)
    ranks.checked.add(core)
    out, after = _Split(core, call, ranks, every).attend()
    return out.to(call.query.dtype), after


def _refusal(core: Any, call: Call) -> ValueError | None:
    """Return the error for a call that a core cannot make over ranks, or None."""
    phi, bias = getattr(core, "feature_map", None), call.bias
    if not core.splits:
        return ValueError(
            f"{core.method!r} has no state of constant size that ranks could exchange, and the sequence is split over "
            f"them; use a method with a feature map such as 'favor+', or 'local'."
        )
    if call.state is not None:
        return ValueError("a split sequence starts at its first rank, got a state; give all of its tokens in one call.")
    if phi is not None and phi.sees_sequence:
        return ValueError(
            f"{core.method!r} takes its landmarks from the whole sequence, which is on several ranks; use "
            f"{core.causal_way}, or a method such as 'favor+'."
        )
    if phi is not None and phi.aligns:
        return ValueError(
            f"{core.method!r} with align=True moves keys by a mean over the whole sequence, which is on several "
            f"ranks; build it with align=False."
        )
    if bias is not None and (bias.layout.rows or bias.window is None):
        what = "a bias on a grid" if bias.layout.rows else "a bias of which no max_distance is known"
        return ValueError(
            f"{what} needs all keys of {core.method!r} one by one, and they are on several ranks; give positions "
            f"with max_distance=..., or scheme='alibi'."
        )
    if call.algorithm == "plain":
        return ValueError("algorithm='plain' is for one process; leave it out, or take 'chunked'.")
    if bias is not None and bias.algorithm not in (None, "windowed"):
        return ValueError(f"algorithm={bias.algorithm!r} is for one process; leave it out, or take 'windowed'.")
    return None


class _Split:
    """One call of a core on this rank, with the signatures of all ranks."""

    def __init__(self, core: Any, call: Call, ranks: Ranks, every: list[Signature]) -> None:
        self.core, self.ranks, self.rank = core, ranks, ranks.rank
        counts = [(x["queries"], x["keys"]) for x in every]
        for rank, (asked, given) in enumerate(counts):
            if call.is_causal and asked != given:
                raise ValueError(
                    f"causal attention over ranks is over the same tokens, got {asked} queries and {given} keys on "
                    f"rank {rank}; give every rank as many keys as queries."
                )
        self.gradients = bool(every[0][GRADIENTS])
        self.starts = list(accumulate((x for _, x in counts), initial=0))
        queries = list(accumulate((x for x, _ in counts), initial=0))
        if (core.has_near or call.bias is not None) and self.starts[:-1] != queries[:-1]:
            raise ValueError(
                f"a window, sinks or a bias count tokens along one sequence, but queries begin at {queries[:-1]} and "
                f"keys at {self.starts[:-1]} on the {ranks.size} ranks; give every rank as many keys as queries."
            )
        call = core._normalized(call)  # what goes around is what the sums see
        if call.bias is not None:
            # Tokens before this rank's: all where packed rows count positions, else those that are one by one.
            start, is_packed = self.starts[self.rank], call.segment_ids is not None
            past = start if core.has_near and is_packed else min(call.bias.window or 0, start)
            later = max(0, self.starts[-1] - start - call.key.shape[2])
            bias = around(call.bias, call, core, (queries[-1], self.starts[-1]), past, later)
            call = replace(call, bias=bias)
        self.call = call
        self.far: Far | None = None
        with no_autocast(call.query.device.type):
            self.plan = self._plan()
        self.edges = EdgeSegments(self.call, self.plan.sinks, ranks, any(x["masked"] for x in every))

    def _plan(self) -> ExchangePlan:
        core, call, bias, near = self.core, self.call, self.call.bias, self.core.near
        phi = getattr(core, "feature_map", None)
        if phi is None:
            return ExchangePlan(call.key, call.value, reach=near.window, sinks=near.sinks)
        tensors, spec = core.map_tensors(call), phi.spec_id
        if near is not None:
            whole, far = core._with_far(call, tensors)
            key, value, spec, self.far = whole.key, whole.value, far.spec, far
        elif bias is None:
            key, value = core._per_map_head(call.key, call.value)
        else:
            key, value, spec = core.biased.per_head(call.key), core.biased.per_head(call.value), phi.spread_spec_id
        return ExchangePlan(
            key,
            value,
            reach=near.window if near is not None else 0 if bias is None else bias.window or 0,
            sinks=0 if near is None else near.sinks,
            spec=spec,
            tensors=tensors,
            scale=call.scale,
            normalize=core.normalize,
            parts=near is not None,
            slope=None if bias is None else bias.slope,
        )

    def attend(self) -> tuple[Tensor, State | None]:
        """Exchange, then attend to one's own tokens and what came of the others."""
        return self._causal() if self.call.is_causal else (self._both(), None)

    def _exchange(self, parts: list[Message]) -> list[Message]:
        """Gather the messages of all ranks in one exchange."""
        sources = [x for x in (self.call.key, self.call.value, *self.core.parameters()) if x.requires_grad]
        rest = list(self.ranks.gather([x for part in parts for some in part for x in some], self.gradients, sources))
        return [Message(*([rest.pop(0) for _ in some] for some in part)) for part in parts]

    def _causal(self) -> tuple[Tensor, State | None]:
        """Attend as a stream that resumes from the state of the ranks before."""
        edges, call, links = self.edges, self.call, self.edges.left
        segment = edges.segments[LAST]
        is_last = self.rank == self.ranks.size - 1  # after whom nobody comes
        sums = no_sums(self.plan) if is_last else sums_one_way(self.plan, segment, False)
        (message,) = self._exchange([outgoing(self.plan, segment, sums, False)])
        left = incoming(self.plan, message, links, self.ranks, self.starts, mirror=False)
        # With near tokens that takes less time than a state, since no mask has to be made where nothing is hidden.
        at_once = call.segment_ids is None and not call.streams and self.core.has_near
        sinks = None
        if self.plan.sinks:  # a stream finds its own ones itself
            valid, position = edges.first_visible(LAST, self.starts)
            seen = links | self._here() if at_once else links
            sinks = first_sinks(message.sinks, valid & seen.unsqueeze(2), position)
        if at_once:
            key, value, mask = left.tokens
            nothing = Neighbour([], (key[:, :, :0], value[:, :, :0], mask[:, :0]))
            return self._attend(call, [], (left, nothing), sinks), None
        state = self._state(left, sinks)
        if call.segment_ids is None:
            out, after = self.core._attend_alone(replace(call, state=state))
        else:
            state = replace(state, last_id=edges.ids[self.rank, :, FIRST])
            out, after = attend_packed(self.core, replace(call, state=state))
        return out, None if after is None else replace(after, length=self.starts[self.rank + 1])

    def _here(self) -> Tensor:
        """Mask of this rank among all, (R, 1)."""
        return (torch.arange(self.ranks.size, device=self.call.key.device) == self.rank).unsqueeze(1)

    def _both(self) -> Tensor:
        """Attend in both directions, with a state on each side; of packed rows each outer segment by itself."""
        edges, plan, call = self.edges, self.plan, self.call
        is_packed = call.segment_ids is not None
        first, last = edges.segments
        if is_packed or plan.reach or plan.slope is not None:
            if is_packed:
                ways = sums_one_way(plan, last, False), sums_one_way(plan, first, True)
            else:
                ways = sums_both_ways(plan, last)
            to_right = outgoing(plan, last, ways[0], False)
            to_left = outgoing(plan, first, ways[1], True, shared=not is_packed)
            to_right, to_left = self._exchange([to_right, to_left])
            to_left = to_left._replace(full=to_left.full or to_right.full, sinks=to_left.sinks or to_right.sinks)
        else:
            (to_right,) = self._exchange([outgoing(plan, last, sums_one_way(plan, last, False), False)])
            to_left = to_right
        single = edges.single[self.rank]
        out = self._between(to_right, to_left, FIRST, edges.left, edges.right & single)
        if call.segment_ids is None or not call.query.shape[2]:
            return out
        ids = call.segment_ids
        other = self._between(to_right, to_left, LAST, edges.left & single, edges.right)
        is_first, is_last = ((ids == x)[:, None, :, None] for x in (ids[:, :1], ids[:, -1:]))
        out = torch.where(is_first, out, torch.where(is_last, other, 0))
        segments = Segments.of(ids)
        inner = segments.where((segments.start > 0) & (segments.start + segments.length < ids.shape[1]))
        alone = replace(call, segment_ids=None)
        return attend_apart(self.core, alone, inner, out) if len(inner.row) else out

    def _between(self, to_right: Message, to_left: Message, which: int, left: Tensor, right: Tensor) -> Tensor:
        """Attend within one segment of this rank, and to what it sees of the ranks on both sides, (R, B)."""
        plan, ranks, edges = self.plan, self.ranks, self.edges
        before = incoming(plan, to_right, left, ranks, self.starts, mirror=False)
        after = incoming(plan, to_left, right, ranks, self.starts, mirror=True)
        own = [x[self.rank] for x in (to_left if which == FIRST else to_right).full]
        sinks = None
        if plan.sinks:
            places = [edges.first_visible(x, self.starts) for x in (LAST, FIRST)]
            from_left = torch.arange(ranks.size, device=left.device) < self.rank + (which == LAST)
            at = from_left.view(-1, 1, 1)
            valid, position = (torch.where(at, x, y) for x, y in zip(*places, strict=True))
            seen = left | right | self._here()
            rows = [torch.where(at[..., None, None], x, y) for x, y in zip(to_right.sinks, to_left.sinks, strict=True)]
            sinks = first_sinks(rows, valid & seen.unsqueeze(2), position)
        alone = self.call
        if alone.segment_ids is not None:
            alone = replace(alone, segment_ids=None, key_mask=edges.segments[which].mask)
        return self._attend(alone, own, (before, after), sinks)

    def _state(self, left: Neighbour, sinks: Sinks | None) -> State:
        """Return the state before this rank's tokens."""
        call, start, made_by = self.call, self.starts[self.rank], self.core._made_for(self.call)
        if self.core.near is not None:
            if sinks is not None:
                sinks = sinks._replace(position=sinks.position.masked_fill(~sinks.visible, NO_SINK))
            tensors = Stream(left.sums, left.tokens, sinks).tensors()
            return State(tensors, start, made_by)
        if call.bias is None:
            return State(tuple(left.sums), start, made_by)
        sums, mask = sums_of_state(left.sums, self.plan.positive), left.tokens[2]
        return State((*sums, *left.tokens), mask.shape[1], made_by)

    def _attend(
        self, call: Call, own: Sequence[Tensor], neighbours: tuple[Neighbour, Neighbour], sinks: Sinks | None
    ) -> Tensor:
        """Attend to the keys of a call and of both neighbours, whose sums in the middle are ``own``: (B, H, L, E)."""
        plan, near, bias, (before, after) = self.plan, self.core.near, call.bias, neighbours
        with no_autocast(call.query.device.type):
            if near is None and bias is None:
                how: dict[str, Any] = {"spec": plan.spec, "tensors": plan.tensors, "scale": plan.scale}
                state = plan.merged([before.sums, own, after.sums])
                return read_sums(call.query, state, normalize=plan.normalize, **how)
            dtype = compute_dtype(call.query.dtype)
            key, value = (
                torch.cat([x, y.to(dtype), z], 2)
                for x, y, z in zip(before.tokens[:2], (plan.key, plan.value), after.tokens[:2], strict=True)
            )
            mask, left, right = call.key_mask, before.tokens[2], after.tokens[2]
            if mask is not None or not bool(left.all() & right.all()):
                mask = left.new_ones(key.shape[0], call.key.shape[2]) if mask is None else mask
                mask = torch.cat([left, mask, right], 1)
            whole = replace(call, query=call.query.to(dtype), key=key, value=value, key_mask=mask)
            if near is not None:
                offset = left.shape[1]
                if sinks is not None:
                    sinks = sinks._replace(position=sinks.position - (self.starts[self.rank] - offset))
                # Without a window the first key on the right is one away, not none.
                later = after.sums if near.window else plan.fade(after.sums, -1)
                out: Tensor = near.run(whole, self.far, sinks, before.sums, offset, later)[0]
                return out
            assert bias is not None
            relative = RelativeCall(
                query=whole.query,
                key=key,
                value=value,
                bias=bias.table,
                spec=plan.spec,
                tensors=plan.tensors,
                scale=plan.scale,
                layout=bias.layout,
                key_mask=mask,
                window=bias.window,
                slope=bias.slope,
                state=sums_of_state(before.sums, plan.positive),
                right_state=sums_of_state(after.sums, plan.positive),
            )
            return relative_attention(relative)[0]
