"""Relative bias between a chunk of queries and a tile of keys, as a view of its table.

Tokens of a chunk are taken in reverse order: then the bias of row a and column c is entry ``start + a + c`` of the
table, a strided view with positive strides, and nothing of the size of a tile is made. On an R x C grid the table is
(2R - 1, 2C - 1), rows and columns of the grid are axes of their own, and the view has two strides on each side.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernelformer.attention.blocks import spans

CHUNK = 256  # tokens of a chunk or a tile; a tile of 8 heads fills `blocks.BUFFER`
Span = tuple[int, int]


@dataclass(frozen=True)
class Layout:
    """Where the tokens are.

    Args:
        L: number of queries.
        S: number of keys.
        offset: position of the first query, counted from the first key.
        rows: of a grid; 0 for a sequence.
        cols: of a grid.
        prefix: tokens before the grid, with bias 0 to and from everything.
    """

    L: int
    S: int
    offset: int = 0
    rows: int = 0
    cols: int = 0
    prefix: int = 0

    @property
    def table(self) -> tuple[int, ...]:
        """Shape of the bias, after the heads."""
        return (2 * self.rows - 1, 2 * self.cols - 1) if self.rows else (max(self.L + self.S - 1, 0),)

    def hide_future(self, bias: Tensor) -> Tensor:
        """The table with -inf where the key comes after the query; in a grid, tokens come row by row."""
        if self.rows:
            future = torch.ones(self.table, dtype=torch.bool, device=bias.device)
            future[: self.rows - 1] = False
            future[self.rows - 1, : self.cols] = False
        else:
            future = torch.arange(self.table[0], device=bias.device) > self.L - 1 + self.offset
        return bias.masked_fill(future, -torch.inf)


class Toeplitz:
    """The factors ``exp(b - peak)`` of one call, and the gradient of b.

    Args:
        bias: (H, *layout.table), log space, -inf = hidden.
        layout: of the tokens.
        chunk: tokens of a chunk or tile, at most; grids take whole rows.
        is_causal: hide the future.
        learn: collect the gradient.
    """

    def __init__(self, bias: Tensor, layout: Layout, chunk: int, is_causal: bool, learn: bool) -> None:
        self.layout, self.is_causal = layout, is_causal
        heads = bias.shape[0]
        if is_causal:
            bias = layout.hide_future(bias)
        flat = bias.reshape(heads, -1).contiguous()  # tiles are views into it by stride
        peak = flat.detach().amax(1) if flat.shape[1] else flat.new_zeros(heads)
        if layout.prefix:
            peak = peak.clamp_min(0)
        self.logs = flat
        self.peak = peak.masked_fill(peak == -torch.inf, 0)  # (H)
        self.factors = (flat - self.peak.unsqueeze(1)).exp_()
        self.grad = torch.zeros_like(self.factors) if learn else None
        self.queries, self.keys = (self._spans(n, chunk) for n in (layout.L, layout.S))

    def _spans(self, length: int, chunk: int) -> list[Span]:
        x = self.layout
        if not x.rows:
            return list(spans(length, chunk))
        step = max(1, chunk // x.cols) * x.cols
        head = [(0, x.prefix)] if x.prefix else []
        return head + [(x.prefix + a, x.prefix + b) for a, b in spans(length - x.prefix, step)]

    def _plain(self, query: Span, key: Span) -> bool:
        """Whether all of the tile has bias 0, because one side is before the grid."""
        return self.layout.rows > 0 and (query[0] < self.layout.prefix or key[0] < self.layout.prefix)

    def sees(self, query: Span, key: Span) -> bool:
        """Whether any pair of the tile is visible by position."""
        return not self.is_causal or key[0] <= self.layout.offset + query[1] - 1

    def _view(self, table: Tensor, query: Span, key: Span) -> Tensor:
        """(H, Cq, Ck), or (H, rows, cols, rows, cols) on a grid."""
        x = self.layout
        if not x.rows:
            start = key[0] - query[1] + x.L
            flat = (table.shape[0], query[1] - query[0], key[1] - key[0])
            return table[:, start:].as_strided(flat, (table.stride(0), 1, 1))
        wide = 2 * x.cols - 1
        low, top = (key[0] - x.prefix) // x.cols, (query[1] - x.prefix) // x.cols
        down, across = ((b - a) // x.cols for a, b in (query, key))
        size = (table.shape[0], down, x.cols, across, x.cols)
        start = (low - top + x.rows) * wide
        return table[:, start:].as_strided(size, (table.stride(0), wide, 1, wide, 1))

    def _constant(self, query: Span, key: Span) -> Tensor:
        """``exp(0 - peak)`` (H, 1, 1) or, causal before the grid, (H, Cq, Ck); rows in reverse order."""
        factor = (-self.peak).exp().view(-1, 1, 1)
        if not (self.is_causal and query[0] < self.layout.prefix):
            return factor
        i = torch.arange(query[1] - 1, query[0] - 1, -1, device=factor.device).unsqueeze(1)
        return factor * (torch.arange(key[0], key[1], device=factor.device) <= i)

    def weigh(self, tile: Tensor, query: Span, key: Span, visible: bool = False) -> Tensor:
        """Multiply a tile (N, Cq, Ck) by the factors, or by whether they are not 0, in place; N = (samples, heads)."""
        heads = self.factors.shape[0]
        if self._plain(query, key):
            constant = self._constant(query, key)
            tile.unflatten(0, (-1, heads)).mul_((constant > 0).to(tile.dtype) if visible else constant)
            return tile
        view = self._view((self.logs > -torch.inf).to(tile.dtype) if visible else self.factors, query, key)
        tile.view(-1, *view.shape).mul_(view)
        return tile

    def row_sums(self, weights: Tensor, query: Span, key: Span, visible: bool = False) -> Tensor:
        """``sum_c factor_ac w_c`` for w (N, 1, Ck), (N, Cq, 1)."""
        tile = weights.repeat(1, query[1] - query[0], 1)
        return self.weigh(tile, query, key, visible).sum(2, keepdim=True)

    def log_rows(self, query: Span, key: Span) -> Tensor:
        """The bias itself, (H, Cq, Ck), for rows that are done in log space."""
        if self._plain(query, key):
            size = (self.factors.shape[0], query[1] - query[0], key[1] - key[0])
            return (self._constant(query, key).log() + self.peak.view(-1, 1, 1)).expand(size)
        view = self._view(self.logs, query, key)
        return view.reshape(view.shape[0], query[1] - query[0], key[1] - key[0])

    def collect(self, slopes: Tensor, query: Span, key: Span) -> None:
        """Add the gradients of a tile's biases (N, Cq, Ck) to the table's."""
        if self.grad is None or self._plain(query, key):
            return
        x = self.layout
        heads = self.grad.shape[0]
        slopes = slopes.view(-1, heads, *slopes.shape[1:]).sum(0) if slopes.shape[0] > heads else slopes
        if not x.rows:
            sums = diagonal_sums(slopes.unsqueeze(3)).squeeze(2)
            start = key[0] - query[1] + x.L
            self.grad[:, start : start + sums.shape[1]] += sums
            return
        grid = slopes.view(heads, -1, x.cols, (key[1] - key[0]) // x.cols, x.cols)
        across = diagonal_sums(grid.permute(0, 1, 3, 2, 4).reshape(-1, x.cols, x.cols, 1)).squeeze(2)
        both = diagonal_sums(across.view(heads, grid.shape[1], grid.shape[3], -1))
        start = (key[0] - x.prefix) // x.cols - (query[1] - x.prefix) // x.cols + x.rows
        self.grad.view(heads, *x.table)[:, start : start + both.shape[1]] += both


def diagonal_sums(x: Tensor) -> Tensor:
    """``out_t = sum over a + c = t`` of x (N, A, C, K): (N, A + C - 1, K)."""
    n, a, c, k = x.shape
    # A row of this buffer is one entry longer than a row of the result, so that the same memory, read with the shorter
    # rows, has row a moved to the right by a.
    wide = a + c
    padded = x.new_zeros(n, a, wide, k)
    padded[:, :, :c] = x
    sums: Tensor = padded.view(n, -1, k)[:, : a * (wide - 1)].unflatten(1, (a, wide - 1)).sum(1)
    return sums


def constant_beyond(bias: Tensor, middle: int, is_causal: bool = False) -> int:
    """The distance beyond which a table (H, T) is constant on each side of entry ``middle``, or on its left; O(H T)."""
    reach = 0
    for side in (bias[:, : middle + 1].flip(1), *(() if is_causal else (bias[:, middle:],))):
        if side.shape[1] < 2:
            continue
        same = (side == side[:, -1:]).all(0).flip(0)
        reach = max(reach, side.shape[1] - 1 - int(same.cumprod(0).sum()) + 1)
    return reach
