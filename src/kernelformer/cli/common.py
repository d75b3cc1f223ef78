"""Consoles, errors without a traceback, JSON and threads for all commands."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.progress import TimeRemainingColumn as TimeLeft
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from kernelformer.commands import typed
from kernelformer.environment import free_cores, usable_cores
from kernelformer.errors import StoppedError, TrainingError, WorkerError
from kernelformer.files import FULL, finite
from kernelformer.formatting import shortened, visible
from kernelformer.lazy import MissingExtraError

UNLIMITED = 100_000  # characters of a line
NARROW = 8  # characters that a column of text needs to be read


class VisibleConsole(Console):
    """Console that shows control characters and does not interpret markup or emoji.

    A text may hold what a terminal would obey: escape sequences, carriage returns, marks that turn the direction of
    writing. Whatever is printed here, tables, titles and bars too, shows them as ``<U+001B>``. Nothing in it counts as
    rich's markup (``[red]``) or as the name of an emoji (``:bomb:``).
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **settings)

    def render_str(self, text: str, **settings: Any) -> Text:
        """Convert a string to text with visible control characters."""
        return super().render_str(visible(text, keep="\n\t"), **settings)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render text with visible control characters; rich's own control codes stay, and tables are not truncated."""
        if isinstance(renderable, Table):
            self._make_room(renderable, options or self.options)
        for part in super().render(renderable, options):
            yield part if part.control else part._replace(text=visible(part.text, keep="\n"))

    def _make_room(self, table: Table, options: ConsoleOptions) -> None:
        """Wrap cells where rich would truncate them.

        Columns that are not to be broken are, if together they leave too little room for the others.
        """
        whole = options.update(max_width=UNLIMITED)
        fixed = [
            max(self.measure(x, options=whole).maximum for x in (column.header, *column.cells))
            for column in table.columns
            if column.no_wrap
        ]
        others = len(table.columns) - len(fixed)
        narrow = sum(fixed) + NARROW * others + 3 * len(table.columns) + 1 > options.max_width
        for column in table.columns:
            column.overflow = "fold"
            column.no_wrap = column.no_wrap and not narrow


def text_column(template: str) -> TextColumn:
    """Column of a progress bar whose text has no markup."""
    return TextColumn(template, markup=False)


console = VisibleConsole(width=None if sys.stdout.isatty() else 140)  # a pipe has room for a table
errors = VisibleConsole(stderr=True, soft_wrap=True)  # a path stays in one piece


def _redirect(wanted: bool) -> bool:
    """Send tables and sentences to stderr, so that stdout has the JSON alone."""
    console.stderr = wanted
    return wanted


Threads = Annotated[
    int | None, typer.Option(min=1, help="threads to compute with; default: OMP_NUM_THREADS, or all idle cores")
]
Json = Annotated[bool, typer.Option("--json", callback=_redirect, help="print JSON on stdout, and all else on stderr")]


def starts_anew() -> str:
    """Sentence for Ctrl-C on a command that keeps nothing of its work."""
    return f"{typed()} starts anew"


def goes_on() -> str:
    """Sentence for Ctrl-C on a command that continues from what it has saved."""
    return f"{typed()} goes on from there"


def fail(problem: Exception, code: int = 2) -> NoReturn:
    """Print an error or a stop, once if all processes have it, and end the command."""
    rank = os.environ.get("RANK", "0")
    if rank == "0" or not getattr(problem, "everywhere", False):
        where = "" if rank == "0" else f" on process {rank}"
        label = ("", "") if isinstance(problem, StoppedError) else (f"error{where}: ", "bold red")
        errors.print(Text.assemble(label, visible(problem, keep="\n")))
    raise typer.Exit(code)


def warn(text: str) -> None:
    """Print a warning on stderr."""
    errors.print(Text.assemble(("warning: ", "bold yellow"), visible(text, keep="\n")))


@contextmanager
def plain_errors(then: Callable[[], str] = starts_anew) -> Iterator[None]:
    """Context in which errors that users can correct end a command without a traceback, and Ctrl-C with code 130."""
    try:
        yield
    except StoppedError as stopped:
        fail(stopped, 130)
    except BrokenPipeError:  # as in `kernelformer list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(141) from None
    except OSError as problem:
        if problem.errno in FULL:
            where = problem.filename or "standard output cannot be written"
            fail(ValueError(f"the disk is full: {where}; make room, or write elsewhere."))
        name = str(problem.filename or "")
        if len(name) > 300:  # the message has all of it
            fail(ValueError(f"{name[:100]}... of {len(name):,} characters cannot be used: {problem.strerror}."))
        fail(problem)
    except (ValueError, TrainingError, WorkerError, MissingExtraError) as problem:
        fail(problem)
    except KeyboardInterrupt:
        fail(StoppedError(f"stopped at once; {then()}."), 130)


