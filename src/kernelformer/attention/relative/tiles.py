"""One call of attention with a relative bias, cut into blocks of samples, chunks of queries, tiles of keys and tails.

A tail is the bias beyond a distance w on one side of the query, a straight line ``b_w - s (d - w)``. The factor of a
pair is then one of the query times one of the key, both relative to an edge between them, and a running sum that decays
by exp(-s) per token serves every query ahead of it (`Scan`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from kernelformer.attention.blocks import BUFFER, spans, spread, visible_pair
from kernelformer.attention.positive import EMPTY
from kernelformer.attention.relative.call import CHUNK, NO_WINDOW, RelativeCall, Span, Toeplitz
from kernelformer.contract import (
    PositiveChunks,
    PositiveSpec,
    SignedChunks,
    SignedSpec,
    Spec,
    Workspace,
    compute_dtype,
    lookup,
)

TINY = 1e-12  # a row shorter than this is not made longer than itself times 1e12, as `torch.nn.functional.normalize`


@dataclass
class Keys:
    """A tile of keys, mapped."""

    span: Span
    x: Tensor  # (N, C, D)
    v: Tensor  # (N, C, E)
    hidden: Tensor | None  # (N, C) bool
    phi: Tensor  # (N, M, C) in units of shift
    shift: Tensor  # (N, 1, M) or (N, 1, 1)
    size: Tensor | None = None  # (N, C, 1): what x was divided by, if it was
    norms: Tensor | None = None  # (N, 1, C), for the guard, in the same units
    raw: Tensor | None = None  # (N, C, M): signed features without their factor
    factor: Tensor | None = None  # (N, C, 1)
    grad: Tensor | None = None  # of phi, (N, M, C)
    dv: Tensor | None = None  # (N, C, E)
    norm_grad: Tensor | None = None  # (N, 1, C)

    def start(self) -> None:
        """Collect gradients from here on."""
        if self.grad is None:
            self.grad, self.dv = torch.zeros_like(self.phi), torch.zeros_like(self.v)
            self.norm_grad = None if self.norms is None else torch.zeros_like(self.norms)


@dataclass
class Queries:
    """A chunk of queries, mapped."""

    x: Tensor  # (N, C, D)
    phi: Tensor  # (N, C, M): logarithms for positive maps, values for signed ones
    size: Tensor | None = None  # (N, C, 1): what x was divided by, if it was
    norms: Tensor | None = None  # (N, C, 1), for the guard
    grad: Tensor | None = None  # of phi
    norm_grad: Tensor | None = None


class Tiles(ABC):
    """A map bound to the rows of a block."""

    guard = False

    def __init__(self, work: Workspace, normalize_qk: bool) -> None:
        self.work, self.normalize_qk = work, normalize_qk

    def directions(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Rows (N, C, D) as the map sees them, and what they were divided by; with ``normalize_qk``, their L2 norm."""
        if not self.normalize_qk:
            return x, None
        size = torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp_min_(TINY)
        return x / size, size

    @staticmethod
    def through(grad: Tensor, x: Tensor, size: Tensor | None) -> Tensor:
        """The gradient at the rows themselves, from that at their directions x; in place."""
        if size is None:
            return grad
        return grad.addcmul_(x, torch.linalg.vecdot(grad, x).unsqueeze(-1), value=-1).div_(size)

    @abstractmethod
    def keys(self, span: Span, x: Tensor, v: Tensor, hidden: Tensor | None, features: int) -> Keys:
        """Map a tile (N, C, D); hidden keys (N, C) get features of zero."""

    @abstractmethod
    def queries(self, x: Tensor, features: int) -> Queries:
        """Map a chunk (N, C, D)."""

    @abstractmethod
    def base(self, queries: Queries, top: Tensor) -> tuple[Tensor, Tensor]:
        """``left`` for what is in units of ``top``, and the row_scale (N, Cq, 1) of rows that see nothing beyond it."""

    def at(self, base: Tensor, shift: Tensor, top: Tensor) -> Tensor:
        """``left`` for what is in units of ``shift``, from that of ``top``, (N, Cq, M)."""
        return torch.mul(base, (shift - top).exp_(), out=self.work.take("left", *base.shape))

    @abstractmethod
    def left(self, queries: Queries, shift: Tensor, row_scale: Tensor) -> Tensor:
        """``left`` for what is in units of ``shift``, (N, Cq, M)."""

    @abstractmethod
    def top(self, queries: Queries, row_scale: Tensor) -> Tensor:
        """The largest ``phi(q_i) / exp(r_i)`` of the rows, as a shift: log, (N, 1, M) or (N, 1, 1)."""

    @abstractmethod
    def add_left(self, queries: Queries, left: Tensor, slope: Tensor, shift: Tensor, row_scale: Tensor) -> None:
        """Add the gradient of ``left`` (N, Cq, M; may be overwritten) to the queries'."""

    @abstractmethod
    def vjp_queries(self, queries: Queries) -> Tensor:
        """Gradient at x, (N, C, D)."""

    @abstractmethod
    def vjp_keys(self, keys: Keys) -> Tensor:
        """Gradient at x, (N, C, D)."""

    def empty_shift(self, rows: int, features: int, like: Tensor) -> Tensor:
        """The shift of sums over no keys."""
        return like.new_full((rows, 1, features), EMPTY)


