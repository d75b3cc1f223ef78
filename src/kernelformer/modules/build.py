"""Methods by name."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kernelformer.errors import unknown
from kernelformer.feature_maps import (
    FastFoodMap,
    FeatureMap,
    GeneralizedMap,
    GenerativeMap,
    LogLinearMap,
    MixtureMap,
    NystromMap,
    PositiveMap,
    ScaledFourierMap,
    TrigonometricMap,
)
from kernelformer.limits import check_limit
from kernelformer.modules.baselines import LinformerCore, NystromformerCore
from kernelformer.modules.core import AttentionCore
from kernelformer.modules.exact import GaussianCore, SoftmaxCore
from kernelformer.modules.gated import GatedCore
from kernelformer.modules.kernel import KernelCore


@dataclass(frozen=True)
class Method:
    """One row of the table of methods."""

    about: str
    make: Callable[..., AttentionCore | FeatureMap]
    fixed: Mapping[str, Any] = field(default_factory=dict)  # settings that make it this method
    default: Mapping[str, Any] = field(default_factory=dict)  # settings that the caller may change


_RKS = {"features": "rks"}
_PRF = {"features": "prf", "smoothing": 0.0}  # positive features need no smoothing

METHODS: dict[str, Method] = {
    "softmax": Method("exact softmax attention (torch's SDPA), quadratic", SoftmaxCore),
    "gaussian": Method("exact Gaussian kernelized attention in tiles (Skyformer), quadratic", GaussianCore),
    "favor+": Method(
        "positive orthogonal random features (Performer)", PositiveMap, {"hyperbolic": False, "regularized": False}
    ),
    "favor+hyperbolic": Method(
        "positive features in pairs exp(wx), exp(-wx) (Performer)",
        PositiveMap,
        {"hyperbolic": True, "regularized": False},
    ),
    "favor+regularized": Method(
        "positive features with frequencies on a sphere (Performer)",
        PositiveMap,
        {"hyperbolic": False, "regularized": True},
    ),
    "nprf": Method(
        "positive features of unit vectors, for relative positions (kernelized attention with RPE)",
        PositiveMap,
        {"hyperbolic": False, "regularized": False, "normalize_qk": True},
    ),
    "trigonometric": Method("cosine and sine random features, signed (Performer)", TrigonometricMap),
    "relu": Method("generalized attention, relu by default (Performer)", GeneralizedMap),
    "elu": Method(
        "elu(x) + 1 (Linear Transformer)", GeneralizedMap, {"activation": "elu", "projection": False}, {"scale": 1.0}
    ),
    "gmm-rks": Method("learned Gaussian mixture, Fourier features, signed (KL-Transformer)", MixtureMap, _RKS),
    "gmm-prf": Method(
        "learned Gaussian mixture, positive features (KL-Transformer)", MixtureMap, _PRF, {"covariance": "diagonal"}
    ),
    "fastfood-rks": Method("learned FastFood, Fourier features, signed (KL-Transformer)", FastFoodMap, _RKS),
    "fastfood-prf": Method("learned FastFood, positive features (KL-Transformer)", FastFoodMap, _PRF),
    "generative-rks": Method(
        "frequencies by a network, Fourier features, signed (KL-Transformer)", GenerativeMap, _RKS
    ),
    "generative-prf": Method("frequencies by a network, positive features (KL-Transformer)", GenerativeMap, _PRF),
    "skyformer": Method("Nystrom features of the Gaussian kernel at landmarks (Skyformer)", NystromMap),
    "nystromformer": Method("softmax attention through segment means (Nystromformer)", NystromformerCore),
    "linformer": Method("softmax attention to learned mixtures of keys (Linformer)", LinformerCore),
    "rfa": Method("Fourier features of unit vectors, learned scale (RFA)", ScaledFourierMap, {"normalize_qk": True}),
    "rfa-gate": Method(
        "the same with a gate that forgets, causal (RFA)", ScaledFourierMap, {"normalize_qk": True, "normalize": True}
    ),
    "loglinear": Method("free positive map, for fitting a pretrained model", LogLinearMap),
}
_CORE_OPTIONS = ("scale", "normalize_qk")
_DRAWING = ("num_features", "seed", "draw", "norms", "per_head", "num_key_heads")
_UNUSED = {"elu": ("eps", *_DRAWING), "rfa-gate": ("num_key_heads",)}  # gates are each query head's own
POSITION_OPTIONS = ("relative", "scheme", "max_length", "max_distance", "num_buckets", "grid", "num_prefix")


def list_methods() -> dict[str, str]:
    """Every method's name, with a line about it."""
    return {name: method.about for name, method in METHODS.items()}


def method_options(method: str) -> list[str]:
    """The options that `build_attention` takes for a method, besides head_dim and num_heads."""
    entry = _entry(method)
    names = [
        x for x in inspect.signature(entry.make).parameters if x not in ("method", "options", "head_dim", "num_heads")
    ]
    if issubclass(entry.make, FeatureMap):  # type: ignore[arg-type]
        names.append("normalize")
    if method == "rfa-gate":
        names.append("own_gate")
    names += [x for x in _CORE_OPTIONS if x not in names]
    return sorted(x for x in names if x not in entry.fixed and x not in _UNUSED.get(method, ()))


def maps_by_head(method: str, options: Mapping[str, Any]) -> bool:
    """Whether a method with these options has a map for each head, so that ``num_key_heads`` says how many."""
    if "num_key_heads" not in method_options(method):
        return False
    make = _entry(method).make
    if make is NystromMap:
        return options.get("landmarks") == "learned"
    default = inspect.signature(make).parameters["per_head"].default
    return bool(options.get("per_head", default)) and options.get("projection") is not False


