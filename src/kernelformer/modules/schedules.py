"""Redrawing of random features while training, and parameter groups for optimizers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from kernelformer.errors import positive_int
from kernelformer.feature_maps import FeatureMap
from kernelformer.modules.kernel import KernelCore


def random_maps(model: nn.Module) -> list[FeatureMap]:
    """Return all feature maps of a model that have something to draw, each once."""
    return [x for x in model.modules() if isinstance(x, FeatureMap) and x.is_random]


def redraw(model: nn.Module, every: int = 1000) -> RemovableHandle:
    """Advance every random map of ``model`` to its next draw after each ``every`` training forwards of the model.

    The schedule hangs on the root module's forward, never on an inner one, so that activation checkpointing recomputes
    with the draw it has seen. How long a draw has been in use is a buffer of the map, saved with the model: a resumed
    run continues where it was. Forwards in `eval()` do not count. With gradient accumulation every micro-batch counts.
    With activation checkpointing, go backward before the next forward: recomputation sees the newest draw.

    Args:
        model: the module whose forward is called in training: the one that was compiled or wrapped, where one was.
        every: training forwards per draw (Performer: about 1000; KL-Transformer: 100).

    Returns:
        a handle; ``handle.remove()`` ends the schedule.
    """
    positive_int("every", every)
    if not random_maps(model):
        raise ValueError(f"{type(model).__name__} has no random feature map to redraw; replace its attention first.")
    if any(getattr(hook, "redraws", False) for hook in model._forward_pre_hooks.values()):
        raise ValueError(
            f"{type(model).__name__} has a redraw schedule already, got another with every={every}; remove() the first."
        )

    @torch.no_grad()
    def advance(module: nn.Module, inputs: Any) -> None:
        # A forward within a backward is activation checkpointing at work: it must see what the first one saw.
        if not module.training or torch._C._current_graph_task_id() != -1:
            return
        for phi in random_maps(module):
            if int(phi.age) >= every:
                phi.resample()
            phi.age += 1

    hook = torch.compiler.disable(advance)
    hook.redraws = True
    return model.register_forward_pre_hook(hook)


def parameter_groups(model: nn.Module, **kernel: Any) -> list[dict[str, Any]]:
    """Return named groups for an optimizer: parameters of the kernels, and all others.

        torch.optim.AdamW(kf.parameter_groups(model, lr=1e-2, weight_decay=0.0), lr=1e-3)

    One line serves every method: a model whose kernels learn nothing has the group ``model`` alone.

    Args:
        model: any module.
        kernel: settings of the group ``kernel``; what is not given is the optimizer's own, as for the group ``model``.

    Returns:
        ``[{"name": "model", "params": [...]}, {"name": "kernel", "params": [...], **kernel}]``, always in this order;
        frozen parameters are left out, and so is a group without any.
    """
    learned = {id(x) for phi in model.modules() if isinstance(phi, FeatureMap) for x in phi.parameters()}
    learned |= {id(core.beta) for core in model.modules() if isinstance(core, KernelCore)}
    free = [x for x in model.parameters() if x.requires_grad]
    groups: list[dict[str, Any]] = [
        {"name": "model", "params": [x for x in free if id(x) not in learned]},
        {"name": "kernel", "params": [x for x in free if id(x) in learned], **kernel},
    ]
    return [group for group in groups if group["params"]]
