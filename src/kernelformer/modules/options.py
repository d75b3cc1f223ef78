"""What the options of a method are and do, read from the classes that define them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kernelformer.feature_maps import FeatureMap
from kernelformer.modules.build import METHODS, POSITION_OPTIONS, method_options
from kernelformer.modules.gated import GatedCore
from kernelformer.modules.kernel import KernelCore
from kernelformer.modules.layer import KernelAttention
from kernelformer.modules.positions import RelativePositions

_ENTRY = re.compile(r"^    (\w+(?:, \w+)*): (.*(?:\n        .*)*)", re.MULTILINE)


@dataclass(frozen=True)
class Option:
    """One option.

    Args:
        name: as `build_attention` and an attention string take it.
        default: its value where nobody says another.
        about: what it does, in plain text.
    """

    name: str
    default: object
    about: str


def describe_options(method: str) -> list[Option]:
    """All options of a method, in the order of `method_options`."""
    names = method_options(method)
    entry = METHODS[method]
    makers: list[type] = [entry.make]  # type: ignore[list-item]
    if issubclass(makers[0], FeatureMap):
        makers.append(GatedCore if method == "rfa-gate" else KernelCore)
    return _described(names, makers, entry.default)


def describe_positions() -> list[Option]:
    """The options of relative positions, which an attention of a model or a layer has besides those of its method."""
    return _described(POSITION_OPTIONS, [RelativePositions, KernelAttention], {})


def arguments(kind: type) -> dict[str, str]:
    """What the docstrings of a class and of those that it inherits from say of each argument."""
    found: dict[str, str] = {}
    for one in kind.__mro__:
        _, sign, rest = inspect.cleandoc(one.__dict__.get("__doc__") or "").partition("\nArgs:\n")
        section = re.split(r"\n(?=\S)", rest, maxsplit=1)[0] if sign else ""
        for names, text in _ENTRY.findall(section):
            for name in names.split(", "):
                found.setdefault(name, " ".join(text.replace("`", "").split()))
    return found


def defaults(kind: type) -> dict[str, object]:
    """Default values of the arguments of a class and of those that it inherits from."""
    found: dict[str, object] = {}
    for one in kind.__mro__:
        if "__init__" in one.__dict__:
            for name, parameter in inspect.signature(one.__dict__["__init__"]).parameters.items():
                if parameter.default is not inspect.Parameter.empty:
                    found.setdefault(name, parameter.default)
    return found


def _described(names: Sequence[str], kinds: Sequence[type], own: Mapping[str, object]) -> list[Option]:
    values: dict[str, object] = {}
    texts: dict[str, str] = {}
    for kind in reversed(kinds):
        values |= defaults(kind)
        texts |= arguments(kind)
    values |= own
    return [Option(name, values.get(name), texts.get(name, "")) for name in names]
