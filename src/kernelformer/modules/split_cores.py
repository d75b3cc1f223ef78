"""Messages between the ranks of a split sequence: summaries of their tokens.

Near tokens travel as they are, far ones as sums: of all tokens of a rank, and of all but those that may be near for its
neighbour. So an exchange is of one size whatever the length, and nothing is ever taken off a sum again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernelformer.attention.dispatch import key_sums
from kernelformer.attention.linear import faded, merge_sums
from kernelformer.attention.near_far_call import Sinks
from kernelformer.attention.near_keys import Tokens
from kernelformer.attention.ranks import Ranks
from kernelformer.attention.relative.call import Layout
from kernelformer.attention.state import empty_sums
from kernelformer.contract import compute_dtype, lookup
from kernelformer.modules.bias import check_tail
from kernelformer.modules.checks import Bias, Call
from kernelformer.modules.window import NearFarAttention

if TYPE_CHECKING:
    from kernelformer.modules.core import AttentionCore


@dataclass(frozen=True)
class ExchangePlan:
    """Plan of an exchange: what attention needs of the tokens on other ranks."""

    key: Tensor
    value: Tensor
    reach: int = 0  # w, how many tokens on each side are needed as they are
    sinks: int = 0
    spec: str = ""  # of the map whose sums stand for the others; empty: none are needed
    tensors: Sequence[Tensor] = ()
    scale: float = 1.0
    normalize: bool = True
    parts: bool = False
    slope: Tensor | None = None  # (G), what the log weight of a far token falls by per token of distance

    @property
    def positive(self) -> bool:
        """True if the map is positive."""
        return lookup(self.spec).family == "positive"

    def sums(self, first: int, last: int, mask: Tensor | None, mirror: bool) -> list[Tensor]:
        """Compute the state of the tokens from one place to another."""
        return key_sums(
            self.key[:, :, first:last],
            self.value[:, :, first:last],
            spec=self.spec,
            tensors=self.tensors,
            scale=self.scale,
            key_mask=None if mask is None else mask[:, first:last],
            normalize=self.normalize,
            parts=self.parts,
            slope=self.slope,
            mirror=mirror,
        )

    def merged(self, states: Sequence[Sequence[Tensor]], used: Tensor | None = None) -> list[Tensor]:
        """Merge several states, of which ``used`` (R) or (R, B) counts; None: all."""
        stacked = [torch.stack(x) for x in zip(*states, strict=True)]
        if used is None:
            used = torch.ones(len(states), dtype=torch.bool, device=self.key.device)
        return merge_sums(stacked, used, self.positive)

    def fade(self, state: list[Tensor], tokens: int) -> list[Tensor]:
        """A state as it is seen from so many tokens farther away."""
        if self.slope is None or not tokens or not state:
            return state
        return faded(state, self.slope.to(state[0].dtype) * tokens)


class Segment(NamedTuple):
    """Tokens of this rank that may continue on other ranks: all of them, or those of a segment."""

    mask: Tensor | None  # (B, S) bool, which tokens are in it and visible; None: all
    far: Tensor | None  # the same without sinks
    firsts: Tensor  # (B, sinks), places of its first visible tokens; where there are fewer, anything


class Message(NamedTuple):
    """Tensors that a rank sends, or those of all ranks, (R, ...) each."""

    full: Sequence[Tensor] = ()  # state of all far tokens
    head: Sequence[Tensor] = ()  # state of those that are not among ``edge``
    edge: Sequence[Tensor] = ()  # the last w keys and values, or the first ones; zeros where there are fewer tokens
    marks: Sequence[Tensor] = ()  # (2, B, w), which of those are visible, and which are no sinks; () where all are
    sinks: Sequence[Tensor] = ()  # the first visible keys and values


KeyState = tuple[list[Tensor], list[Tensor]]  # `Message.full` and `Message.head` in one direction; empty without a map


def sums_one_way(plan: ExchangePlan, segment: Segment, mirror: bool) -> KeyState:
    """Compute the sums for the ranks after this one, or mirrored for those before."""
    if not plan.spec:
        return [], []
    length, reach = plan.key.shape[2], plan.reach
    cut = min(reach, length) if mirror else max(0, length - reach)
    spans = ((cut, length), (0, cut)) if mirror else ((0, cut), (cut, length))
    head, edge = (plan.sums(*span, segment.far, mirror) for span in spans)
    return plan.merged([head, plan.fade(edge, -reach)]) if reach else head, head


def no_sums(plan: ExchangePlan) -> KeyState:
    """State of no tokens, for the last rank: it costs no pass over the keys."""
    if not plan.spec:
        return [], []
    known, like = lookup(plan.spec), plan.key.new_empty(0, dtype=compute_dtype(plan.key.dtype))
    features = known.feature_dim(plan.tensors, plan.key.shape[3])
    state = empty_sums(known, plan.key.shape[:2], features, plan.value.shape[3], like)
    return state, state


def sums_both_ways(plan: ExchangePlan, segment: Segment) -> tuple[KeyState, KeyState]:
    """Compute the sums for both directions, in one pass over the keys where distance does not count."""
    if plan.slope is not None or not plan.spec:
        return sums_one_way(plan, segment, False), sums_one_way(plan, segment, True)
    length, reach = plan.key.shape[2], plan.reach
    after, before = max(0, length - reach), min(reach, length)  # heads are tokens [0, after) and [before, length)
    low, high = sorted((after, before))
    left, middle, right = (plan.sums(*x, segment.far, False) for x in ((0, low), (low, high), (high, length)))
    full = plan.merged([left, middle, right])
    overlap = [middle] if after >= before else []
    return (full, plan.merged([left, *overlap])), (full, plan.merged([*overlap, right]))


def outgoing(plan: ExchangePlan, segment: Segment, sums: KeyState, mirror: bool, shared: bool = False) -> Message:
    """Build the message of a segment to the ranks after this one, or mirrored to those before.

    Where it is ``shared``, what goes in the other direction serves for this one too: all far tokens, and the first.
    """
    length, reach = plan.key.shape[2], plan.reach
    dtype = compute_dtype(plan.key.dtype)
    missing = max(0, reach - length)
    room = (0, missing) if mirror else (missing, 0)
    at = slice(0, min(reach, length)) if mirror else slice(max(0, length - reach), length)
    hidden = None if segment.mask is None else ~segment.mask[:, None, at, None]
    edge: list[Tensor] = []
    for x in (plan.key[:, :, at], plan.value[:, :, at]) if reach else ():
        piece = x if hidden is None else x.masked_fill(hidden, 0)
        edge.append(F.pad(piece.to(dtype), (0, 0, *room)))
    marks = []
    if reach and segment.mask is not None and segment.far is not None:
        marks = [torch.stack([F.pad(x[:, at].to(dtype), room) for x in (segment.mask, segment.far)])]
    picked = []
    for x in (plan.key, plan.value) if plan.sinks and not shared else ():
        index = segment.firsts[:, None, :, None].clamp(0, max(0, x.shape[2] - 1)).expand(-1, x.shape[1], -1, x.shape[3])
        rows = x.gather(2, index) if x.shape[2] else x.new_zeros(index.shape)
        picked.append(rows.to(dtype))
    full = () if shared and plan.slope is None else sums[0]
    return Message(full=full, head=sums[1] if reach else (), edge=edge, marks=marks, sinks=picked)


class Neighbour(NamedTuple):
    """Summary of the tokens on one side of a rank's own."""

    sums: list[Tensor]  # state of the far ones; nothing without a map
    tokens: Tokens  # the near ones, in their order: keys (B, G, n, D), values (B, G, n, E), mask (B, n)


