"""Which features stand for softmax attention best: error by their number, and the time that an error costs.

For all methods that estimate softmax attention without training: the error of the output and the distance of the
attention rows against the number of features or landmarks, on vectors of given norms and on those of pretrained models,
with and without a window of exact attention; and the least time at which each reaches a given error.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from kernelformer.environment import environment
from kernelformer.settings import plain
from kernelformer.studies.base import Log, Progress, read_record, write_record
from kernelformer.studies.features_data import case_names, make_case
from kernelformer.studies.features_measure import (
    Sized,
    Target,
    default_attentions,
    is_learned,
    measured_row,
    measured_times,
    reference_rows,
    sizes_of,
)
from kernelformer.studies.features_picture import picture
from kernelformer.studies.features_result import Result, record, restore
from kernelformer.studies.features_tables import markdown, tables
from kernelformer.studies.settings import FeaturesSettings as Settings

__all__ = ["check_settings", "picture", "record", "run", "steps", "tables"]
NAME = "features"


def check_settings(settings: Settings) -> None:
    """Raise for settings that cannot be measured, before anything is."""
    for name in ("features", "window", "errors"):
        values = getattr(settings, name)
        if not values or len(set(values)) != len(values):
            raise ValueError(f"{name} must be different numbers, at least one, got {list(values)}.")
    names = case_names(settings)
    if not names or len(set(names)) != len(names):
        raise ValueError(
            f"norms and models must be different, at least one of either, got norms {list(settings.norms)} and models "
            f"{[Path(x).name for x in settings.model]}; models go by the last part of their paths."
        )
    if len(settings.text) not in {min(1, len(settings.model)), len(settings.model)}:
        raise ValueError(
            f"text must be one file for all models or one for each, got {len(settings.text)} for "
            f"{len(settings.model)} models."
        )
    for path in settings.text:
        if not Path(path).exists():
            raise ValueError(f"there is no file {path} to read text from.")


def steps(settings: Settings) -> int:
    """How often `run` calls ``progress``: for each case and window, and each window of a kind of case to be timed."""
    return len(settings.window) * (len(case_names(settings)) + len(_kinds(settings)))


def run(settings: Settings, folder: Path, log: Log, progress: Progress) -> Result:
    """Measure everything; see `studies.base`.

    Figures are written after each case and window. A study that was stopped goes on with the next one; one that was
    finished starts anew.
    """
    check_settings(settings)
    attentions = list(dict.fromkeys(settings.attention or default_attentions()))
    result = Result(settings, attentions, [x for x in attentions if is_learned(x)])
    _restore(result, folder)
    for part in (_measure_errors(result, log), _measure_times(result, log)):
        for new in part:
            if new:
                write_record(folder, NAME, settings, record(result))
            progress()
    (folder / f"{NAME}.md").write_text(markdown(result), encoding="utf-8")
    return result


def _kinds(settings: Settings) -> list[str]:
    """One case of each kind that may have passes of its own to time."""
    names = case_names(settings)
    return [*names[: min(1, len(settings.norms))], *names[len(names) - len(settings.model) :]]


def _restore(result: Result, folder: Path) -> None:
    """Take what a study of the same settings, attentions and machine has measured, if it was stopped."""
    kept = read_record(folder, NAME) or {}
    here = environment(torch.get_num_threads())
    same = kept.get("settings") == plain(result.settings) and kept["attentions"] == result.attentions
    if same and {**kept["environment"], "date": here["date"]} == here:
        before = Result(result.settings, result.attentions, result.untrained)
        restore(before, kept)
        if not _is_finished(before):
            restore(result, kept)


def _is_finished(result: Result) -> bool:
    windows = set(result.settings.window)
    errors = {(x.data, x.window) for x in result.rows} >= {(x, w) for x in case_names(result.settings) for w in windows}
    return errors and all(_timed(result, name, w) for name in _kinds(result.settings) for w in windows)


def _timed(result: Result, name: str, window: int) -> bool:
    """Whether the passes of a case are timed."""
    case = result.cases[name]
    return any((x.head_dim, x.causal, x.window) == (case.head_dim, case.causal, window) for x in result.times)


def _measure_errors(result: Result, log: Log) -> Iterator[bool]:
    """Measure errors, a case and window at a time; True: anew."""
    settings = result.settings
    for name in case_names(settings):
        done = {x.window for x in result.rows if x.data == name}
        yield from (False for _ in done)
        left = [x for x in settings.window if x not in done]
        if not left:
            continue
        log(f"{name}: queries and keys")
        case = make_case(settings, name)
        target = Target(case)
        result.cases[name] = case.about
        for window in left:
            rows = reference_rows(target, settings, name, window)
            refused: dict[str, str] = {}
            for spec in result.attentions:
                reason = Sized.of(spec).refusal(causal=case.about.causal, window=window)
                if reason is not None:
                    refused[spec] = reason
                    continue
                log(f"{name}, window {window}: {spec}")
                rows += [measured_row(target, settings, name, window, x) for x in sizes_of(spec, settings)]
            result.rows += rows
            result.left_out[f"{name}, window {window}"] = refused
            yield True


def _measure_times(result: Result, log: Log) -> Iterator[bool]:
    """Time the passes of all cases, a head dimension, causality and window at a time; True: anew."""
    for name in _kinds(result.settings):
        case = result.cases[name]
        for window in result.settings.window:
            new = not _timed(result, name, window)
            if new:
                way = "causal" if case.causal else "bidirectional"
                log(f"timing, {way}, {case.head_dim} dimensions, window {window}")
                result.times |= measured_times(
                    result.settings, result.attentions, head_dim=case.head_dim, causal=case.causal, window=window
                )
            yield new
