"""A comparison as one HTML file: no network, no scripts, for the screen (light and dark, wide and narrow) and paper."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from kernelformer.analysis.comparison import CAPTION, NONE, Comparison, Summary, cells, score, smoothed
from kernelformer.analysis.figures import draw_bars, draw_curves, draw_decode, legend_key, svg
from kernelformer.files import write_text
from kernelformer.units import human_bytes, human_time, visible

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
CSS = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1b1e23; --soft: #5b6270; --line: #dde1e7; --card: #f8f9fb;
  --mark: #e8f1f9; --font: system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif }
@media screen and (prefers-color-scheme: dark) {
  :root { --paper: #14161a; --ink: #e4e7ec; --soft: #a2a9b5; --line: #333943; --card: #1b1e24; --mark: #1b2b39 } }
body { box-sizing: border-box; margin: 0 auto; padding: 1.5rem 1rem 4rem; max-width: 1100px; overflow-wrap: anywhere;
  background: var(--paper); color: var(--ink); font: 1rem/1.55 var(--font) }
h1 { font-size: 1.8rem; line-height: 1.2; margin: 0 0 .4rem }
h2 { font-size: 1.2rem; margin: 2.2rem 0 .8rem; padding-bottom: .3rem; border-bottom: 1px solid var(--line) }
h3 { font-size: 1rem; margin: 1.2rem 0 .4rem } p { margin: .7rem 0; max-width: 54rem }
.soft, small { color: var(--soft); font-size: .875em; font-weight: 400 }
.scroll { overflow-x: auto }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; overflow-wrap: normal }
th, td { padding: .45rem .7rem; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top }
th { font-weight: 500; min-width: 8rem; overflow-wrap: break-word }
thead th { color: var(--soft); font-weight: 600; min-width: 0; vertical-align: bottom }
.results { width: 100% } .results td, .results thead th + th { text-align: right }
.results td { white-space: nowrap } .results small { display: block; text-indent: 0 }
.results tbody th { min-width: min(14rem, 45vw); padding-left: 3.7rem; text-indent: -3rem }
.best tbody > :first-child { background: var(--mark) } .best tbody > :first-child > :nth-child(-n+2) {font-weight: 700}
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); gap: 1rem }
figure, pre { padding: .8rem; background: var(--card); border: 1px solid var(--line); border-radius: .5rem }
figure { margin: 0; break-inside: avoid } figcaption { font-weight: 600; margin-bottom: .5rem }
svg { display: block; width: 100%; height: auto; stroke-linejoin: round }
svg text { font-family: var(--font) !important }
svg.key { display: inline-block; width: 2.5rem; height: .85rem; vertical-align: -.1rem; margin-right: .5rem }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1.4rem; list-style: none; margin: 0 0 .8rem; padding: 0 }
pre { font-size: .85rem; white-space: pre-wrap; margin: .3rem 0 1rem }
summary { cursor: pointer; font-weight: 600; padding: .4rem 0 }
@media print {
  body { max-width: none; padding: 0; font-size: 9.5pt }
  .figures { grid-template-columns: 1fr 1fr }
  table { font-size: 7.5pt; overflow-wrap: anywhere }
  th, td { padding: .3em .5em }
  .results td { white-space: normal }
  details::details-content { content-visibility: visible; display: block }
  section { break-inside: avoid } }
"""


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
    timed = sorted((r for r in rows if r.tokens_per_second), key=lambda r: -(r.tokens_per_second or 0))
    if len(timed) > 1:
        (fast, a), (slow, b) = ((r.label, r.tokens_per_second or 1) for r in (timed[0], timed[-1]))
        said.append(f"Fastest in training is {fast} with {a:,.0f} tokens/s, {a / b:.3g} times {slow}, the slowest.")
    contexts = [{c for c, seconds, _ in row.decode if seconds > 0} for row in rows if row.decode]
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


def _text(value: object) -> str:
    return html.escape(visible(value), quote=True)


def _label(value: str) -> str:
    return _text(value).replace(":", ":<wbr>")  # a long one breaks between its options


def _pre(value: str) -> str:
    shown = html.escape(visible(value, keep="\n\t"), quote=True)
    return f"<pre>\n{shown}</pre>"  # the first line break is not shown


def _table(name: str, head: Sequence[str], lines: Sequence[Sequence[str]], kind: str = "") -> str:
    """A table in a box of its own that scrolls; cells are HTML, the first of a line is its heading."""
    top = "".join(f'<th scope="col">{x}</th>' for x in head)
    rows = "".join(
        f'<tr><th scope="row">{first}</th>{"".join(f"<td>{x}</td>" for x in others)}</tr>' for first, *others in lines
    )
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{_text(name)}"><table class="{kind}">'
        f"<thead><tr>{top}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _figure(name: str, title: str, alt: str, draw: Callable[[Any], None], height: float = 3.3) -> str:
    return f"<figure><figcaption>{_text(title)}</figcaption>{svg(name, alt, draw, (5.2, height))}</figure>"


def _legend(comparison: Comparison, name: str) -> str:
    items = (f"<li>{legend_key(f'{name}{i}', i)}{_label(label)}</li>" for i, label in enumerate(comparison.labels))
    return f'<ul class="legend">{"".join(items)}</ul>'


def _section(title: str, *parts: str) -> str:
    return f"<section><h2>{_text(title)}</h2>\n{''.join(parts)}</section>"


