"""One wording for input errors: what was asked, both values, and the way out."""

from __future__ import annotations

import difflib
import math
import operator
from collections.abc import Iterable
from typing import TYPE_CHECKING, SupportsFloat, SupportsIndex

if TYPE_CHECKING:
    from torch import Tensor


FEW = 8  # names that are all listed; of more the nearest
NEAREST = 5


class WorkerError(RuntimeError):
    """A measuring process that failed, with what it said last."""


def unknown(what: str, value: object, known: Iterable[str]) -> ValueError:
    """An unknown name, with the nearest known one first, and then all of a few names or the nearest of many."""
    names, text = sorted(set(known)), str(value)[:100]
    near = difflib.get_close_matches(text, names, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    some = f"choose from {', '.join(names) or 'none'}"
    if len(names) > FEW:
        nearest = difflib.get_close_matches(text, names, n=NEAREST, cutoff=0.0)
        some = f"the nearest of {len(names)}: {', '.join(nearest)}"
    return ValueError(f"unknown {what} {value!r:.80}; {hint}{some}.")


def choice(what: str, value: str, known: Iterable[str]) -> str:
    """Return ``value`` if it is among the known names, else raise."""
    names = tuple(known)
    if value not in names:
        raise unknown(what, value, names)
    return value


def positive_int(what: str, value: object) -> int:
    """Return ``value`` if it is an integer of at least 1, else raise."""
    return integer(what, value, at_least=1)


def flag(what: str, value: object) -> bool:
    """Return ``value`` if it is True or False, else raise: any text would count as True."""
    if not isinstance(value, bool):
        raise ValueError(f"{what} must be True or False, got {value!r}.")
    return value


def number(what: str, value: object, *, at_least: float = -math.inf, above: float | None = None) -> float:
    """Return ``value`` as a finite float if it is a number, of any library, within its bound; else raise."""
    bound = f" above {above:g}" if above is not None else f" of at least {at_least:g}" if at_least > -math.inf else ""
    if not isinstance(value, bool) and isinstance(value, SupportsFloat) and not isinstance(value, str):
        converted = float(value)
        if math.isfinite(converted) and (converted >= at_least if above is None else converted > above):
            return converted
    raise ValueError(f"{what} must be a finite number{bound}, got {value!r}.")


def fraction(what: str, value: object) -> float:
    """Return ``value`` as a float if it is a number of at least 0 and below 1, as dropout is; else raise."""
    share = number(what, value)
    if not 0 <= share < 1:
        raise ValueError(f"{what} must be at least 0 and below 1, got {value!r}.")
    return share


def integer(what: str, value: object, at_least: int | None = None) -> int:
    """Return ``value`` as an int if it is one, of any library, and large enough; else raise."""
    bound = "" if at_least is None else f" of at least {at_least}"
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise ValueError(f"{what} must be an integer{bound}, got {value!r}.")
    index = operator.index(value)
    if at_least is not None and index < at_least:
        raise ValueError(f"{what} must be an integer{bound}, got {value!r}.")
    if not -(1 << 63) <= index < 1 << 63:
        raise ValueError(f"{what} must fit into 64 bits, got {value!r}.")
    return index


def shape(x: Tensor) -> str:
    """A tensor's shape as people write it."""
    return str(tuple(x.shape))


class TrainingError(RuntimeError):
    """Error of a run for a reason outside the code: its folder, the disk, another run."""


class StoppedError(TrainingError):
    """A run was told to stop, and has saved its state."""


def reason(problem: BaseException) -> str:
    """One line that says what went wrong."""
    if isinstance(problem, OSError) and problem.strerror:
        return problem.strerror
    return (str(problem).strip().splitlines() or [type(problem).__name__])[0]
