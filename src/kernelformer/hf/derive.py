"""The attention implementation of converted models, as transformers calls it by its name."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from kernelformer.hf.attend import CORE, KeptAttention, PatternMask, attend, make_mask, make_mixed_mask
from kernelformer.modules import AttentionCore


def derive(module: nn.Module, first: type) -> None:
    """Give a module a class of the same name that has the methods of ``first`` before its own."""
    kind: Any = type(module)
    if not issubclass(kind, first):
        module.__class__ = _derived(first, kind)


def underive(module: nn.Module) -> None:
    """Give a module the class that it had before `derive`."""
    module.__class__ = type(module).__bases__[1]


@cache
def _derived(first: type, kind: type) -> type:
    return type(kind.__name__, (first, kind), {"__module__": kind.__module__, "__reduce_ex__": _reduce})


def _reduce(module: nn.Module, protocol: Any) -> tuple[Any, ...]:
    """Tell pickle and copy how to make a derived class again: by its name they would find the original."""
    reduced: Any = object.__reduce_ex__(module, max(2, protocol))
    kind: type = type(module)
    firsts: list[type] = []
    while vars(kind).get("__reduce_ex__") is _reduce:
        first, kind = kind.__bases__
        firsts.insert(0, first)
    return _blank, (kind, *firsts), *reduced[2:]


def _blank(kind: Any, *firsts: type) -> Any:
    """Make a module of a class that is derived again, without its state."""
    for first in firsts:
        kind = _derived(first, kind)
    return kind.__new__(kind)


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
