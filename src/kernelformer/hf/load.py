"""Folders of converted models made models again, whoever wrote them: everything is checked before it is used."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoConfig, GenerationConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.models.auto import modeling_auto
from transformers.utils import GENERATION_CONFIG_NAME

from kernelformer.files import read_json
from kernelformer.hashes import check_hashes
from kernelformer.hf.attend import CORE
from kernelformer.hf.convert import Conversion, apply
from kernelformer.hf.save import CONFIG, FORMAT, KIND, ConvertedConfig
from kernelformer.limits import check_layers
from kernelformer.weight_headers import check_local, check_shapes, check_sizes, saved_shapes, weight_files

# Arguments of transformers' from_pretrained that mean something for the hub only.
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
