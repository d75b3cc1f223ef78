"""An advice as a page: the verdict, pictures of errors, times and attention mass, and all tables."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from kernelformer.distill.figures import RATIO
from kernelformer.reports.advice import (
    check_rows,
    layer_head,
    layer_rows,
    paste_lines,
    trial_head,
    trial_rows,
    verdict,
)
from kernelformer.reports.advice_result import Advice
from kernelformer.reports.figures import COLOURS, legend_key, style
from kernelformer.reports.page import figure, pre, safe, safe_label, section, table, whole_page


def page(advice: Advice) -> str:
    """The page of an advice, without scripts and network."""
    about = (
        f"{advice.model}, {len(advice.attentions)} attentions, {'causal' if advice.causal else 'bidirectional'}; "
        f"{advice.rows} texts of up to {advice.length} tokens; {advice.minutes:.1f} minutes"
    )
    parts = [
        section("Verdict", *(f"<p>{safe(x)}</p>" for x in verdict(advice)), *map(pre, paste_lines(advice))),
        section("Pictures", f'<div class="figures">{"".join(_pictures(advice))}</div>'),
        section("Attentions", _table("attentions", layer_head(advice), layer_rows(advice)), _legend()),
        section("Candidates", _table("candidates", trial_head(advice), trial_rows(advice))),
    ]
    if advice.checks:
        head = ["attention", "expected", "by", "got on other texts"]
        parts.append(section("Checked by conversions", _table("checks", head, check_rows(advice))))
    notes = [*advice.remarks, *(f"left out for time: {x}" for x in advice.left_out)]
    notes += [f"cannot be: {label} ({reason})" for label, reason in advice.refused.items()]
    if notes:
        parts.append(section("Notes", "<ul>", *(f"<li>{safe(x)}</li>" for x in notes), "</ul>"))
    return whole_page("What this model can be converted to", about, "\n".join(parts))


def _legend() -> str:
    words = (
        "|q|, |k|: root mean square norms of sqrt(scale) q and k. dim.: statistical dimension of 128 tokens. near: "
        "share of a query's weight on keys nearer than 32, 64, 128 tokens; first: on the first tokens; far: on neither "
        "those within 64 tokens nor the first 4. favor+ predicted: relative error of the weights by the closed form. "
        "The other columns: relative error of the output."
    )
    return f'<p class="soft">{safe(words)}</p>'


def _table(name: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = [[safe_label(row[0]), *map(safe, row[1:])] for row in rows]
    return table(name, [safe_label(x) for x in head], cells, "results")


Lines = dict[str, tuple[Sequence[float], Sequence[float]]]  # by label, x and y


def _pictures(advice: Advice) -> list[str]:
    calls = "attention, in the order of the calls"
    drawn = [
        _lines(
            "errors", "Error of each attention", _errors(advice), xlabel=calls, ylabel="relative error", yscale="log"
        ),
        _lines("mass", "Where the weight of a query is", _mass(advice), xlabel=calls, ylabel="share", ylim=(0, 1.02)),
    ]
    title = f"{advice.kind} against the mean error"
    told = [f"{x.label} {x.figure.value:.4g} at {x.errors.mean:.3g}" for x in advice.trials if x.figure is not None]
    drawn.append(figure("runs", title, f"{title}: {', '.join(told)}", lambda axis: _draw_runs(axis, advice)))
    if advice.curve:
        scales = {"xlabel": "tokens", "ylabel": "seconds", "xscale": "log", "yscale": "log"}
        drawn.append(_lines("times", "Time by length", _times(advice), **scales))
    return drawn


def _lines(name: str, title: str, lines: Lines, **axes: Any) -> str:
    """A figure of lines with its legend below it, and their ends in words."""

    def draw(axis: Any) -> None:
        for index, (x, y) in enumerate(lines.values()):
            axis.plot(x, y, **style(index))
        axis.set(**axes)

    keys = (f"<li>{legend_key(f'{name}{i}', i)}{safe_label(label)}</li>" for i, label in enumerate(lines))
    told = ", ".join(f"{label} from {y[0]:.3g} to {y[-1]:.3g}" for label, (_, y) in lines.items() if y)
    return figure(name, title, f"{title}: {told}", draw, below=f'<ul class="legend">{"".join(keys)}</ul>')


def _errors(advice: Advice) -> Lines:
    """Error by attention, of the best trial of each method."""
    best: dict[str, Any] = {}
    for x in sorted(advice.trials, key=lambda x: x.errors.mean):
        best.setdefault(x.candidate.method, x)
    return {x.label: (range(len(advice.calls)), x.errors.layers) for x in best.values()}


def _mass(advice: Advice) -> Lines:
    shares = {
        "near (64 tokens)": [statistics.fmean(x.near[64]) for x in advice.profiles],
        "first 4": [statistics.fmean(x.first[4]) for x in advice.profiles],
        "far": [statistics.fmean(x.far) for x in advice.profiles],
    }
    return {label: (range(len(advice.calls)), values) for label, values in shares.items()}


def _times(advice: Advice) -> Lines:
    lengths = [x.length for x in advice.curve]
    return {
        advice.chosen: (lengths, [x.seconds for x in advice.curve]),
        "exact": (lengths, [x.exact for x in advice.curve]),
    }


def _draw_runs(axis: Any, advice: Advice) -> None:
    """Figures that were measured, and those that are expected."""
    run = [(x.errors.mean, x.figure.value) for x in advice.trials if x.figure is not None]
    values = [(x.errors.mean, advice.expected_value(x)) for x in advice.trials if x.expected is not None]
    for points, label, marker in ((run, "measured", "o"), (values, "predicted", "x")):
        if points:
            axis.plot(*zip(*points, strict=True), marker, label=label, color=COLOURS[marker == "x"])
    axis.axhline(advice.tolerance, linestyle=":", color="grey", label="asked for")
    axis.set(xlabel="mean relative error of the attentions", ylabel=advice.kind, xscale="log")
    if advice.kind == RATIO:
        axis.set_yscale("log")
    axis.legend(fontsize=10, frameon=False)
