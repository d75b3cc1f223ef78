"""The picture of `studies.estimators`: Fig. 4 above, Fig. 2 below."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from kernelformer.kernels import mse_positive, mse_trigonometric
from kernelformer.studies.estimators_result import Result

STYLES = {
    "positive": ("C0", "o"),
    "trigonometric": ("C3", "s"),
    "trigonometric, clamped": ("C1", "^"),
}
GRID = 121  # points of an axis of Fig. 2
FARTHEST, LONGEST = math.pi, 2.0  # of angles and lengths there


def picture(result: Result, path: Path) -> None:
    """Draw Fig. 4, a panel for each norm, and Fig. 2: the utility, its slice at length 1, and both errors there."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    norms = list(dict.fromkeys(x.norm for x in result.output))
    columns = max(3, len(norms))
    figure, axes = plt.subplots(2, columns, figsize=(4.6 * columns, 8.4), constrained_layout=True, squeeze=False)
    for axis, norm in zip(axes[0], norms, strict=False):
        _draw_output(axis, result, norm)
    for axis in axes[0, len(norms) :]:
        axis.set_axis_off()
    axes[0, 0].set_ylabel("mean squared error of the output")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=4, fontsize="small")
    _draw_utility(figure, axes[1, 0])
    _draw_slice(axes[1, 1])
    _draw_errors(axes[1, 2], result)
    for axis in axes[1, 3:]:
        axis.set_axis_off()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _draw_output(axis: Any, result: Result, norm: float) -> None:
    """Medians over samples with bands from the smallest to the largest: means can be those of one sample."""
    rows = [x for x in result.output if x.norm == norm]
    features = list(dict.fromkeys(x.num_features for x in rows))
    for estimator, (color, marker) in STYLES.items():
        for draw, line in (("iid", "--"), ("orthogonal", "-")):
            mine = [x for x in rows if (x.estimator, x.draw) == (estimator, draw)]
            label = f"{estimator}, {draw}"
            axis.plot(features, [x.median for x in mine], color=color, linestyle=line, marker=marker, label=label)
            low, high = ([f(x.values) for x in mine] for f in (min, max))
            axis.fill_between(features, low, high, color=color, alpha=0.1)
    axis.axhline(rows[0].uniform, color="grey", linestyle=":", label="mean of all values")
    axis.set_title(f"Fig. 4: |q|, |k| about {norm:g}; median and range")
    axis.set_xlabel("frequencies m")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(features)
    axis.xaxis.set_major_formatter("{x:.0f}")
    axis.grid(True, alpha=0.2)


def _errors_at(angle: torch.Tensor, length: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean squared errors by Lemma 2 of trigonometric and positive features, m = 1, at angles and lengths (*)."""
    x = torch.stack([length, torch.zeros_like(length)], -1)
    y = torch.stack([length * angle.cos(), length * angle.sin()], -1)
    return mse_trigonometric(x, y, 1), mse_positive(x, y, 1)


def _draw_utility(figure: Any, axis: Any) -> None:
    angles = torch.linspace(-FARTHEST, FARTHEST, GRID, dtype=torch.float64)
    lengths = torch.linspace(-LONGEST, LONGEST, GRID, dtype=torch.float64)
    trigonometric, positive = _errors_at(*torch.meshgrid(angles, lengths, indexing="xy"))
    logs = (trigonometric / positive.clamp_min(1e-300)).clamp(10**-4.5, 10**8.5).log10()  # beyond the last colour
    logs = logs.nan_to_num(0.0)  # 0 / 0 at length 0
    image = axis.contourf(angles, lengths, logs, levels=range(-4, 9), cmap="RdBu_r", vmin=-8, vmax=8, extend="both")
    axis.contour(angles, lengths, logs, levels=[0], colors="k", linewidths=1)
    figure.colorbar(image, ax=axis, label="log10 r")
    axis.set_title("Fig. 2: r = MSE trigonometric / positive; line: r = 1")
    axis.set_xlabel("angle")
    axis.set_ylabel("length l")


def _draw_slice(axis: Any) -> None:
    angle = torch.linspace(-0.98 * FARTHEST, 0.98 * FARTHEST, 4 * GRID, dtype=torch.float64)
    trigonometric, positive = _errors_at(angle, torch.ones_like(angle))
    axis.plot(angle, trigonometric / positive, color="k")
    axis.axhline(1, color="grey", linestyle=":")
    axis.set_title("Fig. 2: slice of r at l = 1")
    axis.set_xlabel("angle")
    axis.set_ylabel("r")
    axis.set_yscale("log")
    axis.set_ylim(1e-4, 1e5)
    axis.grid(True, alpha=0.2)


def _draw_errors(axis: Any, result: Result) -> None:
    """Errors at length 1 over the angle: closed forms as lines, simulations as points with their standard errors."""
    rows = [x for x in result.kernel if x.length == 1.0]
    angle = torch.linspace(0.02, 0.99 * FARTHEST, 2 * GRID, dtype=torch.float64)
    m = rows[0].num_features
    for name, closed in zip(("trigonometric", "positive"), _errors_at(angle, torch.ones_like(angle)), strict=True):
        axis.plot(angle, closed / m, color=STYLES[name][0], label=f"{name}, Lemma 2")
    for name, label, color in (
        ("trigonometric", "trigonometric, simulated", "C3"),
        ("positive", "positive, simulated", "C0"),
        ("orthogonal", "positive orthogonal, simulated", "C2"),
    ):
        seen = [x for x in rows if x.simulated[name].mean > 1e-12]  # at the angle pi positive ones are exact
        means, errors = ([getattr(x.simulated[name], y) for x in seen] for y in ("mean", "standard_error"))
        axis.errorbar([x.angle for x in seen], means, yerr=errors, fmt="x", color=color, label=label)
    axis.set_title(f"Fig. 2, corner: errors at l = 1, m = d = {m}")
    axis.set_xlabel("angle")
    axis.set_ylabel("mean squared error of SM(x, y)")
    axis.set_yscale("log")
    axis.set_ylim(1e-4, None)
    axis.grid(True, alpha=0.2)
    axis.legend(fontsize="small", loc="lower left")
