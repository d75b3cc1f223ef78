"""What is measured on a trained model besides its score, by name: functions from the folder of a run to plain JSON."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from kernelformer.environment import environment
from kernelformer.errors import StoppedError, TrainingError
from kernelformer.files import read_json, write_json
from kernelformer.page import portable, rounded
from kernelformer_lab.evidence.base import TRAINING, study_settings
from kernelformer_lab.evidence.rules import SAMPLES, TEST, VALUE
from kernelformer_lab.records import RESULT, read_head
from kernelformer_lab.reports.comparison import read_run
from kernelformer_lab.studies import find_study
from kernelformer_lab.studies.redraws import eigenvalue_statistics, gradient_statistics, redraw_statistics
from kernelformer_lab.subprocesses import end_with_parent
from kernelformer_lab.training.config import Run
from kernelformer_lab.training.evaluation import evaluate_samples
from kernelformer_lab.training.inspection import saved_run
from kernelformer_lab.training.session import train

GROUPS = 200  # of samples at most: their number makes an error uncertain by 5%
LEVELS = (20, 40, 60, 80)  # percent of the validation samples: the checkpoints of KL-Transformer, Table 14


def redraws(folder: Path) -> dict[str, Any]:
    """How much a classifier depends on the draw of its features: 100 draws on 200 validation samples."""
    measured = redraw_statistics(folder)
    flat = {name: x["mean"] if isinstance(x, Mapping) else x for name, x in measured["figures"].items()}
    errors = {f"{name}_error": x["error"] for name, x in measured["figures"].items() if isinstance(x, Mapping)}
    return {
        **flat,
        **errors,
        "deterministic": measured["deterministic"],
        "own_accuracy": measured["own_draw"]["accuracy"],
    }


def eigenvalues(folder: Path) -> dict[str, Any]:
    """Mean, largest and smallest eigenvalues of learned covariances at the start and at the end of training."""
    measured = eigenvalue_statistics(folder)
    start, end = measured["start"], measured["end"]
    if start is None or end is None:
        return {}
    both = {
        f"{when}_{name}": side[name]
        for when, side in (("start", start), ("end", end))
        for name in ("minimum", "maximum", "mean")
    }
    return {**both, "change": end["mean"] / start["mean"], "heads": end["heads"]}


def gradients(folder: Path) -> dict[str, Any]:
    """Gradients at the classifier over redraws, at the first checkpoint that has each of `LEVELS`, and at the end."""
    rows = gradient_statistics(folder, levels=[level / 100 for level in LEVELS])
    return {"rows": rows, **rows[-1], **first_at_levels(rows)}


def first_at_levels(rows: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """The first row, by step, whose accuracy is at each of `LEVELS`: ``at_60`` has 60% or more; absent: none has."""
    reached = {level: [x for x in rows if (x["accuracy"] or 0) >= level / 100] for level in LEVELS}
    return {f"at_{level}": enough[0] for level, enough in reached.items() if enough}


def samples(folder: Path) -> dict[str, Any]:
    """What groups of samples add to the standard error of the score, so that runs are compared on the same samples.

    Of weights that were selected it is the score on the test split, else that of the validation split.
    """
    run, _ = saved_run(folder)
    result = read_json(folder / RESULT)
    metric = result["metric"]
    selected = run.select == "best"
    value, parts = evaluate_samples(folder, "test" if selected else "validation", GROUPS)
    kept = result["test"][metric] if selected else result["value"]
    if math.isfinite(value) and not math.isclose(value, kept, rel_tol=1e-3, abs_tol=1e-3):
        raise ValueError(f"the model of {folder} has {metric} {value:.6g}, its result {kept:.6g}; train it anew.")
    path = f"{TEST}.{metric}" if selected else VALUE
    known = all(map(math.isfinite, parts))
    return {"path": path, "deviations": [float(f"{x:.3g}") for x in parts] if known else []}


PROBES: dict[str, Callable[[Path], dict[str, Any]]] = {
    "redraws": redraws,
    "eigenvalues": eigenvalues,
    "gradients": gradients,
    SAMPLES: samples,
}


JOB = "job.json"
STOPPED = 130  # as the shell says of Ctrl-C
ERROR = "error: "  # before the reason of a failure, to tell it from what libraries say


def main(request: str) -> int:
    """Do what the request says; why it failed goes to stderr."""
    end_with_parent()
    asked = json.loads(request)
    torch.set_num_threads(asked["threads"])
    try:
        do_job(asked)
    except KeyboardInterrupt:
        return STOPPED
    except (ValueError, OSError, TrainingError) as problem:
        print(f"{ERROR}{problem}", file=sys.stderr)
        return STOPPED if isinstance(problem, StoppedError) else 2
    return 0


def do_job(asked: dict[str, Any]) -> None:
    """Train or study what is asked for, or go on with it, and leave the outcome in its folder."""
    folder = Path(asked["folder"])
    folder.mkdir(parents=True, exist_ok=True)
    work: Callable[[dict[str, Any], Path], dict[str, Any]] = _train if asked["kind"] == TRAINING else _study
    write_json(folder / JOB, rounded(portable({"key": asked["key"], **work(asked, folder)})))


def _train(asked: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Train a run, or go on with it, then measure its probes; each is measured once."""
    run = Run.from_json(asked["request"])
    result = train(run, folder, resume=True, command=asked["command"], quiet=True)
    probes = {}
    for name in asked["probes"] if not result.diverged else ():
        kept = folder / f"{name}.json"
        if not kept.exists():
            write_json(kept, PROBES[name](folder))
        probes[name] = read_json(kept)
    record = read_run(folder)
    head = read_head(folder)
    return {
        "settings": run.as_json(),
        "environment": head["environment"],
        "data": head.get("data"),
        "started": record.started,
        "result": result.as_json(),
        "curve": [[p.step, p.values.get(result.metric, p.values["loss"])] for p in record.evaluation],
        "loss": _thinned([[p.step, p.values["loss"]] for p in record.training]),
        "probes": probes,
    }


def _thinned(points: list[list[float]], most: int = 60) -> list[list[float]]:
    """At most so many points of a curve, the last among them."""
    return points[:: -max(1, -(-len(points) // most))][::-1]


def _study(asked: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Run a study, or go on with it, and draw its picture."""
    study = find_study(asked["request"]["study"])
    settings = study_settings(study, asked["request"]["settings"])
    record = study.measure(settings, folder)
    record.save()
    study.picture(record, folder / f"{study.name}.png")
    return {"environment": environment(torch.get_num_threads()), "record": read_json(record.path)}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
