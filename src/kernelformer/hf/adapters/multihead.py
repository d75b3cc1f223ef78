"""`torch.nn.MultiheadAttention`, in any model."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from kernelformer.hf.adapters.base import Family, Way
from kernelformer.modules import AttentionCore, MultiheadAttention
from kernelformer.modules.multihead import swap


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


class Multihead(Family):
    """Modules of torch, which are swapped for ours."""

    way: Way = "multihead"
    covers = "torch.nn.MultiheadAttention"

    def matches(self, module: nn.Module) -> bool:
        """Tell whether it is torch's own, or ours that replaced it; a subclass may compute something else."""
        return type(module) in (nn.MultiheadAttention, KernelMultiheadAttention)

    def sizes(self, module: Any) -> tuple[int, int]:
        """Number of heads and head dimension."""
        return module.num_heads, module.head_dim

    def build(self, module: nn.Module, core: AttentionCore) -> nn.Module:
        """Make the module that replaces torch's, with its weights."""
        assert isinstance(module, nn.MultiheadAttention)
        return KernelMultiheadAttention.from_torch(module, core)

    def install(self, model: nn.Module, module: nn.Module, new: nn.Module) -> None:
        """Put the new module wherever the old one is."""
        swap(model, module, new)

    def remove(self, model: nn.Module, module: nn.Module) -> None:
        """Put torch's own back."""
        assert isinstance(module, KernelMultiheadAttention)
        swap(model, module, module.restored())
