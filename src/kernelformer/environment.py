"""Where a figure was made, and how much memory the process has held."""

from __future__ import annotations

import os
import platform
import sys
from contextlib import suppress
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

LIBRARIES = ("kernelformer", "transformers", "accelerate", "numpy")


def environment(threads: int) -> dict[str, Any]:
    """What figures depend on besides the code: libraries and machine, without its name and without paths."""
    import torch

    versions: dict[str, Any] = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    for name in LIBRARIES:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    versions |= {"machine": platform.machine(), "system": platform.system(), "cpus": os.cpu_count()}
    processor = processor_name()
    if processor:
        versions["processor"] = processor
    if torch.cuda.is_available():
        versions["accelerator"] = torch.cuda.get_device_name()
    return {**versions, "threads": threads}


def processor_name() -> str | None:
    """Name of the processor as the system has it, or None."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return None


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
