"""What all commands share: the console, errors without a traceback, progress, lists of names."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

console = Console(width=None if sys.stdout.isatty() else 140)  # a pipe has room for a table


def fail(problem: Exception, code: int = 2) -> NoReturn:
    """Say what is wrong, on one of several processes, and end."""
    if os.environ.get("RANK", "0") == "0":
        console.print(f"[bold red]error:[/] {escape(str(problem))}", highlight=False)
    raise typer.Exit(code)


@contextmanager
def plain_errors(*kinds: type[Exception]) -> Iterator[None]:
    """Errors of these kinds, ValueError and those of the operating system end the command without a traceback."""
    expected: tuple[type[Exception], ...] = (ValueError, OSError, *kinds)
    try:
        yield
    except expected as problem:
        fail(problem)


def progress_bar() -> Progress:
    """A bar that is gone when it is done."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True)


def say(progress: Progress, bar: TaskID, text: str, advance: int = 0) -> None:
    """Next to the bar, or as a line of its own where there is no terminal to draw a bar on."""
    progress.update(bar, description=escape(text), advance=advance)
    if not console.is_terminal:
        console.print(text, highlight=False, markup=False)


def names(text: str) -> list[str]:
    """Parts between commas; those within brackets belong to a value."""
    return [x.strip() for x in re.split(r",(?![^(\[]*[)\]])", text)]


def target(path: Path) -> Path:
    """The path, after its folder was made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def thread_count(threads: int | None) -> int:
    """As asked for, else all cores."""
    return threads or os.cpu_count() or 1