def incoming(
    plan: ExchangePlan, message: Message, links: Tensor, ranks: Ranks, starts: Sequence[int], *, mirror: bool
) -> Neighbour:
    """Combine what the ranks before this one sent, or mirrored those after it.

    The message is that of all ranks, (R, ...) each; ``links``, (R, B) bool, says whose tokens this rank's see;
    ``starts`` are R + 1 positions, of the first token of every rank and after the last.
    """
    reach, here = plan.reach, ranks.rank
    sums: list[Tensor] = []
    batch = plan.key.shape[0]
    others = range(here + 1, ranks.size) if mirror else range(here)
    gaps = {s: starts[s] - starts[here + 1] if mirror else starts[here] - starts[s + 1] for s in others}
    if plan.spec and not reach and plan.slope is None:
        counted = torch.tensor([s in gaps for s in range(ranks.size)], device=links.device)
        sums = merge_sums(message.full, links & counted.unsqueeze(1), plan.positive)
    elif plan.spec:
        states: list[list[Tensor]] = []
        used: list[Tensor] = []
        # Not one by one: the gradient of x[s] would be a tensor of all ranks for each of them.
        fulls, heads = (
            [list(y) for y in zip(*(x.unbind(0) for x in z), strict=True)] for z in (message.full, message.head)
        )
        for s, full in enumerate(fulls):  # those that do not count too: an exchange runs backward on every rank
            counts = s in gaps
            if counts and gaps[s] < reach:
                states += [plan.fade(heads[s], gaps[s])]
                states += _between(plan, message, s, starts, gaps[s], mirror)
            else:
                states.append(plan.fade(full, gaps[s]) if counts else full)
            used += [links[s] & counts] * (len(states) - len(used))
        sums = plan.merged(states, torch.stack(used))
    tokens = _near_tokens(message, links, starts, list(gaps), reach, mirror)
    if tokens is None:
        empty = plan.key.new_zeros(*plan.key.shape[:2], 0, plan.key.shape[3], dtype=compute_dtype(plan.key.dtype))
        mask = torch.ones(batch, 0, dtype=torch.bool, device=plan.key.device)
        tokens = (empty, plan.value.new_zeros(*plan.value.shape[:2], 0, plan.value.shape[3], dtype=empty.dtype), mask)
    return Neighbour(sums, tokens)


