"""Imports on demand: missing extras, lazy names of packages, and layers that other distributions register."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

# What `pip install 'kernelformer[hf]'` brings and the packages beyond the core cannot be imported without.
HF = ("accelerate", "numpy", "rich", "safetensors", "transformers")


class MissingExtraError(ModuleNotFoundError):
    """A part of the library whose optional dependencies are not installed."""


def require_extra(who: str, *modules: str, extra: str = "hf") -> None:
    """Raise, with the command that installs them, if dependencies of `HF` or other modules are missing."""
    missing = [name for name in (*modules, *HF) if not _installed(name)]
    if missing:
        way = f"pip install 'kernelformer[{extra}]'"
        raise MissingExtraError(f"{who} needs {', '.join(missing)}: {way}", name=missing[0])


def _installed(name: str) -> bool:
    """Return True if a module can be imported, without importing it."""
    if name in sys.modules:
        return sys.modules[name] is not None
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def lazy_names(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of a package (PEP 562) whose names are imported from their homes when first used.

    A name that is its own home is a module.
    """

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = import_module(homes[name])
        value = home if homes[name] == f"{package}.{name}" else getattr(home, name)
        setattr(sys.modules[package], name, value)  # the next time it is there
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes})

    return get, names


@dataclass(frozen=True)
class Layer:
    """A whole self-attention layer of another distribution, for the encoders of `kernelformer.models`."""

    home: str  # ``module:name`` of its class, built by ``(width, num_heads, length, **options)``
    about: str
    options: tuple[str, ...]

    def load(self) -> Callable[..., Any]:
        """Import its class."""
        module, _, name = self.home.partition(":")
        kind: Callable[..., Any] = getattr(import_module(module), name)
        return kind


LAYERS: dict[str, Layer] = {}  # by the name in an attention string
