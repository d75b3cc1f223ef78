"""Small language models over bytes, which studies train and then change."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from kernelformer.settings import SEED, Settings, option
from kernelformer_lab.studies.base import Log
from kernelformer_lab.tasks import Task
from kernelformer_lab.training import Result, Run, StoppedError, TrainingError, evaluate, load_run, train


@dataclass(frozen=True, kw_only=True)
class ByteModelSettings(Settings):
    """Settings of studies that train small language models over bytes."""

    data: Path | None = option(None, "file or folder of text; default: Python's own sources")
    steps: int = option(600, "of training, for each model", least=1)
    length: int = option(256, "bytes of a sample", least=2)
    layers: int = option(2, "of the model", least=1)
    width: int = option(128, "of the model: its hidden size", least=1)
    heads: int = option(4, "of the attention", least=1)
    batch: int = option(8, "samples per step", least=1)
    lr: float = option(5e-3, "the largest; ten times that for position tables", name="learning_rate")
    samples: int = option(64, "validation windows", least=1)
    seed: int = option(0, SEED, least=0)


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
    """Train a model, or resume its training; of a finished one return the result.

    Args:
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


METRIC = "bits_per_byte"


def byte_run(settings: ByteModelSettings, attention: str, **changes: Any) -> Run:
    """The training run of a model.

    Args:
        changes: settings of the run that are others; a tenth of the steps is always warm-up.
    """
    data = {} if settings.data is None else {"data": str(settings.data)}
    steps, rate = changes.get("steps", settings.steps), changes.get("learning_rate", settings.lr)
    values: dict[str, Any] = {
        "task_options": {"length": settings.length, "validation_samples": settings.samples, **data},
        "model": {
            "hidden_size": settings.width,
            "num_hidden_layers": settings.layers,
            "num_attention_heads": settings.heads,
        },
        "steps": steps,
        "batch_size": settings.batch,
        "learning_rate": rate,
        "bias_lr": 10 * rate,
        "warmup_steps": steps // 10,
        "schedule": "cosine",
        "seed": settings.seed,
        "save_every": 100,
        "keep": 1,
        "log_every": 25,
    }
    return Run(task="bytes", attention=attention, **{**values, **changes})


def trained_model(name: str, run: Run, folder: Path, log: Log) -> tuple[Any, float]:
    """The model of a run, trained now or before, and the seconds that it took.

    Raises:
        StoppedError: Ctrl-C or SIGTERM in a training, which was saved.
        TrainingError: the folder has a model of other settings or of other data, or it does not train.
    """
    result = train_model(run, folder, name, log)
    if result.diverged:
        raise TrainingError(
            f"the {name} model diverged at step {result.steps} with lr={run.learning_rate:g}; take a smaller one, "
            f"and another folder than {folder.parent}."
        )
    return load_run(folder)[1].eval(), result.seconds


def bits(model: Any, task: Task) -> float:
    """Bits per byte on the validation windows."""
    return evaluate(model, task, batch_size=16)[METRIC]
