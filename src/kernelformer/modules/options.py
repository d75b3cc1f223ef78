"""The options of the methods: which ones a method takes, what they are called, and what they do."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kernelformer.errors import integer, positive_int, unknown
from kernelformer.modules.core import AttentionCore
from kernelformer.modules.methods import DRAWN, METHODS, find_method
from kernelformer.modules.positions import RelativePositions
from kernelformer.modules.rotary import RotaryPositions

SIZE = "num_features"  # the size of every method, whatever it calls it
_CORE_OPTIONS = ("scale", "normalize_qk")
_NOT_OPTIONS = ("method", "feature_map", "options", "head_dim", "num_heads")
NEAR_OPTIONS = ("window", "sinks", "beta", "near_scale")  # of the part that attends to near tokens exactly
POSITION_OPTIONS = ("relative", "scheme", "max_length", "max_distance", "num_buckets", "grid", "num_prefix")
ROTARY_OPTIONS = ("rotary", "rotary_base", "rotary_dim", "rotary_scaling")
_ARGUMENT = re.compile(r"^    (\w+(?:, \w+)*): (.*(?:\n        .*)*)", re.MULTILINE)  # of a docstring


def method_options(method: str) -> list[str]:
    """The options of a method by their own names, besides head_dim and num_heads.

    ``num_features`` and ``seed`` may be given to every method: see `resolve_options`.
    """
    entry = find_method(method)
    kinds = [entry.make, entry.core] if entry.has_map else [entry.make]
    names = {*_CORE_OPTIONS, *(x for kind in kinds for x in inspect.signature(kind).parameters)}
    return sorted(names.difference(_NOT_OPTIONS, entry.fixed, entry.unused))


def resolve_options(method: str, options: Mapping[str, Any], more: Sequence[str] = ()) -> dict[str, Any]:
    """Check the options of a method, and give each the name that the method has for it.

    ``num_features`` becomes the method's own size (``num_landmarks``, ``rank``), or is left out where there is none to
    set; ``seed`` is left out where nothing is drawn. So a loop over methods gives all of them the same two.

    Args:
        method: a name from `list_methods`.
        options: by name.
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
    """Those of the options of several methods that this one takes, by its own names; its own name for a size wins."""
    entry, known = find_method(method), [*method_options(method), SIZE]
    size, chosen = entry.size, {name: x for name, x in options.items() if name in known}
    if entry.has_map and not (has_near(chosen) and entry.holds(entry.window, chosen)):
        chosen = {name: x for name, x in chosen.items() if name not in (*NEAR_OPTIONS, "attention_dropout")}
    if size != SIZE and size in chosen:
        chosen.pop(SIZE, None)
    return resolve_options(method, chosen)


def maps_by_head(method: str, options: Mapping[str, Any]) -> bool:
    """Whether a method with these options has a map for each head, so that ``num_key_heads`` says how many."""
    entry = find_method(method)
    return "num_key_heads" in method_options(method) and entry.holds(entry.per_head, options)


def has_near(options: Mapping[str, Any]) -> bool:
    """Whether options of a method with a feature map ask for near tokens to be attended to exactly."""
    return options.get("window") is not None or bool(options.get("sinks"))


