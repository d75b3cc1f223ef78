"""The end of a training run: which weights stay, their scores, and the record of it all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from kernelformer.files import write_json
from kernelformer.hashes import write_hashes
from kernelformer.records import MODEL, RESULT, RUN, Result, read_head
from kernelformer.tasks import Task
from kernelformer.training.checkpoints import STAGE, metrics, publish
from kernelformer.training.config import Run
from kernelformer.training.evaluation import judged, load_model
from kernelformer.training.meter import Log
from kernelformer.training.selection import FOLDER
from kernelformer.training.standard_errors import score_text, split_errors
from kernelformer.training.trainer import RunTrainer


def take_best(folder: Path, task: Task, trainer: RunTrainer, data: Dataset[Any] | None) -> dict[str, float]:
    """Give the model its best weights, where they were selected, and return their scores on the test split.

    Args:
        folder: of the run.
        task: of the run.
        trainer: that has made all steps, on every process.
        data: the test split; None: the last weights are the result.
    """
    if trainer.best is None or data is None or trainer.recorder.diverged:
        return {}
    # All of them, buffers too: the last draw of random features is not the one that these weights have learned.
    best = load_model(task.model, folder / f"{FOLDER}{trainer.best.step}")
    trainer.network.load_state_dict(best.state_dict())
    return trainer.score_split("test", data)


def finish(
    run: Run, folder: Path, task: Task, trainer: RunTrainer, test: dict[str, float], remarks: list[str], say: Log
) -> Result:
    """Write the model and the result of a run that is at its end.

    Args:
        run: its settings.
        folder: of it.
        task: of it.
        trainer: whose model has the weights to keep.
        test: of `take_best`.
        remarks: of the task, that were said already.
        say: called with sentences.
    """
    result = _result(task, trainer, test, metrics(folder))
    for remark in task.remarks():
        if remark not in remarks:
            say(remark)
    if result.diverged:
        say(
            f"diverged: the loss is not finite at step {result.steps}; try a smaller learning_rate than "
            f"{run.learning_rate:g}, or a longer warm-up"
        )
    else:
        trainer.network.save_pretrained(folder / STAGE / MODEL)
        task.save_extra(folder / STAGE / MODEL)
        write_hashes(folder / STAGE / MODEL)
        publish(folder / STAGE / MODEL, folder / MODEL)
        said = score_text(result.value, result.value_error)
        say(f"finished: {task.metric} {said} after {result.steps} steps, {result.seconds:.0f} s{_selected(result)}")
    # In this order: whenever the process is killed, a folder with a result says that it is finished.
    write_json(folder / RUN, {**read_head(folder), "finished": True})
    write_json(folder / RESULT, result.as_json())
    return result


def _selected(result: Result) -> str:
    """What there is to say of the best weights, where they were selected."""
    if result.best_step is None:
        return ""
    test = score_text(result.test[result.metric], result.test_error)
    return f"; the best weights are those of step {result.best_step}, {result.metric} on the test split {test}"


def _result(task: Task, trainer: RunTrainer, test: dict[str, float], lines: Sequence[dict[str, Any]]) -> Result:
    recorder, meter, best, metric = trainer.recorder, trainer.meter, trainer.best, task.metric
    scores: dict[str, float] = {}
    errors: dict[str, float] = {}
    tested: dict[str, float] = {}
    test_errors: dict[str, float] = {}
    if not recorder.diverged:
        data: Any = trainer.eval_dataset
        scores, errors = _all_scores(task, trainer, recorder.evaluation if best is None else best.scores, data)
        if best is not None:
            tested, test_errors = _all_scores(task, trainer, test, task.split("test"))
    return Result(
        metric=metric,
        value=scores.pop(metric, math.nan),
        value_error=errors.get(metric, math.nan),
        scores=scores,
        loss=scores.get("loss", math.nan),
        loss_error=errors.get("loss", math.nan),
        best_step=None if best is None or recorder.diverged else best.step,
        test=tested,
        test_error=test_errors.get(metric, math.nan),
        grad_norm=gradient_norms([*lines, {"grad_norms": meter.take_norms()}]),  # a run that diverged may have some
        tokens_per_second=speed(lines),
        peak_bytes=meter.peak,
        parameters=trainer.network.num_parameters(),
        seconds=round(meter.seconds, 6),
        input_seconds=round(meter.waited, 6),
        steps=trainer.state.global_step,
        diverged=recorder.diverged,
    )


def _all_scores(
    task: Task, trainer: RunTrainer, values: dict[str, float], data: Dataset[Any]
) -> tuple[dict[str, float], dict[str, float]]:
    """Scores of a split with what the task judges of it, and the errors of some, by their names."""
    values = values | judged(task, trainer.network, data, trainer.args.per_device_eval_batch_size)
    return split_errors({name.removeprefix("eval_"): x for name, x in values.items() if name.startswith("eval_")})


def speed(lines: Sequence[dict[str, Any]]) -> float:
    """Tokens per second: the median over intervals of ``metrics.jsonl`` after the first, or that one if it is alone."""
    points = [(float(line["seconds"]), int(line["tokens"])) for line in lines if "loss" in line]
    pairs = list(pairwise(points)) or [((0.0, 0), p) for p in points]
    return median([(b[1] - a[1]) / max(b[0] - a[0], 1e-9) for a, b in pairs] or [0.0])


def gradient_norms(lines: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Median, 95th percentile and maximum of the finite norms in ``metrics.jsonl``; none where there are none.

    A line has those of all steps since the line before it, ``grad_norms``; of older runs that of its own step alone.
    """
    old = [[line["grad_norm"]] if "grad_norm" in line else [] for line in lines]
    norms = np.array([x for line, own in zip(lines, old, strict=True) for x in line.get("grad_norms", own)])
    norms = norms[np.isfinite(norms)]
    if not norms.size:
        return {}
    return {"median": float(np.median(norms)), "p95": float(np.percentile(norms, 95)), "max": float(norms.max())}
