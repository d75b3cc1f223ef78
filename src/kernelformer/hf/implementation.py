"""The attention implementation of converted models, as transformers calls it by its name."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from kernelformer.hf.attend import CORE, attend, make_mask
from kernelformer.modules import AttentionCore

CONVERTED = "kernelformer"  # its name; the modules of converted models have their cores


def kernel_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """Attend with the core that a converted module has; see `attend` for shapes."""
    core = module._modules.get(CORE)
    if not isinstance(core, AttentionCore):
        raise ValueError(
            f"{type(module).__name__} has no core; the implementation {CONVERTED!r} is set by kernelformer.hf.convert, "
            f"not by hand."
        )
    return attend(core, module, query, key, value, attention_mask, **options)


def register_converted() -> None:
    """Make the implementation known to transformers; conversion and loading do this by themselves."""
    AttentionInterface.register(CONVERTED, kernel_attention)
    AttentionMaskInterface.register(CONVERTED, make_mask)
