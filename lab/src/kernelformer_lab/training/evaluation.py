"""Evaluation: the mean loss over all labels of a split, and the task's metric."""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, Sampler, Subset
from transformers import EvalPrediction, PreTrainedModel, PrinterCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import EvalLoopOutput

from kernelformer.errors import TrainingError, choice, positive_int
from kernelformer.models import KernelformerForCausalLM
from kernelformer.models.saved import load_saved
from kernelformer.quiet import silent_libraries
from kernelformer_lab.data.batching import spread_evenly
from kernelformer_lab.records import MODEL, RESULT, RUN, is_finished, resume_command, standing, unfinished
from kernelformer_lab.tasks import SPLITS, TASKS, Task, make_task
from kernelformer_lab.training.config import Run
from kernelformer_lab.training.inspection import check_run_folder, saved_run
from kernelformer_lab.training.meter import ERROR, Contributions, Log, sample_deviations, scores, standard_errors
from kernelformer_lab.training.selection import LongestFirst, sample_lengths

IGNORED = -100
TOP = 5  # likeliest classes, whose accuracy papers on images give beside that of the first


def contributions(logits: Tensor, labels: Tensor, shifted: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Contribution of each sample to the mean loss and the right answers of a split, independent of the batches.

    Args:
        logits: (B, classes) or (B, L, classes); (B, 1) with labels in floating point is a regression.
        labels: (B) or (B, L), -100 = not counted.
        shifted: whether logits at i are for label i + 1.

    Returns:
        Sums of losses (B) float64, labels that count (B) int64, and those that are the likeliest class (B) int64.
    """
    if labels.is_floating_point():
        each = (logits.squeeze(-1).double() - labels.double()) ** 2
        return each, torch.ones_like(each, dtype=torch.int64), torch.zeros_like(each, dtype=torch.int64)
    if shifted:
        logits, labels = logits[:, :-1], labels[:, 1:]
    each = F.cross_entropy(logits.flatten(0, -2).float(), labels.flatten(), ignore_index=IGNORED, reduction="none")
    size = labels.shape[0]
    counted = (labels != IGNORED).view(size, -1)
    right = (logits.argmax(-1) == labels).view(size, -1) & counted
    return each.double().view(size, -1).sum(1), counted.sum(1), right.sum(1)


def in_top(logits: Tensor, labels: Tensor, count: int = TOP) -> Tensor:
    """Mark labels (B) among the likeliest classes of logits (B, classes): (B) int64, 1 if they are."""
    return (logits.topk(count, dim=-1).indices == labels.unsqueeze(-1)).any(-1).long()


class TaskTrainer(Trainer):
    """Hugging Face's trainer, evaluating a task.

    Its own evaluation loss is a mean of means over batches, so that padding and the size of the batches change it. Here
    samples are added up, and those that only fill the last batch of several processes are left out.
    """

    split_name = "validation"  # what is evaluated, which tasks may want to know
    samples: Contributions  # of the last evaluation

    def __init__(self, task: Task, model: PreTrainedModel, args: TrainingArguments, **rest: Any) -> None:
        cached = model.config.use_cache
        super().__init__(
            model=model,
            args=args,
            data_collator=task.collate,
            compute_metrics=self._score,
            preprocess_logits_for_metrics=self._reduce,  # type: ignore[arg-type]  # a tuple is fine
            **rest,
        )
        self.task, self.network = task, model
        model.config.use_cache = cached  # the trainer turns it off, and `generate` after it would be slow
        self.remove_callback(PrinterCallback)
        # By the model's class, not by its name and not by **kwargs, from which the trainer would guess.
        self._loss_shifts_labels = isinstance(model, KernelformerForCausalLM)
        self.model_accepts_loss_kwargs = "num_items_in_batch" in inspect.signature(model.forward).parameters

    def _get_eval_sampler(self, eval_dataset: Dataset[Any]) -> Sampler[int] | None:
        lengths = sample_lengths(eval_dataset)
        return super()._get_eval_sampler(eval_dataset) if lengths is None else LongestFirst(lengths)

    def _reduce(self, logits: Any, labels: Tensor) -> tuple[Tensor, ...]:
        """Reduce the logits of a batch to what `_score` needs."""
        logits = logits[0] if isinstance(logits, tuple) else logits
        parts = contributions(logits, labels, self._loss_shifts_labels)
        if logits.dim() > 2:
            return parts
        if labels.is_floating_point():
            return (*parts, logits.squeeze(-1))
        answers = (*parts, logits.argmax(-1))  # one per sample: all logits of a large split would not fit
        return answers if logits.shape[-1] <= TOP else (*answers, in_top(logits, labels))

    def _score(self, outputs: EvalPrediction) -> dict[str, float]:
        """The task's scores, and the standard errors of its loss and of its metric."""
        parts: Any = outputs.predictions  # of `_reduce`, over all samples
        sums, counts, hits, *single = parts
        answers, top5 = (*single, None, None)[:2]
        labels = np.asarray(outputs.label_ids) if single else None
        self.samples = samples = Contributions(sums, counts, hits, answers, labels, top5, self.split_name)
        outcome, errors = samples.outcome(), standard_errors(self.task, samples)
        told = {f"{name}{ERROR}": errors[name] for name in ("loss", self.task.metric) if name in errors}
        return {**self.task.score(outcome), "exact_loss": outcome.loss, **told}

    def score_split(self, name: str, data: Dataset[Any]) -> dict[str, float]:
        """Loss and scores of a split, with the names of evaluation and without a word in the log."""
        before, self.split_name = self.split_name, name
        try:
            return scores(self.predict(data, metric_key_prefix="eval").metrics or {})
        finally:
            self.split_name = before

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """The trainer's, with the mean over all labels for a loss."""
        out = super().evaluation_loop(*args, **kwargs)
        assert out.metrics is not None
        prefix = kwargs.get("metric_key_prefix", "eval")
        out.metrics[f"{prefix}_loss"] = out.metrics.pop(f"{prefix}_exact_loss")
        return out


def load_run(folder: Path) -> tuple[Run, PreTrainedModel]:
    """The settings and the final model of a finished run; its data need not be there."""
    run, _ = saved_run(folder)
    if not (folder / MODEL).is_dir():
        raise TrainingError(f"{folder} has no {MODEL}/: the run is {standing(folder)}; {way_on(folder)}.")
    return run, load_model(TASKS[run.task].model, folder / MODEL)


def way_on(folder: Path) -> str:
    """Advice for a run that has left no model."""
    anew = "train anew with other settings in another folder"
    return anew if is_finished(folder) else f"go on with {resume_command(folder)}"


def load_model(kind: str, folder: Path) -> PreTrainedModel:
    """A saved model, if all its weights are there and no others; transformers alone would make up what is missing.

    Args:
        kind: a name of `models.MODELS`.
        folder: of `save_pretrained`.
    """
    home = folder.parent
    again = f"remove {home / RESULT}, and {resume_command(home)} makes it again from the last checkpoint"
    try:
        return load_saved(folder, kind, again if (home / RUN).exists() else "save the model again")
    except ValueError as problem:
        raise TrainingError(str(problem)) from None


def evaluate(
    model: str | Path | nn.Module,
    task: Task | None = None,
    *,
    split: str = "validation",
    batch_size: int = 32,
    samples: int | None = None,
    log: Log | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, float]:
    """Loss and metric of a model on a split.

    Args:
        model: the folder of a finished run, a folder of `save_pretrained`, or a model.
        task: default: that of the run; else it has to be given.
        split: "validation", "test" or "train".
        batch_size: samples per forward; it changes the speed, not the result.
        samples: at most so many, spread evenly over the split; None: all.
        log: called with a sentence each on what was left out of the data or cut, on data that is not that of the run,
            and on a model that is not that of a finished run.
        progress: called after each batch with their number so far and in all.

    Returns:
        ``{"loss": ..., metric: ...}``, other scores, and the standard errors over the samples of the first two as
        ``loss_error`` and ``<metric>_error`` (`standard_errors`); of what the model writes BLEU alone has one.
    """
    choice("split", split, SPLITS)
    positive_int("batch_size", batch_size)
    if samples is not None:
        positive_int("samples", samples)
    with silent_libraries(), tempfile.TemporaryDirectory() as nowhere:
        if not isinstance(model, nn.Module):
            model, task = _open(Path(model), task, log)
        if task is None:
            raise ValueError("a model alone does not say what to evaluate it on, got task=None; give one.")
        training = model.training
        try:
            data = _some(task.split(split), samples)
            trainer = _evaluator(task, model, split, batch_size, nowhere, progress)
            values = trainer.evaluate(data)
            values |= judged(task, model, data, batch_size)
        finally:
            model.train(training)
    if log is not None:
        for remark in task.remarks():
            log(remark)
    return {name.removeprefix("eval_"): value for name, value in scores(values).items()}


def evaluate_samples(folder: str | Path, split: str, most: int, batch_size: int = 32) -> tuple[float, list[float]]:
    """The metric of a finished run's model, and what each of at most so many groups of samples adds to its error.

    Models that were evaluated on the same samples can be compared by it sample by sample (`analysis.statistics`).

    Returns:
        The metric, and G numbers; NaN where a task does not know them.

    Raises:
        TrainingError: the data is not that of training.
    """
    choice("split", split, SPLITS)
    run, head = saved_run(Path(folder))
    # Of the task as it was before training: with the vocabulary that was saved beside the model it has another one.
    now, before = make_task(run.task, **run.task_options).fingerprint(), head.get("data")
    if before not in (None, now):
        raise TrainingError(f"the data of {folder} is {now}, in training {before}; train it anew.")
    with silent_libraries(), tempfile.TemporaryDirectory() as nowhere, torch.no_grad():
        model, task = _open(Path(folder), None)
        data = task.split(split)
        if task.metric_from_judge:
            value, made = task.judged_deviations(model.eval(), data, batch_size, most)
            return value, made.tolist()
        trainer = _evaluator(task, model, split, batch_size, nowhere)
        values = trainer.evaluate(data)
        made = sample_deviations(task, trainer.samples, most)[task.metric]
    return values[f"eval_{task.metric}"], made.tolist()


def _evaluator(
    task: Task,
    model: nn.Module,
    split: str,
    batch_size: int,
    nowhere: str,
    progress: Callable[[int, int], None] | None = None,
) -> TaskTrainer:
    """A trainer that only evaluates, and leaves nothing behind but in a folder that is thrown away."""
    args = TrainingArguments(
        output_dir=nowhere,
        per_device_eval_batch_size=batch_size,
        report_to="none",
        disable_tqdm=True,
        log_level="error",
        use_cpu=not torch.accelerator.is_available(),
        dataloader_pin_memory=torch.accelerator.is_available(),
        remove_unused_columns=False,
    )
    counter = [] if progress is None else [_Batches(progress)]
    trainer = TaskTrainer(task, model, args, callbacks=counter)  # type: ignore[arg-type]
    trainer.split_name = split
    return trainer


class _Batches(TrainerCallback):
    """Counts the batches of an evaluation."""

    def __init__(self, progress: Callable[[int, int], None]) -> None:
        self.progress, self.done = progress, 0

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.done += 1
        self.progress(self.done, len(kwargs["eval_dataloader"]))


def judged(task: Task, model: nn.Module, data: Dataset[Any], batch_size: int) -> dict[str, float]:
    """Scores of `Task.judge`, with the names of evaluation; the model's mode stays."""
    training = model.training
    try:
        with torch.no_grad():
            return {f"eval_{name}": value for name, value in task.judge(model.eval(), data, batch_size).items()}
    finally:
        model.train(training)


def _some(data: Dataset[Any], count: int | None) -> Dataset[Any]:
    """So many samples, spread evenly."""
    size = len(data)  # type: ignore[arg-type]
    if count is None or count >= size:
        return data
    return Subset(data, spread_evenly(size, count).tolist())


def _compare_data(task: Task, before: str | None, log: Log) -> None:
    """Say if the data of a run has changed; ``before`` is what ``run.json`` says of it, None in older ones."""
    now = task.fingerprint()
    if before not in (None, now):
        log(
            f"the data is not that of training: {now}, in training {before}; the validation split may hold rows that "
            f"were trained on"
        )


def _open(folder: Path, task: Task | None, log: Log | None = None) -> tuple[nn.Module, Task]:
    """A saved model, and the task that is given, or that of its run with what was saved beside the model."""
    home = folder if (folder / RUN).exists() else folder.parent  # of a run's model/
    if task is None:
        if not (home / RUN).exists():
            check_run_folder(folder)
            raise ValueError(f"{folder} is not the folder of a run, got task=None; say on what to evaluate it.")
        run, head = saved_run(home)
        task = make_task(run.task, **run.task_options)
        if log is not None:
            _compare_data(task, head.get("data"), log)
            remark = unfinished(folder)
            if remark is not None:
                log(remark)
        if (home / MODEL).is_dir():
            task.load_extra(home / MODEL)
    if (folder / RUN).exists():
        return load_run(folder)[1], task
    return load_model(task.model, folder), task
