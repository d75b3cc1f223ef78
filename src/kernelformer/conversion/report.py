"""Report of a conversion and of a judgement: tables for the terminal, a picture, a model card."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any, BinaryIO

from rich.table import Table

from kernelformer.conversion.losses import CONVERTED, KERNEL, NEAR, ORIGINAL, Figures, standard_error
from kernelformer.conversion.measure import Report, Row
from kernelformer.conversion.passkey import Probe
from kernelformer.conversion.texts import TextsUsed
from kernelformer.files import check_regular, finite
from kernelformer.formatting import human_time, visible
from kernelformer.hf.load import auto_classes
from kernelformer.hf.pretrained import gguf_file
from kernelformer.page import plain, render_markdown, table, text_table


@dataclass
class ConversionResult:
    """Everything that the report, the model card and the record of a conversion show.

    Args:
        exact_heads: heads that stay exact, by the reason and the name of their attention.
        reports: what was measured: ``all converted`` where some were kept afterwards, ``converted``, ``distilled``.
        curves: by stage, looks at held-out texts: step, seconds, tokens, loss.
        spent: by stage, seconds, tokens and the rate at its peak; before the last stage a figure of the model, see
            `Figure`.
        texts: what was used of which file, by what it was for.
        judged: what was measured beside the original: `Judgement`; None: nothing.
        tokens: that were learned from, counted each time; None: not counted.
    """

    setting: Any
    source: str
    model: str
    length: int
    conversion: list[dict[str, Any]] = field(default_factory=list)
    exact_heads: dict[str, dict[str, list[int]]] = field(default_factory=dict)
    reports: dict[str, Any] = field(default_factory=dict)
    losses: dict[str, list[float]] = field(default_factory=dict)
    curves: dict[str, list[list[float]]] = field(default_factory=dict)
    spent: dict[str, dict[str, float]] = field(default_factory=dict)
    texts: dict[str, TextsUsed] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    environment: dict[str, Any] = field(default_factory=dict)
    licence: str = ""
    judged: Any = None
    tokens: int | None = None
    seconds: float | None = None

    def as_json(self) -> dict[str, Any]:
        """Plain values; of files the names alone."""
        setting = {name: x.name if isinstance(x, Path) else x for name, x in vars(self.setting).items()}
        reports = {name: x.as_json() for name, x in self.reports.items()}
        texts = {name: asdict(x) for name, x in self.texts.items()}
        judged = None if self.judged is None else self.judged.as_json()
        own = {"setting": setting, "reports": reports, "texts": texts, "judged": judged}
        plain: dict[str, Any] = finite({**vars(self), **own})
        return plain


LONGEST = 1 << 20  # bytes of a card, or of a text in a header, that are read
NOT_STATED = "not stated by the source: ask there"
_CARD, _FILES = "README.md", ("LICENSE", "LICENSE.txt", "LICENSE.md", "LICENCE", "COPYING")
# Types of values in a .gguf, as struct has them.
_NUMBERS = {**dict(enumerate("BbHhIif?")), 10: "Q", 11: "q", 12: "d"}
_TEXT, _LIST = 8, 9


def licence_of(source: str | Path) -> str:
    """Find the licence of a pretrained model; empty where the source states none.

    That of the card (``license:`` in the front matter of README.md), else the first line of a file such as LICENSE, of
    a ``.gguf`` file ``general.license``. Of a name on the hub the files are those that its cache has.
    """
    path = Path(source)
    try:
        packed = gguf_file(path)
        if packed is not None:
            return _of_gguf(packed) or _of_folder(packed.parent)
        return _of_folder(path) if path.is_dir() else _of_hub(str(source))
    except Exception:  # YAML has errors of its own; a licence that cannot be read is not stated
        return ""


def _of_folder(folder: Path) -> str:
    card = folder / _CARD
    stated = _of_card(card) if card.is_file() else ""
    files = (x for name in _FILES if (x := folder / name).is_file())
    return stated or next((line for x in files if (line := _first_line(_read(x)))), "")


def _of_hub(name: str) -> str:
    from huggingface_hub import try_to_load_from_cache

    cached = (try_to_load_from_cache(name, x) for x in (_CARD, "config.json"))
    found = next((x for x in cached if isinstance(x, str)), None)
    return _of_folder(Path(found).parent) if found else ""


def _read(path: Path) -> str:
    with check_regular(path).open("rb") as file:
        return file.read(LONGEST).decode("utf-8", errors="replace")


def _of_card(path: Path) -> str:
    """``license_name`` or ``license`` of the front matter; ``other`` alone says nothing."""
    from huggingface_hub import metadata_load

    stated = metadata_load(path) or {}
    values = {x: stated.get(x) for x in ("license_name", "license", "license_link")}
    name, plain_name, link = (", ".join(map(str, x if isinstance(x, list) else [x or ""])) for x in values.values())
    name = name or plain_name
    if not name or name == "other":
        return ""
    return f"{name} ({link})" if link else name


def _first_line(text: str) -> str:
    line = next((visible(x.strip()) for x in text.removeprefix("\ufeff").splitlines() if x.strip()), "")
    return f"{line[:80]} (file LICENSE of the source)" if line else ""


def _of_gguf(path: Path) -> str:
    """Read ``general.license`` of the header of a ``.gguf`` file, without the rest of it."""
    with check_regular(path).open("rb") as file:
        try:
            if file.read(4) != b"GGUF" or _read_number(file, "I") < 2:
                return ""
            file.read(8)  # number of tensors
            for _ in range(_read_number(file, "Q")):
                key, kind = _text(file), _read_number(file, "I")
                if key == "general.license" and kind == _TEXT:
                    return _text(file).strip()
                _skip(file, kind)
        except (KeyError, OverflowError, RecursionError, struct.error):
            return ""
    return ""


def _read_number(file: BinaryIO, kind: str) -> int:
    (value,) = struct.unpack(f"<{kind}", file.read(struct.calcsize(f"<{kind}")))
    return int(value)


def _text(file: BinaryIO) -> str:
    length = _read_number(file, "Q")
    if length > LONGEST:
        raise ValueError(f"a name or a licence of {length} bytes is none.")
    return file.read(length).decode("utf-8", errors="replace")


def _skip(file: BinaryIO, kind: int) -> None:
    if kind == _TEXT:
        file.seek(_read_number(file, "Q"), 1)
    elif kind == _LIST:
        inner, count = _read_number(file, "I"), _read_number(file, "Q")
        if inner in (_TEXT, _LIST):
            for _ in range(count):
                _skip(file, inner)
        else:
            file.seek(count * struct.calcsize(f"<{_NUMBERS[inner]}"), 1)
    else:
        file.seek(struct.calcsize(f"<{_NUMBERS[kind]}"), 1)


NOT_JUDGED = "It was not judged beside its original; `kernelformer judge` does that."
# The log of 1/10 is what guessing a digit gives.
RECALL_NOTE = "share right, and log-probability of a digit, where guessing gives -2.3; mean ± standard error"


@dataclass(frozen=True)
class Recall:
    """Answers of one model to the questions for numbers that were hidden in texts of one length.

    Args:
        distances: tokens from each number to its answer.
    """

    length: int
    model: str
    distances: tuple[int, ...]
    right: tuple[bool, ...]
    log_probs: tuple[float, ...]

    def as_json(self) -> dict[str, Any]:
        """Plain values, with the means and their standard errors."""
        share, log_prob = [float(x) for x in self.right], self.log_probs
        means = {"accuracy": fmean(share), "accuracy_error": standard_error(share)}
        return {**asdict(self), **means, "log_prob": fmean(log_prob), "log_prob_error": standard_error(log_prob)}


@dataclass(frozen=True)
class Sample:
    """Continuations of one beginning, by the model's name."""

    prompt: str
    texts: dict[str, str]


