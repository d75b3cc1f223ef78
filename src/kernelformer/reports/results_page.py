"""All comparisons on record as one HTML file: attentions by tasks, then each task with table, figures and origin."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain, count
from pathlib import Path
from statistics import fmean
from urllib.parse import quote

from kernelformer.files import write_text
from kernelformer.formatting import human_bytes, human_time
from kernelformer.reports.comparison import CAPTION, MARK, NONE, Comparison, Summary, cells, score, smoothed
from kernelformer.reports.comparison_page import flat, records_table, results_table, words
from kernelformer.reports.figures import COLOURS, STYLES, legend_key
from kernelformer.reports.labels import exact, linear, normalized, parts, rank, series, sides
from kernelformer.reports.page import figure, pre, safe, section, table, whole_page
from kernelformer.reports.plots import draw_curves, draw_points, draw_sizes
from kernelformer.reports.results import Recorded, add_results, in_order, parse, read_results

PAGE = "index.html"
ABOUT = (
    "Attentions trained on the same data in the same order, by kernelformer compare; every section has the command "
    "that makes it again. This page is made by kernelformer results."
)
KEY = (
    '<p class="soft">Mean, below it the standard deviation over n seeds; ↑ higher is better, ↓ lower is better. '
    '<mark class="top">Best</mark> of those shown, <mark class="linear">best</mark> below quadratic time.{more}</p>'
)
LEFT_OUT = (
    " Encoders and decoders of different kinds, and smaller numbers of features where a task has several, are in the "
    "task's own section."
)
COST = (
    "Medians of training time over seeds, below them the largest peak memory, beyond what the process had before. "
    "Compare within a column: tasks differ in steps, and may have been measured on different machines. A star is at "
    "what cannot be compared within its column either; the task's own section says why."
)
READING = (
    f"{CAPTION} In figures lines are means over those seeds, bands and bars one standard deviation to either side; "
    "thin lines are runs without a result, a cross is where one diverged. Time is that of training, without evaluation."
)


def write_results(
    folder: Path, add: Sequence[Path] = (), day: str | None = None
) -> tuple[list[Path], list[Recorded], list[Path]]:
    """Put comparisons on record, and show all that are on record on one page.

    Everything is read and checked, and the page is made, before the first file is written.

    Args:
        folder: of the records; it is made if there is something to add.
        add: folders of `kernelformer compare`.
        day: of those, as YYYY-MM-DD; None: when they were made.

    Returns:
        The files written, the page last; what the page shows; files of other kinds, which it does not show.
    """
    new = add_results(add, folder, day)
    old = read_results(folder, without=new) if folder.exists() or not new else []
    fresh = [parse(path, json.loads(text)) for path, text in new.items()]
    records = in_order([*old, *(x for x in fresh if x is not None)])
    if not records:
        raise ValueError(f"{folder} has no comparison on record; add one by --add FOLDER.")
    files = {**new, folder / PAGE: results_page(records)}
    folder.mkdir(parents=True, exist_ok=True)
    for path, text in files.items():
        write_text(path, text)
    shown = {record.path for record in records}
    return list(files), records, [path for path in sorted(folder.glob("*.json")) if path not in shown]


def results_page(records: Sequence[Recorded]) -> str:
    """The page; the same records give the same text.

    Args:
        records: in the order of `read_results`: of those of one name the last is shown, the others are folded.
    """
    by_name: dict[str, list[Recorded]] = {}
    for record in records:
        by_name.setdefault(record.name, []).append(record)
    anchors: dict[str, str] = {}
    for name in by_name:
        slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "task"
        some = chain([slug], (f"{slug}-{i}" for i in count(1)))
        anchors[name] = next(x for x in some if x not in anchors.values())
    newest = [some[-1] for some in by_name.values()]
    places = _places(records)
    shown = [_task(anchors[name], some, places) for name, some in by_name.items()]
    main = "\n".join([_overview(newest, anchors, places), *shown])
    return whole_page("Results on record", ABOUT, main, "wide")


def _places(records: Sequence[Recorded]) -> dict[str, int]:
    """A style for each attention, the same in all tasks, and in colours that differ within a task as far as they go."""
    tasks = [{normalized(label) for label in record.comparison.labels} for record in records]
    every = [label for task in tasks for label in task]
    styles: dict[str, int] = {}
    for label in sorted(set(every), key=lambda x: (-every.count(x), rank(x))):
        near = {x for task in tasks if label in task for x in task if x in styles}
        colours = Counter(styles[x] % len(COLOURS) for x in near)
        free = [i for i in range(max(STYLES, len(styles) + 1)) if i not in styles.values()]
        styles[label] = min(free, key=lambda i: (colours[i % len(COLOURS)], i))
    return styles


def _method(label: str) -> str:
    """The label as HTML: methods, and small what is optional."""
    both = sides(label)
    shown = []
    for side in both if both[0] != both[1] else both[:1]:
        some = []
        for part in parts(side):
            options = f"<small>{safe(', '.join(part.options))}</small>" if part.options else ""
            some.append(f"{safe(str(part.plain))}{options}")
        shown.append(" + ".join(some))
    return " &gt; ".join(shown)


def _arrow(comparison: Comparison) -> str:
    """The metric and its sense, as HTML."""
    return f"{safe(comparison.metric.replace('_', ' '))}&nbsp;{'↑' if comparison.higher_is_better else '↓'}"


def _scores(comparison: Comparison, rows: Sequence[Summary]) -> tuple[dict[str, str], int]:
    """Means and deviations by label as HTML, and their usual number of seeds.

    The best of these rows and the best below quadratic time have marks.
    """
    choose = max if comparison.higher_is_better else min
    means = {row.label: row.mean for row in rows if row.mean is not None}
    best = choose(means.values(), default=None)
    quick = choose((x for label, x in means.items() if linear(label)), default=None)
    count = max((len(row.values) for row in rows), default=0)
    cells = {}
    for row in rows:
        mean, _, spread = score(rows, row).partition(" ± ")
        kinds = ["top"] * (row.mean == best) + ["linear"] * (row.mean == quick and linear(row.label))
        if kinds and row.mean is not None and len(means) > 1:
            mean = f'<mark class="{" ".join(kinds)}">{mean}</mark>'
        notes = [f"± {spread}"] * bool(spread) + [f"n = {len(row.values)}"] * (0 < len(row.values) < count)
        cells[row.label] = mean + (f"<small>{', '.join(notes)}</small>" if notes else "")
    return cells, count


def _overview(records: Sequence[Recorded], anchors: Mapping[str, str], places: Mapping[str, int]) -> str:
    columns = [_column(record, records) for record in records]
    labels = sorted({label for column in columns for label in column}, key=rank)
    heads, plain, values, costs = ["attention"], ["attention"], [], []
    for record, column in zip(records, columns, strict=True):
        scores, count = _scores(record.comparison, list(column.values()))
        plain.append(f'<a href="#{anchors[record.name]}">{safe(record.name)}</a>')
        heads.append(f"{plain[-1]}<small>{_arrow(record.comparison)}</small><small>n = {count}</small>")
        values.append({label: scores[row.label] for label, row in column.items()})
        mark = MARK if record.comparison.unequal else ""
        costs.append({label: _cost(row, mark) for label, row in column.items()})

    def by_task(name: str, prefix: str, head: Sequence[str], columns: Sequence[Mapping[str, str]]) -> str:
        keys = [f"{legend_key(f'{prefix}{i}', places[label])}{_method(label)}" for i, label in enumerate(labels)]
        lines = [[k, *(x.get(label, NONE) for x in columns)] for k, label in zip(keys, labels, strict=True)]
        return table(name, head, lines, "results overview")

    left = any(len(column) < len(x.comparison.labels) for x, column in zip(records, columns, strict=True))
    first = by_task("attentions by tasks", "all", heads, values)
    second = by_task("training time and peak memory by tasks", "cost", plain, costs)
    return (
        section("Attentions by tasks", first, KEY.format(more=LEFT_OUT if left else ""))
        + section("Training time and peak memory", second, f'<p class="soft">{COST}{_waiting(records)}</p>')
        + section("How to read what follows", f"<p>{READING}</p>")
    )


def _column(record: Recorded, records: Sequence[Recorded]) -> dict[str, Summary]:
    """Rows of one task by attention: one side for both, and of a series the largest and those that others have too."""
    rows = {row.label: row for row in record.comparison.summary()}
    others = {normalized(x) for r in records if r is not record for x in r.comparison.labels}
    small = {x for some in series(rows).values() for x in list(some.values())[:-1] if normalized(x) not in others}
    alike = [x for x in rows if sides(x)[0] == sides(x)[1] and x not in small]
    summaries: dict[str, Summary] = {}
    for label in alike or rows:
        summaries.setdefault(normalized(label), rows[label])
    return summaries


def _cost(row: Summary, mark: str) -> str:
    if row.seconds is None:
        return NONE
    return f"{safe(human_time(row.seconds))}{mark}<small>{safe(human_bytes(row.peak_bytes))}</small>"


def _waiting(records: Sequence[Recorded]) -> str:
    """The largest share of training time that a run of each task has spent on getting batches, where it is known."""
    waits = []
    for record in records:
        ends = [run.result for run in record.comparison.runs if run.result is not None and run.result.seconds]
        shares = [x.input_seconds / x.seconds for x in ends if math.isfinite(x.input_seconds)]
        if shares:
            waits.append(f"{record.name} {max(shares):.1%}")
    return f" Of that time runs waited for their next batch at most: {safe(', '.join(waits))}." if waits else ""


def _task(anchor: str, records: Sequence[Recorded], places: Mapping[str, int]) -> str:
    """One task: its newest comparison, and folded the earlier ones."""
    *earlier, record = records
    comparison = record.comparison
    mine = {label: places[normalized(label)] for label in comparison.labels}
    said = " ".join(x for x in (_sentence(record.source), _sentence(record.note)) if x)
    body = [
        f"<p>{safe(_sentence(comparison.subtitle))}</p>" if comparison.about else "",
        f'<p class="soft">{safe(_settings(record))}</p>',
        f'<p class="distance"><strong>Against the paper:</strong> {safe(said)}</p>' if said else "",
        f"<p>{safe(' '.join(words(comparison)))}</p>",
        _results(record, mine, anchor),
        _pairs(comparison),
        _figures(record, mine, anchor),
        _origin(record),
    ]
    for i, old in enumerate(earlier):
        looks = {label: places[normalized(label)] for label in old.comparison.labels}
        body.append(
            f"<details><summary>Before, {safe(old.date or old.path.name)}</summary>\n"
            f"{_results(old, looks, f'{anchor}-before{i}')}{_origin(old)}</details>"
        )
    return section(record.name, *body, anchor=anchor)


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + ("" if not text or text[-1] in ".!?" else ".")


def _settings(record: Recorded) -> str:
    """Model, data, steps and seeds in one line."""
    runs = [flat(run.settings) for run in record.comparison.runs]
    settings = {key: " | ".join(dict.fromkeys(x[key] for x in runs if key in x)) for run in runs for key in run}
    said = {"num_hidden_layers": "{} layers", "hidden_size": "width {}", "num_attention_heads": "{} heads"}

    def named(start: str) -> str:
        some = {key.removeprefix(start): x for key, x in settings.items() if key.startswith(start)}
        first = [text.format(some[name]) for name, text in said.items() if name in some]
        return ", ".join(first + [f"{name.replace('_', ' ')} {x}" for name, x in some.items() if name not in said])

    training = [
        f"{settings.get('steps', NONE)} steps of {settings.get('batch_size', NONE)} samples",
        f"learning rate {settings.get('learning_rate', NONE)}",
    ]
    seeds = f"seed{'s' * (len(record.seeds) > 1)} {', '.join(map(str, record.seeds))}"
    given = (("Model: ", named("model.")), ("task: ", named("task_options.")), ("", ", ".join(training)), ("", seeds))
    return "; ".join(f"{what}{text}" for what, text in given if text) + "."


def _results(record: Recorded, places: Mapping[str, int], anchor: str) -> str:
    comparison = record.comparison
    others = {row.label: _others(row, comparison) for row in comparison.summary()}
    more = []
    for name, scores in record.baselines.items():
        value = f"{scores[comparison.metric]:.4g}" if comparison.metric in scores else NONE
        rest = _listed({key: x for key, x in scores.items() if key != comparison.metric})
        below = f"<small>{safe(rest)}</small>" if rest else ""
        blank = [NONE] * (len(cells(comparison)[0]) - 2)
        more.append([f'<span class="plain"></span>{safe(name)}<small>no model</small>', safe(value) + below, *blank])
    return results_table(comparison, places, prefix=f"{anchor}-row", show=_method, below=others, more=more)


def _others(row: Summary, comparison: Comparison) -> str:
    """Means of all scores without a column."""
    values: dict[str, list[float]] = {}
    for run in row.runs:
        for name, x in run.result.scores.items() if run.result else ():
            if name not in (comparison.metric, *comparison.extra_metrics) and math.isfinite(x):
                values.setdefault(name, []).append(x)
    return _listed({name: fmean(some) for name, some in values.items()})


def _listed(scores: Mapping[str, float]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {x:.4g}" for name, x in scores.items())


def _pairs(comparison: Comparison) -> str:
    """Encoders by decoders (NPRF with RPE, Table 3), where somebody has mixed them."""
    rows = {sides(row.label): row for row in comparison.summary()}
    if all(first == second for first, second in rows):
        return ""
    scores, count = _scores(comparison, list(rows.values()))
    encoders, decoders = (sorted({pair[i] for pair in rows}, key=rank) for i in (0, 1))
    lines = [[_method(x), *(scores[rows[x, y].label] if (x, y) in rows else NONE for y in decoders)] for x in encoders]
    head = ["encoder \\ decoder", *map(_method, decoders)]
    title = f"<h3>Encoders by decoders, {_arrow(comparison)}, n = {count}</h3>"
    return title + table("encoders by decoders", head, lines, "pairs") + KEY.format(more="")


def _figures(record: Recorded, places: Mapping[str, int], anchor: str) -> str:
    comparison, curve = record.comparison, record.curve.replace("_", " ")
    rows = [row for row in comparison.summary() if row.mean is not None]
    metric = comparison.metric.replace("_", " ")
    names = ", ".join(comparison.labels)
    made = []
    curves = {i: smoothed(run.evaluation, record.curve, 0) for i, run in enumerate(comparison.runs)}
    if any(curves.values()):
        title = f"Validation {curve} over training time"
        draw: Callable[..., None] = partial(
            draw_curves, comparison=comparison, curves=curves, x=1, mark=True, places=places
        )
        made.append(figure(f"{anchor}-curve", title, f"{title}: {names}", draw))
    if len(rows) > 1 and not comparison.unequal:
        points = [(places[x.label], x.tokens_per_second or 0.0, x.mean or 0.0, x.deviation or 0.0) for x in rows]
        title = f"Final {metric} over training speed"
        told = ", ".join(f"{x.label} {x.mean:.4g} at {x.tokens_per_second or 0:,.0f} tokens/s" for x in rows)
        draw = partial(draw_points, rows=points, name="tokens/s")
        made.append(figure(f"{anchor}-speed", title, f"{title}: {told}", draw))
    made += _sizes(comparison, places, anchor)
    return f'<div class="figures">{"".join(made)}</div>' if made else ""


def _sizes(comparison: Comparison, places: Mapping[str, int], anchor: str) -> list[str]:
    """The metric over the number of features (NPRF with RPE, Fig. 3a), where labels differ in nothing else."""
    rows = {row.label: row for row in comparison.summary() if row.mean is not None}
    sizes = {base: {size: x for size, x in some.items() if x in rows} for base, some in series(rows).items()}
    lines = {
        places[list(some.values())[-1]]: [
            (size, rows[x].mean or 0.0, rows[x].deviation or 0.0) for size, x in some.items()
        ]
        for some in sizes.values()
    }
    if not lines:
        return []
    levels = {places[x]: row.mean or 0.0 for x, row in rows.items() if exact(x)}
    named = dict(zip(lines, sizes, strict=True)) | {places[x]: x for x in rows if places[x] in levels}
    keys = (f"<li>{legend_key(f'{anchor}-size{i}', i)}{_method(x)}</li>" for i, x in named.items())
    title = f"Final {comparison.metric.replace('_', ' ')} over the number of features"
    draw = partial(draw_sizes, series=lines, levels=levels, name="features")
    legend = f'<ul class="legend">{"".join(keys)}</ul>'
    return [figure(f"{anchor}-size", title, f"{title}: {', '.join(sizes)}", draw, below=legend)]


def _origin(record: Recorded) -> str:
    """Where the figures come from: the date, the seeds, the versions, the command, and all settings."""
    versions = ", ".join(f"{key} {x}" for key, x in flat(record.environment).items() if key != "date")
    seeds = ", ".join(map(str, record.seeds))
    target = quote(record.path.name, errors="surrogateescape")
    file = f'<a href="./{target}">{safe(record.path.name)}</a>'
    settings = records_table(record.comparison, "settings", [run.settings for run in record.comparison.runs])
    when = f"Measured on {record.date}" if record.date else "Measured at an unknown date"
    return (
        f'<p class="soft">{safe(when)}, seed{"s" * (len(record.seeds) > 1)} {safe(seeds)}; all numbers: {file}. '
        f"{safe(_sentence(versions))}</p>{pre(record.command) if record.command else ''}"
        f'<details class="settings"><summary>All settings</summary>\n{settings}</details>'
    )