def cross_options(method: str, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """A method and its options for attention to another sequence, where no token is near another.

    Window and sinks are left out, with all that belongs to them; ``local``, which has nothing else, is ``softmax``.
    """
    entry = find_method(method)
    if "window" not in method_options(method):
        return method, dict(options)
    left_out = NEAR_OPTIONS if not entry.has_map else (*NEAR_OPTIONS, "attention_dropout")
    kept = {name: x for name, x in options.items() if name not in left_out}
    return (method if entry.has_map else "softmax"), kept


def near_settings(core: AttentionCore) -> str:
    """The window and the sinks of a core that has them, for messages."""
    core = getattr(core, "linear", core)  # of heads of two kinds
    return ", ".join(f"{name}={getattr(core, name)}" for name in ("window", "sinks"))


def _check_near(method: str, options: Mapping[str, Any], known: Sequence[str]) -> None:
    """Check that a method can attend to near tokens exactly, if that is asked for, and that nothing is set in vain."""
    entry, asked = find_method(method), [name for name in NEAR_OPTIONS if name in options]
    if (asked and "window" not in known) or (has_near(options) and not entry.holds(entry.window, options)):
        raise _no_window(method, ", ".join(f"{name}={options[name]!r}" for name in asked))
    forms_weights = "attention_dropout" in known and (has_near(options) or not entry.has_map)
    if options.get("attention_dropout") and not forms_weights:
        raise no_weights(method, f"attention_dropout={options['attention_dropout']!r}")
    for name in ("beta", "near_scale"):
        if name in known and options.get(name) not in (None, "learned") and not has_near(options):
            raise ValueError(
                f"{name}={options[name]!r} is of near tokens that are attended to exactly, and {method!r} got neither "
                f"window= nor sinks=; give one of them, or leave {name} out."
            )


def _no_window(method: str, asked: str) -> ValueError:
    """The error for near tokens of a method that has no normalized kernel for the others."""
    fact = find_method(method).window
    way = "" if isinstance(fact, bool) else f", {method!r} with {', '.join(f'{x}={y!r}' for x, y in fact.items())}"
    return ValueError(
        f"{asked}: {method!r} cannot attend to near tokens exactly and to the others by a kernel in one normalization; "
        f"use a normalized linear method such as 'favor+'{way}, or 'local' for near tokens alone."
    )


def no_weights(method: str, asked: str) -> ValueError:
    """The error for dropout of weights that a method does not have."""
    exact = ", ".join(repr(name) for name, entry in METHODS.items() if entry.family == "exact")
    way = ", or give a window, whose weights are formed" if "window" in method_options(method) else ""
    return ValueError(
        f"{asked} drops attention weights, which method {method!r} never forms; leave it at 0, or use an exact method "
        f"({exact}){way}. Dropout of the output is KernelAttention's dropout=."
    )


@dataclass(frozen=True)
class Option:
    """One option.

    Args:
        name: as `build_attention` and an attention string take it.
        default: its value where none is given.
        about: what it does, in plain text.
    """

    name: str
    default: object
    about: str


def describe_options(method: str) -> list[Option]:
    """All options of a method with what they do, in the order of `method_options`."""
    entry = find_method(method)
    return _describe(method_options(method), [entry.make, *([entry.core] if entry.has_map else [])], entry.default)


def describe_positions() -> list[Option]:
    """The options of positions, which an attention of a model or a layer has besides those of its method."""
    from kernelformer.modules.layer import KernelAttention  # which itself reads the options of methods

    return _describe((*POSITION_OPTIONS, *ROTARY_OPTIONS), [RelativePositions, RotaryPositions, KernelAttention], {})


def arguments(kind: type) -> dict[str, str]:
    """What the docstrings of a class and of those that it inherits from say of each argument."""
    texts: dict[str, str] = {}
    for one in kind.__mro__:
        _, sign, rest = inspect.cleandoc(one.__dict__.get("__doc__") or "").partition("\nArgs:\n")
        section = re.split(r"\n(?=\S)", rest, maxsplit=1)[0] if sign else ""
        for names, text in _ARGUMENT.findall(section):
            for name in names.split(", "):
                texts.setdefault(name, " ".join(text.replace("`", "").split()))
    return texts


def defaults(kind: type) -> dict[str, object]:
    """Default values of the arguments of a class and of those that it inherits from."""
    values: dict[str, object] = {}
    for one in kind.__mro__:
        if "__init__" in one.__dict__:
            for name, parameter in inspect.signature(one.__dict__["__init__"]).parameters.items():
                if parameter.default is not inspect.Parameter.empty:
                    values.setdefault(name, parameter.default)
    return values


def _describe(names: Sequence[str], kinds: Sequence[type], own: Mapping[str, object]) -> list[Option]:
    values: dict[str, object] = {}
    texts: dict[str, str] = {}
    for kind in reversed(kinds):
        values |= defaults(kind)
        texts |= arguments(kind)
    values |= own
    return [Option(name, values.get(name), texts.get(name, "")) for name in names]
