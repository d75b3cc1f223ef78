"""Models over several processes: sharded weights and their checkpoints, on torch.distributed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernelformer.lazy import lazy_names

if TYPE_CHECKING:
    from kernelformer.parallel.checkpoint import load_sharded, save_sharded
    from kernelformer.parallel.group import start_group
    from kernelformer.parallel.sharding import shard

__all__ = ["load_sharded", "save_sharded", "shard", "start_group"]

__getattr__, __dir__ = lazy_names(
    __name__,
    dict.fromkeys(("load_sharded", "save_sharded"), f"{__name__}.checkpoint")
    | {"shard": f"{__name__}.sharding", "start_group": f"{__name__}.group"},
)
