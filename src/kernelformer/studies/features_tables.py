"""Tables of `studies.features`, for the terminal and in Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.table import Table

from kernelformer.formatting import human_time
from kernelformer.studies.features_data import SYNTHETIC, synthetic_name
from kernelformer.studies.features_result import EXACT, UNIFORM, Result, Row

NOT_REACHED = "not reached"
CELLS = "error of the output, relative, ± standard error over draws; in brackets: total variation distance of the rows"


def tables(result: Result) -> list[Table]:
    """Errors by norm at one size, errors of models by size, time at equal error, and what reaches an error first."""
    settings = result.settings
    found = []
    for window in settings.window:
        found += [_by_norm(result, kind, window) for kind in SYNTHETIC if settings.norms]
    models = [name for name, x in result.cases.items() if x.norm is None]
    for name in models:
        found += [_by_size(result, name, window) for window in settings.window]
    for name in models:
        found += [_times(result, name, window) for window in settings.window]
    return [*found, _fastest(result)]


def markdown(result: Result) -> str:
    """All tables in Markdown."""
    parts = []
    for table in tables(result):
        rows = [[str(x.header) for x in table.columns], ["---"] * len(table.columns)]
        rows += [list(cells) for cells in zip(*([str(y) for y in x.cells] for x in table.columns), strict=True)]
        lines = [f"| {' | '.join(row)} |" for row in rows]
        parts.append(
            "\n".join([f"**{table.title}**", "", *lines, *(["", str(table.caption)] if table.caption else [])])
        )
    return "\n\n".join(parts) + "\n"


def _grid(title: str, left: Sequence[str], columns: Sequence[str], caption: str | None = None) -> Table:
    table = Table(title=title, caption=caption, title_justify="left", caption_justify="left")
    for name in left:
        table.add_column(name, no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _cell(row: Row | None) -> str:
    """The errors of a row."""
    if row is None:
        return ""
    mean, error = row.output
    return f"{mean:.3f} ± {error:.3f} ({row.row[0]:.2f})" if len(row.outputs) > 1 else f"{mean:.3f} ({row.row[0]:.2f})"


def _near(result: Result, window: int) -> str:
    return f"window {window}, sinks {result.settings.sinks}" if window else "no window"


def _middle(sizes: Sequence[int]) -> int:
    """The size that tables of many cases show: 128 if it is there."""
    return 128 if 128 in sizes else sorted(sizes)[len(sizes) // 2]


def _by_norm(result: Result, kind: str, window: int) -> Table:
    """Errors of synthetic cases by norm, at one size."""
    settings = result.settings
    size = _middle(settings.features)
    curves = {norm: result.curves(synthetic_name(kind, norm), window) for norm in settings.norms}
    table = _grid(
        f"{kind.capitalize()} queries and keys, {settings.length} tokens, {size} features or landmarks, "
        f"{_near(result, window)}",
        ("attention",),
        [f"norm {x:g}" for x in settings.norms],
        CELLS,
    )
    for name in dict.fromkeys(name for x in curves.values() for name in x):
        rows = [[row for row in x.get(name, []) if row.size in (size, None)] for x in curves.values()]
        table.add_row(result.label(name), *(_cell(x[0] if x else None) for x in rows))
    return table


def _headline(result: Result, name: str, window: int) -> str:
    case = result.cases[name]
    way = ", causal" if case.causal else ""
    return (
        f"{name}, {case.tokens} tokens{way}, norms of q and k {case.query_norm:.1f} and {case.key_norm:.1f}, "
        f"{_near(result, window)}"
    )


def _left_out(result: Result, name: str, window: int) -> str:
    refused = result.left_out[f"{name}, window {window}"]
    return f"\nleft out: {', '.join(f'{x} ({why})' for x, why in refused.items())}" if refused else ""


def _by_size(result: Result, name: str, window: int) -> Table:
    """Errors of a model's attention by size."""
    curves = result.curves(name, window)
    sizes = sorted({row.size for rows in curves.values() for row in rows if row.size is not None})
    caption = CELLS + _left_out(result, name, window)
    table = _grid(_headline(result, name, window), ("attention",), [f"m = {x}" for x in sizes], caption)
    for attention, rows in curves.items():
        by_size = {row.size: row for row in rows}
        cells = [_cell(by_size.get(m)) for m in sizes]
        if None in by_size:
            cells[0] = _cell(by_size[None])
        table.add_row(result.label(attention), *cells)
    return table


def _times(result: Result, name: str, window: int) -> Table:
    """The least time of each attention at which a model's error is small enough."""
    settings = result.settings
    table = _grid(
        f"Time at equal error: {_headline(result, name, window)}",
        ("attention",),
        [f"error {x:g}" for x in settings.errors],
        f"of a forward over {settings.time_length} tokens, {settings.heads} heads, its m in brackets; the largest m is "
        f"{max(settings.features)}",
    )
    for attention, rows in result.curves(name, window).items():
        if attention != UNIFORM:
            table.add_row(result.label(attention), *(_least(result, rows, x) for x in settings.errors))
    return table


def _least(result: Result, rows: Sequence[Row], error: float) -> str:
    best = result.least_time(rows, error)
    if best is None:
        return NOT_REACHED
    size = "" if best[1].size is None else f" ({best[1].size})"
    return f"{human_time(best[0])}{size}"


def _fastest(result: Result) -> Table:
    """Of each case and window the attention that reaches each error first; the error of doing nothing beside it."""
    settings = result.settings
    table = _grid(
        f"What reaches an error of the output in the least time, of a forward over {settings.time_length} tokens",
        ("data", "window", f"error of {UNIFORM}"),
        [*(f"error {x:g}" for x in settings.errors), "exact"],
    )
    for name in result.cases:
        for window in settings.window:
            curves = result.curves(name, window)
            cells = [_first(result, curves, error) for error in settings.errors]
            uniform = f"{curves[UNIFORM][0].output[0]:.3f}"
            table.add_row(name, str(window), uniform, *cells, _least(result, curves[EXACT], 0.0))
    return table


def _first(result: Result, curves: Mapping[str, Sequence[Row]], error: float) -> str:
    """The attention that reaches an error in the least time, with its time."""
    reached = [(best[0], name) for name, rows in curves.items() if (best := result.least_time(rows, error))]
    if not reached:
        return NOT_REACHED
    name = min(reached)[1]
    return f"{result.label(name)} {_least(result, curves[name], error)}"