@dataclass
class Judgement:
    """Measurements of a converted model beside its original.

    Args:
        figures: of the whole model by part, see `part_figures`.
        measured_on: the inputs of ``figures``, in words.
    """

    figures: dict[str, Figures]
    recall: list[Recall] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    probe: Probe | None = None
    measured_on: str = ""
    seconds: float = 0.0
    remarks: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """The judgement as plain values."""
        return {**asdict(self), "recall": [x.as_json() for x in self.recall]}


Rows = list[list[str]]


def _mean(values: Sequence[float]) -> str:
    error = standard_error(values)
    return f"{fmean(values):.2f}" + ("" if error is None else f" ± {error:.2g}")


def figure_rows(judgement: Judgement) -> tuple[list[str], Rows]:
    """Head and rows of the table of parts: a column for each part, a row for each figure that there is."""
    parts = [x for x in (ORIGINAL, NEAR, KERNEL, CONVERTED) if x in judgement.figures]
    names: dict[str, Callable[[Figures], str]] = {
        "perplexity": lambda x: _with_error(x.perplexity),
        "hidden tokens that are found, share": lambda x: _with_error(x.accuracy, x.accuracy_error),
        "mean outputs, cosine": lambda x: _with_error(x.cosine),
        "same best token, share": lambda x: _with_error(x.agreement),
        "relative error of the output": lambda x: _with_error(x.output),
    }
    both = {CONVERTED: f"{CONVERTED} (both)"} if NEAR in parts else {}
    rows = [[name, *(show(judgement.figures[x]) for x in parts)] for name, show in names.items()]
    return ["", *(both.get(x, x) for x in parts)], [x for x in rows if any(x[1:])]


