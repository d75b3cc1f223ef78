"""Commands quoted in messages, ready to paste into a shell."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path

from kernelformer.files import given_options

NAME = "kernelformer"


def program() -> str:
    """Command that runs ``kernelformer`` here: its name, the path it was called by, or a module of this Python."""
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
    """Command that resumes the run or comparison in a folder, in backticks.

    Bounds that were raised by options are raised in it too: no record keeps them, and the data is read again.

    Args:
        folder: of the run or the comparison.
        command: that takes it.
        more: further options.
    """
    words = [program(), *given_options(), command, shlex.quote(str(folder)), "--resume", more]
    return f"`{' '.join(filter(None, words))}`"
