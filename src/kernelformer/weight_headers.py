"""Shapes of saved weights, by the headers of their files: compared with a configuration before anything is built."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.peft_utils import ADAPTER_CONFIG_NAME

from kernelformer.files import check_counts, check_inside, check_limit, check_regular, limit, raise_by, read_json

Shapes = dict[str, tuple[int, ...]]
_SIZES = ("num_features", "components", "width", "rank")  # options of which each unit is saved as a number at least
_BYTES = 2  # of a saved number at least


class SizeError(ValueError):
    """A configuration that asks for more than its weights have."""


def check_contained(folder: Path) -> None:
    """Check that a folder of weights contains all files that it names, by no link and no index, before any is read."""
    check_inside(folder, folder.iterdir())
    for index in sorted(folder.glob("*.index.json")):
        _shards(index)
    if (folder / ADAPTER_CONFIG_NAME).is_file() and not (folder / CONFIG_NAME).is_file():
        raise ValueError(
            f"{folder} has an adapter ({ADAPTER_CONFIG_NAME}) and no model of its own; load the model that it was "
            f"made for, and then the adapter by model.load_adapter(folder)."
        )


def weight_files(folder: Path) -> list[Path]:
    """List the safetensors files of a folder that is `check_contained`: the one, or those that its index names."""
    check_contained(folder)
    one, index = folder / SAFE_WEIGHTS_NAME, folder / SAFE_WEIGHTS_INDEX_NAME
    pickled = [] if one.exists() else sorted(folder.glob("pytorch_model*.bin"))
    if pickled:
        raise ValueError(
            f"the weights in {folder} are pickled ({pickled[0].name}), and a pickle can run code; models of this "
            f"library are saved as {SAFE_WEIGHTS_NAME}, by save_pretrained."
        )
    return [folder / x for x in _shards(index)] if index.is_file() and not one.exists() else [one]


def _shards(index: Path) -> list[str]:
    """Names of the files that an index spreads tensors over, each in its own folder."""
    record = read_json(index)
    names = record.get("weight_map") if isinstance(record, dict) else None
    if not isinstance(names, dict) or not all(isinstance(x, str) for x in names.values()):
        raise ValueError(f"{index} has no weight_map, which names a file for each tensor")
    for name in names.values():
        if Path(name).name != name:
            raise ValueError(f"{index} names {name!r:.200}, which is not the name of a file in its folder")
    return sorted(set(names.values()))


def saved_shapes(files: Iterable[Path]) -> Shapes:
    """Read the shapes of all tensors of safetensors files by name, without their values."""
    shapes: Shapes = {}
    for path in files:
        with safe_open(check_regular(path) if path.exists() else path, framework="pt") as file:
            names = list(file.keys())
            check_limit("max_tensors", len(shapes) + len(names), f"{path} has {len(names):,} tensors")
            shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in names}
    return shapes


def check_shapes(build: Callable[[], nn.Module], saved: Shapes) -> None:
    """Build a model without memory (device meta) and raise for the first parameter that does not fit the saved ones.

    It was saved in another shape, or it was not saved and has more numbers than all that were.
    """
    try:
        with torch.device("meta"):
            model = build()
    except (RuntimeError, OverflowError) as reason:  # a tensor of more bytes than there are numbers for them
        raise ValueError(f"its sizes are those of no model ({str(reason).splitlines()[0]})") from None
    count = sum(math.prod(x) for x in saved.values())
    for name, x in model.state_dict().items():
        if name not in saved and x.numel() > count:
            raise ValueError(
                f"it asks for {name} of shape {tuple(x.shape)}, and its weights have {count:,} numbers in all"
            )
        if name in saved and tuple(x.shape) != saved[name]:
            raise ValueError(f"it asks for {name} of shape {tuple(x.shape)}, {SAFE_WEIGHTS_NAME} has {saved[name]}")


def check_sizes(options: Iterable[Mapping[str, Any]], files: Iterable[Path]) -> None:
    """Raise `SizeError` if attentions ask for more features than their files have room for, before any is drawn."""
    size, asked = sum(path.stat().st_size for path in files), dict.fromkeys(_SIZES, 0)
    for some in options:
        check_counts("an attention", some)
        for name in _SIZES:
            asked[name] += some[name] if isinstance(some.get(name), int) else 0
            _check_room(name, some.get(name), asked[name], size)
        for name in _table_options(some):
            numbers = some[name] if isinstance(some[name], list | tuple) else [some[name]]
            _check_room(name, some[name], math.prod(x for x in numbers if isinstance(x, int)), size)


def _check_room(name: str, value: object, count: int, size: int) -> None:
    if count * _BYTES > size:
        raise SizeError(f"it asks for {name}={value}, and its weights have {size:,} bytes in all")


def _table_options(options: Mapping[str, Any]) -> list[str]:
    """Options that set how many entries a table has; layers may share it, so that they do not add up."""
    if options.get("max_distance") is not None:
        options = {x: y for x, y in options.items() if x != "max_length"}  # which is no size then
    names = {"table": ("max_distance", "max_length", "grid"), "t5": ("num_buckets",)}
    return [x for x in names.get(str(options.get("scheme", "table")), ()) if x in options]


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
