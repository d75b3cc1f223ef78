"""A comparison as one HTML file: no network, no scripts, for the screen (light and dark, wide and narrow) and paper."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from kernelformer.files import write_text
from kernelformer.formatting import human_bytes, human_time
from kernelformer.reports.comparison import (
    CAPTION,
    MARK,
    NONE,
    Comparison,
    RunRecord,
    Summary,
    cells,
    incomparable,
    score,
    smoothed,
)
from kernelformer.reports.figures import legend_key
from kernelformer.reports.page import figure, pre, safe, safe_label, section, table, whole_page
from kernelformer.reports.plots import draw_bars, draw_curves, draw_decode


def write_report(comparison: Comparison, path: Path | str, *, samples: Mapping[str, str] | None = None) -> None:
    """Write the report in one piece: a reader sees the old file or the new one, never a half.

    Args:
        comparison: of runs, finished or not.
        path: of the HTML file; its folder is made if need be.
        samples: texts that the models wrote, by the name of the run.
    """
    target = Path(path)
    if target.is_dir():
        raise ValueError(f"the report's path must be a file, got the folder {target}; add a name such as report.html.")
    page = _page(comparison, samples or {})
    target.parent.mkdir(parents=True, exist_ok=True)
    write_text(target, page)


def words(comparison: Comparison) -> list[str]:
    """What came out, in sentences: the best and by how much, the fastest, the lost and the unfinished."""
    rows = comparison.summary()
    ranked = [row for row in rows if row.mean is not None]
    said = [_best(comparison.metric.replace("_", " "), ranked, rows)]
    if reason := incomparable(comparison):
        said.append(f"{MARK} Speed and memory are marked: {reason[0].lower()}{reason[1:]}")
    timed = [r for r in rows if r.tokens_per_second and not reason]
    timed.sort(key=lambda r: -(r.tokens_per_second or 0))
    if len(timed) > 1:
        (fast, a), (slow, b) = ((r.label, r.tokens_per_second or 1) for r in (timed[0], timed[-1]))
        said.append(f"Fastest in training is {fast} with {a:,.0f} tokens/s, {a / b:.3g} times {slow}, the slowest.")
    contexts = [{c for c, seconds, _ in row.decode if seconds > 0} for row in rows if row.decode and not reason]
    if contexts and (shared := set.intersection(*contexts)):
        at = max(shared)
        quick = sorted((t, r.label, size) for r in rows for c, t, size in r.decode if c == at)
        (a, fast, size), (b, slow, _) = quick[0], quick[-1]
        text = f"With a context of {at:,} tokens {fast} decodes fastest: {human_time(a)} a token"
        slower = f"; {slow} takes {b / a:.3g} times as long" if len(quick) > 1 else ""
        said.append(f"{text}, {human_bytes(size)} of state{slower}.")
    for state, title in (("diverged", "Diverged (a loss was not finite)"), ("unfinished", "Unfinished")):
        some = [f"{run.label} (seed {run.seed}, step {run.step})" for run in comparison.runs if run.state == state]
        said += [f"{title}: {', '.join(some)}."] if some else []
    return said


def _best(metric: str, ranked: Sequence[Summary], rows: Sequence[Summary]) -> str:
    if not ranked:
        return f"No run has finished with a finite {metric}, so that nothing can be said about the best."
    shown = [score(rows, row) for row in ranked[:2]]
    if len(ranked) < 2:
        return f"{ranked[0].label} ({metric} {shown[0]}) has nobody to be compared to."
    a, b = ranked[:2]
    gap = abs((a.mean or 0.0) - (b.mean or 0.0))
    if gap == 0:
        return f"Best are {a.label} and {b.label}, level at {metric} {shown[0]}."
    text = f"Best is {a.label} ({metric} {shown[0]}), ahead of {b.label} ({shown[1]}) by {gap:.2g}"
    if a.deviation is None or b.deviation is None:
        return f"{text}; with one seed there is no spread to judge that by."
    spread = math.hypot(a.deviation, b.deviation)  # of the difference between two single runs
    if gap <= spread:
        return f"{text}, which is within the spread over seeds ({spread:.2g}): the two cannot be told apart."
    return f"{text}, which is beyond the spread over seeds ({spread:.2g})."


def _legend(comparison: Comparison, name: str) -> str:
    items = (f"<li>{legend_key(f'{name}{i}', i)}{safe_label(label)}</li>" for i, label in enumerate(comparison.labels))
    return f'<ul class="legend">{"".join(items)}</ul>'


def _learning(comparison: Comparison) -> str:
    curve, names = comparison.curve.replace("_", " "), ", ".join(comparison.labels)
    scores = {i: smoothed(run.evaluation, comparison.curve, 0) for i, run in enumerate(comparison.runs)}
    losses = {i: smoothed(run.training, "loss", 0.04) for i, run in enumerate(comparison.runs)}
    parts = []
    for kind, curves, height in ((curve, scores, 3.3), ("smoothed training loss", losses, 2.1)):
        for x, over in enumerate(("steps", "training seconds") if any(curves.values()) else ()):
            draw = partial(draw_curves, comparison=comparison, curves=curves, x=x, mark=curves is scores)
            title = f"{kind[:1].upper()}{kind[1:]} over {over}"
            parts.append(figure(f"curve{height:.0f}{x}", title, f"{title}: {names}", draw, height))
    note = (
        "Lines are means over the seeds that finished, bands one standard deviation to either side. Thin lines are "
        "runs without a result; a cross is where one diverged. Frames fit what comes after the first eighth of a run."
    )
    figures = f'<div class="figures">{"".join(parts)}</div><p class="soft">{note}</p>'
    return section("Learning curves", _legend(comparison, "learning"), figures) if parts else ""


def _cost(comparison: Comparison) -> str:
    rows = [row for row in comparison.summary() if row.tokens_per_second is not None]
    if not rows:
        return ""
    parts, mark = [], f" {MARK} (not comparable)" if comparison.unequal else ""
    for name, title, values, show in (
        ("speed", "Training speed, tokens/s", [r.tokens_per_second or 0.0 for r in rows], "{:,.0f}".format),
        ("memory", "Peak memory", [float(r.peak_bytes or 0) for r in rows], human_bytes),
    ):
        given, title = {row.label: value for row, value in zip(rows, values, strict=True)}, f"{title}{mark}"
        alt = f"{title}: {', '.join(f'{label} {show(value)}' for label, value in given.items())}"
        draw = partial(draw_bars, comparison=comparison, values=given, show=show)
        parts.append(figure(name, title, alt, draw, 0.4 + 0.36 * len(rows)))
    return section("Speed and memory", f'<div class="figures">{"".join(parts)}</div>')


def _decoding(comparison: Comparison) -> str:
    names = ", ".join(row.label for row in comparison.summary() if row.decode)
    if not names:
        return ""
    parts = [
        figure(name, title, f"{title}: {names}", partial(draw_decode, comparison=comparison, column=column, show=show))
        for name, title, column, show in (
            ("latency", "Time per token over the length of the context", 1, human_time),
            ("state", "Size of the state over the length of the context", 2, human_bytes),
        )
    ]
    return section("Decoding", _legend(comparison, "decoding"), f'<div class="figures">{"".join(parts)}</div>')


def flat(record: Mapping[str, Any], start: str = "") -> dict[str, str]:
    """Nested values by dotted names, as text."""
    out: dict[str, str] = {}
    for key, value in record.items():
        if isinstance(value, dict) and value:
            out |= flat(value, f"{start}{key}.")
        else:
            out[start + key] = value if isinstance(value, str) else json.dumps(value)
    return out


def records_table(comparison: Comparison, name: str, records: Sequence[Mapping[str, Any]]) -> str:
    """Once what all runs share, then what tells labels apart."""
    plain = [flat(record) for record in records]
    same, other = [], []
    for key in dict.fromkeys(key for record in plain for key in record):
        by: dict[str, dict[str, None]] = {label: {} for label in comparison.labels}
        for run, record in zip(comparison.runs, plain, strict=True):
            by[run.label][record.get(key, NONE)] = None
        if len({value for values in by.values() for value in values}) == 1:
            same.append([safe(key), safe(*by[comparison.labels[0]])])
        elif key not in ("label", "seed"):
            other.append([safe(key), *(safe(" | ".join(values)) for values in by.values())])
    out = table(f"{name} of all runs", ["of all runs", ""], same) if same else ""
    return out + (table(f"{name} by label", ["by label", *map(safe_label, comparison.labels)], other) if other else "")


def _ends(run: RunRecord, metric: str) -> list[str]:
    """The value of a run, that of its test split, and the median, 95th percentile and maximum of its gradient norms."""
    result = run.result
    if result is None:
        return [NONE] * 3

    def measured(value: float, error: float) -> str:
        return f"{value:.6g} ± {error:.2g}" if math.isfinite(error) else f"{value:.6g}"

    test = measured(result.test[metric], result.test_error) if metric in result.test else NONE
    norms = ", ".join(f"{result.grad_norm[name]:.3g}" for name in ("median", "p95", "max") if name in result.grad_norm)
    return [measured(result.value, result.value_error), test, norms or NONE]


def _details(comparison: Comparison) -> str:
    rows, metric = [], comparison.metric
    for run in comparison.runs:
        shown = (run.seed, run.state, *_ends(run, metric), run.step, run.path)
        rows.append([safe_label(run.label), *map(safe, shown)])
    head = ["run", "seed", "state", f"{metric} ± standard error over samples", f"test {metric}", "gradient norm"]
    every = table("every run", [*map(safe, [*head, "steps", "folder"])], rows)
    settings = records_table(comparison, "settings", [run.settings for run in comparison.runs])
    environment = records_table(comparison, "environment", [run.environment for run in comparison.runs])
    commands = pre("\n".join(dict.fromkeys(run.command for run in comparison.runs)))
    parts = (("Every run", every), ("Settings", settings), ("Environment", environment))
    folded = "".join(f"<details><summary>{title}</summary>\n{part}</details>\n" for title, part in parts if part)
    return section("Settings and environment", folded) + section("Commands to reproduce", commands)


def results_table(
    comparison: Comparison,
    places: Mapping[str, int],
    *,
    prefix: str = "row",
    show: Callable[[str], str] = safe_label,
    below: Mapping[str, str] | None = None,
    more: Sequence[Sequence[str]] = (),
) -> str:
    """One row per label with the key of its curves, the best first.

    Args:
        comparison: of runs.
        places: the style of each label.
        prefix: keeps references apart from those of other tables.
        show: a label as HTML.
        below: text that stands under the metric, by label.
        more: further lines of HTML, as long as the others.
    """
    head, lines = cells(comparison)
    marked = []
    for row, line in zip(comparison.summary(), lines, strict=True):
        index = comparison.labels.index(row.label)
        note = f"<small>{safe(row.note)}</small>" if row.note else ""
        key = legend_key(f"{prefix}{index}", places[row.label])
        marked.append([f"{key}{show(row.label)}{note}", *map(safe, line[1:])])
        if (below or {}).get(row.label):
            marked[-1][1] += f"<small>{safe((below or {})[row.label])}</small>"
    kind = "results best" if len(lines) > 1 and comparison.summary()[0].values else "results"
    return table("results", [*map(safe, head)], [*marked, *more], kind)


def _page(comparison: Comparison, samples: Mapping[str, str]) -> str:
    results = results_table(comparison, {label: i for i, label in enumerate(comparison.labels)})
    mark = f"{MARK} {incomparable(comparison)}" if comparison.unequal else ""
    texts = "".join(f"<h3>{safe(name)}</h3>\n{pre(said)}" for name, said in samples.items())
    main = f"""<p>{safe(" ".join(words(comparison)))}</p>
{section("Results", results, f'<p class="soft">{safe(" ".join((CAPTION, mark)).rstrip())}</p>')}
{_learning(comparison)}{_cost(comparison)}{_decoding(comparison)}
{section("Samples", texts) if texts else ""}
{_details(comparison)}"""
    return whole_page(comparison.title, comparison.subtitle, main)
