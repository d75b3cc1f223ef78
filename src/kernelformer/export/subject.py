"""Which models can be exported, and what is known of them."""

from __future__ import annotations

from typing import Any

from torch import nn

from kernelformer.export.graphs import causal_cores
from kernelformer.hf.kept import KeptAttention
from kernelformer.models import (
    KernelformerForCausalLM,
    KernelformerForMaskedLM,
    KernelformerForSequenceClassification,
    KernelformerModel,
)
from kernelformer.models.sparse_layers import SparseAttention
from kernelformer.modules.growing import GrowingCore

ENCODERS = (KernelformerModel, KernelformerForSequenceClassification, KernelformerForMaskedLM)
OWN = (*ENCODERS, KernelformerForCausalLM)


def check_model(model: Any) -> None:
    """Raise a ValueError for a model that cannot be exported: what it is, and what can be."""
    name, config = type(model).__name__, model.config
    inner = [x for x in model.modules() if isinstance(x, SparseAttention)]
    if inner:
        raise ValueError(f"{type(inner[0]).__name__} of {name} cannot be exported; use a method of list_methods().")
    if hasattr(model, "conversion"):
        reads_tokens = getattr(model, "main_input_name", "") == "input_ids"
        crosses = config.is_encoder_decoder or getattr(config, "add_cross_attention", False)
        fits = reads_tokens and not crosses
    else:
        fits = isinstance(model, OWN)
    if not fits:
        raise ValueError(
            f"{name} cannot be exported: encoders of tokens and causal language models can, not models of images, "
            f"series or pairs, nor those with an encoder and a decoder."
        )
    kept = [x for x, module in model.named_modules() if isinstance(module, KeptAttention)]
    if kept:
        raise ValueError(
            f"{kept[0]} of {name} was kept as the original has it ({model.get_submodule(kept[0]).reason}), and cannot "
            f"be exported; export the original, or convert one without such attentions."
        )


def is_causal(model: Any) -> bool:
    """Whether a model goes on with a text."""
    return bool(model.can_generate()) and not isinstance(model, ENCODERS)


def growing_layers(model: Any) -> dict[int, str]:
    """The layers of a causal model whose state keeps every key, some heads' keys included, and their methods."""
    cores = enumerate(causal_cores(model))
    return {i: core.method for i, core in cores if any(isinstance(x, GrowingCore) for x in core.modules())}


def longest_of(model: Any) -> int | None:
    """Tokens that a model has positions for; None where there is no end."""
    if isinstance(model, OWN):
        if isinstance(model, KernelformerForCausalLM):
            return model.longest
        inner = model if isinstance(model, KernelformerModel) else model.model
        return inner.embeddings.longest
    tables = [x for name, x in model.named_modules() if _is_position_table(name, x)]
    # Some count from behind their padding token on.
    rooms = [x.num_embeddings - (0 if x.padding_idx is None else x.padding_idx + 1) for x in tables]
    rooms += [x for x in [getattr(model.config, "max_position_embeddings", None)] if x is not None and tables]
    return min(rooms, default=None)


def _is_position_table(name: str, module: nn.Module) -> bool:
    last = name.rpartition(".")[2]
    return isinstance(module, nn.Embedding) and ("position" in last or last == "wpe")
