"""Errors of attention rows over norms, and time with relative positions (NPRF with RPE, 2106.12566, Fig. 1).

Fig. 1b: the distance of rows of random positive features from softmax's, over the norm of queries and keys. Fig. 1a:
the time of a forward with a relative position bias, over the length.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor

from kernelformer.formatting import human_time
from kernelformer.modules import build_attention
from kernelformer.settings import Settings, option
from kernelformer_lab.analysis.statistics import mean_and_error
from kernelformer_lab.bench.attention import Case, contender
from kernelformer_lab.bench.timing import Step, time_rounds
from kernelformer_lab.figures import drawing, log_axis, table
from kernelformer_lab.studies.base import Log, Progress, Record, Study

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


@dataclass(frozen=True, kw_only=True)
class PositionsSettings(Settings):
    """Settings of this study."""

    lengths: tuple[int, ...] = option((1024, 2048, 4096, 8192, 16384), "tokens; the paper goes to 40960", least=1)
    draws: int = option(16, "of frequencies, queries and keys", least=2)
    repeats: int = option(5, "timed calls of each forward", least=1, name="rounds")


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
) -> tuple[float, float]:
    """The error of attention rows at ``|q| = |k| = norm`` (NPRF with RPE, Fig. 1b and Theorem 3).

        |A - A^|_1      A_j = exp(q . k_j) / sum_l exp(q . k_l)      A^_j = phi(q) . phi(k_j) / sum_l phi(q) . phi(k_l)

    Args:
        norm: R; queries and keys are uniform on the sphere of that radius.
        queries: rows per draw; the paper takes one.
        draws: of keys, queries and frequencies, at least 2.
        draw: of the frequencies; the paper's Eq. 5 draws them independently.

    Returns:
        ``sum_j |A_j - A^_j|``, at most 2: mean over queries and draws, and its standard error over draws.

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
        errors.append(float(gap.abs().sum(-1).mean()))
    return mean_and_error(errors)


def forward_seconds(length: int, *, repeats: int = 5, window: int = 128) -> dict[str, float]:
    """Medians over interleaved calls of each of `FORWARDS`: bidirectional, 1 head, D = 64 (NPRF with RPE, Fig. 1a)."""
    steps = {}
    for label, (name, features, bias) in FORWARDS.items():
        case = Case("bidirectional", length, heads=1, features=features, bias=bias, window=window)
        steps[label] = Step(contender(name).runner(case))
    return {label: x["seconds"] for label, x in time_rounds(steps, repeats, 0.0).items()}


def steps(settings: PositionsSettings) -> int:
    """A step for each norm, and one for each length."""
    return len(NORMS) + len(settings.lengths)


def run(record: Record, log: Log, progress: Progress) -> None:
    """Measure errors over the norm, and times over the length."""
    settings, errors, seconds = record.settings, [], []
    for norm in NORMS:
        log(f"error of the rows at norm {norm:g}")
        errors += [[norm, m, *row_error(norm, m, draws=settings.draws)] for m in FEATURES]
        progress()
    for length in settings.lengths:
        log(f"forward of {length} tokens")
        times = forward_seconds(length, repeats=settings.repeats)
        seconds += [[label, length, x] for label, x in times.items()]
        progress()
    record.figures = {"errors": errors, "seconds": seconds}


def tables(record: Record) -> list[Table]:
    """Errors by norm and features, and times by length."""
    errors, seconds = record.figures["errors"], record.figures["seconds"]
    norms, features, labels, lengths = (
        list(dict.fromkeys(x[i] for x in part)) for part, i in ((errors, 0), (errors, 1), (seconds, 0), (seconds, 1))
    )
    return [
        table(
            f"L1 error of attention rows against softmax, D = 64, {KEYS} keys (at most 2)",
            ("|q| = |k|", *(f"m = {m}" for m in features)),
            [(f"{norm:g}", *(f"{x[2]:.3f}" for x in errors if x[0] == norm)) for norm in norms],
            left=0,
        ),
        table(
            "Forward with a relative position bias, 1 head, D = 64",
            ("length", *labels),
            [(str(n), *(human_time(x[2]) for x in seconds if x[1] == n)) for n in lengths],
            left=0,
        ),
    ]


def picture(record: Record, path: Path) -> None:
    """Draw the paper's Fig. 1: time over the length, and error over the norm."""
    errors, seconds = record.figures["errors"], record.figures["seconds"]
    with drawing(path, (10, 4.2), columns=2) as (_, ((left, right),)):
        for label in dict.fromkeys(x[0] for x in seconds):
            points = [(n, x * 1e3) for name, n, x in seconds if name == label]
            left.plot(*zip(*points, strict=True), "k--" if label == "softmax" else "-", marker="o", label=label)
        left.set(title="forward with a bias, 1 head, D = 64", xlabel="length", ylabel="ms")
        log_axis(left)
        for m in dict.fromkeys(x[1] for x in errors):
            norm, _, mean, error = zip(*(x for x in errors if x[1] == m), strict=True)
            right.errorbar(norm, mean, yerr=error, marker="o", label=f"m = {m}")
        right.set(title=f"attention rows against softmax's, {KEYS} keys", xlabel="|q| = |k| = R", ylabel="L1 error")
        right.set_ylim(0, 2)
        for axis in (left, right):
            axis.grid(True, alpha=0.2)
            axis.legend(fontsize="small")


STUDY = Study(
    "positions",
    "NPRF with RPE (2106.12566), Fig. 1",
    PositionsSettings,
    steps,
    run,
    tables,
    picture,
    examples=(("--lengths 1024,4096", "errors and times"),),
)
