"""Time, tokens, memory and scores of a run, and its lines of metrics."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from kernelformer_lab.analysis.statistics import GROUPS, UNKNOWN, Numbers, deviations, sample_groups, standard_error
from kernelformer_lab.memory import peak, reset_peak
from kernelformer_lab.records import METRICS
from kernelformer_lab.tasks import Task
from kernelformer_lab.tasks.base import Outcome
from kernelformer_lab.training.checkpoints import finite, writing

ERROR = "_error"  # after the name of a score, the name of its standard error


@dataclass(frozen=True)
class Contributions:
    """Contributions of N samples to the scores of a split.

    Args:
        losses: (N) float64, sums over the labels of a sample.
        counts: (N) labels that count.
        right: (N) labels that were the likeliest class.
        answers: (N) classes or numbers, of models with one answer per sample.
        labels: (N), of the same.
        top5: (N) whether the label was among the five likeliest classes, where there are more.
    """

    losses: NDArray[Any]
    counts: NDArray[Any]
    right: NDArray[Any]
    answers: NDArray[Any] | None = None
    labels: NDArray[Any] | None = None
    top5: NDArray[Any] | None = None
    split: str = ""

    def outcome(self) -> Outcome:
        """All samples together."""
        return self._outcome(self._sums(slice(None)), self.answers, self.labels)

    def outcomes_without(self, groups: Sequence[NDArray[Any]]) -> Iterator[Outcome]:
        """Of all samples but those of one group, for each of the groups."""
        everything = self._sums(slice(None))
        for group in groups:
            rest = [None if x is None else np.delete(x, group) for x in (self.answers, self.labels)]
            yield self._outcome(everything - self._sums(group), *rest)

    def _sums(self, chosen: Any) -> NDArray[Any]:
        """Of losses, labels, right answers and those among five, of some samples."""
        top5 = self.right if self.top5 is None else self.top5
        return np.array([np.sum(x[chosen], dtype=np.float64) for x in (self.losses, self.counts, self.right, top5)])

    def _outcome(self, sums: NDArray[Any], answers: NDArray[Any] | None, labels: NDArray[Any] | None) -> Outcome:
        numbers = labels is not None and np.issubdtype(labels.dtype, np.floating)
        with np.errstate(divide="ignore", invalid="ignore"):
            loss, right, top5 = (float(x) for x in sums[[0, 2, 3]] / sums[1])
        return Outcome(
            loss=loss,
            right=math.nan if numbers else right,
            predictions=answers,
            labels=labels,
            split=self.split,
            top5=math.nan if self.top5 is None else top5,
        )


def standard_errors(task: Task, samples: Contributions) -> dict[str, float]:
    """Standard errors of the loss and of all scores of a task, as if its samples were independent.

    They are those of the jackknife (`analysis.statistics.deviations`). Up to `GROUPS` samples each is a group; then the
    error of an accuracy p is sqrt(p (1 - p) / (N - 1)) exactly, that of a mean the sample's deviation / sqrt(N).

    Returns:
        Errors by the names of the scores, and "loss"; NaN where there are fewer than two samples with labels.

    Cost: G times that of the task's `score`.
    """
    return {name: standard_error(x) for name, x in sample_deviations(task, samples).items()}


def sample_deviations(task: Task, samples: Contributions, most: int = GROUPS) -> dict[str, Numbers]:
    """Contributions of at most so many groups of samples to the standard errors of the loss and of all scores.

    Returns:
        (G) by the names of the scores, and "loss"; `UNKNOWN` where there are fewer than two samples with labels.
    """
    size = len(samples.losses)
    whole = _values(task, samples.outcome())
    if size < 2 or np.count_nonzero(samples.counts) < 2:
        return dict.fromkeys(whole, UNKNOWN)
    groups = sample_groups(size, most)
    without = [_values(task, outcome) for outcome in samples.outcomes_without(groups)]
    return {name: deviations(value, [x[name] for x in without], groups) for name, value in whole.items()}


def _values(task: Task, outcome: Outcome) -> dict[str, float]:
    return {**task.score(outcome), "loss": outcome.loss}


def split_errors(values: Mapping[str, float]) -> tuple[dict[str, float], dict[str, float]]:
    """Scores, and the standard errors among them by the names of their scores."""
    errors = {name: values[name + ERROR] for name in values if name + ERROR in values}
    rest = {name: x for name, x in values.items() if name.removesuffix(ERROR) not in errors or name in errors}
    return rest, errors


def score_text(value: float, error: float | None = None) -> str:
    """A score with its standard error, where there is one: ``0.7500 ± 0.0433``."""
    return f"{value:.4f}" if error is None or math.isnan(error) else f"{value:.4f} ± {error:.4f}"


Log = Callable[[str], None]
NOT_SCORES = ("eval_runtime", "eval_samples_per_second", "eval_steps_per_second", "eval_model_preparation_time")


class Meter(TrainerCallback, ExportableState):
    """Seconds, tokens and memory of training, without what happens in `paused`; saved with every checkpoint.

    Args:
        device: of the model; what is in its memory now does not count.
    """

    def __init__(self, device: torch.device, forwards: int = 1) -> None:
        self.device, self.forwards = device, forwards
        self.seconds, self.tokens, self.peak = 0.0, 0, 0
        self.waited = 0.0  # seconds, of all, for the next batch
        self.loss, self.since = 0.0, 0  # sum of the losses that were not logged yet, and the last step that was
        self.norms: list[float | Tensor] = []  # of the gradients of these steps; reading a tensor waits for its device
        self._started: float | None = None
        self._before = self._reset()

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint has to keep of the meter."""
        self._take()
        names = ("seconds", "waited", "tokens", "peak", "loss", "since", "forwards")
        norms = [float(x) for x in self.norms]
        return {"args": {}, "attributes": {**{name: getattr(self, name) for name in names}, "norms": norms}}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any
    ) -> None:
        """Resume from the checkpoint's values, with the present run's intervals."""
        saved: Any = state.stateful_callbacks  # by name, whatever the annotation says
        for name, value in saved[type(self).__name__]["attributes"].items():
            setattr(self, name, value)
        state.compute_steps(args, state.max_steps)
        self._started = time.perf_counter()

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any) -> None:
        """Stop the clock at the end of training."""
        self._take()
        self._started = None

    def _take(self) -> None:
        if self._started is not None:
            now = time.perf_counter()
            self.seconds, self._started = self.seconds + now - self._started, now
            self.peak = max(self.peak, self._peak() - self._before)

    def now(self) -> dict[str, Any]:
        """Seconds and tokens so far."""
        self._take()
        return {"seconds": round(self.seconds, 6), "tokens": self.tokens}

    def take_norms(self) -> list[float]:
        """Norms of the gradients since the last line, to six digits to keep the file small."""
        norms, self.norms = self.norms, []
        return [float(f"{float(x):.6g}") for x in norms]

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Time in here is training's, spent on getting a batch."""
        start = time.perf_counter()
        yield
        self.waited += time.perf_counter() - start

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Neither time nor memory in here is training's."""
        running = self._started is not None
        self._take()
        self._started = None
        try:
            yield
        finally:
            if running:
                self._reset()
                self._started = time.perf_counter()

    def _reset(self) -> int:
        if self.device.type != "cuda":
            return reset_peak()
        torch.cuda.reset_peak_memory_stats(self.device)
        return torch.cuda.memory_allocated(self.device)

    def _peak(self) -> int:
        return torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else peak()


