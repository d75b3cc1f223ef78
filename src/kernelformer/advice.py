"""Commands that messages advise, so that they work when they are copied into a shell."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path

NAME = "kernelformer"


def program() -> str:
    """How ``kernelformer`` is called here: by its name, by the path it was called by, or as a module of this Python."""
    if shutil.which(NAME):
        return NAME
    called = sys.argv[0]
    if os.path.basename(called) == NAME:
        return shlex.quote(called)
    return f"{shlex.quote(sys.executable)} -m {NAME}"


def typed() -> str:
    """The command that is running, in backticks."""
    return f"`{' '.join([program(), *map(shlex.quote, sys.argv[1:])])}`"


def resume_command(folder: Path | str, command: str = "train", more: str = "") -> str:
    """The command that goes on with what is in a folder, in backticks: a run, or by `compare` a comparison.

    Args:
        folder: of the run or the comparison.
        command: that takes it.
        more: further options.
    """
    return f"`{program()} {command} {shlex.quote(str(folder))} --resume{more and f' {more}'}`"
