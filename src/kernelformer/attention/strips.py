"""Near/far attention of a positive map, or of no map, block by block.

A block of C queries meets a strip of key blocks: its own and those that its window reaches into. A pair of tokens in
the strip is near, far or not visible, with weight exp(s_ij), f_ij phi(q_i) . phi(k_j) or 0. All other keys are far from
every query of the block. Their sums on the left and, where later keys count too, on the right are merged in one state a
block, feature by feature (`positive` has the state's algebra). With A_m the largest logarithm of these sums, and of
those of the strips' blocks, of a group of blocks:

    p_im = softmax_m (log phi_m(q_i) + A_m)          phi'_jm = phi_m(k_j) e^(-A_m)
    out_i = sum_near W_ij v_j + sum_far W_ij v_j + sum_m W_im mean_m          W_ij = f_ij sum_m p_im phi'_jm if far,
                                                                             divided by the sum of all weights

f_ij is 1 and strips end with the window; or, where there are no near keys, e^(b_{j-i}) for a relative bias b that is
constant beyond the strips. Rows that see too little of their mixture, since a key of the group that they do not see
dwarfs all others, are computed again in log space.

Groups of blocks are worked on at once. Rows are ordered by (block, sample, key head), so that the key blocks at one
place of all strips are a slice of one buffer. The sums on the right come from a pass over the keys from the end, their
gradients from a pass over the queries from the start.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernelformer.attention import positive
from kernelformer.attention.blocks import empty_rows, gather_grads, grouped, rows_of, spans, spread, visible_pair
from kernelformer.attention.near_far_call import NearBias, NearFarCall, Sinks, near_blocks
from kernelformer.attention.positive import EMPTY, PositiveSums, Rescue, rescue_backward, rescued_rows, softmax_mass
from kernelformer.contract import PositiveChunks, PositiveSpec, Workspace, compute_dtype, lookup

NOTHING = -EMPTY  # log denominator of a row that sees no key: no weight is anything against it


class Ladder(NamedTuple):
    """Sums of the keys on one side of the strips of c blocks.

    On the left entry t is that before block t, on the right that after block t - 1: each has one entry more than there
    are blocks, from which the next group goes on.

    Args:
        log: (c + 1, N, M, 1) log masses.
        mean: (c + 1, N, M, E).
        keep: (c, N, M, 1), the share of the keys before in the sums after a step.
        add: (c, N, M, 1), that of the key block that the step adds.
        first: the key block that step 0 adds.
    """

    log: Tensor
    mean: Tensor
    keep: Tensor
    add: Tensor
    first: int


class Strips:
    """One call with what its groups share."""

    def __init__(self, call: NearFarCall, learn: bool = False) -> None:
        self.call, self.learn = call, learn
        self.s = s = call.shapes
        self.dtype = compute_dtype(call.query.dtype)
        self.work = Workspace(self.dtype, call.query.device)
        self.samples = s.samples()
        self.size, self.together = call.blocks
        # No farther than there are keys.
        reach = (max(s.L, 1) - 1 + call.offset, s.S - 1 - call.offset)
        self.left, self.right = (
            max(0, min(blocks, -(-keys // self.size)))
            for blocks, keys in zip(near_blocks(call.reach, self.size, call.is_causal), reach, strict=True)
        )
        self.blocks = self.left + 1 + self.right  # of a strip
        self.total = self.left + self.together + self.right  # of a group
        self.sides = 0 if not call.spec else 1 if call.is_causal else 2
        self.sinks = Sinks(*call.sinks) if call.sinks else None
        self.bias = NearBias(*call.bias) if call.bias else None
        self.count = 0 if self.sinks is None else self.sinks.position.shape[1]
        self.q5, self.k5, self.v5 = (grouped(x, s.G) for x in (call.query, call.key, call.value))
        keys = torch.arange(self.blocks * self.size, device=self.work.device) - self.left * self.size
        self.distance = keys - torch.arange(self.size, device=self.work.device).unsqueeze(1)  # j - i, (C, blocks C)
        self.near = self.blocks * self.size if call.window else 0  # columns of near blocks
        self.width = self.count + self.near
        sides = [self.distance <= -call.window, self.distance >= max(call.window, 1)][: self.sides]
        mask = torch.stack(sides).any(0) if sides else torch.zeros_like(self.distance, dtype=torch.bool)
        blocks = mask.unflatten(1, (self.blocks, -1))
        self.far: list[int] = blocks.any(2).any(0).nonzero().squeeze(1).tolist()  # blocks of the strip with far keys
        self.far_mask: Tensor = blocks[:, self.far].flatten(1)  # (C, n C)
        # Key blocks of a group that some query has as far ones; of a causal call without the last of its window.
        self.mapped = self.together + (self.blocks - 1 if self.sides == 2 else max([0, *self.far]))
        # Far pairs and sums have factors of their own, beside that of their row, where these differ.
        self.inner = self.bias is not None and (self.sides == 2 or call.is_level)
        self.row_logs = call.query.new_zeros(s.H, dtype=self.dtype)
        self.table: Tensor | None = None  # (H, n), by distance: left tail, band, right tail
        index = self.distance + call.reach  # of its entries
        if self.bias is not None:
            left, right = self.bias.tails.to(self.dtype).unsqueeze(2)
            # A bias of -inf hides, as EMPTY does.
            self.table = torch.cat([left, self.bias.band.to(self.dtype), right], 1).clamp_min(EMPTY)
            index = index.clamp_(0, self.table.shape[1] - 1)
            seen = self.table[:, : call.reach + 1] if call.is_causal else self.table
            ends = self.table[:, :1] if call.is_causal else self.table[:, [0, -1]]
            self.row_logs = (seen if call.is_level else ends).amax(1)
        self.table_index, self.far_index = index, index.unflatten(1, (self.blocks, -1))[:, self.far].flatten(1)
        self.band = self._band()
        self.inner_table = self.row_logs.new_zeros(s.H, 2)
        if self.inner and self.table is not None:
            # Above 0 are entries of no far pair alone: of later keys in a causal call, and of near ones.
            self.inner_table = (self.table - self.row_logs.unsqueeze(1)).clamp_(EMPTY, 0)
        self.side_logs = self.inner_table[:, [0, -1]].T.contiguous()
        self.pair_factors = self.pairs(self.inner_table.exp())
        by_block = self.pair_factors.unflatten(2, (-1, self.size)).movedim(2, 0)
        self.block_factors = by_block.unsqueeze(1).contiguous()  # (n, 1, G or 1, R C, C)
        if call.beta is not None:
            self.row_logs = self.row_logs + call.beta.to(self.dtype)

    def pairs(self, table: Tensor) -> Tensor:
        """Entries of ``inner_table``, or of a function of it, for the far pairs of a strip, (G or 1, R C, n C)."""
        if not self.inner:
            return self.far_mask.to(table).repeat(self.s.R, 1).unsqueeze(0)
        size = (self.s.G, self.s.R * self.size, self.far_mask.shape[1])
        entries: Tensor = table[:, self.far_index].mul_(self.far_mask).view(size)
        return entries

    def _band(self) -> Tensor:
        """Summand of every near block's scores and of the sinks', (1 or G, R C, width): EMPTY outside the window."""
        distance, s = self.distance[:, : self.near], self.s
        outside = distance.abs() >= self.call.window
        if self.call.is_causal:
            outside |= distance > 0
        if self.table is None:
            band = torch.zeros_like(outside, dtype=self.dtype).repeat(s.R, 1).unsqueeze(0)
        else:
            band = self.table[:, self.table_index[:, : self.near]].view(s.G, s.R * self.size, self.near)
        return F.pad(band.masked_fill_(outside.repeat(s.R, 1), EMPTY), (self.count, 0))

    def sample_blocks(self) -> list[slice]:
        """Blocks of samples."""
        return [slice(first, last) for first, last in spans(self.s.B, self.samples)]

    def groups(self) -> list[int]:
        """The first query of every group."""
        return list(range(0, self.s.L, self.size * self.together))

    def by_key_head(self, x: Tensor) -> Tensor:
        """A number per query (B, H, L) as (B, G, R, L, 1), a view."""
        return grouped(x.unsqueeze(3), self.s.G)

    def _inside(self, first: int, blocks: int, length: int) -> tuple[int, int, int, int]:
        """Of the tokens of some blocks: first and last that exist, and how many places before and after are empty."""
        last = first + blocks * self.size
        low, high = (min(max(x, 0), length) for x in (first, last))
        before = min(max(0, -first), last - first)
        return low, high, before, last - first - before - (high - low)

    def rows(self, name: str, x: Tensor, block: slice, first: int, blocks: int, fill: float = 0.0) -> Tensor:
        """Blocks of tokens (B, G, R, T, X) as rows (blocks N, R C, X) in a buffer; ``fill`` where there are none."""
        x = x[block]
        b, g, r, length, width = x.shape
        low, high, before, after = self._inside(first, blocks, length)
        piece, (begin, before), (end, after) = x[:, :, :, low:high], *(divmod(n, self.size) for n in (before, after))
        if before or after:
            piece = F.pad(piece, (0, 0, before, after), value=fill)
        rows = self.work.take(name, blocks, b, g, r, self.size, width)
        for empty in (rows[:begin], rows[blocks - end :]):
            empty.fill_(fill)
        inside = piece.unflatten(3, (blocks - begin - end, self.size))
        rows[begin : blocks - end].copy_(inside.permute(3, 0, 1, 2, 4, 5))
        return rows.view(blocks * b * g, r * self.size, width)

    def put(self, target: Tensor, rows: Tensor, block: slice, first: int, add: bool = False) -> None:
        """Write rows back to (B, G, R, T, X), or add them."""
        target = target[block]
        b, g, r, length, width = target.shape
        blocks = rows.shape[0] // (b * g)
        low, high, before, after = self._inside(first, blocks, length)
        whole, target = (
            rows.view(blocks, b, g, r, self.size, width).permute(1, 2, 3, 0, 4, 5),
            target[:, :, :, low:high],
        )
        if before or after:
            whole = whole.flatten(3, 4)[:, :, :, before : before + high - low]
        else:
            target = target.unflatten(3, (blocks, self.size))
        target.add_(whole) if add else target.copy_(whole)

    def hidden(self, mask: Tensor | None, block: slice, first: int) -> Tensor | None:
        """Mask of a group's hidden keys, (k, b, C) bool; None where there are none, as in most groups."""
        low, high, before, after = self._inside(first, self.total, self.s.S)
        whole = before == after == 0
        if mask is None and whole:
            return None
        visible = self.k5.new_ones(block.stop - block.start, high - low, dtype=torch.bool)
        if mask is not None:
            visible = mask[block, low:high]
            if whole and bool(visible.all()):
                return None
        hidden: Tensor = F.pad(~visible, (before, after), value=True).unflatten(1, (self.total, -1))
        return hidden.transpose(0, 1)


