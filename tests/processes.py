"""Processes of tests that talk over gloo: forked from one server that has imported everything once."""

from __future__ import annotations

import multiprocessing
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run_ranks(function, world, *arguments):
    """Call ``function(rank, *arguments)`` on ``world`` processes of one group; raises what one of them raises."""
    multiprocessing.set_forkserver_preload(["torch", "transformers", "kernelformer.hf", "kernelformer.models"])
    mp.start_processes(_rank, (function, world, free_port(), arguments), nprocs=world, start_method="forkserver")


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def _rank(rank, function, world, port, arguments):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    try:
        function(rank, *arguments)
    finally:
        dist.destroy_process_group()
