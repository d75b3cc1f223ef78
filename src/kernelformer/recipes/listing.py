"""Every setting of a recipe, those that it leaves at their defaults too."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

from kernelformer.recipes.papers.base import Recipe
from kernelformer.training.config import OWN, Run

UNSET = "-"  # an option without a default that the recipe leaves to the user


def recipe_settings(recipe: Recipe) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Settings by the names that ``--set`` takes, with a text for each size.

    Returns:
        Those that the recipe or its task sets in one of its sizes, and those that have their defaults in all.
    """
    values = [_values(recipe.run(size)) for size in recipe.sizes]
    given = [_given(recipe.run(size)) for size in recipe.sizes]
    chosen: dict[str, list[str]] = {}
    default: dict[str, list[str]] = {}
    for name in sorted(set().union(*values), key=lambda x: (x.count("."), x)):
        group = chosen if any(name in x for x in given) else default
        group[name] = [_text(x.get(name, UNSET)) for x in values]
    return chosen, default


def _text(value: object) -> str:
    return value if isinstance(value, str) else repr(value)


def _named(head: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{head}.{name}": value for name, value in settings.items()}


def _given(run: Run) -> dict[str, Any]:
    """What is not left at its default: by the recipe, or for the model by the task."""
    from kernelformer.tasks import make_task

    own = {x.name: getattr(run, x.name) for x in fields(Run) if x.name not in ("model", "task_options")}
    chosen = {x.name: own[x.name] for x in fields(Run) if x.name in own and own[x.name] != x.default}
    asked = {**make_task(run.task, **run.task_options).settings(), **run.model}
    return {**chosen, **_named("task", run.task_options), **_named("model", asked)}


def _values(run: Run) -> dict[str, Any]:
    from kernelformer.models import KernelformerConfig
    from kernelformer.tasks import TASKS

    own = {x.name: getattr(run, x.name) for x in fields(Run) if x.name not in ("model", "task_options")}
    options = inspect.signature(TASKS[run.task]).parameters.values()
    task = {x.name: UNSET if x.default is inspect.Parameter.empty else x.default for x in options}
    names = [x for x in KernelformerConfig.__annotations__ if x not in (*OWN, "model_type")]
    config = {x.name: x.default for x in fields(KernelformerConfig) if x.name in names and x.default is not MISSING}
    return {**own, **_named("task", task), **_named("model", config), **_given(run)}
