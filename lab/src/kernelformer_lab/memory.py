"""Peak memory of the process."""

from __future__ import annotations

import sys
from pathlib import Path


def reset_peak() -> int:
    """Resident bytes of the process now, after forgetting its peak where the system can (Linux)."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
        return _status("VmRSS")
    except OSError:
        return peak()


def peak() -> int:
    """The most bytes that were resident since `reset_peak`, or since the start where that could not forget."""
    try:
        return _status("VmHWM")
    except OSError:
        import resource  # not on Windows

        size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return size if sys.platform == "darwin" else size * 1024


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}")
