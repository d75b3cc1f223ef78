"""Converted models as folders: configuration, safetensors, and what was converted."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import save_torch_state_dict
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.utils import GENERATION_CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from kernelformer.feature_maps import FeatureMap
from kernelformer.files import write_json
from kernelformer.hf.convert import Conversion, ConvertedModel, apply, conversion

CONFIG = "config.json"
KIND = "kernelformer-converted"  # model_type: whoever does not know it refuses the folder
FORMAT = 1


class ConvertedConfig(PretrainedConfig):
    """Configuration of a converted model: that of the original, and what was done to it.

    Args:
        source: the original's configuration, as a dict with its model_type.
        architecture: name of the original's class in transformers.
        conversion: see `Conversion.as_json`.
        format: number of this layout.
    """

    model_type = KIND

    def __init__(
        self,
        source: dict[str, Any] | None = None,
        architecture: str = "",
        conversion: list[dict[str, Any]] | None = None,
        format: int = FORMAT,
        **others: Any,
    ) -> None:
        self.source, self.architecture = source or {}, architecture
        self.conversion, self.format = conversion or [], format
        super().__init__(**others)


def save(
    model: PreTrainedModel,
    folder: str | Path,
    *,
    state_dict: Mapping[str, Tensor] | None = None,
    is_main_process: bool = True,
    max_shard_size: int | str = "5GB",
    safe_serialization: bool = True,
) -> None:
    """Write a converted model; `load` reads it.

    Args:
        model: converted.
        folder: made where it is missing.
        state_dict: its weights, where they are spread over processes; default: the model's own.
        is_main_process: the others write nothing.
        max_shard_size: of a file of weights.
        safe_serialization: there is no other way.
    """
    if not safe_serialization:
        raise ValueError("a converted model is saved as safetensors; leave safe_serialization out.")
    if not is_main_process:
        return
    plan, folder = conversion(model), Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    source = model.config.to_dict()
    record = ConvertedConfig(source, type(model).__bases__[1].__name__, plan.as_json()).to_dict()
    weights = dict(model.state_dict() if state_dict is None else state_dict)
    tied = [x for x in weights if x in (getattr(model, "all_tied_weights_keys", None) or {})]
    save_torch_state_dict(
        weights, folder, max_shard_size=max_shard_size, metadata={"format": "pt"}, shared_tensors_to_discard=tied
    )
    if model.can_generate():
        model.generation_config.save_pretrained(folder)  # type: ignore[union-attr]
    write_json(folder / CONFIG, record | {"model_type": KIND})


def load(folder: str | Path, *, dtype: torch.dtype | None = None, device: str | torch.device | None = None) -> Any:
    """A converted model from its folder, in evaluation mode.

        model = kernelformer.hf.load("minilm-linear")

    Raises:
        ValueError: not a converted model, of another layout, or with weights that do not fit its configuration.
    """
    folder = Path(folder)
    record = _read(folder)
    problem = _misfit(record)
    if problem:
        raise ValueError(f"{folder / CONFIG}: {problem}")
    kind = getattr(transformers, record["architecture"])
    source = dict(record["source"])
    config = AutoConfig.for_model(source.pop("model_type"), **source)
    model = kind(config)
    apply(model, Conversion.from_json(record["conversion"]))
    if dtype is not None:
        model.to(dtype)
    _load_weights(model, folder)
    if model.can_generate() and (folder / GENERATION_CONFIG_NAME).is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    if device is not None:
        model.to(device)
    return model.eval()


def _read(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    if not path.is_file():
        raise ValueError(f"{folder} is not the folder of a model: there is no {CONFIG} in it.")
    try:
        record = json.loads(path.read_text("utf-8"))
    except ValueError as reason:
        raise ValueError(f"{path} is not JSON: {reason}.") from None
    if not isinstance(record, dict) or record.get("model_type") != KIND:
        found = record.get("model_type") if isinstance(record, dict) else type(record).__name__
        raise ValueError(
            f"{path} is of a model of type {found!r}, not of a converted one ({KIND!r}); load it with transformers, or "
            f"convert it first: kernelformer convert {folder} NEW_FOLDER."
        )
    return record


def _misfit(record: dict[str, Any]) -> str | None:
    """Why this version cannot load a folder, or None."""
    number = record.get("format")
    if number != FORMAT:
        return f"it has layout {number!r}, this version of kernelformer reads {FORMAT}; convert the original again."
    missing = [x for x in ("source", "architecture", "conversion") if not record.get(x)]
    if missing:
        return f"it lacks {', '.join(missing)}, which a converted model has; convert the original again."
    kind = getattr(transformers, str(record["architecture"]), None)
    if not (isinstance(kind, type) and issubclass(kind, PreTrainedModel)):
        return f"transformers {transformers.__version__} has no model {record['architecture']!r}."
    try:
        Conversion.from_json(record["conversion"])
    except (TypeError, KeyError) as reason:
        return f"its list of converted attentions is of another version ({reason}); convert the original again."
    return None


def _load_weights(model: PreTrainedModel, folder: Path) -> None:
    index = folder / SAFE_WEIGHTS_INDEX_NAME
    names = {SAFE_WEIGHTS_NAME}
    if index.is_file():
        names = set(json.loads(index.read_text("utf-8"))["weight_map"].values())
    weights: dict[str, torch.Tensor] = {}
    for name in sorted(names):
        path = folder / Path(name).name
        if not path.is_file():
            raise ValueError(f"{folder} has no {name}; a converted model has its weights as safetensors.")
        weights |= load_file(path)
    try:
        missing, unexpected = model.load_state_dict(weights, strict=False)
    except RuntimeError as reason:
        raise ValueError(f"the weights in {folder} do not fit its {CONFIG}: {reason}") from None
    tied = set(getattr(model, "all_tied_weights_keys", {}) or {})
    missing = [x for x in missing if x not in tied]
    if missing or unexpected:
        raise ValueError(
            f"the weights in {folder} do not fit its {CONFIG}: missing {missing[:3]}, not known {unexpected[:3]}; "
            f"convert the original again."
        )
    model.tie_weights()
    for module in model.modules():
        if isinstance(module, FeatureMap):
            module.take_numbers()


class _Loader(ConvertedModel):
    """What transformers' Auto classes find for a converted folder."""

    config_class = ConvertedConfig

    @classmethod
    def from_pretrained(cls, folder: str | Path, *_: Any, config: Any = None, **options: Any) -> Any:
        """As `load`."""
        return load(folder, dtype=options.get("dtype"))


def register_auto() -> None:
    """Converted folders load by transformers' Auto classes too, once kernelformer.hf is imported."""
    AutoConfig.register(KIND, ConvertedConfig, exist_ok=True)
    for name in ("AutoModel", "AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModelForSeq2SeqLM"):
        getattr(transformers, name).register(ConvertedConfig, _Loader, exist_ok=True)
