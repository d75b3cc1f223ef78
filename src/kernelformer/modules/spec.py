"""Attention strings: their one reader and writer.

favor+                                       a method
nprf:num_features=64:relative=1d             with options
favor+:rotary=True:rotary_base=500000        with rotary positions, in a layer
favor+:algorithm=parallel                    with an option of its calls, in a layer and in the benchmark
bigbird:block_size=16                        a sparse layer of transformers, in an encoder
2 x softmax, 4 x favor+:num_features=64      block by block
softmax > favor+                             the encoder's attention and the decoder's
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from kernelformer.limits import check_limit
from kernelformer.modules.methods import METHODS
from kernelformer.modules.options import (
    POSITION_OPTIONS,
    ROTARY_OPTIONS,
    cross_options,
    method_options,
    resolve_options,
)
from kernelformer.modules.sparse_layers import SPARSE_LAYERS, check_sparse_options

BETWEEN_SIDES = ">"
_COMMA = re.compile(r",\s+(?![^(\[]*[)\]])")  # those within brackets belong to a value
_COUNT = re.compile(r"(?:(\d+) x )?(.*)", re.DOTALL)


@dataclass(frozen=True)
class AttentionSpec:
    """One attention as it is written: ``method:option=value:...``, in some of a model's blocks.

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
        """Read one attention, without a count; whether its names are known is not asked."""
        method, *options = text.split(":")
        return cls(method, tuple(options))

    @classmethod
    def make(cls, method: str, /, **values: Any) -> AttentionSpec:
        """Write a method and values of its options.

        Raises:
            ValueError: a value that the form cannot hold, such as a text with a colon.
        """
        return cls(method, tuple(f"{name}={_write(name, x)}" for name, x in values.items()))

    def __str__(self) -> str:
        return ("" if self.count is None else f"{self.count} x ") + ":".join((self.method, *self.options))

    @property
    def values(self) -> dict[str, Any]:
        """Options by name: Python literals, or else strings.

        Raises:
            ValueError: an option that is not ``name=value``.
        """
        values = {}
        for option in self.options:
            name, sign, value = option.partition("=")
            if not sign:
                raise ValueError(f"options of a method are name=value, got {option!r} in {str(self)!r}.")
            values[name] = _read(value)
        return values

    @property
    def plain(self) -> AttentionSpec:
        """The same without options."""
        return replace(self, options=())

    def without(self, names: Iterable[str]) -> AttentionSpec:
        """The same without the options of these names."""
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
    """Read ``method:option=value:...``: the method and its options, checked, by the names that the method has for them.

    Values are Python literals, or else strings.

    Raises:
        ValueError: an unknown method or option, or two names for one size.
    """
    spec = _checked(text)
    return spec.method, resolve_options(spec.method, spec.values)


def parse_attention(text: str) -> tuple[str, dict[str, Any]]:
    """Read the attention of a whole layer: as `parse_method`, with options of relative and rotary positions.

    Those of relative positions are known where ``relative`` is among them. Sparse layers of transformers have only
    options of their own.
    """
    spec = _checked(text)
    if spec.method in SPARSE_LAYERS:
        return spec.method, check_sparse_options(spec.method, spec.values)
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
    """The same attention without relative and rotary positions."""
    spec = AttentionSpec.parse(text).without(ROTARY_OPTIONS)
    named = [x.partition("=")[0] for x in spec.options]
    return str(spec.without(POSITION_OPTIONS) if "relative" in named else spec)


def has_positions(text: str) -> bool:
    """Whether a layer of this attention has relative or rotary positions, so that its input needs none."""
    options = parse_attention(text)[1]
    return "relative" in options or bool(options.get("rotary"))


def for_cross_attention(text: str) -> str:
    """The same attention to another sequence, which has no distances: without relative positions, window and sinks.

    ``local``, which is nothing without a window, becomes ``softmax``.
    """
    spec = AttentionSpec.parse(without_positions(text))
    if spec.method not in METHODS:
        return str(spec)
    method, kept = cross_options(spec.method, spec.values)
    return str(replace(spec.without(set(spec.values).difference(kept)), method=method))


def default_cross_attention(text: str) -> str:
    """The attention to another sequence that a model with this self-attention has where none is given.

    As `for_cross_attention`, by the `cross_method` of its method if there is one, with the options that both have; the
    scale of unit vectors is not among them.
    """
    spec = AttentionSpec.parse(for_cross_attention(text))
    other = METHODS[spec.method].cross_method if spec.method in METHODS else None
    if other is None:
        return str(spec)
    shared = set(method_options(spec.method)).intersection(method_options(other)) - {"scale"}
    return str(replace(spec.without(set(spec.values) - shared), method=other))


def parse_blocks(text: str) -> list[AttentionSpec]:
    """Read ``2 x A, 4 x B``: the attentions of one side, block after block; ``A`` alone has no count."""
    blocks = []
    for part in _COMMA.split(text):
        match = _COUNT.fullmatch(part.strip())
        assert match is not None  # it matches anything
        count = None if match[1] is None else int(match[1])
        blocks.append(replace(AttentionSpec.parse(match[2]), count=count))
    return blocks


def join_blocks(attentions: str | Sequence[str]) -> str:
    """Write one attention for all blocks, or a list with one for each: ``2 x A, 4 x B``."""
    if isinstance(attentions, str):
        return attentions
    return ", ".join(f"{len(list(same))} x {spec}" for spec, same in groupby(attentions))


def parse_sides(text: str) -> tuple[str, str | None]:
    """Read ``A > B``: the encoder's attention and the decoder's; the second is None where there is only one.

    Raises:
        ValueError: a side is empty, or there are more than two.
    """
    first, *rest = (x.strip() for x in text.split(BETWEEN_SIDES))
    if not rest:
        return first, None
    if len(rest) > 1 or not (first and rest[0]):
        raise ValueError(f"{BETWEEN_SIDES} stands between the encoder's attention and the decoder's, got {text!r}.")
    return first, rest[0]


def join_sides(encoder: str, decoder: str | None) -> str:
    """Write ``A > B``, or ``A`` where there is only one."""
    return encoder if decoder is None else f"{encoder} {BETWEEN_SIDES} {decoder}"
