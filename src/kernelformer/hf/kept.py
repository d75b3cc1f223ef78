"""Attentions that stay the model's own in a converted model: why, and how they attend there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import causal_mask_function, sdpa_mask

from kernelformer.cache import cached_in
from kernelformer.hf.attend import attend_exactly, causal_without_mask, make_mask, read_mask, wants_weights
from kernelformer.hf.eager import attend_eagerly
from kernelformer.hf.pattern_mask import PatternMask, is_plain

_PATTERN = "_kernelformer_pattern"  # attribute of masks of tried models that are a window, chunks or packed rows
_BLOCK = 256  # queries at least that a window is computed for at once

# Keywords of an attention that no kernel can honour, and why; the first that is set says it.
_REASONS = {
    "softcap": "soft-capped logits (softcap={:g}), which are no product of features",
    "s_aux": "sinks of its own (s_aux), which belong to no key",
    "sliding_window": "a sliding window (sliding_window={}), which is linear already",
}
KEPT_KEYWORDS = tuple(_REASONS)


def reason_to_keep(options: Mapping[str, Any], mask: Tensor | None) -> str:
    """Say why an attention that is called with these options and this mask is kept; "" if it can be replaced."""
    for name, words in _REASONS.items():
        if options.get(name) is not None:
            return words.format(options[name])
    return "a mask of its own (a window, chunks or blocks)" if getattr(mask, _PATTERN, False) else ""


def is_causal(module: nn.Module, mask: Tensor | None, options: Mapping[str, Any]) -> bool:
    """Tell whether an attention with a mask of any pattern, (B, 1, L, S), bool or added, keeps the future out."""
    if mask is None:
        return causal_without_mask(module, options.get("is_causal"))
    if mask.dtype != torch.bool:
        mask = mask > torch.finfo(mask.dtype).min / 2
    return not bool(mask.triu(1 + mask.shape[3] - mask.shape[2]).any())


def make_mask_of_pattern(*args: Any, **options: Any) -> Tensor | None:
    """Make a mask as transformers' SDPA has it, (B, 1, L, S) bool, and mark it where it is a pattern of its own."""
    mask = sdpa_mask(*args, **options)
    if mask is not None and not is_plain(options.get("mask_function", causal_mask_function)):
        setattr(mask, _PATTERN, True)
    return mask


def make_mixed_mask(
    *, mask_function: Callable[..., Any] = causal_mask_function, **options: Any
) -> Tensor | PatternMask | None:
    """Make a mask of a converted model that has kept attentions: theirs is the model's own, see `make_mask`."""
    if is_plain(mask_function):
        return make_mask(mask_function=mask_function, **options)
    return PatternMask({"mask_function": mask_function, "q_offset": 0, "kv_offset": 0, **options})


class KeptAttention(nn.Module):
    """In place of a core: the attention goes on as it was, with the model's own mask and keys.

    Args:
        reason: why it cannot be replaced.
    """

    def __init__(self, reason: str) -> None:
        super().__init__()
        self.reason = reason

    def extra_repr(self) -> str:
        """The reason."""
        return self.reason

    def forward(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | PatternMask | None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend exactly; see `attend` for shapes, and `make_mixed_mask` for the mask.

        Cost: O(L w) time and O(w^2) memory for a mask with a reach of w tokens, else O(L S).
        """
        if cached_in(key) is not None:
            raise ValueError(
                f"{type(module).__name__} is kept as it was ({self.reason}) and needs its keys, which this StateCache "
                f"does not keep; use the cache that kernelformer.hf.new_cache(model) makes."
            )
        causal, weights = causal_without_mask(module, options.pop("is_causal", None)), wants_weights(options)
        if isinstance(mask, PatternMask):
            if mask.reach is not None and query.shape[2] > max(_BLOCK, mask.reach) and not weights:
                return _attend_by_blocks(module, query, key, value, mask, causal, options), None
            mask = mask.whole(query.device)
        elif mask is not None and mask.dim() == 2:
            mask = _pairs(mask, query, key)
        attend = attend_eagerly if weights else attend_exactly
        return attend(module, query, key, value, mask, is_causal=causal, **options)


def _attend_by_blocks(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: PatternMask,
    causal: bool,
    options: dict[str, Any],
) -> Tensor:
    """Attend from a block of queries at a time to the keys within its reach, (B, L, H, E)."""
    assert mask.reach is not None
    size, parts = max(_BLOCK, mask.reach), []
    for start in range(0, query.shape[2], size):
        end = min(query.shape[2], start + size)
        first, last = mask.keys(start, end, causal)
        near = mask.block((start, end), (first, last), query.device)
        some = (query[:, :, start:end], key[:, :, first:last], value[:, :, first:last])
        parts.append(attend_exactly(module, *some, near, is_causal=causal, **options)[0])
    return torch.cat(parts, 1)


def _pairs(mask: Tensor, query: Tensor, key: Tensor) -> Tensor | None:
    """Turn a mask of keys (B, S) for causal attention into one of pairs; None where SDPA does without."""
    L, S = query.shape[2], key.shape[2]
    seen, _ = read_mask(mask, query, key, True)
    if seen is None and L in (1, S):
        return None
    past = torch.ones(L, S, dtype=torch.bool, device=query.device).tril(S - L)[None, None]
    return past if seen is None else past & seen[:, None, None]
