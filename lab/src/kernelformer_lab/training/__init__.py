"""Training runs on Hugging Face's trainer: settings, set-up, checkpoints, evaluation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernelformer.errors import StoppedError, TrainingError
from kernelformer.lazy import lazy_names
from kernelformer_lab.records import Result
from kernelformer_lab.training.config import Run

if TYPE_CHECKING:
    from kernelformer_lab.training.evaluation import evaluate, load_run
    from kernelformer_lab.training.session import build_model, train

__all__ = ["Result", "Run", "StoppedError", "TrainingError", "build_model", "evaluate", "load_run", "train"]

__getattr__, __dir__ = lazy_names(
    __name__,
    dict.fromkeys(("evaluate", "load_run"), f"{__name__}.evaluation")
    | dict.fromkeys(("build_model", "train"), f"{__name__}.session"),
)
