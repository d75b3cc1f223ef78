"""Metrics of answers: F1, and correlations of classes, numbers and ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

METRICS = {
    "accuracy": "share of right answers",
    "f1": "harmonic mean of precision and recall of class 1, of two",
    "matthews": "correlation of answers and classes",
    "pearson": "correlation of numbers",
    "spearman": "correlation of the ranks of numbers",
}
OF_NUMBERS = ("pearson", "spearman")

Numbers = NDArray[np.float64]


def f1(predictions: NDArray[Any], labels: NDArray[Any]) -> float:
    """F1 of class 1.

        2 TP / (2 TP + FP + FN)          0 where there is no 1 at all

    Args:
        predictions: (N) classes.
        labels: (N) classes.
    """
    predicted, wanted = predictions == 1, labels == 1
    ones = int(predicted.sum() + wanted.sum())
    return 2 * int((predicted & wanted).sum()) / ones if ones else 0.0


def matthews(predictions: NDArray[Any], labels: NDArray[Any]) -> float:
    """Matthews' correlation of any number of classes; 0 where answers or labels are all the same.

        (N c - sum_k p_k t_k) / sqrt((N^2 - sum_k p_k^2) (N^2 - sum_k t_k^2))

    c right answers of N, p_k answers and t_k labels of class k. For two classes it is
    (TP TN - FP FN) / sqrt((TP + FP) (TP + FN) (TN + FP) (TN + FN)).

    Args:
        predictions: (N) classes.
        labels: (N) classes.
    """
    size = float(len(labels))
    classes = int(max(predictions.max(), labels.max())) + 1
    p, t = (np.bincount(x.astype(np.int64), minlength=classes).astype(np.float64) for x in (predictions, labels))
    below = (size**2 - p @ p) * (size**2 - t @ t)
    above = size * float((predictions == labels).sum()) - p @ t
    return float(above / np.sqrt(below)) if below > 0 else 0.0


def pearson(x: NDArray[Any], y: NDArray[Any]) -> float:
    """Correlation of numbers (N); 0 where either are all the same.

    sum_i (x_i - mean x) (y_i - mean y) / (|x - mean x| |y - mean y|)
    """
    a, b = (z.astype(np.float64) - z.astype(np.float64).mean() for z in (x, y))
    sizes = [float(np.abs(z).max()) for z in (a, b)]
    rounding = [16 * np.finfo(np.float64).eps * float(np.abs(z).max()) for z in (x, y)]
    if any(size <= limit for size, limit in zip(sizes, rounding, strict=True)):
        return 0.0
    a, b = a / sizes[0], b / sizes[1]  # squares of tiny numbers would vanish
    return float(a @ b / np.sqrt((a @ a) * (b @ b)))


def ranks(x: NDArray[Any]) -> Numbers:
    """Ranks (N) of numbers in order, from 1; equal ones share the mean of theirs."""
    _, which, counts = np.unique(x, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    shared: Numbers = (last - (counts - 1) / 2)[which]
    return shared


def spearman(x: NDArray[Any], y: NDArray[Any]) -> float:
    """Correlation of the ranks of numbers (N): `pearson` of `ranks`."""
    return pearson(ranks(x), ranks(y))