def _with_error(value: float | None, error: float | None = None) -> str:
    return "" if value is None else f"{value:.4g}" + ("" if error is None else f" ± {error:.2g}")


def recall_rows(judgement: Judgement) -> tuple[list[str], Rows]:
    """Head and rows of the table of hidden numbers: a row for each length, two columns for each model.

    Where `NEAR` is among them the last column is what the kernel adds to it, text by text.
    """
    models = list(dict.fromkeys(x.model for x in judgement.recall))
    head = ["tokens", *(x for name in models for x in (f"{name}: right", "log p"))]
    rows = []
    for length, group in groupby(judgement.recall, key=lambda x: x.length):
        by = {x.model: x for x in group}
        row = [str(length)]
        for name in models:
            row += [_mean([float(x) for x in by[name].right]), _mean(by[name].log_probs)]
        if NEAR in by:
            pairs = zip(by[CONVERTED].log_probs, by[NEAR].log_probs, strict=True)
            row.append(_mean([x - y for x, y in pairs]))
        rows.append(row)
    return (head if NEAR not in models else [*head, "the kernel adds, log p"]), rows


def probe_sentence(probe: Probe) -> str:
    """The figures of a probe in words."""
    error = "" if probe.error is None else f" ± {100 * probe.error:.2g}"
    points = 100 * (probe.converted - probe.original)
    return (
        f"linear probe: accuracy {probe.original:.4f} on the original's embeddings and {probe.converted:.4f} on the "
        f"converted model's, {points:+.2f}{error} points (fitted to {probe.trained} texts, tried on {probe.tested})"
    )


def judgement_tables(judgement: Judgement) -> list[Table]:
    """Tables for the terminal: the parts, and the numbers that were found again."""
    shown = {
        "Both models, and the parts of a hybrid by themselves": figure_rows(judgement),
        f"Numbers hidden in texts ({RECALL_NOTE})": recall_rows(judgement),
    }
    return [text_table(title, head, rows) for title, (head, rows) in shown.items() if rows]


def remarks(judgement: Judgement | None) -> list[str]:
    """Sentences for the terminal, after the tables."""
    if judgement is None:
        return [f"note: {NOT_JUDGED}"]
    probed = [] if judgement.probe is None else [probe_sentence(judgement.probe)]
    return [*probed, *(f"note: {x}" for x in judgement.remarks)]


def card_section(judgement: Judgement | None) -> str:
    """Section of a model card that says how the model was judged, or that it was not."""
    return render_markdown(Path(__file__).with_name("judged.md"), **_judged(judgement))


def _judged(judgement: Judgement | None) -> dict[str, Any]:
    """Values of the template ``judged.md``."""
    if judgement is None:
        return {"judged": None, "probe": None, "not_judged": NOT_JUDGED}
    return {
        "judged": judgement,
        "parts": table(*figure_rows(judgement)),
        "is_hybrid": NEAR in judgement.figures,
        "recall": table(*recall_rows(judgement)) if judgement.recall else None,
        "recall_note": RECALL_NOTE,
        "probe": None if judgement.probe is None else probe_sentence(judgement.probe),
    }


