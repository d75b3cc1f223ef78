"""Training runs on Hugging Face's trainer: settings, set-up, checkpoints, evaluation."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kernelformer.records import Result
from kernelformer.training.run import Run, StoppedError, TrainingError

if TYPE_CHECKING:
    from kernelformer.training.evaluation import evaluate, load_run
    from kernelformer.training.session import build_model, train

__all__ = ["Result", "Run", "StoppedError", "TrainingError", "build_model", "evaluate", "load_run", "train"]

# Settings can be made and checked at once; transformers, which what follows needs, takes seconds to import.
_LATER = {"evaluate": "evaluation", "load_run": "evaluation", "build_model": "session", "train": "session"}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LATER[name]}"), name)
