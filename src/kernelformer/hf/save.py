"""Folders of converted models: configuration, safetensors, and what was converted."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub import save_torch_state_dict
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import GENERATION_CONFIG_NAME, SAFE_WEIGHTS_NAME

from kernelformer.files import PART, json_text, naming_full_disk, read_json, sync, write_hashes, write_json
from kernelformer.hf.convert import conversion

CONFIG = "config.json"
KIND = "kernelformer-converted"  # model_type: software that does not know it refuses the folder
FORMAT = 1
# Arguments of transformers' save_pretrained that ask for nothing where they have these values.
_NOTHING: dict[str, Any] = {
    "distributed_checkpoint": False,
    "push_to_hub": False,
    "safe_serialization": True,
    "save_original_format": True,
    "save_peft_format": True,
    "variant": None,
}
_WEIGHTS = ("model*.safetensors", f"{SAFE_WEIGHTS_NAME}*")  # what a save replaces


class ConvertedConfig(PretrainedConfig):
    """Configuration of a converted model: that of the original, and what was done to it.

    Args:
        pooler: False for one that was made without its pooling layer.
        source_type: the original's model_type; default: what ``source`` says. It stands apart because transformers
            takes any part of a configuration that names the type of a class for that class's own, and would load the
            weights without what was converted.
    """

    model_type = KIND

    def __init__(
        self,
        source: dict[str, Any] | None = None,
        architecture: str = "",
        conversion: list[dict[str, Any]] | None = None,
        format: int = FORMAT,
        pooler: bool = True,
        source_type: str = "",
        **others: Any,
    ) -> None:
        self.source, self.architecture, self.pooler = dict(source or {}), architecture, pooler
        self.source_type = self.source.pop("model_type", source_type)
        self.conversion, self.format = conversion or [], format
        super().__init__(**others)


def save(
    model: PreTrainedModel,
    folder: str | Path,
    *,
    state_dict: Mapping[str, Tensor] | None = None,
    is_main_process: bool = True,
    max_shard_size: int | str = "5GB",
    **others: Any,
) -> None:
    """Write a converted model; `load` reads it.

    The folder is whole or none: files are written beside it first, and its configuration, without which it
    cannot be loaded, comes last. Other files in it, a tokenizer's for example, stay.

    Args:
        model: converted.
        folder: made where it is missing.
        state_dict: its weights, where they are spread over processes; default: the model's own.
        is_main_process: the others write nothing.
        max_shard_size: of a file of weights.
        others: what transformers' own takes, where it asks for nothing (``token``, ``save_function``, defaults).

    Raises:
        ValueError: a folder with a model that is not a converted one, which would be lost; a model that could not be
            loaded again.
    """
    for name, value in others.items():
        if name not in ("token", "save_function") and value != _NOTHING.get(name, ...):
            raise ValueError(
                f"a converted model is saved as safetensors in a folder, got {name}={value!r}; leave it out."
            )
    plan, folder = conversion(model), Path(folder)
    kind = type(model).__bases__[-1]  # the original's; the first says how it is converted
    if not isinstance(model, PreTrainedModel) or getattr(transformers, kind.__name__, None) is not kind:
        raise ValueError(
            f"a folder is for models of transformers, got {type(model).__name__} of {type(model).__module__}; save its "
            f"state_dict(), and convert the original in the same way before loading it."
        )
    if not is_main_process:
        return
    _refuse_original(folder)
    pooler = getattr(model, "pooler", model) is not None
    config = ConvertedConfig(model.config.to_dict(), kind.__name__, plan.as_json(), pooler=pooler)
    record = config.to_dict() | {"model_type": KIND}
    weights = _each_by_itself(model.state_dict() if state_dict is None else state_dict, model.all_tied_weights_keys)
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f".{uuid.uuid4().hex}{PART}"
    part.mkdir()
    try:
        with naming_full_disk(folder):
            save_torch_state_dict(weights, part, max_shard_size=max_shard_size)
        if model.can_generate():
            model.generation_config.save_pretrained(part)
        for path in part.iterdir():
            sync(path)
        (folder / CONFIG).unlink(missing_ok=True)  # from here on it is no model until it is the new one
        for path in {x for pattern in (*_WEIGHTS, GENERATION_CONFIG_NAME) for x in folder.glob(pattern)}:
            path.unlink()
        write_hashes(part, coming={CONFIG: json_text(record).encode()})
        for path in part.iterdir():
            os.replace(path, folder / path.name)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    write_json(folder / CONFIG, record)


def _each_by_itself(weights: Mapping[str, Tensor], tied: Mapping[str, str]) -> dict[str, Tensor]:
    """Make weights that safetensors can hold: tied ones once, others that share memory as copies."""
    own: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, x in weights.items():
        source = weights.get(tied.get(name, ""))
        if source is not None and source.data_ptr() == x.data_ptr() and source.shape == x.shape:
            continue
        memory = x.untyped_storage().data_ptr()
        own[name] = x.clone() if memory in seen else x
        seen.add(memory)
    return own


def model_type(folder: Path) -> Any:
    """Return the type of model that a folder's configuration names; None if it cannot be read."""
    try:
        record = read_json(folder / CONFIG)
    except (OSError, ValueError):
        return None
    return record.get("model_type") if isinstance(record, dict) else None


def _refuse_original(folder: Path) -> None:
    """Raise for a folder with a model that is not a converted one: saving would remove it."""
    path = folder / CONFIG
    if not path.is_file():
        weights = sorted(x.name for pattern in _WEIGHTS for x in folder.glob(pattern))
        if weights:
            raise ValueError(
                f"{folder} has {weights[0]} and no {CONFIG}: weights of another model, or of a save that was stopped. "
                f"Saving would remove them; choose another folder, or remove them by hand."
            )
        return
    kind = model_type(folder)
    if kind != KIND:
        raise ValueError(
            f"{folder} holds a model of type {kind!r}, which saving the converted one would overwrite; choose another "
            f"folder."
        )
