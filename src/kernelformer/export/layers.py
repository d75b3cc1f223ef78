"""The graphs of one causal layer: a prompt with the state after it, and one token after a state.

For networks of one's own, whose layers are `KernelAttention`; see `graphs` for whole models.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from kernelformer.export.layouts import Layout, Seen, past_length, state_names
from kernelformer.modules import KernelAttention


class LayerPrompt(nn.Module):
    """A causal layer on a prompt: (B, L, E) and a mask (B, L) -> (B, L, E), the next position, and the state's tensors.

    Args:
        layer: in evaluation mode.
    """

    def __init__(self, layer: KernelAttention) -> None:
        super().__init__()
        if not layer.causal:
            raise ValueError(
                "a layer with causal=False has no state; give it to torch.export.export itself, with dynamic_shapes."
            )
        self.layer = layer
        self.seen = Seen()
        self.inputs = ["x", "key_mask"]

    @property
    def layouts(self) -> list[Layout]:
        """What the state is beside its tensors, known after the first call."""
        return self.seen.layouts

    @property
    def outputs(self) -> list[str]:
        """Names of the outputs, known after the first call."""
        return ["y", *(f"next_{x}" for x in state_names(self.layouts))]

    def forward(self, x: Tensor, key_mask: Tensor) -> tuple[Tensor, ...]:
        """Read a prompt."""
        y, state = self.layer(x, key_mask=key_mask, return_state=True)
        self.seen.layouts = [Layout.of(state, self.layer.core)]
        position = torch.full((x.shape[0], 1), x.shape[1], dtype=torch.long, device=x.device)
        return y, position, *state.tensors

    def example(self, length: int, batch: int = 2) -> tuple[Tensor, ...]:
        """Inputs: random vectors, the first row padded on the left."""
        like, random = self.layer.query.weight, torch.Generator().manual_seed(length)
        x = torch.randn(batch, length, self.layer.embed_dim, generator=random).to(like)
        mask = torch.ones(batch, length, dtype=torch.bool, device=like.device)
        mask[0, : length // 3] = False
        return x, mask


class LayerStep(nn.Module):
    """A causal layer on one token: (B, 1, E), its position (B, 1) and the state -> the same as a `LayerPrompt` gives.

    Args:
        layer: as that of the prompt.
        layouts: of the prompt.
    """

    def __init__(self, layer: KernelAttention, layouts: Sequence[Layout]) -> None:
        super().__init__()
        self.layer, self.layouts = layer, list(layouts)
        self.inputs = ["x", *state_names(self.layouts)]
        self.outputs = ["y", *(f"next_{x}" for x in state_names(self.layouts))]

    def forward(self, x: Tensor, position: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Go on by one token."""
        state = self.layouts[0].state(tensors, past_length(self.layouts, tensors))
        where = {} if self.layer.rotary is None else {"position_ids": position}
        y, after = self.layer.step(x, state, **where)
        return y, position + 1, *after.tensors

    @staticmethod
    def example(outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Inputs: the last vector that a prompt's graph gave, and the state."""
        return outputs[0][:, -1:], *outputs[1:]
