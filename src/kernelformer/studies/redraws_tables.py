"""The tables of `studies.redraws`."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from kernelformer.formatting import short_names
from kernelformer.studies.redraws_result import Measured, Method, Result, Spread


def tables(result: Result) -> list[Table]:
    """Variance and accuracy by method (Fig. 5), eigenvalues by method and head (Tables 4, 9-12), gradients (Table 14).

    Heads are those of the first seed of each mixture.
    """
    rows = [_variance(result), _accuracy(result), *_eigenvalues(result)]
    seen = {}
    for x in result.runs:
        if _learned(x) and (x.task, x.attention) not in seen:
            seen[x.task, x.attention] = eigenvalue_table(x.eigenvalues, f"{x.attention}, seed {x.seed}")
    return [*rows, *seen.values(), *_gradients(result)]


def _table(title: str, *columns: str) -> Table:
    out = Table(title=title)
    out.add_column("method", no_wrap=True)
    for name in columns:
        out.add_column(name, justify="right", no_wrap=True)
    return out


def _names(result: Result) -> dict[tuple[str, str], str]:
    """Short names of methods, with the task where there are several."""
    tasks = {x.task for x in result.runs}
    whole = {(x.task, x.attention): f"{x.task}: {x.attention}" if len(tasks) > 1 else x.attention for x in result.runs}
    short = short_names(whole.values())
    return {key: short[name] for key, name in whole.items()}


def _variance(result: Result) -> Table:
    names, settings = _names(result), result.settings
    title = f"Over {settings.draws} redraws, {settings.samples} samples; mean over seeds ± standard deviation over them"
    out = _table(title, "seeds", "RSD", "median RSD", "PI, %", "AGV")
    for x in result.methods:
        cells = [x.spread("rsd").text(3), x.spread("rsd_median").text(3), x.spread("pi").text(2)]
        cells = ["draws nothing", "0", "0"] if x.deterministic else cells
        out.add_row(names[x.task, x.attention], str(len(x.runs)), *cells, x.spread("agv").text(3))
    notes = [
        f"{a} and {b}: {row['r2']:.2f} (paper {row['paper']:.2f})"
        for row in result.correlations()
        for a, b in [row["measures"]]
        if row["methods"] > 2
    ]
    out.caption = f"R² over methods: {', '.join(notes)}" if notes else None
    return out


def _accuracy(result: Result) -> Table:
    names = _names(result)
    out = _table("Accuracy, %", "voting (VA)", "mean over draws", "deviation over draws", "own draw")
    for x in result.methods:
        own = Spread.of([run.redraws["own_draw"]["accuracy"] for run in x.runs])
        values = [x.spread(name).text(1, 100) for name in ("voting_accuracy", "accuracy", "accuracy_deviation")]
        out.add_row(names[x.task, x.attention], *values, own.text(1, 100))
    out.caption = "own draw: the one that the model was saved with"
    return out


def _learned(run: Measured) -> bool:
    end = run.eigenvalues["end"]
    return end is not None and bool(end["learned"])


def _eigenvalues(result: Result) -> list[Table]:
    names = _names(result)
    columns = [f"{which}, {when}" for which in ("max", "mean", "min") for when in ("start", "end")]
    out = _table("Eigenvalues of the covariance of the frequencies, over all heads (Table 4)", *columns)
    for x in result.methods:
        name = names[x.task, x.attention]
        _add_eigenvalues(out, name if all(_learned(run) for run in x.runs) else f"{name} (sample)", x, None)
        _add_eigenvalues(out, f"{name}: (log S²)²", x, "squared_log_variance")
    out.caption = "sample: of the frequencies of one draw; (log S²)²: what the paper's tables of GMM-PRF seem to print"
    return [out] if out.row_count else []


def _add_eigenvalues(out: Table, name: str, method: Method, part: str | None) -> None:
    cells = [method.eigenvalues(w, k, part) for k in ("maximum", "mean", "minimum") for w in ("start", "end")]
    if None not in cells:
        out.add_row(name, *(f"{x.mean:.3g}" for x in cells if x is not None))


def eigenvalue_table(eigenvalues: dict[str, Any], title: str) -> Table:
    """Eigenvalues of one run head by head, in the form of Tables 9-12, at the start and at the end.

    Args:
        eigenvalues: of `eigenvalue_statistics`.
        title: of the table.
    """
    out = Table(title=f"Eigenvalues by head at the start and the end of training: {title}")
    for name in ("Layer", "Head", *(f"{x}, {when}" for when in ("start", "end") for x in ("Min.", "Max.", "Mean"))):
        out.add_column(name, justify="right", no_wrap=True)
    start, end = (eigenvalues[x]["heads"] for x in ("start", "end"))
    for a, b in zip(start, end, strict=True):
        cells = [f"{x[name]:.3e}" for x in (a, b) for name in ("minimum", "maximum", "mean")]
        out.add_row(str(a["layer"]) if a["head"] == 1 else "", str(a["head"]), *cells)
    return out


def _gradients(result: Result) -> list[Table]:
    names = _names(result)
    out = _table(
        "Gradients at the classifier's units (Table 14)",
        "seed",
        "step",
        "accuracy, %",
        "mean of |g|",
        "std of |g|",
        "std over draws",
    )
    for x in result.runs:
        for row in x.gradients:
            if "absolute_mean" in row:
                accuracy = "" if row["accuracy"] is None else f"{100 * row['accuracy']:.1f}"
                values = [f"{row[k]:.4g}" for k in ("absolute_mean", "absolute_deviation", "redraw_deviation")]
                out.add_row(names[x.task, x.attention], str(x.seed), str(row["step"]), accuracy, *values)
    return [out] if out.row_count else []
