"""Parameters by what they are, for optimizers."""

from __future__ import annotations

from typing import Any

from torch import nn

from kernelformer.feature_maps import FeatureMap


def parameter_groups(model: nn.Module, **kernel: Any) -> list[dict[str, Any]]:
    """Two named groups for an optimizer: what the kernels learn, and everything else.

        torch.optim.AdamW(kf.parameter_groups(model, lr=1e-2, weight_decay=0.0), lr=1e-3)

    Args:
        model: any module.
        kernel: settings of the group ``kernel``; what is not given is the optimizer's own, as for the group ``model``.

    Returns:
        ``[{"name": "model", "params": [...]}, {"name": "kernel", "params": [...], **kernel}]``; frozen parameters are
        left out, and so is a group without any.
    """
    learned = {id(x) for phi in model.modules() if isinstance(phi, FeatureMap) for x in phi.parameters()}
    free = [x for x in model.parameters() if x.requires_grad]
    groups: list[dict[str, Any]] = [
        {"name": "model", "params": [x for x in free if id(x) not in learned]},
        {"name": "kernel", "params": [x for x in free if id(x) in learned], **kernel},
    ]
    if kernel and not groups[1]["params"]:
        raise ValueError(
            f"{type(model).__name__} learns no kernel, got settings {kernel} for it; choose a method such as "
            f"'fastfood-prf', or leave them out."
        )
    return [group for group in groups if group["params"]]
