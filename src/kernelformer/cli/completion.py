"""Names that the shell completes: recipes, tasks, attentions, items; none of them waits for torch."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

import kernelformer

Complete = Callable[[str], list[str]]
_TABLES = {"methods.py": "METHODS", "sparse_layers.py": "SPARSE_LAYERS"}


@cache
def method_names() -> tuple[str, ...]:
    """Names of all methods, from the text of their tables: importing these would import torch."""
    names: list[str] = []
    for file, table in _TABLES.items():
        text = (Path(kernelformer.__file__).parent / "modules" / file).read_text("utf-8")
        for node in ast.parse(text).body:
            if (
                isinstance(node, ast.AnnAssign)
                and ast.unparse(node.target) == table
                and isinstance(node.value, ast.Dict)
            ):
                names += [x.value for x in node.value.keys if isinstance(x, ast.Constant) and isinstance(x.value, str)]
    return tuple(names)


def recipes(incomplete: str) -> list[str]:
    """Recipes, and tasks, whose name means their first recipe."""
    from kernelformer.recipes.catalogue import RECIPES

    return _starting(incomplete, (*RECIPES, *(x.task for x in RECIPES.values())))


def attentions(incomplete: str) -> list[str]:
    """Names of methods; after a comma further ones."""
    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{x}" for x in _starting(last, method_names())]


def items(incomplete: str) -> list[str]:
    """Items of ``kernelformer reproduce``."""
    from kernelformer.evidence.items import ITEMS

    return _starting(incomplete, ITEMS)


def listed(incomplete: str) -> list[str]:
    """What ``kernelformer list`` takes."""
    return _starting(incomplete, ("methods", "tasks", "recipes", *method_names(), *recipes("")))


def one_of(*names: str) -> Complete:
    """A fixed choice; after a comma further ones."""

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        return [f"{before}{comma}{x}" for x in _starting(last, names)]

    return complete


# By the name of the option: what an option is called says what it takes, in every command.
COMPLETIONS: dict[str, Complete] = {
    "attention": attentions,
    "baselines": one_of("sdpa", "eager"),
    "bias": one_of("none", "full", "window"),
    "heap": one_of("default", "kept"),
    "heaps": one_of("default", "kept"),
    "modes": one_of("bidirectional", "causal", "decode"),
    "passes": one_of("forward", "train"),
    "recipe": recipes,
    "sizes": one_of("regular", "small", "arena"),
    "task": one_of("auto", "encoder", "masked", "causal", "seq2seq"),
}


def _starting(incomplete: str, names: Iterable[str]) -> list[str]:
    return sorted({x for x in names if x.startswith(incomplete)})
