"""Which algorithm a call takes: the loop over chunks, or all chunks at once."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

LOOPS = ("chunked", "parallel")  # the names; "chunked" is the loop over chunks, the least memory and the best on a CPU
ACCELERATORS = ("cuda", "mps", "xpu")  # devices that wait for launches rather than for arithmetic


def is_accelerator(device: torch.device) -> bool:
    """Whether `parallel` is chosen by itself on a device."""
    return device.type in ACCELERATORS


def takes_parallel(
    asked: str | None, inputs: tuple[Tensor, Tensor, Tensor], find_problem: Callable[[], str | None]
) -> bool:
    """Whether a call goes by `parallel`: asked for by name, or on an accelerator where it can.

    Never while `torch.export` traces: plain operations stand for all algorithms then, see `decomposed`. Nor where there
    is nothing to compute: the loop over no chunks does that.

    Args:
        asked: the algorithm of the call, or None.
        inputs: queries, keys and values.
        find_problem: returns what it does not cover, or None; called only where the answer counts.

    Raises:
        ValueError: asked for by name where it cannot.
    """
    if torch.compiler.is_exporting() or asked == "chunked" or (asked is None and not is_accelerator(inputs[0].device)):
        return False
    problem = find_problem()
    if asked == "parallel" and problem is not None:
        raise ValueError(f"algorithm='parallel' is not there for {problem}; leave it out, or take 'chunked'.")
    return problem is None and all(x.numel() > 0 for x in inputs)
