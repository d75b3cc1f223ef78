"""Feature maps from their formula alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from kernelformer.contract import PositiveSpec, Role, SignedSpec
from kernelformer.feature_maps.base import FeatureMap

Settings = tuple[tuple[str, object], ...]


class FormulaMap(FeatureMap):
    """Feature map from its formula: a subclass defines `log_phi` for positive features, or else `phi`.

        class Exponential(FormulaMap):
            @staticmethod
            def log_phi(x, tensors, role):
                (omega,) = tensors
                return x @ omega.mT - 0.5 * x.square().sum(-1, keepdim=True)

        core = KernelCore("exponential", Exponential(head_dim=64, num_heads=8, num_features=256))

    Everything that a core can do follows: causal attention, streaming, biases, masks, gradients of q, k, v and the
    parameters. The formula is called chunk by chunk, so that the cost is linear in the length; chunks made by hand
    (`contract.PositiveSpec.bind`) are faster.

    A formula depends on nothing but its arguments: ``tensors`` are the frequencies omega (*, num_features, D), if
    there are any, and then the parameters (*, ...), where x is (*, C, D) with the same leading axes. Each row of x is
    mapped by itself.

    Args:
        head_dim: D.
        num_heads: H.
        num_features: number of frequencies drawn; 0 for none.
        settings: passed to the formula by name, and saved with the model.

    The others are those of `FeatureMap`.
    """

    nonnegative: ClassVar[bool] = False  # whether no feature of `phi` can be negative, which spares the guard

    def __init__(self, *, num_features: int = 0, settings: Mapping[str, object] | None = None, **common: Any) -> None:
        kind = type(self)
        if (kind.log_phi is FormulaMap.log_phi) == (kind.phi is FormulaMap.phi):
            raise TypeError(f"{kind.__name__} must define log_phi, for positive features, or else phi, and not both.")
        given = tuple((settings or {}).items())
        super().__init__(
            ValueFormula(kind, given) if kind.log_phi is FormulaMap.log_phi else LogFormula(kind, given),
            num_features=num_features,
            settings=settings,
            **common,
        )
        self.formula_settings = dict(given)
        with torch.device("cpu"):  # also where a model is built on the meta device
            for name, x in self.first_values().items():
                self.register_parameter(name, nn.Parameter(x.to("cpu", torch.float32, copy=True)))
        self._start()

    @staticmethod
    def log_phi(x: Tensor, tensors: Sequence[Tensor], role: Role, **settings: object) -> Tensor:
        """Compute ``log phi(x)``, (*, C, D) -> (*, C, M), by differentiable operations."""
        raise TypeError("a map by its formula says log_phi or phi, and this one says neither.")

    @staticmethod
    def phi(x: Tensor, tensors: Sequence[Tensor], role: Role, **settings: object) -> Tensor:
        """Compute ``phi(x)``, (*, C, D) -> (*, C, M), by differentiable operations."""
        raise TypeError("a map by its formula says log_phi or phi, and this one says neither.")

    def first_values(self) -> dict[str, Tensor]:
        """Parameters by name, with their initial values: (heads, ...) each, heads = `self.heads`."""
        return {}

    def _reset_learned(self) -> None:
        with torch.device("cpu"):
            for name, x in self.first_values().items():
                self.get_parameter(name).copy_(x)

    def tensors(self, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        """Frequencies, if there are any, then the parameters: (1, heads, ...) each."""
        learned = [x.to(dtype).unsqueeze(0) for x in self._parameters.values() if x is not None]
        return [*super().tensors(dtype), *learned]


@dataclass(frozen=True)
class LogFormula(PositiveSpec):
    """Spec of a map that defines `FormulaMap.log_phi`."""

    tied = False  # a formula may treat queries and keys differently
    owner: type[FormulaMap]
    settings: Settings

    def log_features(self, x: Tensor, tensors: Sequence[Tensor], scale: float, role: Role) -> Tensor:
        """Evaluate the formula at ``sqrt(scale) x``."""
        return self.owner.log_phi(x * math.sqrt(scale), tensors, role, **dict(self.settings))


@dataclass(frozen=True)
class ValueFormula(SignedSpec):
    """Spec of a map that defines `FormulaMap.phi`."""

    owner: type[FormulaMap]
    settings: Settings

    @property
    def nonnegative(self) -> bool:
        """True if the map says so."""
        return self.owner.nonnegative

    def features(
        self, x: Tensor, tensors: Sequence[Tensor], scale: float, role: Role, normalize: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Evaluate the formula at ``sqrt(scale) x``."""
        return self.owner.phi(x * math.sqrt(scale), tensors, role, **dict(self.settings)), None
