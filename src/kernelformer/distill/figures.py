"""One figure for how near the output of a converted model is to its original's."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernelformer.distill.hidden_states import next_token_losses
from kernelformer.distill.losses import pooled
from kernelformer.modules.evaluating import evaluating

Batch = Mapping[str, Any]
RATIO, COSINE = "perplexity ratio", "cosine"
TOLERANCE = {RATIO: 1.25, COSINE: 0.98}
LEAST = 1e-5  # a loss below it is rounding


@dataclass(frozen=True)
class Figure:
    """How near a converted model is to its original.

    Args:
        kind: `RATIO`, of the perplexities of the next token, for causal language models; `COSINE` of mean-pooled last
            hidden states, mean over texts, for all others.
        value: 1 is the original.
        agreement: share of tokens whose largest logit is the same; None without logits.
    """

    kind: str
    value: float
    agreement: float | None = None

    @property
    def loss(self) -> float:
        """Distance from the original: the logarithm of the ratio, or 1 - cosine; at least 1e-5."""
        if not math.isfinite(self.value):
            return math.inf
        return max(LEAST, math.log(self.value) if self.kind == RATIO else 1 - self.value)

    def within(self, tolerance: float) -> bool:
        """Whether it is at least as near as a figure of the same kind."""
        return self.value <= tolerance if self.kind == RATIO else self.value >= tolerance

    def __str__(self) -> str:
        """Write it for people."""
        return f"{self.kind} {self.value:.3f}" if self.kind == RATIO else f"{self.kind} {self.value:.4f}"


def value_of_loss(kind: str, loss: float) -> float:
    """The value of a figure of this loss, the inverse of `Figure.loss`."""
    return math.exp(min(loss, 700.0)) if kind == RATIO else 1 - loss


class Reference:
    """The original's outputs on some inputs, kept as little as it takes to compare another model with them.

    Args:
        model: the original, of transformers.
        batches: its inputs.
        predicts: it is a causal language model, which is compared by its perplexity.
    """

    def __init__(self, model: Any, batches: Sequence[Batch], *, predicts: bool) -> None:
        self.kind = RATIO if predicts else COSINE
        self.batches = list(batches)
        self.wanted = [_digest(model, x, predicts) for x in self.batches]

    def figure(self, model: Any) -> Figure:
        """Run another model on the same inputs and compare it."""
        pairs = [
            (_digest(model, x, self.kind == RATIO), want) for x, want in zip(self.batches, self.wanted, strict=True)
        ]
        ours, theirs = (torch.cat([pair[i].measured for pair in pairs]).double() for i in (0, 1))
        if self.kind == RATIO:
            value = math.exp(min(700.0, float(ours.mean() - theirs.mean())))
        else:
            value = float(torch.cosine_similarity(ours, theirs, dim=-1).mean())
        same = [
            torch.eq(a.largest, b.largest)[b.real]
            for a, b in pairs
            if a.largest is not None and b.largest is not None and b.real is not None
        ]
        return Figure(self.kind, value, float(torch.cat(same).double().mean()) if same else None)


@dataclass(frozen=True)
class _Digest:
    """Of a batch: losses (N) or pooled states (B, d); and the largest logits (B, L) of real tokens."""

    measured: Tensor
    largest: Tensor | None
    real: Tensor | None


@torch.no_grad()
def _digest(model: Any, batch: Batch, predicts: bool) -> _Digest:
    with evaluating(model):
        out = model(**batch, output_hidden_states=not predicts)
    mask = batch.get("attention_mask")
    logits: Any = getattr(out, "logits", None)
    largest = None if logits is None or logits.dim() != 3 else logits.argmax(-1)
    real = None if largest is None else mask.bool() if mask is not None else torch.ones_like(largest, dtype=torch.bool)
    if predicts:
        return _Digest(next_token_losses(logits, batch["input_ids"], mask).flatten(), largest, real)
    hidden = out.hidden_states[-1]
    fits = mask is not None and mask.shape == hidden.shape[:2]
    return _Digest(pooled(hidden, mask if fits else None), largest, real)
