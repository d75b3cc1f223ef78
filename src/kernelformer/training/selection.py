"""Weights of a run's best evaluation: kept beside its checkpoints, each of which knows which of them were the best."""

from __future__ import annotations

import math
import re
import shutil
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset
from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState

from kernelformer.files import read_json
from kernelformer.hashes import check_hash, read_hashes, write_hashes
from kernelformer.tasks import Task
from kernelformer.training.checkpoints import STAGE, checkpoints_of, publish, reason

FOLDER = "best-"  # and the step, in the folder of a run


class Best(TrainerCallback, ExportableState):
    """Which evaluation of a run was the best so far; saved with every checkpoint.

    Args:
        task: whose metric decides, or whose loss where the metric is known at the end alone, as BLEU is.
    """

    def __init__(self, task: Task) -> None:
        self.task = task
        self.step = 0  # of it; 0: there was none yet
        self.scores: dict[str, float] = {}  # of it, with the names of evaluation

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint has to keep of the selection."""
        return {"args": {}, "attributes": {"step": self.step, "scores": dict(self.scores)}}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Go on from what the checkpoint knows."""
        saved: Any = state.stateful_callbacks  # by name, whatever the annotation says
        self.step, self.scores = (saved[type(self).__name__]["attributes"][name] for name in ("step", "scores"))

    def take(self, step: int, scores: dict[str, float]) -> bool:
        """Remember an evaluation if it is better than all before it; NaN is worse than any number."""
        by_loss = self.task.metric_from_judge
        name = "eval_loss" if by_loss else f"eval_{self.task.metric}"
        if name not in scores:
            raise _no_metric(self.task)
        new, old = scores[name], self.scores.get(name, math.nan)
        better = new > old if self.task.higher_is_better and not by_loss else new < old
        if self.step and not better and not (math.isnan(old) and not math.isnan(new)):
            return False
        self.step, self.scores = step, scores
        return True


def held_out_split(task: Task) -> Dataset[Any]:
    """The samples by which the best weights are scored."""
    try:
        data = task.split("test")
        size = len(data)  # type: ignore[arg-type]
    except ValueError as problem:
        raise _no_test(task, str(problem).rstrip(".")) from None
    if not size:
        raise _no_test(task, "it has no samples")
    return data


def _no_metric(task: Task) -> ValueError:
    return ValueError(
        f"select='best' needs a metric that every evaluation measures, got task {task.name!r}, whose {task.metric!r} "
        f"is not among them; say metric_from_judge=True in the task, and the loss decides, or leave select at 'last'."
    )


def _no_test(task: Task, why: str) -> ValueError:
    return ValueError(
        f"select='best' scores the best weights on the test split, which task {task.name!r} cannot give: {why}. Give "
        f"it one, or leave select at 'last'."
    )


def save_best(folder: Path, step: int, model: PreTrainedModel) -> None:
    """Keep the weights after a step, draws and all; those that no checkpoint needs any more go."""
    name = f"{FOLDER}{step}"
    model.save_pretrained(folder / STAGE / name)
    write_hashes(folder / STAGE / name)
    publish(folder / STAGE / name, folder / name)
    prune(folder, step)


def prune(folder: Path, best: int = 0) -> None:
    """Remove kept weights, but for those after step ``best`` and those that a checkpoint calls the best."""
    needed = {best, *(_best_known(checkpoint) for checkpoint, _ in checkpoints_of(folder))}
    for path in folder.glob(f"{FOLDER}*"):
        match = re.fullmatch(rf"{FOLDER}(\d+)", path.name)
        if match and int(match[1]) not in needed:
            shutil.rmtree(path, ignore_errors=True)


def check_best(checkpoint: Path) -> None:
    """Raise if the best weights that a checkpoint names are missing, or not what was saved."""
    step = best_step(read_json(checkpoint / TRAINER_STATE_NAME))
    if not step:
        return
    kept = checkpoint.parent / f"{FOLDER}{step}"
    hashes = read_hashes(kept)
    if not hashes:
        raise ValueError(f"the best weights that it names, {kept}, are missing")
    for name, expected in hashes.items():
        try:
            check_hash(kept / name, expected)
        except (OSError, ValueError) as problem:
            raise ValueError(f"{kept / name}, of the best weights that it names: {reason(problem)}") from None


def _best_known(checkpoint: Path) -> int:
    """The step of the best weights when a checkpoint was saved; 0: none, or the checkpoint is damaged."""
    try:
        return best_step(read_json(checkpoint / TRAINER_STATE_NAME))
    except (OSError, ValueError, LookupError, TypeError):
        return 0


def best_step(state: Any) -> int:
    """What the state of a trainer says of the best weights; 0: nothing."""
    saved = state["stateful_callbacks"].get(Best.__name__)
    return 0 if saved is None else int(saved["attributes"]["step"])
