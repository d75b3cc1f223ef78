"""Attention by any method as a function, in the place of torch's `scaled_dot_product_attention`."""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from kernelformer.contract import compute_dtype
from kernelformer.errors import shape
from kernelformer.modules.checks import check_floats
from kernelformer.modules.core import AttentionCore
from kernelformer.modules.spec import build_attention, has_near, method_options

CACHE = 32  # cores that are kept, the last ones used
# Arguments of torch's function that have another name here, or none.
_TORCH_NAMES = {
    "attn_mask": "key_mask=, (batch, keys) with True = attend, hides keys, and is_causal=True the future; others need "
    "torch's own function",
    "dropout_p": "attention_dropout= is its name here, for exact methods and windows",
    "enable_gqa": "leave it out: keys of fewer heads than the queries are shared among them in any case",
}


def kernel_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    method: str = "favor+",
    *,
    is_causal: bool = False,
    key_mask: Tensor | None = None,
    bias: Tensor | None = None,
    scale: float | None = None,
    algorithm: str | None = None,
    max_distance: int | None = None,
    slope: Tensor | None = None,
    num_prefix: int = 0,
    query_mask: Tensor | None = None,
    segment_ids: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Attend by a method, without building anything first.

        out = kf.kernel_attention(q, k, v, method="favor+", is_causal=True, num_features=256)

    A core is built by the first call and kept for calls with the same method, options, heads, device and dtype; the
    last 32 are. The draw is a function of ``seed``, an option, so that it never depends on who called before.

    Nothing can be learned here: a method with parameters is refused, since they would stay at their random first
    values. `build_attention` makes a module that a model can hold, train and save; also `redraw` and streams are there.
    With a window or sinks ``beta`` is therefore 0. With ``attention_dropout`` exact methods and windows drop weights in
    every call, as torch's function does with ``dropout_p``.
    Compiled code calls it as a function of its own, outside the graph.

    Args:
        query: (B, H, L, D).
        key: (B, G, S, D), G divides H.
        value: (B, G, S, E).
        method: a name from `list_methods`.
        is_causal: key j is visible to query i iff j <= i.
        key_mask: (B, S) bool, True = attend.
        bias: relative position bias; it and the others are those of `AttentionCore.forward`.
        scale: of the product q . k; default 1 / sqrt(D), or the method's own.
        algorithm: ``chunked`` or ``parallel``, with a bias also others.
        max_distance: with a bias.
        slope: with a bias.
        num_prefix: with a bias.
        query_mask: (B, L) bool, which queries are real.
        segment_ids: (B, L) integers, of packed sequences.
        options: of the method, see `build_attention`.

    Returns:
        (B, H, L, E).
    """
    for name in _TORCH_NAMES:
        if name in options:
            raise ValueError(f"{name} is an argument of torch's scaled_dot_product_attention; {_TORCH_NAMES[name]}.")
    check_floats(query, key, value)
    if query.dim() != 4:
        raise ValueError(f"query must be (batch, heads, length, head_dim), got shape {shape(query)}.")
    # A compiled graph would build a core of its own instead of looking for one. Torch's compiler is slow to import.
    find = torch.compiler.disable(_core) if torch.compiler.is_compiling() else _core
    core: AttentionCore = find(method, query, options)
    out: Tensor = core(
        query,
        key,
        value,
        is_causal=is_causal,
        key_mask=key_mask,
        bias=bias,
        scale=scale,
        algorithm=algorithm,
        max_distance=max_distance,
        slope=slope,
        num_prefix=num_prefix,
        query_mask=query_mask,
        segment_ids=segment_ids,
    )
    return out


def _core(method: str, query: Tensor, options: dict[str, Any]) -> AttentionCore:
    for name, x in {"method": method, **options}.items():
        if not isinstance(x, Hashable):
            raise ValueError(f"{name} must be a plain value, by which a core can be found again, got {x!r}.")
    # By sorted names: the same settings are the same core in whatever order they are given.
    settings = {name: options[name] for name in sorted(options)}
    if has_near(options) and "beta" in method_options(method):
        settings.setdefault("beta", "zero")  # where a learned one starts
    dtype = compute_dtype(query.dtype)
    return _cached(method, query.shape[3], query.shape[1], query.device, dtype, **settings)


@functools.lru_cache(maxsize=CACHE, typed=True)  # safe among threads
def _cached(
    method: str, head_dim: int, num_heads: int, device: torch.device, dtype: torch.dtype, **options: Any
) -> AttentionCore:
    with torch.inference_mode(False):  # a later call may need gradients
        core = build_attention(method, head_dim=head_dim, num_heads=num_heads, **options).to(device, dtype)
    learned = sum(x.numel() for x in core.parameters())
    if learned:
        raise ValueError(
            f"{method!r} learns {learned:,} parameters, which a function has nowhere to keep: they would stay at their "
            f"random first values. Build a module with kf.build_attention({method!r}, head_dim={head_dim}, "
            f"num_heads={num_heads}), and train it."
        )
    return core
