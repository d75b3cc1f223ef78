"""Converted models as folders: configuration, safetensors, and what was converted."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoConfig, GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.models.auto import modeling_auto
from transformers.utils import GENERATION_CONFIG_NAME, SAFE_WEIGHTS_NAME

from kernelformer.files import PART, json_text, read_json, sync, write_json
from kernelformer.hashes import check_hashes, write_hashes
from kernelformer.hf.attend import CORE
from kernelformer.hf.converting import Conversion, apply, conversion
from kernelformer.hf.headers import check_local, check_shapes, check_sizes, saved_shapes, weight_files
from kernelformer.limits import check_layers

CONFIG = "config.json"
KIND = "kernelformer-converted"  # model_type: whoever does not know it refuses the folder
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
_HUB = (
    "_commit_hash",
    "_from_auto",
    "cache_dir",
    "code_revision",
    "local_files_only",
    "revision",
    "token",
    "use_safetensors",
)
_WEIGHTS = ("model*.safetensors", f"{SAFE_WEIGHTS_NAME}*")  # what a save replaces


class ConvertedConfig(PretrainedConfig):
    """Configuration of a converted model: that of the original, and what was done to it.

    Args:
        source: the original's configuration, as a dict.
        architecture: name of the original's class in transformers.
        conversion: see `Conversion.as_json`.
        format: number of this layout.
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

    The folder is whole or none: files are written beside it first, and its configuration, without which nobody loads
    it, comes last. Other files in it, a tokenizer's for example, stay.

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
    """Weights that safetensors can hold: of those that are one, only the one; others that share memory as copies."""
    own: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, x in weights.items():
        source = weights.get(tied.get(name, ""))
        if source is not None and source.data_ptr() == x.data_ptr() and source.shape == x.shape:
            continue
        place = x.untyped_storage().data_ptr()
        own[name] = x.clone() if place in seen else x
        seen.add(place)
    return own


def _refuse_original(folder: Path) -> None:
    """A folder whose model is not a converted one would lose it."""
    path = folder / CONFIG
    if not path.is_file():
        weights = sorted(x.name for pattern in _WEIGHTS for x in folder.glob(pattern))
        if weights:
            raise ValueError(
                f"{folder} has {weights[0]} and no {CONFIG}: weights of another model, or of a save that was stopped. "
                f"Saving would remove them; choose another folder, or remove them by hand."
            )
        return
    try:
        record = read_json(path)
    except ValueError:
        record = None
    found = record.get("model_type") if isinstance(record, dict) else None
    if found != KIND:
        raise ValueError(
            f"{folder} holds a model of type {found!r}, which saving the converted one would overwrite; choose another "
            f"folder."
        )


def load(folder: str | Path, *, dtype: torch.dtype | None = None, device: str | torch.device | None = None) -> Any:
    """A converted model from its folder, in evaluation mode.

        model = kernelformer.hf.load("minilm-linear")

    Args:
        folder: written by `save`.
        dtype: of the model; default: as it was saved. Cores stay in float32, or in float64 with the model.
        device: where to; default: the CPU.

    Raises:
        ValueError: not a converted model, of another layout, with files that are not those that were saved, or with
            weights that do not fit its configuration.
    """
    folder = Path(folder)
    record = _read(folder)
    check_hashes(folder)
    problem = _misfit(record)
    if problem:
        raise ValueError(f"{folder / CONFIG}: {problem}")
    plan = Conversion.from_json(record["conversion"])
    _compare(record, plan, folder)
    model = _make(record, folder)
    try:
        apply(model, plan)
    except Exception as reason:  # options of cores that fit no model raise all kinds
        raise ValueError(
            f"{folder / CONFIG}: its attentions cannot be converted as it says ({reason}); convert the original again."
        ) from None
    _load_weights(model, folder, dtype)
    if model.can_generate() and (folder / GENERATION_CONFIG_NAME).is_file():
        try:
            model.generation_config = GenerationConfig.from_pretrained(folder)
        except (AttributeError, OSError, RuntimeError, TypeError, ValueError) as reason:
            raise ValueError(f"{folder / GENERATION_CONFIG_NAME} cannot be read: {reason}.") from None
    if device is not None:
        model.to(device)
    return model.eval()


