"""Hugging Face's trainer, set up for a run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import Dataset, Sampler
from transformers import PreTrainedModel, TrainingArguments
from transformers.trainer import OPTIMIZER_NAME
from transformers.trainer_pt_utils import LabelSmoother, nested_gather
from transformers.trainer_utils import EvalLoopOutput, EvalPrediction
from transformers.utils import SAFE_WEIGHTS_NAME

from kernelformer.attention.ranks import Ranks
from kernelformer.errors import reason
from kernelformer.files import naming_full_disk, write_hashes
from kernelformer.modules import RelativePositions, parameter_groups
from kernelformer.modules.context import next_column, split_over
from kernelformer.modules.schedules import random_maps
from kernelformer.parallel.context import start_group
from kernelformer_lab.tasks import Task
from kernelformer_lab.training.checkpoints import (
    STAGE,
    WRITING,
    cannot_write,
    clear,
    finite,
    first_problem,
    publish,
    rotate,
)
from kernelformer_lab.training.config import SCHEDULES, Run, everywhere
from kernelformer_lab.training.evaluation import IGNORED, TaskTrainer, contributions
from kernelformer_lab.training.inspection import whole
from kernelformer_lab.training.meter import Meter, Recorder, scores
from kernelformer_lab.training.selection import Best, prune, save_best, training_order


class Context:
    """The ranks that share the sequences of this process, as one axis of a mesh of all processes.

        processes = data x context          ranks of one sequence are neighbours

    Attributes:
        replicas: how many groups there are, which have samples of their own.
        ranks: of this process's group.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.size, self.replicas = size, dist.get_world_size() // size
        mesh = init_device_mesh(device.type, (self.replicas, size), mesh_dim_names=("data", "context"))
        self.ranks = Ranks(mesh["context"].get_group())

    def active(self) -> AbstractContextManager[Ranks]:
        """Context in which attention sees the tokens of all ranks of the group."""
        return split_over(self.ranks)

    def part(self, batch: dict[str, Any], main: str) -> dict[str, Any]:
        """This rank's tokens of a batch of whole sequences: of all tensors (B, L, ...), L being that of ``main``."""
        length = batch[main].shape[1]

        def cut(x: Any) -> Any:
            splits = isinstance(x, Tensor) and x.dim() > 1 and x.shape[1] == length
            return self.ranks.part(x) if splits else x

        return {name: cut(x) for name, x in batch.items()}

    def loss(self, loss: Tensor, counted: bool) -> Tensor:
        """A model's loss for a trainer that takes means over all processes: value and gradient of the group's.

        Args:
            loss: the same number on all ranks of the group, with the gradient of a share.
            counted: the trainer has multiplied it by the number of processes, having divided by all labels.
        """
        value = loss.detach()
        return loss + (value / self.size - value) if counted else self.size * loss - (self.size - 1) * value

    def sum(self, x: Tensor) -> Tensor:
        """The sum over the ranks of the group."""
        return self.ranks.gather_numbers(x.to(self.ranks.device)).sum(0).to(x.device)


class Repeated(Sampler[int]):
    """Batches of an order several times each, one for every rank of a sequence.

    Processes take batches in turn, so that neighbours get the same one.
    """

    def __init__(self, order: Sampler[int], batch: int, times: int) -> None:
        self.order, self.batch, self.times = order, batch, times

    def __len__(self) -> int:
        return len(self.order) * self.times  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[int]:
        kept: list[int] = []
        for index in self.order:
            kept.append(index)
            if len(kept) == self.batch:
                yield from kept * self.times
                kept = []
        yield from kept * self.times


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


