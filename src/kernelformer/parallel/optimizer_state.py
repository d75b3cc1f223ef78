"""What an optimizer keeps, by the names of a model's parameters: tensors for a file, plain values for JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

PREFIX = "optimizer."  # before the names of its tensors
_PARAMS = "params"


def read_groups(model: nn.Module, optimizer: Optimizer) -> list[dict[str, Any]]:
    """The groups of an optimizer as plain values, their parameters by name.

    Raises:
        ValueError: a parameter that is not the model's, or a setting that JSON could not carry.
    """
    names = {id(x): name for name, x in model.named_parameters()}
    groups = []
    for number, group in enumerate(optimizer.param_groups):
        params = [names.get(id(x)) for x in group[_PARAMS]]
        if None in params:
            raise ValueError(
                f"group {number} of {type(optimizer).__name__} has a parameter that {type(model).__name__} has not; "
                f"build the optimizer after `shard`, of the parameters that the model has then."
            )
        settings = {name: _plain(name, x) for name, x in group.items() if name != _PARAMS}
        groups.append({**settings, _PARAMS: params})
    return groups


def _plain(name: str, value: Any) -> Any:
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple | list):
        return [_plain(name, x) for x in value]
    raise ValueError(f"a group's {name} must be a number, a text or several to be saved, got {value!r:.80}.")


def read_state(model: nn.Module, optimizer: Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors of an optimizer, and its other values, by ``optimizer.PARAMETER.NAME``; none before the first step."""
    if not optimizer.state:  # torch would take a step to make some
        return {}, {}
    return _flat(get_optimizer_state_dict(model, optimizer))


def blank_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Tensors like those that the optimizer will have, for loading into; gradients of one without a step are dropped.

    Torch makes them by a step of rate 0 with gradients of 0.
    """
    if not optimizer.state:
        optimizer.zero_grad(set_to_none=True)
    return _flat(get_optimizer_state_dict(model, optimizer))[0]


def _flat(saved: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    flat = {f"{PREFIX}{name}.{key}": x for name, state in saved["state"].items() for key, x in state.items()}
    tensors = {name: x for name, x in flat.items() if isinstance(x, Tensor)}
    return tensors, {name: _plain(name, x) for name, x in flat.items() if name not in tensors}


def write_state(
    model: nn.Module, optimizer: Optimizer, groups: list[dict[str, Any]], values: Mapping[str, Any]
) -> None:
    """Give an optimizer the groups of `read_groups`, and the tensors and values of `read_state` in one mapping."""
    state: dict[str, dict[str, Any]] = {}
    for name, x in values.items():
        parameter, _, key = name.removeprefix(PREFIX).rpartition(".")
        state.setdefault(parameter, {})[key] = x
    restored = [
        {name: _like(x, now.get(name)) if name != _PARAMS else x for name, x in saved.items()}
        for saved, now in zip(groups, optimizer.param_groups, strict=True)
    ]
    whole = {"state": state, "param_groups": restored}
    # A parameter that never had a gradient has no state, and torch's strict loading wants one.
    set_optimizer_state_dict(model, optimizer, whole, options=StateDictOptions(strict=False))  # type: ignore[arg-type]


def _like(value: Any, now: Any) -> Any:
    """A plain value as the optimizer has it: betas are a tuple, and a rate may be a tensor."""
    if isinstance(now, Tensor):
        return now.new_tensor(value).reshape(now.shape)
    return tuple(value) if isinstance(now, tuple) else value
