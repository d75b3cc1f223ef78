"""Base of the families: install a core in an attention, and turn a relative bias into a table."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Literal

from torch import Tensor, nn

from kernelformer.hf.attend import CORE, kernel_attention
from kernelformer.modules import AttentionCore

Interface = Callable[..., tuple[Tensor, Tensor | None]]
Way = Literal["interface", "adapter", "multihead", "own"]  # saved with a converted model; "own" is never replaced
_INTERFACE = "interface"  # attribute of an adapted module


def derive(module: nn.Module, first: type) -> None:
    """Add the methods of a mixin before a module's own, picklably: its class gets a derived one of the same name."""
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
    """Let pickle and copy derive the class again; its name alone would find the original."""
    reduced: Any = object.__reduce_ex__(module, max(2, protocol))
    kind: type = type(module)
    firsts: list[type] = []
    while vars(kind).get("__reduce_ex__") is _reduce:
        first, kind = kind.__bases__
        firsts.insert(0, first)
    return _blank, (kind, *firsts), *reduced[2:]


def _blank(kind: Any, *firsts: type) -> Any:
    """Make an empty module of a class that is derived again."""
    for first in firsts:
        kind = _derived(first, kind)
    return kind.__new__(kind)


class Family:
    """Models that attend through transformers' `AttentionInterface`; others override what is different.

    Attributes:
        way: how a core gets into an attention, as it is saved.
        covers: classes of attentions that are covered only thanks to this family, for messages.
    """

    way: Way = "interface"
    covers = ""

    def matches(self, module: nn.Module) -> bool:
        """Tell whether a module, converted or not, is an attention of this family."""
        return False

    def sizes(self, module: Any) -> tuple[int, int]:
        """Number of heads and head dimension of an attention; those of an interface are seen when it is called."""
        raise TypeError(f"{type(self).__name__} does not say the sizes of a {type(module).__name__}.")

    def has_bias(self, module: nn.Module, name: str, cross: bool) -> bool:
        """Tell whether an attention adds a relative bias to its logits."""
        return False

    def reason_to_keep(self, module: nn.Module) -> str:
        """Say why an attention of this family cannot be replaced, however it is called; "" if it can."""
        return ""

    def build(self, module: nn.Module, core: AttentionCore) -> nn.Module:
        """Make what `install` puts into the model; it may raise, and nothing is changed yet."""
        return core

    def install(self, model: nn.Module, module: nn.Module, new: nn.Module) -> None:
        """Make an attention attend by its core from now on."""
        module.add_module(CORE, new)

    def remove(self, model: nn.Module, module: nn.Module) -> None:
        """Undo `install`."""
        del module._modules[CORE]

    def tabulate_bias(self, module: nn.Module) -> None:
        """Make any module of the family give its relative bias as a table over distances, not as L x S numbers."""

    def restore_bias(self, module: nn.Module) -> None:
        """Undo `tabulate_bias`."""


class AdaptedFamily(Family):
    """Models whose attentions ignore the interface, and are made to use it.

    Attributes:
        forward: a class whose forward attends through the module's ``interface``, to stand before the original's.
    """

    way: Way = "adapter"
    forward: type[nn.Module]

    def matches(self, module: nn.Module) -> bool:
        """Tell whether a module is of the class that is covered; a derived class keeps its name."""
        return type(module).__name__ == self.covers

    def adapt(self, module: nn.Module, interface: Interface) -> Interface | None:
        """Make a module attend through ``interface``; returns the one before, None where there was none."""
        before: Interface | None = vars(module).get(_INTERFACE)
        derive(module, self.forward)
        setattr(module, _INTERFACE, interface)
        return before

    def restore(self, module: nn.Module, before: Interface | None = None) -> None:
        """Undo `adapt`, which returned ``before``."""
        if before is not None:
            setattr(module, _INTERFACE, before)
            return
        delattr(module, _INTERFACE)
        underive(module)

    def install(self, model: nn.Module, module: nn.Module, new: nn.Module) -> None:
        """Make an attention attend by its core from now on."""
        super().install(model, module, new)
        self.adapt(module, kernel_attention)

    def remove(self, model: nn.Module, module: nn.Module) -> None:
        """Undo `install`."""
        self.restore(module)
        super().remove(model, module)
