"""The start of torch.distributed, so that processes which are started again find each other."""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from kernelformer.errors import positive_int

TIMEOUT = 1800  # seconds; gloo's own default


def start_group(timeout: int = TIMEOUT, backend: str | None = None) -> None:
    """Start torch.distributed for the processes of torchrun or accelerate; for one that is alone, a group of one.

    Under ``torchrun --master_addr`` all starts of ``--max-restarts`` have one store, in which gloo would find addresses
    of processes that are gone and wait for them. So what is kept there is named by the number of the start.

    Args:
        timeout: seconds that a process waits for the others, at the start and in every exchange; of a group that has
            been started already it is set.
        backend: of torch.distributed; None: that of the device.
    """
    limit = timedelta(seconds=positive_int("timeout", timeout))
    if dist.is_initialized():
        dist.distributed_c10d._set_pg_timeout(limit)
        return
    store: Store = HashStore()
    rank, world = 0, 1
    if "RANK" in os.environ:
        store, rank, world = next(rendezvous("env://", timeout=limit))
        store = PrefixStore(f"start-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=limit)