class Group:
    """Tensors of a group: queries (c N, R C, D), keys and values of its strips (k N, C, X), 0 where hidden.

    Args:
        st: the call.
        block: of samples.
        start: the first query.
    """

    def __init__(self, st: Strips, block: slice, start: int) -> None:
        call = st.call
        self.start, self.first = start, start + call.offset - st.left * st.size
        self.xq = st.rows("q", st.q5, block, start, st.together)
        self.hidden = self.far_hidden = st.hidden(call.key_mask, block, self.first)
        if call.far_mask is not call.key_mask and st.sides:
            self.far_hidden = st.hidden(call.far_mask, block, self.first)
        self._rows = partial(st.rows, block=block, first=self.first, blocks=st.total)
        self._st = st

    @cached_property
    def k(self) -> Tensor:
        """The keys of the strips, (k N, C, D)."""
        return self.hide(self._rows("k", self._st.k5))

    @cached_property
    def v(self) -> Tensor:
        """The values of the strips, (k N, C, E)."""
        return self.hide(self._rows("v", self._st.v5))

    def hide(self, x: Tensor) -> Tensor:
        """Zero hidden keys or values, or their gradients, in place."""
        return self._fill(x, self.hidden, (1, 3), 0)

    def hide_far(self, logs: Tensor) -> Tensor:
        """Set the log features (m N, M, C) of keys that are hidden from the far part to EMPTY, in place."""
        hidden = None if self.far_hidden is None else self.far_hidden[: self._st.mapped]
        return self._fill(logs, hidden, (1, 1), EMPTY)

    def _fill(self, x: Tensor, hidden: Tensor | None, axes: tuple[int, int], value: float) -> Tensor:
        if hidden is not None:
            blocks = x.unflatten(0, (*hidden.shape[:2], -1))
            for at in hidden.flatten(1).any(1).nonzero().squeeze(1).tolist():  # most often those at the ends alone
                blocks[at].masked_fill_(hidden[at].unsqueeze(axes[0]).unsqueeze(axes[1]), value)
        return x


class Mixture(NamedTuple):
    """The far part of a group.

    Args:
        weights: (c N, R C, M) of the features, 1 in sum.
        peak: (c N, R C), the logarithm of what they were divided by, with the factor of the row.
        p: (m N, M, C), of the blocks that are mapped, the softmax of the log features over the keys of a block.
        ratio: (b, N, M, 1), the mass of these blocks in units of the largest around the group.
        phi: (b, N, M, C), p times ratio, of the blocks from the first far one to the last.
        shares: of the sums on each side, (c N, M, 1) each.
        old: (c N, M, E), the mean of the sums times their share.
        decay: (c N, M, 1), their share.
        ladders: of each side.
    """

    weights: Tensor
    peak: Tensor
    p: Tensor
    ratio: Tensor
    phi: Tensor
    shares: list[Tensor]
    old: Tensor
    decay: Tensor
    ladders: list[Ladder]


