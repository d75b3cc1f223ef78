"""How well landmarks and features approximate attention inside a real model.

Stands for Skyformer (2111.00035), Fig. 1, Theorem 2 and App. F.

Queries, keys and values are those of every layer and head of an encoder on real text: as pretrained, and of a freshly
initialized model of the same configuration.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from kernelformer.conversion.measure import statistical_dimension
from kernelformer.conversion.readers import each_text
from kernelformer.hf.find import attention_calls
from kernelformer.hf.load import load_source
from kernelformer.modules import build_attention
from kernelformer_lab.analysis.spectra import condition_number, score_spectrum
from kernelformer_lab.studies.base import Log, Progress
from kernelformer_lab.studies.settings import ApproximationSettings as Settings

# Of softmax attention, as in the paper's figure; the option that counts features goes by another name in each.
METHODS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "skyformer": ("skyformer", "num_landmarks", {"kernel": "softmax"}),
    "skyformer, leverage, aligned": (
        "skyformer",
        "num_landmarks",
        {"kernel": "softmax", "landmarks": "leverage", "align": True},
    ),
    "nystromformer": ("nystromformer", "num_landmarks", {}),
    "favor+": ("favor+", "num_features", {}),
    "linformer": ("linformer", "rank", {}),
}
GAMMAS = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5)
LANDMARKS = ("uniform", "leverage", "segments")
EPSILONS = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5)
Inputs = list[tuple[Tensor, Tensor, Tensor]]  # (B, H, L, D), one triple per layer


@dataclass(frozen=True)
class Spread:
    """Mean, median and standard error over texts, layers and heads."""

    mean: float
    median: float
    standard_error: float

    @staticmethod
    def of(values: Tensor) -> Spread:
        """The spread of any number of values."""
        x = values.flatten().double()
        return Spread(float(x.mean()), float(x.median()), float(x.std() / len(x) ** 0.5))


@dataclass
class Result:
    """What the study has measured, by model ("pretrained", "initialized") and length."""

    errors: dict[tuple[str, int, str, int], Spread] = field(default_factory=dict)  # method, features
    ridges: dict[tuple[str, str, float, int], Spread] = field(default_factory=dict)  # landmarks, gamma, number
    conditions: dict[tuple[str, int, str, float], Spread] = field(default_factory=dict)  # kernel, share of spectrum
    dimensions: dict[tuple[str, int, float], Spread] = field(default_factory=dict)  # epsilon


def load(encoder: str) -> tuple[Any, dict[str, Any]]:
    """Load the tokenizer, and the encoder as pretrained and as initialized.

    Args:
        encoder: a folder of transformers, or a name on the hub.
    """
    from transformers import AutoModel, set_seed

    source = load_source(encoder, task="encoder")
    set_seed(0)
    initialized = AutoModel.from_config(source.model.config).eval()
    return source.tokenizer, {"pretrained": source.model, "initialized": initialized}


def long_texts(tokenizer: Any, path: Path, length: int, count: int) -> Tensor:
    """Token ids of the first ``count`` texts that fill ``length`` tokens, cut there, (count, length)."""
    rows = []
    for text in each_text(path):
        ids = tokenizer(text, truncation=True, max_length=length)["input_ids"]
        if len(ids) == length:
            rows.append(ids)
        if len(rows) == count:
            return torch.tensor(rows)
    raise ValueError(f"{path} has {len(rows)} texts of at least {length} tokens, and {count} were asked for.")


def _norm(x: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.matrix_norm(x.double(), ord=2)
    return norm


@torch.no_grad()
def spectral_error(inputs: Inputs, exact: str, method: str, draws: int = 1, **options: Any) -> Spread:
    """``|out - exact| / |exact|`` in the spectral norm, for every text, layer and head."""
    q = inputs[0][0]
    shape: dict[str, int] = {"head_dim": q.shape[3], "num_heads": q.shape[1]}
    target, core = build_attention(exact, **shape), build_attention(method, **shape, **options)
    errors = []
    for draw in range(draws):
        core.resample(draw)
        for qkv in inputs:
            want = target(*qkv)
            errors.append(_norm(core(*qkv) - want) / _norm(want))
    return Spread.of(torch.stack(errors))


def steps(settings: Settings) -> int:
    """How often `run` calls ``progress``."""
    return 2 * len(set(settings.lengths)) * (len(METHODS) + 2) + 2 * len(LANDMARKS)


@torch.no_grad()
def run(settings: Settings, folder: Path, log: Log, progress: Progress) -> Result:
    """Measure errors, condition numbers and statistical dimensions; the ridges at the longest length."""
    tokenizer, models = load(settings.encoder)
    tokens = {n: long_texts(tokenizer, settings.text, n, settings.texts) for n in sorted(set(settings.lengths))}
    result = Result()
    for name, model in models.items():
        for n, ids in tokens.items():
            calls = attention_calls(model, {"input_ids": ids}, outputs=False)
            inputs = [(x.query, x.key, x.value) for x in calls]
            for label, (method, count, options) in METHODS.items():
                log(f"{name}, {n} tokens: {label}")
                for m in settings.features:
                    size = {count: m, **({"max_length": n} if method == "linformer" else {})}
                    result.errors[name, n, label, m] = spectral_error(inputs, "softmax", method, **size, **options)
                progress()
            log(f"{name}, {n} tokens: condition numbers")
            for kernel in ("softmax", "gaussian"):
                values = torch.stack([score_spectrum(q, k, kernel) for q, k, _ in inputs])
                for share in (0.5, 1.0):
                    result.conditions[name, n, kernel, share] = Spread.of(condition_number(values, share))
            progress()
            log(f"{name}, {n} tokens: statistical dimension")
            dimension = torch.stack([statistical_dimension(q, k, EPSILONS) for q, k, _ in inputs])
            for epsilon, values in zip(EPSILONS, dimension.unbind(-1), strict=True):
                result.dimensions[name, n, epsilon] = Spread.of(values)
            progress()
        for landmarks in LANDMARKS:
            log(f"{name}: gaussian attention, {landmarks} landmarks")
            for gamma in GAMMAS:
                for m in settings.features:
                    result.ridges[name, landmarks, gamma, m] = spectral_error(
                        inputs, "gaussian", "skyformer", num_landmarks=m, gamma=gamma, landmarks=landmarks
                    )
            progress()
    return result


def _grid(
    title: str, left: Sequence[str], columns: Sequence[str], rows: Sequence[tuple[Sequence[str], list[str]]]
) -> Table:
    out = Table(title=title)
    for name in left:
        out.add_column(name, no_wrap=True)
    for name in columns:
        out.add_column(name, justify="right", no_wrap=True)
    for labels, cells in rows:
        out.add_row(*labels, *cells)
    return out


def tables(result: Result) -> list[Table]:
    """Tables of errors, ridges, condition numbers and statistical dimensions."""
    features = sorted({m for *_, m in result.errors})
    errors = dict.fromkeys((name, n, label) for name, n, label, _ in result.errors)
    ridges = dict.fromkeys((name, landmarks, gamma) for name, landmarks, gamma, _ in result.ridges)
    conditions = dict.fromkeys((name, n) for name, n, *_ in result.conditions)
    both = [(kernel, share) for share in (1.0, 0.5) for kernel in ("softmax", "gaussian")]
    return [
        _grid(
            "Spectral error against softmax attention, relative, by number of features: mean (median)",
            ("model", "tokens", "method"),
            [str(m) for m in features],
            [
                (
                    (name, str(n), label),
                    [f"{x.mean:.2g} ({x.median:.2g})" for x in (result.errors[name, n, label, m] for m in features)],
                )
                for name, n, label in errors
            ],
        ),
        _grid(
            f"Skyformer against exact Gaussian attention, {max(n for _, n in conditions)} tokens, by landmarks",
            ("model", "landmarks", "gamma"),
            [str(m) for m in features],
            [
                (
                    (name, landmarks, f"{gamma:g}"),
                    [f"{result.ridges[name, landmarks, gamma, m].mean:.3g}" for m in features],
                )
                for name, landmarks, gamma in ridges
            ],
        ),
        _grid(
            "Scores before normalization: largest singular value over the smallest, and over the middle one (medians)",
            ("model", "tokens"),
            [f"{kernel}, {'all' if share == 1 else 'half'}" for kernel, share in both],
            [
                ((name, str(n)), [f"{result.conditions[name, n, kernel, share].median:.1e}" for kernel, share in both])
                for name, n in conditions
            ],
        ),
        _grid(
            "Statistical dimension of the completed Gaussian scores (2n rows), mean, by the ridge over |C|",
            ("model", "tokens"),
            [f"{x:g}" for x in EPSILONS],
            [
                ((name, str(n)), [f"{result.dimensions[name, n, x].mean:.1f}" for x in EPSILONS])
                for name, n in conditions
            ],
        ),
    ]


def record(result: Result) -> dict[str, Any]:
    """Rows of each kind: what they are of, then mean, median and standard error."""
    return {name: [[*key, *vars(x).values()] for key, x in part.items()] for name, part in vars(result).items()}


def picture(result: Result, path: Path) -> None:
    """Draw the paper's Fig. 1: one panel per model and length, and d_stat over the ridge beside them."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    panels = list(dict.fromkeys((name, n) for name, n, *_ in result.errors))
    models = list(dict.fromkeys(name for name, _ in panels))
    lengths = list(dict.fromkeys(n for _, n in panels))
    features = sorted({m for *_, m in result.errors})
    width = len(lengths) + 1
    figure, axes = plt.subplots(
        len(models), width, figsize=(3.6 * width, 3.4 * len(models)), squeeze=False, constrained_layout=True
    )
    for row, name in zip(axes, models, strict=True):
        for axis, n in zip(row, lengths, strict=False):
            for index, label in enumerate(METHODS):
                curve = [result.errors[name, n, label, m] for m in features]
                axis.plot(features, [x.median for x in curve], marker="o", color=f"C{index}", label=label)
            axis.set_title(f"{name}, {n} tokens")
            axis.set_xlabel("features")
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
            axis.xaxis.set_major_formatter("{x:.0f}")
        row[0].set_ylabel("median relative spectral error")
        for n in lengths:
            row[-1].plot(
                EPSILONS, [result.dimensions[name, n, x].mean for x in EPSILONS], marker="o", label=f"{n} tokens"
            )
        row[-1].set_xscale("log")
        row[-1].set_yscale("log")
        row[-1].set_xlabel("ridge / |C|")
        row[-1].set_title(f"{name}, statistical dimension")
        row[-1].legend(fontsize="small", loc="lower left")
        for axis in row:
            axis.grid(True, alpha=0.2)
    axes[0, 0].legend(fontsize="small")
    figure.savefig(path, dpi=130)
    plt.close(figure)
