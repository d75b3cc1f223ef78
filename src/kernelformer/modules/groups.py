"""Groups of parameters for optimizers."""

from __future__ import annotations

from typing import Any

from torch import nn

from kernelformer.feature_maps import FeatureMap
from kernelformer.modules.kernel import KernelCore


def parameter_groups(model: nn.Module, **kernel: Any) -> list[dict[str, Any]]:
    """Named groups for an optimizer: what the kernels learn, and everything else.

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