class Lost(NamedTuple):
    """Some rows of one block that are computed again.

    Args:
        rescue: their far pairs.
        v: (n C, E), the values of the far blocks of the strip.
        shares: of each side in the sums beyond the strip, (sides, M, 1).
        block: of the group.
        n: the row of N.
        places: of the far blocks among the rows of key blocks.
    """

    rescue: Rescue
    v: Tensor
    shares: Tensor
    block: int
    n: int
    places: list[int]


class RowGrads(NamedTuple):
    """Gradients and outputs of a group's queries.

    Args:
        grad: (c N, R C, E), of the outputs.
        out: (c N, R C, E).
        delta: (c N, R C, 1), their product, negative.
        total: (c N, R C), see `Results`.
    """

    grad: Tensor
    out: Tensor
    delta: Tensor
    total: Tensor


class Results(NamedTuple):
    """Results of the forward pass.

    Args:
        out: (B, H, L, E).
        total: (B, H, L), the log of what a row was divided by; `NOTHING` where it sees no key.
        guarded: (B, H, 0) bool, which graphs of earlier versions expect.
        row_scales: nothing, or (B, H, L): 1; 0 for rows without a far key; -1 for those computed again.
        end_state: of a causal call the sums of the far keys after it, (B, G, ...) each.
        kept: (groups, B, G, ...), the sums beside the strips of each group, side after side.
    """

    out: Tensor
    total: Tensor
    guarded: Tensor
    row_scales: list[Tensor]
    end_state: list[Tensor]
    kept: list[Tensor]

    @staticmethod
    def empty(call: NearFarCall, keep: bool) -> Results:
        """Room for them; ``keep``: also for what the backward pass needs."""
        s, dtype, query = call.shapes, compute_dtype(call.query.dtype), call.query
        sides = 0 if not call.spec else 1 if call.is_causal else 2
        like = query.new_empty(0, dtype=dtype)
        states = PositiveSums.empty((s.B, s.G), call.features, s.E, like) if sides else []
        size, together = call.blocks
        total = query.new_empty(s.B, s.H, s.L, dtype=dtype)
        return Results(
            empty_rows(query, s.E),
            total,
            torch.empty_like(total[:, :, :0], dtype=torch.bool),
            [torch.empty_like(total)] if keep and sides else [],
            states if sides == 1 else [],
            [x.new_empty(-(-s.L // (size * together)), *x.shape) for _ in range(sides) for x in states] if keep else [],
        )


class Grads:
    """Gradients of a call.

    Args:
        call: the call.
        learn: those of the map's tensors too.
    """

    def __init__(self, call: NearFarCall, learn: bool) -> None:
        self.call, self.dtype = call, compute_dtype(call.query.dtype)
        self.query, self.key, self.value = (
            torch.zeros_like(x, dtype=self.dtype) for x in (call.query, call.key, call.value)
        )
        self.sinks = [torch.zeros_like(x, dtype=self.dtype) for x in call.sinks[:2]]
        self.tensors = [torch.zeros_like(x) for x in call.tensors] if learn else []
        self.states = [[torch.zeros_like(x) for x in given] for given in (call.state, call.right_state)]
        self.far_logs, self.tails = call.query.new_zeros(2, 2, call.query.shape[1], dtype=self.dtype)
        band = call.bias[0].shape[1] if call.bias else 0
        self.table = self.far_logs.new_zeros(len(self.far_logs[0]), band + 2)  # by distance, see `Strips`

    def results(self) -> tuple[Any, ...]:
        """In the order and the dtypes of the operator."""
        call = self.call
        if call.own_sinks:
            index = call.sinks[2].masked_fill(~call.sinks[3], 0)[:, None, :, None]  # a sink that is not there got 0
            for target, x in zip((self.key, self.value), self.sinks, strict=True):
                target.scatter_add_(2, index.expand(x.shape), x)
        given, made = (call.query, call.key, call.value), (self.query, self.key, self.value)
        dq, dk, dv = (x.to(y.dtype) for x, y in zip(made, given, strict=True))
        sinks = [x.to(y.dtype) for x, y in zip(self.sinks, call.sinks, strict=False)]
        far_logs = self.far_logs + self.table[:, [0, -1]].T
        bias = [self.table[:, 1:-1].clone(), self.tails + far_logs] if call.bias else []
        return dq, dk, dv, sinks, bias, self.tensors, far_logs.sum(0), *self.states


class Pass:
    """Some samples of a call, group by group; rows N are (sample, key head).

    Args:
        st: the call.
        block: of samples.
    """

    def __init__(self, st: Strips, block: slice) -> None:
        self.st, self.call, self.s, self.work, self.block = st, st.call, st.s, st.work, block
        self.count = block.stop - block.start
        self.N = self.count * self.s.G
        self.maps: dict[int, PositiveChunks] = {}
        self.pair_grads = torch.zeros_like(st.pair_factors)

    # --- the map ---

    def chunks(self, blocks: int) -> PositiveChunks:
        """The map, bound to the rows of so many blocks."""
        if blocks not in self.maps:
            spec, rows = lookup(self.call.spec), []
            assert isinstance(spec, PositiveSpec)
            for x in spread(self.call.tensors, self.block, self.count, self.s.G):
                same = x.shape[0] == 1 or x.stride(0) == 0
                rows.append(
                    x[:1].expand(blocks * self.N, *x.shape[1:]) if same else x.repeat(blocks, *[1] * (x.dim() - 1))
                )
            self.maps[blocks] = spec.bind(rows, self.call.far_scale, self.call.is_level, self.st.learn)
        return self.maps[blocks]

    def add_tensor_grads(self, totals: list[Tensor]) -> None:
        """Add the gradients of the map's tensors."""
        for blocks, chunks in self.maps.items() if totals else ():
            grads = [x.unflatten(0, (blocks, -1)).sum(0) for x in chunks.tensor_grads()]
            gather_grads(totals, grads, self.block, self.count, self.s.G)

    def empty(self) -> list[Tensor]:
        """Sums of no keys, (N, ...)."""
        like = self.call.query.new_empty(0, dtype=self.work.dtype)
        return PositiveSums.empty((self.N,), self.call.features, self.s.E, like)

    def sums(self) -> PositiveSums:
        """Sums over keys, and their gradients."""
        return PositiveSums(self.chunks(1), True, self.work)

    # --- sums of the keys that no strip of the call has ---

    def _stretches(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        first, last = (min(max(x, 0), self.s.S) for x in (first, last))
        for start, end in spans(max(0, last - first), self.s.chunk(self.count, self.s.G)):
            yield first + start, first + end

    def _keys(self, first: int, last: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keys (N, T, D), values (N, T, E), and which are hidden (N, T)."""
        k, v = (
            rows_of(x[self.block, :, :, first:last], n, self.work) for x, n in ((self.st.k5, "fk"), (self.st.v5, "fv"))
        )
        mask, hidden = self.call.far_mask, None
        if mask is not None and not bool(mask[self.block, first:last].all()):
            hidden = ~mask[self.block, first:last].repeat_interleave(self.s.G, 0)
        return *visible_pair(k, v, hidden), hidden

    def add_keys(self, state: list[Tensor], first: int, last: int) -> None:
        """Add keys to sums, in place."""
        for low, high in self._stretches(first, last):
            self.sums().absorb(state, *self._keys(low, high))

    def add_keys_backward(
        self, state: Sequence[Tensor], grads: Sequence[Tensor], span: tuple[int, int], targets: Sequence[Tensor]
    ) -> None:
        """Add to the gradients of these keys and values, from those of the sums after them."""
        for low, high in self._stretches(*span):
            k, v, hidden = self._keys(low, high)
            pair = self.sums().absorb_backward(state, grads, k, v, hidden)
            for target, part in zip(targets, visible_pair(*pair, hidden), strict=True):
                piece = target[self.block, :, :, low:high]
                piece.add_(part.view(piece.shape))

    def _beyond(self, side: int) -> tuple[int, int]:
        """The keys on one side that are in no strip of the call."""
        st, groups = self.st, len(self.st.groups())
        if side:
            return self.call.offset + (groups * st.together + st.right) * st.size, self.s.S
        return 0, self.call.offset - st.left * st.size

    def _tail(self) -> tuple[int, int]:
        """The keys that only the state after the call has as far ones."""
        last = max(0, self.s.L - 1) // self.st.size
        return self.call.offset + (last - self.st.left) * self.st.size, self.call.offset + self.s.L - self.call.reach

    def begin(self, side: int) -> list[Tensor]:
        """The sums before the first group, or after the last one, (N, ...) each."""
        given = self.call.right_state if side else self.call.state
        rows = [x[self.block].flatten(0, 1).clone() for x in given] if given else self.empty()
        self.add_keys(rows, *self._beyond(side))
        return rows

    def rights(self) -> Iterator[tuple[int, list[Tensor]]]:
        """The sums after the strips of each group, from the last group to the first."""
        st, rows = self.st, self.begin(1)
        for number, start in reversed(list(enumerate(st.groups()))):
            yield number, rows
            first = start + self.call.offset + st.right * st.size
            if number:
                self.add_keys(rows, first, first + st.together * st.size)

    # --- near ---

    def windows(self, group: Group, name: str, sinks: Tensor | None) -> Tensor:
        """Keys or values of the strips, sinks first: rows (c N, width, X) in a buffer."""
        st, whole = self.st, self.st.k5 if name == "k" else self.st.v5
        width = whole.shape[4]
        rows = self.work.take(f"{name}w", st.together, self.N, st.width, width)
        if not st.sides and group.hidden is None and st.width > st.count:  # straight from the sequence
            piece = whole[self.block, :, 0, group.first : group.first + st.total * st.size]
            strips = piece.unfold(2, st.blocks * st.size, st.size).permute(2, 0, 1, 4, 3)
            rows.view(st.together, self.count, self.s.G, st.width, width)[..., st.count :, :] = strips
        elif st.width > st.count:
            blocks = getattr(group, name).view(st.total, self.N, st.size, width)
            for at in range(st.blocks):
                first = st.count + at * st.size
                rows[:, :, first : first + st.size] = blocks[at : at + st.together]
        if sinks is not None:
            rows[:, :, : st.count] = sinks[self.block].flatten(0, 1)
        return rows.flatten(0, 1)

    def _both_windows(self, group: Group) -> tuple[Tensor, Tensor]:
        sinks = (None, None) if self.st.sinks is None else self.st.sinks[:2]
        return self.windows(group, "k", sinks[0]), self.windows(group, "v", sinks[1])

    def add_windows(self, target: Tensor, rows: Tensor, sinks: Tensor | None) -> None:
        """Add gradients of `windows` to those of the keys or values (k N, C, X), and of the sinks (B, G, s, X)."""
        st = self.st
        rows = rows.unflatten(0, (st.together, self.N))
        if sinks is not None:
            sinks[self.block] += rows[:, :, : st.count].sum(0).view(sinks[self.block].shape)
        if st.width > st.count:
            blocks = target.view(st.total, self.N, st.size, -1)
            for at in range(st.blocks):
                first = st.count + at * st.size
                blocks[at : at + st.together] += rows[:, :, first : first + st.size]

    @cached_property
    def _sink_bias(self) -> Tensor:
        """Summand of the scores of sinks by block, (n, b, G or 1, R or 1, C, s): EMPTY in the window and if hidden."""
        st, sinks, bias, s = self.st, self.st.sinks, self.st.bias, self.s
        assert sinks is not None
        query = torch.arange(len(st.groups()) * st.together * st.size, device=self.work.device) + self.call.offset
        distance = sinks.position[self.block].unsqueeze(1) - query.view(1, -1, 1)  # (b, n C, s)
        visible = sinks.visible[self.block].unsqueeze(1) & (distance.abs() >= self.call.window)
        if self.call.is_causal:
            visible = visible & (distance <= 0)
        logs = torch.zeros_like(distance, dtype=self.work.dtype).unsqueeze(1)
        if bias is not None:
            tails = bias.tails.to(self.work.dtype).view(2, 1, s.H, 1, 1)
            logs = torch.where(distance.unsqueeze(1) <= 0, tails[0], tails[1])
            logs = logs.clamp_min(EMPTY)
        logs = logs.masked_fill(~visible.unsqueeze(1), EMPTY)  # (b, H or 1, n C, s)
        heads = (1, 1) if bias is None else (s.G, s.R)
        return logs.view(self.count, *heads, -1, st.size, st.count).movedim(3, 0)

    def _scores(self, group: Group, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Softmax of s_ij over the near keys of a group, (c N, R C, width), and the log of the sums, (c N, R C)."""
        st, s = self.st, self.s
        scores = self.work.take("scores", *group.xq.shape[:2], st.width)
        if not st.width:
            return scores, scores.new_full(scores.shape[:2], EMPTY)
        if st.band.shape[0] == 1:
            torch.baddbmm(st.band, group.xq, keys.mT, alpha=self.call.scale, out=scores)
        else:
            torch.bmm(group.xq, keys.mT, out=scores).mul_(self.call.scale)
            scores.view(-1, s.G, *scores.shape[1:]).add_(st.band)
        whole = scores.view(st.together, self.count, s.G, s.R, st.size, st.width)
        for at in range(st.blocks if st.near and group.hidden is not None else 0):
            assert group.hidden is not None
            hidden = group.hidden[at : at + st.together, :, None, None, None]
            whole[..., st.count + at * st.size : st.count + (at + 1) * st.size].masked_fill_(hidden, EMPTY)
        if st.count:
            first = group.start // st.size
            whole[..., : st.count].add_(self._sink_bias[first : first + st.together])
        return scores, softmax_mass(scores).squeeze(2)

    def _drops(self, start: int) -> Tensor | None:
        """Factors of the near weights, 0 or 1 / (1 - dropout), the same for a group whenever they are asked for."""
        if not self.call.dropout:
            return None
        st, seed = self.st, 0 if self.call.seed is None else int(self.call.seed)
        drops = self.work.take("drops", st.together * self.N, self.s.R * st.size, st.width)
        generator = torch.Generator(self.work.device)
        generator.manual_seed((seed + 1_000_003 * start + 7_368_787 * self.block.start) % (1 << 62))
        keep = 1 - self.call.dropout
        return drops.bernoulli_(keep, generator=generator).mul_(1 / keep if keep else 0.0)

    # --- far ---

    def _ladder(self, side: int, carry: Sequence[Tensor], mass: Tensor, mean: Tensor) -> Ladder:
        """Add the key blocks of a group to the sums on one side, one after the other."""
        c = self.st.together
        first = self.st.blocks - 1 if side else 0
        mass, mean = mass[first : first + c], mean[first : first + c]
        log, means = mass.new_empty(c + 1, *mass.shape[1:]), self.work.take(f"mean{side}", c + 1, *mean.shape[1:])
        order = [(t, t + 1, t) if side else (t + 1, t, t) for t in range(c)]
        order = order[::-1] if side else order
        log[order[0][1]], means[order[0][1]] = carry[0], carry[1]
        for new, old, step in order:
            torch.logaddexp(log[old], mass[step], out=log[new])
        older, newer = (log[1:], log[:-1]) if side else (log[:-1], log[1:])
        keep, add = (older - newer).exp_(), (mass - newer).exp_()
        for new, old, step in order:
            torch.mul(means[old], keep[step], out=means[new]).addcmul_(mean[step], add[step])
        return Ladder(log, means, keep, add, first)

    def _mixture(self, group: Group, carries: Sequence[Sequence[Tensor]], keep: bool = False) -> Mixture:
        """Map a group, and merge the sums around the strip of every block; without ``keep`` p is lost."""
        st, take, features = self.st, self.work.take, self.call.features
        c, N, C = st.together, self.N, st.size
        k, v, size = group.k[: st.mapped * N], group.v[: st.mapped * N], (st.mapped, N, features, -1)
        p = group.hide_far(self.chunks(st.mapped).keys(k, take("keys", len(k), features, C)))
        mass = softmax_mass(p).view(size)
        mean = torch.bmm(p, v, out=take("kv", len(k), features, self.s.E)).view(size)
        ladders = [self._ladder(side, carry, mass, mean) for side, carry in enumerate(carries)]
        shares = torch.stack([x.log[1:] if side else x.log[:-1] for side, x in enumerate(ladders)])
        if st.inner:
            shares += st.side_logs[: st.sides].repeat(1, self.count).view(st.sides, 1, N, 1, 1)
        near = mass[st.far[0] : st.far[-1] + c] if st.far else mass[:0]
        top = torch.cat([shares.flatten(0, 1), near]).amax(0).clamp_min_(EMPTY)  # (N, M, 1)
        shares.sub_(top).exp_()
        ratio = (near - top).exp_()
        first = st.far[0] if st.far else 0
        blocks = p.view(size)[first : first + len(near)]
        phi = torch.mul(blocks, ratio, out=take("phi", *blocks.shape) if keep else blocks)
        old = take("kv", c, N, features, self.s.E)  # the ladders have taken up the means
        means = [x.mean[1:] if side else x.mean[:-1] for side, x in enumerate(ladders)]
        torch.mul(means[0], shares[0], out=old)
        if st.sides > 1:
            old.addcmul_(means[1], shares[1])
        tops = top.mT.expand(c, -1, -1, -1).flatten(0, 1)
        weights = self.chunks(c).queries(group.xq, tops, take("queries", *group.xq.shape[:2], features))
        peak = softmax_mass(weights)
        row_logs = st.row_logs.view(self.s.G, self.s.R, 1).expand(-1, -1, C).reshape(self.s.G, -1)
        peak = (peak.view(-1, *row_logs.shape) + row_logs).view(weights.shape[:2])
        *parts, decay, old = (x.flatten(0, 1) for x in (*shares, shares.sum(0), old))
        return Mixture(weights, peak, p, ratio, phi, parts, old, decay, ladders)

    def _far_blocks(self, x: Tensor) -> list[Tensor]:
        """Of blocks around a group (b, N, ...) those at the place of each far block in all strips, (c N, ...)."""
        return [x[at : at + self.st.together].flatten(0, 1) for at in self.st.far]

    def _phi_blocks(self, x: Tensor) -> list[Tensor]:
        """The same of what begins with the first far block."""
        return [x[at - self.st.far[0] :][: self.st.together].flatten(0, 1) for at in self.st.far]

    def _columns(self, x: Tensor) -> list[Tensor]:
        """Of (c N, R C, width) with a window the columns of each far block."""
        columns = x[..., self.st.count :].unflatten(2, (-1, self.st.size))
        return [columns[..., at, :] for at in self.st.far]

    def _times_factors(self, pairs: Tensor) -> Tensor:
        """Multiply what belongs to the far pairs of strips (n, c N, R C, C) by their factors, in place."""
        factors = self.st.block_factors
        pairs.unflatten(1, (-1, factors.shape[2])).mul_(factors)
        return pairs

    def _far_scores(self, t: Mixture) -> Tensor:
        """The weights of the far pairs of strips, (n, c N, R C, C)."""
        far = self.work.take("far", len(self.st.far), *t.weights.shape[:2], self.st.size)
        for scores, phi in zip(far, self._phi_blocks(t.phi), strict=True):
            torch.bmm(t.weights, phi, out=scores)
        return self._times_factors(far)

    def _rescues(self, t: Mixture, group: Group, which: Tensor) -> Iterator[tuple[int, Tensor, Lost]]:
        """Weigh every pair (feature, far key) of some rows in log space, a few queries of one head at a time."""
        for row, index in rescued_rows(which, self.st.size):
            yield row, index, self._rescue(t, group, row, index)

    def _sees_far(self, t: Mixture, group: Group) -> Tensor:
        """Mask of the rows that see a far key, (c N, R C) bool."""
        st, c = self.st, self.st.together
        logs = torch.stack([x.log[1:] if side else x.log[:-1] for side, x in enumerate(t.ladders)])
        shown = st.side_logs[: st.sides, :: self.s.R].repeat(1, self.count).view(st.sides, 1, self.N, 1) > EMPTY / 2
        earlier = ((logs.amax(3) > EMPTY / 2) & shown).any(0)  # (c, N, 1)
        # By the bias, not by its factors, which underflow where entries differ by much.
        pairs = st.pairs((st.inner_table > EMPTY / 2).to(self.work.dtype))  # (G or 1, R C, n C)
        here = pairs.any(2).repeat(len(t.weights) // len(pairs), 1)
        if group.far_hidden is not None and st.far:
            shown = torch.cat([~group.far_hidden[x : x + c] for x in st.far], 2)  # (c, b, n C)
            here = (shown.to(self.work.dtype).unsqueeze(2).unsqueeze(2) @ pairs.mT > 0).squeeze(3)
            here = here.expand(-1, -1, self.s.G, -1).flatten(0, 2)
        return here | earlier.flatten(0, 1)

    def _rescue(self, t: Mixture, group: Group, row: int, index: Tensor) -> Lost:
        st, C, features = self.st, self.st.size, self.call.features
        block, n = divmod(row, self.N)
        places = [(block + x) * self.N + n for x in st.far]
        one = self.chunks(st.together).at(row, int(index[0]) // C)
        q, k = group.xq[row, index].unsqueeze(0), group.k[places].flatten(0, 1).unsqueeze(0)
        lq = one.queries(q, q.new_zeros(1, 1, features), q.new_empty(1, q.shape[1], features))[0]
        lk = one.keys(k, k.new_empty(1, features, k.shape[1]))[0].view(features, len(places), C)
        if group.far_hidden is not None:
            hidden = torch.stack([group.far_hidden[block + x, n // self.s.G] for x in st.far])
            lk = lk.masked_fill(hidden, EMPTY)
        head = n % self.s.G * self.s.R + int(index[0]) // C
        logs = torch.stack([x.log[block + side, n] + st.side_logs[side, head] for side, x in enumerate(t.ladders)])
        before = logs.logsumexp(0)
        shares = (logs - before).exp_()
        mean = sum(x.mean[block + side, n] * shares[side] for side, x in enumerate(t.ladders))
        assert isinstance(mean, Tensor)
        pairs = lq.unsqueeze(2) + lk.flatten(1)
        if st.inner:
            pairs += st.inner_table[head][st.far_index[index % C]].unsqueeze(1)
        pairs.masked_fill_(~st.far_mask[index % C].unsqueeze(1) | (pairs < EMPTY / 2), -torch.inf)
        past = lq + before[:, 0]
        # Relative to the largest: a logarithm of -1000 is rounded to 6e-5, and shares would not add up to 1.
        peak = torch.maximum(pairs.flatten(1).amax(1), past.amax(1))
        pairs.sub_(peak.view(-1, 1, 1))
        past.sub_(peak.unsqueeze(1))
        size = torch.logaddexp(pairs.flatten(1).logsumexp(1), past.logsumexp(1))
        pairs.sub_(size.view(-1, 1, 1)).exp_()
        past.sub_(size.unsqueeze(1)).exp_()
        log = peak + size + st.row_logs[head]
        rescue = Rescue(one, q, k, pairs, past, mean, torch.ones_like(log).unsqueeze(1), log)
        return Lost(rescue, group.v[places].flatten(0, 1), shares, block, n, places)

    # --- all of it ---

    def _stored(self, results: Results, number: int) -> list[list[Tensor]]:
        """The sums beside a group, (N, ...) each, of each side."""
        rows = [x[number, self.block].flatten(0, 1) for x in results.kept]
        return [rows[2 * side : 2 * side + 2] for side in range(self.st.sides)]

    def forward(self, results: Results) -> None:
        """Write outputs, what they were divided by, and states."""
        st, s, work, block = self.st, self.s, self.work, self.block
        rights = []
        if st.sides == 2:
            rights = [[x.clone() for x in rows] for _, rows in self.rights()][::-1]
        left = self.begin(0) if st.sides else []
        end, last = left, max(0, s.L - 1) // st.size
        for number, start in enumerate(st.groups()):
            group = Group(st, block, start)
            carries = [left, *rights[number : number + 1]][: st.sides]
            if results.kept:
                for whole, x in zip(results.kept, (x for y in carries for x in y), strict=True):
                    whole[number, block] = x.view(whole[number, block].shape)
            keys, values = self._both_windows(group)
            scores, log = self._scores(group, keys)
            lost: list[tuple[int, Tensor, Lost]] = []
            row_log, den = log, torch.ones_like(log)
            if st.sides:
                t = self._mixture(group, carries)
                seen = torch.mul(t.weights, t.decay.mT, out=work.take("far", *t.weights.shape)).sum(2)
                far = self._far_scores(t)
                seen.add_(far.sum(3).sum(0))
                small = seen < positive.LOST
                row_scale, log_far, some = torch.ones_like(seen), t.peak, bool(small.any())
                if some:
                    row_scale.masked_fill_(small, 0)
                    log_far, seen = log_far.masked_fill(small, EMPTY), seen.masked_fill_(small, 1)
                    lost = list(self._rescues(t, group, small & self._sees_far(t, group)))
                    for row, index, one in lost:
                        row_scale[row, index], log_far[row, index] = -1, one.rescue.log
                # The logarithm of a sum is rounded as much as it is large: shares are divided by the sum itself.
                row_log = torch.maximum(log, log_far)
                far_share = (log_far - row_log).exp_()
                den = (log - row_log).exp_().addcmul_(far_share, seen)
                far_share.div_(den)
            unseen = row_log < EMPTY / 2
            total = row_log.add(den.log()).masked_fill_(unseen, NOTHING)
            drops, share = self._drops(start), (log - row_log).exp_().div_(den).masked_fill_(unseen, 0).unsqueeze(2)
            if drops is not None:
                scores.mul_(drops)
            out = work.take("out", *group.xq.shape[:2], s.E)
            if not st.sides:
                torch.bmm(scores, values, out=out).mul_(share)  # 0 where no key is visible
            else:
                scores.mul_(share)
                share = far_share.masked_fill(small | unseen, 0).unsqueeze(2)
                torch.bmm(t.weights, t.old, out=out)
                if st.near:  # one product for near and far pairs
                    for pairs, columns in zip(far, self._columns(scores), strict=True):
                        columns.addcmul_(pairs, share)
                else:
                    for pairs, v in zip(far, self._far_blocks(group.v.unflatten(0, (-1, self.N))), strict=True):
                        out.baddbmm_(pairs, v)
                out.mul_(share)
                if st.width:
                    out.baddbmm_(scores, values)
                for row, index, one in lost:
                    out[row, index] += one.rescue.sums(one.v) * far_share[row, index].unsqueeze(1)
                for x in results.row_scales:
                    st.put(st.by_key_head(x), row_scale.unsqueeze(2), block, start)
                ladder = t.ladders[0]
                place = last - start // st.size
                if place < st.together:
                    end = [ladder.log[place], ladder.mean[place]]
                left = [ladder.log[-1], ladder.mean[-1]]
            st.put(grouped(results.out, s.G), out, block, start)
            st.put(st.by_key_head(results.total), total.unsqueeze(2), block, start)
        if results.end_state:
            end = [x.clone() for x in end]
            self.add_keys(end, *self._tail())
            for whole, x in zip(results.end_state, end, strict=True):
                whole[block] = x.view(whole[block].shape)

    def _right_grads(self, results: Results, grad: Tensor) -> list[list[Tensor]]:
        """Gradients of the sums after the strips of each group from the queries before it, and of all queries.

        In units of the sums' masses as the group before has them.
        """
        st, s, work = self.st, self.s, self.work
        found: list[list[Tensor]] = [PositiveSums.zero_grads(self.empty())]
        logs = None
        factor = (st.row_logs + st.side_logs[1]).view(s.G, s.R, 1).expand(self.count, -1, -1, -1).reshape(-1, s.R, 1)
        for number, start in enumerate(st.groups()):
            at = slice(start, start + st.together * st.size)
            tensors = (st.q5, grouped(grad, s.G), grouped(results.out, s.G), st.by_key_head(results.total))
            x, g, y, total = (
                rows_of(t[self.block, :, :, at], n, work)
                for t, n in zip(tensors, ("fq", "fg", "fo", "ft"), strict=True)
            )
            log = results.kept[2][number, self.block].flatten(0, 1)
            weights = self.chunks(1).queries(x, log.mT, work.take("queries", *x.shape[:2], log.shape[1]))
            weights.sub_(total - factor.expand(-1, -1, total.shape[1] // s.R).reshape(total.shape)).exp_()
            kv, mass = (x.clone() for x in found[-1])
            if logs is not None:
                decay = (log - logs).exp_()
                kv, mass = kv.mul_(decay), mass.mul_(decay)
            delta = torch.linalg.vecdot(g, y).neg_().unsqueeze(2)
            found.append([kv.baddbmm_(weights.mT, g), mass.add_(positive.weigh(weights, delta))])
            logs = log
        return found

    def backward(self, results: Results, grads: Grads, grad: Tensor, state_grads: Sequence[Tensor]) -> None:
        """Add to the gradients, from those of the outputs and of the state after the call."""
        st, s, block = self.st, self.s, self.block
        dq5, *targets = (grouped(x, s.G) for x in (grads.query, grads.key, grads.value))
        given = {"g": grouped(grad, s.G), "o": grouped(results.out, s.G)}
        right = self._right_grads(results, grad) if st.sides == 2 and s.L else []
        left: list[Tensor] = PositiveSums.zero_grads(self.empty()) if st.sides else []
        end, end_grads = self._end_grads(results, state_grads, targets)
        for number, start in reversed(list(enumerate(st.groups()))):
            group = Group(st, block, start)
            g, y = (st.rows(name, x, block, start, st.together) for name, x in given.items())
            total = st.rows("total", st.by_key_head(results.total), block, start, st.together, fill=NOTHING)
            rows = RowGrads(g, y, torch.linalg.vecdot(g, y).neg_().unsqueeze(2), total.squeeze(2))
            t = None
            if st.sides:
                t = self._mixture(group, self._stored(results, number), keep=True)
                scale = st.rows("row", st.by_key_head(results.row_scales[0]), block, start, st.together).squeeze(2)
            dq, dk, dv, far_slope = self._strip_backward(group, t, rows, scale if st.sides else None, grads)
            if t is not None:
                own, d_phi, late = self._far_backward(group, t, rows, scale < 0, far_slope, grads, (dq, dv))
                at = (s.L - 1) // st.size - start // st.size
                if end_grads and at < st.together:
                    share = (t.ladders[0].log[at] - end).exp_()
                    for x, asked in zip(own[0], end_grads, strict=True):
                        x[at].addcmul_(asked, share)
                self._ladders_backward(group, t, [left, *right[number : number + 1]], own, d_phi, late, (dk, dv))
            st.put(dq5, dq, block, start)
            for target, x in zip(targets, (dk, dv), strict=True):
                st.put(target, group.hide(x), block, group.first, add=True)
        if end_grads and not s.L:  # of no queries
            left = [x * (self.begin(0)[0] - end).exp_() for x in end_grads]
        for side in range(st.sides):
            self._begin_backward(side, right[-1] if side and right else left, grads, targets)
        if st.inner:
            pairs = self.pair_grads.view(s.H, -1)
            grads.table.index_add_(1, st.far_index.flatten(), pairs)
        self.add_tensor_grads(grads.tensors)

    def _strip_backward(
        self, group: Group, t: Mixture | None, rows: RowGrads, row_scale: Tensor | None, grads: Grads
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Gradients of queries, keys and values by the near pairs, those of values by the far pairs of strips too.

        The weights of features are multiplied with what makes them the true ones. Also returns the gradients at the
        weights of far pairs, (n, c N, R C, C).
        """
        st, work, (g, _, delta, total) = self.st, self.work, rows
        keys, values = self._both_windows(group)
        weights, log = self._scores(group, keys)
        # Not exp(scores - total): an exponential of EMPTY takes ten times as long as one of a number.
        weights.mul_(log.sub_(total).exp_().unsqueeze(2))
        slope = torch.bmm(g, values.mT, out=work.take("gv", *weights.shape))
        dk, dv = (x.new_zeros(st.total * self.N, st.size, x.shape[2]) for x in (keys, values))
        far = far_slope = slope[:0]
        if t is not None and row_scale is not None:
            t.weights.mul_((t.peak - total).exp_().masked_fill_(row_scale <= 0, 0).unsqueeze(2))
            far = self._far_scores(t)
            far_slope = work.take("far slope", *far.shape)
            by_place = (x.unflatten(0, (-1, self.N)) for x in (group.v, dv))
            for number, (v, target) in enumerate(zip(*map(self._far_blocks, by_place), strict=True)):
                if st.near:
                    torch.add(self._columns(slope)[number], delta, out=far_slope[number])
                else:
                    torch.baddbmm(delta, g, v.mT, out=far_slope[number])
                    target.baddbmm_(far[number].mT, g)
        drops = self._drops(group.start)
        if drops is not None:
            slope.mul_(drops)
        slope.add_(delta).mul_(weights)
        if drops is not None:
            weights.mul_(drops)
        if st.bias is not None:
            self._add_bias_grads(grads, slope, group.start)
        slope.mul_(self.call.scale)
        dq = torch.bmm(slope, keys, out=work.take("dxq", *group.xq.shape))
        sinks = grads.sinks or (None, None)
        self.add_windows(dk, torch.bmm(slope.mT, group.xq, out=work.take("dw", *keys.shape)), sinks[0])
        for pairs, columns in zip(far, self._columns(weights), strict=True) if st.near else ():
            columns.add_(pairs)
        self.add_windows(dv, torch.bmm(weights.mT, g, out=work.take("dw", *values.shape)), sinks[1])
        if t is not None and st.inner and len(far):
            by_head = far.mul_(far_slope).view(len(far), -1, *self.pair_grads.shape[:2], st.size).sum(1)
            self.pair_grads += by_head.movedim(0, 2).flatten(2)
        if t is not None:
            self._times_factors(far_slope)
        return dq, dk, dv, far_slope

    def _far_backward(
        self,
        group: Group,
        t: Mixture,
        rows: RowGrads,
        rescued: Tensor,
        far_slope: Tensor,
        grads: Grads,
        targets: tuple[Tensor, Tensor],
    ) -> tuple[list[list[Tensor]], Tensor, list[tuple[list[int], Tensor]]]:
        """Add the gradients of queries and of rescued rows' values by far pairs.

        Returns:
            what the queries of each block ask of the sums on each side, (c, N, M, E) and (c, N, M, 1), in units of
            their masses; of ``phi``; and of the log features at some places (M, C each), by rescued rows.
        """
        st, work, (g, y, delta, total), (dq, dv) = self.st, self.work, rows, targets
        slope = torch.bmm(g, t.old.mT, out=work.take("slope", *t.weights.shape)).addcmul_(delta, t.decay.mT)
        d_phi = work.take("d_phi", *t.phi.shape).zero_()
        for pairs, phi, target in zip(far_slope, *map(self._phi_blocks, (t.phi, d_phi)), strict=True):
            slope.baddbmm_(pairs, phi.mT)
            target.baddbmm_(t.weights.mT, pairs)
        slope.mul_(t.weights)
        dq.add_(self.chunks(st.together).vjp_queries(group.xq, slope, work.take("dx", *group.xq.shape)))
        kv = torch.bmm(t.weights.mT, g, out=work.take("kv local", *t.old.shape))
        mass = positive.weigh(t.weights, delta)
        own = [[(x * share).unflatten(0, (st.together, -1)) for x in (kv, mass)] for share in t.shares]
        logs, late = slope.sum(2), []
        for row, index, lost in self._rescues(t, group, rescued) if bool(rescued.any()) else ():
            r, share = lost.rescue, (lost.rescue.log - total[row, index]).exp_()
            r.shares.mul_(share.view(-1, 1, 1))
            r.shares_before.mul_(share.unsqueeze(1))
            d = rescue_backward(r, g[row, index], y[row, index], lost.v, True)
            for side, sums in zip(lost.shares, own, strict=True):
                sums[0][lost.block, lost.n] += d.kv_before * side
                sums[1][lost.block, lost.n] += d.mass_before * side
            dq[row, index] += r.chunks.vjp_queries(r.xq, d.query.unsqueeze(0), torch.empty_like(r.xq))[0]
            logs[row, index] += d.query.sum(1)
            late.append((lost.places, d.key))
            if st.inner:
                self.pair_grads[lost.n % self.s.G, index] += d.pair
            for at, value in zip(lost.places, d.value.split(st.size), strict=True):
                dv[at] += value
        self._add_far_logs(grads, t, own, logs)
        return own, d_phi, late

    def _ladders_backward(
        self,
        group: Group,
        t: Mixture,
        grads: list[list[Tensor]],
        own: list[list[Tensor]],
        d_phi: Tensor,
        late: list[tuple[list[int], Tensor]],
        targets: tuple[Tensor, Tensor],
    ) -> None:
        """Go back over the ladders, and add the gradients of keys and values by the sums that they are in.

        Args:
            group: the keys.
            t: the far part.
            grads: of the sums after the last step of each ladder, (N, M, E) and (N, M, 1); in place those of the sums
                before the first.
            own: see `_far_backward`.
            d_phi: see `_far_backward`.
            late: see `_far_backward`.
            targets: gradients of keys and values, (k N, C, X).
        """
        st, features, C = self.st, self.call.features, self.st.size
        k, v, dk, dv = (x[: st.mapped * self.N] for x in (group.k, group.v, *targets))
        sums = [x.new_zeros(st.mapped, *x.shape[1:]) for x in own[0]]  # of each key block
        for side, (ladder, totals, asked) in enumerate(zip(t.ladders, grads, own, strict=True)):
            for step in range(st.together) if side else reversed(range(st.together)):
                for total, target, x in zip(totals, sums, asked, strict=True):
                    target[ladder.first + step].addcmul_(total, ladder.add[step])
                    total.mul_(ladder.keep[step]).add_(x[step])
        kv, mass = (x.flatten(0, 1) for x in sums)
        slope = torch.baddbmm(mass, kv, v.mT, out=self.work.take("slope", *t.p.shape))
        first = st.far[0] if st.far else 0
        slope.view(st.mapped, self.N, features, C)[first : first + len(d_phi)].addcmul_(d_phi, t.ratio)
        slope.mul_(t.p)
        for places, x in late:
            for at, own_slope in zip(places, x.split(C, 1), strict=True):
                slope[at] += own_slope
        dk.add_(self.chunks(st.mapped).vjp_keys(k, slope, self.work.take("dx", *k.shape)))
        dv.baddbmm_(t.p.mT, kv)

    def _end_grads(
        self, results: Results, state_grads: Sequence[Tensor], targets: Sequence[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """The log masses of the state after the call as its last group sees them, and the gradients of its sums.

        Adds to those of the keys that only this state has as far ones.
        """
        if not results.end_state:
            return results.total, []
        log, mean = (x[self.block].flatten(0, 1) for x in results.end_state)
        given = [x[self.block].flatten(0, 1) for x in state_grads]
        grads = PositiveSums.grads_in([log, mean], given)
        self.add_keys_backward([log, mean], grads, self._tail(), targets)
        return log, grads

    def _begin_backward(self, side: int, grads: Sequence[Tensor], all_grads: Grads, targets: Sequence[Tensor]) -> None:
        """From the gradients of the sums before the first group, or after the last, to those of keys and states."""
        span, given = self._beyond(side), self.call.right_state if side else self.call.state
        if span[0] >= span[1] and not given:
            return
        sums = self.begin(side)
        self.add_keys_backward(sums, grads, span, targets)
        if given:
            rows = [x[self.block].flatten(0, 1) for x in given]
            share = (rows[0] - sums[0]).exp_()
            found = PositiveSums.grads_out(rows, [x * share for x in grads])
            for whole, x in zip(all_grads.states[side], found, strict=True):
                whole[self.block] = x.view(whole[self.block].shape)

    def _add_far_logs(self, grads: Grads, t: Mixture, own: list[list[Tensor]], logs: Tensor) -> None:
        """Add the gradients of the far part's log factors, of the sums of each side where they differ."""
        st, s, C = self.st, self.s, self.st.size
        if not st.inner:
            grads.far_logs[0] += logs.view(st.together, self.count, s.G, s.R, C).sum((0, 1, 4)).flatten()
            return
        for side, (ladder, sums) in enumerate(zip(t.ladders, own, strict=True)):
            mean = ladder.mean[1:] if side else ladder.mean[:-1]
            both = (sums[0] * mean).sum((0, 2, 3)) + sums[1].sum((0, 2, 3))
            grads.far_logs[side] += both.view(self.count, s.G).sum(0)

    def _add_bias_grads(self, grads: Grads, slope: Tensor, start: int) -> None:
        """Add the gradients of the bias of near pairs."""
        st, s = self.st, self.s
        whole = slope.view(st.together, self.count, s.G, s.R, st.size, st.width)
        pairs = whole[..., st.count :].sum((0, 1)).flatten(0, 1).flatten(1)  # 0 outside of the window
        grads.table.index_add_(1, st.table_index[:, : st.near].flatten(), pairs)
        if st.sinks is not None:
            query = torch.arange(start, start + st.together * st.size, device=slope.device) + self.call.offset
            left = st.sinks.position[self.block].unsqueeze(1) <= query.view(1, -1, 1)  # (b, c C, s)
            left = left.view(self.count, 1, 1, st.together, st.size, st.count).movedim(3, 0)
            for side, here in enumerate((left, ~left)):
                grads.tails[side] += (whole[..., : st.count] * here).sum((0, 1, 4, 5)).flatten()
