"""Start some ranks that run one function, and bring back what it returns or raises on each of them."""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
import traceback
from datetime import timedelta

import torch

SECONDS = 120.0  # after which ranks that wait for one another are a failure, not a hang
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    ["torch.distributed", "kernelformer.parallel", "kernelformer.models", "kernelformer.hf"]
)


class Raised:
    """Error that a function raised on a rank."""

    def __init__(self, error: Exception) -> None:
        self.kind, self.text = type(error).__name__, str(error)
        self.trace = traceback.format_exc()

    def __repr__(self) -> str:
        return f"{self.kind}: {self.text}\n{self.trace}"


class Gone:
    """A rank that has ended itself, or was killed, by its exit code."""

    def __init__(self, code) -> None:
        self.code = code

    def __repr__(self) -> str:
        return f"ended with code {self.code}"


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def _rank(rank, count, port, answer, function, arguments, options):
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(count))
    os.environ["LOCAL_RANK"] = str(rank)
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    try:
        answer.send(function(*arguments, **options))
    except Exception as error:  # the test looks at it
        answer.send(Raised(error))
    finally:
        dist.destroy_process_group()


def on_ranks(count, function, *arguments, seconds=SECONDS, **options):
    """Results of a function on each of ``count`` ranks; `Raised` where it raises."""
    port = free_port()
    pipes = [_context.Pipe(duplex=False) for _ in range(count)]
    ranks = [
        _context.Process(target=_rank, args=(r, count, port, send, function, arguments, options), daemon=True)
        for r, (_, send) in enumerate(pipes)
    ]
    for rank, (_, send) in zip(ranks, pipes, strict=True):
        rank.start()
        send.close()
    end = time.monotonic() + seconds
    try:
        results = []
        for number, (receive, _) in enumerate(pipes):
            assert receive.poll(max(0.0, end - time.monotonic())), f"rank {number} of {count} hangs"
            try:
                results.append(receive.recv())
            except EOFError:  # it has ended without a word
                ranks[number].join(5)
                results.append(Gone(ranks[number].exitcode))
        return results
    finally:
        for rank in ranks:
            rank.join(5)
            if rank.is_alive():
                rank.kill()


def run_ranks(function, world, *arguments):
    """Call ``function(rank, *arguments)`` on ``world`` ranks; fails where one of them raises, or ends with a code."""
    for result in on_ranks(world, _with_rank, function, *arguments):
        assert not isinstance(result, Raised), result
        assert not isinstance(result, Gone) or result.code == 0, result


def _with_rank(function, *arguments):
    return function(torch.distributed.get_rank(), *arguments)