def _between(
    plan: ExchangePlan, message: Message, s: int, starts: Sequence[int], gap: int, mirror: bool
) -> list[list[Tensor]]:
    """States of the edge tokens of rank s that lie beyond the near ones after all, since a rank between is short."""
    count = min(plan.reach, starts[s + 1] - starts[s])
    beyond = count - (plan.reach - gap)
    if beyond <= 0:
        return []
    first = (count - beyond) if mirror else plan.reach - count
    at = slice(first, first + beyond)
    key, value = (x[s][:, :, at] for x in message.edge)
    far = message.marks[0][s][1][:, at] > 0 if message.marks else None
    return [replace(plan, key=key, value=value).sums(0, beyond, far, mirror)]


def _near_tokens(
    message: Message, links: Tensor, starts: Sequence[int], others: list[int], reach: int, mirror: bool
) -> Tokens | None:
    """The w tokens next to this rank's, or as many as there are; None where none are asked for."""
    if not message.edge:
        return None
    keys, values = ([x[0][:, :, :0]] for x in message.edge)  # of no tokens, so that they always come from the exchange
    masks = [links[0].unsqueeze(1)[:, :0]]
    for s in others:
        count = min(reach, starts[s + 1] - starts[s])
        at = slice(0, count) if mirror else slice(reach - count, reach)
        keys.append(message.edge[0][s][:, :, at])
        values.append(message.edge[1][s][:, :, at])
        seen = links[s].unsqueeze(1).expand(-1, count)
        masks.append(seen & (message.marks[0][s][0][:, at] > 0) if message.marks else seen)
    key, value, mask = torch.cat(keys, 2), torch.cat(values, 2), torch.cat(masks, 1)
    near = slice(0, reach) if mirror else slice(max(0, mask.shape[1] - reach), None)
    return key[:, :, near], value[:, :, near], mask[:, near]


def first_sinks(candidates: Sequence[Tensor], valid: Tensor, position: Tensor) -> Sinks:
    """The first ``valid`` (R, B, s) ones among candidates (R, B, G, s, .) of all ranks, in their order."""
    count = valid.shape[2]
    flat = valid.transpose(0, 1).flatten(1)  # (B, R s)
    order = (~flat).int().sort(dim=1, stable=True).indices[:, :count]
    places = position.transpose(0, 1).flatten(1).gather(1, order)
    visible = flat.gather(1, order)
    rows = []
    for x in candidates:
        tokens = x.movedim(0, 2).flatten(2, 3)  # (B, G, R s, X)
        index = order[:, None, :, None].expand(-1, x.shape[2], -1, x.shape[4])
        rows.append(tokens.gather(2, index).masked_fill(~visible[:, None, :, None], 0))
    return Sinks(rows[0], rows[1], places, visible)


def around(bias: Bias, call: Call, core: AttentionCore, tokens: tuple[int, int], past: int, later: int) -> Bias:
    """Cut a bias for the tokens of this rank and those next to them out of one over all distances, or up to the window.

    It has to be for ``past`` tokens before this rank's; of the ``later`` ones as many as the window are neighbours.
    """
    assert bias.window is not None
    window, entries = bias.window, bias.table.shape[1]
    queries, keys = tokens
    all_distances = max(0, queries + keys - 1)
    if entries == all_distances:  # first: of a cross-attention both may be as many
        middle = queries - 1
        check_tail(bias.table, middle, window, bias.slope, call.is_causal)
    elif entries == 2 * window + 1:
        middle = window
    else:
        raise ValueError(
            f"bias must be over all distances of the whole sequence, (heads, {all_distances}) for {queries} "
            f"queries and {keys} keys on all ranks, or up to max_distance={window}, (heads, {2 * window + 1}), got "
            f"{tuple(bias.table.shape)}."
        )
    near, whole = getattr(core, "near", None), replace(bias, layout=Layout(middle + 1, entries - middle, 0))
    if isinstance(near, NearFarAttention):  # by the whole bias, so that all ranks see the same
        near.check_bias(whole, call.is_causal)
    length, count = call.query.shape[2], call.key.shape[2]
    if not call.is_causal:
        count += min(window, later)
    reach = past + count  # keys that the bias is for
    distance = torch.arange(max(0, length + reach - 1), device=bias.table.device) - (past + length - 1)
    return replace(bias, table=NearFarAttention.at(whole, distance), layout=Layout(length, reach, past))
