"""The device that a measurement runs on: whether it is there, when it is done, and what it has held.

A device works behind the calls that ask it to, so that a clock is read only after it was waited for. Memory on an
accelerator is by its own counters; MPS has none of the peak, and no figure.
"""

from __future__ import annotations

import platform
import subprocess
from contextlib import suppress
from typing import Any

import torch

from kernelformer.environment import processor_name


def present_devices() -> list[str]:
    """The kinds of devices that torch finds here, the CPU first."""
    found = [name for name in ("cuda", "xpu") if getattr(torch, name).is_available()]
    return ["cpu", *found, *(["mps"] if torch.backends.mps.is_available() else [])]


def check_device(name: str) -> torch.device:
    """Check that a device is here, and return it.

    Args:
        name: as torch names it, ``cuda`` or ``cuda:1``.
    """
    kind, _, number = name.partition(":")
    there = present_devices()
    if kind not in there:
        raise ValueError(
            f"device {name!r} is not here: torch {torch.__version__} finds {', '.join(there)}; take one of these, or "
            f"install a torch that is built for your device."
        )
    count = 1 if kind in ("cpu", "mps") else torch.get_device_module(kind).device_count()
    if number and (not number.isdecimal() or int(number) >= count):
        raise ValueError(f"device {name!r} is not here: there are {count} of kind {kind!r}, counted from 0.")
    return torch.device(name)


def counts_memory(device: torch.device) -> bool:
    """True for devices that count their peak themselves; the memory of the CPU is the process's, see `harness`."""
    return device.type in ("cuda", "xpu")


def reset_peak(device: torch.device) -> int:
    """Bytes that tensors hold on an accelerator now, after its peak was forgotten."""
    module = torch.get_device_module(device)
    module.synchronize()
    module.reset_peak_memory_stats()
    held: int = module.memory_allocated()
    return held


def peak(device: torch.device) -> int:
    """The most bytes that tensors held on an accelerator since `reset_peak`."""
    module = torch.get_device_module(device)
    module.synchronize()
    most: int = module.max_memory_allocated()
    return most


def device_facts(device: torch.device) -> dict[str, Any]:
    """Facts that figures depend on besides the code: device, driver and system; no names of the machine."""
    facts: dict[str, Any] = {"device": device.type, "os": f"{platform.system()} {platform.release()}"}
    if device.type == "cpu":
        name = processor_name() or platform.processor()
        return {**facts, "name": name, "capability": torch.backends.cpu.get_cpu_capability()}
    if device.type == "mps":
        return {**facts, "name": platform.processor(), "os": f"macOS {platform.mac_ver()[0]}"}
    properties = torch.get_device_module(device).get_device_properties(device)
    facts |= {"name": properties.name, "memory": properties.total_memory}
    if device.type == "cuda":
        facts |= {"capability": f"{properties.major}.{properties.minor}", "cuda": torch.version.cuda}
        facts |= {"hip": torch.version.hip, "driver": _driver()}
        facts["tf32"] = torch.backends.cuda.matmul.allow_tf32
    else:
        facts["driver"] = getattr(properties, "driver_version", None)
    return {name: x for name, x in facts.items() if x is not None}


def _driver() -> str | None:
    """Version of NVIDIA's driver, as its own tool tells it."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        return done.stdout.split("\n")[0].strip() or None
    return None
