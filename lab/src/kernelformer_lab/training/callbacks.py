"""Callbacks of training: signals, progress bar, TensorBoard, and the watchdog over ranks."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn
from torch.distributed import Store  # type: ignore[attr-defined]
from torch.utils.hooks import RemovableHandle
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations.integration_utils import TensorBoardCallback

import kernelformer
import kernelformer_lab
from kernelformer.cli.common import text_column
from kernelformer.errors import TrainingError
from kernelformer.quiet import silent_libraries
from kernelformer_lab.records import resume_command
from kernelformer_lab.training.meter import Log, Recorder


class LastDraw(TrainerCallback):
    """Ends the redraws once the learning rate has fallen to a quarter of its largest.

    Weights are fitted to the draws that they have seen; one that comes when they hardly move any more stays foreign to
    them, and it is the one that the model keeps.
    """

    LATE = 0.25

    def __init__(self, schedule: RemovableHandle) -> None:
        self.schedule = schedule

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any) -> None:
        """Look at the rate; that of a resumed run is what it would have been."""
        rate = more["optimizer"].param_groups[0]["lr"]
        if state.global_step >= args.get_warmup_steps(state.max_steps) and rate < self.LATE * args.learning_rate:
            self.schedule.remove()


class Stop(TrainerCallback):
    """Ctrl-C and SIGTERM end a run after the present step, with a checkpoint; a second Ctrl-C ends it at once.

    Processes agree on the step, whichever of them was told.
    """

    def __init__(self, log: Log) -> None:
        self.log = log
        self.asked = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Hear the signals in here; elsewhere they mean what they did before."""
        if threading.current_thread() is not threading.main_thread():  # signals are the main thread's
            yield
            return
        before = {number: signal.signal(number, self._hear) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self.asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.asked = True
        with suppress(RuntimeError):  # the signal may have come in the midst of a print
            self.log("stopping after this step, with a checkpoint; Ctrl-C once more stops at once")

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any) -> None:
        """Save and stop, if any process was asked to; the last step is logged in any case."""
        if state.global_step >= state.max_steps:
            control.should_log = True
            return
        asked = self.asked
        if args.world_size > 1:
            votes = torch.tensor(int(asked), device=args.device)
            dist.all_reduce(votes, op=dist.ReduceOp.MAX)
            asked = self.asked = bool(votes)
        if asked:
            control.should_save = control.should_training_stop = True

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any) -> None:
        """An evaluation may have been long: do not wait for another step after it."""
        if self.asked and args.world_size == 1 and state.global_step < state.max_steps:
            control.should_save = control.should_training_stop = True


class Bar(TrainerCallback):
    """Steps, loss, speed and time left, on a terminal."""

    def __init__(self, console: Console, recorder: Recorder, title: str) -> None:
        columns = (
            text_column("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            text_column("{task.fields[note]}"),
            TimeRemainingColumn(),
        )
        self.progress = Progress(*columns, console=console, transient=True)
        self.task = self.progress.add_task(title, total=None, note="")
        self.recorder = recorder

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *problem: object) -> None:
        self.progress.stop()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any
    ) -> None:
        """Start the progress bar."""
        self.progress.update(self.task, total=state.max_steps, completed=state.global_step)
        self.progress.start()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any) -> None:
        """Advance the progress bar by one step."""
        self.progress.update(self.task, completed=state.global_step)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any
    ) -> None:
        """Show the last loss beside the bar."""
        if "loss" in logs:
            note = f"loss {logs['loss']:.4f}, {self.recorder.rate:,.0f} tokens/s"
            self.progress.update(self.task, note=note)


@contextmanager
def silent_training() -> Iterator[None]:
    """Silence transformers in a block, and what a training run reports by itself."""

    def hook(problem: threading.ExceptHookArgs) -> None:
        # TensorBoard writes in a thread. If the disk is full `Board` hears of it, and need not be shown the thread.
        if not issubclass(problem.exc_type, OSError):
            threads(problem)

    threads, threading.excepthook = threading.excepthook, hook
    try:
        with silent_libraries(), warnings.catch_warnings():
            # torch's new name for it would send the buffers of the first process around once, and is no better here.
            warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
            yield
    finally:
        threading.excepthook = threads


