"""Learned kernels before training, and what smoothing costs the signed ones: ``python tools/studies/kernels.py``."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from kernelformer.modules import KernelCore, build_attention, method_options
from kernelformer.settings import Settings
from kernelformer_lab.analysis.errors import output_errors, sample_inputs
from kernelformer_lab.analysis.spectra import kernel_profile
from kernelformer_lab.cli.studies import main
from kernelformer_lab.figures import drawing, log_axis, table
from kernelformer_lab.studies.base import SCRIPT, Log, Progress, Record, Row, Study

METHODS = ("gmm-rks", "gmm-prf", "fastfood-rks", "fastfood-prf", "generative-rks", "generative-prf")
DISTANCES = tuple(x / 4 for x in range(17))
FEATURES = (32, 128, 512)
NORMS = (0.5, 1.0, 1.5, 2.5)
SMOOTHINGS: tuple[float | str, ...] = (0.0, "noise", 1.0)


GAUSSIAN = [math.exp(-0.5 * x**2) for x in DISTANCES]


def profile(method: str, *, head_dim: int = 16, num_features: int = 256, seeds: int = 32) -> Row:
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
    return {"mean": sample.mean(0).tolist(), "standard_error": (sample.std(0) / math.sqrt(seeds)).tolist()}


def run(record: Record, log: Log, progress: Progress) -> None:
    """Measure kernels before training, and errors by smoothing."""
    profiles, rows = {}, []
    for method in METHODS:
        log(f"kernel of {method} before training")
        profiles[method] = profile(method)
        progress()
    for norm in NORMS:
        inputs = sample_inputs(512, 64, norm=norm, heads=4)
        exact = build_attention("gaussian", head_dim=64, num_heads=4, normalize=True)
        for smoothing in SMOOTHINGS:
            log(f"error with smoothing {smoothing} at norm {norm}")
            options: dict[str, Any] = {"components": 1, "mean_std": 0.0, "smoothing": smoothing}
            errors = output_errors("gmm-rks", inputs, FEATURES, exact=exact, **options)
            rows += [[norm, str(smoothing), x.num_features, x.mean, x.standard_error] for x in errors]
            progress()
    record.figures = {"distances": list(DISTANCES), "profiles": profiles, "errors": rows}


def tables(record: Record) -> list[Table]:
    """Kernels before training, and errors by norm and smoothing."""
    start = []
    for method, x in record.figures["profiles"].items():
        gaps = [abs(a - b) for a, b in zip(x["mean"], GAUSSIAN, strict=True)]
        start.append((method, f"{max(gaps):.4f}", f"{x['standard_error'][gaps.index(max(gaps))]:.4f}"))
    errors = record.figures["errors"]
    cells = [
        (f"{norm:g}", smoothing, *(f"{x[3]:.3f}" for x in errors if x[:2] == [norm, smoothing]))
        for norm, smoothing in dict.fromkeys((x[0], x[1]) for x in errors)
    ]
    return [
        table(
            "Kernel before training, head_dim 16, 256 frequencies: largest distance from the Gaussian kernel",
            ("method", "distance", "standard error there"),
            start,
        ),
        table(
            "gmm-rks (S = I, mu = 0): relative error against exact normalized Gaussian attention",
            ("|q| = |k|", "smoothing", *(f"m = {m}" for m in FEATURES)),
            cells,
            left=2,
        ),
    ]


def picture(record: Record, path: Path) -> None:
    """Draw kernels over distance, and errors over the number of features."""
    styles = dict(zip([str(x) for x in SMOOTHINGS], (":", "-", "--"), strict=True))
    with drawing(path, (12, 4.4), columns=2) as (_, ((left, right),)):
        for index, (method, x) in enumerate(record.figures["profiles"].items()):
            left.errorbar(DISTANCES, x["mean"], yerr=x["standard_error"], marker=".", color=f"C{index}", label=method)
        left.plot(DISTANCES, GAUSSIAN, "k--", zorder=5, label="Gaussian kernel")
        left.set(title="before training", xlabel="distance", ylabel="kernel")
        for index, norm in enumerate(NORMS):
            for smoothing, line in styles.items():
                mine = [x for x in record.figures["errors"] if x[:2] == [norm, smoothing]]
                right.plot([x[2] for x in mine], [x[3] for x in mine], line, marker="o", color=f"C{index}")
            right.plot([], [], color=f"C{index}", label=f"|q| = |k| = {norm:g}")
        for smoothing, line in styles.items():
            right.plot([], [], line, color="grey", label=f"smoothing {smoothing}")
        log_axis(right)
        right.set(title="gmm-rks against exact Gaussian attention", xlabel="frequencies m")
        right.set_ylabel("relative error of the output")
        for axis in (left, right):
            axis.grid(True, alpha=0.2)
        left.legend(fontsize="small")
        right.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))


STEPS = len(METHODS) + len(NORMS) * len(SMOOTHINGS)
STUDY = Study("kernels", "", Settings, lambda _: STEPS, run, tables, picture, program=SCRIPT)

if __name__ == "__main__":
    main(STUDY, "Measure learned kernels before training, and what the smoothing of signed ones costs.")
