"""One call of attention with a relative bias, and its flat form, which the torch operators take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from kernelformer.attention.relative.bias_view import Layout
from kernelformer.contract import compute_dtype

NO_WINDOW = -1

# The operators' arguments for a call, in the order of `RelativeCall.tensor_arguments` and `RelativeCall.settings`.
TENSORS = (
    "Tensor query, Tensor key, Tensor value, Tensor? key_mask, Tensor[] tensors, Tensor bias, Tensor? slope, "
    "Tensor[] state"
)
SETTINGS = "str spec, float scale, bool is_causal, SymInt window, SymInt[] layout, bool unit"
NUM_TENSORS, NUM_SETTINGS = (x.count(", ") + 1 for x in (TENSORS, SETTINGS))


@dataclass(frozen=True, kw_only=True)
class RelativeCall:
    """The inputs of one call of attention with a relative bias.

        out_i = sum_j w_ij v_j / sum_j w_ij      w_ij = exp(b_{j-i}) phi(q_i) . phi(k_j)      (NPRF with RPE, Eq. 10)

    Args:
        query: (B, H, L, D).
        key: (B, H, S, D).
        value: (B, H, S, E).
        bias: (H, L + S - 1) over distances j - i, or (H, 2R - 1, 2C - 1) on a grid; -inf = hidden.
        spec: of the map, as `contract.register` names it.
        tensors: of the map, (B or 1, H or 1, ...) in the dtype of the arithmetic.
        scale: the map sees ``sqrt(scale) x``.
        layout: of the tokens.
        key_mask: (B, S) bool, True = attend.
        is_causal: key j is visible to query i iff j <= i + layout.offset.
        window: the bias is a straight line beyond this distance on each side; None: nothing is known of it. The
            gradient of a tail goes to the entry at the window.
        slope: (H), the fall of that line per token; None: it is level.
        state: sums of earlier keys, all of them beyond the window, as `relative_attention` returned them.
        normalize_qk: divide queries and keys by their L2 norm first.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor
    spec: str
    tensors: Sequence[Tensor]
    scale: float
    layout: Layout
    key_mask: Tensor | None = None
    is_causal: bool = False
    window: int | None = None
    slope: Tensor | None = None
    state: Sequence[Tensor] = ()
    normalize_qk: bool = False

    @property
    def tensor_arguments(self) -> tuple[Any, ...]:
        """The arguments of an operator that `TENSORS` declares."""
        tensors, state = list(self.tensors), list(self.state)
        return self.query, self.key, self.value, self.key_mask, tensors, self.bias, self.slope, state

    @property
    def settings(self) -> tuple[Any, ...]:
        """The arguments of an operator that `SETTINGS` declares."""
        x, window = self.layout, NO_WINDOW if self.window is None else self.window
        layout = [x.L, x.S, x.offset, x.rows, x.cols, x.prefix]
        return self.spec, self.scale, self.is_causal, window, layout, self.normalize_qk

    @staticmethod
    def of(tensor_arguments: Sequence[Any], settings: Sequence[Any]) -> RelativeCall:
        """The call that an operator's arguments stand for."""
        query, key, value, key_mask, tensors, bias, slope, state = tensor_arguments
        spec, scale, is_causal, window, layout, normalize_qk = settings
        return RelativeCall(
            query=query,
            key=key,
            value=value,
            bias=bias,
            spec=spec,
            tensors=tensors,
            scale=scale,
            layout=Layout(*layout),
            key_mask=key_mask,
            is_causal=is_causal,
            window=None if window == NO_WINDOW else window,
            slope=slope,
            state=state,
            normalize_qk=normalize_qk,
        )

    def normalized(self) -> tuple[Tensor, Tensor]:
        """Queries and keys, over their L2 norm where that is asked for."""
        query, key = self.query, self.key
        if not self.normalize_qk:
            return query, key
        if self.key_mask is not None:  # the gradient of a norm must not see what the mask hides
            key = key.masked_fill(~self.key_mask[:, None, :, None], 0)
        dtype = compute_dtype(query.dtype)
        return F.normalize(query.to(dtype), dim=-1), F.normalize(key.to(dtype), dim=-1)


def flatten(arguments: Sequence[Tensor | list[Tensor] | None]) -> tuple[list[Tensor | None], list[int | None]]:
    """Arguments of an operator as one list of tensors, and the length of those that are lists."""
    flat: list[Tensor | None] = []
    for x in arguments:
        flat += x if isinstance(x, list) else [x]
    return flat, [len(x) if isinstance(x, list) else None for x in arguments]


def unflatten(flat: Sequence[Tensor | None], lengths: Sequence[int | None]) -> list[Any]:
    """The inverse of `flatten`."""
    rest, arguments = list(flat), []
    for length in lengths:
        count = 1 if length is None else length
        arguments.append(rest[0] if length is None else rest[:count])
        rest = rest[count:]
    return arguments
