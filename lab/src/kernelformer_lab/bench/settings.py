"""Settings of the measurements: plain values, so that the command line's help needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kernelformer.errors import choice
from kernelformer.settings import MEMORY, Settings, option

Task = Literal["bidirectional", "causal", "decode"]
TASKS: tuple[Task, ...] = ("bidirectional", "causal", "decode")
BIASES = ("full", "window")
PASSES = ("forward", "forward + backward")
DEVICES = ("cpu", "cuda", "mps", "xpu")
BOUNDS = ("opt", "opt+qk")  # attention that returns V, without and with the gradients of Q and K

# glibc gives large tensors back to the system at once, so every fresh one pays page faults. That is what users have by
# default, but it favours what allocates least; with these settings nothing is given back.
HEAPS: dict[str, dict[str, str]] = {
    "default": {},
    "kept": {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "100000000000", "MALLOC_TOP_PAD_": "1000000000"},
}
# Whatever is larger than 64 KiB goes back to the system at once, so that resident memory is what is in use.
MEMORY_HEAP = {"MALLOC_MMAP_THRESHOLD_": "65536"}


@dataclass(frozen=True, kw_only=True)
class BenchSettings(Settings):
    """Settings of `bench.benchmark`."""

    lengths: tuple[int, ...] = option((1024, 4096, 16384), "lengths, and contexts for decoding", least=1)
    attention: tuple[str, ...] = option(
        ("favor+",), "name or name:option=value, separated by commas; ratios refer to the first"
    )
    peers: tuple[str, ...] = option(
        ("auto",), "'auto' for SDPA, what is installed, and for a bias Algorithm 1; 'none'; or names"
    )
    tasks: tuple[str, ...] = option(TASKS, "of bidirectional, causal, decode", name="modes")
    passes: tuple[str, ...] = option(
        ("forward", "train"), "of forward, train (forward + backward)", choices=("forward", "train")
    )
    heaps: tuple[str, ...] = option(
        tuple(HEAPS), "of default, kept: the allocator's settings", choices=("default", "kept")
    )
    batch: int = option(1, "sequences at once", least=1)
    heads: int = option(8, "of the attention", least=1)
    head_dim: int = option(64, "width of a head", least=1)
    features: int = option(256, "number of features", least=1)
    bias: str = option(
        "none", "relative positions: none, full (all distances), window", choices=("none", "full", "window")
    )
    max_distance: int = option(128, "distance beyond which such a bias is constant", least=1)
    budget: float = option(2.0, "seconds per contender and case", least=0.01)
    memory: bool = option(True, MEMORY)
    device: str = option("cpu", "where to run: cpu, cuda, mps or xpu; cuda:1 is the second of its kind")

    def __post_init__(self) -> None:
        super().__post_init__()
        choice("bias", self.bias, ("none", *BIASES))
        choice("device", self.device.partition(":")[0], DEVICES)
        for what, values, known in (
            ("pass", self.passes, ("forward", "train")),
            ("mode", self.tasks, TASKS),
            ("heap", self.heaps, HEAPS),
        ):
            for value in values:
                choice(what, value, known)
