"""How good random features are as estimators of softmax attention: Performer (2009.14794), Fig. 2 and 4, Theorems 1-4.

Fig. 4: mean squared error of the output over the number of features, at the printed size. "Appropriately normalized"
inputs are Gaussian here; entries of variance 1 have the norm 2 as the kernel sees them at d = 16, and other norms stand
beside it. Fig. 2 and the theorems are about pairs of vectors, and are simulated against what is printed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from kernelformer.settings import plain
from kernelformer.studies.base import Log, Progress, read_record, write_record
from kernelformer.studies.estimators_measure import (
    kernel_errors,
    output_errors,
    regularized_rows,
    tail_rows,
    uniform_rows,
)
from kernelformer.studies.estimators_picture import picture
from kernelformer.studies.estimators_result import Result, record, restore
from kernelformer.studies.estimators_tables import tables
from kernelformer.studies.settings import EstimatorsSettings as Settings

__all__ = ["picture", "record", "run", "steps", "tables"]
NAME = "estimators"


def steps(settings: Settings) -> int:
    """How often `run` calls ``progress``: for each norm, and each part on pairs of vectors."""
    return len(settings.norms) + 4


def run(settings: Settings, folder: Path, log: Log, progress: Progress) -> Result:
    """Measure every part that the record in ``folder`` does not have, of the same settings."""
    kept = read_record(folder, NAME) or {}
    result = restore(kept) if kept.get("settings") == plain(settings) else Result()
    done = {x.norm for x in result.output}
    # What is done, the rows that it goes to, whether they are there, and what makes them.
    parts: list[tuple[str, list[Any], bool, Callable[[Settings], Sequence[Any]]]] = [
        (f"output at norm {x:g}", result.output, x in done, partial(output_errors, norm=x)) for x in settings.norms
    ]
    parts += [
        ("errors over angle and length", result.kernel, bool(result.kernel), kernel_errors),
        ("regularized kernel over d", result.regularized, bool(result.regularized), regularized_rows),
        ("tails over d", result.tails, bool(result.tails), tail_rows),
        ("largest error of an entry over d", result.uniform, bool(result.uniform), uniform_rows),
    ]
    for sentence, rows, there, measure in parts:
        if not there:
            log(sentence)
            rows += measure(settings)
            write_record(folder, NAME, settings, record(result))
        progress()
    return result
