"""Settings as frozen dataclasses whose fields have help, bounds and parsers.

The command line is made from such fields, so that a default and a bound stand once. Nothing here needs torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, get_args, get_origin, get_type_hints

from kernelformer.errors import integer, number

# Words that the help of several commands has: one thing is said in one way.
PICKLE = "read pickled weights of a trusted source"
MODEL = "folder of transformers, .gguf file, or name on the hub"
TEXTS = ".jsonl with 'text' in each line, or one text a line"
KIND = "what the model is: auto, encoder, masked or causal"
MEMORY = "measure peak memory too"
MAX_SECONDS = "seconds of one pass beyond which it is not run"
SKIP_BAD = "leave bad rows of the data out, and say how many"
SEED = "random seed"
OPTION = "option"  # the key of an `Option` in the metadata of a field
Parse = Callable[[str, str], Any]


@dataclass(frozen=True)
class Option:
    """Command-line form of a setting."""

    help: str = ""
    least: float | None = None  # the smallest number that is allowed, of each number of a list too
    parse: Parse | None = None  # reads a text, given the option's name and the text; default: by the type of the field
    argument: bool = False  # whether it is given by its place and not by ``--name``
    switch: bool = False  # whether there is only ``--name`` and not ``--no-name``
    path: bool = False  # whether it may be a path, of which a record keeps the last part only
    name: str | None = None  # on the command line, as Python writes it, where saved settings have another name for it
    shown: str | None = None  # what stands in place of the name of an argument
    choices: tuple[str, ...] = ()  # that the shell completes; a settings class checks its values itself


def option(default: Any = MISSING, help: str = "", **more: Any) -> Any:
    """A field of a settings dataclass that is an option of the command line too."""
    return field(default=default, metadata={OPTION: Option(help, **more)})


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Base of settings: checks the bounds of all options, so that a call from Python has them too."""

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for each, how in options(type(self)):
            value = getattr(self, each.name)
            if how.least is None or value is None:
                continue
            for x in value if isinstance(value, tuple) else (value,):
                if float in (hints[each.name], *get_args(hints[each.name])):
                    number(each.name, x, at_least=how.least)
                else:
                    integer(each.name, x, at_least=int(how.least))


def options(settings: type[Any]) -> list[tuple[Field[Any], Option]]:
    """The fields of a settings dataclass that are options, in their order."""
    return [(x, x.metadata[OPTION]) for x in fields(settings) if OPTION in x.metadata]


def given_as(each: Field[Any]) -> str:
    """The name of a field on the command line, as Python writes it."""
    how: Option = each.metadata[OPTION]
    return how.name or each.name


def list_type(hint: Any) -> type | None:
    """The type of the items of ``tuple[X, ...]`` or ``tuple[X, ...] | None``; None: the hint is another type."""
    for x in (hint, *get_args(hint)):
        if get_origin(x) is tuple:
            item: type = get_args(x)[0]
            return item
    return None


def as_text(value: Any) -> str:
    """A value as it is written on the command line: items of a list between commas, "" for None and no items."""
    if value is None:
        return ""
    return (
        ",".join(f"{x:g}" if isinstance(x, float) else str(x) for x in value)
        if isinstance(value, tuple | list)
        else str(value)
    )


def from_text(each: Field[Any], hint: Any, text: str) -> Any:
    """The value of a list, or of a field with a parser of its own, from its text.

    An empty text is the default where that is None or an empty list.
    """
    how: Option = each.metadata[OPTION]
    name = "--" + given_as(each).replace("_", "-")
    if not text and each.default in (None, ()):
        return each.default
    if how.parse is not None:
        return how.parse(name, text)
    item = list_type(hint)
    return tuple(split_names(text)) if item is str else integers(name, text) if item is int else numbers(name, text)


def split_names(text: str) -> list[str]:
    """Parts between commas; those within brackets belong to a value."""
    return [x.strip() for x in re.split(r",(?![^(\[]*[)\]])", text)]


def integers(name: str, text: str) -> tuple[int, ...]:
    """Integers of at least 1 between commas."""
    parts = split_names(text)
    if not all(re.fullmatch(r"\+?0*[1-9]\d*", x) for x in parts):
        raise ValueError(f"{name} takes integers of at least 1, separated by commas, got {text!r}; say 128,256.")
    return tuple(int(x) for x in parts)


def numbers(name: str, text: str) -> tuple[float, ...]:
    """Decimal numbers between commas."""
    try:
        return tuple(float(x) for x in split_names(text))
    except ValueError:
        raise ValueError(f"{name} takes numbers separated by commas, got {text!r}; say 0.1,0.5.") from None


def parse_layers(text: str) -> list[int | str]:
    """Read ``0-3,5`` or patterns of names, between commas: numbers and patterns."""
    layers: list[int | str] = []
    for part in (x.strip() for x in text.split(",")):
        limits = re.fullmatch(r"(\d+)-(\d+)", part)
        if limits:
            first, last = int(limits[1]), int(limits[2])
            if last < first:
                raise ValueError(f"layers {part!r} end before they begin; say {last}-{first}.")
            layers += range(first, last + 1)
        elif part:
            layers.append(int(part) if re.fullmatch(r"-?\d+", part) else part)
        else:
            raise ValueError(f"layers are numbers, such as 0-3,5, or patterns of names, got {text!r}.")
    return layers
