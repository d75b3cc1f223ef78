"""Checks of the inputs of an attention core."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from kernelformer.attention import State
from kernelformer.attention.relative.call import Layout
from kernelformer.contract import compute_dtype
from kernelformer.errors import shape


@dataclass(frozen=True)
class Bias:
    """Checked relative position bias.

    That of a step is over one query and the W + 1 keys up to its own: ``layout`` is (1, W + 1) with offset W, and the
    window is W.
    """

    table: Tensor  # (H, *layout.table)
    layout: Layout
    algorithm: str | None = None
    window: int | None = None  # the distance beyond which the bias is a straight line
    slope: Tensor | None = None  # (H), the fall of that line per token


@dataclass(kw_only=True, slots=True)
class Call:
    """Checked inputs of one call of an attention core."""

    query: Tensor  # (B, H, L, D)
    key: Tensor  # (B, G, S, D)
    value: Tensor  # (B, G, S, E)
    scale: float
    is_causal: bool = False
    key_mask: Tensor | None = None  # (B, S)
    query_mask: Tensor | None = None  # (B, L), as the caller gave it; see `real_queries`
    gate: Tensor | None = None  # (B, H, S)
    bias: Bias | None = None
    state: State | None = None
    segment_ids: Tensor | None = None  # (B, L), only until a packed call is taken apart: see `packed`
    streams: bool = False  # whether the state after the keys is wanted
    past: int = 0  # keys before the first query, beside its own
    dropout: float = 0.0  # of the weights
    algorithm: str | None = None  # "chunked", "plain", or None: chosen; see `attention.plain.choice`
    fits: tuple[object, ...] = ()  # what the checks of a step have looked at, for the state after it

    @property
    def in_stream(self) -> bool:
        """True if a state comes before this call or after it."""
        return self.streams or self.state is not None

    @property
    def real_queries(self) -> Tensor | None:
        """Mask of the queries that landmarks may come from, (B, L), with its default; None means all."""
        if self.query_mask is not None:
            return self.query_mask
        return self.key_mask if self.query.shape[2] == self.key.shape[2] else None


def check_scale(scale: float) -> float:
    """Check that a scale is positive and finite, and return it as a float."""
    if not isinstance(scale, int | float) or not (0 < scale < math.inf):
        raise ValueError(f"scale must be positive and finite, got {scale}.")
    return float(scale)


def check_mask(mask: Tensor, tokens: Tensor, what: Literal["key", "query"] = "key") -> None:
    """Check that a mask is bool and (B, n), over keys or queries (B, heads, n, D)."""
    name, yes = f"{what}_mask", "attend" if what == "key" else "a real query"
    if not isinstance(mask, Tensor):
        raise ValueError(f"{name} must be a tensor, got {type(mask).__name__}; convert it with torch.as_tensor().")
    if mask.dtype != torch.bool:
        raise ValueError(
            f"{name} must be bool with True = {yes}, got {mask.dtype}; an additive mask becomes one by "
            f"`mask == 0`, a 0/1 mask by `mask.bool()`."
        )
    if tuple(mask.shape) != (tokens.shape[0], tokens.shape[2]):
        raise ValueError(
            f"{name} must be (batch, {what} length) = {(tokens.shape[0], tokens.shape[2])}, got {shape(mask)}; "
            f"causality is is_causal=True, not a mask."
        )
    if mask.device != tokens.device:
        words = "keys" if what == "key" else "queries"
        raise ValueError(f"{name} must be on the device of the {words}, got {mask.device} and {tokens.device}.")


def can_read(x: Tensor) -> bool:
    """Return True if the values of a tensor can be read here, so that a ValueError can name a wrong one."""
    return not torch.compiler.is_compiling() and not x.is_meta and x.numel() > 0


def assert_values(holds: Tensor, message: str) -> None:
    """Let the device check values in a compiled graph: a RuntimeError, without a graph break or a synchronization.

    Only the CPU and CUDA have this check.
    """
    if torch.compiler.is_compiling() and holds.device.type in ("cpu", "cuda"):
        torch._assert_async(holds, message)


def check_range(gate: Tensor) -> None:
    """Check that gates are between 0 and 1, both of which a sigmoid attains by rounding."""
    if not can_read(gate):
        inside = (gate.detach() >= 0) & (gate.detach() <= 1)
        assert_values(inside.all(), "gate must be in (0, 1); pass torch.sigmoid of the logits.")
        return
    least, most = (float(x) for x in gate.detach().aminmax())
    if least < 0 or most > 1:
        raise ValueError(
            f"gate must be in (0, 1), got values from {least:g} to {most:g}; pass torch.sigmoid of the logits."
        )


def config_mismatch(theirs: dict[str, object], ours: dict[str, object]) -> str | None:
    """Describe how the core that made a state differs from this one, or return None."""
    if theirs.get("method") != ours["method"]:
        return f"the state was made by method {theirs.get('method')!r}, this core is {ours['method']!r}"
    other = [(n, theirs.get(n), ours.get(n)) for n in {**theirs, **ours} if theirs.get(n) != ours.get(n)]
    if not other:
        return None
    return "the state was made with another " + ", ".join(f"{n} ({a}, here {b})" for n, a, b in other)


def tensor_mismatch(kept: Tensor, needed: tuple[int, ...], query: Tensor) -> str | None:
    """Describe how a tensor of a state differs from what inputs of this dtype and device need, or return None."""
    if kept.shape != needed:
        return f"the state has shape {shape(kept)}, these inputs need {needed}"
    dtype, device = compute_dtype(query.dtype), query.device
    if kept.dtype != dtype or kept.device != device:
        return f"the state is {kept.dtype} on {kept.device}, these inputs need {dtype} on {device}"
    return None


def no_weights(method: str, asked: str, *, window: bool = True) -> ValueError:
    """Return the error for dropout of weights that a method does not form; ``window``: whether it can have one."""
    way = ", or give a window, whose weights are formed" if window else ""
    return ValueError(
        f"{asked} drops attention weights, which method {method!r} never forms; leave it at 0, or use an exact method "
        f"('softmax', 'gaussian', 'local'){way}. Dropout of the output is KernelAttention's dropout=."
    )


def check_near(
    method: str,
    near: dict[str, Any],
    *,
    normalize: bool,
    aligns: bool,
    near_scale: float | None,
    dropout: float,
    beta: str = "learned",
) -> None:
    """Check that near tokens fit a feature map, or that nothing is set for them if there are none."""
    if not near:
        if dropout:
            raise no_weights(method, f"attention_dropout={dropout!r}")
        for name, x, plain in (("beta", beta, "learned"), ("near_scale", near_scale, None)):
            if x != plain:
                raise ValueError(
                    f"{name}={x!r} is of near tokens that are attended to exactly, and {method!r} got neither window= "
                    f"nor sinks=; give one of them, or leave {name} out."
                )
        return
    asked = ", ".join(f"{name}={x}" for name, x in near.items())
    if not normalize:
        raise ValueError(
            f"{method!r} without normalization cannot share one with near keys, got {asked}; use a normalized method "
            f"such as 'favor+', or for skyformer kernel='softmax'."
        )
    if aligns:
        raise ValueError(
            f"align=True moves the keys of {method!r} by what cancels under its own normalization only, got {asked}; "
            f"leave one of them out."
        )
