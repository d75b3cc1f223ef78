"""Weights of a run's best evaluation: kept beside its checkpoints, each of which knows which of them were the best."""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset, Sampler, Subset
from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState

from kernelformer.errors import reason
from kernelformer.files import check_hash, read_hashes, read_json, write_hashes
from kernelformer_lab.tasks import Task
from kernelformer_lab.training.checkpoints import STAGE, checkpoints_of, publish

FOLDER = "best-"  # and the step, in the folder of a run


class Best(TrainerCallback, ExportableState):
    """The best evaluation of a run so far; saved with every checkpoint.

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
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any
    ) -> None:
        """Resume from the checkpoint's values."""
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
    """Step of the best weights in the state of a trainer; 0 if there are none."""
    saved = state["stateful_callbacks"].get(Best.__name__)
    return 0 if saved is None else int(saved["attributes"]["step"])


_BATCHES = 50  # sorted together: enough for batches of one length, few enough that the order stays random


class Order(Sampler[int]):
    """Order of samples for a whole run: permutation after permutation of all of them, a function of the seed alone.

    It has no epochs at which a short batch would come, so it does not depend on how a batch is divided either.

    Args:
        count: how many are wanted, with repetition.
    """

    def __init__(self, size: int, count: int, seed: int) -> None:
        self.size, self.count, self.seed = size, count, seed

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        gen = torch.Generator().manual_seed(self.seed)
        for start in range(0, self.count, self.size):
            for part in torch.randperm(self.size, generator=gen)[: self.count - start].split(1024):
                yield from part.tolist()  # not all at once: a list of a million integers takes 40 MB


class GroupedOrder(Sampler[int]):
    """The samples of an order, in batches of about one length.

    The samples of the next 50 batches, of small data those of one pass over it, are sorted by length, cut into batches,
    and the batches shuffled: every sample comes about where it came before, beside others of its length. More steps do
    not change the order of the first ones.

    Args:
        make: the order of so many samples.
        lengths: (N) of all samples.
        seed: of the order of the batches.
    """

    def __init__(
        self, make: Callable[[int], Sampler[int]], lengths: NDArray[np.int64], batch: int, count: int, seed: int
    ) -> None:
        self.lengths, self.batch, self.count, self.seed = lengths, batch, count, seed
        self.chunk = max(1, min(_BATCHES, len(lengths) // batch)) * batch
        self.order = make(-(-count // self.chunk) * self.chunk)  # whole chunks, whatever the count

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        return islice(self._all(), self.count)

    def _all(self) -> Iterator[int]:
        rng, order = np.random.default_rng(self.seed), iter(self.order)
        while chunk := list(islice(order, self.chunk)):
            by_length = np.array(chunk)[np.argsort(self.lengths[chunk], kind="stable")]
            yield from rng.permutation(by_length.reshape(-1, self.batch)).ravel().tolist()


def training_order(data: Dataset[Any], *, count: int, batch: int, seed: int, grouped: bool) -> Sampler[int]:
    """The order in which a run sees its samples.

    Args:
        data: to learn from; its own ``sampler(count, seed)`` counts where it has one, being too large for a
            permutation.
        grouped: whether batches are of samples of about one length (`check_grouping`).
    """
    own = getattr(data, "sampler", None)

    def make(size: int) -> Sampler[int]:
        order: Sampler[int] = Order(len(data), size, seed) if own is None else own(size, seed)  # type: ignore[arg-type]
        return order

    lengths = sample_lengths(data) if grouped else None
    return make(count) if lengths is None else GroupedOrder(make, lengths, batch, count, seed)


class LongestFirst(Sampler[int]):
    """All samples once, the longest first, so that a batch has little padding and the largest comes first."""

    def __init__(self, lengths: NDArray[np.int64]) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        yield from np.argsort(-self.lengths, kind="stable").tolist()


def sample_lengths(data: Dataset[Any]) -> NDArray[np.int64] | None:
    """Lengths of the samples of a data set, (N); None if they are all of one length, or not known."""
    if isinstance(data, Subset):
        whole = sample_lengths(data.dataset)
        return None if whole is None else whole[list(data.indices)]
    given = getattr(data, "lengths", None)
    if given is None:
        return None
    lengths: NDArray[np.int64] = np.asarray(given)
    if lengths.shape != (len(data),):  # type: ignore[arg-type]
        raise ValueError(
            f"lengths of {type(data).__name__} must be one number for each of its {len(data)} samples, got shape "  # type: ignore[arg-type]
            f"{lengths.shape}; name it otherwise if it is something else."
        )
    return lengths


def check_grouping(task: str, data: Dataset[Any]) -> None:
    """Raise where the samples of a task cannot be grouped by length."""
    if sample_lengths(data) is None:
        raise ValueError(
            f"group_by_length needs samples of different lengths, got task {task!r}, whose samples do not tell theirs; "
            f"leave it out."
        )
