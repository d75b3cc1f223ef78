"""Linear probe: how well a linear classifier tells labels by the embeddings of an encoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernelformer.distill.hidden_states import standard_error
from kernelformer.distill.losses import pooled

STEPS = 50  # of L-BFGS
DECAY = 1e-2  # of the classifier's weights
Labelled = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Probe:
    """Accuracy of a probe of two models on the same texts.

    Args:
        original: accuracy on the embeddings of the original.
        converted: that of the converted model.
        error: standard error of ``converted - original``, text by text; None for a single text.
        trained: texts that the classifiers were fitted to.
        tested: other texts, that they were tried on.
    """

    original: float
    converted: float
    error: float | None
    trained: int
    tested: int


@torch.no_grad()
def embeddings(model: Any, tokenizer: Any, texts: Sequence[str], length: int, batch: int) -> Tensor:
    """Mean-pooled outputs of a model, of length 1: (N, d).

    Args:
        model: encoder.
        tokenizer: of transformers.
        texts: N of them, cut at ``length`` tokens.
        length: tokens.
        batch: texts at once.
    """
    vectors = []
    for first in range(0, len(texts), batch):
        some = list(texts[first : first + batch])
        inputs = tokenizer(some, truncation=True, max_length=length, padding=True, return_tensors="pt")
        given = {name: inputs[name].to(model.device) for name in ("input_ids", "attention_mask")}
        vectors.append(F.normalize(pooled(model(**given)[0], given["attention_mask"]), dim=-1))
    return torch.cat(vectors)


def compare_probes(original: Tensor, converted: Tensor, labels: Tensor) -> Probe:
    """Fit a probe to the first half of the texts for each model, and try both on the other half.

    Args:
        original: (N, d) embeddings of the original.
        converted: (N, d) those of the converted model.
        labels: (N) integers from 0 on.

    Raises:
        ValueError: fewer than two texts, or one label in all of those to fit to.
    """
    half = check_labels(labels.tolist())
    right = [probe_right((x[:half], labels[:half]), (x[half:], labels[half:])).double() for x in (original, converted)]
    error = standard_error((right[1] - right[0]).tolist())
    return Probe(float(right[0].mean()), float(right[1].mean()), error, half, len(labels) - half)


def check_labels(labels: Sequence[int]) -> int:
    """Check that the first half of some labels has two kinds or more; returns how many that half is.

    Raises:
        ValueError: it has not.
    """
    half = len(labels) // 2
    kinds = len(set(labels[:half]))
    if kinds < 2:
        raise ValueError(
            f"a probe needs texts of two labels or more to learn from, got {kinds} in the {half} of {len(labels)} "
            f"texts that it learns from; give more by --probe."
        )
    return half


def probe_right(train: Labelled, test: Labelled, steps: int = STEPS) -> Tensor:
    """Tell which labels multinomial logistic regression gets right, (N) bool.

        W = argmin  -mean log softmax(x W + b)_y + DECAY |W|^2 / 2          by L-BFGS, on standardized features

    Args:
        train: features (n, d) and labels (n) to fit to.
        test: features (N, d) and labels (N).
        steps: of L-BFGS.
    """
    with torch.enable_grad():
        kinds, numbers = torch.cat([train[1], test[1]]).unique(return_inverse=True)  # labels may be any numbers
        x, y, classes = train[0].double(), numbers[: len(train[1])], len(kinds)
        mean, size = x.mean(0), x.std(0).clamp_min(1e-6)
        weight = torch.zeros(x.shape[1] + 1, classes, dtype=torch.float64, requires_grad=True)
        optimizer = torch.optim.LBFGS([weight], max_iter=steps, line_search_fn="strong_wolfe")

        def logits(vectors: Tensor) -> Tensor:
            scaled: Tensor = (vectors.double() - mean) / size
            return scaled @ weight[:-1] + weight[-1]

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(logits(x), y) + DECAY * weight[:-1].square().sum() / 2
            loss.backward()
            return loss

        optimizer.step(closure)
    with torch.no_grad():
        right: Tensor = logits(test[0]).argmax(-1) == numbers[len(train[1]) :]
        return right


def probe_accuracy(train: Labelled, test: Labelled, steps: int = STEPS) -> float:
    """Accuracy of `probe_right`."""
    return float(probe_right(train, test, steps).double().mean())