STEEP = 8.0  # a relative error from which on an axis is logarithmic: a few tokens of decoders have huge states
HOPELESS = 100.0  # a predicted error beyond which the number says nothing


def tables(result: ConversionResult) -> list[Table]:
    """Tables for the terminal: errors by attention, errors by layer, and the judgement."""
    return [_attentions(result), _depths(result), *([] if result.judged is None else judgement_tables(result.judged))]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _called(row: Row, start: int = 0) -> str:
    """Name of an attention from a position on, with the number of the call where there are several."""
    return f"{row.name[start:]} ({row.call + 1})" if row.call else row.name[start:]


def _common(names: Sequence[str]) -> int:
    """Length of what all names begin with, in whole parts, the last part left out."""
    parts = [x.split(".")[:-1] for x in names]
    same = 0
    while all(len(x) > same and x[same] == parts[0][same] for x in parts):
        same += 1
    return len(".".join(parts[0][:same]) + ".") if same else 0


def _attentions(result: ConversionResult) -> Table:
    labels, cells = list(result.reports), []
    start = _common([x.name for x in result.reports[labels[-1]].rows])
    for rows in zip(*(result.reports[x].rows for x in labels), strict=True):
        last = rows[-1]
        worst = max(range(len(last.heads)), key=last.heads.__getitem__)
        predicted = last.reason if last.predicted is None else f"over {HOPELESS:g}"
        if last.predicted is not None and last.predicted < HOPELESS:
            predicted = f"{last.predicted:.2g}"
        norms = [f"{x.rms:.3g}, {x.largest:.3g}" for x in (last.query, last.key)]
        cells.append([visible(_called(last, start)), last.method, *norms, predicted])
        cells[-1] += [*(_number(x.error) for x in rows), f"{worst}: {_number(last.heads[worst])}"]
    head = ["attention", "method", "|q| rms, max", "|k| rms, max", "predicted", *labels, "worst head"]
    title = f"{visible(result.source)}: relative error of each attention, at the original's inputs"
    return text_table(title, head, cells, left=2)


def _depths(result: ConversionResult) -> Table:
    reports: list[Report] = list(result.reports.values())
    shown = text_table(
        "The model by itself: relative error of hidden states, where errors add up", ["after", *result.reports], []
    )
    for part in reports[0].hidden:
        prefix = "" if part == "layers" else f"{part} "
        for i, values in enumerate(zip(*(x.hidden[part] for x in reports), strict=True)):
            shown.add_row(f"{prefix}layer {i}" if i else f"{prefix}embeddings", *map(_number, values))
    for name, whole in figures(result).items():
        shown.add_row(name, *map(_number, whole), style="bold")
    return shown


def figures(result: ConversionResult) -> dict[str, list[float | None]]:
    """Figures of the whole model, one for each report."""
    reports: list[Report] = list(result.reports.values())
    rows: dict[str, list[float | None]] = {
        "perplexity": [x.perplexity for x in reports],
        "perplexity of the original": [x.original_perplexity for x in reports],
        "output, relative error": [x.output for x in reports],
        "same best token, share": [x.agreement for x in reports],
        "mean outputs, cosine": [x.cosine for x in reports],
    }
    return {name: values for name, values in rows.items() if any(x is not None for x in values)}


