"""The choice of attentions that stay exact: those without which the output of a converted model is farthest off."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from kernelformer.distill.hidden_states import output_divergence
from kernelformer.hf.attend import CORE, CROSS
from kernelformer.hf.convert import conversion, cores
from kernelformer.hf.plan import EXACT, Layer, check_kept
from kernelformer.modules import AttentionCore
from kernelformer.modules.build import move_to_inputs
from kernelformer.modules.evaluating import evaluating

Batch = Mapping[str, Any]
Log = Callable[[int, int], None]


@torch.no_grad()
def choose_exact(
    teacher: PreTrainedModel,
    student: PreTrainedModel,
    batches: Sequence[Batch],
    count: int,
    log: Log = lambda chosen, total: None,
) -> list[str]:
    """Choose the attentions of a converted model that should stay exact, by what each does to the model's output.

    How wrong an attention is by itself says little of that: later layers undo some errors and blow up others. So the
    output decides, by its divergence from the original's (see `output_divergence`), and attentions are changed one
    at a time, each time the one after which it is smallest: where fewer are kept than not, exact ones are put back
    into the linear model; else linear ones are put into the exact model.

    Args:
        teacher: the original.
        student: the same model, converted; it is left as it was.
        batches: of inputs; each trial is a pass over all of them.
        count: how many.
        log: called after each change with their number so far and in the end.

    Returns:
        Their names, in the order of the modules.

    Raises:
        ValueError: there are not more attentions than that.

    Cost: N passes for the first change, and for each other one as many as it takes until the best of what was seen
    before is still the best (see `greedy`); N attentions.
    """
    names = conversion(student).replaced
    check_kept("attentions", len(names), count)
    restores = 2 * count <= len(names)
    with evaluating(teacher, student), _switchable(student) as make_linear:
        wanted = [teacher(**x) for x in batches]

        def divergence(changed: Iterable[str]) -> float:
            make_linear(set(names) - set(changed) if restores else set(changed))
            pairs = zip(batches, wanted, strict=True)
            total = sum(output_divergence(x, want, student(**x)) for x, want in pairs)
            return math.inf if math.isnan(total) else total

        changed = greedy(divergence, names, count if restores else len(names) - count, log)
    return [x for x in names if (x in changed) == restores]


def greedy(
    cost: Callable[[Iterable[str]], float],
    names: Sequence[str],
    count: int,
    log: Log = lambda chosen, total: None,
) -> list[str]:
    """Choose names one at a time, each time one that adds least to a cost of the names chosen.

    What a name adds is measured again only while it could be the least: others keep what they added when fewer were
    chosen, as long as that is more. That is exact where a name never adds less than it did before.

    Args:
        cost: of some names; less is better.
        names: to choose from.
        count: how many.
        log: called after each choice with their number so far and in the end.
    """
    chosen: list[str] = []
    added = dict.fromkeys(names, -math.inf)
    base = cost(chosen) if count else 0.0
    for _ in range(count):
        fresh: dict[str, float] = {}
        while True:
            best = min(added, key=added.__getitem__)
            if best in fresh:
                break
            fresh[best] = cost([*chosen, best])
            # Where even the base is infinite any finite cost is a gain.
            added[best] = fresh[best] - base if math.isfinite(base) else fresh[best]
        chosen.append(best)
        base = fresh[best]
        del added[best]
        log(len(chosen), count)
    return chosen


@contextmanager
def _switchable(student: PreTrainedModel) -> Iterator[Callable[[set[str]], None]]:
    """Give a function that makes some converted attentions linear and all others exact; afterwards all are linear."""
    layers = {x.name: x for x in conversion(student).layers if x.replaced}
    linear = {name: core for name, core in cores(student).items() if name in layers}
    exact = {name: _exact_core(layers[name], student.get_submodule(name)) for name in layers}

    def switch(names: set[str]) -> None:
        for name in layers:
            student.get_submodule(name).add_module(CORE, linear[name] if name in names else exact[name])

    try:
        yield switch
    finally:
        switch(set(layers))


def _exact_core(layer: Layer, module: nn.Module) -> AttentionCore:
    """Build the core that a layer would attend with had it been kept."""
    core = replace(layer, method=EXACT, options={}, exact_heads=()).build(0)
    setattr(core, CROSS, layer.cross)
    return move_to_inputs(core, next(module.parameters())).eval()
