"""Weights, gradients and states of optimizers spread over processes, by torch's `fully_shard` (FSDP2)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

from kernelformer.modules.core import AttentionCore

Group = dist.ProcessGroup


def first_problem(problem: str, groups: Sequence[Group | None] = (None,)) -> str:
    """Share the first problem of any process with all of them, in groups of the same order; empty if there is none."""
    if not dist.is_initialized():
        return problem
    for group in groups:
        problems: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(problems, problem, group)
        problem = next((x for x in problems if x), "")
    return problem


def difference(tensors: Mapping[str, Tensor], group: Group | None = None) -> str:
    """Find a tensor that differs between processes of a group, bit by bit; empty if none does.

    Names, shapes and dtypes are compared first; then the first process sends its tensors to the others, once.
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
        bits = (y.contiguous().reshape(-1).view(torch.uint8) for y in (value, x.detach()))
        if not other and not torch.equal(*bits):
            other = f"{name} has other values on process {here} than on {ranks[0]}"
    return first_problem(other, (group,))


def _said(size: tuple[tuple[int, ...], str] | None) -> str:
    return "missing" if size is None else f"{size[0]} in {size[1].removeprefix('torch.')}"


Model = TypeVar("Model", bound=nn.Module)


def shard(model: Model, mesh: DeviceMesh | None = None, **options: Any) -> Model:
    """Spread a model over processes, in place: each block by itself, then what is left as the root's.

        model = shard(KernelformerForCausalLM(config))      # on every process, started by torchrun
        optimizer = torch.optim.AdamW(kf.parameter_groups(model))      # after it: the parameters are new ones

    Every process keeps 1/n of each parameter, of its gradient and of what the optimizer has for it; a block's
    parameters are whole while it computes. Every process is given its own part of the batch; a gradient is the mean of
    theirs. Draws, calibrated statistics and other buffers stay whole on every process: draws are functions of (seed,
    number), so that `kf.redraw` and `resample` keep them alike; calibrate before, or with the same batches everywhere.

    Blocks are the parts of lists in which attention of ours is, and those that the model calls so by transformers'
    ``_no_split_modules``: of our models, of converted ones (`hf.convert`, before) and of plain ones
    (`kf.replace_attention`). A table of positions that blocks share is spread by itself.

    Args:
        model: the same on every process, which is checked bit by bit.
        mesh: of the processes, 1-D; of a 2-D one the first dimension has copies, the second is sharded over. Default:
            all processes.
        options: of torch's `fully_shard`, the same for all parts: ``mp_policy``, ``offload_policy``,
            ``reshard_after_forward``.

    Returns:
        The model itself.

    Raises:
        ValueError: torch.distributed has not been started; the model is sharded already, has no block, differs between
            processes, or has weights that blocks share otherwise than by a module of their own. On every process.
    """
    if not dist.is_initialized():
        raise ValueError(
            "shard needs processes to spread a model over, got none; start the program by torchrun, and call "
            "torch.distributed.init_process_group first."
        )
    if mesh is None:
        mesh = init_device_mesh(next(model.parameters()).device.type, (dist.get_world_size(),))
    blocks, shared = _same_parts(model, mesh)
    for module in shared:  # before the blocks, which would each take them
        fully_shard(module, mesh=mesh, **options)
        if hasattr(module, "step"):  # of one token, which goes around `forward`
            register_fsdp_forward_method(module, "step")
    for block in blocks.values():
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The blocks of a model by name, each once: the parts of its outermost lists with some that attend."""
    named = getattr(model, "_no_split_modules", None) or ()

    def attends(block: nn.Module) -> bool:
        return type(block).__name__ in named or any(isinstance(x, AttentionCore) for x in block.modules())

    blocks: dict[str, nn.Module] = {}
    for kind in (nn.ModuleList, nn.Sequential):  # the latter may be what holds a whole model together
        for name, parts in model.named_modules():
            related = any(_within(name, x) or _within(x, name) for x in blocks)
            if isinstance(parts, kind) and not related and any(attends(x) for x in parts):
                blocks |= {f"{name}.{i}".lstrip("."): x for i, x in enumerate(parts)}
    if not blocks:
        raise ValueError(
            f"{type(model).__name__} has no list of blocks with attention of this library, by which it could be "
            f"sharded; convert it first (kernelformer.hf.convert, kf.replace_attention), or give fully_shard of torch "
            f"its blocks yourself."
        )
    return {name: x for name, x in blocks.items() if any(True for _ in x.parameters())}


def _within(inner: str, outer: str) -> bool:
    return not outer or inner == outer or inner.startswith(f"{outer}.")


def _shared_modules(model: nn.Module, blocks: dict[str, nn.Module]) -> list[nn.Module]:
    """Modules inside of several blocks whose weights would be taken by each of them; none inside of another."""
    owners: dict[Tensor, set[str]] = {}
    for name, x in model.named_parameters(remove_duplicate=False):
        owners.setdefault(x, set()).add(next((y for y in blocks if name.startswith(f"{y}.")), ""))
    several = {x for x, names in owners.items() if len(names) > 1}
    modules: list[nn.Module] = []
    for module in _reached_by_several(blocks):
        if any(x in several for x in module.parameters()):
            modules.append(module)
            several -= set(module.parameters())
    if several:
        names = [name for name, x in model.named_parameters(remove_duplicate=False) if x in several]
        raise ValueError(
            f"{type(model).__name__} has one weight under the names {', '.join(names[:3])}, in several of the parts "
            f"that it would be sharded by; untie it."
        )
    return modules


def _reached_by_several(blocks: dict[str, nn.Module]) -> Iterator[nn.Module]:
    """Modules that several blocks have inside, outer ones first."""
    seen: dict[nn.Module, int] = {}
    for block in {id(x): x for x in blocks.values()}.values():
        for module in block.modules():
            seen[module] = seen.get(module, 0) + 1
    return (x for x, count in seen.items() if count > 1)


def _same_parts(model: nn.Module, mesh: DeviceMesh) -> tuple[dict[str, nn.Module], list[nn.Module]]:
    """Blocks and shared modules of a model that is the same on all processes."""
    groups, problem = mesh.get_all_groups(), ""
    blocks: dict[str, nn.Module] = {}
    shared: list[nn.Module] = []
    try:
        if any(isinstance(x, FSDPModule) for x in model.modules()):
            raise ValueError(
                f"{type(model).__name__} is sharded already, or a part of it is; shard it once, as a whole."
            )
        blocks = find_blocks(model)
        shared = _shared_modules(model, blocks)
    except ValueError as found:
        problem = str(found)
    problem = first_problem(problem, groups)
    if problem:
        raise ValueError(problem)
    tensors = dict(chain(model.named_parameters(), model.named_buffers()))
    differences = [difference(tensors, group) for group in groups]
    problem = first_problem(next(filter(None, differences), ""), groups)
    if problem:
        raise ValueError(
            f"{type(model).__name__} is not the same on all processes: {problem}; build it with the same settings and "
            f"seed on each, or load the same weights."
        )
    return blocks, shared
