"""Options of the methods, attention strings, and the construction of cores from both."""

from __future__ import annotations

import ast
import functools
import inspect
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kernelformer.contract import compute_dtype
from kernelformer.errors import integer, positive_int, shape, unknown
from kernelformer.files import check_limit
from kernelformer.lazy import LAYERS
from kernelformer.modules.checks import check_near, no_weights
from kernelformer.modules.core import AttentionCore, check_floats
from kernelformer.modules.methods import DRAWN, METHODS, SIZE, find_method
from kernelformer.modules.positions import RelativePositions, RotaryPositions

_CORE_OPTIONS = ("scale", "normalize_qk")
_NOT_OPTIONS = ("method", "feature_map", "options", "head_dim", "num_heads", "settings")
NEAR_OPTIONS = ("window", "sinks", "beta", "near_scale")  # of the part that attends to near tokens exactly
POSITION_OPTIONS = ("relative", "scheme", "max_length", "max_distance", "num_buckets", "grid", "num_prefix")
ROTARY_OPTIONS = ("rotary", "rotary_base", "rotary_dim", "rotary_scaling")
_ARGUMENT = re.compile(r"^    (\w+(?:, \w+)*): (.*(?:\n        .*)*)", re.MULTILINE)  # of a docstring


def method_options(method: str) -> list[str]:
    """List the options of a method by its own names, besides head_dim and num_heads.

    ``num_features`` and ``seed`` may be given to every method: see `resolve_options`.
    """
    entry = find_method(method)
    kinds = [entry.make, entry.core] if entry.has_map else [entry.make]
    names = {*_CORE_OPTIONS, *(x for kind in kinds for x in inspect.signature(kind).parameters)}
    return sorted(names.difference(_NOT_OPTIONS, entry.fixed, entry.unused))


def resolve_options(method: str, options: Mapping[str, Any], more: Sequence[str] = ()) -> dict[str, Any]:
    """Check the options of a method, and rename each to the method's own name for it.

    ``num_features`` becomes the method's own size (``num_landmarks``, ``rank``), or is left out where there is none to
    set; ``seed`` is left out where nothing is drawn. So a loop over methods gives all of them the same two.

    Args:
        more: names that are known besides the method's own.

    Raises:
        ValueError: an unknown option, two names for one size, or near tokens for a method that cannot have them.
    """
    entry, known = find_method(method), [*method_options(method), *more]
    _check_near(method, options, known)
    for name in options:
        if name not in (*known, SIZE, "seed"):
            raise unknown(f"option for method {method!r},", name, known)
    resolved = dict(options)
    draws = options.get("projection") is not False
    if not draws:
        for name in DRAWN:
            if name in options:
                raise ValueError(
                    f"{method!r} with projection=False draws nothing, got {name}={options[name]!r}; leave it out."
                )
    size = entry.size if draws else None
    if SIZE in options and size != SIZE:
        count = positive_int(SIZE, resolved.pop(SIZE))
        if size is not None and size in options:
            raise ValueError(
                f"{SIZE}={count} and {size}={options[size]!r} are two names for the size of {method!r}; give one of "
                f"them."
            )
        if size is not None:
            resolved[size] = count
    if "seed" in options and ("seed" not in known or not draws):
        integer("seed", resolved.pop("seed"))
    return resolved


