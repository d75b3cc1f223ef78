"""Errors of hidden states and outputs of a model against those of its original."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernelformer.distill.losses import pooled

OUTPUTS = ("logits", "prediction_logits", "last_hidden_state")


@dataclass
class Mean:
    """Running mean of any number of values."""

    total: float = 0.0
    count: int = 0

    def add(self, values: Tensor) -> None:
        """Count these values in, of any shape."""
        self.total += float(values.sum(dtype=torch.float64))
        self.count += values.numel()

    @property
    def value(self) -> float | None:
        """The mean; None where there were no values."""
        return self.total / self.count if self.count else None


def standard_error(values: Sequence[float]) -> float | None:
    """Standard error of the mean of independent values; None for fewer than two."""
    if len(values) < 2:
        return None
    return float(torch.tensor(values, dtype=torch.float64).std() / math.sqrt(len(values)))


class HiddenStateErrors:
    """Errors of a converted model that runs by itself: after each layer, and of its output.

    Args:
        pools: compare mean-pooled last hidden states too.
        predicts: logits are those of the next token, whose perplexity is measured too.
    """

    def __init__(self, pools: bool, predicts: bool = False) -> None:
        self.pools, self.predicts = pools, predicts
        self.hidden: dict[str, list[Mean]] = {}
        self.output, self.agreement, self.cosine = Mean(), Mean(), Mean()
        self.losses = {"original": Mean(), "converted": Mean()}  # of the next token
        self.samples = self.tokens = 0

    def add(self, batch: Mapping[str, Any], want: Any, got: Any) -> None:
        """Count in a batch.

        Args:
            batch: inputs of both models; padding does not count.
            want: outputs of the original, with hidden states.
            got: outputs of the converted model, with hidden states.
        """
        mask = batch.get("attention_mask")
        masks = {"decoder": batch.get("decoder_attention_mask")}
        for part in ("encoder", "decoder", "layers"):
            name = "hidden_states" if part == "layers" else f"{part}_hidden_states"
            wanted, ours = getattr(want, name, None), getattr(got, name, None)
            if wanted is None or ours is None:
                continue
            means = self.hidden.setdefault(part, [Mean() for _ in wanted])
            for mean, x, y in zip(means, wanted, ours, strict=True):
                mean.add(_relative(x, y, masks.get(part, mask)))
            if self.pools and part == "layers":
                real = None if mask is None or mask.shape != wanted[-1].shape[:2] else mask
                self.cosine.add(torch.cosine_similarity(pooled(wanted[-1], real), pooled(ours[-1], real)))
        name = output_name(want)
        x, y = getattr(want, name), getattr(got, name)
        over = masks["decoder"] if "decoder" in self.hidden else mask
        self.output.add(_relative(x, y, over))
        if "logits" in name:
            self.agreement.add(_kept_tokens((x.argmax(-1) == y.argmax(-1)).double(), over))
        if self.predicts and "input_ids" in batch:
            for which, logits in (("original", x), ("converted", y)):
                self.losses[which].add(next_token_losses(logits, batch["input_ids"], mask))
        inputs = next(iter(batch.values()))
        self.samples += len(inputs)
        self.tokens += int(mask.sum()) if mask is not None else inputs.numel() if inputs.dim() == 2 else 0

    def perplexity(self, which: str) -> float | None:
        """Perplexity of the next token, of the ``original`` or the ``converted`` model; None if it was not measured."""
        loss = self.losses[which].value
        return None if loss is None else float(torch.tensor(loss, dtype=torch.float64).exp())


def next_token_losses(logits: Tensor, ids: Tensor, mask: Tensor | None) -> Tensor:
    """Losses ``-log p`` of every real token after the first, (N).

    Args:
        logits: (B, L, V).
        ids: (B, L).
        mask: (B, L), 1 = real; None: all are.
    """
    losses = F.cross_entropy(logits[:, :-1].float().mT, ids[:, 1:], reduction="none")
    return losses if mask is None else losses[(mask[:, 1:] * mask[:, :-1]).bool()]


def output_divergence(batch: Mapping[str, Any], want: Any, got: Any) -> float:
    """Distance of the outputs of a model from those of the original, in one number.

        mean over tokens of  KL(softmax(want) || softmax(got))      logits, (B, L, V) or (B, V)
        mean over tokens of  |got - want|^2 / |want|^2              hidden states, and logits of a single number

    Args:
        batch: inputs of both; padding does not count.
        want: outputs of the original.
        got: outputs of the other model.

    Raises:
        ValueError: there is nothing to compare.
    """
    name = output_name(want)
    x, y = getattr(want, name), getattr(got, name)
    mask = batch.get("decoder_attention_mask" if "decoder_input_ids" in batch else "attention_mask")
    if "logits" not in name or x.shape[-1] == 1:
        return float(_relative(x, y, mask).mean())
    ours, theirs = (z.float().log_softmax(-1) for z in (y, x))
    return float(_kept_tokens(F.kl_div(ours, theirs, reduction="none", log_target=True).sum(-1), mask).mean())


def output_name(outputs: Any) -> str:
    """Name the output of a model that is compared.

    Raises:
        ValueError: none of them is there.
    """
    name = next((x for x in OUTPUTS if getattr(outputs, x, None) is not None), "")
    if not name:
        raise ValueError(f"the model returns none of {', '.join(OUTPUTS)}, so that there is nothing to compare.")
    return name


def _kept_tokens(x: Tensor, mask: Tensor | None) -> Tensor:
    """Numbers of tokens, (B, L), without those of padding; other shapes, such as one number a sample, stay whole.

    Numbers, not vectors: logits of a sample, (B, V), have the shape of a mask where classes are as many as tokens.
    """
    return x if mask is None or x.shape != mask.shape else x[mask.bool()]


def _relative(want: Tensor, got: Tensor, mask: Tensor | None) -> Tensor:
    """Squared relative error of each real token, (B, L, d) -> (N)."""
    want, got = want.double(), got.double()
    return _kept_tokens((got - want).square().sum(-1) / want.square().sum(-1).clamp(min=1e-300), mask)
