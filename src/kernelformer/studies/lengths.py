"""From which length on a converted model is faster and leaner than the pretrained one: whole models over the length.

Time and peak memory of a pass, and of a token after a context, of the original with transformers' own attentions and of
its converted copies. Tokens are random, and tables of positions are stretched where they end: only speed is measured.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from kernelformer.environment import environment
from kernelformer.errors import choice
from kernelformer.hf.find import find_attentions
from kernelformer.measure import lengths as measured
from kernelformer.measure.harness import fill_rows, run_in_process
from kernelformer.measure.lengths import BASELINES, TASKS, TOKEN, Subject, contender
from kernelformer.measure.settings import HEAPS, MEMORY_HEAP, PASSES
from kernelformer.modules.spec import parse_method
from kernelformer.quiet import silent_libraries
from kernelformer.studies.base import Log, Progress, write_record
from kernelformer.studies.lengths_result import Result, Row, picture, read_rows, tables
from kernelformer.studies.settings import LengthsSettings
from kernelformer.timing import MOST_ROUNDS, Figures

__all__ = ["check", "picture", "record", "run", "steps", "tables"]
NAME = "lengths"
FIRST_CONTEXT = 128
STRETCHED = ("max_position_embeddings", "n_positions")  # what a configuration says of positions


def check(settings: LengthsSettings) -> None:
    """Raise ValueError for settings that are not known, before anything is measured."""
    choice("task", settings.task, TASKS)
    for name in settings.baselines:
        choice("baseline", name, BASELINES)
    for spec in settings.attention:
        parse_method(spec)
    for what in ("lengths", "attention", "baselines"):
        if not getattr(settings, what):
            raise ValueError(f"{what} must name at least one, got {getattr(settings, what)!r}.")
    if settings.rounds > MOST_ROUNDS:
        raise ValueError(f"rounds must be at most {MOST_ROUNDS}, got {settings.rounds}.")
    if 0 < settings.generate < FIRST_CONTEXT:
        raise ValueError(f"generate is a context of at least {FIRST_CONTEXT} tokens, got {settings.generate}.")


def contenders(settings: LengthsSettings) -> list[str]:
    """Return the names of all contenders, the original's first."""
    return list(dict.fromkeys((*settings.baselines, *settings.attention)))


def cases(settings: LengthsSettings) -> list[tuple[str, int]]:
    """Return pairs of pass and length, short ones first, from which long ones are predicted."""
    lengths = sorted(set(settings.lengths))
    pairs = [(kind, length) for kind in PASSES[: 1 + settings.backward] for length in lengths]
    context = FIRST_CONTEXT
    while context <= settings.generate:
        pairs.append((TOKEN, context))
        context *= 2
    return pairs


def steps(settings: LengthsSettings) -> int:
    """Return how many processes measure: for each case one of all times, and of a pass one of each one's memory."""
    check(settings)
    weighed = settings.memory * len(contenders(settings))
    return sum(1 if kind == TOKEN else 1 + weighed for kind, _ in cases(settings))


def run(
    settings: LengthsSettings, folder: Path, log: Log = lambda _: None, progress: Progress = lambda: None
) -> Result:
    """Measure everything that ``folder`` does not hold yet; see `studies.base`.

    Every point is written there when it is measured, so that a second call goes on.
    """
    check(settings)
    result = _described(settings)
    result.rows = read_rows(folder, NAME, result.about)
    for kind, length in cases(settings):
        rows = [result.row(kind, length, name) for name in contenders(settings)]
        for row in rows:
            row.note = result.refusal(row, settings.limit) if row.seconds is None else ""
        for row in rows if settings.memory and kind != TOKEN else ():
            log(f"{kind}, {length} tokens: memory of {row.attention}")
            if row.peak is None:
                _measure("memory", [row], settings)
                write_record(folder, NAME, settings, record(result))
            progress()
        log(f"{kind}{' after' if kind == TOKEN else ','} {length} tokens: timing")
        _measure("time", [row for row in rows if row.seconds is None], settings)
        write_record(folder, NAME, settings, record(result))
        progress()
    return result


def record(result: Result) -> dict[str, Any]:
    """Return the result as plain JSON."""
    rows = [asdict(row) for row in result.rows]
    return {"about": result.about, "stretched": result.stretched, "rows": rows, "crossovers": result.crossovers()}


def _subject(settings: LengthsSettings) -> Subject:
    return Subject(str(settings.model), settings.task, settings.random, settings.allow_pickle, settings.batch)


def _described(settings: LengthsSettings) -> Result:
    """A result without rows; what is wrong with the model or an attention is said before the first hour has passed."""
    subject, longest = _subject(settings), max(settings.lengths)
    with silent_libraries():
        model, stretched = subject.build(longest)
    kinds = {x.causal for x in find_attentions(model)}
    task = "causal" if kinds == {True} else "encoder"
    if subject.task not in ("auto", task):
        raise ValueError(f"{subject.folder} is of the task {task!r}, got --task {subject.task}.")
    if settings.generate and task != "causal":
        raise ValueError(f"{subject.folder} is an encoder and cannot generate; leave --generate out.")
    for name in contenders(settings):
        contender(model, name)
    return Result(
        describe(model, subject, Path(subject.folder).resolve().name, task), settings.baselines, stretched=stretched
    )


def describe(model: Any, subject: Subject, name: str, task: str) -> dict[str, Any]:
    """Return what the figures of a model depend on: the model, its sizes and weights, and the machine."""
    sizes = {key: x for key, x in model.config.to_dict().items() if key not in STRETCHED}
    config = json.dumps(sizes, sort_keys=True, default=str)
    machine = {key: value for key, value in environment(torch.get_num_threads()).items() if key != "date"}
    return {
        "model": name,
        "kind": type(model).__name__,
        "configuration": hashlib.sha256(config.encode()).hexdigest()[:12],
        "weights": "random" if subject.random else "pretrained",
        "task": task,
        "batch": subject.batch,
        "environment": machine,
    }


def _measure(what: str, rows: Sequence[Row], settings: LengthsSettings) -> None:
    """Fill in rows of one pass and length, by one process."""

    def measure(running: list[Row]) -> list[Figures]:
        request = {"what": what, "kind": running[0].kind, "length": running[0].length}
        figures = job({**request, "names": [row.attention for row in running]}, settings)
        return [figures[row.attention] for row in running]

    fill_rows(rows, measure)


def job(request: Mapping[str, Any], settings: LengthsSettings) -> dict[str, Figures]:
    """Run `measure.lengths.measure` in a process of its own: {contender: figures}.

    Args:
        request: what, kind, length and names of the contenders.
        settings: of the model and the time to spend.
    """
    return run_in_process(
        measured.measure,
        threads=torch.get_num_threads(),
        allocator=MEMORY_HEAP if request["what"] == "memory" else HEAPS["default"],
        subject=asdict(_subject(settings)),
        rounds=settings.rounds,
        budget=settings.budget,
        **request,
    )
