"""Folders of converted models, whoever wrote them: everything is checked before it is used."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import CONFIG_MAPPING, GenerationConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.utils import GENERATION_CONFIG_NAME

from kernelformer.feature_maps.statistics import MOMENTS
from kernelformer.files import read_json
from kernelformer.hf.attend import CORE
from kernelformer.hf.plan import Conversion
from kernelformer.hf.save import CONFIG, FORMAT, KIND
from kernelformer.limits import check_counts
from kernelformer.weight_headers import check_local, check_shapes, check_sizes, saved_shapes, weight_files


def read_record(folder: Path) -> dict[str, Any]:
    """Read the configuration of a converted model; only its type is checked, see `check_record`.

    Raises:
        ValueError: there is none, it is not JSON, or it is of another model.
    """
    path = folder / CONFIG
    if not path.is_file():
        raise ValueError(f"{folder} is not the folder of a model: there is no {CONFIG} in it.")
    try:
        record = read_json(path)
    except ValueError as reason:
        raise ValueError(f"{path} is not JSON: {reason}.") from None
    if not isinstance(record, dict) or record.get("model_type") != KIND:
        kind = record.get("model_type") if isinstance(record, dict) else type(record).__name__
        raise ValueError(
            f"{path} is of a model of type {kind!r}, not of a converted one ({KIND!r}); load it with transformers, or "
            f"convert it first: kernelformer convert {folder} NEW_FOLDER."
        )
    return record


def check_record(record: Mapping[str, Any], folder: Path) -> None:
    """Check that this version can load a folder.

    Raises:
        ValueError: another layout, parts that are missing, or a model that transformers does not have.
    """
    problem = _problem(record)
    if problem:
        raise ValueError(f"{folder / CONFIG}: {problem}")


def _problem(record: Mapping[str, Any]) -> str | None:
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
    except (AttributeError, TypeError, KeyError) as reason:
        return f"its list of converted attentions is of another version ({reason}); convert the original again."
    try:
        check_counts("the original's configuration", record["source"])
        check_local("the original's configuration", record["source"])
    except ValueError as reason:
        return str(reason)
    try:
        source = source_config(record)
    except Exception as reason:  # whatever a configuration of another version raises
        return f"transformers {transformers.__version__} does not take the original's configuration: {reason}"
    wanted = kind.config_class
    if wanted is not None and not isinstance(source, wanted):
        return (
            f"its architecture {kind.__name__} is for a {wanted.__name__}, and the original's configuration "
            f"is a {type(source).__name__}; convert the original again."
        )
    return None


def source_config(record: Mapping[str, Any]) -> Any:
    """Build the configuration of the original."""
    source = dict(record["source"])
    kind = source.pop("model_type", record.get("source_type"))
    return CONFIG_MAPPING[kind].from_dict(source)


def build_original(record: Mapping[str, Any], folder: Path) -> Any:
    """Build the model before its conversion, with weights that are not set."""
    kind, config = getattr(transformers, record["architecture"]), source_config(record)
    try:
        with no_init_weights():  # all come from the folder
            return kind(config, **({} if record.get("pooler", True) else {"add_pooling_layer": False}))
    except Exception as reason:  # sizes that fit no model raise all kinds
        first = (str(reason).strip().splitlines() or [""])[0]
        raise ValueError(
            f"{folder / CONFIG}: no {kind.__name__} can be built as it says ({type(reason).__name__}: {first}); "
            f"convert the original again."
        ) from None


def check_fit(record: Mapping[str, Any], plan: Conversion, folder: Path) -> None:
    """Raise if the configuration does not fit the weights; it takes no memory and draws nothing."""
    try:
        files = _weight_files(folder)
        saved = saved_shapes(files)
    except (OSError, SafetensorError) as reason:
        raise ValueError(f"the weights in {folder} cannot be read: {reason}.") from None
    try:
        check_shapes(lambda: build_original(record, folder), saved)
        check_sizes([x.options for x in plan.layers], files)
    except ValueError as reason:
        raise ValueError(
            f"the weights in {folder} do not fit its {CONFIG}: {reason}; convert the original again."
        ) from None


def load_weights(model: PreTrainedModel, folder: Path, dtype: torch.dtype | None) -> None:
    """Give a converted model the weights of its folder.

    Args:
        model: built as the folder's configuration says.
        folder: with safetensors.
        dtype: of the model, see `kernelformer.hf.load`; None: as they were saved.

    Raises:
        ValueError: they cannot be read, or do not fit.
    """
    weights = _read_weights(folder)
    if dtype is not None:
        cores = torch.float64 if dtype == torch.float64 else torch.float32
        for name, x in weights.items():
            if x.is_floating_point() and not name.endswith(MOMENTS):
                weights[name] = x.to(cores if CORE in name.split(".") else dtype)
    try:
        # Assigned and not copied, so that each keeps the precision that it was saved with.
        missing, unexpected = model.load_state_dict(weights, strict=False, assign=True)
    except (RuntimeError, ValueError) as reason:
        raise ValueError(f"the weights in {folder} do not fit its {CONFIG}: {reason}") from None
    lost = set(missing)
    model.tie_weights(lost, recompute_mapping=False)  # takes those out that others stand for
    if lost or unexpected:
        raise ValueError(
            f"the weights in {folder} do not fit its {CONFIG}: missing {sorted(lost)[:3]}, not known "
            f"{unexpected[:3]}; convert the original again."
        )


def _read_weights(folder: Path) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = {}
    try:
        for path in _weight_files(folder):
            # Copies: a file's tensors lie anywhere in memory, and sums come out otherwise where they are not aligned.
            weights |= {key: x.clone() for key, x in load_file(path).items()}
    except (OSError, ValueError, SafetensorError) as reason:
        raise ValueError(f"the weights in {folder} cannot be read: {reason}.") from None
    return weights


def _weight_files(folder: Path) -> list[Path]:
    try:
        files = weight_files(folder)
        for path in files:
            if not path.is_file():
                raise ValueError(f"there is no {path.name}, and a converted model has its weights as safetensors")
    except ValueError as reason:
        raise ValueError(f"the weights in {folder} cannot be read: {reason}.") from None
    return files


def load_generation_config(model: PreTrainedModel, folder: Path) -> None:
    """Give a model that generates the settings that were saved with it, if there are any."""
    if not (model.can_generate() and (folder / GENERATION_CONFIG_NAME).is_file()):
        return
    try:
        model.generation_config = GenerationConfig.from_pretrained(folder)
    except (AttributeError, OSError, RuntimeError, TypeError, ValueError) as reason:
        raise ValueError(f"{folder / GENERATION_CONFIG_NAME} cannot be read: {reason}.") from None
