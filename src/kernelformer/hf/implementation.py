"""The attention implementation of converted models, as transformers calls it by its name."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from kernelformer.hf.attend import CORE, attend, make_mask
from kernelformer.hf.kept import KeptAttention, make_mixed_mask
from kernelformer.hf.pattern_mask import PatternMask
from kernelformer.modules import AttentionCore

CONVERTED = "kernelformer"  # its name; the modules of converted models have their cores
MIXED = "kernelformer_mixed"  # of models with attentions that could not be replaced, whose masks are as before


def kernel_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | PatternMask | None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend with the core that a converted module has; see `attend` for shapes."""
    core = module._modules.get(CORE)
    if isinstance(core, KeptAttention):
        return core(module, query, key, value, attention_mask, **options)  # type: ignore[no-any-return]
    if not isinstance(core, AttentionCore):
        raise ValueError(
            f"{type(module).__name__} has no core; the implementation {CONVERTED!r} is set by kernelformer.hf.convert, "
            f"not by hand."
        )
    return attend(core, module, query, key, value, attention_mask, **options)


def register_converted() -> None:
    """Make the implementations known to transformers; conversion and loading do this by themselves."""
    for name, mask in ((CONVERTED, make_mask), (MIXED, make_mixed_mask)):
        AttentionInterface.register(name, kernel_attention)
        AttentionMaskInterface.register(name, mask)