def _make(record: Mapping[str, Any], folder: Path) -> Any:
    """The model before its conversion, its weights not set."""
    kind, config = getattr(transformers, record["architecture"]), _source(record)
    try:
        with no_init_weights():  # all come from the folder
            return kind(config, **({} if record.get("pooler", True) else {"add_pooling_layer": False}))
    except Exception as reason:  # sizes that fit no model raise all kinds
        first = (str(reason).strip().splitlines() or [""])[0]
        raise ValueError(
            f"{folder / CONFIG}: no {kind.__name__} can be built as it says ({type(reason).__name__}: {first}); "
            f"convert the original again."
        ) from None


def _compare(record: Mapping[str, Any], plan: Conversion, folder: Path) -> None:
    """Raise if the configuration does not fit the weights, before memory is asked for or anything is drawn."""
    try:
        files = _weight_files(folder)
        saved = saved_shapes(files)
    except (OSError, SafetensorError) as reason:
        raise ValueError(f"the weights in {folder} cannot be read: {reason}.") from None
    with torch.device("meta"):
        skeleton = _make(record, folder)
    try:
        check_shapes(skeleton, saved)
        check_sizes([x.options for x in plan.layers], files)
    except ValueError as reason:
        raise ValueError(
            f"the weights in {folder} do not fit its {CONFIG}: {reason}; convert the original again."
        ) from None


def _read(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    if not path.is_file():
        raise ValueError(f"{folder} is not the folder of a model: there is no {CONFIG} in it.")
    try:
        record = read_json(path)
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
    except (AttributeError, TypeError, KeyError) as reason:
        return f"its list of converted attentions is of another version ({reason}); convert the original again."
    try:
        check_layers("the original's configuration", record["source"])
        check_local("the original's configuration", record["source"])
    except ValueError as reason:
        return str(reason)
    try:
        source = _source(record)
    except Exception as reason:  # whatever a configuration of another version raises
        return f"transformers {transformers.__version__} does not take the original's configuration: {reason}"
    wanted = kind.config_class
    if wanted is not None and not isinstance(source, wanted):
        return (
            f"its architecture {kind.__name__} is for a {wanted.__name__}, and the original's configuration "
            f"is a {type(source).__name__}; convert the original again."
        )
    return None


def _source(record: Mapping[str, Any]) -> Any:
    """The configuration of the original."""
    source = dict(record["source"])
    kind = source.pop("model_type", record.get("source_type"))
    return CONFIG_MAPPING[kind].from_dict(source)


def _load_weights(model: PreTrainedModel, folder: Path, dtype: torch.dtype | None) -> None:
    weights = _read_weights(folder)
    if dtype is not None:
        cores = torch.float64 if dtype == torch.float64 else torch.float32
        for name, x in weights.items():
            if x.is_floating_point():
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


class _Loader:
    """What an Auto class of transformers finds for a converted folder."""

    config_class = ConvertedConfig
    auto: Any  # the Auto class

    @classmethod
    def from_pretrained(cls, folder: str | Path, *_: Any, config: Any = None, **options: Any) -> Any:
        """As `load`, where the Auto class is one for the original.

        Raises:
            ValueError: it is not, or an option that `load` does not have.
        """
        record = _read(Path(folder))
        problem = _misfit(record)
        if problem:
            raise ValueError(f"{Path(folder) / CONFIG}: {problem}")
        fitting = cls.auto._model_mapping.get(type(_source(record)), ())
        names = [x.__name__ for x in (fitting if isinstance(fitting, tuple | list) else (fitting,))]
        if record["architecture"] not in names:
            raise ValueError(
                f"{folder} holds a converted {record['architecture']}, {cls.auto.__name__} is for "
                f"{' or '.join(names) or 'other models'}; use kernelformer.hf.load."
            )
        dtype = options.pop("dtype", options.pop("torch_dtype", None))
        if isinstance(dtype, str):
            dtype = None if dtype == "auto" else getattr(torch, dtype, dtype)
        asked = [name for name, x in options.items() if name not in _HUB and x not in (None, False, "")]
        if asked:
            raise ValueError(
                f"a converted model is loaded with dtype= alone, got {asked[0]}={options[asked[0]]!r}; use "
                f"kernelformer.hf.load(folder, dtype=..., device=...)."
            )
        return load(folder, dtype=dtype)


def register_auto() -> None:
    """Converted folders load by transformers' Auto classes too, once kernelformer.hf is imported."""
    AutoConfig.register(KIND, ConvertedConfig, exist_ok=True)
    for name in modeling_auto.__all__:
        if name.startswith("AutoModel"):
            auto = getattr(modeling_auto, name)
            auto.register(ConvertedConfig, type(f"Converted{name}", (_Loader,), {"auto": auto}), exist_ok=True)
