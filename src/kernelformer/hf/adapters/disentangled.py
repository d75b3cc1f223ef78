"""DeBERTa and XLNet: attention whose logits mix content and distance, which no kernel can; it is kept."""

from __future__ import annotations

from typing import Any

from torch import nn

from kernelformer.hf.adapters.base import Family, Way

_SIZES = {  # attributes with the number of heads and the head dimension, by class
    "DisentangledSelfAttention": ("num_attention_heads", "attention_head_size"),  # DeBERTa, DeBERTa-v2 and v3
    "XLNetRelativeAttention": ("n_head", "d_head"),
}


class Disentangled(Family):
    """Attentions with logits q_i . k_j + q_i . r_(j - i) + ..., where r is an embedding of the distance.

    The second term depends on the query's content and on the distance at once. A relative bias is one number for each
    distance, a kernel one for each pair of contents; neither gives it.
    """

    way: Way = "own"

    def matches(self, module: nn.Module) -> bool:
        """Tell whether it is one of these classes."""
        return type(module).__name__ in _SIZES

    def sizes(self, module: Any) -> tuple[int, int]:
        """Number of heads and head dimension."""
        heads, dim = _SIZES[type(module).__name__]
        return getattr(module, heads), getattr(module, dim)

    def reason_to_keep(self, module: nn.Module) -> str:
        """Say what its logits depend on; DeBERTa without relative positions has a code of its own all the same."""
        if getattr(module, "relative_attention", True):
            return "disentangled attention, whose logits depend on content and distance at once"
        return "attention of its own, which goes by no interface"
