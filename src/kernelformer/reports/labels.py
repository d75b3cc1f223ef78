"""What a label says of its attention: ``method:option=value``, ``2 x A, 4 x B`` by blocks, ``A > B`` by sides."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from kernelformer.modules.build import METHODS

QUADRATIC = ("softmax", "gaussian")
SIZES = ("num_features", "num_landmarks", "rank")  # what the papers call the feature dimension, by method
BETWEEN = " > "  # the encoder's attention and the decoder's
_COMMA = re.compile(r",\s+(?![^(\[]*[)\]])")  # those within brackets belong to a value
_COUNT = re.compile(r"(\d+ x )?(.*)", re.DOTALL)


@dataclass(frozen=True)
class Part:
    """A method with its options, in some of the blocks."""

    count: str  # "2 x ", or nothing for all blocks
    method: str
    options: tuple[str, ...]  # name=value, sizes first, then in the order of names

    def __str__(self) -> str:
        return self.count + ":".join((self.method, *self.options))


def sides(label: str) -> tuple[str, str]:
    """The encoder's attention and the decoder's; the same twice if the label has only one."""
    first, sign, second = label.partition(BETWEEN)
    whole = sign and first.strip() and second.strip() and BETWEEN not in second
    return (_plain(first), _plain(second)) if whole else (_plain(label), _plain(label))


def parts(side: str) -> list[Part]:
    """The methods of one side, block after block."""
    found = []
    for spec in _COMMA.split(side):
        count, rest = _COUNT.fullmatch(spec.strip()).groups("")  # type: ignore[union-attr]  # it matches anything
        method, *options = rest.split(":")
        found.append(Part(count, method, tuple(sorted(options, key=lambda x: (x.partition("=")[0] not in SIZES, x)))))
    return found


def _plain(side: str) -> str:
    return ", ".join(map(str, parts(side)))


def normalized(label: str) -> str:
    """The same text for the same attention: options in one order, one side where both are alike."""
    first, second = sides(label)
    return first if first == second else f"{first}{BETWEEN}{second}"


def linear(label: str) -> bool:
    """Whether all its methods are known and none takes time quadratic in the length."""
    found = {part.method for side in sides(label) for part in parts(side)}
    return found <= METHODS.keys() and not found & set(QUADRATIC)


def sized(label: str) -> tuple[str, int] | None:
    """The label without its number of features, and that number; None if it has none or several."""
    sizes, rest = set(), []
    for side in sides(label):
        some = []
        for part in parts(side):
            options = {x: re.fullmatch(r"(\w+)=(\d+)", x) for x in part.options}
            mine = {x: int(found[2]) for x, found in options.items() if found and found[1] in SIZES}
            sizes |= set(mine.values())
            some.append(str(Part(part.count, part.method, tuple(x for x in part.options if x not in mine))))
        rest.append(", ".join(some))
    return (normalized(BETWEEN.join(rest)), sizes.pop()) if len(sizes) == 1 else None


def series(labels: Iterable[str]) -> dict[str, dict[int, str]]:
    """Labels that differ only in their number of features: by what they share, then by that number, ascending."""
    found: dict[str, dict[int, str]] = {}
    for label in labels:
        if (size := sized(label)) is not None:
            found.setdefault(size[0], {}).setdefault(size[1], label)
    return {base: dict(sorted(some.items())) for base, some in found.items() if len(some) > 1}


def rank(label: str) -> tuple[bool, int, str, int, str]:
    """To sort by: one attention before two, methods as `list_methods` has them, then the number of features."""
    names = list(METHODS)
    first, second = sides(label)
    method = parts(first)[0].method
    base, size = sized(label) or (label, 0)
    return first != second, names.index(method) if method in names else len(names), base, size, label
