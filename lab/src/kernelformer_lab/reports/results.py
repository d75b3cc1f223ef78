"""All comparisons on record as one HTML file: attentions by tasks, then each task with table, figures and origin."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date as calendar_date
from functools import partial
from itertools import chain, count, pairwise
from pathlib import Path
from statistics import fmean
from typing import Any
from urllib.parse import quote

from markupsafe import Markup

from kernelformer.errors import flag, integer, number
from kernelformer.files import write_text
from kernelformer.formatting import human_bytes, human_time
from kernelformer.modules import METHODS, AttentionSpec
from kernelformer.page import (
    COLOURS,
    STYLES,
    Drawing,
    figure,
    legend_key,
    render,
    safe,
    small,
)
from kernelformer_lab.records import BY_NAME, Result, part, portable, readable_json, rounded
from kernelformer_lab.reports.comparison import (
    CAPTION,
    MARK,
    NONE,
    Comparison,
    HtmlTable,
    Point,
    RunRecord,
    Summary,
    cells,
    draw_curves,
    draw_points,
    draw_sizes,
    flat,
    records_tables,
    results_table,
    score,
    smoothed,
    words,
)
from kernelformer_lab.tasks import TASKS
from kernelformer_lab.training.config import join_sides, parse_blocks, parse_sides

FIGURES = "comparison.json"  # what `kernelformer compare` leaves
FIRST = ("title", "recipe", "task", "about", "source", "note", "date", "metric", "higher_is_better", "curve")
LAST = ("command", "environment", "baselines", "settings", "runs")
DATED = re.compile(r"(?P<date>\d{4}-\d\d-\d\d)-(?P<name>.+)", re.DOTALL)


@dataclass(frozen=True)
class RecordedRun(RunRecord):
    """A run of which only the evaluation and the end are left: it has diverged if its end says so."""

    @property
    def diverged(self) -> bool:
        """True where a loss, or the final value, was not finite."""
        return self.result is not None and (self.result.diverged or not self.scored)


@dataclass(frozen=True)
class Recorded:
    """A comparison with all that is known of how it was made; texts may be empty.

    Args:
        name: of the file, without its date.
        source: the paper that it follows, or why it is as it is.
        note: how far it is from the paper's setting.
        curve: what was measured between the start and the end: the metric, or what stands for it.
        baselines: scores by name, of what needs no model.
    """

    path: Path
    name: str
    date: str
    comparison: Comparison
    task: str
    source: str
    note: str
    curve: str
    command: str
    environment: dict[str, Any]
    baselines: dict[str, dict[str, float]]

    @property
    def seeds(self) -> list[int]:
        """Seeds of all runs."""
        return sorted({run.seed for run in self.comparison.runs})


def read_results(folder: Path | str, without: Collection[Path] = ()) -> list[Recorded]:
    """All comparisons among the ``.json`` files of a folder, by name, those of one name by date.

    Files of other kinds are left out; one that is damaged is named.

    Args:
        without: paths of files not to be read.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; name the one with the results on record, or add to it first.")
    parsed = [parse(path, load(path)) for path in sorted(folder.glob("*.json")) if path not in without]
    return in_order(record for record in parsed if record is not None)


def in_order(records: Iterable[Recorded]) -> list[Recorded]:
    """Sort records by name, then by date; a name has one metric."""
    ordered = sorted(records, key=lambda x: (x.name, x.date, x.path.stem != x.name))
    for one, other in pairwise(ordered):
        a, b = one.comparison, other.comparison
        if one.name == other.name and (a.metric, a.higher_is_better) != (b.metric, b.higher_is_better):
            raise ValueError(
                f"{one.path} and {other.path} are both called {one.name!r}, but one is measured by {_sense(a)} and "
                f"the other by {_sense(b)}; rename or remove one."
            )
    return ordered


def _sense(comparison: Comparison) -> str:
    return f"{comparison.metric!r} ({'higher' if comparison.higher_is_better else 'lower'} is better)"


def load(path: Path) -> Any:
    """Read a JSON file; errors name it."""
    try:
        return json.loads(path.read_bytes().decode())
    except (ValueError, RecursionError) as problem:
        raise ValueError(f"{path}: not JSON: {problem}; put it right or remove it.") from None


def parse(path: Path, record: Any) -> Recorded | None:
    """Read a record of `kernelformer compare` or of `make_record`; None: of another kind."""
    if not isinstance(record, dict) or "runs" not in record:
        return None
    try:
        return _parse(path, portable(record))
    except (ValueError, RecursionError) as problem:
        text = str(problem)
        raise ValueError(text if text.startswith(str(path)) else f"{path}: {text}") from None


