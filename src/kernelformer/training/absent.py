"""What a run of several processes says when one of them has ended, or does not answer: which, where, since when.

torch.distributed ends a wait after the time-out of the process group, and at once where the other process is gone; its
messages name an address. Here every process keeps a line about itself in the store that the processes have in common,
and whoever waited in vain writes there that it did. Those without such a mark are the absent ones.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

import kernelformer
from kernelformer.commands import resume_command
from kernelformer.errors import TrainingError

T = TypeVar("T")
_GRACE = 1.0  # seconds in which others notice too
_PATIENCE = 5.0  # seconds for the store, which may have ended with its process
_PREFIX = "kernelformer"
# How gloo says it.
_LATE = ("timed out", "timeout")
_GONE = ("connection closed", "connection reset", "broken pipe", "connection refused", "socket closed")


class AbsentError(TrainingError):
    """A run whose processes wait for one that has ended or hangs."""


class Presence(TrainerCallback):
    """Writes down where this process is, and names those that do not answer.

    Args:
        store: that the processes have in common.
        rank: of this process.
        world: how many there are.
        timeout: seconds that a process waits for others.
        folder: of the run, for the way out.
    """

    def __init__(self, store: Store, *, rank: int, world: int, timeout: float, folder: Path) -> None:
        self.store, self.rank, self.world, self.timeout, self.folder = store, rank, world, timeout, folder
        self.where = ""
        self.enter("the start of the run")

    def enter(self, where: str) -> None:
        """Write down what this process does from now on."""
        self.where = where
        line = {"where": where, "pid": os.getpid(), "host": socket.gethostname()}
        self.store.set(f"{_PREFIX}/at/{self.rank}", json.dumps(line))

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Write down the step."""
        self.enter(f"step {state.global_step + 1}")

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Write down that the steps are done."""
        self.enter("the end of the run")

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Say of an exchange between processes that fails in here which of them is absent.

        Raises:
            AbsentError: in place of what torch.distributed raises.
        """
        try:
            yield
        except RuntimeError as problem:
            if isinstance(problem, TrainingError) or not (said := self.explain(problem)):
                raise
            raise AbsentError(said) from None

    def explain(self, problem: RuntimeError) -> str:
        """Say who is absent, where that was noticed, and what to do; empty for an error of another kind."""
        text = str(problem).lower()
        late, gone = (any(x in text for x in words) for words in (_LATE, _GONE))
        if not (late or gone):
            return ""
        absent = _answer(self._absent, _PATIENCE)
        who, at = "another process", ""
        if absent:
            who = " and ".join(f"process {rank}" for rank in absent)
            at = "; last heard of: " + "; ".join(
                f"process {rank} in {x['where']} (pid {x['pid']} on {x['host']})" for rank, x in absent.items() if x
            )
        call = f"{self.where}, {_call(problem.__traceback__)}"
        again = (
            f"the run goes on from its last checkpoint by {resume_command(self.folder)}, or by itself under "
            f"torchrun --max-restarts"
        )
        if late:
            return (
                f"process {self.rank} has waited {self.timeout:g} s for {who} in {call}{at}. It hangs, or needs more "
                f"time: see what it does there, or raise --timeout; {again}."
            )
        return f"process {self.rank} has lost {who} in {call}{at}. It has ended: see what it said; {again}."

    def _absent(self) -> dict[int, dict[str, Any]]:
        """The processes that have not noticed anything, with what they wrote down last."""
        self.store.set(f"{_PREFIX}/waited/{self.rank}", "1")
        others = [rank for rank in range(self.world) if rank != self.rank]
        if len(others) > 1:
            time.sleep(_GRACE)
        silent = [rank for rank in others if not self.store.check([f"{_PREFIX}/waited/{rank}"])]
        lines = {rank: f"{_PREFIX}/at/{rank}" for rank in silent or others}
        return {rank: json.loads(self.store.get(x)) if self.store.check([x]) else {} for rank, x in lines.items()}


def presence(args: TrainingArguments, folder: Path, timeout: float) -> Presence | None:
    """Make one for this process; None where it is alone."""
    if args.world_size == 1:
        return None
    store = dist.distributed_c10d._get_default_store()
    return Presence(store, rank=args.process_index, world=args.world_size, timeout=timeout, folder=folder)


def _answer(ask: Callable[[], T], seconds: float) -> T | None:
    """What a call returns, or None if it fails or takes longer: the store may be in the process that is absent."""
    answers: list[T] = []

    def run() -> None:
        with suppress(Exception):
            answers.append(ask())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[0] if answers else None


def _call(trace: TracebackType | None) -> str:
    """Functions in which an exception arose: the last one of this library, and the one that it called in the end."""
    ours, last, root = "", "", str(Path(kernelformer.__file__).parent)
    while trace is not None:
        code = trace.tb_frame.f_code
        last = code.co_name
        if code.co_filename.startswith(root):
            ours = last
        trace = trace.tb_next
    return f"in {ours}" if ours == last else f"in {ours} by {last}"
