"""The fair peer of inference on a CPU: an encoder and its converted copies, in torch and in onnxruntime.

The original runs in onnxruntime as the exporter writes it, and with that runtime's own attention, in tiles. Tokens are
random, nothing is padded, and tables of positions are stretched where they end: only speed is measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.table import Table

from kernelformer.errors import WorkerError
from kernelformer.formatting import human_time
from kernelformer.measure import exported as measured
from kernelformer.measure.exported import ONNX, ORIGINAL, OWN, TORCH, Encoder, way
from kernelformer.measure.harness import run_in_process
from kernelformer.modules.spec import parse_method
from kernelformer.quiet import silent_libraries
from kernelformer.studies.base import Log, Progress, read_record, write_record
from kernelformer.studies.lengths import describe
from kernelformer.studies.settings import ExportedSettings
from kernelformer.timing import Figures

NAME = "exported"
BASE = way(ORIGINAL, TORCH)  # what the others are compared with


@dataclass
class Row:
    """One way to read so many tokens: seconds of a pass, or why there are none.

    Args:
        length: tokens.
        way: attention and runtime.
        seconds: median of the rounds.
        rounds: number of timed passes.
        difference: in onnxruntime, of its outputs from torch, over the largest output; of the first 1024 tokens.
        note: why there are no figures.
    """

    length: int
    way: str
    seconds: float | None = None
    rounds: int = 0
    difference: float | None = None
    note: str = ""


@dataclass
class Result:
    """Rows of all lengths, and what they depend on."""

    about: dict[str, Any]
    stretched: list[str] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)

    def faster(self, row: Row) -> float | None:
        """How many times faster than the original in torch at the same length."""
        base = next((x.seconds for x in self.rows if x.length == row.length and x.way == BASE), None)
        return None if base is None or row.seconds is None else base / row.seconds


def names(settings: ExportedSettings) -> list[str]:
    """The attentions, the original's first."""
    return list(dict.fromkeys((ORIGINAL, OWN, *settings.attention)))


def ways(settings: ExportedSettings) -> list[str]:
    """All ways to read the tokens: each attention in each runtime that has it."""
    pairs = [(name, runtime) for name in names(settings) for runtime in (TORCH, ONNX)]
    return [way(*x) for x in pairs if x != (OWN, TORCH)]


def steps(settings: ExportedSettings) -> int:
    """Return how many processes there are: one that exports, and one for each length."""
    for spec in settings.attention:
        parse_method(spec)
    for what in ("lengths", "attention"):
        if not getattr(settings, what):
            raise ValueError(f"{what} must name at least one, got {getattr(settings, what)!r}.")
    return 1 + len(set(settings.lengths))


def run(
    settings: ExportedSettings, folder: Path, log: Log = lambda _: None, progress: Progress = lambda: None
) -> Result:
    """Export, then time all ways at each length that ``folder`` does not hold yet; see `studies.base`."""
    steps(settings)
    subject = Encoder(settings.model, "encoder", not settings.model, settings.allow_pickle, settings.batch)
    longest = max(settings.lengths)
    with silent_libraries():
        model, stretched = subject.build(longest)
    name = Path(settings.model).resolve().name if settings.model else "a BERT of MiniLM-L6's sizes"
    about = {**describe(model, subject, name, "encoder"), ONNX: version(ONNX), "ways": ways(settings)}
    result = Result(about, stretched)
    result.rows = read_rows(folder, result.about)
    todo = [x for x in sorted(set(settings.lengths)) if x not in {row.length for row in result.rows}]
    common: dict[str, Any] = {"subject": asdict(subject), "longest": longest, "names": names(settings)}
    with TemporaryDirectory(prefix="kernelformer-export-") as graphs:
        log("exporting")
        problems = _job(measured.prepare, **common, folder=graphs) if todo else {}
        for _ in range(steps(settings) - len(todo)):
            progress()
        for length in todo:
            log(f"{length} tokens: timing")
            given = {"length": length, "rounds": settings.rounds, "budget": settings.budget, "folder": graphs}
            result.rows += _rows(length, ways(settings), problems | _measured(common | given))
            write_record(folder, NAME, settings, record(result))
            progress()
    return result


def read_rows(folder: Path, about: dict[str, Any]) -> list[Row]:
    """The rows that an earlier call has written, of the same model, ways and machine.

    Raises:
        ValueError: a record of something else is there.
    """
    path, fields = folder / f"{NAME}.json", Row.__dataclass_fields__
    try:
        kept = read_record(folder, NAME)
        if kept is None:
            return []
        rows = [Row(**{key: x[key] for key in fields}) for x in kept["rows"]]
        other = {key: x for key, x in kept["about"].items() if about.get(key) != x}
    except (ValueError, KeyError, TypeError, AttributeError) as problem:
        raise ValueError(f"{path} is not of this study ({problem!r}); move it away, or choose another --out.") from None
    if other:
        raise ValueError(f"{path} holds figures of another model or machine ({other}); choose another --out.")
    return rows


def _measured(given: dict[str, Any]) -> Figures:
    try:
        return _job(measured.measure, **given)
    except WorkerError as problem:
        return {"": {"problem": str(problem)}}


def _rows(length: int, names: Sequence[str], figures: Figures) -> list[Row]:
    rows = []
    for name in names:
        mine = figures.get(name) or figures.get("") or {"problem": "was not measured"}
        row = Row(length, name, mine.get("seconds"), mine.get("rounds", 0), mine.get("difference"))
        row.note = mine.get("problem", "")
        rows.append(row)
    return rows


def _job(work: Any, **given: Any) -> Figures:
    return run_in_process(work, threads=torch.get_num_threads(), **given)


def record(result: Result) -> dict[str, Any]:
    """Return the result as plain JSON."""
    rows = [{**asdict(row), "times faster": result.faster(row)} for row in result.rows]
    return {"about": result.about, "stretched": result.stretched, "rows": rows}


def tables(result: Result) -> list[Table]:
    """Return one table: a line for each way, a column for each length."""
    lengths = sorted({row.length for row in result.rows})
    out = Table(title=f"a pass of {result.about['model']}, times faster than {BASE}", title_justify="left")
    out.add_column("attention", no_wrap=True)
    for length in lengths:
        out.add_column(f"{length} tokens", justify="right", no_wrap=True)
    for name in dict.fromkeys(row.way for row in result.rows):
        mine = {row.length: row for row in result.rows if row.way == name}
        out.add_row(name, *(_cell(result, mine[length]) for length in lengths))
    notes = [f"{row.length} tokens, {row.way}: {row.note}" for row in result.rows if row.note]
    out.caption, out.caption_justify = "\n".join(notes) or None, "left"
    return [out]


def _cell(result: Result, row: Row) -> str:
    if row.seconds is None:
        return "not run"
    faster = result.faster(row)
    return human_time(row.seconds) + (f" ({faster:.2f}x)" if faster is not None and row.way != BASE else "")


def picture(result: Result, path: Path) -> None:
    """Draw the seconds of a pass over the length."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 5), constrained_layout=True)
    for name in dict.fromkeys(row.way for row in result.rows):
        points = [(row.length, row.seconds) for row in result.rows if row.way == name and row.seconds is not None]
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", linestyle="--" if ONNX in name else "-", label=name)
    axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel="seconds of a pass")
    lengths = sorted({row.length for row in result.rows})
    axes.set_xticks(lengths, [str(x) for x in lengths])
    axes.minorticks_off()
    axes.grid(True, alpha=0.2)
    figure.legend(loc="outside upper center", ncols=2, fontsize=7)
    figure.savefig(path, dpi=150)
    plt.close(figure)
