"""Which algorithm attends with a relative bias: chosen by size and safety, or by name."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernelformer.attention.blocks import all_finite
from kernelformer.attention.relative.bias_view import Layout, constant_beyond
from kernelformer.attention.relative.direct import relative_attention
from kernelformer.attention.relative.fft import fft_attention, is_safe
from kernelformer.contract import compute_dtype

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


def biased_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor,
    *,
    features: int,
    layout: Layout,
    algorithm: str | None = None,
    window: int | None = None,
    slope: Tensor | None = None,
    unit: bool = False,
    **common: Any,
) -> Tensor:
    """Attend with a relative bias by the algorithm of that name, or by the best one; else as `relative_attention`.

    Args:
        features: M.
        layout: of the tokens.
        algorithm: ``direct``, ``fft``, ``windowed``, or None: `windowed` where the bias is known to be a straight line
            beyond a distance, or a constant by its values; else `fft` where it is faster and its rounding does not
            show; else `direct`. A transform would spread NaN and infinities to all rows: `direct` takes its place.
        window: the distance beyond which the bias is a straight line, if known.
        slope: (H), of that line.
        unit: divide queries and keys by their L2 norm first.
        common: spec, tensors, scale, key_mask, is_causal.
    """
    chosen = algorithm
    if algorithm != "direct" and algorithm != "fft" and window is None:
        window = find_window(bias, layout, common.get("is_causal", False))
    if algorithm is None and window is None:
        is_causal = common.get("is_causal", False)
        looks = not torch.compiler.is_compiling() and not query.is_meta
        if looks and faster_by_fft(features, value.shape[3], layout, is_causal):
            near = _units(query, key, unit, common.get("key_mask"))
            chosen = "fft" if is_safe(*near, bias, layout=layout, **common) else "direct"
    some = layout.L and layout.S and query.shape[0]
    if chosen == "fft" and some and _is_finite(query, key, value, common.get("key_mask")):
        near = _units(query, key, unit, common.get("key_mask"))
        return fft_attention(*near, value, bias, layout=layout, **common)
    if chosen == "windowed" and window is None:
        window = max(layout.L, layout.S)
    if chosen in ("direct", "fft"):
        window = slope = None
    common |= {"window": window, "slope": slope, "layout": layout, "unit": unit}
    return relative_attention(query, key, value, bias, **common)[0]


def _is_finite(query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None) -> bool:
    """Whether a transform may be taken; a compiled graph cannot look."""
    if torch.compiler.is_compiling() or query.is_meta or all_finite(query, key, value):
        return True
    if key_mask is None:
        return False
    hidden = ~key_mask[:, None, :, None]
    return all_finite(query, key.masked_fill(hidden, 0), value.masked_fill(hidden, 0))


def _units(query: Tensor, key: Tensor, unit: bool, key_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    if not unit:
        return query, key
    if key_mask is not None:  # the gradient of a norm must not see what the mask hides
        key = key.masked_fill(~key_mask[:, None, :, None], 0)
    dtype = compute_dtype(query.dtype)
    return F.normalize(query.to(dtype), dim=-1), F.normalize(key.to(dtype), dim=-1)
