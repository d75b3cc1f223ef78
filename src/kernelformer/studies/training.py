"""Training within a study: quiet, logged, and going on where it was stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from kernelformer.studies.base import Log
from kernelformer.training import Result, Run, StoppedError, train


class _ValueLog(TrainerCallback):
    """Callback that logs one value of the trainer wherever it is measured."""

    def __init__(self, name: str, value: str, log: Log) -> None:
        self.name, self.value, self.log = name, value, log

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any
    ) -> None:
        """Log the step and the value."""
        if self.value in logs:
            what = self.value.removeprefix("eval_")
            self.log(f"{self.name}: step {state.global_step} of {state.max_steps}, {what} {logs[self.value]:.3f}")


def train_model(run: Run, folder: Path, name: str, log: Log, value: str = "loss") -> Result:
    """Train a model, or go on with its training; a finished one only gives its result.

    Args:
        run: its settings.
        folder: of the run.
        name: of the model, for the log.
        log: takes a sentence on every measured value.
        value: what is logged: "loss", or "eval_" and a metric.

    Raises:
        StoppedError: Ctrl-C or SIGTERM; the run was saved.
        TrainingError: the folder has a run of other settings or on other data.
    """
    log(f"{name}: training")
    try:
        return train(run, folder, resume=True, quiet=True, callbacks=[_ValueLog(name, value, log)])
    except StoppedError:
        raise StoppedError(f"stopped in the training of the {name} model; the same call goes on from there.") from None
