"""Diagnosis of an installation: versions, extras, threads, memory, devices, folders, and a self-check of attention.

Nothing here needs more than torch, so that it can tell what is missing.
"""

from __future__ import annotations

import os
import platform
import re
import sys
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from kernelformer.environment import SPIN_COUNT, SPIN_VARIABLES, processor_name, usable_cores

EXTRAS = {
    "hf": "the command line, models in Hugging Face's conventions, conversion, reports",
    "train": "the laboratory: training, benchmarks, studies and reproductions",
    "gguf": "conversion of .gguf files",
    "export": "export to ONNX, and running what was exported",
    "peers": "other libraries to measure against, in `kernelformer bench`",
    "docs": "building the documentation",
    "dev": "tests and linters",
}
CACHES = (  # who, the variable that names the folder, and its name within the user's cache
    ("Hugging Face", "HF_HOME", "huggingface"),
    ("kernelformer", "", "kernelformer"),
    ("torch", "TORCH_HOME", "torch"),
)
PROBE = 1 << 23  # float32 numbers, 32 MiB: more than glibc keeps by default
PAGE = 4096
KEPT = "MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=100000000000 MALLOC_TOP_PAD_=1000000000"
TOLERANCE = 2e-5  # of float32 against the definition, as in the tests


def diagnose() -> dict[str, Any]:
    """Collect the whole diagnosis as plain values."""
    return {
        "versions": versions(),
        "extras": extras(),
        "threads": threads(),
        "allocator": allocator(),
        "devices": devices(),
        "caches": caches(),
        "hub": hub(),
        "self_check": self_check(),
    }


def versions() -> dict[str, str]:
    """Versions of Python, torch and this library, and the machine."""
    import torch

    from kernelformer import __version__

    own = {"kernelformer": __version__, "python": platform.python_version(), "torch": torch.__version__}
    return {**own, "system": f"{platform.system()} {platform.machine()}"}


def extras() -> list[dict[str, Any]]:
    """Every extra with its packages: which are there, which are missing, and what it is for."""
    packages: dict[str, list[str]] = {}
    with suppress(metadata.PackageNotFoundError):
        for line in metadata.requires("kernelformer") or ():
            name, of = re.match(r"[\w.-]+", line), re.search(r"extra == ['\"]([\w-]+)['\"]", line)
            if name is not None and of is not None:
                packages.setdefault(of[1], []).append(name[0])
    rows = []
    for extra, names in packages.items():
        others = [*(packages.get("hf", []) if extra != "hf" else []), "kernelformer"]
        known = {name: _version(name) for name in names if name not in others}
        missing = [name for name, version in known.items() if version is None]
        rows.append(
            {
                "extra": extra,
                "gives": EXTRAS.get(extra, ""),
                "installed": {name: version for name, version in known.items() if version is not None},
                "missing": missing,
                "install": f"pip install 'kernelformer[{extra}]'" if missing else None,
            }
        )
    return sorted(rows, key=lambda x: list(EXTRAS).index(x["extra"]) if x["extra"] in EXTRAS else len(EXTRAS))


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def threads() -> dict[str, Any]:
    """Threads that torch computes with, cores that this process may use, and what the environment says."""
    import torch

    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", *SPIN_VARIABLES)
    return {
        "torch": torch.get_num_threads(),
        "between_operators": torch.get_num_interop_threads(),
        "cores_usable": usable_cores(),
        "cores": os.cpu_count(),
        "processor": processor_name(),
        "environment": {name: os.environ[name] for name in names if name in os.environ},
        "hint": (
            f"commands set {SPIN_VARIABLES[0]}={SPIN_COUNT} unless {' or '.join(SPIN_VARIABLES)} is set; where other "
            "processes use the same cores, set it for scripts of your own too, before torch is imported: idle threads "
            "then sleep sooner instead of spinning"
        ),
    }


def allocator() -> dict[str, Any]:
    """Check if freed memory is kept for the next tensor, by the page faults of large ones allocated in turn."""
    settings = {name: value for name, value in os.environ.items() if name.startswith("MALLOC_")}
    found: dict[str, Any] = {"settings": settings, "preloaded": os.environ.get("LD_PRELOAD") or None}
    share = _faults()
    if share is None:
        return {**found, "fault_share": None, "kept": None, "hint": None}
    kept = share < 0.5
    hint = None
    if not kept:
        hint = (
            "large tensors that are freed go back to the system, and each new one pays page faults; what allocates "
            f"much is faster with {KEPT} in the environment, and takes more memory (`kernelformer bench --heaps "
            "default,kept` shows by how much)"
        )
    return {**found, "fault_share": share, "kept": kept, "hint": hint}


