"""Bounds on what a file may cost or reach, looked at before anything is built or read, and the one way to raise each.

A few bytes can ask for minutes, for all memory or for the network. Each bound here is far above what models and data
have; whoever needs more and trusts the file says so by an environment variable, which processes that this one starts
inherit: ``KERNELFORMER_MAX_LAYERS=20000``, or ``kernelformer --limit max_layers=20000 COMMAND``. It is not written into
the record of a run: it is a decision of the person at the keyboard, not of the folder.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

from kernelformer.errors import choice, integer

LIMITS = {
    "max_layers": 1_000,  # blocks of a saved configuration
    "max_labels": 1_000_000,  # classes of a saved configuration, each of which gets a name
    "max_tensors": 100_000,  # of saved weights
    "max_unpacked_bytes": 1 << 34,  # of an array in an archive
    "max_attention_characters": 2_000,  # of one attention
    "follow_links": 0,  # 1: links may lead out of a folder of data or of a model
    "allow_hub": 0,  # 1: a local folder may name parts of a model that are on the hub
}
_given: dict[str, int] = {}  # bounds that were set in this process, not by whoever started it
_LAYERS = re.compile(r"(^|_)(layers?|depths?|blocks?)$")


def limit(name: str) -> int:
    """The bound of this name, as the environment has it, or its default."""
    variable = environment_variable(name)
    value = os.environ.get(variable, "").strip()
    if not value:
        return LIMITS[name]
    if not re.fullmatch(r"\d{1,18}", value):
        raise ValueError(f"{variable} must be an integer of at least 0, got {value!r:.40}.")
    return int(value)


def set_limit(name: str, value: int) -> None:
    """Raise or lower a bound, for this process and those that it starts."""
    os.environ[environment_variable(name)] = str(integer(name, value, at_least=0))
    _given[name] = value


def given_options() -> list[str]:
    """The options of the command that set bounds in this process: what is typed later needs them too."""
    plain = {name: x for name, x in _given.items() if (name, x) != ("follow_links", 1)}
    return [*(f"--limit {name}={x}" for name, x in plain.items()), *["--follow-links"] * (len(plain) < len(_given))]


def raise_by(name: str, value: int) -> str:
    """The command-line option that raises a bound, for messages."""
    here = f"{environment_variable(name)}={value}"
    return f"raise it by kernelformer --limit {name}={value} COMMAND, or in the environment: {here}"


def check_limit(name: str, value: int, what: str) -> None:
    """Raise if a value is above its bound; ``what`` says of what it is, such as ``a.json has 5000 layers``."""
    bound = limit(name)
    if value > bound:
        raise ValueError(f"{what}, the limit {name} is {bound:,}; if you trust it, {raise_by(name, value)}.")


def check_counts(where: object, settings: Mapping[str, Any]) -> None:
    """Raise for a configuration, by its names and values, with more blocks or classes than the bound; parts of it too.

    Their cost is known before weights are looked at: a module for each block, a name for each class.
    """
    for name, value in settings.items():
        if isinstance(value, Mapping):
            check_counts(where, value)
        elif name == "num_labels" and isinstance(value, int):
            check_limit("max_labels", value, f"{where} asks for num_labels={value:,}")
        elif _LAYERS.search(str(name)):
            for count in value if isinstance(value, Iterable) and not isinstance(value, str) else [value]:
                if isinstance(count, int):
                    check_limit("max_layers", count, f"{where} asks for {name}={count:,}")


def environment_variable(name: str) -> str:
    """The variable of the environment that sets a bound."""
    return f"KERNELFORMER_{choice('limit', name, LIMITS).upper()}"