def _entry(method: str) -> Method:
    if not isinstance(method, str) or method not in METHODS:
        raise unknown("method", method, METHODS)
    return METHODS[method]


def parse_method(name: str) -> tuple[str, dict[str, Any]]:
    """``method:option=value:...``, as commands take it: the method and its options, both known ones.

    Values are Python literals, or else strings.
    """
    method, options = _split(name)
    _check_options(method, options)
    return method, options


def parse_attention(spec: str) -> tuple[str, dict[str, Any]]:
    """The same for a whole layer: beside the method's options those of relative positions, if ``relative`` is one."""
    method, options = _split(spec)
    own = POSITION_OPTIONS if "relative" in options else ()
    _check_options(method, {name: x for name, x in options.items() if name not in own}, ("relative",))
    return method, options


def _split(name: str) -> tuple[str, dict[str, Any]]:
    if not isinstance(name, str):
        raise ValueError(f"an attention is a string such as 'favor+:num_features=128', got {name!r:.60}.")
    check_limit("max_attention_characters", len(name), f"the attention {name[:40]!r}... has {len(name):,} characters")
    method, *parts = name.split(":")
    options: dict[str, Any] = {}
    for part in parts:
        key, sign, value = part.partition("=")
        if not sign:
            raise ValueError(f"options of a method are name=value, got {part!r} in {name!r}.")
        try:
            options[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            options[key] = value
    return method, options


def _check_options(method: str, options: Mapping[str, Any], more: Sequence[str] = ()) -> None:
    known = [*method_options(method), *more]
    for name in options:
        if name == "attention_dropout" and name not in known:
            raise no_weights(method, f"{name}={options[name]!r}")
        if name not in known:
            raise unknown(f"option for method {method!r},", name, known)


def no_weights(method: str, asked: str) -> ValueError:
    """The error for dropout of weights that a method does not have."""
    exact = ", ".join(repr(x) for x in METHODS if "attention_dropout" in method_options(x))
    return ValueError(
        f"{asked} drops attention weights, which method {method!r} never forms; leave it at 0, or use an exact method "
        f"({exact}). Dropout of the output is KernelAttention's dropout=."
    )


def build_attention(method: str, *, head_dim: int, num_heads: int, **options: Any) -> AttentionCore:
    """Build the core of an attention layer: an `nn.Module` over queries, keys and values.

    Args:
        method: a name from `list_methods`.
        head_dim: D.
        num_heads: H, of the queries.
        options: by method; `method_options` lists them, and the map's class explains them. For random maps:
            ``num_features`` (256), ``seed`` (0), ``draw`` ("orthogonal", "iid", "spherical", "hadamard", "givens"; not
            for fastfood), ``norms``, ``per_head`` (True for gmm, fastfood and loglinear, else False), ``num_key_heads``
            (maps by key head, so that grouped queries have the state of their key heads), ``kernel``
            ("softmax", "gaussian"; performer's maps). For learned kernels: ``components``, ``tied``, ``covariance``,
            ``mean_std`` (gmm), ``learn``, ``sigma``, ``transform`` (fastfood), ``width``, ``depth`` (generative),
            ``smoothing`` (rks). For exact methods: ``attention_dropout``. For all: ``scale`` and ``normalize_qk``.

    Raises:
        ValueError: unknown method or option, with the known ones.
    """
    entry = _entry(method)
    _check_options(method, options)
    if options.get("projection") is False:
        for name in _DRAWING:
            if name in options:
                raise ValueError(
                    f"{method!r} with projection=False draws nothing, got {name}={options[name]!r}; leave it out."
                )
    settings: dict[str, Any] = {"head_dim": head_dim, "num_heads": num_heads, **entry.default, **options, **entry.fixed}
    if not issubclass(entry.make, FeatureMap):  # type: ignore[arg-type]
        core = entry.make(method, **settings)
        assert isinstance(core, AttentionCore)
        return core
    outer = {x: settings.pop(x) for x in (*_CORE_OPTIONS, "normalize", "own_gate") if x in settings}
    feature_map = entry.make(**settings)
    assert isinstance(feature_map, FeatureMap)
    if method == "rfa-gate":
        outer.pop("normalize")
        assert isinstance(feature_map, ScaledFourierMap)
        return GatedCore(method, feature_map, **outer)
    return KernelCore(method, feature_map, **outer)


def build_core(
    method: str, *, num_heads: int, head_dim: int, scale: float | None = None, layer: int = 0, **options: Any
) -> AttentionCore:
    """The core for an attention of a model: its scale, and draws of its own in each layer.

    Args:
        method: a name from `list_methods`.
        num_heads: H.
        head_dim: D.
        scale: the model's; None: 1 / sqrt(D). Methods that have one of their own (unit vectors, elu) keep it.
        layer: numbers the attentions of a model; added to the seed.
        options: of the method.
    """
    known = method_options(method)
    own_scale = method in ("elu", "nprf", "rfa", "rfa-gate") or bool(options.get("normalize_qk"))
    settings = dict(options)
    if not own_scale:
        settings.setdefault("scale", scale)
    if "seed" in known and options.get("projection", True):
        settings["seed"] = int(settings.get("seed", 0)) + layer
    if "own_gate" in known:
        settings.setdefault("own_gate", True)
    return build_attention(method, head_dim=head_dim, num_heads=num_heads, **settings)


def place(core: AttentionCore, like: Tensor) -> AttentionCore:
    """Move a core to where its inputs are; in half precision it stays in float32, which is what its sums are in."""
    return core.to(like.device, torch.float64 if like.dtype == torch.float64 else None)
