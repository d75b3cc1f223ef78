"""One wording for input errors: what was asked, both values, and the way out."""

from __future__ import annotations

import difflib
import operator
from collections.abc import Iterable
from typing import SupportsIndex

from torch import Tensor


def unknown(what: str, value: object, known: Iterable[str]) -> ValueError:
    """An unknown name, with the nearest known one first and then the whole list."""
    names = sorted(known)
    near = difflib.get_close_matches(str(value), names, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return ValueError(f"unknown {what} {value!r}; {hint}choose from {', '.join(names) or 'none'}.")


def choice(what: str, value: str, known: Iterable[str]) -> str:
    """Return ``value`` if it is among the known names, else raise."""
    names = tuple(known)
    if value not in names:
        raise unknown(what, value, names)
    return value


def positive_int(what: str, value: object) -> int:
    """Return ``value`` if it is an integer of at least 1, else raise."""
    return integer(what, value, at_least=1)


def integer(what: str, value: object, at_least: int | None = None) -> int:
    """Return ``value`` as an int if it is one, of any library, and large enough; else raise."""
    bound = "" if at_least is None else f" of at least {at_least}"
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise ValueError(f"{what} must be an integer{bound}, got {value!r}.")
    number = operator.index(value)
    if at_least is not None and number < at_least:
        raise ValueError(f"{what} must be an integer{bound}, got {value!r}.")
    return number


def shape(x: Tensor) -> str:
    """A tensor's shape as people write it."""
    return str(tuple(x.shape))
