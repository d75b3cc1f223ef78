"""Commands quoted in messages, ready to paste into a shell."""

from __future__ import annotations

import os
import shlex
import shutil
import sys

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
