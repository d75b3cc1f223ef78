"""`torch.nn.MultiheadAttention` in a model that was converted."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from kernelformer.modules import MultiheadAttention


class KernelMultiheadAttention(MultiheadAttention):
    """A `MultiheadAttention` that counts its calls, and whose core has to be in a state dict.

    A folder without the weights of a core is damaged, not one of the original.
    """

    calls: int = 0  # so far

    def forward(self, *args: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
        """Attend; see `MultiheadAttention.forward`."""
        self.calls += 1
        return super().forward(*args, **options)

    def _load_from_state_dict(self, *args: Any) -> None:
        nn.MultiheadAttention._load_from_state_dict(self, *args)