class Board(TensorBoardCallback):
    """Curves for TensorBoard; a run does not end because they cannot be written.

    Args:
        step: from which on earlier curves are forgotten.
    """

    def __init__(self, folder: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        super().__init__(SummaryWriter(str(folder), purge_step=step + 1 if step else None))  # type: ignore[no-untyped-call]
        self._SummaryWriter: Any = None  # there is no other one

    def on_log(self, *args: Any, **kwargs: Any) -> None:
        """Write the values to TensorBoard, as Hugging Face's callback does."""
        try:
            super().on_log(*args, **kwargs)  # type: ignore[no-untyped-call]
        except OSError:
            self.tb_writer: Any = None

    def __enter__(self) -> Board:
        return self

    def __exit__(self, *problem: object) -> None:
        if self.tb_writer is not None:
            with suppress(OSError):
                self.tb_writer.close()


T = TypeVar("T")
_GRACE = 1.0  # seconds in which others notice too
_PATIENCE = 5.0  # seconds for the store, which may have ended with its process
_PREFIX = "kernelformer"
# How gloo says it.
_LATE = ("timed out", "timeout")
_GONE = ("connection closed", "connection reset", "broken pipe", "connection refused", "socket closed")


class RankLostError(TrainingError):
    """A process of a run has ended or hangs, and the others wait for it."""


class RankWatchdog(TrainerCallback):
    """Record the position of each rank, and name the ranks that no longer answer.

    Args:
        store: that the processes have in common.
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

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any) -> None:
        """Write down the step."""
        self.enter(f"step {state.global_step + 1}")

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any) -> None:
        """Write down that the steps are done."""
        self.enter("the end of the run")

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Say of an exchange between processes that fails in here which rank is lost.

        Raises:
            RankLostError: in place of what torch.distributed raises.
        """
        try:
            yield
        except RuntimeError as problem:
            if isinstance(problem, TrainingError) or not (said := self.explain(problem)):
                raise
            raise RankLostError(said) from None

    def explain(self, problem: RuntimeError) -> str:
        """Name the lost ranks, the call that noticed it, and what to do; empty for an error of another kind."""
        text = str(problem).lower()
        late, gone = (any(x in text for x in words) for words in (_LATE, _GONE))
        if not (late or gone):
            return ""
        lost = _answer(self._lost, _PATIENCE)
        who, at = "another process", ""
        if lost:
            who = " and ".join(f"process {rank}" for rank in lost)
            at = "; last heard of: " + "; ".join(
                f"process {rank} in {x['where']} (pid {x['pid']} on {x['host']})" for rank, x in lost.items() if x
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

    def _lost(self) -> dict[int, dict[str, Any]]:
        """The processes that have not noticed anything, with what they wrote down last."""
        self.store.set(f"{_PREFIX}/waited/{self.rank}", "1")
        others = [rank for rank in range(self.world) if rank != self.rank]
        if len(others) > 1:
            time.sleep(_GRACE)
        silent = [rank for rank in others if not self.store.check([f"{_PREFIX}/waited/{rank}"])]
        lines = {rank: f"{_PREFIX}/at/{rank}" for rank in silent or others}
        return {rank: json.loads(self.store.get(x)) if self.store.check([x]) else {} for rank, x in lines.items()}


def rank_watchdog(args: TrainingArguments, folder: Path, timeout: float) -> RankWatchdog | None:
    """Make a watchdog for this process; None if it is the only one."""
    if args.world_size == 1:
        return None
    store = dist.distributed_c10d._get_default_store()
    return RankWatchdog(store, rank=args.process_index, world=args.world_size, timeout=timeout, folder=folder)


def _answer(ask: Callable[[], T], seconds: float) -> T | None:
    """Result of a call, or None if it fails or takes longer: the store may be in the lost process."""
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
    ours, last = "", ""
    roots = tuple(str(Path(x.__file__ or "").parent) for x in (kernelformer, kernelformer_lab))
    while trace is not None:
        code = trace.tb_frame.f_code
        last = code.co_name
        if code.co_filename.startswith(roots):
            ours = last
        trace = trace.tb_next
    return f"in {ours}" if ours == last else f"in {ours} by {last}"
