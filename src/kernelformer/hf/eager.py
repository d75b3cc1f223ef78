"""A model's own eager attention, for what transformers' SDPA leaves out."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

NOT_SDPA = ("softcap", "s_aux")  # keywords of an attention that SDPA refuses or passes over
_EAGER = "eager_attention_forward"  # the name of the function in every file of transformers that has one


def attend_eagerly(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    is_causal: bool,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend by the eager function that stands beside the module's class, with the model's own soft caps and sinks.

    Args:
        module: an attention of transformers.
        query: (B, H, L, D).
        key: (B, G, S, D).
        value: (B, G, S, E).
        mask: (B or 1, 1, 1 or L, S), bool or added to the logits; None: all keys, or those so far.
        is_causal: where there is no mask to say it.
        options: of the call.

    Returns:
        (B, L, H, E) and the weights (B, H, L, S).

    Raises:
        ValueError: there is no such function.
    """
    files = (sys.modules.get(kind.__module__) for kind in type(module).__mro__)
    attend = next((getattr(x, _EAGER) for x in files if hasattr(x, _EAGER)), None)
    if attend is None:
        raise ValueError(
            f"{type(module).__name__} of {type(module).__module__} has no {_EAGER} beside it, by which soft-capped "
            f"logits, sinks and weights could be computed exactly; use a model of transformers that has one."
        )
    if mask is None and is_causal:
        L, S = query.shape[2], key.shape[2]
        mask = torch.ones(1, 1, L, S, dtype=torch.bool, device=query.device).tril(S - L)
    if mask is not None and mask.dtype == torch.bool:
        # Models take the softmax in float32, where the least float64 is an infinity, and a row of them is no number.
        least = max(torch.finfo(query.dtype).min, torch.finfo(torch.float32).min)
        mask = query.new_zeros(mask.shape).masked_fill(~mask, least)
    out: tuple[Tensor, Tensor | None] = attend(module, query, key, value, mask, **options)
    return out
