"""Checks of the inputs of an attention core."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
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


_LAYOUT = "(batch, heads, length, head_dim)"


def check_scale(scale: float) -> float:
    """Check that a scale is positive and finite, and return it as a float."""
    if not isinstance(scale, int | float) or not (0 < scale < math.inf):
        raise ValueError(f"scale must be positive and finite, got {scale}.")
    return float(scale)


def check_floats(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Check that queries, keys and values are floating point tensors."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, Tensor):
            raise ValueError(f"{name} must be a tensor, got {type(x).__name__}; convert it with torch.as_tensor().")
        if not x.is_floating_point():
            raise ValueError(f"{name} must be a floating point tensor, got {x.dtype}; convert it with .float().")


def check_inputs(call: Call, *, head_dim: int, num_heads: int) -> Call:
    """Check that types, shapes, dtypes and devices fit each other and the core; under autocast convert to its dtype."""
    check_floats(call.query, call.key, call.value)
    kind = call.query.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        query, key, value = (x if x.dtype == torch.float64 else x.to(dtype) for x in (call.query, call.key, call.value))
        call = replace(call, query=query, key=key, value=value)
    query, key, value = call.query, call.key, call.value
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dim() != 4:
            raise ValueError(f"{name} must be {_LAYOUT}, got shape {shape(x)}.")
    if not (query.dtype == key.dtype == value.dtype):
        raise ValueError(
            f"query, key and value must have one dtype, got {query.dtype}, {key.dtype} and {value.dtype}; "
            f"convert with .to()."
        )
    if not (query.device == key.device == value.device):
        raise ValueError(
            f"query, key and value must be on one device, got {query.device}, {key.device} and {value.device}."
        )
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(
            f"query and key must have the same head dimension, got {query.shape[-1]} and {key.shape[-1]} "
            f"(shapes {shape(query)} and {shape(key)})."
        )
    for name, built, got in (("head_dim", head_dim, query.shape[-1]), ("num_heads", num_heads, query.shape[1])):
        if built != got:
            raise ValueError(
                f"this core was built with {name}={built}, got queries of shape {shape(query)}; "
                f"build it with {name}={got}."
            )
    if key.shape[:3] != value.shape[:3]:
        raise ValueError(
            f"key and value must have the same batch, heads and length, got shapes {shape(key)} and {shape(value)}."
        )
    if query.shape[0] != key.shape[0]:
        raise ValueError(
            f"query and key must have the same batch size, got {query.shape[0]} and {key.shape[0]} "
            f"(shapes {shape(query)} and {shape(key)})."
        )
    if key.shape[1] == 0 or query.shape[1] % key.shape[1]:
        raise ValueError(
            f"the number of key heads must divide that of query heads, got {key.shape[1]} and {query.shape[1]} "
            f"(shapes {shape(key)} and {shape(query)})."
        )
    return call


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


def check_gate(gate: Tensor, key: Tensor, heads: int, refuses: str | None = None) -> None:
    """Check that a gate is a floating point tensor (B, H, S), for keys (B, G, S, D) and H query heads.

    ``refuses`` is the method, if it takes none.
    """
    if refuses is not None:
        given = f"one of shape {shape(gate)}" if isinstance(gate, Tensor) else repr(gate)
        raise ValueError(f"{refuses!r} takes no gate, got {given}; use 'rfa-gate'.")
    if not isinstance(gate, Tensor):
        raise ValueError(f"gate must be a tensor, got {type(gate).__name__}; convert it with torch.as_tensor().")
    if not gate.is_floating_point():
        raise ValueError(f"gate must be a floating point tensor in (0, 1), got {gate.dtype}; convert it with .float().")
    size = (key.shape[0], heads, key.shape[2])
    if gate.shape != size:
        raise ValueError(
            f"gate must be (batch, heads, length) = {size}, got {shape(gate)}; one gate per query head and token."
        )
    if gate.device != key.device:
        raise ValueError(f"gate must be on the device of the keys, got {gate.device} and {key.device}.")


def can_read(x: Tensor) -> bool:
    """Return True if the values of a tensor can be read here, so that a ValueError can name a wrong one."""
    return not torch.compiler.is_compiling() and not x.is_meta and x.numel() > 0


def readable_without_sync(x: Tensor) -> bool:
    """Return True if reading a number needs no synchronization with a device and no compiled graph is traced."""
    return not torch.compiler.is_compiling() and x.device.type == "cpu"


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


def check_step(query: Tensor, key: Tensor) -> None:
    """Check that a step has one query and one key."""
    if query.shape[2] != 1 or key.shape[2] != 1:
        raise ValueError(
            f"step takes one token, got {query.shape[2]} queries and {key.shape[2]} keys (shapes {shape(query)} and "
            f"{shape(key)}); for more, call the core with is_causal=True, state=... and return_state=True."
        )


def check_stream(query: Tensor, key: Tensor, is_causal: bool) -> None:
    """Check that a call can be part of a stream: causal, with as many queries as keys."""
    if not is_causal:
        raise ValueError("a state needs is_causal=True, got is_causal=False: without causality nothing is past.")
    if query.shape[2] != key.shape[2]:
        raise ValueError(
            f"with a state queries and keys are the same tokens, got {query.shape[2]} queries and {key.shape[2]} keys."
        )


def check_memory(memory: State, method: str, maker: dict[str, object]) -> None:
    """Check that a memory comes from `remember` of a core with these settings."""
    made = dict(memory.made_by) if isinstance(memory, State) else {}
    if "remembers" not in made:
        given = f"a state of {made['method']!r}" if made else type(memory).__name__
        raise ValueError(f"recall needs what remember of this {method!r} core returned, got {given}.")
    del made["remembers"]
    problem = config_mismatch(made, maker)
    if problem:
        raise ValueError(f"{problem}; remember the context again.")


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
    """Check that near tokens, by their settings, fit a feature map, or that nothing is set for them if there are none.

    Args:
        method: for messages.
        near: ``window`` and ``sinks``; empty where no token is attended to exactly.
        normalize: whether the core divides by the sum of the weights.
        aligns: whether the map moves the keys.
        near_scale: of the near scores, or None.
        dropout: of the near weights.
        beta: as `KernelCore` takes it.
    """
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


def cannot_stream(method: str, what: str) -> ValueError:
    """Return the error for a stream of a method whose state would grow, where ``what`` asks for one."""
    return ValueError(
        f"{method!r} cannot stream, but {what} was asked for: its state would grow with the context. Use a method with "
        f"a feature map, such as 'favor+', or keep keys and values and call the core with all of them."
    )