class PositiveTiles(Tiles):
    """By logarithms, with a shift per feature."""

    def __init__(self, chunks: PositiveChunks, work: Workspace, normalize_qk: bool) -> None:
        super().__init__(work, normalize_qk)
        self.chunks = chunks

    def keys(self, span: Span, x: Tensor, v: Tensor, hidden: Tensor | None, features: int) -> Keys:
        """``phi = exp(l(k) - shift)``, shift the largest of the tile."""
        x, size = self.directions(x)
        logs = self.chunks.keys(x, x.new_empty(x.shape[0], features, x.shape[1]))
        if hidden is not None:
            logs.masked_fill_(hidden.unsqueeze(1), -torch.inf)
        shift = logs.amax(2, keepdim=True).clamp_min(EMPTY)
        return Keys(span, x, v, hidden, logs.sub_(shift).exp_(), shift.transpose(1, 2), size)

    def queries(self, x: Tensor, features: int) -> Queries:
        """Logarithms."""
        x, size = self.directions(x)
        zero = x.new_zeros(1, 1, features).expand(x.shape[0], 1, features)
        return Queries(x, self.chunks.queries(x, zero, self.work.take("lq", *x.shape[:2], features)), size)

    def base(self, queries: Queries, top: Tensor) -> tuple[Tensor, Tensor]:
        """``r = max_m (l_m(q_i) + top_m)``."""
        logs = torch.add(queries.phi, top, out=self.work.take("base", *queries.phi.shape))
        row_scale = logs.amax(2, keepdim=True)
        return logs.sub_(row_scale).exp_(), row_scale

    def left(self, queries: Queries, shift: Tensor, row_scale: Tensor) -> Tensor:
        """``exp(l(q) + shift - r)``."""
        return torch.add(queries.phi, shift, out=self.work.take("left", *queries.phi.shape)).sub_(row_scale).exp_()

    def top(self, queries: Queries, row_scale: Tensor) -> Tensor:
        """``max_i (l_m(q_i) - r_i)``."""
        return torch.sub(queries.phi, row_scale, out=self.work.take("row_scale", *queries.phi.shape)).amax(
            1, keepdim=True
        )

    def add_left(self, queries: Queries, left: Tensor, slope: Tensor, shift: Tensor, row_scale: Tensor) -> None:
        """The gradient of a logarithm is that of the value times the value."""
        assert queries.grad is not None
        queries.grad.addcmul_(slope, left)

    def vjp_queries(self, queries: Queries) -> Tensor:
        """Through the map."""
        assert queries.grad is not None
        grad = self.chunks.vjp_queries(queries.x, queries.grad, self.work.take("dxq", *queries.x.shape))
        return self.through(grad, queries.x, queries.size)

    def vjp_keys(self, keys: Keys) -> Tensor:
        """Through the map."""
        assert keys.grad is not None
        grad = self.chunks.vjp_keys(keys.x, keys.grad.mul_(keys.phi), self.work.take("dxk", *keys.x.shape))
        return self.through(grad, keys.x, keys.size)


