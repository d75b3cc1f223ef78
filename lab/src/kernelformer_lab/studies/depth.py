"""How errors of approximate attention grow over the layers of a pretrained model: Performer (2009.14794), Fig. 14.

The weights are those of the original; attention is replaced and nothing is trained. For each method:

- the error of each attention by itself, at the queries, keys and values of the original;
- the error of the hidden states after layer n when layers 1 to n are approximated;
- the error of the last hidden states when layers 1 to n are approximated and the others exact.
"""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from kernelformer.conversion.losses import HiddenStateErrors
from kernelformer.conversion.measure import Batch, measure
from kernelformer.conversion.readers import hash_files
from kernelformer.conversion.texts import check_length, inputs_for, read_texts
from kernelformer.hf import convert
from kernelformer.hf.load import load_source
from kernelformer.modules import method_options, parse_method
from kernelformer.modules.calibration import evaluating
from kernelformer.settings import plain
from kernelformer_lab.studies.base import Log, Progress, read_record, write_record
from kernelformer_lab.studies.settings import DepthSettings as Settings

TITLES = {
    "own": "each attention by itself",
    "hidden": "hidden states, layers 1 to n approximated",
    "output": "last hidden states, layers 1 to n approximated",
}


def picture(result: Result, path: Path) -> None:
    """Draw relative errors over the layers, means and standard deviations over draws, a panel for each of `TITLES`."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(TITLES), figsize=(14, 5.2), sharey=True, constrained_layout=True)
    for axis, (name, title) in zip(axes, TITLES.items(), strict=True):
        for index, method in enumerate(result.methods):
            means, deviations = (x if name == "own" else x[1:] for x in result.spread(method, name))  # without n = 0
            numbers = range(1, 1 + len(means))
            line = "--" if "window" in method else "-"
            axis.errorbar(
                numbers,
                means,
                yerr=deviations,
                color=f"C{index % 10}",
                linestyle=line,
                marker="o",
                markersize=4,
                capsize=2,
                label=method,
            )
        axis.set_title(title)
        axis.set_xlabel("layer n")
        axis.axhline(1, color="grey", linestyle=":", linewidth=1)
        axis.grid(True, alpha=0.2)
        axis.xaxis.get_major_locator().set_params(integer=True)
    axes[0].set_ylabel("relative error")
    axes[0].set_yscale("log")  # trigonometric features are several times as far off as all others
    axes[0].yaxis.set_major_formatter("{x:g}")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize="small")
    figure.savefig(path, dpi=130)
    plt.close(figure)


__all__ = ["picture", "record", "run", "steps", "tables"]
NAME = "depth"
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


@dataclass(frozen=True)
class Row:
    """Errors of one method with one draw, relative: root of the mean over tokens of ``|ours - theirs|^2 / |theirs|^2``.

    Args:
        method: its spec.
        draw: number of the draw.
        own: of the output of each attention by itself, ``|ours - theirs|_F / |theirs|_F``.
        hidden: of the hidden states before the first layer and after each, all layers approximated.
        output: of the last hidden states, the first n layers approximated, n from 0.
        cosine: between mean last hidden states, all layers approximated, mean over texts; None for decoders.
    """

    method: str
    draw: int
    own: tuple[float, ...]
    hidden: tuple[float, ...]
    output: tuple[float, ...]
    cosine: float | None


@dataclass
class Result:
    """What the study has measured.

    Args:
        about: the model and the texts.
        rows: one for each method and draw.
    """

    about: dict[str, Any]
    rows: list[Row]

    def spread(self, method: str, name: str) -> tuple[list[float], list[float]]:
        """Means and standard deviations over draws of ``own``, ``hidden`` or ``output``; deviation 0 for one draw."""
        values = list(zip(*(getattr(x, name) for x in self.rows if x.method == method), strict=True))
        return [statistics.fmean(x) for x in values], [statistics.stdev(x) if len(x) > 1 else 0.0 for x in values]

    @property
    def methods(self) -> list[str]:
        """All methods, in their order."""
        return list(dict.fromkeys(x.method for x in self.rows))


def cases_of(settings: Settings) -> list[tuple[str, int]]:
    """Method and number of the draw of each row; methods without anything random have one."""
    specs = settings.attention or METHODS
    return [
        (x, draw)
        for x in specs
        for draw in range(settings.draws if "seed" in method_options(parse_method(x)[0]) else 1)
    ]


def steps(settings: Settings) -> int:
    """How often `run` calls ``progress``."""
    return len(cases_of(settings))


@torch.no_grad()
def run(settings: Settings, folder: Path, log: Log, progress: Progress) -> Result:
    """Measure every method and draw that the record in ``folder`` does not have, of the same settings.

    Raises:
        ValueError: the record is of another model or other texts; a model of two sequences.
    """
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
    result = Result(about, _finished(folder, settings, about))
    for method, draw in cases_of(settings):
        if not any((x.method, x.draw) == (method, draw) for x in result.rows):
            log(f"{method}, draw {draw}")
            result.rows.append(_measure(source.model, method, draw, settings.seed, batches, originals))
            write_record(folder, NAME, settings, record(result))
        progress()
    order = cases_of(settings)
    result.rows.sort(key=lambda x: order.index((x.method, x.draw)))
    return result


def _finished(folder: Path, settings: Settings, about: dict[str, Any]) -> list[Row]:
    """Rows that an earlier call of the same settings, but for the methods, has left."""
    kept = read_record(folder, NAME)
    if kept is None:
        return []
    here = {**plain(settings), "attention": kept["settings"]["attention"], "draws": kept["settings"]["draws"]}
    if kept["settings"] != here or any(kept[name] != x for name, x in about.items()):
        raise ValueError(f"{folder / NAME}.json has figures of another model, text or size; give another --out.")
    wanted = set(cases_of(settings))
    rows = []
    for row in kept["rows"]:
        if (row["method"], row["draw"]) in wanted:
            curves: dict[str, Any] = {name: tuple(row[name]) for name in ("own", "hidden", "output")}
            rows.append(Row(**{**row, **curves}))
    return rows


def _measure(model: Any, method: str, draw: int, seed: int, batches: Sequence[Batch], originals: Sequence[Any]) -> Row:
    """One method and draw, with the first n layers converted for each n."""
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
    return Row(method, draw, tuple(x.error for x in report.rows), hidden, (*output, hidden[-1]), report.cosine)


def tables(result: Result) -> list[Table]:
    """Three tables over the layers: each attention by itself, hidden states, and the output."""
    titles = {
        "own": "Error of each attention by itself",
        "hidden": "Error after layer n, layers 1 to n approximated",
        "output": "Error of the last hidden states, layers 1 to n approximated and the others exact",
    }
    about = result.about
    out = []
    for name, title in titles.items():
        table = Table(title=f"{title}: {about['model']}, {about['texts']} texts, relative, mean ± deviation over draws")
        table.add_column("method", no_wrap=True)
        first = 1 if name == "own" else 0
        for number in range(first, first + len(getattr(result.rows[0], name))):
            table.add_column(str(number), justify="right", no_wrap=True)
        for method in result.methods:
            means, deviations = result.spread(method, name)
            table.add_row(method, *(f"{x:.2f} ± {y:.2f}" for x, y in zip(means, deviations, strict=True)))
        out.append(table)
    return out


def record(result: Result) -> dict[str, Any]:
    """The model, the texts and every row."""
    return {**result.about, "rows": [asdict(x) for x in result.rows]}
