"""Tokens per second of training on short sequences: padded, a row for each, against packed, several in a row."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from rich.table import Table
from torch import Tensor

from kernelformer.formatting import short_names
from kernelformer.models import KernelformerConfig, KernelformerForCausalLM
from kernelformer.timing import taking_timings
from kernelformer_lab.data.batching import fill_rows, padded
from kernelformer_lab.studies.base import Log, Progress
from kernelformer_lab.studies.settings import PackingSettings as Settings

SPREAD = 0.65  # of the logarithm of lengths, about that of proteins
VOCABULARY = 64
Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Rate:
    """Tokens per second, without padding, of forward and backward passes over the same sequences.

    Args:
        attention: its spec.
        padded: a sequence in each row, all as long as the longest of their batch.
        packed: rows with several sequences each.
    """

    attention: str
    padded: float
    packed: float


def lengths(settings: Settings) -> list[int]:
    """Lengths of sequences, log-normal around the median, that fill about so many rows."""
    rng = np.random.default_rng(settings.seed)
    drawn: list[int] = []
    while sum(drawn) < 0.95 * settings.batch * settings.length:
        drawn.append(int(np.clip(rng.lognormal(np.log(settings.median), SPREAD), 2, settings.length)))
    return drawn


def batches(settings: Settings) -> dict[str, list[Batch]]:
    """The same random sequences both ways, ``batch`` rows at a time."""
    gen, drawn = torch.Generator().manual_seed(settings.seed), lengths(settings)
    sequences = [torch.randint(VOCABULARY, (n,), generator=gen) for n in drawn]
    rows = fill_rows(drawn, settings.length)
    joined = [torch.cat([sequences[i] for i in row]) for row in rows]
    numbers = [torch.arange(len(row)).repeat_interleave(torch.tensor([drawn[i] for i in row])) for row in rows]
    result: dict[str, list[Batch]] = {"padded": [], "packed": []}
    for name, all_rows in (("padded", sequences), ("packed", joined)):
        for first in range(0, len(all_rows), settings.batch):
            chosen = slice(first, first + settings.batch)
            ids, mask = padded(all_rows[chosen], multiple=1, longest=settings.length)
            batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
            if name == "packed":
                segments, _ = padded(numbers[chosen], multiple=1, longest=settings.length, value=settings.length)
                batch["segment_ids"] = segments
            result[name].append(batch)
    return result


@taking_timings()
def measure(settings: Settings, attention: str) -> Rate:
    """Time passes over all sequences, both ways in turn, so that what else the machine does meets both."""
    config = KernelformerConfig(
        attention=attention,
        vocab_size=VOCABULARY,
        hidden_size=settings.width,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        max_position_embeddings=settings.length,
    )
    model, both = KernelformerForCausalLM(config), batches(settings)
    seconds: dict[str, list[float]] = {name: [] for name in both}
    for _ in range(settings.rounds + 1):
        for name, parts in both.items():
            start = time.perf_counter()
            for batch in parts:
                model(**batch).loss.backward()
            seconds[name].append(time.perf_counter() - start)
            model.zero_grad()
    tokens = sum(lengths(settings))
    return Rate(attention, **{name: tokens / median(times[1:]) for name, times in seconds.items()})


def steps(settings: Settings) -> int:
    """How often `run` calls ``progress``."""
    return len(settings.attention)


def run(settings: Settings, folder: Path, log: Log, progress: Progress) -> list[Rate]:
    """Measure each attention."""
    result = []
    for attention in settings.attention:
        log(attention)
        result.append(measure(settings, attention))
        progress()
    return result


def tables(result: Sequence[Rate]) -> list[Table]:
    """One table, a row for each attention."""
    out = Table("attention", title="Tokens per second in training", title_justify="left")
    for name in ("padded", "packed", "ratio"):
        out.add_column(name, justify="right")
    short = short_names(x.attention for x in result)
    for x in result:
        out.add_row(short[x.attention], f"{x.padded:,.0f}", f"{x.packed:,.0f}", f"{x.packed / x.padded:.2f}")
    return [out]


def record(result: Sequence[Rate]) -> dict[str, Any]:
    """Every figure."""
    return {"rates": [asdict(x) for x in result]}


def picture(result: Sequence[Rate], path: Path) -> None:
    """Draw tokens per second, two bars for each attention."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    names, places = list(short_names(x.attention for x in result).values()), np.arange(len(result))
    figure, axis = plt.subplots(figsize=(7, 0.6 * len(result) + 1.6), constrained_layout=True)
    axis.barh(places - 0.2, [x.padded for x in result], 0.4, label="padded")
    axis.barh(places + 0.2, [x.packed for x in result], 0.4, label="packed")
    axis.set_yticks(places, names)
    axis.invert_yaxis()
    axis.set_xlabel("tokens per second in training")
    axis.grid(True, axis="x", alpha=0.2)
    figure.legend(loc="outside upper center", ncols=2, fontsize="small")
    figure.savefig(path, dpi=130)
    plt.close(figure)
