"""How much redrawing random features changes what trained classifiers say (KL-Transformer, 2110.08323, Sec. 4.1).

Measures finished runs, such as those of a comparison of several methods and seeds: relative standard deviation,
prediction inconsistency and gain by voting over draws that training has not seen (Fig. 5, 9, 10), eigenvalues of the
kernels' covariances at the start and at the end of training (Tables 4, 9-12), gradients at the classifier (Table 14).
`redraw_statistics`, `eigenvalue_statistics` and `gradient_statistics` measure one run each by themselves.

Departures from the paper, which has one model for each method: several seeds, and standard errors over samples; the
validation split, or so many samples of it, where the paper has the test split for Retrieval.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kernelformer.errors import TrainingError
from kernelformer.records import MODEL, RUN, standing
from kernelformer.studies.base import Log, Progress, read_record, write_record
from kernelformer.studies.redraws_measure import eigenvalue_statistics, gradient_statistics, redraw_statistics
from kernelformer.studies.redraws_picture import picture
from kernelformer.studies.redraws_result import Measured, Result, record
from kernelformer.studies.redraws_tables import eigenvalue_table, tables
from kernelformer.studies.settings import RedrawsSettings as Settings
from kernelformer.training.first_weights import weights_hash

__all__ = [
    "eigenvalue_statistics",
    "eigenvalue_table",
    "gradient_statistics",
    "measure_run",
    "picture",
    "record",
    "redraw_statistics",
    "run",
    "steps",
    "tables",
]
NAME = "redraws"


def steps(settings: Settings) -> int:
    """How often `run` calls ``progress``."""
    return len(run_folders(settings))


def run_folders(settings: Settings) -> list[Path]:
    """The folders of all runs, those of comparisons among them.

    Raises:
        ValueError: a folder that has none, or nothing at all.
    """
    folders: dict[Path, None] = {}
    for given in map(Path, settings.runs):
        inside = [given] if (given / RUN).is_file() else sorted(x.parent for x in given.glob(f"*/{RUN}"))
        if not inside:
            kind = f"has no {RUN}, nor has a folder in it" if given.is_dir() else "is no folder"
            raise ValueError(f"{given} {kind}; give the folder of a run or of a comparison.")
        folders |= dict.fromkeys(inside)
    if not folders:
        raise ValueError("there is nothing to measure, got no folder; give those of finished runs.")
    return list(folders)


def run(settings: Settings, folder: Path, log: Log, progress: Progress) -> Result:
    """Measure all finished runs; what the record in ``folder`` has of the same models and settings is taken from there.

    A run that is not finished, has diverged, has no classes or has lost its data is named and left out.

    Raises:
        ValueError: no run is left, or two of them are of the same task, attention and seed.
    """
    result = Result(settings)
    before = _kept(settings, folder)
    for path in run_folders(settings):
        try:
            weights = _weights(path)
            measured = before.get(weights)
            if measured is None:
                log(f"{path.name}: {settings.draws} draws")
                measured = measure_run(path, settings, weights)
        except (ValueError, TrainingError, OSError) as problem:
            log(f"{path} is left out: {problem}")
            result.left_out[path.name] = str(problem)
        else:
            result.add(measured)
            write_record(folder, NAME, settings, record(result))
        progress()
    if not result.runs:
        raise ValueError(f"no run could be measured: {'; '.join(result.left_out.values())}")
    return result


def measure_run(folder: Path, settings: Settings, weights: str = "") -> Measured:
    """Everything that the study says of one run.

    Args:
        folder: of the run.
        settings: of the study.
        weights: hash of the model, by which a record is known again.
    """
    first, count = settings.first_draw, settings.gradients
    redraws = redraw_statistics(folder, draws=settings.draws, samples=settings.samples, first_draw=first)
    return Measured(
        folder=folder.name,
        task=redraws["task"],
        attention=redraws["attention"],
        seed=redraws["seed"],
        weights=weights,
        redraws=redraws,
        eigenvalues=eigenvalue_statistics(folder),
        gradients=gradient_statistics(folder, draws=count, samples=count, first_draw=first) if count else [],
    )


def _weights(path: Path) -> str:
    if not (path / MODEL).is_dir():
        raise TrainingError(f"it is {standing(path)}")
    return weights_hash(path)


def _kept(settings: Settings, folder: Path) -> dict[str, Measured]:
    """What was measured before with the same settings, whichever the folders were, by the hash of the model."""
    record: dict[str, Any] = read_record(folder, NAME) or {}
    how = ("draws", "samples", "first_draw", "gradients")
    there = record.get("settings", {})
    if any(there.get(x) != getattr(settings, x) for x in how):
        return {}
    return {x["weights"]: Measured(**x) for x in record["runs"]}
