"""Where learned kernels start, and what smoothing costs the signed ones."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from kernelformer.modules import KernelCore, build_attention, method_options
from kernelformer_lab.analysis.errors import Error, output_errors, sample_inputs
from kernelformer_lab.analysis.spectra import kernel_profile
from kernelformer_lab.studies.base import Log, Progress
from kernelformer_lab.studies.settings import NoSettings

METHODS = ("gmm-rks", "gmm-prf", "fastfood-rks", "fastfood-prf", "generative-rks", "generative-prf")
DISTANCES = tuple(x / 4 for x in range(17))
FEATURES = (32, 128, 512)
NORMS = (0.5, 1.0, 1.5, 2.5)
SMOOTHINGS: tuple[float | str, ...] = (0.0, "noise", 1.0)


@dataclass(frozen=True)
class Profile:
    """A kernel over the distance from a point, (number of distances) each, over independent seeds."""

    mean: Tensor
    standard_error: Tensor
    gaussian: Tensor

    @property
    def distance(self) -> float:
        """The largest difference from the Gaussian kernel."""
        return float((self.mean - self.gaussian).abs().max())


@dataclass
class Kernels:
    """What the study has measured."""

    profiles: dict[str, Profile] = field(default_factory=dict)
    errors: dict[tuple[float, str], list[Error]] = field(default_factory=dict)  # by norm and smoothing


def profile(method: str, *, head_dim: int = 16, num_features: int = 256, seeds: int = 32) -> Profile:
    """The kernel of an untrained method around a point of norm 0.5, without the constant that smooths it."""
    smoothing = {"smoothing": 0.0} if "smoothing" in method_options(method) else {}
    point = torch.full((head_dim,), 0.5 / math.sqrt(head_dim))
    profiles = []
    for seed in range(seeds):
        core = build_attention(
            method, head_dim=head_dim, num_heads=1, num_features=num_features, seed=seed, **smoothing
        )
        assert isinstance(core, KernelCore)
        profiles.append(kernel_profile(core, DISTANCES, point=point)[0])
    sample = torch.stack(profiles)
    gaussian = torch.exp(-0.5 * torch.tensor(DISTANCES).square())
    return Profile(sample.mean(0), sample.std(0) / math.sqrt(seeds), gaussian)


def steps(settings: NoSettings) -> int:
    """How often `run` calls ``progress``."""
    return len(METHODS) + len(NORMS) * len(SMOOTHINGS)


def run(settings: NoSettings, folder: Path, log: Log, progress: Progress) -> Kernels:
    """Measure kernels before training, and errors by smoothing."""
    result = Kernels()
    for method in METHODS:
        log(f"kernel of {method} before training")
        result.profiles[method] = profile(method)
        progress()
    for norm in NORMS:
        inputs = sample_inputs(512, 64, norm=norm, heads=4)
        exact = build_attention("gaussian", head_dim=64, num_heads=4, normalize=True)
        for smoothing in SMOOTHINGS:
            log(f"error with smoothing {smoothing} at norm {norm}")
            options: dict[str, Any] = {"components": 1, "mean_std": 0.0, "smoothing": smoothing}
            errors = output_errors("gmm-rks", inputs, FEATURES, exact=exact, **options)
            result.errors[norm, str(smoothing)] = errors
            progress()
    return result


def tables(result: Kernels) -> list[Table]:
    """Tables of the kernels before training, and of errors by norm and smoothing."""
    start = Table(
        title="Kernel before training, head_dim 16, 256 frequencies: largest distance from the Gaussian kernel"
    )
    for name in ("method", "distance", "standard error there"):
        start.add_column(name, justify="left" if name == "method" else "right")
    for method, p in result.profiles.items():
        at = int((p.mean - p.gaussian).abs().argmax())
        start.add_row(method, f"{p.distance:.4f}", f"{float(p.standard_error[at]):.4f}")
    errors = Table(title="gmm-rks (S = I, mu = 0): relative error against exact normalized Gaussian attention")
    errors.add_column("|q| = |k|", justify="right")
    errors.add_column("smoothing")
    for m in FEATURES:
        errors.add_column(f"m = {m}", justify="right")
    for (norm, smoothing), row in result.errors.items():
        errors.add_row(f"{norm:g}", smoothing, *(f"{x.mean:.3f}" for x in row))
    return [start, errors]


def record(result: Kernels) -> dict[str, Any]:
    """Profiles by method, and rows of norm, smoothing, features, mean error and standard error."""
    profiles = {
        method: {"mean": x.mean.tolist(), "standard_error": x.standard_error.tolist()}
        for method, x in result.profiles.items()
    }
    errors = [
        [norm, smoothing, x.num_features, x.mean, x.standard_error]
        for (norm, smoothing), row in result.errors.items()
        for x in row
    ]
    return {"distances": list(DISTANCES), "profiles": profiles, "errors": errors}


def picture(result: Kernels, path: Path) -> None:
    """Draw kernels over distance, and errors over the number of features."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.4), constrained_layout=True)
    for index, (method, p) in enumerate(result.profiles.items()):
        left.errorbar(DISTANCES, p.mean, yerr=p.standard_error, marker=".", color=f"C{index}", label=method)
    left.plot(DISTANCES, next(iter(result.profiles.values())).gaussian, "k--", zorder=5, label="Gaussian kernel")
    left.set_title("before training")
    left.set_xlabel("distance")
    left.set_ylabel("kernel")
    styles = dict(zip([str(x) for x in SMOOTHINGS], (":", "-", "--"), strict=True))
    for (norm, smoothing), row in result.errors.items():
        color = f"C{NORMS.index(norm)}"
        right.plot(FEATURES, [x.mean for x in row], styles[smoothing], marker="o", color=color)
    for index, norm in enumerate(NORMS):
        right.plot([], [], color=f"C{index}", label=f"|q| = |k| = {norm:g}")
    for smoothing, style in styles.items():
        right.plot([], [], style, color="grey", label=f"smoothing {smoothing}")
    right.set_xscale("log", base=2)
    right.set_yscale("log")
    right.xaxis.set_major_formatter("{x:.0f}")
    right.set_title("gmm-rks against exact Gaussian attention")
    right.set_xlabel("frequencies m")
    right.set_ylabel("relative error of the output")
    for axis in (left, right):
        axis.grid(True, alpha=0.2)
    left.legend(fontsize="small")
    right.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, dpi=130)
    plt.close(figure)
