"""Shapes of saved weights, by the headers of their files: compared with a configuration before anything is built."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import nn
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from kernelformer.files import check_regular, read_json
from kernelformer.limits import check_layers, check_limit, limit, raise_by

Shapes = dict[str, tuple[int, ...]]
_SIZES = ("num_features", "components", "width", "rank")  # options of which each unit is saved as a number at least
_BYTES = 2  # of a saved number at least


class SizeError(ValueError):
    """A configuration that asks for more than its weights have."""


def weight_files(folder: Path) -> list[Path]:
    """List the safetensors files of a model: those that the index names, or the one.

    Raises:
        ValueError: an index that is not one.
    """
    index = folder / SAFE_WEIGHTS_INDEX_NAME
    if not index.is_file():
        return [folder / SAFE_WEIGHTS_NAME]
    record = read_json(index)
    names = record.get("weight_map") if isinstance(record, dict) else None
    if not isinstance(names, dict) or not all(isinstance(x, str) for x in names.values()):
        raise ValueError(f"{index} has no weight_map, which names a file for each tensor")
    return [folder / Path(name).name for name in sorted(set(names.values()))]


def saved_shapes(files: Iterable[Path]) -> Shapes:
    """Read the shapes of all tensors of safetensors files by name, without their values.

    Raises:
        ValueError: more tensors than the limit.
    """
    shapes: Shapes = {}
    for path in files:
        with safe_open(check_regular(path) if path.exists() else path, framework="pt") as file:
            names = list(file.keys())
            check_limit("max_tensors", len(shapes) + len(names), f"{path} has {len(names):,} tensors")
            shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in names}
    return shapes


def check_shapes(model: nn.Module, saved: Shapes) -> None:
    """Raise for the first parameter of a model without memory (device meta) that was saved in another shape."""
    for name, x in model.state_dict().items():
        if name in saved and tuple(x.shape) != saved[name]:
            raise ValueError(f"it asks for {name} of shape {tuple(x.shape)}, {SAFE_WEIGHTS_NAME} has {saved[name]}")


def check_sizes(options: Iterable[Mapping[str, Any]], files: Iterable[Path]) -> None:
    """Raise `SizeError` if attentions ask for more features than their files have room for, before any is drawn.

    Args:
        options: of each attention.
        files: that their numbers must be in.
    """
    size, asked = sum(path.stat().st_size for path in files), dict.fromkeys(_SIZES, 0)
    for some in options:
        check_layers("an attention", some)
        for name in _SIZES:
            asked[name] += some[name] if isinstance(some.get(name), int) else 0
            if asked[name] * _BYTES > size:
                raise SizeError(f"it asks for {name}={some[name]}, and its weights have {size:,} bytes in all")


def check_local(where: object, settings: Mapping[str, Any]) -> None:
    """Raise for a configuration that names a part which transformers would fetch from the hub."""
    for name in () if limit("allow_hub") else _on_hub(settings):
        raise ValueError(
            f"{where} names {name}, a part that is not in the folder and would be fetched from the hub; if you trust "
            f"it, {raise_by('allow_hub', 1)}."
        )


def _on_hub(settings: Mapping[str, Any]) -> Iterator[str]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _on_hub(value)
        backbone = name == "backbone" and isinstance(value, str) and value
        kernel = name.endswith("attn_implementation") and isinstance(value, str) and "/" in value
        if backbone or kernel or (name == "use_pretrained_backbone" and value):
            yield f"{name}={value!r:.60}"
