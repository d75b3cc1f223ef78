"""MPNet: attention of its own, and a relative bias of its encoder that all layers share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from kernelformer.hf.adapters.base import AdaptedFamily, Interface, derive, underive

MAX_DISTANCE = 128  # where MPNet's buckets end


class AdaptedMPNet(nn.Module):
    """MPNet's self-attention, which attends through the interface that it is given."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_bias: Tensor | None = None,
        output_attentions: bool = False,
        **keywords: Any,
    ) -> tuple[Tensor, ...]:
        """Attend as MPNet's own does, (B, L, d) -> (B, L, d) and the weights where they are asked for."""
        size: Any = self.attention_head_size
        projections: Any = (self.q, self.k, self.v)
        query, key, value = (x(hidden_states).unflatten(-1, (-1, size)).transpose(1, 2) for x in projections)
        dropout: Any = self.dropout
        interface: Interface = self.interface  # type: ignore[assignment]
        out, weights = interface(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=dropout.p if self.training else 0.0,
            scaling=size**-0.5,
            is_causal=False,
            position_bias=position_bias,
            output_attentions=output_attentions,
            **keywords,
        )
        last: Any = self.o
        mixed: Tensor = last(out.flatten(2))
        return (mixed, weights) if output_attentions and weights is not None else (mixed,)


class TableMPNet(nn.Module):
    """MPNet's encoder with its bias as a table over distances."""

    def compute_position_bias(self, x: Tensor, position_ids: Tensor | None = None, num_buckets: int = 32) -> Tensor:
        """Bias of all pairs, (1, H, 2 L - 1) over j - i."""
        if position_ids is not None:
            raise ValueError("positions of a converted MPNet are those of the tokens; leave position_ids out.")
        L = x.shape[1]
        buckets: Any = self.relative_position_bucket
        table: Any = self.relative_attention_bias
        rows = buckets(torch.arange(1 - L, L, device=x.device), num_buckets=num_buckets)
        return table(rows).T.unsqueeze(0)  # type: ignore[no-any-return]


class MPNet(AdaptedFamily):
    """MPNet and the sentence encoders made from it."""

    covers = "MPNetSelfAttention"
    forward = AdaptedMPNet

    def sizes(self, module: Any) -> tuple[int, int]:
        """Number of heads and head dimension."""
        return module.num_attention_heads, module.attention_head_size

    def has_bias(self, module: nn.Module, name: str, cross: bool) -> bool:
        """All its attentions have one."""
        return True

    def tabulate_bias(self, module: nn.Module) -> None:
        """Make the encoder give a table, and its attentions know where it ends."""
        if type(module).__name__ == "MPNetEncoder":
            derive(module, TableMPNet)
        elif isinstance(module, AdaptedMPNet):
            module.relative_attention_max_distance = MAX_DISTANCE  # type: ignore[assignment]

    def restore_bias(self, module: nn.Module) -> None:
        """Undo `tabulate_bias`."""
        if isinstance(module, TableMPNet):
            underive(module)
        elif isinstance(module, AdaptedMPNet):
            del module.relative_attention_max_distance