def picture(result: ConversionResult, path: Path) -> None:
    """Errors by layer: of each attention by itself, and of the hidden states as they add up (Performer, Fig. 14)."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    reports: dict[str, Report] = result.reports
    last = list(reports.values())[-1]
    curves = {f"{stage}: loss of held-out texts": x for stage, x in result.curves.items() if len(x) > 1}
    count = 1 + len(last.hidden) + len(curves)
    figure, axes = plt.subplots(1, count, figsize=(4.6 * count, 3.8), squeeze=False, constrained_layout=True)
    first, *others = axes[0]
    for label, report in reports.items():
        first.plot([x.error for x in report.rows], marker="o", label=label)
        for axis, values in zip(others, report.hidden.values(), strict=False):
            axis.plot(values, marker="o")
    low, high = [min(x.heads) for x in last.rows], [max(x.heads) for x in last.rows]
    first.fill_between(range(len(low)), low, high, color=f"C{len(reports) - 1}", alpha=0.15, linewidth=0)
    known = [(i, x.predicted) for i, x in enumerate(last.rows) if x.predicted is not None and x.predicted < HOPELESS]
    if known:
        first.plot(*zip(*known, strict=True), linestyle=":", color="grey", label="predicted, of the weights")
    first.legend(fontsize="small")
    hidden = ["hidden states, errors added up" if x == "layers" else f"hidden states of the {x}" for x in last.hidden]
    titles = {"each attention by itself (shade: its heads)": "attention, in the order of the calls"}
    for axis, (title, label) in zip(axes[0], (titles | dict.fromkeys(hidden, "layers")).items(), strict=False):
        axis.set(title=title, xlabel=label, ylabel="relative error")
        if axis.get_ylim()[1] > STEEP:
            axis.set_yscale("symlog", linthresh=1)
        axis.xaxis.get_major_locator().set_params(integer=True)
    for axis, (title, points) in zip(others[len(hidden) :], curves.items(), strict=True):
        axis.plot([x[1] / 60 for x in points], [x[3] for x in points], marker="o", color="C2")
        axis.set(title=title, xlabel="minutes")
    for axis in axes[0]:
        axis.set_ylim(bottom=0)
        axis.grid(True, alpha=0.2)
    figure.savefig(path, dpi=130)
    plt.close(figure)


VERSIONS = ("kernelformer", "torch", "transformers", "python")


def model_card(result: ConversionResult, name: str) -> str:
    """Make README.md of a converted model."""
    replaced = [x for x in result.conversion if x["method"] != "softmax"]
    exact = [x for x in result.conversion if x["method"] == "softmax" and "linear already" not in x.get("reason", "")]
    options: dict[str, Any] = replaced[0]["options"] if replaced else {}
    last: Report = list(result.reports.values())[-1]
    # Metadata that the hub reads; what is not surely a name of its kind is left out.
    names_model = re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", result.source, re.ASCII)
    names_licence = re.fullmatch(r"[a-z][a-z0-9.-]*", result.licence)
    return render_markdown(
        Path(__file__).with_name("card.md"),
        result=result,
        name=name,
        base_model=result.source if names_model else "",
        license=result.licence if names_licence else "",
        not_stated=NOT_STATED,
        auto=next(iter(auto_classes(result.model)), "AutoModel"),
        replaced=len(replaced),
        method=replaced[0]["method"] if replaced else "softmax",
        options=options,
        kept=_kept(result),
        rows="window" if any(x.windows is not None for x in result.texts.values()) else "text",
        time=None if result.seconds is None else human_time(result.seconds),
        figures=_figures(result),
        output=f"{last.output:.2g}",
        measured_on=result.texts.get("measured on", f"{last.samples} rows of random tokens"),
        grows=exact or any(x["exact_heads"] for x in replaced),
        versions=", ".join(f"{x} {y}" for x, y in result.environment.items() if x in VERSIONS),
        **_judged(result.judged),
    )


def _kept(result: ConversionResult) -> str:
    """Attentions that were kept exact, with the reasons."""
    setting, kept = result.setting, [x for x in result.conversion if x["method"] == "softmax"]
    reasons: dict[str, list[str]] = {}
    asked = [f"not among --layers {setting.layers}"] if setting.layers else []
    asked += [f"the output needs them most, --keep {setting.keep}"] if setting.keep else []
    by_heads = {name for heads in result.exact_heads.values() for name in heads}
    for x in kept:
        why = "all its heads are" if x["name"] in by_heads else " or ".join(asked)
        reasons.setdefault(x.get("reason") or why, []).append(x["name"])
    parts = (f"{plain(', '.join(names))}{f' ({plain(why)})' if why else ''}" for why, names in reasons.items())
    return "; ".join(parts) or "none"


def _figures(result: ConversionResult) -> str:
    reports: dict[str, Report] = result.reports
    rows = [[name, *map(_number, values)] for name, values in figures(result).items()]
    for i, some in enumerate(zip(*(x.rows for x in reports.values()), strict=True)):
        rows.append([f"attention {i}: {plain(_called(some[-1]))}", *(_number(x.error) for x in some)])
    return table(["", *reports], rows)
