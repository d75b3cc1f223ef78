"""The choice of the algorithm that attends with a relative bias: by size and safety, or by name."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kernelformer.attention.relative.call import Layout, RelativeCall, constant_beyond
from kernelformer.attention.relative.direct import relative_attention
from kernelformer.attention.relative.fft import fft_attention, is_safe

ALGORITHMS = ("direct", "fft", "windowed")
# Time of a transformed number over that of a multiplication in a tile, measured; see `faster_by_fft`.
TRANSFORM = 250.0


def faster_by_fft(features: int, width: int, layout: Layout, is_causal: bool) -> bool:
    """Whether transforms would take less time than tiles: M (E + 1) n against L S (M + E), each with its constant."""
    n = layout.L + layout.S
    tiles = layout.L * layout.S * (features + width) * (0.5 if is_causal else 1.0)
    return TRANSFORM * features * (width + 1) * n * (4 if layout.rows else 1) < tiles


def find_window(bias: Tensor, layout: Layout, is_causal: bool = False) -> int | None:
    """The distance beyond which a bias that nobody trains is constant, where that saves work."""
    if layout.rows or bias.requires_grad or torch.compiler.is_compiling() or bias.is_meta:
        return None
    reach = constant_beyond(bias, layout.L - 1 + layout.offset, is_causal)
    return reach if 2 * reach < max(layout.L, layout.S) else None


def biased_attention(call: RelativeCall, *, features: int, algorithm: str | None = None) -> Tensor:
    """Attend with a relative bias by the algorithm of that name, or by the best one.

    Args:
        call: the inputs; with sums of keys for `windowed` only.
        features: M.
        algorithm: ``direct``, ``fft``, ``windowed``, or None: `windowed` where the bias is known to be a straight line
            beyond a distance, or a constant by its values; else `fft` where it is faster and its rounding does not
            show; else `direct`.

    Returns:
        (B, H, L, E).
    """
    layout, window, chosen = call.layout, call.window, algorithm
    if (call.state or call.right_state) and (window is None or algorithm in ("direct", "fft")):
        raise ValueError(
            f"a call with sums of keys needs a window and algorithm='windowed' or None, got {window=} and {algorithm=}."
        )
    if algorithm not in ("direct", "fft") and window is None:
        window = find_window(call.bias, layout, call.is_causal)
    if algorithm is None and window is None:
        can_read = not torch.compiler.is_compiling() and not call.query.is_meta
        if can_read and faster_by_fft(features, call.value.shape[3], layout, call.is_causal):
            chosen = "fft" if is_safe(call) else "direct"
    if chosen == "fft" and layout.L and layout.S and call.query.shape[0]:
        return fft_attention(call)
    if chosen == "windowed" and window is None:
        window = max(layout.L, layout.S)
    if chosen in ("direct", "fft"):
        return relative_attention(replace(call, window=None, slope=None))[0]
    return relative_attention(replace(call, window=window))[0]