def _parse(path: Path, record: Mapping[str, Any]) -> Recorded:
    metric = part(record, "metric", str)
    environment = part({"environment": {}, **record}, "environment", dict)
    runs = [_run(path, index, record) for index in range(len(part(record, "runs", list)))]
    if not runs:
        raise ValueError("a comparison needs at least one run, got none.")
    task = _text(record, "task") or str(runs[0].settings.get("task", ""))
    known = TASKS.get(task)
    higher = record.get("higher_is_better")
    if higher is None:
        if known is None or known.metric != metric:
            raise ValueError(
                f"nothing says whether {metric!r} of task {task!r} is better when higher; add "
                f'"higher_is_better": true or false to the file.'
            )
        higher = known.higher_is_better
    about = _text(record, "about") or (known.about if known else "")
    baselines = {} if record.get("baselines") is None else part(record, "baselines", dict)
    named = DATED.fullmatch(path.stem)
    return Recorded(
        path=path,
        name=named["name"] if named else path.stem,
        date=_day(named["date"] if named else None) or _made(record),
        comparison=Comparison(
            _text(record, "title"), metric, flag("higher_is_better", higher), about, runs, _extra_metrics(record)
        ),
        task=task,
        source=_text(record, "source"),
        note=_text(record, "note"),
        curve=_text(record, "curve") or metric,
        command=_text(record, "command"),
        environment=environment,
        baselines={name: _scores(name, x, metric) for name, x in baselines.items()},
    )


def _text(record: Mapping[str, Any], key: str) -> str:
    return "" if record.get(key) is None else str(part(record, key, str))


def _extra_metrics(record: Mapping[str, Any]) -> list[str]:
    names: list[str] = part({"extra_metrics": [], **record}, "extra_metrics", list)
    if not all(isinstance(name, str) for name in names):
        raise ValueError(f"extra_metrics must be names, got {names!r:.60}.")
    return names


def _scores(name: str, scores: Any, metric: str) -> dict[str, float]:
    given = scores if isinstance(scores, dict) else {metric: scores}
    return {key: number(f"{key} of baseline {name!r}", x) for key, x in given.items() if x is not None}


def _run(path: Path, index: int, record: Mapping[str, Any]) -> RecordedRun:
    raw = record["runs"][index]
    try:
        if not isinstance(raw, dict):
            raise ValueError(f"not a JSON object but {raw!r:.60}")
        shared, own = (part({"settings": {}, **x}, "settings", dict) for x in (record, raw))
        end = raw.get("result")
        first, *others = _conditions(raw) or [record.get("environment") or {}]
        return RecordedRun(
            path=path,
            label=part(raw, "label", str),
            seed=integer("seed", raw.get("seed")),
            settings={**shared, **own},
            environment=first,
            resumed=tuple(others),
            command=_text(record, "command"),
            training=(),
            evaluation=_points(raw.get("evaluation"), _text(record, "curve") or record["metric"]),
            result=None if end is None else _result(part(raw, "result", dict)),
        )
    except ValueError as problem:
        raise ValueError(f"{path}: run {index + 1} of {len(record['runs'])}: {problem}") from None