def applicable_options(method: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Select from the options of several methods those that this one takes; its own name for a size wins."""
    entry, known = find_method(method), [*method_options(method), SIZE]
    size, chosen = entry.size, {name: x for name, x in options.items() if name in known}
    if entry.has_map and not (has_near(chosen) and entry.holds(entry.window, chosen)):
        chosen = {name: x for name, x in chosen.items() if name not in (*NEAR_OPTIONS, "attention_dropout")}
    if size != SIZE and size in chosen:
        chosen.pop(SIZE, None)
    return resolve_options(method, chosen)


def maps_by_head(method: str, options: Mapping[str, Any]) -> bool:
    """Return True if a method with these options has a map for each head, so that ``num_key_heads`` has a meaning."""
    entry = find_method(method)
    return "num_key_heads" in method_options(method) and entry.holds(entry.per_head, options)


def has_near(options: Mapping[str, Any]) -> bool:
    """Return True if options of a method with a feature map ask for exact attention to near tokens."""
    return options.get("window") is not None or bool(options.get("sinks"))


def cross_options(method: str, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return a method and its options for attention to another sequence, where no token is near another.

    Window and sinks are left out, with all that belongs to them; ``local``, which has nothing else, is ``softmax``.
    """
    entry = find_method(method)
    if "window" not in method_options(method):
        return method, dict(options)
    left_out = NEAR_OPTIONS if not entry.has_map else (*NEAR_OPTIONS, "attention_dropout")
    kept = {name: x for name, x in options.items() if name not in left_out}
    return (method if entry.has_map else "softmax"), kept


def near_settings(core: AttentionCore) -> str:
    """Format the window and the sinks of a core, for messages."""
    core = getattr(core, "linear", core)  # of heads of two kinds
    return ", ".join(f"{name}={getattr(core, name)}" for name in ("window", "sinks"))


def _check_near(method: str, options: Mapping[str, Any], known: Sequence[str]) -> None:
    """Check options of near tokens that are attended to exactly, and dropout of weights, before anything is built."""
    entry, asked = find_method(method), {name: options[name] for name in NEAR_OPTIONS if name in options}
    if asked and "window" not in known:
        given = ", ".join(f"{name}={x!r}" for name, x in asked.items())
        raise ValueError(
            f"{given}: {method!r} cannot attend to near tokens exactly and to the others by a kernel in one "
            f"normalization; use a normalized linear method such as 'favor+', or 'local' for near tokens alone."
        )
    dropout, normalize = options.get("attention_dropout"), options.get("normalize")
    if dropout and "attention_dropout" not in known:
        raise no_weights(method, f"attention_dropout={dropout!r}", window=False)
    if entry.has_map:
        check_near(
            method,
            {name: asked[name] for name in ("window", "sinks") if asked.get(name)},
            normalize=entry.holds(entry.normalized, options) if normalize is None else normalize,
            aligns=options.get("align") is True,
            near_scale=asked.get("near_scale"),
            dropout=dropout or 0.0,
            beta=asked.get("beta", "learned"),
        )


@dataclass(frozen=True)
class Option:
    """Option of a method."""

    name: str
    default: object
    about: str


def describe_options(method: str) -> list[Option]:
    """Describe all options of a method, in the order of `method_options`."""
    entry = find_method(method)
    return _describe(method_options(method), [entry.make, *([entry.core] if entry.has_map else [])], entry.default)


def describe_positions() -> list[Option]:
    """Describe the options of positions, which an attention of a model or a layer has besides those of its method."""
    from kernelformer.modules.layer import KernelAttention  # which itself reads the options of methods

    return _describe((*POSITION_OPTIONS, *ROTARY_OPTIONS), [RelativePositions, RotaryPositions, KernelAttention], {})


def _describe(names: Sequence[str], kinds: Sequence[type], own: Mapping[str, object]) -> list[Option]:
    """Read defaults and descriptions of arguments off constructors and docstrings; the first class has precedence."""
    values: dict[str, object] = {}
    texts: dict[str, str] = {}
    for one in (x for kind in reversed(kinds) for x in reversed(kind.__mro__)):
        if "__init__" in one.__dict__:
            parameters = inspect.signature(one.__dict__["__init__"]).parameters.items()
            values |= {name: x.default for name, x in parameters if x.default is not inspect.Parameter.empty}
        _, _, rest = inspect.cleandoc(one.__dict__.get("__doc__") or "").partition("\nArgs:\n")
        for some, text in _ARGUMENT.findall(re.split(r"\n(?=\S)", rest, maxsplit=1)[0]):
            texts |= dict.fromkeys(some.split(", "), " ".join(text.replace("`", "").split()))
    values |= own
    return [Option(name, values.get(name), texts.get(name, "")) for name in names]


@dataclass(frozen=True)
class AttentionSpec:
    """An attention string, parsed: ``method:option=value:...``, in some of a model's blocks.

    Options are kept as texts, so that reading and writing give the same string again; `values` has what they mean.

    Args:
        method: its name, known or not.
        options: as written, ``name=value`` each.
        count: in how many blocks, ``2 x method``; None where it is not said.
    """

    method: str
    options: tuple[str, ...] = ()
    count: int | None = None

    @classmethod
    def parse(cls, text: str) -> AttentionSpec:
        """Read one attention, without a count; names are not checked."""
        method, *options = text.split(":")
        return cls(method, tuple(options))

    @classmethod
    def make(cls, method: str, /, **values: Any) -> AttentionSpec:
        """Write a method and values of its options; a ValueError for a value that the form cannot hold."""
        return cls(method, tuple(f"{name}={_write(name, x)}" for name, x in values.items()))

    def __str__(self) -> str:
        return ("" if self.count is None else f"{self.count} x ") + ":".join((self.method, *self.options))

    @property
    def values(self) -> dict[str, Any]:
        """Options by name: Python literals, or else strings."""
        values = {}
        for option in self.options:
            name, sign, value = option.partition("=")
            if not sign:
                raise ValueError(f"options of a method are name=value, got {option!r} in {str(self)!r}.")
            values[name] = _read(value)
        return values

    @property
    def plain(self) -> AttentionSpec:
        """Return the same method without options."""
        return replace(self, options=())

    def without(self, names: Iterable[str]) -> AttentionSpec:
        """Return the same without the options of these names."""
        dropped = set(names)
        return replace(self, options=tuple(x for x in self.options if x.partition("=")[0] not in dropped))


def _read(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return text


def _write(name: str, value: Any) -> str:
    text = value if isinstance(value, str) and _read(value) == value else repr(value)
    if ":" in text or _read(text) != value:
        raise ValueError(f"{name}={value!r:.60} cannot be written into an attention string.")
    return text


def parse_method(text: str) -> tuple[str, dict[str, Any]]:
    """Read ``method:option=value:...``: the method and its options, checked, by the method's own names.

    Values are Python literals, or else strings.

    Raises:
        ValueError: an unknown method or option, or two names for one size.
    """
    spec = _checked(text)
    return spec.method, resolve_options(spec.method, spec.values)


def parse_attention(text: str) -> tuple[str, dict[str, Any]]:
    """Read the attention of a whole layer: as `parse_method`, with options of relative and rotary positions.

    Those of relative positions are known where ``relative`` is among them. A layer of another distribution, see
    `kernelformer.lazy.LAYERS`, has only options of its own.
    """
    spec = _checked(text)
    if spec.method in LAYERS:
        for name in spec.values:
            if name not in LAYERS[spec.method].options:
                raise unknown(f"option for the layer {spec.method!r},", name, LAYERS[spec.method].options)
        return spec.method, spec.values
    values = spec.values
    positions = {name: x for name, x in values.items() if "relative" in values and name in POSITION_OPTIONS}
    own = {name: x for name, x in values.items() if name not in positions}
    return spec.method, {**resolve_options(spec.method, own, ("relative", "algorithm", *ROTARY_OPTIONS)), **positions}


def _checked(text: str) -> AttentionSpec:
    if not isinstance(text, str):
        raise ValueError(f"an attention is a string such as 'favor+:num_features=128', got {text!r:.60}.")
    check_limit("max_attention_characters", len(text), f"the attention {text[:40]!r}... has {len(text):,} characters")
    return AttentionSpec.parse(text)


def without_positions(text: str) -> str:
    """Remove relative and rotary positions from an attention."""
    spec = AttentionSpec.parse(text).without(ROTARY_OPTIONS)
    named = [x.partition("=")[0] for x in spec.options]
    return str(spec.without(POSITION_OPTIONS) if "relative" in named else spec)


def has_positions(text: str) -> bool:
    """Return True if a layer of this attention has relative or rotary positions, so that its input needs none."""
    options = parse_attention(text)[1]
    return "relative" in options or bool(options.get("rotary"))


def for_cross_attention(text: str) -> str:
    """Convert an attention to one to another sequence: without relative positions, window and sinks.

    ``local``, which is nothing without a window, becomes ``softmax``.
    """
    spec = AttentionSpec.parse(without_positions(text))
    if spec.method not in METHODS:
        return str(spec)
    method, kept = cross_options(spec.method, spec.values)
    return str(replace(spec.without(set(spec.values).difference(kept)), method=method))


def default_cross_attention(text: str) -> str:
    """Return the default attention to another sequence for a model with this self-attention.

    As `for_cross_attention`, by the `cross_method` of its method if there is one, with the options that both have; the
    scale of unit vectors is not among them.
    """
    spec = AttentionSpec.parse(for_cross_attention(text))
    other = METHODS[spec.method].cross_method if spec.method in METHODS else None
    if other is None:
        return str(spec)
    shared = set(method_options(spec.method)).intersection(method_options(other)) - {"scale"}
    return str(replace(spec.without(set(spec.values) - shared), method=other))


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

    Methods with a scale of their own (unit vectors, elu) keep it; their near tokens have the model's.
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
    """Return True if near tokens have softmax's scale beside a map with a scale of its own (not for unit vectors)."""
    own = "scale" in find_method(method).default
    return own and has_near(settings) and not settings.get("normalize_qk")


def move_to_inputs(core: AttentionCore, like: Tensor) -> AttentionCore:
    """Move a core to the device of its inputs; in half precision it stays in float32, which is what its sums are in."""
    return core.to(like.device, torch.float64 if like.dtype == torch.float64 else None)


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
    """Attend by a method, without building a module first.

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
        options: of the method, see `build_attention`; all others are those of `AttentionCore.forward`.

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
    which = id(find_method(method).make)  # a registered name may come to mean another class
    return _cached(method, which, query.shape[3], query.shape[1], query.device, dtype, **settings)


@functools.lru_cache(maxsize=CACHE, typed=True)  # safe among threads
def _cached(
    method: str, _: int, head_dim: int, num_heads: int, device: torch.device, dtype: torch.dtype, **options: Any
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
