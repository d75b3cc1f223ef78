"""What happens beside the steps: signals are heard, progress is shown, curves are drawn."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn
from torch.utils.hooks import RemovableHandle
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations.integration_utils import TensorBoardCallback

from kernelformer.terminal import text_column
from kernelformer.training.meter import Log, Recorder


class LastDraw(TrainerCallback):
    """Ends the redraws once the learning rate has fallen to a quarter of its largest.

    Weights are fitted to the draws that they have seen; one that comes when they hardly move any more stays foreign to
    them, and it is the one that the model keeps.

    Args:
        schedule: of the redraws.
    """

    LATE = 0.25

    def __init__(self, schedule: RemovableHandle) -> None:
        self.schedule = schedule

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Look at the rate; that of a resumed run is what it would have been."""
        rate = kwargs["optimizer"].param_groups[0]["lr"]
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

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
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

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
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
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start the progress bar."""
        self.progress.update(self.task, total=state.max_steps, completed=state.global_step)
        self.progress.start()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Advance the progress bar by one step."""
        self.progress.update(self.task, completed=state.global_step)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any
    ) -> None:
        """Show the last loss beside the bar."""
        if "loss" in logs:
            note = f"loss {logs['loss']:.4f}, {self.recorder.rate:,.0f} tokens/s"
            self.progress.update(self.task, note=note)


class Board(TensorBoardCallback):
    """Curves for TensorBoard; a run does not end because they cannot be written.

    Args:
        folder: of its files.
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
