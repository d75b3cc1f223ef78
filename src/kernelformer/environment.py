"""Cores to compute with, the conditions that a figure was made under, and the peak memory of the process."""

from __future__ import annotations

import os
import platform
import time
from contextlib import suppress
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

# Of libgomp, torch's OpenMP on Linux. By default a thread without work spins for milliseconds before it sleeps; where
# another process takes its core, that makes steps of many small operators 20 times slower.
SPIN_VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
SPIN_COUNT = "5000"
LIBRARIES = ("kernelformer", "transformers", "accelerate", "numpy")


def environment(threads: int) -> dict[str, Any]:
    """Record libraries and machine, which figures depend on; without host name and paths."""
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


def bound_spinning() -> None:
    """Bound how long idle OpenMP threads spin, here and in processes started from here; before torch is loaded.

    A variable that the user has set stays.
    """
    if not any(name in os.environ for name in SPIN_VARIABLES):
        os.environ[SPIN_VARIABLES[0]] = SPIN_COUNT


def usable_cores(quota: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Count the cores that this process may use: its affinity, bounded by the quota of its container (cgroup v2)."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError, ValueError):  # no such file, or no quota: "max"
        allowed, period = (int(x) for x in quota.read_text().split())
        cores = min(cores, max(1, round(allowed / period)))
    return cores


def free_cores(seconds: float = 0.2, stat: Path = Path("/proc/stat")) -> float | None:
    """Measure how many of this process's cores are idle; None where the system does not count (not Linux)."""
    try:
        before, start = _idle_ticks(stat), time.perf_counter()
        time.sleep(seconds)
        idle = (_idle_ticks(stat) - before) / os.sysconf("SC_CLK_TCK")
        return idle / (time.perf_counter() - start)
    except (OSError, AttributeError):
        return None


def _idle_ticks(stat: Path) -> int:
    rows = [line.split() for line in stat.read_text().splitlines() if line[:3] == "cpu" and line[3].isdigit()]
    return sum(int(row[4]) + int(row[5]) for row in rows if int(row[0][3:]) in os.sched_getaffinity(0))


def processor_name() -> str | None:
    """Name of the processor as the system has it, or None."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return None
