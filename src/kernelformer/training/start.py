"""First weights from a model that was trained before."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import PreTrainedModel
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_NAME

from kernelformer.errors import shape
from kernelformer.models import KernelformerConfig
from kernelformer.records import MODEL, RUN
from kernelformer.training.checkpoints import reason
from kernelformer.training.run import TrainingError

HEADS = ("head.", "lm_head.")
CORE = ".core."  # what belongs to a method: draws and what a kernel has learned


def start_from(model: PreTrainedModel, folder: Path) -> str:
    """Take over all weights that the two models share, and say which are new; a head may have another size.

    What belongs to the method itself is taken only by the same attention: another one keeps its own draws and kernels,
    so that weights trained with one attention can start a model with another.

    Args:
        model: changed in place.
        folder: of `save_pretrained`, or of a finished run.
    """
    place = folder / MODEL if (folder / RUN).exists() else folder
    try:
        config = KernelformerConfig.from_pretrained(place)
        weights = load_file(place / SAFE_WEIGHTS_NAME)
    except (OSError, ValueError, SafetensorError) as problem:
        raise TrainingError(
            f"{place} cannot start a run: {reason(problem).rstrip('.')}; give the folder of a finished run, or one "
            f"with {CONFIG_NAME} and {SAFE_WEIGHTS_NAME} of this library."
        ) from None
    own = model.state_dict()
    same = config.attention == model.config.attention
    shared = {name: x for name, x in weights.items() if name in own and (same or CORE not in name)}
    fits = {name: x for name, x in shared.items() if own[name].shape == x.shape}
    for name in shared:
        if name not in fits and not name.startswith(HEADS):
            raise TrainingError(
                f"{name} of {place} is {shape(weights[name])}, this model's is {shape(own[name])}; build it with the "
                f"same sizes and vocabulary."
            )
    if not fits:
        raise TrainingError(f"{place} has none of this model's weights; give a model of the same kind.")
    model.load_state_dict(fits, strict=False)
    new = [name for name, _ in model.named_parameters() if name not in fits]
    rest = f"; new: {', '.join(new[:6])}{', ...' if len(new) > 6 else ''}" if new else ""
    return f"starting from {folder}: {len(fits)} of {len(weights)} saved tensors taken{rest}"