class SignedTiles(Tiles):
    """By values, with one shift per tile for the keys' log factors, and the guard's sums of lengths."""

    def __init__(
        self, chunks: SignedChunks, work: Workspace, normalize_qk: bool, guarded: bool, length: float | None
    ) -> None:
        super().__init__(work, normalize_qk)
        self.chunks, self.guard, self.length = chunks, guarded, length

    def empty_shift(self, rows: int, features: int, like: Tensor) -> Tensor:
        """One for all features."""
        return super().empty_shift(rows, 1, like)

    def lengths(self, phi: Tensor) -> Tensor:
        """What the guard takes for the length of rows (N, C, M), (N, C, 1)."""
        if self.length is not None:
            return phi.new_full((*phi.shape[:2], 1), self.length)
        norms: Tensor = torch.linalg.vector_norm(phi, dim=-1, keepdim=True)
        return norms

    def keys(self, span: Span, x: Tensor, v: Tensor, hidden: Tensor | None, features: int) -> Keys:
        """``phi = phi(k) exp(f - shift)``."""
        x, divided = self.directions(x)
        raw = x.new_empty(*x.shape[:2], features)
        factor = self.chunks.features(x, "key", raw)
        if hidden is not None:
            raw.masked_fill_(hidden.unsqueeze(2), 0)
            factor = None if factor is None else factor.masked_fill_(hidden.unsqueeze(2), EMPTY)
        norms = self.lengths(raw) if self.guard else None
        if norms is not None and hidden is not None:
            norms = norms.masked_fill(hidden.unsqueeze(2), 0)
        if factor is None:
            shift = x.new_zeros(x.shape[0], 1, 1)
            return Keys(span, x, v, hidden, raw.transpose(1, 2), shift, divided, _across(norms), raw)
        factor = factor.clone()
        shift = factor.amax(1, keepdim=True)
        size = (factor - shift).exp_()
        norms = None if norms is None else norms * size
        return Keys(span, x, v, hidden, (raw * size).transpose(1, 2), shift, divided, _across(norms), raw, factor)

    def queries(self, x: Tensor, features: int) -> Queries:
        """Values."""
        x, size = self.directions(x)
        phi = self.work.take("lq", *x.shape[:2], features)
        self.chunks.features(x, "query", phi)
        return Queries(x, phi, size, self.lengths(phi) if self.guard else None)

    def base(self, queries: Queries, top: Tensor) -> tuple[Tensor, Tensor]:
        """The row_scale is the shift itself."""
        return queries.phi, top.expand(-1, queries.phi.shape[1], -1).contiguous()

    def left(self, queries: Queries, shift: Tensor, row_scale: Tensor) -> Tensor:
        """``phi(q) exp(shift - r)``."""
        return torch.mul(queries.phi, (shift - row_scale).exp_(), out=self.work.take("left", *queries.phi.shape))

    def top(self, queries: Queries, row_scale: Tensor) -> Tensor:
        """``max_i -r_i``."""
        return -row_scale.amin(1, keepdim=True)

    def add_left(self, queries: Queries, left: Tensor, slope: Tensor, shift: Tensor, row_scale: Tensor) -> None:
        """A factor per row."""
        assert queries.grad is not None
        queries.grad.addcmul_(slope, (shift - row_scale).exp_())

    def vjp_queries(self, queries: Queries) -> Tensor:
        """With the guard's share along the feature vector, unless its length is constant."""
        assert queries.grad is not None
        if queries.norm_grad is not None and self.length is None:
            assert queries.norms is not None
            queries.grad.addcmul_(queries.norm_grad, _direction(queries.phi, queries.norms))
        out = self.work.take("dxq", *queries.x.shape)
        grad = self.chunks.vjp(queries.x, "query", queries.phi, queries.grad, None, out)
        return self.through(grad, queries.x, queries.size)

    def vjp_keys(self, keys: Keys) -> Tensor:
        """Of the features and of their log factor."""
        assert keys.grad is not None
        assert keys.raw is not None
        grad, log_grad = keys.grad, None
        if keys.factor is not None:
            log_grad = (grad * keys.phi).sum(1).unsqueeze(2)
            grad = grad * (keys.factor - keys.shift).exp_().transpose(1, 2)
        grad = grad.transpose(1, 2).contiguous()
        if keys.norm_grad is not None:
            assert keys.norms is not None
            if keys.factor is not None and log_grad is not None:
                log_grad += (keys.norm_grad * keys.norms).transpose(1, 2)
            if self.length is None:
                along = keys.norm_grad.transpose(1, 2)
                size = 1.0 if keys.factor is None else (keys.factor - keys.shift).exp_()
                grad.add_(along * size * _direction(keys.raw, self.lengths(keys.raw)))
        if keys.hidden is not None:
            grad.masked_fill_(keys.hidden.unsqueeze(2), 0)
        out = self.work.take("dxk", *keys.x.shape)
        return self.through(self.chunks.vjp(keys.x, "key", keys.raw, grad, log_grad, out), keys.x, keys.size)


