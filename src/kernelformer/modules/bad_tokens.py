"""Tokens with NaN or an infinity in them, kept away from the rows that do not see them.

A tile of weights is a product, and 0 times NaN is NaN: what a causal mask has set to zero would still reach every row
of the tile. So causal calls are looked at once; where a token is bad, the call is made without it, and the rows that do
see it become NaN afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kernelformer.attention import State
from kernelformer.attention.blocks import all_finite
from kernelformer.attention.relative.call import CHUNK, Layout, Toeplitz
from kernelformer.modules.checks import Bias, Call, can_look


class _Mark(torch.autograd.Function):
    """Write NaN into some rows. Their gradient is NaN where the loss depends on them, and zero where it does not."""

    @staticmethod
    def forward(x: Tensor, rows: Tensor) -> Tensor:
        return x.masked_fill(rows, torch.nan)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (rows,) = ctx.saved_tensors
        return grad.masked_fill(rows & (grad != 0), torch.nan), None


def _mark(x: Tensor, rows: Tensor) -> Tensor:
    marked: Tensor = _Mark.apply(x, rows)  # type: ignore[no-untyped-call]
    return marked


@dataclass(frozen=True)
class BadTokens:
    """Which queries, keys and gates of a call are bad."""

    query: Tensor  # (B, H, L) bool
    key: Tensor  # (B, G, S) bool: visible by the mask, and bad in the key or the value
    gate: Tensor | None  # (B, H, S) bool

    @staticmethod
    def of(call: Call) -> BadTokens | None:
        """Find those of a causal call; None where all is well, or where looking is not possible or means to wait."""
        given = [call.query, call.key, call.value] + ([] if call.gate is None else [call.gate])
        if not can_look(call.query) or all_finite(*given):
            return None
        rows, keys, values, *gates = (~x.detach().isfinite() for x in given)
        tokens = keys.any(-1) | values.any(-1)
        if call.key_mask is not None:
            visible = call.key_mask.unsqueeze(1)
            tokens, gates = tokens & visible, [x & visible for x in gates]
        bad = BadTokens(rows.any(-1), tokens, gates[0] if gates else None)
        return bad if any(bool(x.any()) for x in (bad.query, tokens, *gates)) else None

    def remove(self, call: Call) -> Call:
        """The call with harmless numbers in the place of bad tokens."""
        gone, gate = self.key.unsqueeze(-1), call.gate
        if gate is not None and self.gate is not None:
            gate = gate.masked_fill(self.gate, 0.5)
        return replace(
            call,
            query=call.query.masked_fill(self.query.unsqueeze(-1), 0),
            key=call.key.masked_fill(gone, 0),
            value=call.value.masked_fill(gone, 0),
            gate=gate,
        )

    @property
    def _per_head(self) -> Tensor:
        """Bad keys and gates of every query head, (B, H, S)."""
        key = self.key.repeat_interleave(self.query.shape[1] // self.key.shape[1], 1)
        return key if self.gate is None else key | self.gate

    def mark(self, out: Tensor, bias: Bias | None) -> Tensor:
        """Write NaN into the rows (B, H, L, E) of bad queries and in those that see a bad key."""
        return _mark(out, (self.query | self._seen(bias)).unsqueeze(-1))

    def _seen(self, bias: Bias | None) -> Tensor:
        """Which rows (B, H, L) see a bad key: all from it on, but for those that the bias hides it from."""
        bad, length = self._per_head, self.query.shape[2]
        if bad.shape[2] == 0:
            return torch.zeros_like(self.query)
        if bias is None or not bool(bias.table.isneginf().any()):
            last = torch.arange(length, device=bad.device).clamp_max(bad.shape[2] - 1)
            return (bad.cumsum(2) > 0)[:, :, last]
        layout = bias.layout
        table = bias.table.detach()[:, layout.offset :]  # the part over the keys of this call
        here = Layout(layout.L, layout.S, 0, layout.rows, layout.cols, layout.prefix)
        view = Toeplitz(table, here, CHUNK, True, False)
        weights = bad.flatten(0, 1).unsqueeze(1).to(view.factors.dtype)
        seen = torch.zeros_like(self.query)
        for query in view.queries:
            for key in view.keys:
                if view.sees(query, key):
                    counts = view.row_sums(weights[:, :, key[0] : key[1]], query, key, visible=True)
                    seen[:, :, query[0] : query[1]] |= (counts > 0).flip(1).view(*bad.shape[:2], -1)
        return seen

    def mark_state(self, state: State | None) -> State | None:
        """Write NaN into all that is kept of samples and heads with a bad key: every later row sees it."""
        bad = self._per_head.any(2)
        if state is None or not bool(bad.any()):
            return state
        tensors = []
        for x in state.tensors:
            if x.is_floating_point():
                heads = bad.view(bad.shape[0], x.shape[1], -1).any(2)
                x = _mark(x, heads.view(*heads.shape, *[1] * (x.dim() - 2)))
            tensors.append(x)
        return replace(state, tensors=tuple(tensors))
