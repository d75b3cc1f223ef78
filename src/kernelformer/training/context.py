"""Training with sequences that are split over ranks: groups, batches, losses and scores."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import Sampler

from kernelformer.attention.ranks import Ranks
from kernelformer.modules.context import split_over


class Context:
    """The ranks that share the sequences of this process, as one axis of a mesh of all processes.

        processes = data x context          ranks of one sequence are neighbours

    Args:
        size: ranks for each sequence, C.
        device: of the model.

    Attributes:
        replicas: how many groups there are, which have samples of their own.
        ranks: of this process's group.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.size, self.replicas = size, dist.get_world_size() // size
        mesh = init_device_mesh(device.type, (self.replicas, size), mesh_dim_names=("data", "context"))
        self.ranks = Ranks(mesh["context"].get_group())

    def active(self) -> AbstractContextManager[Ranks]:
        """Where attention sees the tokens of all ranks of the group."""
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

    Args:
        order: of the samples.
        batch: samples of a batch.
        times: ranks of a sequence.
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
