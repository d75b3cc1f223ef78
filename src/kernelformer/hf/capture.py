"""Queries, keys and values of the attentions of a transformers model on real inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernelformer.hf.attend import attend_exactly
from kernelformer.hf.find import probing


@torch.no_grad()
def attention_inputs(model: Any, **inputs: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Collect queries, keys and values (B, H, L, D) of every attention layer, in the order of the calls.

    Args:
        model: a model of transformers whose attention goes through `transformers.AttentionInterface`.
        inputs: of the model, ``input_ids`` and so on; all texts of one length.
    """
    seen: list[tuple[Tensor, Tensor, Tensor]] = []

    def record(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any) -> Any:
        seen.append((query, key, value))
        return attend_exactly(module, query, key, value, mask, **options)

    with probing(model, record):
        model(**inputs)
    if not seen:
        raise ValueError(
            f"{type(model).__name__} does not send its attention through transformers' AttentionInterface, so that its "
            f"queries and keys cannot be seen; use a model that does, such as BERT."
        )
    return seen
