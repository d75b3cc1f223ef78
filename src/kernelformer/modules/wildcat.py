"""Attention to pivoted landmarks, whose outputs stay in the range of the values."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from kernelformer.attention import State
from kernelformer.contract import compute_dtype
from kernelformer.modules.call import Call
from kernelformer.modules.kernel import KernelCore


class WildcatCore(KernelCore):
    """`KernelCore` with outputs clipped to the range of the values, which all averages of them are in.

    The weights of landmarks can be negative, so that a poor approximation leaves that range. Where near weights are
    dropped in training, and what is left is divided by its share, nothing is clipped.
    """

    causal_way = "'skyformer' with kernel='softmax' and landmarks='learned', or a method such as 'favor+'"

    def attention_matrix(self, query: Tensor, key: Tensor, **how: Any) -> Tensor:
        """The weights (B, H, L, S) as they are, signed, with sum 1; see `AttentionCore.attention_matrix`."""
        plain = copy.copy(self)  # unit vectors are no values, whose range would say anything
        plain.__class__ = KernelCore  # type: ignore[assignment]
        return KernelCore.attention_matrix(plain, query, key, **how)

    def _attend(self, call: Call) -> tuple[Tensor, State | None]:
        out, after = super()._attend(call)
        if self.near is not None and self.near.dropout:
            return out, after
        lowest, highest = value_range(call.value.detach(), call.key_mask, self.num_heads)
        bounds = lowest.to(out.dtype), highest.to(out.dtype)
        return (torch.clamp if out.requires_grad else torch.clamp_)(out, *bounds), after


def value_range(value: Tensor, key_mask: Tensor | None, heads: int) -> tuple[Tensor, Tensor]:
    """The least and the largest value of the visible keys, (B, H, 1, E) each; 0 where there is none.

    Wider by the rounding of an average, so that clipping stops no gradient where it would change nothing else.

    Args:
        value: (B, G, S, E).
        key_mask: (B, S) bool, True = attend.
        heads: H.
    """
    if value.shape[2] == 0:
        nothing = value.new_zeros(value.shape[0], heads, 1, value.shape[3])
        return nothing, nothing
    bounds = []
    for empty, pick in ((torch.inf, torch.amin), (-torch.inf, torch.amax)):
        visible = value if key_mask is None else value.masked_fill(~key_mask[:, None, :, None], empty)
        bound = pick(visible, 2, keepdim=True)
        if key_mask is not None:
            bound = bound.masked_fill(~key_mask.any(1)[:, None, None, None], 0)
        bounds.append(bound.to(compute_dtype(bound.dtype)).repeat_interleave(heads // value.shape[1], 1))
    rounding = 8 * torch.finfo(bounds[0].dtype).eps * torch.maximum(bounds[0].abs(), bounds[1].abs())
    return bounds[0] - rounding, bounds[1] + rounding
