"""The loader of folders: pretrained models for conversion, and converted models as they were saved."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING, AutoConfig, GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.models.auto import modeling_auto
from transformers.utils import GENERATION_CONFIG_NAME

from kernelformer.errors import choice
from kernelformer.feature_maps.statistics import MOMENTS
from kernelformer.files import check_counts, check_hashes, read_json
from kernelformer.hf.attend import CORE
from kernelformer.hf.convert import Conversion, apply
from kernelformer.hf.pretrained import (
    TASKS,
    attempt,
    check_folder,
    first_complete,
    gguf_file,
    has_safe_weights,
    hub_options,
    load_gguf,
    load_tokenizer,
    model_classes,
    task_of,
)
from kernelformer.hf.save import CONFIG, FORMAT, KIND, ConvertedConfig
from kernelformer.weight_headers import check_local, check_shapes, check_sizes, saved_shapes, weight_files


def read_record(folder: Path) -> dict[str, Any]:
    """Read the configuration of a converted model; only its type is checked, see `check_record`."""
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
    """Check that this version can load a folder."""
    problem = _problem(record)
    if problem:
        raise ValueError(f"{folder / CONFIG}: {problem}")


def _problem(record: Mapping[str, Any]) -> str | None:
    """Explain why this version cannot load a folder; None if it can."""
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
    with _reading_weights(folder):
        files = _weight_files(folder)
        saved = saved_shapes(files)
    try:
        check_shapes(lambda: build_original(record, folder), saved)
        check_sizes([x.options for x in plan.layers], files)
    except ValueError as reason:
        raise ValueError(
            f"the weights in {folder} do not fit its {CONFIG}: {reason}; convert the original again."
        ) from None


def load_weights(model: PreTrainedModel, folder: Path, dtype: torch.dtype | None) -> None:
    """Give a converted model the weights of its folder, in this dtype or as they were saved; see `load`."""
    with _reading_weights(folder):
        # Copies: a file's tensors lie anywhere in memory, and sums come out otherwise where they are not aligned.
        weights = {key: x.clone() for path in _weight_files(folder) for key, x in load_file(path).items()}
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


@contextmanager
def _reading_weights(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, SafetensorError) as reason:
        raise ValueError(f"the weights in {folder} cannot be read: {reason}.") from None


def _weight_files(folder: Path) -> list[Path]:
    files = weight_files(folder)
    for path in files:
        if not path.is_file():
            raise ValueError(f"there is no {path.name}, and a converted model has its weights as safetensors")
    return files


def load_generation_config(model: PreTrainedModel, folder: Path) -> None:
    """Give a model that generates the settings that were saved with it, if there are any."""
    if not (model.can_generate() and (folder / GENERATION_CONFIG_NAME).is_file()):
        return
    try:
        model.generation_config = GenerationConfig.from_pretrained(folder)
    except (AttributeError, OSError, RuntimeError, TypeError, ValueError) as reason:
        raise ValueError(f"{folder / GENERATION_CONFIG_NAME} cannot be read: {reason}.") from None


_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
_AUTOS: list[Any] = [getattr(modeling_auto, x) for x in modeling_auto.__all__ if x.startswith("AutoModel")]
# Arguments of transformers' from_pretrained that change nothing for a folder, in which there is no code.
_IDLE = (
    "_commit_hash",
    "_from_auto",
    "cache_dir",
    "code_revision",
    "local_files_only",
    "low_cpu_mem_usage",
    "revision",
    "token",
    "trust_remote_code",
    "use_safetensors",
)


def load(folder: str | Path, *, dtype: torch.dtype | None = None, device: str | torch.device | None = None) -> Any:
    """Load a converted model from its folder, in evaluation mode.

        model = kernelformer.hf.load("minilm-linear")

    Transformers' Auto classes and pipelines know such folders, too, once kernelformer.hf was imported.

    Args:
        folder: written by `save`.
        dtype: of the model; default: as it was saved. Cores stay in float32, or in float64 with the model.
        device: where to; default: the CPU.

    Raises:
        ValueError: not a converted model, of another layout, with files that are not those that were saved, or with
            weights that do not fit its configuration.
    """
    folder = Path(folder)
    record = read_record(folder)
    check_hashes(folder)
    check_record(record, folder)
    plan = Conversion.from_json(record["conversion"])
    check_fit(record, plan, folder)
    model = build_original(record, folder)
    try:
        apply(model, plan)
    except Exception as reason:  # options of cores that fit no model raise all kinds
        raise ValueError(
            f"{folder / CONFIG}: its attentions cannot be converted as it says ({reason}); convert the original again."
        ) from None
    load_weights(model, folder, dtype)
    load_generation_config(model, folder)
    if device is not None:
        model.to(device)
    return model.eval()


@dataclass(frozen=True)
class Source:
    """A pretrained model and what belongs to it."""

    model: Any
    tokenizer: Any  # None where the folder has none
    path: str
    task: str = "encoder"  # one of `TASKS` but not ``auto``: how inputs for it are made
    remarks: list[str] = field(default_factory=list)


def load_source(path: str | Path, *, task: str = "auto", allow_pickle: bool = False) -> Source:
    """Load a pretrained model: a folder of transformers, a name on the hub, a ``.gguf`` file, or a folder with one.

    No weight is left random, and no code of others runs. The task says which head it gets: ``masked``, ``causal``,
    ``seq2seq``, none (``encoder``), or that of the folder; with ``allow_pickle`` torch's loader that makes tensors and
    nothing else reads pickled weights too.
    """
    choice("task", task, TASKS)
    folder = Path(path)
    packed = gguf_file(folder)
    if packed is not None:
        model, remarks = load_gguf(packed, task)
        tokenizer = load_tokenizer(packed.parent, gguf_file=packed.name)
        return Source(model, tokenizer, str(path), "causal", remarks)
    hub = _check_path(path)
    config = _read_config(path, hub)
    safe = not folder.is_dir() or has_safe_weights(folder, allow_pickle)
    options: dict[str, Any] = {"weights_only": True, "trust_remote_code": False, "dtype": torch.float32}
    # The files of a name on the hub are not known yet: None takes whichever there are.
    options["use_safetensors"] = safe if folder.is_dir() or not allow_pickle else None

    def load_as(kind: Any, **more: Any) -> tuple[Any, dict[str, Any]]:
        loaded: tuple[Any, dict[str, Any]] = attempt(
            path, lambda: kind.from_pretrained(path, config=config, output_loading_info=True, **hub, **options, **more)
        )
        return loaded

    model, remarks = first_complete(path, model_classes(config, task), load_as)
    if config.dtype not in (None, torch.float32):
        remarks.append(f"weights in {str(config.dtype).removeprefix('torch.')} were read as float32")
    return Source(model.eval(), load_tokenizer(path, **hub), str(path), task_of(model), remarks)


def load_config(path: str | Path) -> PretrainedConfig:
    """Load the configuration of a pretrained model, with the checks of `load_source`."""
    return _read_config(path, _check_path(path), "configuration")


def _check_path(path: str | Path) -> dict[str, Any]:
    """Options by which transformers reads a folder, or a name on the hub."""
    folder = Path(path)
    if folder.is_file():
        raise ValueError(f"{path} is a file and not a .gguf; give the folder of a model, or a name on the hub.")
    if folder.is_dir():
        check_folder(folder)
        return {}
    if not _HUB_NAME.fullmatch(str(path)):
        raise ValueError(f"there is no folder {path}, and a name on the hub is OWNER/NAME.")
    return hub_options(str(path))


def _read_config(path: str | Path, hub: dict[str, Any], what: str = "model") -> PretrainedConfig:
    config: PretrainedConfig = attempt(
        path, lambda: AutoConfig.from_pretrained(path, trust_remote_code=False, **hub), what
    )
    return config


class _Loader:
    """Class that an Auto class of transformers calls to load a converted folder."""

    config_class = ConvertedConfig
    auto: Any  # the Auto class

    @classmethod
    def from_pretrained(cls, folder: str | Path, *_: Any, config: Any = None, **options: Any) -> Any:
        """Load a converted folder as `load` does, if the Auto class is one for the original."""
        record = read_record(Path(folder))
        check_record(record, Path(folder))
        autos = auto_classes(record["architecture"])
        if cls.auto.__name__ not in autos:
            raise ValueError(
                f"{folder} holds a converted {record['architecture']}, which {cls.auto.__name__} is not for; use "
                f"{' or '.join((*autos, 'kernelformer.hf.load'))}."
            )
        dtype = options.pop("dtype", options.pop("torch_dtype", None))
        if isinstance(dtype, str):
            dtype = None if dtype == "auto" else getattr(torch, dtype, dtype)
        changed = set()
        if config is not None:  # Auto classes move options there that a configuration has
            saved = cls.config_class.from_pretrained(folder).to_dict()
            changed = {x for x, y in config.to_dict().items() if y != saved.get(x)} - {"_name_or_path", "dtype"}
            options |= {x: getattr(config, x) for x in changed}
            options.setdefault("attn_implementation", config._attn_implementation)
        device = _one_device(options.pop("device_map", None))
        # Where peft is installed, adapter_kwargs comes along with nothing in it.
        given = {x: any(y.values()) if isinstance(y, dict) else y not in (None, False, "") for x, y in options.items()}
        asked = [name for name, said in given.items() if name in changed or (said and name not in _IDLE)]
        if asked:
            raise ValueError(
                f"a converted model is loaded as it was saved, its attention too, with dtype= and device_map= alone, "
                f"got {asked[0]}={options[asked[0]]!r}; leave it out, or set it in model.config afterwards."
            )
        return load(folder, dtype=dtype, device=device)


def auto_classes(architecture: str) -> list[str]:
    """List the Auto classes that load a converted model of a class of transformers, by their names.

    An encoder without its decoder (T5) is one for AutoModel too, since its folder has no other.
    """
    kind, names = getattr(transformers, architecture, None), []
    for auto in _AUTOS:
        models = auto._model_mapping.get(getattr(kind, "config_class", None), ())
        if kind in (models if isinstance(models, tuple | list) else (models,)):
            names.append(auto.__name__)
    return [*names, "AutoModel"] if names == ["AutoModelForTextEncoding"] else names


def _one_device(device_map: Any) -> torch.device | None:
    """Read the device that a ``device_map`` gives to a whole model."""
    place = device_map[""] if isinstance(device_map, dict) and [*device_map] == [""] else device_map
    try:
        return None if place is None else torch.device(place)
    except (RuntimeError, TypeError):
        raise ValueError(
            f"a converted model is loaded to one device, got device_map={device_map!r}; name it: device_map='cpu' or "
            f"'cuda:0'."
        ) from None


def register_auto() -> None:
    """Make transformers' Auto classes load converted folders; calling it again changes nothing."""
    AutoConfig.register(KIND, ConvertedConfig, exist_ok=True)
    for auto in _AUTOS:
        auto.register(ConvertedConfig, type(f"Converted{auto.__name__}", (_Loader,), {"auto": auto}), exist_ok=True)