def training_arguments(run: Run, folder: Path, timeout: int) -> TrainingArguments:
    """The run in Hugging Face's words; starts torch.distributed where several processes were launched.

    Args:
        timeout: seconds that a process waits for the others.

    Raises:
        ValueError: the batch cannot be divided among the processes.
    """
    gpu = torch.accelerator.is_available()
    if not gpu and int(os.environ.get("WORLD_SIZE", "1")) > 1:  # there transformers would leave the time-out unused
        start_group(timeout, "gloo")
    args = TrainingArguments(
        output_dir=str(folder),
        max_steps=run.steps,
        learning_rate=run.learning_rate,
        weight_decay=run.weight_decay,
        adam_beta1=run.beta1,
        adam_beta2=run.beta2,
        adam_epsilon=run.eps,
        warmup_steps=run.warmup_steps,
        lr_scheduler_type=SCHEDULES[run.schedule],
        max_grad_norm=run.max_grad_norm or 0.0,
        bf16=run.precision == "bf16",
        activation_checkpointing=run.gradient_checkpointing,
        activation_checkpointing_kwargs={"use_reentrant": False} if run.gradient_checkpointing else None,
        seed=run.seed,
        logging_steps=run.log_every,
        logging_nan_inf_filter=False,  # it would hide a loss that is not finite
        eval_strategy="steps",
        eval_steps=run.eval_every or run.steps,
        save_strategy="steps",
        save_steps=run.save_every or run.steps,
        report_to="none",
        disable_tqdm=True,
        log_level="error",
        log_level_replica="error",
        use_cpu=not gpu,
        dataloader_pin_memory=gpu,
        dataloader_num_workers=run.workers,
        remove_unused_columns=False,
        ddp_timeout=timeout,
        ddp_find_unused_parameters=False,
        ddp_broadcast_buffers=False,  # draws are functions of (seed, number), the same on every process
    )
    args._n_gpu = min(args.n_gpu, 1)  # several GPUs are several processes here, never nn.DataParallel
    world, shared = args.world_size, run.context_parallel or args.world_size
    if world % shared:
        raise ValueError(
            f"context_parallel={shared} ranks share a sequence, got {world} processes; start a multiple of {shared}, "
            f"by torchrun --nproc-per-node."
        )
    world //= shared
    if run.batch_size % (world * (run.micro_batch or 1)):
        micro = f" times micro_batch={run.micro_batch}" if run.micro_batch else ""
        groups = f" groups of {shared}" if shared > 1 else ""
        raise ValueError(f"batch_size={run.batch_size} must be a multiple of the {world}{groups} processes{micro}.")
    share = run.batch_size // world
    args.per_device_train_batch_size = run.micro_batch or share
    args.gradient_accumulation_steps = share // args.per_device_train_batch_size
    looked = max(1, run.eval_batch_size // world) if run.eval_batch_size else args.per_device_train_batch_size
    args.per_device_eval_batch_size = looked
    return args


class RunTrainer(TaskTrainer):
    """Trainer of one run, which saves so that it can be killed at any moment.

    Where ranks share a sequence (`Context`), batches are cut to a rank's tokens, and what ranks find is put together.

    Args:
        args: of `training_arguments`.
        recorder: hears of a loss that is not finite.
        best: which weights are kept as the best so far; None: the last ones are the result.
    """

    def __init__(
        self,
        run: Run,
        task: Task,
        model: PreTrainedModel,
        args: TrainingArguments,
        *,
        meter: Meter,
        recorder: Recorder,
        best: Best | None = None,
        **rest: Any,
    ) -> None:
        self.run, self.meter, self.recorder, self.best = run, meter, recorder, best
        self.folder = Path(args.output_dir or ".")
        self._staging = False
        self._pending: int | Tensor = 0  # tokens of this process that the meter does not have yet
        self._evaluated = 0  # samples of the split that is evaluated
        shared = run.context_parallel or args.world_size
        self.context = Context(shared, args.device) if shared > 1 else None
        super().__init__(task, model, args, **rest)
        if run.label_smoothing:
            self.compute_loss_func = self._smoothed

    # -- data and optimizer --

    def _get_train_sampler(self, train_dataset: Dataset[Any] | None = None) -> Sampler[int]:
        data: Any = self.train_dataset if train_dataset is None else train_dataset
        run = self.run
        count, grouped = run.steps * run.batch_size, run.group_by_length
        order = training_order(data, count=count, batch=run.batch_size, seed=run.seed, grouped=grouped)
        if self.context is None:
            return order
        return Repeated(order, self.args.per_device_train_batch_size, self.context.size)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """The trainer's, with groups of their own for what the kernels learn and for tables of positions."""
        if self.optimizer is None:
            optimizer, run = super().create_optimizer(model), self.run
            tables = [
                x for part in self.network.modules() if isinstance(part, RelativePositions) for x in part.parameters()
            ]
            kernel = [
                x for group in parameter_groups(self.network) if group["name"] == "kernel" for x in group["params"]
            ]
            kernel_decay = run.weight_decay if run.decay_kernels else 0.0
            for mine, rate, decay in ((kernel, run.kernel_lr, kernel_decay), (tables, run.bias_lr, 0.0)):
                own = {id(x): x for x in mine}
                if own:
                    for group in optimizer.param_groups:
                        group["params"] = [x for x in group["params"] if id(x) not in own]
                    params = {"params": list(own.values()), "lr": rate or run.learning_rate, "weight_decay": decay}
                    optimizer.add_param_group(params)
        assert self.optimizer is not None
        return self.optimizer

    # -- steps --

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """The trainer's, for all steps at once; a resumed run's first line is about all since the line before."""
        before, now = self.meter.forwards, self.args.gradient_accumulation_steps
        for phi in random_maps(self.network) if before != now else ():  # on another number of processes
            phi.age.copy_(phi.age * now // before)
        self.meter.forwards = now
        self._tr_loss += self.meter.loss
        self._globalstep_last_logged = self.meter.since
        super()._run_epoch(*args, **kwargs)  # type: ignore[no-untyped-call]

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """The trainer's; the meter knows how long it takes."""
        with self.meter.waiting():
            return super().get_batch_samples(*args, **kwargs)

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Tensor:
        """The trainer's; it counts tokens without padding, of images their patches, of series their moments."""
        if self.context is not None:
            inputs = self.context.part(inputs, self.network.main_input_name)
        given, mask = inputs[self.network.main_input_name], inputs.get("attention_mask")
        plain = given if given.dim() < 3 else given[..., 0]
        size = plain.numel() if mask is None else mask.sum()  # a tensor: reading it would wait for the device
        patches = getattr(self.network, "tokens_per_image", None)
        self._pending += size if patches is None else len(given) * patches
        with nullcontext() if self.context is None else self.context.active():
            loss: Tensor = super().training_step(model, inputs, *args, **kwargs)
        return loss

    def _smoothed(self, outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        # Not the trainer's own way, which does not know that our decoders shift. Evaluation takes no notice of it.
        smoother = LabelSmoother(self.run.label_smoothing)
        loss: Tensor = smoother(outputs, labels, self._loss_shifts_labels, num_items_in_batch)
        return loss

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """The trainer's; with smoothing it keeps the labels to itself, from which a decoder makes its input.

        Where ranks share a sequence, their labels count once and their gradients add up.
        """
        shift = getattr(self.network, "prepare_decoder_input_ids_from_labels", None)
        if self.compute_loss_func is not None and shift is not None and "decoder_input_ids" not in inputs:
            inputs = {**inputs, "decoder_input_ids": shift(inputs["labels"])}
        if self.context is None:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        counted = num_items_in_batch is not None
        if num_items_in_batch is not None:  # of every rank: each has read the whole batch
            num_items_in_batch = num_items_in_batch / self.context.size  # type: ignore[assignment]
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        loss = self.context.loss(loss, counted)
        return (loss, outputs) if return_outputs else loss

    def _get_grad_norm(self, *args: Any, **kwargs: Any) -> Any:
        """The trainer's, which takes it in every step and of whole gradients; the meter keeps it for the next line."""
        norm = super()._get_grad_norm(*args, **kwargs)  # type: ignore[no-untyped-call]
        self.meter.norms.append(norm)
        return norm

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Not counted: the trainer's formula is for quadratic attention, and walks over all weights in every step."""
        return 0

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """The trainer's, after the tokens of all processes were added up."""
        self._collect_tokens()
        super().log(logs, start_time)

    def _collect_tokens(self) -> None:
        pending, self._pending = self._pending, 0
        if self.args.world_size > 1:
            pending = self.accelerator.reduce(torch.as_tensor(pending, device=self.args.device))
        self.meter.tokens += int(pending)

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
            loss, found, labels = super().prediction_step(
                model, self.context.part(inputs, self.network.main_input_name), False, ignore_keys
            )
            logits = found[0] if isinstance(found, tuple) else found
            assert logits is not None
            assert labels is not None
            if logits.dim() == 2:  # of whole sequences, the same on every rank
                return loss, super()._reduce(logits, labels), labels
            if self._loss_shifts_labels:
                labels = torch.cat([labels[:, 1:], next_column(labels, IGNORED)], 1)[:, : labels.shape[1]]
            parts = tuple(self.context.sum(x) for x in contributions(logits, labels, False))
            return loss, parts, parts[1]  # labels of tokens are not used after this

    def _reduce(self, logits: Any, labels: Tensor) -> tuple[Tensor, ...]:
        if self.context is None:
            return super()._reduce(logits, labels)
        parts: tuple[Tensor, ...] = logits  # of `prediction_step`
        return parts

    def _score(self, outputs: EvalPrediction) -> dict[str, float]:
        if self.context is None:
            return super()._score(outputs)
        parts: Any = outputs.predictions
        kept = tuple(x[: self._evaluated] for x in parts)  # what only fills the last batch comes last
        labels: Any = outputs.label_ids
        return super()._score(EvalPrediction(kept, labels[: self._evaluated]))

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
            self._evaluated = len(dataloader.dataset)
            self.gather_function = self._once
        return super().evaluation_loop(*args, **kwargs)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """The trainer's; training sees neither its time nor the random numbers that it takes."""
        device = self.args.device
        with self.meter.paused(), torch.random.fork_rng([device.index or 0] if device.type == "cuda" else []):
            values = super().evaluate(*args, **kwargs)
            if self.best is not None and not self.recorder.diverged:
                self._keep_if_best(self.best, values)
            return values

    def _keep_if_best(self, best: Best, values: dict[str, float]) -> None:
        step = self.state.global_step
        if best.take(step, scores(values)):
            action = (lambda: save_best(self.folder, step, self.network)) if self.args.should_save else None
            self._check_saved(first_problem(self._try(action)))

    # -- checkpoints --

    def _get_output_dir(self, trial: Any) -> str:
        return str(self.folder / STAGE if self._staging else self.folder)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """The trainer's, into a folder beside; the name comes when all processes have written all of it."""
        with self.meter.paused():
            # What was not logged yet belongs to the next line, also if that is written after a resume.
            self.meter.loss = float(nested_gather(self._tr_loss, self.args.parallel_mode).mean())
            self.meter.since = self._globalstep_last_logged
            self._collect_tokens()
            if not finite(self.meter.loss):
                self.recorder.end(self.control)
                return
            self._check_saved(first_problem(self._try(lambda: self._stage(model, trial))))
            self._check_saved(first_problem(self._try(self._publish if self.args.should_save else None)))

    def _check_saved(self, problem: str) -> None:
        """Raise on all processes what went wrong on one, without what was left unfinished."""
        if problem:
            if self.args.should_save:
                clear(self.folder)
            raise everywhere(cannot_write(self.folder, problem))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        with whole(Path(resume_from_checkpoint) / SAFE_WEIGHTS_NAME):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        with whole(Path(checkpoint or "") / OPTIMIZER_NAME):
            super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self._follow_schedule()

    def _load_rng_state(self, checkpoint: str | None) -> None:
        name = f"rng_state_{self.args.process_index}.pth" if self.args.world_size > 1 else "rng_state.pth"
        with whole(Path(checkpoint or "") / name):
            super()._load_rng_state(checkpoint)

    def _follow_schedule(self) -> None:
        """Take the rate of the next step from the schedule: in a run that was made longer it is not the saved one."""
        schedule: Any = self.lr_scheduler
        assert self.optimizer is not None
        rates = [
            base * factor(schedule.last_epoch)
            for base, factor in zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)
        ]
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        schedule._last_lr = rates

    def _stage(self, model: nn.Module, trial: Any) -> None:
        self._staging = True
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self._staging = False

    def _publish(self) -> None:
        name = f"checkpoint-{self.state.global_step}"
        write_hashes(self.folder / STAGE / name)
        publish(self.folder / STAGE / name, self.folder / name)
        rotate(self.folder, self.run.keep)
        if self.best is not None:
            prune(self.folder, self.best.step)

    def _try(self, action: Callable[[], None] | None) -> str:
        try:
            if action is not None:
                with naming_full_disk(self.folder):
                    action()
        except WRITING as problem:
            return reason(problem)
        return ""
