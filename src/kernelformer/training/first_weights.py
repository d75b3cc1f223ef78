"""First weights from a model that was trained before."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_NAME

from kernelformer.data.readers import hash_files
from kernelformer.data.tokenization import TOKENIZER, load_tokenizer
from kernelformer.errors import TrainingError, shape
from kernelformer.hashes import check_hashes
from kernelformer.models import KernelformerConfig
from kernelformer.modules import RelativePositions
from kernelformer.records import MODEL, RUN
from kernelformer.tasks import Task
from kernelformer.training.checkpoints import reason
from kernelformer.weight_headers import saved_shapes, weight_files

HEADS = ("head.", "lm_head.")
CORE = ".core."  # what belongs to a method: draws and what a kernel has learned


def start_from(model: PreTrainedModel, folder: Path) -> str:
    """Take over all weights that the two models share, and say which are new; a head may have another size.

    What belongs to the method itself is taken only by the same attention: another one keeps its own draws and kernels,
    so that weights trained with one attention can start a model with another. A table of relative positions may be of
    another length: a distance means the same in both, and those beyond the saved ones start as the farthest of them.

    Args:
        model: changed in place.
        folder: of `save_pretrained`, or of a finished run.
    """
    source = _place(folder)
    try:
        check_hashes(source)
        files = weight_files(source)
        saved_shapes(files)
        config = KernelformerConfig.from_pretrained(source)
        weights = {name: x for file in files for name, x in load_file(file).items()}
    except (OSError, ValueError, RuntimeError, SafetensorError) as problem:
        raise TrainingError(
            f"{source} cannot start a run: {reason(problem).rstrip('.')}; give the folder of a finished run, or one "
            f"with {CONFIG_NAME} and {SAFE_WEIGHTS_NAME} of this library."
        ) from None
    own = model.state_dict()
    same = config.attention == model.config.attention
    shared = {name: x for name, x in weights.items() if name in own and (same or CORE not in name)}
    fits = {name: x for name, x in shared.items() if own[name].shape == x.shape}
    buckets = "scheme=t5" in f"{config.attention} {config.decoder_attention}"  # the saved numbers are of no distances
    tables = {f"{name}.weight": x for name, x in model.named_modules() if isinstance(x, RelativePositions)}
    others = [name for name in shared if name not in fits and name in tables and not buckets]
    stretched = {name: _stretched(tables[name], shared[name]) for name in others}
    fits |= {name: x for name, x in stretched.items() if x.shape == own[name].shape}
    for name in shared:
        if name not in fits and not name.startswith(HEADS):
            raise TrainingError(
                f"{name} of {source} is {shape(weights[name])}, this model's is {shape(own[name])}; build it with the "
                f"same sizes and vocabulary."
            )
    if not fits:
        raise TrainingError(f"{source} has none of this model's weights; give a model of the same kind.")
    model.load_state_dict(fits, strict=False)
    new = [name for name, _ in model.named_parameters() if name not in fits]
    said = [f"{name} from {weights[name].shape[1]} to {own[name].shape[1]} distances" for name in stretched]
    rest = f"; of another length: {_few(said)}" if said else ""
    rest += f"; new: {_few(new)}" if new else ""
    return f"starting from {folder}: {len(fits)} of {len(weights)} saved tensors taken{rest}"


def _stretched(positions: RelativePositions, saved: Tensor) -> Tensor:
    """A saved table (H, n) at this one's distances, or as it is where it says something else.

    Entries are over -reach..reach, of causal ones over 0..reach. One that many distances share is in no longer table.
    """
    if positions.grid is not None or positions.scheme != "table" or saved.dim() != 2:
        return saved
    size, there = positions.weight.shape[1], saved.shape[1]
    if positions.max_distance is not None and there > size:
        return saved
    middle = 0 if positions.causal else (there - size) // 2
    return saved[:, (torch.arange(size) + middle).clamp(0, there - 1)]


def _few(names: list[str]) -> str:
    return f"{', '.join(names[:6])}{', ...' if len(names) > 6 else ''}"


def check_vocabulary(task: Task, folder: Path) -> None:
    """Raise if a saved model was trained with another vocabulary: its embeddings would go to other tokens.

    Args:
        task: maybe one with a vocabulary.
        folder: of `save_pretrained`, or of a finished run.
    """
    file, make = _place(folder) / TOKENIZER, getattr(task, "vocabulary", None)
    if make is None or not file.is_file():
        return
    mine, saved = make(), load_tokenizer(str(file))
    if mine.fingerprint() != saved.fingerprint():
        own = "one of bytes" if mine.tokenizer is None else f"another one, of {mine.size} tokens"
        raise TrainingError(
            f"{file} is the vocabulary of the weights to start from, of {saved.size} tokens; task {task.name!r} has "
            f"{own}. Embeddings would go to other tokens: take the saved one by --set task.tokenizer={folder}."
        )


def weights_hash(folder: Path) -> str:
    """Name, size and hash of the weights of a saved model, or of a finished run."""
    return hash_files(weight_files(_place(folder)))


def _place(folder: Path) -> Path:
    return folder / MODEL if (folder / RUN).exists() else folder
