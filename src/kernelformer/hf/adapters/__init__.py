"""Families of models that need more than transformers' `AttentionInterface`: a file each, and the list of them here."""

from __future__ import annotations

from torch import nn

from kernelformer.hf.adapters.base import Family
from kernelformer.hf.adapters.disentangled import Disentangled
from kernelformer.hf.adapters.mpnet import MPNet
from kernelformer.hf.adapters.multihead import Multihead
from kernelformer.hf.adapters.t5 import T5

FAMILIES: tuple[Family, ...] = (MPNet(), T5(), Disentangled(), Multihead())
_INTERFACE = Family()  # all others


def family_of(module: nn.Module) -> Family:
    """Find the family that an attention belongs to."""
    return next((x for x in FAMILIES if x.matches(module)), _INTERFACE)


def tabulate_bias(model: nn.Module) -> None:
    """Make relative biases of a model tables, which take memory of the length and not of its square."""
    for module in model.modules():
        for family in FAMILIES:
            family.tabulate_bias(module)


def restore_bias(model: nn.Module) -> None:
    """Undo `tabulate_bias`."""
    for module in model.modules():
        for family in FAMILIES:
            family.restore_bias(module)
