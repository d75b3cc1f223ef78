"""What all commands share: consoles, errors without a traceback, progress, threads."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TimeElapsedColumn
from rich.text import Text

from kernelformer.commands import typed
from kernelformer.errors import WorkerError
from kernelformer.formatting import shortened, visible
from kernelformer.lazy import MissingExtraError
from kernelformer.records import unfinished
from kernelformer.terminal import VisibleConsole, text_column
from kernelformer.training.config import StoppedError, TrainingError

console = VisibleConsole(width=None if sys.stdout.isatty() else 140)  # a pipe has room for a table
errors = VisibleConsole(stderr=True, soft_wrap=True)  # a path stays in one piece
Threads = Annotated[int | None, typer.Option(min=1, help="default: all cores")]


def starts_anew() -> str:
    """Sentence for Ctrl-C on a command that keeps nothing of its work."""
    return f"{typed()} starts anew"


def fail(problem: Exception, code: int = 2) -> NoReturn:
    """Print an error, once if all processes have it, and end the command."""
    rank = os.environ.get("RANK", "0")
    if rank == "0" or not getattr(problem, "everywhere", False):
        where = "error" if rank == "0" else f"error on process {rank}"
        errors.print(Text.assemble((f"{where}: ", "bold red"), visible(problem, keep="\n")))
    raise typer.Exit(code)


def warn(text: str) -> None:
    """Print a warning on stderr."""
    errors.print(Text.assemble(("warning: ", "bold yellow"), visible(text, keep="\n")))


def say_unfinished(folder: Path) -> None:
    """Warn of a model that is not that of a finished run."""
    remark = unfinished(folder)
    if remark is not None:
        warn(remark)


@contextmanager
def plain_errors(then: Callable[[], str] = starts_anew) -> Iterator[None]:
    """Context in which errors that users can correct end a command without a traceback, and Ctrl-C with code 130.

    Args:
        then: says what to do after Ctrl-C.
    """
    try:
        yield
    except StoppedError as stopped:
        fail(stopped, 130)
    except OSError as problem:
        name = str(problem.filename or "")
        if len(name) > 300:  # the message has all of it
            fail(ValueError(f"{name[:100]}... of {len(name):,} characters cannot be used: {problem.strerror}."))
        fail(problem)
    except (ValueError, TrainingError, WorkerError, MissingExtraError) as problem:
        fail(problem)
    except KeyboardInterrupt:
        fail(StoppedError(f"stopped at once; {then()}."), 130)


def progress_bar() -> Progress:
    """Progress bar that disappears when it is done."""
    columns = (SpinnerColumn(), text_column("{task.description}"), BarColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True)


def say(progress: Progress, bar: TaskID, text: str, advance: int = 0) -> None:
    """Show a text next to the progress bar, or as a line of its own where there is no terminal."""
    progress.update(bar, description=shortened(visible(text), max(40, console.width - 40)), advance=advance)
    if not console.is_terminal:
        console.print(text)


def write(text: str, keep: str = "\n\t") -> None:
    """Write a model's text to stdout; on a terminal control characters are shown instead of obeyed."""
    sys.stdout.write(visible(text, keep) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def target(path: Path) -> Path:
    """Make the folder of a path and check that it can be written, before an hour of measuring and not after it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise ValueError(f"{path} cannot be written; give another --out.")
    return path


def thread_count(threads: int | None) -> int:
    """Number of threads: as asked for, else as OMP_NUM_THREADS says, else this process's share of its cores."""
    if threads is not None:
        return threads
    if os.environ.get("OMP_NUM_THREADS"):
        import torch

        return torch.get_num_threads()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def use_threads(threads: int | None) -> None:
    """Let this process compute with `thread_count` threads."""
    import torch  # here and in the commands' own imports: their help does not wait for it

    torch.set_num_threads(thread_count(threads))