def _across(norms: Tensor | None) -> Tensor | None:
    return None if norms is None else norms.transpose(1, 2)


def _direction(phi: Tensor, norm: Tensor) -> Tensor:
    return phi / norm.clamp_min(torch.finfo(phi.dtype).tiny)


def make_tiles(
    spec: Spec, tensors: Sequence[Tensor], scale: float, learn: bool, work: Workspace, normalize_qk: bool
) -> tuple[Tiles, PositiveChunks | SignedChunks]:
    """Bind a spec to the rows of a block, normalized; also the bound map, whose `tensor_grads` can be asked."""
    if isinstance(spec, PositiveSpec):
        positive = spec.bind(tensors, scale, True, learn)
        return PositiveTiles(positive, work, normalize_qk), positive
    assert isinstance(spec, SignedSpec)
    signed = spec.bind(tensors, scale, True, learn)
    return SignedTiles(signed, work, normalize_qk, spec.guarded, spec.length(True)), signed


CACHE = 1 << 23  # numbers of mapped keys that are kept for the next chunk of queries: 32 MiB in float32
BAND_CHUNK = 64  # tokens of a chunk of `banded`: the band of a chunk is wider by one chunk than the windows in it
MARGIN = 4.0  # sums may be e^-4 of exp(shift), which costs no digits


class Sums:
    """Running sums ``sum_j phi_j v_j``, ``sum_j phi_j`` and ``sum_j |phi_j|`` in units of ``shift``."""

    def __init__(self, tiles: Tiles, rows: int, features: int, width: int, like: Tensor) -> None:
        self.shift = tiles.empty_shift(rows, features, like)
        self.kv = like.new_zeros(rows, features, width)
        self.ks = like.new_zeros(rows, features, 1)
        self.ns = like.new_zeros(rows, 1, 1)
        self.some = False  # whether anything was added
        self.loaded: Tensor | None = None  # shift of the state that they began with

    def copy(self) -> Sums:
        """A copy whose sums can be changed."""
        other = copy(self)  # the shift is never changed in place
        other.kv, other.ks, other.ns = (x.clone() for x in (self.kv, self.ks, self.ns))
        return other

    @property
    def tensors(self) -> list[Tensor]:
        """The four tensors of a state: shift, kv, ks and ns."""
        return [self.shift, self.kv, self.ks, self.ns]

    def load(self, tensors: Sequence[Tensor]) -> None:
        """Go on from an earlier state."""
        self.shift, self.kv, self.ks, self.ns = (x.clone() for x in tensors)
        self.some, self.loaded = True, self.shift

    def move(self, decay: Tensor | None) -> None:
        """Let the sums fade by ``exp(-decay)``, (N, 1, 1)."""
        if decay is not None:
            self.shift = self.shift - decay
            self.loaded = None if self.loaded is None else self.loaded - decay

    def raise_to(self, shift: Tensor) -> Tensor:
        """Make the sums' shift at least ``shift``; returns it. It is raised by more, so as to be raised seldom."""
        if not bool((shift > self.shift).any()):
            return self.shift
        new = torch.where(shift > self.shift, shift + MARGIN, self.shift)
        keep = (self.shift - new).exp_()
        self.kv.mul_(keep.transpose(1, 2))
        self.ks.mul_(keep.transpose(1, 2))
        self.ns.mul_(keep.amax(2, keepdim=True))
        self.shift = new
        return new

    def add_keys(self, tile: Keys, fade: Tensor | None) -> None:
        """Take in a tile, key j times ``fade_j`` (N, 1, C)."""
        self.some = True
        new = self.raise_to(tile.shift)
        gain = (tile.shift - new).exp_().transpose(1, 2)
        phi = tile.phi if fade is None else tile.phi * fade
        self.kv.addcmul_(torch.bmm(phi, tile.v), gain)
        self.ks.addcmul_(phi.sum(2, keepdim=True), gain)
        if tile.norms is not None:
            norms = tile.norms if fade is None else tile.norms * fade
            self.ns.addcmul_(norms.sum(2, keepdim=True), gain)


