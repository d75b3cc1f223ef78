"""Command line of kernelformer."""

from __future__ import annotations

import os
import sys
import warnings

from kernelformer.environment import bound_spinning
from kernelformer.formatting import human_bytes
from kernelformer.lazy import MissingExtraError, require_extra

# How the system's loader, the system and torch say that there is no memory.
NO_MEMORY = ("failed to map segment", "annot allocate memory", "can't allocate memory")


def main() -> None:
    """Run ``kernelformer``, or report missing extras and memory."""
    bound_spinning()
    limit = _limit()  # now: where there is no memory nothing more can be imported
    try:
        _run()
    except Exception as problem:
        if not _lacks_memory(problem, limit is not None):
            raise
        way = "take smaller batches or a smaller model, or end other processes"
        if limit is not None:
            way = f"this process may have {human_bytes(limit)}, raise that by ulimit -v unlimited"
        # At once: what libraries do at the end of a process would fail for the same reason, each with a traceback.
        os.write(2, f"error: there is not enough memory; {way}.\n".encode())
        os._exit(1)


def _run() -> None:
    try:
        require_extra("the kernelformer command", "typer", "matplotlib")
    except MissingExtraError as problem:
        if sys.argv[1:2] == ["doctor"]:  # it tells what is missing
            from kernelformer.diagnosis import plain_report

            sys.exit(f"{plain_report()}\n{problem}")
        sys.exit(str(problem))
    from kernelformer.cli.app import app
    from kernelformer.cli.common import warn

    warnings.showwarning = lambda message, *_, **__: warn(str(message))
    app()


def _limit() -> int | None:
    """Bytes of addresses that this process may have, or None for all."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def _lacks_memory(problem: BaseException | None, limited: bool) -> bool:
    """Return True if an error or one of its causes means that memory is out; imports have many for it."""
    if problem is None:
        return False
    named = isinstance(problem, MemoryError) or any(x in str(problem) for x in NO_MEMORY)
    lost = limited and isinstance(problem, SystemError)  # an import that lost its MemoryError
    return named or lost or _lacks_memory(problem.__cause__ or problem.__context__, limited)
