"""The benchmark of attention: every contender in every case, checked against its definition, timed and weighed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from kernelformer.errors import WorkerError
from kernelformer.formatting import human_bytes, human_ratio, human_time, short_names
from kernelformer_lab.bench.attention import contender, yardsticks
from kernelformer_lab.bench.case import Case
from kernelformer_lab.bench.devices import check_device
from kernelformer_lab.bench.harness import peak_memory, run_in_process, time_bursts
from kernelformer_lab.bench.settings import HEAPS, BenchSettings
from kernelformer_lab.bench.timing import Figures, Step
from kernelformer_lab.figures import drawing, log_axis, table

__all__ = ["HEAPS", "Row", "WorkerError", "cases", "check", "contenders", "job", "measure", "run", "run_case"]
TINY = 128  # tokens of the call after which libraries, threads and their buffers are there


@dataclass
class Row:
    """The figures of one contender in one case."""

    case: Case
    name: str
    error: float | None = None
    seconds: dict[str, float] = field(default_factory=dict)  # by heap
    peak: int | None = None  # bytes beyond the inputs
    results: int | None = None  # of which outputs and gradients
    note: str = ""  # why it was not run

    def as_json(self) -> dict[str, Any]:
        """Return the row as plain values."""
        return asdict(self)


def contenders(settings: BenchSettings) -> list[str]:
    """Return the names of all contenders, our own first; each is checked to be known."""
    names = list(settings.attention)
    if settings.peers == ("auto",):
        names += yardsticks(bias=settings.bias != "none", backward="train" in settings.passes)
    elif settings.peers != ("none",):
        names += settings.peers
    for name in names:
        contender(name)
    return names


def cases(settings: BenchSettings) -> Iterator[Case]:
    """Return all combinations of task, pass and length; decoding has no backward pass."""
    for task in settings.tasks:
        for backward in (x == "train" for x in settings.passes):
            for length in settings.lengths if task != "decode" or not backward else ():
                yield Case(
                    task=task,  # type: ignore[arg-type]
                    length=length,
                    backward=backward,
                    batch=settings.batch,
                    heads=settings.heads,
                    head_dim=settings.head_dim,
                    features=settings.features,
                    bias=None if settings.bias == "none" else settings.bias,
                    window=settings.max_distance,
                    device=settings.device,
                )


def heaps(settings: BenchSettings) -> Sequence[str]:
    """The allocator's settings that are timed; those of the CPU mean nothing to another device."""
    return settings.heaps if settings.device == "cpu" else settings.heaps[:1]


def run(
    settings: BenchSettings,
    threads: int,
    log: Callable[[str], None] = lambda _: None,
    progress: Callable[[], None] = lambda: None,
) -> list[Row]:
    """Measure every contender in every case.

    Args:
        settings: what is measured.
        threads: of torch in the measuring processes.
        log: takes a sentence on what is being done.
        progress: called after each of `cases`.
    """
    check_device(settings.device)
    names, rows = contenders(settings), []
    how = {"heaps": heaps(settings), "threads": threads, "budget": settings.budget, "memory": settings.memory}
    for case in cases(settings):
        rows += run_case(case, names, **how, log=log)  # type: ignore[arg-type]
        progress()
    return rows


def run_case(
    case: Case,
    names: Sequence[str],
    *,
    heaps: Sequence[str],
    threads: int,
    budget: float,
    memory: bool,
    log: Callable[[str], None] = lambda _: None,
) -> list[Row]:
    """Check, time and weigh every contender that takes the case.

    Args:
        heaps: names of `HEAPS`; each is timed.
        threads: of torch in the measuring processes.
        memory: whether to measure peak memory, which decoding has none of.
        log: takes a sentence on what is being done.
    """
    rows = [Row(case, name, note=contender(name).refuses(case) or "") for name in names]
    running = [row for row in rows if not row.note]
    if running:
        log(f"{case.title}: checking")
        checked = replace(case, task="causal") if case.task == "decode" else case
        checks = job("check", checked, [row.name for row in running], heap="default", threads=threads, budget=budget)
        for row in running:
            figures = checks[row.name]
            row.error = figures.get("error")
            if row.error is None:
                row.note = figures["problem"]
            elif not row.error <= figures["tolerance"]:
                row.note = f"off its definition by {row.error:.1e}: not timed"
    running = [row for row in running if not row.note]
    for heap in heaps if running else ():
        log(f"{case.title}: timing, heap {heap}")
        times = job("time", case, [row.name for row in running], heap=heap, threads=threads, budget=budget)
        for row in running:
            if "problem" in times[row.name]:
                row.note = times[row.name]["problem"]
            else:
                row.seconds[heap] = times[row.name]["seconds"]
        running = [row for row in running if not row.note]
    weighed = memory and case.task != "decode" and case.device_kind != "mps"
    for row in running if weighed else ():
        log(f"{case.title}: memory of {row.name}")
        figures = job("memory", case, [row.name], heap="default", threads=threads, budget=budget)
        row.peak, row.results = figures["peak"], figures["results"]
    return rows