@dataclass(frozen=True)
class Tail:
    """The bias beyond the window on one side: ``value - slope (d - window)``."""

    value: Tensor  # (N, 1, 1), at the window, without the table's peak
    slope: Tensor | None  # (N, 1, 1)
    window: int
    entry: int  # of the table, which stands for all of the tail

    def rows(self, distance: Tensor, behind: bool) -> Tensor:
        """Log factor of queries at these distances (C) from the edge that the sums refer to, (N, C or 1, 1)."""
        if self.slope is None:
            return self.value
        return self.value - self.slope * self._beyond(distance, behind).view(1, -1, 1)

    def fade(self, distance: Tensor, behind: bool) -> Tensor | None:
        """Factor of keys at these distances from the edge, (N, 1, C)."""
        if self.slope is None:
            return None
        return torch.exp(-self.slope * self._beyond(distance, behind).view(1, 1, -1))

    def _beyond(self, distance: Tensor, behind: bool) -> Tensor:
        """The window lies on the side of what is behind the edge: at least that far away, it has spent it."""
        return distance - self.window if behind else distance

    def decay(self, steps: int) -> Tensor | None:
        """What moving the edge takes from the log of the sums."""
        return None if self.slope is None else self.slope * steps


@dataclass
class Rows:
    """What a chunk of queries has summed up."""

    num: Tensor  # (N, C, E)
    den: Tensor  # (N, C, 1)
    ns: Tensor | None  # (N, C, 1): lengths of the keys, for the guard


