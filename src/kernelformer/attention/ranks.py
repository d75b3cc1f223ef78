"""The ranks that one sequence is split over, and what they tell each other.

Each rank holds a contiguous part of the tokens, in the order of the ranks. Numbers that gradients flow through go
around in one all-gather forward and one exchange backward, whose size does not depend on the length.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

# What ranks may be about to do, each with a few numbers of its own: whoever does something else is noticed.
KINDS = {
    "agree": "see whether all can go on",
    "tokens": "count their tokens",
    "attention": "attend",
    "real": "count real tokens (an attention_mask)",
    "segments": "count tokens of a segment (segment_ids)",
    "labels": "look for the next label",
    "loss": "take the mean of their losses",
}
HEADER = 24  # integers that go around before anything else does


class RanksError(ValueError):
    """Ranks of a sequence that do not make the same call; every one of them raises it."""


class Ranks:
    """A process group whose ranks hold one sequence, part by part; None: all processes.

    Attributes:
        rank: of this process, by which the parts are ordered.
        size: number of ranks, R.
        sent: bytes that this rank has given to others since it was made, each copy counted.
        checked: attention cores whose weights were compared with those of the other ranks.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise ValueError(
                "context_parallel needs a process group, and torch.distributed is not initialized; start with torchrun "
                "and call torch.distributed.init_process_group() first."
            )
        if group is not None and not isinstance(group, dist.ProcessGroup):
            raise ValueError(f"group must be a torch.distributed process group or None, got {type(group).__name__}.")
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise ValueError("this process does not belong to the group that a sequence is to be split over.")
        self.sent = 0
        self.checked: WeakSet[object] = WeakSet()

    def gather_numbers(self, numbers: Tensor) -> Tensor:
        """Numbers (...) of every rank, (R, ...), without gradients; all ranks give the same shape."""
        every = [torch.empty_like(numbers) for _ in range(self.size)]
        self._all_gather(every, numbers.contiguous())
        return torch.stack(every)

    def meet(self, kind: str, numbers: Sequence[int], problem: Exception | None = None) -> list[list[int]]:
        """A few numbers of every rank, of the same size whatever ranks are about to do.

        So no rank waits for one that does something else, one of `KINDS`, or cannot go on: that is an error on each of
        them. A problem of this rank is raised here, and on the others an error that names the rank.
        """
        names = list(KINDS)
        own = [names.index(kind), int(problem is not None), *numbers]
        header = torch.tensor(own + [0] * (HEADER - len(own)), device=self.device)
        every = self.gather_numbers(header).tolist()
        if problem is not None:
            raise problem
        for rank, (other, failed, *_) in enumerate(every):
            if failed:
                raise RanksError(f"rank {rank} of {self.size} cannot make this call, and says why; no rank can alone.")
            if other != own[0]:
                raise RanksError(
                    f"ranks of a sequence make the same calls, but rank {rank} is about to {KINDS[names[other]]}, and "
                    f"rank {self.rank} to {KINDS[kind]}; give all of them the same arguments."
                )
        return [x[2 : 2 + len(numbers)] for x in every]

    def agree(self, problem: Exception | None) -> None:
        """Raise on all ranks where there is a problem on one: on that rank the problem itself."""
        self.meet("agree", [], problem)

    def gather_rows(self, kind: str, rows: Tensor) -> Tensor:
        """Numbers (B, n) of every rank, (R, B, n), without gradients, on the device of this rank's."""
        every = self.meet(kind, rows.shape)
        for rank, shape in enumerate(every):
            if shape != every[0]:
                raise RanksError(
                    f"ranks of a sequence have the same samples, got {every[0][0]} on rank 0 and {shape[0]} on rank "
                    f"{rank} of {self.size}."
                )
        return self.gather_numbers(rows.to(self.device)).to(rows.device)

    def part(self, x: Tensor, axis: int = 1) -> Tensor:
        """This rank's tokens of a whole sequence, a view: of n tokens those from n r / R on, rounded down."""
        length = x.shape[axis]
        first, last = (length * rank // self.size for rank in (self.rank, self.rank + 1))
        return x.narrow(axis, first, last - first)

    def starts(self, length: int) -> list[int]:
        """R + 1 positions: of the first token of every rank, and after the last; this one holds ``length``."""
        return list(accumulate((x for (x,) in self.meet("tokens", [length])), initial=0))

    @property
    def device(self) -> torch.device:
        """Device on which the group's backend exchanges small numbers."""
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        if accelerator is None or "gloo" in str(dist.get_backend(self.group)):
            return torch.device("cpu")
        return accelerator

    def gather(self, tensors: Sequence[Tensor], gradients: bool, sources: Sequence[Tensor] = ()) -> list[Tensor]:
        """Tensors (...) of every rank, (R, ...) each, in one exchange; gradients go back to the rank they came from.

        All ranks give the same shapes, in one dtype and on one device, and the same ``gradients``: whether the exchange
        runs backward. It does so here too for gradients of ``sources``, of which the tensors are made on other ranks.
        """
        flat = torch.cat([x.reshape(-1) for x in tensors])
        if gradients and not flat.requires_grad:
            flat.requires_grad_()
        if not flat.numel():
            return [x.expand(self.size, *x.shape) for x in tensors]
        whole: Tensor = _Gather.apply(flat, self, *sources)  # type: ignore[no-untyped-call]
        parts = whole.split([x.numel() for x in tensors], 1)
        return [part.unflatten(1, x.shape) for part, x in zip(parts, tensors, strict=True)]

    def _all_gather(self, every: list[Tensor], x: Tensor) -> None:
        self.sent += x.numel() * x.element_size() * (self.size - 1)
        dist.all_gather(every, x, group=self.group)

    def _sum_for_each(self, grads: Tensor) -> Tensor:
        """Of numbers (R, n) for every rank the sum of those for this one, (n)."""
        every = torch.empty_like(grads)
        self.sent += grads[0].numel() * grads.element_size() * (self.size - 1)
        dist.all_to_all_single(every, grads.contiguous(), group=self.group)
        return every.sum(0)


class _Gather(torch.autograd.Function):
    """All-gather (n) -> (R, n); backward is its transpose: every rank gets the sum of what all ranks ask of its part.

    It runs on all ranks or on none: whoever uses the result must let gradients reach it, zeros too.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks, *sources: Tensor) -> Tensor:
        ctx.ranks, ctx.count = ranks, len(sources)
        whole = x.new_empty(ranks.size, x.numel())
        ranks._all_gather(list(whole.unbind(0)), x.contiguous())
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.ranks._sum_for_each(grad), None, *[None] * ctx.count
