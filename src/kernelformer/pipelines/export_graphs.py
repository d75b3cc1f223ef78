"""The graphs of an exported model: a whole sequence, a prompt with the state after it, and one token after a state.

A state is a flat list of tensors, whose number and shapes are the model's own. They are all that a generation carries
from token to token: positions are counted in them.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kernelformer.attention import State
from kernelformer.attention.state import MadeBy
from kernelformer.cache import StateCache, StateLayer
from kernelformer.hf import new_cache
from kernelformer.hf.kept import KeptAttention
from kernelformer.models import KernelformerPreTrainedModel
from kernelformer.modules.growing import GrowingCore
from kernelformer.modules.mixed import PairState

OPSET = 20
BATCH, LENGTH, PAST = "batch", "length", "past"  # the names of dynamic axes
EXAMPLE = 70  # tokens that a graph is traced with: more than a chunk, and no multiple of one


@dataclass(frozen=True)
class Layout:
    """What a state is beside its tensors.

    Args:
        made_by: see `State`.
        count: of its tensors.
        grows: whether it keeps every key; its tensors are keys, values and mask then.
        parts: of heads of two kinds.
    """

    made_by: MadeBy
    count: int
    grows: bool
    parts: tuple[Layout, ...] = ()

    @staticmethod
    def of(state: State, core: nn.Module) -> Layout:
        """That of a state which this core has made."""
        parts: tuple[Layout, ...] = ()
        if isinstance(state, PairState):
            pairs = zip(state.parts, (core.exact, core.linear), strict=True)
            parts = tuple(Layout.of(x, part) for x, part in pairs)  # type: ignore[arg-type]
        return Layout(state.made_by, len(state.tensors), isinstance(core, GrowingCore), parts)

    def state(self, tensors: Sequence[Tensor], length: int) -> State:
        """A state of these tensors."""
        if not self.parts:
            return State(tuple(tensors), length, self.made_by)
        first, second = self.parts
        middle = first.count
        return PairState.of((first.state(tensors[:middle], length), second.state(tensors[middle:], length)))

    @property
    def token_axes(self) -> list[int | None]:
        """For each tensor the axis along which it grows, if it does."""
        if self.parts:
            return [axis for x in self.parts for axis in x.token_axes]
        return [2, 2, 1][: self.count] if self.grows else [None] * self.count


class Whole(nn.Module):
    """A model that reads a whole sequence: tokens (B, L) and mask (B, L) -> its logits, or vectors of the tokens.

    Args:
        model: an encoder, ours or converted.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.inputs = ["input_ids", "attention_mask"]
        if getattr(model.config, "type_vocab_size", 0) > 1 and "token_type_ids" in _arguments(model):
            self.inputs.append("token_type_ids")
        self.outputs = ["logits" if hasattr(model.config, "id2label") and _has_head(model) else "last_hidden_state"]

    def forward(self, *inputs: Tensor) -> Tensor:
        """Inputs in the order of `inputs`."""
        given = dict(zip(self.inputs, inputs, strict=True))
        result: Tensor = self.model(**given)[self.outputs[0]]
        return result


def _arguments(model: nn.Module) -> list[str]:
    return list(inspect.signature(model.forward).parameters)


def _has_head(model: nn.Module) -> bool:
    """Whether a model gives logits: it is more than the bare encoder that it holds."""
    base = getattr(model, "base_model", model)
    return base is not model
