"""Whether somebody takes timings on this machine: others that only compute wait for that."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_NAME = "kernelformer-timing-"
BESIDE = "KERNELFORMER_BESIDE_OTHERS"  # in the environment of processes that never have the machine to themselves


@contextmanager
def taking_timings() -> Iterator[None]:
    """Mark the time in which timings are taken; `timings_under_way` is true in every process of this user.

    A job of a queue leaves no mark: its queue would wait for the job, and the job for its queue.
    """
    if BESIDE in os.environ:
        yield
        return
    mark = Path(tempfile.gettempdir()) / f"{_NAME}{os.getuid() if hasattr(os, 'getuid') else 0}-{os.getpid()}"
    mark.touch()
    try:
        yield
    finally:
        mark.unlink(missing_ok=True)


def timings_under_way() -> bool:
    """Whether a process that lives is taking timings; the mark of one that was killed is removed."""
    user = os.getuid() if hasattr(os, "getuid") else 0
    busy = False
    for mark in Path(tempfile.gettempdir()).glob(f"{_NAME}{user}-*"):
        number = mark.name.rpartition("-")[2]
        if number.isdecimal() and _lives(int(number)):
            busy = True
        else:
            mark.unlink(missing_ok=True)
    return busy


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
