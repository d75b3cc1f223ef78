"""Errors of approximate attention over the layers of a pretrained model: Performer (2009.14794), Fig. 14.

The weights are those of the original; attention is replaced and nothing is trained. For each method:

- the error of each attention by itself, at the queries, keys and values of the original;
- the error of the hidden states after layer n when layers 1 to n are approximated;
- the error of the last hidden states when layers 1 to n are approximated and the others exact.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from rich.table import Table

from kernelformer.conversion.losses import HiddenStateErrors
from kernelformer.conversion.measure import Batch, measure
from kernelformer.conversion.readers import hash_files
from kernelformer.conversion.texts import check_length, read_texts
from kernelformer.hf import convert
from kernelformer.hf.load import load_source
from kernelformer.modules import method_options, parse_method
from kernelformer.modules.calibration import evaluating
from kernelformer.settings import KIND, MODEL, PICKLE, SEED, TEXTS, Settings, option
from kernelformer_lab.figures import drawing, table
from kernelformer_lab.records import plain
from kernelformer_lab.studies.base import SPECS, Log, Progress, Record, Row, Study, unique
from kernelformer_lab.studies.conversion import inputs_for

TITLES = {
    "own": "each attention by itself",
    "hidden": "hidden states, layers 1 to n approximated",
    "output": "last hidden states, layers 1 to n approximated",
}


METHODS = (
    "favor+:num_features=64",
    "favor+:num_features=256",
    "favor+:num_features=1024",
    "trigonometric:num_features=256",
    "loglinear:num_features=128",
    "nystromformer:num_landmarks=64",
    "wildcat:num_landmarks=64",
    "local:window=32:sinks=1",
    "favor+:num_features=256:window=32:sinks=1",
    "wildcat:num_landmarks=64:window=32:sinks=1",
)
STRIDE = 1000  # between the seeds of two draws: layers take the seeds in between


@dataclass(frozen=True, kw_only=True)
class DepthSettings(Settings):
    """Settings of this study."""

    model: str = option(help=MODEL, argument=True, path=True, shown="MODEL")
    text: Path = option(help=TEXTS)
    attention: tuple[str, ...] = option((), SPECS)
    draws: int = option(3, "of each map that is random", least=2)
    texts: int = option(16, "texts to measure on", least=1, name="samples")
    length: int = option(256, "tokens of a text, at most", least=2)
    batch: int = option(4, "texts at once", least=1)
    task: str = option("auto", KIND, choices=("auto", "encoder", "masked", "causal", "seq2seq"))
    allow_pickle: bool = option(False, PICKLE, switch=True)
    seed: int = option(0, SEED, least=0)


def spread(rows: Sequence[Row], name: str) -> tuple[list[float], list[float]]:
    """Means and standard deviations over draws of ``own``, ``hidden`` or ``output``; deviation 0 for one draw."""
    values = list(zip(*(x[name] for x in rows), strict=True))
    return [fmean(x) for x in values], [stdev(x) if len(x) > 1 else 0.0 for x in values]


def cases_of(settings: DepthSettings) -> list[tuple[str, int]]:
    """Method and number of the draw of each row; methods without anything random have one."""
    specs = settings.attention or METHODS
    return [
        (x, draw)
        for x in specs
        for draw in range(settings.draws if "seed" in method_options(parse_method(x)[0]) else 1)
    ]


def steps(settings: DepthSettings) -> int:
    """Number of calls of ``progress`` in `run`."""
    return len(cases_of(settings))


@torch.no_grad()
def run(record: Record, log: Log, progress: Progress) -> None:
    """Measure every method and draw that the record does not have, of the same settings.

    Raises:
        ValueError: the record is of another model or other texts; a model of two sequences.
    """
    settings = record.settings
    source = load_source(settings.model, task=settings.task, allow_pickle=settings.allow_pickle)
    if source.model.config.is_encoder_decoder:
        raise ValueError(f"{settings.model} is an encoder with a decoder; give a model of one stack of layers.")
    inputs = inputs_for(
        source,
        read_texts(settings.text),
        check_length(source, settings.length),
        min(settings.batch, settings.texts),
        settings.seed,
    )
    batches = list(islice(inputs, math.ceil(settings.texts / settings.batch)))
    with evaluating(source.model):
        originals = [source.model(**batch, output_hidden_states=True) for batch in batches]
    tokens = sum(int(x["attention_mask"].sum()) for x in batches)
    texts = sum(len(x["input_ids"]) for x in batches)
    about = {"model": Path(settings.model).name, "text": hash_files([settings.text]), "texts": texts, "tokens": tokens}
    same = {name: x for name, x in plain(settings).items() if name not in ("attention", "draws")}
    order = cases_of(settings)
    record.resume(about, **same)
    record.figures["rows"] = [x for x in record.rows if (x["method"], x["draw"]) in order]
    for method, draw in order:
        if not record.where(method=method, draw=draw):
            log(f"{method}, draw {draw}")
            record.rows.append(_measure(source.model, method, draw, settings.seed, batches, originals))
            record.save()
        progress()
    record.rows.sort(key=lambda x: order.index((x["method"], x["draw"])))


def _measure(model: Any, method: str, draw: int, seed: int, batches: Sequence[Batch], originals: Sequence[Any]) -> Row:
    """Errors of one method with one draw, relative: root of the mean over tokens of ``|ours - theirs|^2 / |theirs|^2``.

    ``own`` of the output of each attention by itself, ``|ours - theirs|_F / |theirs|_F``; ``hidden`` of the hidden
    states before the first layer and after each, all layers approximated; ``output`` of the last hidden states, the
    first n layers approximated, n from 0; ``cosine`` between mean last hidden states, mean over texts, None for
    decoders.
    """
    name, options = parse_method(method)
    if "seed" in method_options(name):
        options = {**options, "seed": seed + STRIDE * draw}
    student = convert(copy.deepcopy(model), name, **options)
    report = measure(model, student, batches)
    hidden = report.hidden["layers"]
    output = [0.0]
    for count in range(1, len(hidden) - 1):
        student = convert(copy.deepcopy(model), name, layers=list(range(count)), **options)
        errors = HiddenStateErrors(pools=False)
        with evaluating(student):
            for batch, want in zip(batches, originals, strict=True):
                errors.add(batch, want, student(**batch, output_hidden_states=True))
        output.append(math.sqrt(errors.hidden["layers"][-1].value or 0.0))
    return {
        "method": method,
        "draw": draw,
        "own": [x.error for x in report.rows],
        "hidden": list(hidden),
        "output": [*output, hidden[-1]],
        "cosine": report.cosine,
    }


def tables(record: Record) -> list[Table]:
    """Three tables over the layers: each attention by itself, hidden states, and the output."""
    titles = {
        "own": "Error of each attention by itself",
        "hidden": "Error after layer n, layers 1 to n approximated",
        "output": "Error of the last hidden states, layers 1 to n approximated and the others exact",
    }
    about = record.figures
    out = []
    for name, title in titles.items():
        first = 1 if name == "own" else 0
        columns = ("method", *map(str, range(first, first + len(record.rows[0][name]))))
        spreads = {x: spread(record.where(method=x), name) for x in unique(record.rows, "method")}
        rows = [
            (method, *(f"{x:.2f} ± {y:.2f}" for x, y in zip(*both, strict=True))) for method, both in spreads.items()
        ]
        whole = f"{title}: {about['model']}, {about['texts']} texts, relative, mean ± deviation over draws"
        out.append(table(whole, columns, rows))
    return out


def picture(record: Record, path: Path) -> None:
    """Draw relative errors over the layers, means and standard deviations over draws, a panel for each of `TITLES`."""
    with drawing(path, (14, 5.2), columns=len(TITLES), sharey=True) as (figure, (axes,)):
        for axis, (name, title) in zip(axes, TITLES.items(), strict=True):
            for index, method in enumerate(unique(record.rows, "method")):
                both = spread(record.where(method=method), name)
                means, deviations = (x if name == "own" else x[1:] for x in both)  # without n = 0
                look = {"color": f"C{index % 10}", "linestyle": "--" if "window" in method else "-", "label": method}
                numbers = range(1, 1 + len(means))
                axis.errorbar(numbers, means, yerr=deviations, marker="o", markersize=4, capsize=2, **look)
            axis.set(title=title, xlabel="layer n")
            axis.axhline(1, color="grey", linestyle=":", linewidth=1)
            axis.grid(True, alpha=0.2)
            axis.xaxis.get_major_locator().set_params(integer=True)
        axes[0].set_ylabel("relative error")
        axes[0].set_yscale("log")  # trigonometric features are several times as far off as all others
        axes[0].yaxis.set_major_formatter("{x:g}")
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize="small")


STUDY = Study(
    "depth",
    "Performer (2009.14794), Fig. 14",
    DepthSettings,
    steps,
    run,
    tables,
    picture,
    resumes=True,
    examples=(("MODEL --text test.jsonl", "layer by layer"),),
)
