"""Errors of landmarks and features inside a real model.

Stands for Skyformer (2111.00035), Fig. 1 and Theorem 2.

Queries, keys and values are those of every layer and head of an encoder on real text: as pretrained, and of a freshly
initialized model of the same configuration.
"""

from __future__ import annotations

from dataclasses import dataclass
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
from kernelformer.settings import MODEL, TEXTS, Settings, option
from kernelformer_lab.analysis.spectra import condition_number, score_spectrum
from kernelformer_lab.figures import drawing, log_axis, table
from kernelformer_lab.studies.base import Log, Progress, Record, Study

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


Spread = list[float]  # mean, median and standard error over texts, layers and heads


@dataclass(frozen=True, kw_only=True)
class ApproximationSettings(Settings):
    """Settings of this study."""

    encoder: str = option(help=MODEL, path=True, name="model")
    text: Path = option(help=TEXTS)
    lengths: tuple[int, ...] = option((128, 256, 512), "tokens", least=1)
    features: tuple[int, ...] = option((16, 32, 64, 128, 256), "landmarks, features or rank", least=1)
    texts: int = option(2, "texts to measure on, of each length", least=1, name="samples")


def spread(values: Tensor) -> Spread:
    """Mean, median and standard error of any number of values."""
    x = values.flatten().double()
    return [float(x.mean()), float(x.median()), float(x.std() / len(x) ** 0.5)]


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
    return spread(torch.stack(errors))


def steps(settings: ApproximationSettings) -> int:
    """Number of calls of ``progress`` in `run`."""
    return 2 * len(set(settings.lengths)) * (len(METHODS) + 2) + 2 * len(LANDMARKS)


@torch.no_grad()
def run(record: Record, log: Log, progress: Progress) -> None:
    """Measure errors, condition numbers and statistical dimensions; the ridges at the longest length.

    Rows of each part are what they are of, model ("pretrained", "initialized") first, then a `Spread`.
    """
    settings = record.settings
    tokenizer, models = load(settings.encoder)
    tokens = {n: long_texts(tokenizer, settings.text, n, settings.texts) for n in sorted(set(settings.lengths))}
    parts: dict[str, list[list[Any]]] = {"errors": [], "ridges": [], "conditions": [], "dimensions": []}
    record.figures = parts
    for name, model in models.items():
        for n, ids in tokens.items():
            calls = attention_calls(model, {"input_ids": ids}, outputs=False)
            inputs = [(x.query, x.key, x.value) for x in calls]
            for label, (method, count, options) in METHODS.items():
                log(f"{name}, {n} tokens: {label}")
                for m in settings.features:
                    size = {count: m, **({"max_length": n} if method == "linformer" else {})}
                    errors = spectral_error(inputs, "softmax", method, **size, **options)
                    parts["errors"].append([name, n, label, m, *errors])
                progress()
            log(f"{name}, {n} tokens: condition numbers")
            for kernel in ("softmax", "gaussian"):
                values = torch.stack([score_spectrum(q, k, kernel) for q, k, _ in inputs])
                for share in (0.5, 1.0):
                    parts["conditions"].append([name, n, kernel, share, *spread(condition_number(values, share))])
            progress()
            log(f"{name}, {n} tokens: statistical dimension")
            dimension = torch.stack([statistical_dimension(q, k, EPSILONS) for q, k, _ in inputs])
            for epsilon, values in zip(EPSILONS, dimension.unbind(-1), strict=True):
                parts["dimensions"].append([name, n, epsilon, *spread(values)])
            progress()
        for landmarks in LANDMARKS:
            log(f"{name}: gaussian attention, {landmarks} landmarks")
            for gamma in GAMMAS:
                for m in settings.features:
                    more: dict[str, Any] = {"num_landmarks": m, "gamma": gamma, "landmarks": landmarks}
                    errors = spectral_error(inputs, "gaussian", "skyformer", **more)
                    parts["ridges"].append([name, landmarks, gamma, m, *errors])
            progress()


