"""T5 and models like it: a relative bias of the first layer that all layers of self-attention share."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from kernelformer.hf.adapters.base import Family, derive, underive

_COMPUTE_BIAS = ["self", "query_length", "key_length", "device", "past_seen_tokens"]  # arguments that `TableT5` takes


class TableT5(nn.Module):
    """T5's attention with its bias as a table over distances instead of L x S numbers."""

    def compute_bias(
        self, query_length: int, key_length: int, device: Any = None, past_seen_tokens: int = 0
    ) -> Tensor | None:
        """Bias of all pairs, (1, H, n) over j - i; None in a layer without a bias of its own.

        Distances are those of all pairs; for one token after others that a `StateCache` has seen, where the key is the
        token's own, those from -max_distance to 0.
        """
        table = self._modules.get("relative_attention_bias")
        if table is None:
            return None
        past, reach = int(past_seen_tokens), int(self.relative_attention_max_distance)  # type: ignore[arg-type]
        low, high = -(past + query_length - 1), key_length - 1 if past == 0 else query_length - 1
        if past and key_length == query_length == 1:
            low = -reach
        weight: Any = table.weight
        buckets: Any = self._relative_position_bucket
        settings = {
            "bidirectional": not self.is_decoder,
            "num_buckets": self.relative_attention_num_buckets,
            "max_distance": reach,
        }
        if "bidirectional" not in inspect.signature(buckets).parameters:  # UMT5's knows them itself
            settings = {}
        rows = buckets(torch.arange(low, high + 1, device=weight.device), **settings)
        return table(rows).T.unsqueeze(0)  # type: ignore[no-any-return]


class T5(Family):
    """Attentions with T5's buckets of distances: T5, mT5, UMT5 and others that copied them."""

    def matches(self, module: nn.Module) -> bool:
        """Tell whether a module is an attention that can have a bias."""
        return hasattr(module, "has_relative_attention_bias")

    def has_bias(self, module: nn.Module, name: str, cross: bool) -> bool:
        """Self-attention has one, of its own or of the first layer; cross-attention has none."""
        return not cross and ".EncDecAttention" not in f".{name}"

    def tabulate_bias(self, module: nn.Module) -> None:
        """Make an attention compute a table."""
        kind: Any = type(module)
        if not (hasattr(kind, "compute_bias") and hasattr(kind, "_relative_position_bucket")):
            return
        if list(inspect.signature(kind.compute_bias).parameters) == _COMPUTE_BIAS:
            derive(module, TableT5)
            module.has_relative_attention_bias = True  # type: ignore[assignment]  # else it makes L x S zeros

    def restore_bias(self, module: nn.Module) -> None:
        """Undo `tabulate_bias`."""
        if isinstance(module, TableT5):
            module.has_relative_attention_bias = "relative_attention_bias" in module._modules  # type: ignore[assignment]
            underive(module)
