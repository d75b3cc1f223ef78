"""What the label of a result says of its attention: which methods, how large, and in which order labels stand.

Labels are attention strings as `modules.spec` reads them. They come from files, so that one which says nothing that is
known is no error here: it stands for itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from kernelformer.modules import METHODS, AttentionSpec
from kernelformer.modules.spec import join_sides, parse_blocks, parse_sides

SIZES = tuple(dict.fromkeys(x.size for x in METHODS.values() if x.size is not None))
_NUMBER = re.compile(r"(\w+)=(\d+)")


def sides(label: str) -> tuple[str, str]:
    """The encoder's attention and the decoder's; the same twice if the label has only one."""
    try:
        first, second = parse_sides(label)
    except ValueError:
        first, second = label, None
    return _ordered(first), _ordered(first if second is None else second)


def parts(side: str) -> list[AttentionSpec]:
    """The attentions of one side, block after block, with options in one order: sizes first, then by name."""
    return [
        replace(spec, options=tuple(sorted(spec.options, key=lambda x: (x.partition("=")[0] not in SIZES, x))))
        for spec in parse_blocks(side)
    ]


def _ordered(side: str) -> str:
    return ", ".join(map(str, parts(side)))


def normalized(label: str) -> str:
    """The same text for the same attention: options in one order, one side where both are alike."""
    first, second = sides(label)
    return join_sides(first, None if first == second else second)


def exact(label: str) -> bool:
    """Whether the label is a method that attends to all tokens exactly, without options."""
    return label in METHODS and METHODS[label].family == "exact" and METHODS[label].quadratic


def linear(label: str) -> bool:
    """Whether all its methods are known and none takes time quadratic in the length."""
    methods = {part.method for side in sides(label) for part in parts(side)}
    return methods <= METHODS.keys() and not any(METHODS[x].quadratic for x in methods)


def sized(label: str) -> tuple[str, int] | None:
    """The label without its number of features, and that number; None if it has none or several."""
    sizes, rest = set(), []
    for side in sides(label):
        specs = []
        for method in parts(side):
            numbers = [match for x in method.options if (match := _NUMBER.fullmatch(x)) and match[1] in SIZES]
            sizes |= {int(x[2]) for x in numbers}
            others = tuple(x for x in method.options if x not in {m[0] for m in numbers})
            specs.append(str(replace(method, options=others)))
        rest.append(", ".join(specs))
    return (normalized(join_sides(rest[0], rest[1])), sizes.pop()) if len(sizes) == 1 else None


def series(labels: Iterable[str]) -> dict[str, dict[int, str]]:
    """Labels that differ only in their number of features: by what they share, then by that number, ascending."""
    groups: dict[str, dict[int, str]] = {}
    for label in labels:
        if (size := sized(label)) is not None:
            groups.setdefault(size[0], {}).setdefault(size[1], label)
    return {base: dict(sorted(group.items())) for base, group in groups.items() if len(group) > 1}


def rank(label: str) -> tuple[bool, int, str, int, str]:
    """The key to sort by: one attention before two, methods as `list_methods` has them, then the number of features."""
    names = list(METHODS)
    first, second = sides(label)
    method = parts(first)[0].method
    base, size = sized(label) or (label, 0)
    return first != second, names.index(method) if method in names else len(names), base, size, label
