"""Processes that this one starts to train or measure in, and that end with it."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

PARENT = "KERNELFORMER_PARENT"  # in its environment a worker finds who started it
_PR_SET_PDEATHSIG = 1  # of Linux's prctl


@contextmanager
def started(command: Sequence[str], env: Mapping[str, str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Start a process; SIGTERM to this one is passed on to it, and it has ended when the block has.

    Args:
        command: program and arguments.
        env: its environment.
        options: of `subprocess.Popen`; its streams carry text.

    Raises:
        KeyboardInterrupt: SIGTERM has come; at the end of the block, so that it can read what the process still says.
    """
    stopped = False
    worker: subprocess.Popen[str] | None = None

    def pass_on(number: int, frame: FrameType | None) -> None:
        nonlocal stopped
        stopped = True
        if worker is not None:
            worker.terminate()

    main = threading.current_thread() is threading.main_thread()  # signals are the main thread's
    before = signal.signal(signal.SIGTERM, pass_on) if main else None
    try:
        worker = subprocess.Popen(command, env={**env, PARENT: str(os.getpid())}, text=True, **options)
        if stopped:  # while it was being started
            worker.terminate()
        with worker:
            try:
                yield worker
            except KeyboardInterrupt:
                worker.terminate()  # from a terminal it has heard Ctrl-C too; then this one changes nothing
                raise
            except BaseException:
                worker.kill()
                raise
    finally:
        if main:
            signal.signal(signal.SIGTERM, before)
    if stopped:
        raise KeyboardInterrupt


def finished(command: Sequence[str], text: str, env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Start a process, give it a text and wait for it, as `subprocess.run` does; see `started`."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with started(command, env, **pipes) as worker:
        out, errors = worker.communicate(text)
    return subprocess.CompletedProcess(worker.args, worker.returncode, out, errors)


def end_with_parent() -> None:
    """Have the system send SIGTERM to this process when its parent has died, even of a signal that it cannot hear.

    Linux only; elsewhere a killed parent leaves its worker to finish.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.environ.get(PARENT, str(os.getppid())) != str(os.getppid()):  # it died before this line
            os.kill(os.getpid(), signal.SIGTERM)
