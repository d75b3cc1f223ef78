"""One job of the queue in a process of its own: trains or studies, and leaves ``job.json`` in its folder."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kernelformer.environment import environment
from kernelformer.errors import StoppedError, TrainingError
from kernelformer.evidence.base import TRAINING, study_settings
from kernelformer.evidence.probes import PROBES
from kernelformer.files import read_json, write_json
from kernelformer.records import read_head
from kernelformer.reports.comparison import read_run
from kernelformer.reports.portable import portable, rounded
from kernelformer.studies import STUDIES
from kernelformer.subprocesses import end_with_parent
from kernelformer.training.config import Run
from kernelformer.training.session import train

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
    study = STUDIES[asked["request"]["study"]]
    settings = study_settings(study, asked["request"]["settings"])
    result = study.run(settings, folder)
    study.save(settings, result, folder)
    study.picture(result, folder / f"{study.name}.png")
    return {"environment": environment(torch.get_num_threads()), "record": read_json(folder / f"{study.name}.json")}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