def _learning(comparison: Comparison) -> str:
    metric, names = comparison.metric.replace("_", " "), ", ".join(comparison.labels)
    scores = {i: smoothed(run.evaluation, comparison.metric, 0) for i, run in enumerate(comparison.runs)}
    losses = {i: smoothed(run.training, "loss", 0.04) for i, run in enumerate(comparison.runs)}
    parts = []
    for kind, curves, height in ((metric, scores, 3.3), ("smoothed training loss", losses, 2.1)):
        for x, over in enumerate(("steps", "training seconds") if any(curves.values()) else ()):
            draw = partial(draw_curves, comparison=comparison, curves=curves, x=x, mark=curves is scores)
            title = f"{kind[:1].upper()}{kind[1:]} over {over}"
            parts.append(_figure(f"curve{height:.0f}{x}", title, f"{title}: {names}", draw, height))
    note = (
        "Lines are means over the seeds that finished, bands one standard deviation to either side. Thin lines are "
        "runs without a result; a cross is where one diverged. Frames fit what comes after the first eighth of a run."
    )
    figures = f'<div class="figures">{"".join(parts)}</div><p class="soft">{note}</p>'
    return _section("Learning curves", _legend(comparison, "learning"), figures) if parts else ""


def _cost(comparison: Comparison) -> str:
    rows = [row for row in comparison.summary() if row.tokens_per_second is not None]
    if not rows:
        return ""
    parts = []
    for name, title, values, show in (
        ("speed", "Training speed, tokens/s", [r.tokens_per_second or 0.0 for r in rows], "{:,.0f}".format),
        ("memory", "Peak memory", [float(r.peak_bytes or 0) for r in rows], human_bytes),
    ):
        given = {row.label: value for row, value in zip(rows, values, strict=True)}
        alt = f"{title}: {', '.join(f'{label} {show(value)}' for label, value in given.items())}"
        draw = partial(draw_bars, comparison=comparison, values=given, show=show)
        parts.append(_figure(name, title, alt, draw, 0.4 + 0.36 * len(rows)))
    return _section("Speed and memory", f'<div class="figures">{"".join(parts)}</div>')


def _decoding(comparison: Comparison) -> str:
    names = ", ".join(row.label for row in comparison.summary() if row.decode)
    if not names:
        return ""
    parts = [
        _figure(name, title, f"{title}: {names}", partial(draw_decode, comparison=comparison, place=place, show=show))
        for name, title, place, show in (
            ("latency", "Time per token over the length of the context", 1, human_time),
            ("state", "Size of the state over the length of the context", 2, human_bytes),
        )
    ]
    return _section("Decoding", _legend(comparison, "decoding"), f'<div class="figures">{"".join(parts)}</div>')


def _flat(record: Mapping[str, Any], start: str = "") -> dict[str, str]:
    out: dict[str, str] = {}
    for key, value in record.items():
        if isinstance(value, dict) and value:
            out |= _flat(value, f"{start}{key}.")
        else:
            out[start + key] = value if isinstance(value, str) else json.dumps(value)
    return out


def _records(comparison: Comparison, name: str, records: Sequence[Mapping[str, Any]]) -> str:
    """Once what all runs share, then what tells labels apart."""
    flat = [_flat(record) for record in records]
    same, other = [], []
    for key in dict.fromkeys(key for record in flat for key in record):
        by: dict[str, dict[str, None]] = {label: {} for label in comparison.labels}
        for run, record in zip(comparison.runs, flat, strict=True):
            by[run.label][record.get(key, NONE)] = None
        if len({value for values in by.values() for value in values}) == 1:
            same.append([_text(key), _text(*by[comparison.labels[0]])])
        elif key not in ("label", "seed"):
            other.append([_text(key), *(_text(" | ".join(values)) for values in by.values())])
    out = _table(f"{name} of all runs", ["of all runs", ""], same) if same else ""
    return out + (_table(f"{name} by label", ["by label", *map(_label, comparison.labels)], other) if other else "")


def _details(comparison: Comparison) -> str:
    rows = []
    for run in comparison.runs:
        value = f"{run.result.value:.6g}" if run.result else NONE
        rows.append([_label(run.label), *map(_text, (run.seed, run.state, value, run.step, run.path))])
    every = _table("every run", ["run", "seed", "state", _text(comparison.metric), "steps", "folder"], rows)
    settings = _records(comparison, "settings", [run.settings for run in comparison.runs])
    environment = _records(comparison, "environment", [run.environment for run in comparison.runs])
    commands = _pre("\n".join(dict.fromkeys(run.command for run in comparison.runs)))
    parts = (("Every run", every), ("Settings", settings), ("Environment", environment))
    folded = "".join(f"<details><summary>{title}</summary>\n{part}</details>\n" for title, part in parts if part)
    return _section("Settings and environment", folded) + _section("Commands to reproduce", commands)


def _page(comparison: Comparison, samples: Mapping[str, str]) -> str:
    head, lines = cells(comparison)
    marked = []
    for row, line in zip(comparison.summary(), lines, strict=True):
        index = comparison.labels.index(row.label)
        note = f"<small>{_text(row.note)}</small>" if row.note else ""
        marked.append([f"{legend_key(f'row{index}', index)}{_label(row.label)}{note}", *map(_text, line[1:])])
    kind = "results best" if len(lines) > 1 and comparison.summary()[0].values else "results"
    texts = "".join(f"<h3>{_text(name)}</h3>\n{_pre(text)}" for name, text in samples.items())
    title = _text(comparison.title)
    return f"""<!DOCTYPE html>
<html lang="en"><head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>{CSS}</style>
</head><body>
<header><h1>{title}</h1>
<p class="soft">{_text(comparison.about)}</p></header>
<main>
<p>{_text(" ".join(words(comparison)))}</p>
{_section("Results", _table("results", [*map(_text, head)], marked, kind), f'<p class="soft">{_text(CAPTION)}</p>')}
{_learning(comparison)}{_cost(comparison)}{_decoding(comparison)}
{_section("Samples", texts) if texts else ""}
{_details(comparison)}
</main>
</body></html>
"""