def _conditions(raw: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Conditions that a run was measured under, one after the other, where its comparison found differences."""
    rows: list[dict[str, Any]] = part({"conditions": [], **raw}, "conditions", list)
    if not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"conditions must be objects, got {rows!r:.60}.")
    return rows


def _points(rows: Any, curve: str) -> tuple[Point, ...]:
    """Steps with seconds and a value, which null leaves out."""
    if not isinstance(rows, list) or not all(isinstance(row, list) and len(row) == 3 for row in rows):
        raise ValueError(f"evaluation must be rows of step, seconds and value, got {rows!r:.60}.")
    return tuple(
        Point(
            integer("step of evaluation", step, at_least=0),
            number("seconds of evaluation", seconds, at_least=0),
            0,
            {} if value is None else {curve: number("value of evaluation", value)},
        )
        for step, seconds, value in rows
    )


def _result(record: dict[str, Any]) -> Result:
    """Read a result; a value of null is NaN, and others that are null were not measured."""
    plain = {key: x for key, x in record.items() if x is not None}
    if "value" in record:
        plain.setdefault("value", math.nan)
    known = {key: part(plain, key, dict) for key in BY_NAME if key in plain}
    return Result.from_json(
        plain | {key: {name: x for name, x in some.items() if x is not None} for key, some in known.items()}
    )


def _day(text: Any) -> str:
    """The day of a date in ISO's form, or nothing."""
    try:
        return calendar_date.fromisoformat(text[:10]).isoformat() if isinstance(text, str) else ""
    except ValueError:
        return ""


def _made(record: Mapping[str, Any]) -> str:
    environment = record.get("environment")
    return _day(record.get("date")) or _day(environment.get("date") if isinstance(environment, dict) else None)


def make_record(folder: Path | str, results: Path, day: str | None = None) -> tuple[Path, str]:
    """Make the record of a comparison: its path, ``RESULTS/DATE-NAME.json``, and its text.

    Settings that all runs share stand once; nothing of the machine's paths is left, and no number is NaN.

    Args:
        folder: where `kernelformer compare` left its figures; NAME is its name.
        day: as YYYY-MM-DD; None: that of the comparison, or today.
    """
    source = Path(folder) / FIGURES
    if not source.is_file():
        raise ValueError(f"{folder} has no {FIGURES}; name a folder where `kernelformer compare` has ended.")
    if day is not None and _day(day) != day:
        raise ValueError(f"a date is YYYY-MM-DD, got {day!r}.")
    raw = load(source)
    read = parse(source, raw)
    if read is None:
        raise ValueError(f"{source} has no 'runs'; name a folder where `kernelformer compare` has ended.")
    record = portable(raw)
    day = day or _made(record) or calendar_date.today().isoformat()
    runs = read.comparison.runs
    first = runs[0].settings
    shared = {k: x for k, x in first.items() if all(k in run.settings and run.settings[k] == x for run in runs)}
    record |= {"task": read.task, "about": read.comparison.about, "date": day, "settings": shared}
    record |= {"higher_is_better": read.comparison.higher_is_better}
    for run, given in zip(runs, record["runs"], strict=True):
        given["settings"] = {key: x for key, x in run.settings.items() if key not in shared}
        given |= {key: rounded(given[key]) for key in ("evaluation", "result") if key in given}
    more = sorted(record.keys() - {*FIRST, *LAST})
    ordered = {key: record[key] for key in (*FIRST, *more, *LAST) if key in record}
    name = re.sub(r"[^A-Za-z0-9+=.,_-]", "_", Path(folder).resolve().name).lstrip(".") or "comparison"
    return results / f"{day}-{name}.json", readable_json(ordered) + "\n"


def add_results(folders: Sequence[Path | str], results: Path, day: str | None = None) -> dict[Path, str]:
    """The records of several comparisons, by their paths."""
    made: dict[Path, str] = {}
    for folder in folders:
        path, text = make_record(folder, results, day)
        if path in made:
            raise ValueError(f"two of the folders to add would be {path}; rename {folder}, or add it by another date.")
        made[path] = text
    return made


SIZES = tuple(dict.fromkeys(x.size for x in METHODS.values() if x.size is not None))
_NUMBER = re.compile(r"(\w+)=(\d+)")


def sides(label: str) -> tuple[str, str]:
    """The encoder's attention and the decoder's; the same twice if the label has only one."""
    try:
        first, second = parse_sides(label)
    except ValueError:
        first, second = label, None
    return _ordered(first), _ordered(first if second is None else second)


def parts(side: str) -> list[AttentionSpec]:
    """The attentions of one side, block after block, with options in one order: sizes first, then by name."""
    return [
        replace(spec, options=tuple(sorted(spec.options, key=lambda x: (x.partition("=")[0] not in SIZES, x))))
        for spec in parse_blocks(side)
    ]


def _ordered(side: str) -> str:
    return ", ".join(map(str, parts(side)))


def normalized(label: str) -> str:
    """The same text for the same attention: options in one order, one side where both are alike."""
    first, second = sides(label)
    return join_sides(first, None if first == second else second)


def exact(label: str) -> bool:
    """True for a method that attends to all tokens exactly, without options."""
    return label in METHODS and METHODS[label].family == "exact" and METHODS[label].quadratic


def linear(label: str) -> bool:
    """True where all methods of a label are known and none takes time quadratic in the length."""
    methods = {part.method for side in sides(label) for part in parts(side)}
    return methods <= METHODS.keys() and not any(METHODS[x].quadratic for x in methods)


def sized(label: str) -> tuple[str, int] | None:
    """The label without its number of features, and that number; None if it has none or several."""
    sizes, rest = set(), []
    for side in sides(label):
        specs = []
        for method in parts(side):
            numbers = [match for x in method.options if (match := _NUMBER.fullmatch(x)) and match[1] in SIZES]
            sizes |= {int(x[2]) for x in numbers}
            others = tuple(x for x in method.options if x not in {m[0] for m in numbers})
            specs.append(str(replace(method, options=others)))
        rest.append(", ".join(specs))
    return (normalized(join_sides(rest[0], rest[1])), sizes.pop()) if len(sizes) == 1 else None


def series(labels: Iterable[str]) -> dict[str, dict[int, str]]:
    """Labels that differ only in their number of features: by what they share, then by that number, ascending."""
    groups: dict[str, dict[int, str]] = {}
    for label in labels:
        if (size := sized(label)) is not None:
            groups.setdefault(size[0], {}).setdefault(size[1], label)
    return {base: dict(sorted(group.items())) for base, group in groups.items() if len(group) > 1}


def rank(label: str) -> tuple[bool, int, str, int, str]:
    """The key to sort by: one attention before two, methods as `list_methods` has them, then the number of features."""
    names = list(METHODS)
    first, second = sides(label)
    method = parts(first)[0].method
    base, size = sized(label) or (label, 0)
    return first != second, names.index(method) if method in names else len(names), base, size, label


PAGE = "index.html"
ABOUT = (
    "Attentions trained on the same data in the same order, by kernelformer compare; every section has the command "
    "that makes it again. This page is made by kernelformer results."
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
    """Make the page; the same records give the same text.

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
    newest, places = [some[-1] for some in by_name.values()], _places(records)
    return render(
        Path(__file__).with_name("results.html"),
        "Results on record",
        ABOUT,
        "wide",
        caption=CAPTION,
        **_overview(newest, anchors, places),
        tasks=[_task(anchors[name], some, places) for name, some in by_name.items()],
    )


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


def _method(label: str) -> Markup:
    """The label as HTML: methods, and small what is optional."""
    return Markup(" &gt; ").join(
        Markup(" + ").join(safe(x.plain) + small(", ".join(x.options)) for x in parts(side))
        for side in dict.fromkeys(sides(label))
    )


def _arrow(comparison: Comparison) -> str:
    """The metric and its sense."""
    return f"{comparison.metric.replace('_', ' ')}\N{NO-BREAK SPACE}{'↑' if comparison.higher_is_better else '↓'}"


def _score_cells(comparison: Comparison, rows: Sequence[Summary]) -> tuple[dict[str, Markup], int]:
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
        shown = safe(mean)
        if kinds and row.mean is not None and len(means) > 1:
            shown = Markup('<mark class="{}">{}</mark>').format(" ".join(kinds), mean)
        notes = [f"± {spread}"] * bool(spread) + [f"n = {len(row.values)}"] * (0 < len(row.values) < count)
        cells[row.label] = shown + small(", ".join(notes))
    return cells, count


def _overview(
    records: Sequence[Recorded], anchors: Mapping[str, str], places: Mapping[str, int]
) -> dict[str, HtmlTable | str | bool]:
    """Values of the template for the two tables of attentions by tasks."""
    columns = [_column(record, records) for record in records]
    labels = sorted({label for column in columns for label in column}, key=rank)
    heads, plain, values, costs = ["attention"], ["attention"], [], []
    for record, column in zip(records, columns, strict=True):
        scores, count = _score_cells(record.comparison, list(column.values()))
        link = Markup('<a href="#{}">{}</a>').format(anchors[record.name], safe(record.name))
        plain.append(link)
        heads.append(link + small(_arrow(record.comparison)) + small(f"n = {count}"))
        values.append({label: scores[row.label] for label, row in column.items()})
        mark = MARK if record.comparison.unequal else ""
        costs.append({label: _cost(row, mark) for label, row in column.items()})

    def by_task(name: str, prefix: str, head: Sequence[str], columns: Sequence[Mapping[str, str]]) -> HtmlTable:
        keys = [legend_key(f"{prefix}{i}", places[label]) + _method(label) for i, label in enumerate(labels)]
        lines = [[k, *(x.get(label, NONE) for x in columns)] for k, label in zip(keys, labels, strict=True)]
        return name, head, lines, "results overview"

    return {
        "scores": by_task("attentions by tasks", "all", heads, values),
        "costs": by_task("training time and peak memory by tasks", "cost", plain, costs),
        "left_out": any(len(column) < len(x.comparison.labels) for x, column in zip(records, columns, strict=True)),
        "waiting": _waiting(records),
    }


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
    return NONE if row.seconds is None else safe(human_time(row.seconds) + mark) + small(human_bytes(row.peak_bytes))


def _waiting(records: Sequence[Recorded]) -> str:
    """The largest share of training time that a run of each task has spent on getting batches, where it is known."""
    waits = []
    for record in records:
        ends = [run.result for run in record.comparison.runs if run.result is not None and run.result.seconds]
        shares = [x.input_seconds / x.seconds for x in ends if math.isfinite(x.input_seconds)]
        if shares:
            waits.append(f"{record.name} {max(shares):.1%}")
    return ", ".join(waits)


def _task(anchor: str, records: Sequence[Recorded], places: Mapping[str, int]) -> dict[str, Any]:
    """Values of the template for one task: its newest comparison, and the earlier ones."""
    *earlier, record = records
    comparison = record.comparison
    mine = {label: places[normalized(label)] for label in comparison.labels}
    before = []
    for i, old in enumerate(earlier):
        looks = {label: places[normalized(label)] for label in old.comparison.labels}
        before.append(_origin(old) | {"results": _results(old, looks, f"{anchor}-before{i}")})
    return _origin(record) | {
        "name": record.name,
        "anchor": anchor,
        "about": _sentence(comparison.subtitle) if comparison.about else "",
        "setting": _settings(record),
        "distance": " ".join(x for x in (_sentence(record.source), _sentence(record.note)) if x),
        "words": " ".join(words(comparison)),
        "results": _results(record, mine, anchor),
        "pairs": _pairs(comparison),
        "figures": _figures(record, mine, anchor),
        "before": before,
    }


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


def _results(record: Recorded, places: Mapping[str, int], anchor: str) -> HtmlTable:
    comparison = record.comparison
    others = {row.label: _others(row, comparison) for row in comparison.summary()}
    more = []
    for name, scores in record.baselines.items():
        value = f"{scores[comparison.metric]:.4g}" if comparison.metric in scores else NONE
        rest = _listed({key: x for key, x in scores.items() if key != comparison.metric})
        blank = [NONE] * (len(cells(comparison)[0]) - 2)
        label = Markup('<span class="plain"></span>') + safe(name) + small("no model")
        more.append([label, safe(value) + small(rest), *blank])
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


def _pairs(comparison: Comparison) -> tuple[str, HtmlTable] | None:
    """Title and table of encoders by decoders (NPRF with RPE, Table 3), where there are pairs."""
    rows = {sides(row.label): row for row in comparison.summary()}
    if all(first == second for first, second in rows):
        return None
    scores, count = _score_cells(comparison, list(rows.values()))
    encoders, decoders = (sorted({pair[i] for pair in rows}, key=rank) for i in (0, 1))
    lines = [[_method(x), *(scores[rows[x, y].label] if (x, y) in rows else NONE for y in decoders)] for x in encoders]
    head = ["encoder \\ decoder", *map(_method, decoders)]
    return f"Encoders by decoders, {_arrow(comparison)}, n = {count}", ("encoders by decoders", head, lines, "pairs")


def _figures(record: Recorded, places: Mapping[str, int], anchor: str) -> list[Drawing]:
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
        made.append(figure(f"{anchor}-curve", title, names, draw))
    if len(rows) > 1 and not comparison.unequal:
        points = [(places[x.label], x.tokens_per_second or 0.0, x.mean or 0.0, x.deviation or 0.0) for x in rows]
        title = f"Final {metric} over training speed"
        told = ", ".join(f"{x.label} {x.mean:.4g} at {x.tokens_per_second or 0:,.0f} tokens/s" for x in rows)
        draw = partial(draw_points, rows=points, name="tokens/s")
        made.append(figure(f"{anchor}-speed", title, told, draw))
    return made + _sizes(comparison, places, anchor)


def _sizes(comparison: Comparison, places: Mapping[str, int], anchor: str) -> list[Drawing]:
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
    keys = [(legend_key(f"{anchor}-size{i}", i), _method(x)) for i, x in named.items()]
    title = f"Final {comparison.metric.replace('_', ' ')} over the number of features"
    draw = partial(draw_sizes, series=lines, levels=levels, name="features")
    return [figure(f"{anchor}-size", title, ", ".join(sizes), draw, legend=keys)]


def _origin(record: Recorded) -> dict[str, Any]:
    """Values of the template for the origin of the figures: the record, its address, the versions, and all settings."""
    versions = ", ".join(f"{key} {x}" for key, x in flat(record.environment).items() if key != "date")
    return {
        "record": record,
        "file": quote(record.path.name, errors="surrogateescape"),
        "versions": _sentence(versions),
        "settings": records_tables(record.comparison, "settings", [run.settings for run in record.comparison.runs]),
    }
