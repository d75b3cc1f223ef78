"""Silence progress bars and log messages of transformers."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from transformers.utils import logging


@contextmanager
def silent_libraries() -> Iterator[None]:
    """Silence remarks and progress bars of transformers in a block; afterwards all is as before."""

    def hook(problem: threading.ExceptHookArgs) -> None:
        # TensorBoard writes in a thread. If the disk is full `Board` hears of it, and need not be shown the thread.
        if not issubclass(problem.exc_type, OSError):
            threads(problem)

    threads, threading.excepthook = threading.excepthook, hook
    before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            # torch's new name for it would send the buffers of the first process around once, and is no better here.
            warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
            yield
    finally:
        threading.excepthook = threads
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()
