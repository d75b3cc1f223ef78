"""Checks of single values of rows: texts, labels, numbers."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from kernelformer.data.readers import brief
from kernelformer.errors import integer, number

_NUMERAL = re.compile(r"-?\d{1,9}(\.0*)?")  # an integer as tables write it

Check = Callable[[object], Any]  # a value of a row, as it is to be used; ValueError says what is wrong with it


def text_value(value: object) -> str:
    """Check for a text that is not empty and can be written as UTF-8."""
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"must be a text that is not empty, got {brief(value)}")
    try:
        value.encode()
    except UnicodeEncodeError as problem:  # JSON can name half of a character, as \ud83d
        raise ValueError(
            f"is not UTF-8: {value[problem.start]!r} at character {problem.start} is half of one"
        ) from None
    return value


def optional_text(value: object) -> str:
    """Check for a text; one of blanks alone becomes empty."""
    return "" if isinstance(value, str) and not value.strip() else text_value(value)


def label_names(labels: int | Sequence[str], at_least: int = 1) -> tuple[int, list[str]]:
    """How many labels there are, and their names if they have some."""
    if isinstance(labels, str) or not isinstance(labels, Sequence):
        return integer("labels", labels, at_least=at_least), []
    names = list(labels)
    if not all(isinstance(x, str) and x for x in names) or len(set(names)) < max(len(names), at_least):
        raise ValueError(f"labels must be a number or at least {at_least} different names, got {labels!r}.")
    return len(names), names


def label_value(labels: int | Sequence[str]) -> Check:
    """Make a check for labels: one of these names, or an integer from 0 to their number - 1; gives the integer.

    A number may also be a text, as all values of tables are, or a float without a fraction. Where a name looks like a
    number, all labels are names: with ``["1", "2"]`` the label 1 is the first, 2 the second, and 0 is wrong.
    """
    count, names = label_names(labels)
    numerals = any(_NUMERAL.fullmatch(x) for x in names)
    numbers = f"an integer from 0 to {count - 1}"
    wanted = " or ".join(([f"one of {', '.join(names)}"] if names else []) + ([] if numerals else [numbers]))

    def check(value: object) -> int:
        label = float(value) if isinstance(value, str) and _NUMERAL.fullmatch(value) else value
        if isinstance(label, float) and label.is_integer():
            label = int(label)
        for name in (value, label):
            if isinstance(name, str | int) and str(name) in names:
                return names.index(str(name))
        if numerals or isinstance(label, bool) or not isinstance(label, int) or not 0 <= label < count:
            raise ValueError(f"must be {wanted}, got {brief(value)}")
        return label

    return check


def number_value(value: object) -> float:
    """Check for a finite number, also as text."""
    try:
        return number("it", float(value) if isinstance(value, str) else value)
    except ValueError:
        raise ValueError(f"must be a finite number, got {brief(value)}") from None