class Recorder(TrainerCallback):
    """Lines of ``metrics.jsonl``, and the end of a run whose loss is not finite any more.

    Args:
        folder: of the run; None on processes that do not write.
        meter: its numbers go into every line.
        log: called with a sentence for every evaluation.
        each: whether for every line.
    """

    def __init__(self, folder: Path | None, meter: Meter, log: Log, each: bool = True) -> None:
        self.folder, self.meter, self.log, self.each = folder, meter, log, each
        self.diverged = False
        self.evaluation: dict[str, float] = {}  # the last one
        self.rate = 0.0  # tokens per second, in the last interval
        self._last = (0.0, 0)
        self._file: IO[str] | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any
    ) -> None:
        """Open the file, and remember the evaluation that a resumed run has had."""
        self._last = (self.meter.seconds, self.meter.tokens)
        if self.folder is not None:
            with writing(self.folder):
                self._file = (self.folder / METRICS).open("a", encoding="utf-8")
        for line in state.log_history:
            if "eval_loss" in line:
                self.evaluation = scores(line)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any
    ) -> None:
        """Write the line of a training interval or an evaluation; other logs have none."""
        kind = "loss" if "loss" in logs else "eval_loss" if "eval_loss" in logs else None
        if kind is None:
            return
        now = self.meter.now()
        if kind == "loss":
            values = {name: logs[name] for name in ("loss", "learning_rate", "grad_norm") if name in logs}
            more = {"grad_norms": self.meter.take_norms()}
            seconds, tokens = now["seconds"] - self._last[0], now["tokens"] - self._last[1]
            self.rate, self._last = tokens / max(seconds, 1e-9), (now["seconds"], now["tokens"])
        else:
            values, more = scores(logs), {}
            self.evaluation = values
        self._write({"step": state.global_step, **now, **values, **more})
        self._say(state, values)
        if not finite(logs[kind]):
            self.end(control)

    def end(self, control: TrainerControl) -> None:
        """Stop here, without evaluating or saving what has diverged."""
        self.diverged = control.should_training_stop = True
        control.should_save = control.should_evaluate = False

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any) -> None:
        """Lines up to a checkpoint are as safe as the checkpoint."""
        if self._file is not None and self.folder is not None:
            with writing(self.folder):
                os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file of metrics."""
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
            self._file = None

    def _write(self, line: dict[str, Any]) -> None:
        if self._file is not None and self.folder is not None:
            with writing(self.folder):
                self._file.write(json.dumps(line) + "\n")
                self._file.flush()

    def _say(self, state: TrainerState, values: dict[str, float]) -> None:
        where = f"step {state.global_step}/{state.max_steps}"
        if "loss" not in values:
            plain, errors = split_errors({name.removeprefix("eval_"): x for name, x in values.items()})
            told = ", ".join(f"{name} {score_text(x, errors.get(name))}" for name, x in plain.items())
            self.log(f"{where}: validation {told}")
        elif self.each:
            self.log(f"{where}: loss {values['loss']:.4f}, {self.rate:,.0f} tokens/s")


def scores(logs: dict[str, Any]) -> dict[str, float]:
    """Loss and metrics of an evaluation, without its speed."""
    return {name: x for name, x in logs.items() if name.startswith("eval_") and name not in NOT_SCORES}