def show_json(value: Any) -> None:
    """Print JSON on stdout, with null for what is no number."""
    _write_out(json.dumps(finite(value), indent=2, default=str) + "\n")


def write(text: str, keep: str = "\n\t") -> None:
    """Write a model's text to stdout with visible control characters."""
    _write_out(visible(text, keep))


def _write_out(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def literal_text(prompt: str | None, text: str | None) -> str | None:
    """The prompt as it was written, or read from a file; None where neither was given."""
    if prompt is not None and text is not None:
        raise ValueError(f"--prompt {prompt!r:.40} and --text {text!r:.40} both say what to read; give one of them.")
    if text is None:
        return prompt
    if not os.path.isfile(text):
        if os.path.exists(text):
            raise ValueError(f"{text} is not a regular file; --text takes one, --prompt a text.")
        raise ValueError(f"there is no file {text!r:.60}; --text takes a file, --prompt a text.")
    try:
        return Path(text).read_text("utf-8-sig").removesuffix("\n")
    except UnicodeDecodeError as problem:
        raise ValueError(f"{text} is not UTF-8: {problem.reason}; save it as UTF-8.") from None


def thread_count(threads: int | None) -> int:
    """Number of threads: as asked for, else as OMP_NUM_THREADS says, else this process's share of its idle cores."""
    if threads is not None:
        return threads
    if os.environ.get("OMP_NUM_THREADS"):
        import torch

        return torch.get_num_threads()
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    cores = usable_cores() // ranks
    free = free_cores() if cores > 1 and ranks == 1 else None  # ranks start together, and would count each other
    return max(1, cores if free is None else min(cores, round(free)))


def use_threads(threads: int | None) -> None:
    """Let this process compute with `thread_count` threads."""
    import torch  # here and in the commands' own imports: their help does not wait for it

    torch.set_num_threads(thread_count(threads))


# "step 30 of 200", "step 30/200", "0.4 of 1.5 min", "change 2 of 9": the words that log sentences have for a part.
PART = re.compile(r"(?:step|change) ([\d,]+)(?: of |/)([\d,]+)|([\d.]+) of ([\d.]+) min")


class Following:
    """Progress of one job of several parts, each with a progress of its own if ``inner``, or of so many seconds."""

    def __init__(self, total: int | None, inner: bool = False, seconds: float | None = None) -> None:
        columns = (
            SpinnerColumn(),
            text_column("{task.description}"),
            BarColumn(20),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            text_column("left"),
            TimeLeft(),
        )
        quiet = console.stderr or not errors.is_terminal
        self.bars = Progress(*columns, console=errors, transient=True, disable=quiet, refresh_per_second=4)
        self.total, self.inner, self.seconds = total, inner, seconds
        self.bar: TaskID = self.bars.add_task("", total=seconds if total is None else total)
        self.done, self.stage, self.start = 0, "", time.monotonic()

    def log(self, text: str) -> None:
        """Show a sentence next to the bar, or as a line on stderr where there is none."""
        if self.bars.disable:
            errors.print(text)
        self.bars.update(self.bar, description=shortened(visible(text), max(30, errors.width - 60)))
        part = part_done(text)
        if self.seconds is not None:
            self.bars.update(self.bar, completed=min(self.seconds, time.monotonic() - self.start))
        elif part is not None and self.total is None:
            self._stage(text.partition(":")[0], part)
        elif part is not None and self.inner:
            self.bars.update(self.bar, completed=self.done + part)

    def advance(self) -> None:
        """Count one part as done."""
        self.done += 1
        self.bars.update(self.bar, completed=self.done)

    def reach(self, done: float, total: float) -> None:
        """Set the progress to ``done`` of ``total``."""
        self.bars.update(self.bar, completed=done, total=total)

    def _stage(self, name: str, part: float) -> None:
        """Restart the bar for a new stage, whose time is unrelated to that of the last."""
        if name != self.stage:
            self.stage = name
            self.bars.reset(self.bar, total=1.0)
        self.bars.update(self.bar, completed=part, total=1.0)


@contextmanager
def following(total: int | None = None, *, inner: bool = False, seconds: float | None = None) -> Iterator[Following]:
    """Context with a progress bar on stderr, which disappears at the end; see `Following`."""
    job = Following(total, inner, seconds)
    with job.bars:
        yield job


def part_done(text: str) -> float | None:
    """Read from a log sentence the share that is done, 0 to 1; None: it has none."""
    match = PART.search(text)
    if match is None:
        return None
    done, whole = (
        float((a or b).replace(",", "")) for a, b in zip(match.groups()[:2], match.groups()[2:], strict=True)
    )
    return min(1.0, done / whole) if whole else None
