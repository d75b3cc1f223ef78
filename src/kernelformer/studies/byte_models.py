"""Small language models over bytes, which studies train and then change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kernelformer.studies.base import Log
from kernelformer.studies.settings import ByteModelSettings
from kernelformer.studies.training import train_model
from kernelformer.tasks import Task
from kernelformer.training import Run, TrainingError, evaluate, load_run

METRIC = "bits_per_byte"


def byte_run(settings: ByteModelSettings, attention: str, **changes: Any) -> Run:
    """The training run of a model.

    Args:
        settings: of the study.
        attention: its spec.
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
