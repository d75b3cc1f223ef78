"""Masks of windows, chunks and other patterns of a model's own, made block by block where they are needed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask


def is_plain(mask_function: Callable[..., Any]) -> bool:
    """Tell whether a mask of transformers is causal or hides nothing, and is not a window, chunks or packed rows."""
    return mask_function in (causal_mask_function, bidirectional_mask_function)


@dataclass(frozen=True)
class PatternMask:
    """A mask of transformers that is not formed: L x S numbers would be the square of the length.

    Args:
        options: what transformers asks its mask functions for: lengths, offsets, the pattern, padding.
    """

    options: dict[str, Any]

    @property
    def reach(self) -> int | None:
        """The longest distance of a query to a key that it sees; None where there is no bound."""
        bound: int | None = self.options.get("local_size")
        return None if self.options.get("use_vmap") else bound  # else a pattern of the caller's own comes on top

    def whole(self, device: torch.device) -> Tensor | None:
        """The mask as SDPA takes it, (B, 1, L, S) bool; None where SDPA does without."""
        return sdpa_mask(**{**self.options, "device": device})

    def keys(self, start: int, end: int, causal: bool) -> tuple[int, int]:
        """The keys that queries from ``start`` to ``end`` can see at most, by their numbers."""
        assert self.reach is not None
        shift = int(self.options["q_offset"]) - int(self.options["kv_offset"])
        first = max(0, shift + start - self.reach)
        return first, min(self.options["kv_length"], shift + end + (0 if causal else self.reach))

    def block(self, queries: tuple[int, int], keys: tuple[int, int], device: torch.device) -> Tensor | None:
        """The mask of some queries and keys, bool; ranges of their numbers in this call."""
        own = {
            "q_length": queries[1] - queries[0],
            "q_offset": self.options["q_offset"] + queries[0],
            "kv_length": keys[1] - keys[0],
            "kv_offset": self.options["kv_offset"] + keys[0],
            "allow_is_causal_skip": False,
            "allow_is_bidirectional_skip": False,
            "device": device,
        }
        return sdpa_mask(**{**self.options, **own})
