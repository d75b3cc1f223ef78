"""How well a causal language model remembers what it was told far back."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor


@torch.no_grad()
def answer_log_probs(model: Any, ids: Tensor, count: int) -> tuple[Tensor, bool]:
    """Score the last tokens of a text as an answer to what stands before them.

    Args:
        model: causal language model.
        ids: (L), text, question and answer.
        count: tokens of the answer.

    Returns:
        ``log p`` of each token of the answer given all before it, (count); and whether each of them is the likeliest,
        so that greedy continuation of the question is the answer.
    """
    # Logits of all positions would be L times the vocabulary.
    few = "logits_to_keep" in inspect.signature(model.forward).parameters
    options = {"logits_to_keep": count + 1} if few else {}
    logits = model(input_ids=ids[None].to(model.device), use_cache=False, **options).logits[0, -count - 1 : -1]
    wanted = ids[-count:].to(logits.device)
    log_probs = logits.float().log_softmax(-1).gather(1, wanted[:, None])[:, 0]
    return log_probs, bool((logits.argmax(-1) == wanted).all())
