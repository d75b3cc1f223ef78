"""Attention cores by the names of their methods."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kernelformer.modules.core import AttentionCore
from kernelformer.modules.methods import find_method
from kernelformer.modules.options import has_near, method_options, resolve_options


@torch.inference_mode(False)  # its parameters may be trained later
def build_attention(method: str, *, head_dim: int, num_heads: int, **options: Any) -> AttentionCore:
    """Build the core of an attention layer: an `nn.Module` over queries, keys and values.

    Args:
        method: a name from `list_methods`.
        head_dim: D.
        num_heads: H, of the queries.
        options: by method; `method_options` lists them, and the map's class explains them. For all: ``num_features``,
            the size, whatever the method calls it (``num_landmarks``, ``rank``; exact methods and elu have none, and
            take any), ``seed`` (also where nothing is drawn), ``scale`` and ``normalize_qk``. For random maps:
            ``num_features`` (256), ``seed`` (0), ``draw`` ("orthogonal", "iid", "simplex", "spherical", "hadamard",
            "givens"; not for fastfood), ``norms``, ``per_head`` (True for gmm, fastfood, rfa, loglinear and hedgehog,
            else False), ``num_key_heads`` (maps by key head, so that grouped queries have the state of those),
            ``kernel`` ("softmax", "gaussian"; Performer's maps). For learned kernels: ``components``, ``tied``,
            ``covariance``, ``start``, ``mean_std`` (gmm), ``learn``, ``sigma``, ``transform`` (fastfood), ``width``,
            ``depth`` (generative), ``smoothing`` (rks). For exact methods: ``attention_dropout``. For normalized linear
            methods: ``window``, ``sinks`` and ``beta``, by which near tokens and the first ones are attended to exactly
            (`KernelCore`).

    Raises:
        ValueError: unknown method or option, with the known ones, or two names for one size.
    """
    entry = find_method(method)
    own = resolve_options(method, options)
    settings: dict[str, Any] = {"head_dim": head_dim, "num_heads": num_heads, **entry.default, **own, **entry.fixed}
    if _near_scale_differs(method, settings):
        settings.setdefault("near_scale", head_dim**-0.5)
    make: Any = entry.make
    if not entry.has_map:
        core: AttentionCore = make(method, **settings)
        return core
    map_names = inspect.signature(make).parameters
    feature_map = make(**{name: settings.pop(name) for name in map_names if name in settings})
    return entry.core(method, feature_map, **settings)


def build_core(
    method: str, *, num_heads: int, head_dim: int, scale: float | None = None, layer: int = 0, **options: Any
) -> AttentionCore:
    """Build the core for an attention of a model: with the model's scale, and a draw of its own in each layer.

    Args:
        method: a name from `list_methods`.
        num_heads: H.
        head_dim: D.
        scale: the model's; None: 1 / sqrt(D). Methods that have one of their own (unit vectors, elu) keep it; near
            tokens that elu attends to exactly have the model's.
        layer: numbers the attentions of a model; added to the seed.
        options: of the method.
    """
    known = method_options(method)
    settings = resolve_options(method, options)
    if not find_method(method).own_scale and not settings.get("normalize_qk"):
        settings.setdefault("scale", scale)
    elif scale is not None and _near_scale_differs(method, settings):
        settings.setdefault("near_scale", scale)
    if "seed" in known and settings.get("projection", True):
        settings["seed"] = int(settings.get("seed", 0)) + layer
    if "own_gate" in known:
        settings.setdefault("own_gate", True)
    return build_attention(method, head_dim=head_dim, num_heads=num_heads, **settings)


def _near_scale_differs(method: str, settings: Mapping[str, Any]) -> bool:
    """Whether near tokens have softmax's scale, the map having one of its own; unit vectors have one for both."""
    own = "scale" in find_method(method).default
    return own and has_near(settings) and not settings.get("normalize_qk")


def move_to_inputs(core: AttentionCore, like: Tensor) -> AttentionCore:
    """Move a core to the device of its inputs; in half precision it stays in float32, which is what its sums are in."""
    return core.to(like.device, torch.float64 if like.dtype == torch.float64 else None)
