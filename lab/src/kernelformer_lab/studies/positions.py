"""Why relative positions need unit vectors, and what they cost (NPRF with RPE, 2106.12566, Fig. 1).

Fig. 1b: how far the rows of random positive features are from softmax's, over the norm of queries and keys. Fig. 1a:
the time of a forward with a relative position bias, over the length.
"""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor

from kernelformer.formatting import human_time
from kernelformer.modules import build_attention
from kernelformer.timing import taking_timings
from kernelformer_lab.bench.attention import Case, contender
from kernelformer_lab.studies.base import Log, Progress
from kernelformer_lab.studies.settings import PositionsSettings as Settings

NORMS = (0.5, 1.0, 2.0, 3.0, 4.0)
FEATURES = (4, 16, 64, 256, 1024)
KEYS = 1024
QUERIES = 64
# Contender, number of features and kind of bias; softmax has no features.
FORWARDS: dict[str, tuple[str, int, str]] = {
    "fft, m = 16": ("nprf:algorithm=fft", 16, "full"),
    "fft, m = 64": ("nprf:algorithm=fft", 64, "full"),
    "fft, m = 256": ("nprf:algorithm=fft", 256, "full"),
    "windowed, m = 64": ("nprf:algorithm=windowed", 64, "window"),
    "softmax": ("sdpa", 1, "full"),
}


@dataclass(frozen=True)
class RowError:
    """``sum_j |A_j - A^_j|`` of a row of attention, at most 2: mean over queries, then over independent draws."""

    mean: float
    standard_error: float


@dataclass
class Result:
    """What the study has measured."""

    errors: dict[tuple[float, int], RowError] = field(default_factory=dict)  # norm, features
    seconds: dict[tuple[str, int], float] = field(default_factory=dict)  # forward, length


def unit_vectors(count: int, head_dim: int, seed: int) -> Tensor:
    """Random vectors, uniform on the unit sphere, (1, 1, count, D)."""
    gen = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(1, 1, count, head_dim, generator=gen), dim=-1)


@torch.no_grad()
def row_error(
    norm: float,
    num_features: int,
    *,
    head_dim: int = 64,
    keys: int = KEYS,
    queries: int = QUERIES,
    draws: int = 16,
    draw: str = "iid",
) -> RowError:
    """The error of attention rows at ``|q| = |k| = norm`` (NPRF with RPE, Fig. 1b and Theorem 3).

        |A - A^|_1      A_j = exp(q . k_j) / sum_l exp(q . k_l)      A^_j = phi(q) . phi(k_j) / sum_l phi(q) . phi(k_l)

    Args:
        norm: R; queries and keys are uniform on the sphere of that radius.
        num_features: M.
        head_dim: D.
        keys: n, in each row.
        queries: rows per draw; the paper takes one.
        draws: of keys, queries and frequencies, at least 2.
        draw: of the frequencies; the paper's Eq. 5 draws them independently.

    Cost: O(draws n (M + queries) n).
    """
    shape: dict[str, Any] = {"head_dim": head_dim, "num_heads": 1, "scale": 1.0}
    exact = build_attention("softmax", **shape)
    core = build_attention("favor+", **shape, num_features=num_features, draw=draw)
    errors = []
    for number in range(draws):
        both = norm * unit_vectors(queries + keys, head_dim, number)
        q, k = both[:, :, :queries], both[:, :, queries:]
        core.resample(number)
        gap = core.attention_matrix(q, k) - exact.attention_matrix(q, k)
        errors.append(gap.abs().sum(-1).mean())
    sample = torch.stack(errors).double()
    return RowError(float(sample.mean()), float(sample.std() / math.sqrt(draws)))


