"""Variance of a classifier over redraws of its random features (KL-Transformer, Sec. 4.1, Fig. 5, 9, 10 and App. E.3).

R is the number of draws, N that of samples, K that of classes. Everything is computed in float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernelformer.errors import shape


@dataclass(frozen=True)
class Estimate:
    """A mean over samples and its standard error, by the spread of the samples."""

    mean: float
    error: float


@dataclass(frozen=True)
class RedrawFigures:
    """The measures of Fig. 5 for one model.

    Args:
        rsd: mean of `relative_deviations`. Samples near the border between two classes have means near 0, so that it
            rests on a few of them, and its standard error with it.
        rsd_median: the median of them, which does not.
        pi: mean of `inconsistencies`, in percent.
        agv: Accuracy Gain with Voting, voting accuracy / accuracy.
        voting_accuracy: share of samples whose `votes` are right.
        accuracy: share of right predictions, mean over the draws.
        accuracy_deviation: standard deviation of the accuracy over the draws.
    """

    rsd: Estimate
    rsd_median: float
    pi: Estimate
    agv: Estimate
    voting_accuracy: Estimate
    accuracy: Estimate
    accuracy_deviation: float
    accuracies: tuple[float, ...]


def margins(logits: Tensor) -> Tensor:
    """The output whose sign is the prediction, "before applying the final sigmoid" (footnote 5), (R, N).

        z_1 - z_0            two classes: the argument of the sigmoid; one logit is that itself
        z_c - max_{k != c} z_k       more classes, c that of the largest mean logit of the sample

    The paper leaves more than two classes out. With two, the second form is the first up to its sign, which neither the
    relative deviation nor its absolute mean sees.

    Args:
        logits: (R, N, K).
    """
    z = _checked(logits)
    if z.shape[2] == 1:
        return z[..., 0]
    if z.shape[2] == 2:
        return z[..., 1] - z[..., 0]
    first = z.mean(0).argmax(-1).expand(z.shape[0], -1).unsqueeze(-1)  # (R, N, 1)
    others = z.scatter(2, first, -math.inf).amax(2)
    return z.gather(2, first)[..., 0] - others


def relative_deviations(outputs: Tensor) -> Tensor:
    """Relative Standard Deviation of each sample's output over the draws, (R, N) -> (N) (Sec. 4.1, 1).

        RSD = std_r(y_r) / |mean_r(y_r)|          std with R - 1, as its source (Currie & Svehla, 3.9) defines it

    0 where nothing varies, whatever the mean.
    """
    y = outputs.double()
    deviation = (y - y[:1]).std(0) if y.shape[0] > 1 else torch.zeros_like(y[0])  # exactly 0 for equal outputs
    return torch.where(deviation == 0, deviation, deviation / y.mean(0).abs())


def predictions(logits: Tensor) -> Tensor:
    """The predicted classes, (R, N, K) -> (R, N); of one logit its sign, as class 0 or 1."""
    z = _checked(logits)
    return (z[..., 0] > 0).long() if z.shape[2] == 1 else z.argmax(2)


def inconsistencies(predicted: Tensor) -> Tensor:
    """Prediction Inconsistency of each sample, (R, N) -> (N), in percent (Sec. 4.1, 2).

    PI = 100 (1 - max_c x_c / R)         x_c draws predict class c;  two classes, R = 100: min(x, 100 - x)
    """
    most = _counts(predicted).amax(1)
    return 100 * (1 - most / predicted.shape[0])


def votes(logits: Tensor) -> Tensor:
    """The class that most draws predict, (R, N, K) -> (N); of tied ones that of the larger mean logit (Sec. 4.1, 3)."""
    z = _checked(logits)
    z = torch.cat([torch.zeros_like(z), z], 2) if z.shape[2] == 1 else z
    counts = _counts(predictions(logits), z.shape[2])
    return z.mean(0).masked_fill(counts < counts.amax(1, keepdim=True), -math.inf).argmax(1)


def redraw_figures(logits: Tensor, labels: Tensor) -> RedrawFigures:
    """All measures of Fig. 5 from the logits over draws.

        AGV = VA / A        VA the accuracy of `votes`, A the mean accuracy of the draws

    Standard errors are over the samples, that of AGV by the delta method: std(v_i - AGV a_i) / (A sqrt(N)) with v_i and
    a_i the shares of right votes and predictions of sample i. They say nothing of the draws, whose spread is
    ``accuracy_deviation``, nor of the training seed.

    Args:
        logits: (R, N, K).
        labels: (N), classes.
    """
    z = _checked(logits)
    if labels.shape != z.shape[1:2] or labels.is_floating_point():
        raise ValueError(
            f"labels must be the classes of {z.shape[1]} samples, got {shape(labels)} in {labels.dtype} for logits "
            f"{shape(logits)}."
        )
    predicted = predictions(z)
    right = (predicted == labels).double()  # (R, N)
    voted = (votes(z) == labels).double()
    each, accuracies = right.mean(0), right.mean(1)
    mean, best = float(each.mean()), float(voted.mean())
    gain = best / mean if mean > 0 else math.nan
    deviations = relative_deviations(margins(z))
    return RedrawFigures(
        rsd=_estimate(deviations),
        rsd_median=float(deviations.median()),
        pi=_estimate(inconsistencies(predicted)),
        agv=Estimate(gain, _estimate(voted - gain * each).error / mean if mean > 0 else math.nan),
        voting_accuracy=_estimate(voted),
        accuracy=_estimate(each),
        accuracy_deviation=float((accuracies - accuracies[0]).std()) if len(accuracies) > 1 else 0.0,
        accuracies=tuple(accuracies.tolist()),
    )


def squared_correlation(x: Sequence[float], y: Sequence[float]) -> float:
    """R^2 of a straight line through points, one for each model: Pearson's correlation squared (Fig. 9 and 10).

    NaN for fewer than three points, of which two are always on a line, or where one of the two does not vary.
    """
    if len(x) != len(y):
        raise ValueError(f"x and y must be as many, got {len(x)} and {len(y)}.")
    if len(x) < 3:
        return math.nan
    a, b = (torch.tensor(list(z), dtype=torch.float64) for z in (x, y))
    a, b = a - a.mean(), b - b.mean()
    sizes = a.square().sum() * b.square().sum()
    return float((a @ b) ** 2 / sizes) if sizes > 0 else math.nan


@dataclass(frozen=True)
class GradientFigures:
    """A cell of Table 14: gradients at the units of the classifier, a mean over the units each.

    Args:
        absolute_mean: of |g| over draws and samples, "to avoid cancellation of opposite signs".
        absolute_deviation: standard deviation of |g| over both.
        deviation: standard deviation of g over both.
        redraw_deviation: standard deviation of g over the draws, a sample at a time, then the mean over samples: what
            redrawing alone does.
    """

    absolute_mean: float
    absolute_deviation: float
    deviation: float
    redraw_deviation: float


def classifier_gradients(logits: Tensor, labels: Tensor, weight: Tensor) -> Tensor:
    """Gradients of each sample's cross-entropy at the units that the classifier's last layer reads, (R, N, units).

        g = W^T (softmax(z) - e_y)           z = W h + b, at h

    Args:
        logits: z, (R, N, K).
        labels: y, (N).
        weight: W, (K, units).
    """
    z = _checked(logits)
    if weight.dim() != 2 or weight.shape[0] != z.shape[2]:
        raise ValueError(f"weight must be ({z.shape[2]}, units) for logits {shape(logits)}, got {shape(weight)}.")
    right = torch.nn.functional.one_hot(labels, z.shape[2]).double()
    return (z.softmax(2) - right) @ weight.detach().double()


def gradient_figures(gradients: Tensor) -> GradientFigures:
    """Means and deviations of gradients (R, N, units), unit by unit, and their means over the units (App. E.3).

    The paper does not say of what its standard deviation is. Its columns have the ratio 0.57 nearly everywhere, which
    |g| can have (uniform |g|: 1 / sqrt(3)) and signed gradients of balanced classes cannot: it is that of |g|.
    """
    g = _checked(gradients)
    flat = g.flatten(0, 1)
    over_draws = (g - g[:1]).std(0).mean() if g.shape[0] > 1 else g.new_zeros(())
    spread = [x.std(0).mean() if len(flat) > 1 else g.new_zeros(()) for x in (flat.abs(), flat)]
    return GradientFigures(float(flat.abs().mean()), float(spread[0]), float(spread[1]), float(over_draws))


def _checked(x: Tensor) -> Tensor:
    """(R, N, K) in float64."""
    if x.dim() != 3 or x.numel() == 0:
        raise ValueError(f"expected (draws, samples, classes or units), none of them 0, got {shape(x)}.")
    return x.double()


def _counts(predicted: Tensor, classes: int | None = None) -> Tensor:
    """Number of draws that predict each class, (R, N) -> (N, K) in float64."""
    size = int(predicted.max()) + 1 if classes is None else classes
    return torch.nn.functional.one_hot(predicted, max(size, 2)).double().sum(0)


def _estimate(x: Tensor) -> Estimate:
    error = float(x.std() / math.sqrt(len(x))) if len(x) > 1 else math.nan
    return Estimate(float(x.mean()), error)
