"""A trainer whose sequences may be split over ranks, in training and in evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Sampler
from transformers import PreTrainedModel, TrainingArguments
from transformers.trainer_utils import EvalLoopOutput, EvalPrediction

from kernelformer.modules.context import next_column
from kernelformer.tasks import Task
from kernelformer.training.context import Context, Repeated
from kernelformer.training.evaluation import IGNORED, TaskTrainer, contributions


class ContextTrainer(TaskTrainer):
    """`TaskTrainer` with a `Context`: batches are cut to a rank's tokens, and what ranks find is put together.

    Args:
        task: what is trained.
        model: with its first weights.
        args: of Hugging Face's trainer.
        context: the ranks of a sequence; None: every process has whole sequences.
        rest: further arguments of the trainer.
    """

    def __init__(
        self, task: Task, model: PreTrainedModel, args: TrainingArguments, *, context: Context | None, **rest: Any
    ) -> None:
        self.context = context
        self._looked_at = 0  # samples of the split that is evaluated
        super().__init__(task, model, args, **rest)

    def _active(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.context is None else self.context.active()

    def _part(self, inputs: dict[str, Any]) -> dict[str, Any]:
        return inputs if self.context is None else self.context.part(inputs, self.network.main_input_name)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """The trainer's; where ranks share a sequence, their labels count once and their gradients add up."""
        if self.context is None:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        counted = num_items_in_batch is not None
        if num_items_in_batch is not None:  # of every rank: each has read the whole batch
            num_items_in_batch = num_items_in_batch / self.context.size  # type: ignore[assignment]
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        loss = self.context.loss(loss, counted)
        return (loss, outputs) if return_outputs else loss

    # -- evaluation --

    def _get_eval_sampler(self, eval_dataset: Dataset[Any]) -> Sampler[int] | None:
        if self.context is None:
            return super()._get_eval_sampler(eval_dataset)
        batch = self.args.per_device_eval_batch_size
        whole = InOrder(len(eval_dataset), batch * self.context.replicas)  # type: ignore[arg-type]
        return Repeated(whole, batch, self.context.size)

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor | None, Any, Any]:
        """The trainer's; over ranks it gives what samples add to the scores, instead of logits."""
        if self.context is None:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        with self.context.active():
            loss, found, labels = super().prediction_step(model, self._part(inputs), False, ignore_keys)
            logits = found[0] if isinstance(found, tuple) else found
            assert logits is not None
            assert labels is not None
            if logits.dim() == 2:  # of whole sequences, the same on every rank
                return loss, super()._reduce(logits, labels), labels
            if self._loss_shifts_labels:
                labels = torch.cat([labels[:, 1:], next_column(labels, IGNORED)], 1)[:, : labels.shape[1]]
            parts = tuple(self.context.sum(x) for x in contributions(logits, labels, False))
            return loss, parts, parts[1]  # labels of tokens are nobody's business after this

    def _reduce(self, logits: Any, labels: Tensor) -> tuple[Tensor, ...]:
        if self.context is None:
            return super()._reduce(logits, labels)
        parts: tuple[Tensor, ...] = logits  # of `prediction_step`
        return parts

    def _score(self, outputs: EvalPrediction) -> dict[str, float]:
        if self.context is None:
            return super()._score(outputs)
        parts: Any = outputs.predictions
        kept = tuple(x[: self._looked_at] for x in parts)  # what only fills the last batch comes last
        labels: Any = outputs.label_ids
        return super()._score(EvalPrediction(kept, labels[: self._looked_at]))

    def _once(self, found: Any) -> Any:
        """Gather from all processes, of the ranks of a sequence from the first."""
        assert self.context is not None
        replicas, size = self.context.replicas, self.context.size

        def first(x: Tensor) -> Tensor:
            every: Tensor = x.unflatten(0, (replicas, size, -1))
            return every[:, 0].flatten(0, 1)

        gathered = self.accelerator.gather(found)
        return tuple(map(first, gathered)) if isinstance(gathered, tuple | list) else first(gathered)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """The trainer's, with one result for each sample."""
        if self.context is not None:
            dataloader: Any = args[0] if args else kwargs["dataloader"]
            self._looked_at = len(dataloader.dataset)
            self.gather_function = self._once
        return super().evaluation_loop(*args, **kwargs)


class InOrder(Sampler[int]):
    """All samples in order, and the last one again until they fill whole batches."""

    def __init__(self, size: int, batch: int) -> None:
        self.size, self.count = size, -(-size // batch) * batch

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        yield from range(self.size)
        for _ in range(self.count - self.size):
            yield self.size - 1