def job(kind: str, case: Case, names: Sequence[str], *, heap: str, threads: int, budget: float) -> Figures:
    """Run `measure` in a process of its own.

    Raises:
        WorkerError: it failed; with the contenders, the case and what the process said last.
    """
    request = {"kind": kind, "case": asdict(case), "names": list(names), "budget": budget}
    try:
        return run_in_process(measure, threads=threads, allocator=HEAPS[heap], **request)
    except WorkerError as problem:
        raise WorkerError(f"{', '.join(names)} at {case.title}: {problem}") from None


def measure(kind: str, case: dict[str, Any], names: list[str], budget: float) -> Figures:
    """Do what `job` asks for, in this process: ``check`` or ``time`` several contenders, or the ``memory`` of one."""
    this = Case(**case)
    if torch.device(this.device).index:
        torch.accelerator.set_device_index(torch.device(this.device).index)
    if kind == "check":
        return check(this, names)
    if kind == "time":
        steps = {name: Step(contender(name).runner(this), device=torch.device(this.device)) for name in names}
        return time_bursts(steps, budget)
    return measure_memory(this, names[0])


def check(case: Case, names: Sequence[str]) -> dict[str, Figures]:
    """Return each contender's error against its definition and its tolerance, or the problem that it had."""
    checks: dict[str, Figures] = {}
    for name in names:
        try:
            one = contender(name)
            checks[name] = {"error": one.error(case), "tolerance": one.tolerance}
        except Exception as problem:  # a peer may fail in any way, and the others should still run
            checks[name] = {"problem": f"{type(problem).__name__}: {problem}"}
    return checks


def measure_memory(case: Case, name: str) -> Figures:
    """Return the peak bytes of one call beyond what was there before it, and how many are its results.

    Resident ones on the CPU; on an accelerator those of its tensors, by its own counters.
    """
    one, device = contender(name), torch.device(case.device)
    one.runner(replace(case, length=TINY))()
    call, outputs = one.runner(case), []
    peaks = peak_memory({name: Step(lambda: outputs.append(call()), device=device)})
    result = outputs[0] if isinstance(outputs[0], tuple) else outputs
    tensors = [x for x in result if isinstance(x, torch.Tensor)]
    return {"peak": peaks[name], "results": sum(x.numel() * x.element_size() for x in tensors)}


def tables(rows: Sequence[Row], ours: str, heaps: Sequence[str]) -> list[Table]:
    """Return a table for each case, with ratios to our first method: above 1 means that ours is faster or leaner."""
    return [
        _table([row for row in rows if row.case == case], ours, heaps)
        for case in dict.fromkeys(row.case for row in rows)
    ]


def _table(rows: Sequence[Row], ours: str, heaps: Sequence[str]) -> Table:
    base = next((row for row in rows if row.name == ours and not row.note), None)
    left_out = "; ".join(f"{row.name}: {row.note}" for row in rows if row.note)
    weighed = any(row.peak is not None for row in rows)
    heads = (*(f"heap {heap}" for heap in heaps), *(("peak", "beyond") if weighed else ()), "error")
    short, lines = short_names(row.name for row in rows), []
    for row in rows:
        if row.note:
            continue
        cells = [short[row.name]]
        for heap in heaps:
            ratio = "" if base is None or row is base else f" {human_ratio(row.seconds[heap] / base.seconds[heap])}"
            cells.append(human_time(row.seconds[heap]) + ratio)
        if row.peak is not None and row.results is not None:
            ratio = f" {human_ratio(row.peak / base.peak)}" if base and base.peak and row is not base else ""
            cells += [human_bytes(row.peak) + ratio, human_bytes(row.peak - row.results)]
        lines.append((*cells, "" if row.error is None else f"{row.error:.0e}"))
    plain: dict[str, Any] = {"box": None, "padding": (0, 2, 0, 0)}
    return table(rows[0].case.title, ("contender", *heads), lines, caption=left_out or None, **plain)


def plot(rows: Sequence[Row], path: Path, heap: str) -> None:
    """Draw time against length, one panel per kind of case, a line per contender."""
    kinds = list(dict.fromkeys((row.case.task, row.case.backward) for row in rows))
    names = list(dict.fromkeys(row.name for row in rows))
    lines, columns = -(-len(kinds) // 3), min(3, len(kinds))
    with drawing(path, (4.2 * columns, 3.8 * lines), lines, columns) as (_, axes):
        for axis in axes.flat[len(kinds) :]:
            axis.set_visible(False)
        for axis, (task, backward) in zip(axes.flat, kinds, strict=False):
            for index, name in enumerate(names):
                points = [
                    (row.case.length, row.seconds[heap] * 1e3)
                    for row in rows
                    if (row.case.task, row.case.backward, row.name) == (task, backward, name) and heap in row.seconds
                ]
                if points:
                    axis.plot(*zip(*points, strict=True), marker="o", label=name, color=f"C{index}")
            log_axis(axis)
            axis.set_title(f"{task}{', forward + backward' if backward else ''}{rows[0].case.positions}")
            axis.set_xlabel("context" if task == "decode" else "length")
            axis.set_ylabel("ms")
            axis.grid(True, which="both", alpha=0.2)
            axis.legend(fontsize="small")
