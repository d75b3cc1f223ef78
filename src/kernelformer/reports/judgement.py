"""The judgement of a converted model: what was measured beside its original, as tables and as a part of its card."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from statistics import fmean
from typing import Any

from rich.table import Table

from kernelformer.distill.hidden_states import standard_error
from kernelformer.distill.parts import CONVERTED, KERNEL, NEAR, ORIGINAL, Figures
from kernelformer.distill.probe import Probe
from kernelformer.reports.markdown import plain, table

HEADING = "## How it was judged"
NOT_JUDGED = "It was not judged beside its original; `kernelformer judge` does that."
GUESS = "-2.3"  # log of 1/10, what guessing a digit gives


@dataclass(frozen=True)
class Recall:
    """Answers of one model to the questions for numbers that were hidden in texts of one length.

    Args:
        length: tokens of a text.
        model: `ORIGINAL`, `CONVERTED` or `NEAR`.
        distances: tokens from each number to its answer.
        right: whether greedy continuation gives the number.
        log_probs: log-probability of each number, by digit.
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
    """What models write after the same beginning, by the model's name."""

    prompt: str
    texts: dict[str, str]


@dataclass
class Judgement:
    """What was measured of a converted model beside its original.

    Args:
        figures: of the whole model by part, see `part_figures`.
        recall: of hidden numbers, by length and model.
        samples: texts of decoders, side by side.
        probe: of encoders.
        measured_on: the inputs of ``figures``, in words.
        seconds: that all of it took.
        remarks: what a user should know.
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
        "perplexity": lambda x: _number(x.perplexity),
        "hidden tokens that are found, share": lambda x: _number(x.accuracy, x.accuracy_error),
        "mean outputs, cosine": lambda x: _number(x.cosine),
        "same best token, share": lambda x: _number(x.agreement),
        "relative error of the output": lambda x: _number(x.output),
    }
    both = {CONVERTED: f"{CONVERTED} (both)"} if NEAR in parts else {}
    rows = [[name, *(show(judgement.figures[x]) for x in parts)] for name, show in names.items()]
    return ["", *(both.get(x, x) for x in parts)], [x for x in rows if any(x[1:])]


def _number(value: float | None, error: float | None = None) -> str:
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


def tables(judgement: Judgement) -> list[Table]:
    """For the terminal: the parts, and the numbers that were found again."""
    shown = []
    titles = ("Both models, and the parts of a hybrid by themselves", f"Numbers hidden in texts ({_recall_note()})")
    for title, (head, rows) in zip(titles, (figure_rows(judgement), recall_rows(judgement)), strict=True):
        if not rows:
            continue
        shown.append(each := Table(title=title))
        for name in head:
            each.add_column(name, justify="right" if name and name != "tokens" else "left")
        for row in rows:
            each.add_row(*row)
    return shown


def remarks(judgement: Judgement | None) -> list[str]:
    """Sentences for the terminal, after the tables."""
    if judgement is None:
        return [f"note: {NOT_JUDGED}"]
    probed = [] if judgement.probe is None else [probe_sentence(judgement.probe)]
    return [*probed, *(f"note: {x}" for x in judgement.remarks)]


def _recall_note() -> str:
    return f"share right, and log-probability of a digit, where guessing gives {GUESS}; mean ± standard error"


def card_section(judgement: Judgement | None) -> str:
    """Section of a model card that says how the model was judged, or that it was not."""
    if judgement is None:
        return f"{HEADING}\n\n{NOT_JUDGED}\n"
    head, rows = figure_rows(judgement)
    parts = [HEADING, f"Measured on {plain(judgement.measured_on)}.", table(head, rows)]
    if NEAR in judgement.figures:
        parts.append(
            "Where attention was replaced, near tokens and the first ones are attended to exactly, the others by a "
            "kernel; each part by itself shows what the other one is good for. Attentions and heads that were kept "
            "exact are so in every column."
        )
    if judgement.recall:
        parts += [
            "A number of five digits stands in a long text, and the text ends with the question for it: "
            f"{_recall_note()}.",
            table(*recall_rows(judgement)),
        ]
    if judgement.probe is not None:
        parts.append(f"- {probe_sentence(judgement.probe)}")
    for sample in judgement.samples:
        written = {"beginning": sample.prompt, **{f"{name} model": x for name, x in sample.texts.items()}}
        parts += [f"{name.capitalize()}:\n\n{_quote(x)}" for name, x in written.items()]
    parts += [f"- note: {plain(x)}" for x in judgement.remarks]
    return "\n\n".join(parts) + "\n"


def _quote(text: str) -> str:
    """A text of others as a quotation, line by line."""
    return "\n>\n".join(f"> {plain(x)}" for x in text.splitlines() if x.strip()) or "> (nothing)"
