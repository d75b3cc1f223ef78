"""Functions called in worker processes, which end with the process that started them.

A `Worker` runs ``python -m kernelformer_lab.jobs package.module:function`` with the arguments in JSON on stdin. Its
lines on stdout are progress, but for the one with the result; on stderr it says why it failed.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from kernelformer.errors import StoppedError, TrainingError, WorkerError

COMMAND = (sys.executable, "-m", "kernelformer_lab.jobs")
STOPPED = 130  # as the shell says of Ctrl-C
ERROR = "error: "  # before the reason of a failure, to tell it from what libraries say
RESULT = "kernelformer result: "  # before what the function has returned
PARENT = "KERNELFORMER_PARENT"  # environment variable: the process that started a worker
_PR_SET_PDEATHSIG = 1  # of Linux's prctl

Log = Callable[[str], None]


class Worker:
    """A process that calls a function.

    Args:
        work: a function at the top of a module, which takes and returns plain JSON values.
        env: environment variables beside those of this process.
        listen: whether its lines and its result will be read, by `follow`.
    """

    def __init__(
        self,
        work: Callable[..., Any],
        arguments: Mapping[str, Any],
        *,
        threads: int,
        env: Mapping[str, str] | None = None,
        listen: bool = True,
    ) -> None:
        command = [*COMMAND, f"{work.__module__}:{work.__name__}"]
        given = {**os.environ, **(env or {}), "OMP_NUM_THREADS": str(threads), PARENT: str(os.getpid())}
        out = subprocess.PIPE if listen else subprocess.DEVNULL
        # A file and not a pipe: it is read at the end, and a full pipe would stop the worker.
        self.errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        with tempfile.TemporaryFile("w+") as file:
            json.dump(arguments, file)
            file.seek(0)
            self.process = subprocess.Popen(command, env=given, stdin=file, stdout=out, stderr=self.errors, text=True)

    def follow(self, log: Log = lambda _: None) -> Any:
        """Pass its lines on until it ends, and return the result of its function; None if that returns nothing.

        Raises:
            StoppedError: it was told to stop.
            WorkerError: it failed; with the reason.
        """
        result = None
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                if line.startswith(RESULT):
                    result = json.loads(line.removeprefix(RESULT))
                else:
                    log(line.rstrip())
        if problem := self.problem():
            raise StoppedError(problem) if self.process.returncode == STOPPED else WorkerError(problem)
        return result

    def problem(self) -> str:
        """Wait for its end and return why it failed; empty if it did not. To be called once."""
        code = self.process.wait()
        with self.errors as file:
            file.seek(0)
            said = file.read().strip().splitlines()
        if not code:
            return ""
        last = f"its process was killed by signal {-code}" if code < 0 else " ".join(said[-1:])
        own = next((x.removeprefix(ERROR) for x in said if x.startswith(ERROR)), last)
        return own or f"its process ended with code {code} and no message"


@contextmanager
def starting() -> Iterator[Callable[..., Worker]]:
    """Give a function that starts a `Worker`; SIGTERM and Ctrl-C are passed on, and all have ended when the block has.

    A second Ctrl-C ends them at once.

    Raises:
        KeyboardInterrupt: one of the signals has come; at the end of the block, so that it can read what workers say.
    """
    workers: list[Worker] = []
    stopped = False

    def pass_on(number: int, frame: FrameType | None) -> None:
        nonlocal stopped
        if stopped and number == signal.SIGINT:
            raise KeyboardInterrupt
        stopped = True
        for worker in workers:
            worker.process.terminate()  # after Ctrl-C in a terminal they know already; then this changes nothing

    def start(*args: Any, **options: Any) -> Worker:
        workers.append(Worker(*args, **options))
        if stopped:  # while it was being started
            workers[-1].process.terminate()
        return workers[-1]

    before = {}
    if threading.current_thread() is threading.main_thread():  # signals are the main thread's
        before[signal.SIGTERM] = signal.signal(signal.SIGTERM, pass_on)
        if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:  # as of a shell's background jobs
            before[signal.SIGINT] = signal.signal(signal.SIGINT, pass_on)
    try:
        yield start
    except (StoppedError, WorkerError):
        if not stopped:
            raise
    finally:
        for worker in workers:
            worker.process.kill()  # unless it has ended
            worker.process.wait()
            worker.errors.close()
        for number, handler in before.items():
            signal.signal(number, handler)
    if stopped:
        raise KeyboardInterrupt


def call_in_process(
    work: Callable[..., Any], arguments: Mapping[str, Any], *, log: Log | None = None, **how: Any
) -> Any:
    """Call a function in a worker of its own and return its result; see `Worker` and `Worker.follow`.

    Raises:
        KeyboardInterrupt: this process was told to stop; the worker has ended.
    """
    with starting() as start:
        return start(work, arguments, **how).follow(log or (lambda _: None))


def tell(line: str) -> None:
    """Print a worker's line of progress; if nothing reads it any more, the work still comes to its end."""
    with suppress(BrokenPipeError):
        print(line, flush=True)


def end_with_parent() -> None:
    """Have the system send SIGTERM to this process when its parent has died, even of a signal that it cannot hear.

    Linux only; elsewhere a killed parent leaves its worker to finish.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.environ.get(PARENT, str(os.getppid())) != str(os.getppid()):  # it died before this line
            os.kill(os.getpid(), signal.SIGTERM)


def main(name: str, arguments: str) -> int:
    """Call a function; its result is a line on stdout, the reason of a failure one on stderr."""
    end_with_parent()
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    module, _, function = name.partition(":")
    try:
        result = getattr(importlib.import_module(module), function)(**json.loads(arguments))
    except KeyboardInterrupt:
        return STOPPED
    except (ValueError, OSError, TrainingError) as problem:
        print(f"{ERROR}{problem}", file=sys.stderr)
        return STOPPED if isinstance(problem, StoppedError) else 2
    if result is not None:
        print(f"\n{RESULT}{json.dumps(result)}")  # on a line of its own: libraries may print before it
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.stdin.read()))
