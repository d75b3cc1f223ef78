"""Modules whose class gets some other methods, and which pickle and copy all the same."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import nn


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
