"""Processes that agree: about a problem that one of them has, and about tensors that all of them should have alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Group = dist.ProcessGroup


def first_problem(problem: str, groups: Sequence[Group | None] = (None,)) -> str:
    """What went wrong on any process, on all of them; empty if nothing did.

    Args:
        problem: of this process.
        groups: one for each dimension of a mesh, in the same order everywhere; None is that of all processes.
    """
    if not dist.is_initialized():
        return problem
    for group in groups:
        problems: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(problems, problem, group)
        problem = next((x for x in problems if x), "")
    return problem


def difference(tensors: Mapping[str, Tensor], group: Group | None = None) -> str:
    """Which tensor is not the same on all processes of a group, bit by bit, and on which; empty if all are.

    Names, shapes and dtypes are compared first; then the first process sends its tensors to the others, once.

    Args:
        tensors: of this process, by name; those without storage (meta) are compared by shape alone.
        group: of the processes.
    """
    mine = {name: (tuple(x.shape), str(x.dtype)) for name, x in tensors.items()}
    all_of_them: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(all_of_them, mine, group)
    ranks = dist.get_process_group_ranks(group)
    first = all_of_them[0]
    for rank, theirs in zip(ranks, all_of_them, strict=True):
        for name in (*first, *theirs):
            if first.get(name) != theirs.get(name):
                return (
                    f"{name} is {_said(first.get(name))} on process {ranks[0]} and {_said(theirs.get(name))} on {rank}"
                )
    here, other = dist.get_rank(), ""
    for name, x in tensors.items():
        if x.is_meta:
            continue
        value = x.detach().contiguous().clone()
        dist.broadcast(value, ranks[0], group)
        if not other and not _same_bits(value, x.detach()):
            other = f"{name} has other values on process {here} than on {ranks[0]}"
    return first_problem(other, (group,))


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are the same, of NaN too."""
    return torch.equal(a.reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8))


def _said(size: tuple[tuple[int, ...], str] | None) -> str:
    return "missing" if size is None else f"{size[0]} in {size[1].removeprefix('torch.')}"
