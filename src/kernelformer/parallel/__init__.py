"""Sequences and models over several processes, on torch.distributed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernelformer.lazy import lazy_names

if TYPE_CHECKING:
    from kernelformer.parallel.checkpoint import load_sharded, save_sharded
    from kernelformer.parallel.context import context_parallel, next_token_loss, start_group, sum_gradients
    from kernelformer.parallel.sharding import shard

__all__ = [
    "context_parallel",
    "load_sharded",
    "next_token_loss",
    "save_sharded",
    "shard",
    "start_group",
    "sum_gradients",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    dict.fromkeys(("load_sharded", "save_sharded"), f"{__name__}.checkpoint")
    | dict.fromkeys(("context_parallel", "next_token_loss", "start_group", "sum_gradients"), f"{__name__}.context")
    | {"shard": f"{__name__}.sharding"},
)
