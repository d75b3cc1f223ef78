"""Tokens per second of training on short sequences: padded, a row for each, against packed, several in a row.

python tools/studies/packing.py --length 1024 --median 290
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import torch
from rich.table import Table
from torch import Tensor

from kernelformer.formatting import short_names
from kernelformer.models import KernelformerConfig, KernelformerForCausalLM
from kernelformer.settings import SEED, Settings, option
from kernelformer_lab.bench.timing import taking_timings
from kernelformer_lab.cli.studies import main
from kernelformer_lab.data.batching import fill_rows, padded
from kernelformer_lab.figures import drawing, table
from kernelformer_lab.studies.base import SCRIPT, SPECS, Log, Progress, Record, Row, Study

SPREAD = 0.65  # of the logarithm of lengths, about that of proteins
VOCABULARY = 64
Batch = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class PackingSettings(Settings):
    """Settings of this study."""

    attention: tuple[str, ...] = option(("softmax", "favor+:num_features=64", "elu"), SPECS)
    length: int = option(1024, "tokens of a packed row", least=2)
    median: int = option(290, "tokens of a sequence", least=2)
    batch: int = option(8, "rows of a step", least=1)
    width: int = option(128, "of the model: its hidden size", least=1)
    layers: int = option(2, "of the model", least=1)
    heads: int = option(4, "of the attention", least=1)
    rounds: int = option(5, "passes of each, interleaved", least=1)
    seed: int = option(0, SEED, least=0)


def lengths(settings: PackingSettings) -> list[int]:
    """Lengths of sequences, log-normal around the median, that fill about so many rows."""
    rng = np.random.default_rng(settings.seed)
    drawn: list[int] = []
    while sum(drawn) < 0.95 * settings.batch * settings.length:
        drawn.append(int(np.clip(rng.lognormal(np.log(settings.median), SPREAD), 2, settings.length)))
    return drawn


def batches(settings: PackingSettings) -> dict[str, list[Batch]]:
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
def measure(settings: PackingSettings, attention: str) -> Row:
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
    return {"attention": attention, **{name: tokens / median(times[1:]) for name, times in seconds.items()}}


def run(record: Record, log: Log, progress: Progress) -> None:
    """Measure each attention."""
    record.figures["rates"] = []
    for attention in record.settings.attention:
        log(attention)
        record.figures["rates"].append(measure(record.settings, attention))
        progress()


def tables(record: Record) -> list[Table]:
    """A row for each attention."""
    rows = record.figures["rates"]
    short = short_names(x["attention"] for x in rows)
    cells = [
        (short[x["attention"]], *(f"{x[y]:,.0f}" for y in ("padded", "packed")), f"{x['packed'] / x['padded']:.2f}")
        for x in rows
    ]
    return [table("Tokens per second in training", ("attention", "padded", "packed", "ratio"), cells)]


def picture(record: Record, path: Path) -> None:
    """Draw tokens per second, two bars for each attention."""
    rows = record.figures["rates"]
    places = np.arange(len(rows))
    with drawing(path, (7, 0.6 * len(rows) + 1.6)) as (figure, ((axis,),)):
        for offset, name in ((-0.2, "padded"), (0.2, "packed")):
            axis.barh(places + offset, [x[name] for x in rows], 0.4, label=name)
        axis.set_yticks(places, list(short_names(x["attention"] for x in rows).values()))
        axis.invert_yaxis()
        axis.set_xlabel("tokens per second in training")
        axis.grid(True, axis="x", alpha=0.2)
        figure.legend(loc="outside upper center", ncols=2, fontsize="small")


STUDY = Study("packing", "", PackingSettings, lambda x: len(x.attention), run, tables, picture, program=SCRIPT)

if __name__ == "__main__":
    main(STUDY, "Measure tokens per second in training on short sequences, padded and packed into rows.")
