"""Load one of our models from a folder of `save_pretrained` or of a training run, with all its weights."""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path

from safetensors import SafetensorError
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_NAME

from kernelformer.errors import reason
from kernelformer.files import HashError, read_json
from kernelformer.models import MODELS, KernelformerConfig, KernelformerPreTrainedModel
from kernelformer.quiet import silent_libraries
from kernelformer.weight_headers import SizeError, saved_shapes, weight_files

MODEL = "model"  # in the folder of a training run: the folder of its final model
# Exceptions that damaged files raise: from the system, JSON, zip archives, safetensors, torch.
DAMAGE = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    EOFError,
    RuntimeError,
    pickle.UnpicklingError,
    zipfile.BadZipFile,
    SafetensorError,
)


def model_folder(folder: Path) -> Path:
    """The folder of the model: ``model/`` of a training run, or the folder itself."""
    home = folder / MODEL if (folder / MODEL / CONFIG_NAME).is_file() else folder
    if not (home / CONFIG_NAME).is_file():
        raise ValueError(f"{folder} holds no model: there is no {CONFIG_NAME} in it, and no {MODEL}/ of a run.")
    return home


def load_saved(
    folder: Path, kind: str | None = None, way_out: str = "save the model again"
) -> KernelformerPreTrainedModel:
    """Load a saved model whose weights are all there, and no others; its class is by default the one it names."""
    file = folder / SAFE_WEIGHTS_NAME
    try:
        saved_shapes(weight_files(folder))
        file = folder / CONFIG_NAME
        chosen = _saved_class(file) if kind is None else MODELS[kind]
        with silent_libraries():
            model, loading = chosen.from_pretrained(folder, output_loading_info=True)
        for name in sorted(loading["missing_keys"]):
            raise ValueError(f"it asks for {name}, which {SAFE_WEIGHTS_NAME} has not")
        for name in sorted(loading["unexpected_keys"]):
            raise ValueError(f"it has no place for {name} of {SAFE_WEIGHTS_NAME}")
    except DAMAGE as problem:
        why = reason(problem).rstrip(".")
        if isinstance(problem, HashError | SizeError):  # which name the file and a way out themselves
            raise ValueError(f"{why}; or {way_out}.") from None
        raise ValueError(f"{file} cannot be used: {why}; {way_out}.") from None
    loaded: KernelformerPreTrainedModel = model
    return loaded


def _saved_class(file: Path) -> type[KernelformerPreTrainedModel]:
    names = {x.__name__: x for x in MODELS.values()}
    made = next(iter(KernelformerConfig.from_dict(read_json(file)).architectures or ()), "")
    if made not in names:
        raise ValueError(f"it names no class of ours in its architectures, got {made!r}")
    return names[made]