class Block:
    """Some samples of one call: their tiles, tails and chunks."""

    def __init__(self, call: TiledCall, first: int, last: int, learn: bool) -> None:
        self.call, self.block, self.count = call, slice(first, last), last - first
        self.n = self.count * call.heads
        bound = spread(call.tensors, self.block, self.count, call.heads)
        self.tiles, self.map = make_tiles(call.spec, bound, call.scale, learn, call.work, call.normalize_qk)
        self.cache: dict[Span, Keys] = {}
        self.room = max(1, CACHE // max(1, self.n * call.features * call.chunk))

    def rows(self, x: Tensor, span: Span) -> Tensor:
        """A piece of (B, H, T, X) as (N, C, X)."""
        return x[self.block, :, span[0] : span[1]].flatten(0, 1).to(self.call.dtype)

    def per_head(self, x: Tensor) -> Tensor:
        """(H) -> (N, 1, 1)."""
        return x.repeat(self.count).view(-1, 1, 1)

    def queries(self, span: Span) -> Queries:
        """Map a chunk of queries, in reverse order."""
        return self.tiles.queries(self.rows(self.call.query, span).flip(1), self.call.features)

    def map_keys(self, span: Span) -> Keys:
        """Map a tile of keys."""
        call = self.call
        hidden = None
        if call.key_mask is not None:
            hidden = ~call.key_mask[self.block, span[0] : span[1]]
            hidden = hidden.unsqueeze(1).expand(-1, call.heads, -1).flatten(0, 1)
        pair = visible_pair(self.rows(call.key, span), self.rows(call.value, span), hidden)
        return self.tiles.keys(span, *pair, hidden, call.features)

    def keys(self, span: Span) -> Keys:
        """A mapped tile, kept for later where there is room."""
        if span not in self.cache:
            tile = self.map_keys(span)
            if len(self.cache) >= self.room:
                return tile
            self.cache[span] = tile
        return self.cache[span]

    def tail(self, side: int) -> Tail | None:
        """The tail of the keys before (-1) or after (1) a query; None where there is no window."""
        call = self.call
        if call.window == NO_WINDOW or (side > 0 and call.bias.is_causal) or not call.bias.logs.shape[1]:
            return None
        middle = call.layout.L - 1 + call.layout.offset
        entry = min(max(middle + side * call.window, 0), max(call.bias.logs.shape[1] - 1, 0))
        value = self.per_head(call.bias.logs[:, entry] - call.bias.peak)
        slope = None if call.slope is None else self.per_head(call.slope.to(value))
        return Tail(value, slope, call.window, entry)

    def state(self, side: int) -> list[Tensor]:
        """Sums of the keys before (-1) or after (1) those of the call: shift, kv, ks and ns, (N, ...), or nothing."""
        tensors = [x[self.block].flatten(0, 1) for x in self.call.states[side]]
        return [tensors[0].clamp_min(EMPTY), *tensors[1:]] if tensors else []

    def state_grads(self, side: int) -> list[Tensor]:
        """Views (N, ...) of what gradients of kv, ks and ns on that side are added to; nothing where none is wanted."""
        return [x[self.block].flatten(0, 1) for x in self.call.state_grads[side]]

    def empty_rows(self, span: Span) -> Rows:
        """Empty sums for a chunk of queries."""
        size, like = (self.n, span[1] - span[0]), self.call.like
        ns = like.new_zeros(*size, 1) if self.tiles.guard else None
        return Rows(like.new_zeros(*size, self.call.value.shape[3]), like.new_zeros(*size, 1), ns)

    def put(self, target: Tensor, rows: Tensor, span: Span, add: bool = False) -> None:
        """Write rows (N, C, X), in reverse order, into (B, H, T, X)."""
        piece = target[self.block, :, span[0] : span[1]]
        rows = rows.flip(1).view(piece.shape)
        if add:
            piece.add_(rows)
        else:
            piece.copy_(rows)

    def take(self, source: Tensor, span: Span) -> Tensor:
        """Read rows (N, C, X), in reverse order, from (B, H, T, X): the inverse of `put`."""
        return self.rows(source, span).flip(1)

    def write_rows(self, target: Tensor, rows: Tensor, span: Span) -> None:
        """Write rows (N, C, X) into (B, H, T, X) in the order that they have; `rows` reads them."""
        piece = target[self.block, :, span[0] : span[1]]
        piece.copy_(rows.view(piece.shape))

    def sums(self) -> Sums:
        """Running sums over no keys."""
        return Sums(self.tiles, self.n, self.call.features, self.call.value.shape[3], self.call.like)


class TiledCall:
    """One call with what its tiles share: sizes, buffers, and the view of the bias.

    Args:
        inputs: the call.
        learn_bias: collect the gradient of the bias.
        learn_state: collect those of the states.
    """

    def __init__(self, inputs: RelativeCall, learn_bias: bool = False, learn_state: bool = False) -> None:
        self.inputs, query = inputs, inputs.query
        self.query, self.key, self.value, self.key_mask = query, inputs.key, inputs.value, inputs.key_mask
        self.tensors, self.slope, self.scale = inputs.tensors, inputs.slope, inputs.scale
        self.states = {-1: inputs.state, 1: inputs.right_state}
        self.state_grads = {
            side: [torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in state[1:]] if learn_state else []
            for side, state in self.states.items()
        }
        self.spec, self.layout, self.normalize_qk = lookup(inputs.spec), inputs.layout, inputs.normalize_qk
        self.window = NO_WINDOW if inputs.window is None else inputs.window
        self.heads = query.shape[1]
        self.features = self.spec.feature_dim(inputs.tensors, query.shape[3])
        self.dtype = compute_dtype(query.dtype)
        self.work = Workspace(self.dtype, query.device)
        self.like = query.new_empty(0, dtype=self.dtype)
        self.chunk = CHUNK
        positive = isinstance(self.spec, PositiveSpec)
        level = self.window != NO_WINDOW and self.slope is None
        self.is_banded = positive and level and min(self.layout.L, self.layout.S) > 0
        self.band_factors: Tensor | None = None  # of the bias, for `banded`
        if self.is_banded:
            self.chunk = BAND_CHUNK
        elif self.window != NO_WINDOW:  # few heads make small matrices, which want longer chunks
            self.chunk = min(CHUNK, max(128 if query.shape[0] * self.heads > 3 else CHUNK, -(-self.window // 64) * 64))
        self.bias = Toeplitz(inputs.bias.to(self.dtype), self.layout, self.chunk, inputs.is_causal, learn_bias)

    def blocks(self, learn: bool = False) -> list[Block]:
        """Blocks of as many samples as fill a buffer."""
        longest = min(self.chunk, max(self.layout.L, self.layout.S, 1))
        if self.is_banded:
            longest = -(-self.layout.L // self.chunk) * self.chunk
            size = longest * max(self.features, self.value.shape[3])
        else:
            size = longest * max(longest, self.features)
        samples = max(1, min(self.query.shape[0], BUFFER // (self.heads * size)))
        return [Block(self, first, last, learn) for first, last in spans(self.query.shape[0], samples)]

    def positions(self, span: Span, queries: bool) -> Tensor:
        """Positions of the tokens of a span; queries in reverse order."""
        if queries:
            ahead = self.layout.offset
            return torch.arange(ahead + span[1] - 1, ahead + span[0] - 1, -1, device=self.like.device)
        return torch.arange(span[0], span[1], device=self.like.device)

    def edge(self, side: int) -> int:
        """The position that a state on one side refers to: that of the first (-1) or of the last (1) query."""
        return self.layout.offset + (0 if side < 0 else self.layout.L - 1)

    def edges(self, span: Span, queries: bool) -> tuple[int, int]:
        """Positions of the first and the last token of a span."""
        ahead = self.layout.offset if queries else 0
        return ahead + span[0], ahead + span[1] - 1

    def band(self, query: Span) -> list[Span]:
        """The tiles that a chunk meets one by one."""
        if self.window == NO_WINDOW:
            return [key for key in self.bias.keys if self.bias.sees(query, key)]
        low, high = self.edges(query, True)
        first = max(0, low - self.window) // self.chunk
        last = high if self.bias.is_causal else high + self.window
        near = self.bias.keys[first : max(0, last) // self.chunk + 1]
        return [key for key in near if low - key[1] < self.window]  # the last tile may end before its size


class Scan:
    """Running sums over spans behind the current one, in one direction: -1 sums what is on the left."""

    def __init__(self, block: Block, side: int, over_keys: bool, start: int) -> None:
        self.block, self.side, self.over_keys = block, side, over_keys
        # The pairs are (query, key behind it), or (key, query behind it): then the key is on the query's other side.
        self.tail = block.tail(side if over_keys else -side)
        self.sums = block.sums()
        bias = block.call.bias
        spans_behind = bias.keys if over_keys else bias.queries
        self.waiting = list(spans_behind if side < 0 else reversed(spans_behind))
        self.edge = start

    @staticmethod
    def over_state(block: Block, side: int) -> Scan:
        """A scan over the keys on one side of the queries that begins with the state there."""
        scan = Scan(block, side, True, block.call.edge(side))
        state = block.state(side)
        if state:
            scan.sums.load(state)
        return scan

    def to(self, low: int, high: int) -> list[Span]:
        """Move to a span by its first and last position; returns what has fallen behind the window since."""
        assert self.tail is not None
        edge = low if self.side < 0 else high
        self.sums.move(self.tail.decay(abs(edge - self.edge)))
        self.edge = edge
        behind = []
        while self.waiting:
            first, last = self.block.call.edges(self.waiting[0], not self.over_keys)
            gap = edge - last if self.side < 0 else first - edge
            if gap <= self.tail.window:
                break
            behind.append(self.waiting.pop(0))
        return behind

    def copy(self) -> Scan:
        """The sums as they are now, for a later reader."""
        other = copy(self)
        other.sums, other.waiting = self.sums.copy(), list(self.waiting)
        return other

    def distance(self, span: Span, queries: bool) -> Tensor:
        """Distances of the tokens of a span from the edge."""
        return (self.block.call.positions(span, queries) - self.edge).abs().to(self.sums.kv.dtype)

    def highest(self, span: Span) -> Tensor:
        """No less than what the sums give to the rows of a chunk: a shift, with a slope one for every row."""
        return (self.sums.shift + self._tilt(span)).clamp_min(EMPTY)

    def _tilt(self, span: Span) -> Tensor:
        """Log factor of the queries of a span, (N, C or 1, 1); distances are only asked for where they matter."""
        assert self.tail is not None
        return self.tail.value if self.tail.slope is None else self.tail.rows(self.distance(span, True), False)

    def left(self, base: Tensor, top: Tensor, span: Span) -> tuple[Tensor, Tensor]:
        """``left`` of queries ahead of the sums of keys, and the factor of each row, (N, C or 1, 1)."""
        tilt = self._tilt(span)
        return self.block.tiles.at(base, self.sums.shift + tilt, top), tilt