def _faults(rounds: int = 4) -> float | None:
    """Page faults of a fresh tensor as a share of its pages, after the first; None where they are not counted."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    import torch

    torch.ones(PROBE)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(rounds):
        torch.ones(PROBE)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) * PAGE / (rounds * PROBE * 4)


def devices() -> list[dict[str, Any]]:
    """The CPU with its vector instructions, and the accelerators that torch sees."""
    import torch

    rows: list[dict[str, Any]] = [{"device": "cpu", "name": torch.backends.cpu.get_cpu_capability()}]
    for kind in ("cuda", "xpu"):
        module = getattr(torch, kind)
        with suppress(RuntimeError, AssertionError):  # a driver that does not answer is no device
            for index in range(module.device_count() if module.is_available() else 0):
                rows.append({"device": f"{kind}:{index}", "name": module.get_device_name(index)})
    if torch.backends.mps.is_available():
        rows.append({"device": "mps", "name": platform.processor()})
    return rows


def caches() -> list[dict[str, Any]]:
    """Folders that files are kept in, whether they are there, and whether they can be written."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    rows = []
    for who, variable, name in CACHES:
        folder = Path(os.environ.get(variable) or base / name).expanduser()
        near = next((x for x in (folder, *folder.parents) if x.exists()), folder)
        rows.append({"of": who, "folder": str(folder), "exists": folder.is_dir(), "writable": os.access(near, os.W_OK)})
    return rows


def hub() -> dict[str, Any]:
    """Report if the environment allows access to the hub; no connection is tried."""
    names = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")
    said = {name: os.environ[name] for name in names if name in os.environ}
    return {"offline": any(x.upper() in ("1", "ON", "YES", "TRUE") for x in said.values()), "environment": said}


def self_check() -> dict[str, Any]:
    """The largest error of favor+ in float32 against its weights one by one: both directions, causal, by tokens."""
    import torch

    import kernelformer as kf

    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 2, 67, 8, generator=generator) for _ in range(3))
    core: Any = kf.build_attention("favor+", head_dim=8, num_heads=2, num_features=16, seed=0)
    errors = {}
    with torch.no_grad():
        phi_q, phi_k = (core.feature_map(x, role, core.scale) for x, role in ((query, "query"), (key, "key")))
        for name, causal in (("bidirectional", False), ("causal", True)):
            weights = phi_q @ phi_k.mT
            weights = weights.tril() if causal else weights
            truth = weights @ value / weights.sum(-1, keepdim=True)
            errors[name] = _distance(core(query, key, value, is_causal=causal), truth)
        state, rows = None, []
        for i in range(query.shape[2]):
            q, k, v = (x[:, :, i : i + 1] for x in (query, key, value))
            row, state = core.step(q, k, v, state)
            rows.append(row)
        errors["step by step"] = _distance(torch.cat(rows, 2), truth)
    return {"method": "favor+", "errors": errors, "tolerance": TOLERANCE, "passed": max(errors.values()) < TOLERANCE}


def _distance(one: Any, other: Any) -> float:
    return float((one.double() - other.double()).abs().max() / other.double().abs().max())


def as_lines(found: dict[str, Any]) -> list[str]:
    """The diagnosis for people, a line each."""
    own = found["threads"]
    said = ", ".join(f"{name}={x}" for name, x in own["environment"].items())
    lines = [", ".join(f"{name} {x}" for name, x in found["versions"].items())]
    lines.append(f"threads: torch computes with {own['torch']} of {own['cores_usable']} usable cores")
    lines[-1] += (f" ({own['processor']})" if own["processor"] else "") + (f"; {said}" if said else "")
    lines.append(f"hint: {own['hint']}")
    lines += [f"device: {x['device']} ({x['name']})" for x in found["devices"]]
    memory = found["allocator"]
    if memory["kept"] is not None:
        kept = "is kept for the next one" if memory["kept"] else "goes back to the system"
        lines.append(f"allocator: memory of a large tensor that is freed {kept}")
    lines += [f"hint: {memory['hint']}"] if memory["hint"] else []
    for x in found["caches"]:
        state = ("" if x["exists"] else ", not there yet") + ("" if x["writable"] else ", cannot be written")
        lines.append(f"cache of {x['of']}: {x['folder']}{state}")
    lines.append(f"hub: {'offline, by the environment' if found['hub']['offline'] else 'may be asked'}")
    check = found["self_check"]
    worst = max(check["errors"].values())
    lines.append(
        f"self-check: {check['method']} against its definition, largest error {worst:.1e}: "
        f"{'passed' if check['passed'] else 'FAILED'}"
    )
    return lines


def missing_lines(found: dict[str, Any]) -> list[str]:
    """Lines on extras that are not installed, their use, and the command that installs them."""
    return [
        f"extra [{x['extra']}]: missing {', '.join(x['missing'])}; gives {x['gives'] or 'more'}: {x['install']}"
        if x["missing"]
        else f"extra [{x['extra']}]: installed"
        for x in found["extras"]
    ]


def plain_report() -> str:
    """The whole diagnosis as text, for where the command line cannot run."""
    found = diagnose()
    return "\n".join([*as_lines(found), *missing_lines(found), f"Python is {sys.executable}"])
