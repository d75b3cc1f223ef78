"""The graphs of an exported model: a whole sequence, a prompt with the state after it, and one token after a state.

A state is a flat list of tensors, whose number and shapes are the model's own. They are all that a generation carries
from token to token: positions are counted in them. The classes here are modules that `torch.export` takes.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from kernelformer.attention import State
from kernelformer.attention.state import MadeBy
from kernelformer.cache import StateCache
from kernelformer.hf import new_cache
from kernelformer.hf.attend import CORE
from kernelformer.models import KernelformerForCausalLM
from kernelformer.modules import AttentionCore, KernelAttention
from kernelformer.modules.exact import GrowingCore
from kernelformer.modules.mixed import PairState


@dataclass(frozen=True)
class Layout:
    """Structure of a state without its tensors; where it grows they are keys, values and mask."""

    made_by: MadeBy
    count: int
    grows: bool
    parts: tuple[Layout, ...] = ()

    @staticmethod
    def of(state: State, core: nn.Module) -> Layout:
        """Layout of a state which this core has made."""
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
        axes: list[int | None] = [2, 2, 1]
        return axes[: self.count] if self.grows else [None] * self.count


@dataclass
class Seen:
    """Facts found by a traced call; `torch.export` restores attributes of the module itself."""

    layouts: list[Layout] = field(default_factory=list)
    output: str = ""


def state_names(layouts: Sequence[Layout]) -> list[str]:
    """Names of the tensors that go from token to token: the position, and those of the states."""
    return ["position", *(f"state_{i}_{n}" for i, x in enumerate(layouts) for n in range(x.count))]


def state_axes(layouts: Sequence[Layout]) -> list[int | None]:
    """For each tensor of all states the axis along which it grows, if it does."""
    return [axis for x in layouts for axis in x.token_axes]


def past_length(layouts: Sequence[Layout], tensors: Sequence[Tensor]) -> int:
    """Tokens that states which keep every key hold; a state of constant size has no use for its length, which is 1."""
    pairs = zip(tensors, state_axes(layouts), strict=True)
    return next((x.shape[axis] for x, axis in pairs if axis is not None), 1)


class StatefulGraph(nn.Module):
    """Base of graphs that give a result, the next position and the tensors of states."""

    result: ClassVar[str]

    def __init__(self, layouts: Sequence[Layout] = ()) -> None:
        super().__init__()
        self.seen = Seen(list(layouts))

    @property
    def layouts(self) -> list[Layout]:
        """Structure of the states; of a prompt known after the first call."""
        return self.seen.layouts

    @property
    def outputs(self) -> list[str]:
        """Names of the outputs; of a prompt known after the first call."""
        return [self.result, *(f"next_{x}" for x in state_names(self.layouts))]


class LayerPrompt(StatefulGraph):
    """A causal layer on a prompt: (B, L, E) and a mask (B, L) -> (B, L, E), the next position and the state."""

    result = "y"

    def __init__(self, layer: KernelAttention) -> None:
        super().__init__()
        if not layer.causal:
            raise ValueError(
                "a layer with causal=False has no state; give it to torch.export.export itself, with dynamic_shapes."
            )
        self.layer = layer
        self.inputs = ["x", "key_mask"]

    def forward(self, x: Tensor, key_mask: Tensor) -> tuple[Tensor, ...]:
        """Read a prompt."""
        y, state = self.layer(x, key_mask=key_mask, return_state=True)
        self.seen.layouts = [Layout.of(state, self.layer.core)]
        position = torch.full((x.shape[0], 1), x.shape[1], dtype=torch.long, device=x.device)
        return y, position, *state.tensors

    def example(self, length: int, batch: int = 2) -> tuple[Tensor, ...]:
        """Inputs: random vectors, the first row padded on the left."""
        like, random = self.layer.query.weight, torch.Generator().manual_seed(length)
        x = torch.randn(batch, length, self.layer.embed_dim, generator=random).to(like)
        mask = torch.ones(batch, length, dtype=torch.bool, device=like.device)
        mask[0, : length // 3] = False
        return x, mask


class LayerStep(StatefulGraph):
    """A causal layer on one token: (B, 1, E), its position (B, 1) and the state -> the same as a `LayerPrompt`."""

    result = "y"

    def __init__(self, layer: KernelAttention, layouts: Sequence[Layout]) -> None:
        super().__init__(layouts)
        self.layer = layer
        self.inputs = ["x", *state_names(layouts)]

    def forward(self, x: Tensor, position: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Decode one token."""
        state = self.layouts[0].state(tensors, past_length(self.layouts, tensors))
        where = {} if self.layer.rotary is None else {"position_ids": position}
        y, after = self.layer.step(x, state, **where)
        return y, position + 1, *after.tensors

    @staticmethod
    def example(outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Inputs: the last vector that a prompt's graph gave, and the state."""
        return outputs[0][:, -1:], *outputs[1:]


BATCH, LENGTH, PAST = "batch", "length", "past"  # the names of dynamic axes
EXAMPLE = 70  # tokens that a graph is traced with: more than a chunk, and no multiple of one


class Whole(nn.Module):
    """An encoder that reads a whole sequence: tokens and mask (B, L) -> logits, or vectors of the tokens."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.inputs = ["input_ids", "attention_mask"]
        if (
            getattr(model.config, "type_vocab_size", 0) > 1
            and "token_type_ids" in inspect.signature(model.forward).parameters
        ):
            self.inputs.append("token_type_ids")
        self.seen = Seen()

    def forward(self, *inputs: Tensor) -> Tensor:
        """The inputs in the order of `inputs`."""
        result = self.model(**dict(zip(self.inputs, inputs, strict=True)), return_dict=True)
        self.seen.output = "logits" if "logits" in result else "last_hidden_state"
        output: Tensor = result[self.seen.output]
        return output

    @property
    def outputs(self) -> list[str]:
        """Names of the outputs, known after the first call."""
        return [self.seen.output]

    def example(self, length: int, batch: int = 2) -> tuple[Tensor, ...]:
        """Inputs: random tokens, those of the first row padded on the right."""
        ids, mask = random_tokens(self.model, batch, length), torch.ones(batch, length, dtype=torch.long)
        mask[0, length - length // 3 :] = 0
        return (ids, mask, torch.zeros_like(ids))[: len(self.inputs)]


class Prompt(StatefulGraph):
    """A causal model on a prompt: tokens and mask (B, L) -> logits, positions, and the tensors of all states.

    Padding stands on the left, so that the last token is real. Logits are (B, L, vocabulary) for ``every`` token, or
    (B, 1, vocabulary) for the last.
    """

    result = "logits"

    def __init__(self, model: nn.Module, every: bool = False) -> None:
        super().__init__()
        self.model, self.every = model, every
        self.inputs = ["input_ids", "attention_mask"]

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, ...]:
        """Read a prompt."""
        positions = (attention_mask.cumsum(1) - 1).clamp_min(0)
        cache = empty_cache(self.model)
        logits = _call(self.model, input_ids, positions, cache, 0 if self.every else 1, attention_mask=attention_mask)
        states = [layer.state for layer in cache.layers]
        self.seen.layouts = [Layout.of(x, core) for x, core in zip(states, causal_cores(self.model), strict=True)]
        return logits, attention_mask.sum(1, keepdim=True), *(x for state in states for x in state.tensors)

    def example(self, length: int, batch: int = 2) -> tuple[Tensor, ...]:
        """Inputs: random tokens, those of the first row padded on the left."""
        ids, mask = random_tokens(self.model, batch, length), torch.ones(batch, length, dtype=torch.long)
        mask[0, : length // 3] = 0
        return ids, mask


class Step(StatefulGraph):
    """A causal model on one token: token (B, 1), its position (B, 1) and the states -> the same as a `Prompt` gives."""

    result = "logits"

    def __init__(self, model: nn.Module, layouts: Sequence[Layout]) -> None:
        super().__init__(layouts)
        self.model = model
        self.inputs = ["input_ids", *state_names(layouts)]

    def forward(self, input_ids: Tensor, position: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Decode one token."""
        cache, rest, length = empty_cache(self.model), list(tensors), past_length(self.layouts, tensors)
        for layer, layout in zip(cache.layers, self.layouts, strict=True):
            layer.state = layout.state(rest[: layout.count], length)
            del rest[: layout.count]
        logits = _call(self.model, input_ids, position, cache, 1)
        return logits, position + 1, *(x for layer in cache.layers for x in layer.state.tensors)

    @staticmethod
    def example(outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Inputs: the likeliest token after what a prompt's graph gave, and the states."""
        return outputs[0][:, -1].argmax(1, keepdim=True), *outputs[1:]


def _call(model: Any, ids: Tensor, positions: Tensor, cache: StateCache, keep: int, **given: Any) -> Tensor:
    result = model(ids, position_ids=positions, past_key_values=cache, logits_to_keep=keep, use_cache=True, **given)
    logits: Tensor = result.logits
    return logits


def empty_cache(model: Any) -> StateCache:
    """A cache with a state for every layer."""
    if isinstance(model, KernelformerForCausalLM):
        return model.new_cache()
    return StateCache(len(list(causal_cores(model))), layers=new_cache(model).layers)


def causal_cores(model: nn.Module) -> Iterator[AttentionCore]:
    """The cores of a causal model, by layer; `KeptAttention` and other modules in their place are none."""
    for name, module in model.named_modules():
        own = name.rpartition(".")[2] == ("core" if isinstance(model, KernelformerForCausalLM) else CORE)
        if own and isinstance(module, AttentionCore):
            yield module


def random_tokens(model: Any, batch: int, length: int) -> Tensor:
    """Tokens of a model (B, L), always the same."""
    size = model.config.vocab_size
    return torch.randint(min(3, size - 1), size, (batch, length), generator=torch.Generator().manual_seed(length))


@torch.no_grad()
def trace_whole(module: Whole | Prompt | LayerPrompt, longest: int | None = None) -> ExportedProgram:
    """The graph of a whole sequence or a prompt, of any number of samples and any length up to ``longest``."""
    axes = {0: Dim(BATCH), 1: Dim(LENGTH, max=longest) if longest else Dim(LENGTH)}
    length = EXAMPLE if longest is None else min(EXAMPLE, longest - 1)
    inputs = module.example(length)
    shapes = (axes,) * len(inputs)
    return torch.export.export(module, inputs, dynamic_shapes=(shapes,) if isinstance(module, Whole) else shapes)


@torch.no_grad()
def trace_step(module: Step | LayerStep, outputs: Sequence[Tensor]) -> ExportedProgram:
    """The graph of a step, traced after what the prompt's graph gives for two samples."""
    batch, past = Dim(BATCH), Dim(PAST)
    states = tuple({0: batch} if x is None else {0: batch, x: past} for x in state_axes(module.layouts))
    return torch.export.export(module, module.example(outputs), dynamic_shapes=({0: batch}, {0: batch}, states))