@taking_timings()
def forward_seconds(length: int, *, repeats: int = 5, window: int = 128) -> dict[str, float]:
    """Medians over interleaved calls of each of `FORWARDS`: bidirectional, 1 head, D = 64 (NPRF with RPE, Fig. 1a)."""
    runners = {}
    for label, (name, features, bias) in FORWARDS.items():
        case = Case("bidirectional", length, heads=1, features=features, bias=bias, window=window)
        runners[label] = contender(name).runner(case)
    times: dict[str, list[float]] = {label: [] for label in runners}
    for turn in range(repeats + 1):
        for label, run in runners.items():
            start = time.perf_counter()
            run()
            if turn:  # the first call warms up
                times[label].append(time.perf_counter() - start)
    return {label: statistics.median(x) for label, x in times.items()}


def steps(settings: Settings) -> int:
    """How often `run` calls ``progress``."""
    return len(NORMS) + len(settings.lengths)


def run(settings: Settings, folder: Path, log: Log, progress: Progress) -> Result:
    """Measure errors over the norm, and times over the length."""
    result = Result()
    for norm in NORMS:
        log(f"error of the rows at norm {norm:g}")
        for m in FEATURES:
            result.errors[norm, m] = row_error(norm, m, draws=settings.draws)
        progress()
    for length in settings.lengths:
        log(f"forward of {length} tokens")
        for label, seconds in forward_seconds(length, repeats=settings.repeats).items():
            result.seconds[label, length] = seconds
        progress()
    return result


def tables(result: Result) -> list[Table]:
    """Tables of errors by norm and features, and of times by length."""
    norms, features = (list(dict.fromkeys(x)) for x in zip(*result.errors, strict=True))
    errors = Table(title=f"L1 error of attention rows against softmax, D = 64, {KEYS} keys (at most 2)")
    errors.add_column("|q| = |k|", justify="right")
    for m in features:
        errors.add_column(f"m = {m}", justify="right")
    for norm in norms:
        errors.add_row(f"{norm:g}", *(f"{result.errors[norm, m].mean:.3f}" for m in features))
    labels, lengths = (list(dict.fromkeys(x)) for x in zip(*result.seconds, strict=True))
    times = Table(title="Forward with a relative position bias, 1 head, D = 64")
    times.add_column("length", justify="right")
    for label in labels:
        times.add_column(label, justify="right")
    for length in lengths:
        times.add_row(str(length), *(human_time(result.seconds[label, length]) for label in labels))
    return [errors, times]


def record(result: Result) -> dict[str, Any]:
    """Rows of norm, features, mean error and standard error, and of forward, length and seconds."""
    return {
        "errors": [[*key, x.mean, x.standard_error] for key, x in result.errors.items()],
        "seconds": [[*key, x] for key, x in result.seconds.items()],
    }


def picture(result: Result, path: Path) -> None:
    """Draw the paper's Fig. 1: time over the length, and error over the norm."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.2), constrained_layout=True)
    for label in dict.fromkeys(label for label, _ in result.seconds):
        points = [(n, x * 1e3) for (name, n), x in result.seconds.items() if name == label]
        left.plot(*zip(*points, strict=True), "k--" if label == "softmax" else "-", marker="o", label=label)
    left.set_title("forward with a bias, 1 head, D = 64")
    left.set_xlabel("length")
    left.set_ylabel("ms")
    left.set_xscale("log", base=2)
    left.set_yscale("log")
    left.xaxis.set_major_formatter("{x:.0f}")
    for m in dict.fromkeys(m for _, m in result.errors):
        line = [(norm, x) for (norm, count), x in result.errors.items() if count == m]
        errors = {"yerr": [x.standard_error for _, x in line], "marker": "o", "label": f"m = {m}"}
        right.errorbar([norm for norm, _ in line], [x.mean for _, x in line], **errors)
    right.set_title(f"attention rows against softmax's, {KEYS} keys")
    right.set_xlabel("|q| = |k| = R")
    right.set_ylabel("L1 error")
    right.set_ylim(0, 2)
    for axis in (left, right):
        axis.grid(True, alpha=0.2)
        axis.legend(fontsize="small")
    figure.savefig(path, dpi=130)
    plt.close(figure)
