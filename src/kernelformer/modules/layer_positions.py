"""The positions that a layer is asked for: relative ones and rotary ones, from its options."""

from __future__ import annotations

from typing import Any

from kernelformer.errors import choice, flag
from kernelformer.modules.core import AttentionCore
from kernelformer.modules.options import POSITION_OPTIONS, ROTARY_OPTIONS, method_options, near_settings
from kernelformer.modules.positions import RelativePositions
from kernelformer.modules.rotary import RotaryPositions


def check_near_positions(positions: RelativePositions, core: AttentionCore) -> None:
    """Raise where far tokens would have more than one bias: a window takes what is constant or a line beyond it."""
    if not core.has_near or positions.scheme == "alibi":
        return
    window, reach = getattr(core, "window", None) or 0, positions.max_distance
    if positions.grid is None and reach is not None and reach <= window:
        return
    given = f"grid={positions.grid}" if positions.grid is not None else f"max_distance={reach}"
    raise ValueError(
        f"{core.method!r} with {near_settings(core)} needs relative positions that are constant beyond its window, got "
        f"{given}; give relative='1d' with max_distance={window} or less, or scheme='alibi', or leave the window out."
    )


def layer_positions(
    relative: str | RelativePositions | None, num_heads: int, causal: bool, options: dict[str, Any], method: str
) -> RelativePositions | None:
    """The positions that a layer was asked for; takes their options away from the core's."""
    if isinstance(relative, RelativePositions):
        if relative.num_heads != num_heads:
            raise ValueError(f"these positions have {relative.num_heads} heads, and the layer {num_heads}.")
        if relative.causal and not causal:
            raise ValueError("these positions were built with causal=True, and the layer with causal=False.")
        return relative
    if relative is None:
        stray = [x for x in options if x in POSITION_OPTIONS and x not in method_options(method)]
        if stray:
            raise ValueError(
                f"{stray[0]}={options[stray[0]]!r} is of relative positions, got relative=None; give relative='1d' or "
                f"'2d', or leave it out."
            )
        return None
    names = {"1d": ("scheme", "max_length", "max_distance", "num_buckets"), "2d": ("grid", "num_prefix")}
    mine = {x: options.pop(x) for x in names[choice("relative", relative, names)] if x in options}
    if relative == "2d" and "grid" not in mine:
        raise ValueError("relative='2d' needs grid=(rows, columns).")
    return RelativePositions(num_heads, causal=causal and relative == "1d", **mine)


def layer_rotary(rotary: bool, head_dim: int, options: dict[str, Any]) -> RotaryPositions | None:
    """The rotary positions that a layer was asked for; takes their options away from the core's."""
    mine = {x: options.pop(x) for x in ROTARY_OPTIONS if x in options}
    if flag("rotary", rotary):
        return RotaryPositions(head_dim, **mine)
    for name, value in mine.items():
        raise ValueError(
            f"{name}={value!r} is of rotary positions, got rotary=False; give rotary=True, or leave it out."
        )
    return None
