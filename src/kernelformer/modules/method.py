"""What the library knows about a method: one record, whose fields are the facts."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from kernelformer.feature_maps import FeatureMap
from kernelformer.modules.core import AttentionCore
from kernelformer.modules.kernel import KernelCore
from kernelformer.modules.papers import Paper

Family = Literal["exact", "positive", "signed", "landmarks", "other"]
Fact = bool | Mapping[str, Any]  # true, false, or true with these options
QUADRATIC_COST = "L²"


@dataclass(frozen=True, kw_only=True)
class Method:
    """One method, with everything that the library knows about it.

    A fact that depends on options is the mapping of the options that make it true: skyformer is causal with
    ``{"landmarks": "learned"}``. `holds` evaluates it. A bias and a window need a normalized sum: with
    ``normalize=False`` no method takes one.

    Args:
        about: what it is, in one line, without the paper.
        make: class of its feature map, or of the whole core where it has no map.
        core: class that attends through the feature map.
        fixed: settings that make it this method.
        default: settings that the caller may change, where they differ from the defaults of the class.
        unused: options of its classes that mean nothing to this method.
        paper: where it was published; None: here.
        equation: of the paper, where it has one.
        phi: its feature map, or what it does instead, in a few signs: w frequencies, m their number.
        cost: time in the length L: m features, d head dimension, C components, s landmarks, r rank.
        family: ``exact``; ``positive`` or ``signed`` features, with the default options; ``landmarks``; ``other``.
        size: the option that sets how many features, landmarks or rows it has; None where there is nothing to set.
        causal: whether it can attend to earlier tokens only.
        streaming: whether it can attend token by token, with a state.
        bias: whether it takes a relative position bias.
        window: whether it can attend to near tokens and the first ones exactly, by ``window`` and ``sinks``.
        cross: whether it can attend to another sequence; a method that cannot is causal only.
        cross_method: what a model takes for attention to another sequence by default; None: the same method.
        per_head: whether each head has a map of its own.
    """

    about: str
    make: type[FeatureMap] | type[AttentionCore]
    core: type[KernelCore] = KernelCore
    fixed: Mapping[str, Any] = field(default_factory=dict)
    default: Mapping[str, Any] = field(default_factory=dict)
    unused: tuple[str, ...] = ()
    paper: Paper | None = None
    equation: str = ""
    phi: str
    family: Family
    cost: str = "L m"
    size: str | None = "num_features"
    causal: Fact = True
    streaming: Fact = True
    bias: Fact = True
    window: Fact = True
    cross: Fact = True
    cross_method: str | None = None
    per_head: Fact = field(default_factory=lambda: {"per_head": True})

    @property
    def quadratic(self) -> bool:
        """Whether its time is quadratic in the length."""
        return self.cost == QUADRATIC_COST

    @property
    def has_map(self) -> bool:
        """Whether it attends through a feature map."""
        return issubclass(self.make, FeatureMap)

    @property
    def own_scale(self) -> bool:
        """Whether it has a scale of its own instead of 1 / sqrt(D): unit vectors have, and elu."""
        return "scale" in self.default or bool(self.fixed.get("normalize_qk"))

    def holds(self, fact: Fact, options: Mapping[str, Any] | None = None) -> bool:
        """Whether a fact of this record is true with these options; those that are not given have their defaults."""
        if isinstance(fact, bool):
            return fact
        parameters = inspect.signature(self.make).parameters
        defaults = {name: x.default for name, x in parameters.items()}
        settings = {**defaults, **self.default, **(options or {}), **self.fixed}
        return all(settings.get(name) == value for name, value in fact.items())