def by_key(rows: list[list[Any]]) -> dict[tuple[Any, ...], dict[Any, Spread]]:
    """The spreads of a part by all that they are of but its last, then by that."""
    found: dict[tuple[Any, ...], dict[Any, Spread]] = {}
    for row in rows:
        found.setdefault(tuple(row[:-4]), {})[row[-4]] = row[-3:]
    return found


def tables(record: Record) -> list[Table]:
    """Errors, ridges, condition numbers and statistical dimensions."""
    errors, ridges, conditions, dimensions = (by_key(x) for x in record.figures.values())
    features = sorted(record.settings.features)
    scores: dict[tuple[str, int], list[str]] = {}
    for share in (1.0, 0.5):
        for (name, n, _), spreads in conditions.items():
            scores.setdefault((name, n), []).append(f"{spreads[share][1]:.1e}")
    return [
        table(
            "Spectral error against softmax attention, relative, by number of features: mean (median)",
            ("model", "tokens", "method", *map(str, features)),
            [
                (name, str(n), label, *(f"{x[m][0]:.2g} ({x[m][1]:.2g})" for m in features))
                for (name, n, label), x in errors.items()
            ],
            left=3,
        ),
        table(
            f"Skyformer against exact Gaussian attention, {max(n for _, n in dimensions)} tokens, by landmarks",
            ("model", "landmarks", "gamma", *map(str, features)),
            [
                (name, landmarks, f"{gamma:g}", *(f"{x[m][0]:.3g}" for m in features))
                for (name, landmarks, gamma), x in ridges.items()
            ],
            left=3,
        ),
        table(
            "Scores before normalization: largest singular value over the smallest, and over the middle one (medians)",
            ("model", "tokens", *(f"{kernel}, {x}" for x in ("all", "half") for kernel in ("softmax", "gaussian"))),
            [(name, str(n), *cells) for (name, n), cells in scores.items()],
            left=2,
        ),
        table(
            "Statistical dimension of the completed Gaussian scores (2n rows), mean, by the ridge over |C|",
            ("model", "tokens", *(f"{x:g}" for x in EPSILONS)),
            [(name, str(n), *(f"{x[e][0]:.1f}" for e in EPSILONS)) for (name, n), x in dimensions.items()],
            left=2,
        ),
    ]


def picture(record: Record, path: Path) -> None:
    """Draw the paper's Fig. 1: one panel per model and length, and d_stat over the ridge beside them."""
    errors, dimensions = by_key(record.figures["errors"]), by_key(record.figures["dimensions"])
    models, lengths = (list(dict.fromkeys(x)) for x in zip(*dimensions, strict=True))
    features, width = sorted(record.settings.features), len(lengths) + 1
    with drawing(path, (3.6 * width, 3.4 * len(models)), len(models), width) as (_, axes):
        for row, name in zip(axes, models, strict=True):
            for axis, n in zip(row, lengths, strict=False):
                for index, label in enumerate(METHODS):
                    curve = [errors[name, n, label][m][1] for m in features]
                    axis.plot(features, curve, marker="o", color=f"C{index}", label=label)
                axis.set(title=f"{name}, {n} tokens", xlabel="features")
                log_axis(axis)
            row[0].set_ylabel("median relative spectral error")
            for n in lengths:
                curve = [dimensions[name, n][x][0] for x in EPSILONS]
                row[-1].plot(EPSILONS, curve, marker="o", label=f"{n} tokens")
            row[-1].set(xscale="log", yscale="log", xlabel="ridge / |C|", title=f"{name}, statistical dimension")
            row[-1].legend(fontsize="small", loc="lower left")
            for axis in row:
                axis.grid(True, alpha=0.2)
        axes[0, 0].legend(fontsize="small")


STUDY = Study(
    "approximation",
    "Skyformer (2111.00035), Fig. 1 and Theorem 2",
    ApproximationSettings,
    steps,
    run,
    tables,
    picture,
    examples=(("--model MODEL --text test.jsonl", "inside a real encoder"),),
)
