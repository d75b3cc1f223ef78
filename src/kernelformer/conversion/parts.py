"""The parts of a hybrid by themselves: what near tokens do alone, what the kernel does alone, and both together."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kernelformer.conversion.losses import HiddenStateErrors, output_name, standard_error
from kernelformer.hf.attend import CORE, CROSS
from kernelformer.hf.convert import conversion, cores
from kernelformer.modules import KernelCore, MixedCore
from kernelformer.modules.calibration import evaluating
from kernelformer.modules.exact import LocalCore

ORIGINAL, CONVERTED = "original", "converted"
NEAR, KERNEL = "window and sinks alone", "kernel alone"
Batch = Mapping[str, Any]


@dataclass(frozen=True)
class Place:
    """A core with near keys and a kernel for the far ones, and where it stands.

    Args:
        parent: the module that has it.
        name: its name there.
        core: itself.
    """

    parent: nn.Module
    name: str
    core: KernelCore


def hybrids(student: nn.Module) -> list[Place]:
    """Find the cores of a converted model that attend exactly to near tokens or sinks and by a kernel to the others."""
    places = []
    for name, core in cores(student).items():
        place = (core, "linear") if isinstance(core, MixedCore) else (student.get_submodule(name), CORE)
        own = getattr(*place)
        if isinstance(own, KernelCore) and own.has_near:
            places.append(Place(*place, own))
    return places


@contextmanager
def near_alone(student: nn.Module) -> Iterator[None]:
    """Have hybrids attend to near tokens and sinks alone, as ``local`` of the same window and sinks does.

    Other attentions stay as they are; afterwards all are as before.
    """
    places = hybrids(student)
    try:
        for place in places:
            setattr(place.parent, place.name, _local(place.core))
        yield
    finally:
        for place in places:
            setattr(place.parent, place.name, place.core)


@contextmanager
def kernel_alone(student: nn.Module) -> Iterator[None]:
    """Have hybrids attend by their kernel alone, near tokens included, as the same map does without window and sinks.

    Other attentions stay as they are; afterwards all are as before.
    """
    before = [(x.core, x.core.window, x.core.sinks) for x in hybrids(student)]
    try:
        for core, _, _ in before:
            core.window, core.sinks = None, 0
        yield
    finally:
        for core, window, sinks in before:
            core.window, core.sinks = window, sinks


def _local(core: KernelCore) -> LocalCore:
    """Build a core of the near part of a hybrid."""
    local = LocalCore(
        "local",
        head_dim=core.head_dim,
        num_heads=core.num_heads,
        window=core.window or 1,
        sinks=core.sinks,
        scale=core.scale if core.near_scale is None else core.near_scale,
        normalize_qk=core.normalize_qk,
    )
    local.window = core.window or 0  # with sinks alone a token does not even see itself, which nobody else asks for
    setattr(local, CROSS, getattr(core, CROSS, False))
    return local


@dataclass(frozen=True)
class Figures:
    """Figures of a whole model beside its original; None where a model has none of the kind.

    Args:
        perplexity: of the next token, of causal language models.
        accuracy: share of hidden tokens that the model finds, of masked models.
        accuracy_error: standard error of the difference of ``accuracy`` from the original's, token by token.
        agreement: share of tokens whose likeliest one is the original's.
        cosine: mean cosine of mean outputs to the original's, of encoders.
        output: relative error of the output.
    """

    perplexity: float | None = None
    accuracy: float | None = None
    accuracy_error: float | None = None
    agreement: float | None = None
    cosine: float | None = None
    output: float | None = None


@torch.no_grad()
def part_figures(
    teacher: PreTrainedModel,
    student: PreTrainedModel,
    batches: Iterable[Batch],
    answers: Sequence[Tensor] | None = None,
) -> dict[str, Figures]:
    """Measure a converted model as it is and, of a hybrid, each of its parts by itself, on the same inputs.

    Args:
        teacher: the original.
        student: the same model, converted; it is left as it was.
        batches: of inputs.
        answers: of each batch the tokens (B, L) before some were hidden, for masked models; None: not known.

    Returns:
        Figures of `ORIGINAL` and `CONVERTED`; of hybrids also of `NEAR` and `KERNEL`.

    Cost: a pass of the original and one of the student, of hybrids three.
    """
    ways: dict[str, Callable[[nn.Module], AbstractContextManager[None]]] = {CONVERTED: lambda _: nullcontext()}
    if hybrids(student):
        ways |= {NEAR: near_alone, KERNEL: kernel_alone}
    layers = conversion(student).layers
    alone, causal = not student.config.is_encoder_decoder, any(x.causal for x in layers)
    sums = {
        name: _Sums(HiddenStateErrors(pools=alone and not causal, predicts=alone and causal and student.can_generate()))
        for name in ways
    }
    with evaluating(teacher, student):
        for number, batch in enumerate(batches):
            want = teacher(**batch, output_hidden_states=True)
            for name, way in ways.items():
                with way(student):
                    got = student(**batch, output_hidden_states=True)
                sums[name].add(batch, want, got, None if answers is None else answers[number])
    return {ORIGINAL: sums[CONVERTED].original(), **{name: x.figures() for name, x in sums.items()}}


@dataclass
class _Sums:
    """What the figures of a part are made of."""

    errors: HiddenStateErrors
    right: dict[str, list[Tensor]] = field(default_factory=lambda: {ORIGINAL: [], CONVERTED: []})

    def add(self, batch: Batch, want: Any, got: Any, answers: Tensor | None) -> None:
        self.errors.add(batch, want, got)
        if answers is None:
            return
        hidden = answers != batch["input_ids"]
        for name, outputs in ((ORIGINAL, want), (CONVERTED, got)):
            best = getattr(outputs, output_name(outputs)).argmax(-1)
            self.right[name].append((best == answers)[hidden].double())

    def original(self) -> Figures:
        accuracy = _mean(self.right[ORIGINAL])
        return Figures(perplexity=self.errors.perplexity("original"), accuracy=accuracy)

    def figures(self) -> Figures:
        differences = [x - y for x, y in zip(self.right[CONVERTED], self.right[ORIGINAL], strict=True)]
        return Figures(
            perplexity=self.errors.perplexity("converted"),
            accuracy=_mean(self.right[CONVERTED]),
            accuracy_error=standard_error(torch.cat(differences).tolist()) if differences else None,
            agreement=self.errors.agreement.value,
            cosine=self.errors.cosine.value,
            output=math.sqrt(self.errors.output.value or 0.0),
        )


def _mean(parts: list[Tensor]) -> float | None:
    values = torch.cat(parts) if parts else torch.empty(0)
    return float(values.mean()) if len(values) else None
