"""Settings of a run from the command line: ``--set name=value``, read as the setting is declared, and --attention."""

from __future__ import annotations

import ast
import inspect
import os
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from kernelformer.settings import split_names
from kernelformer_lab.recipes.papers.base import Recipe
from kernelformer_lab.training.config import OWN, Run, attention_settings

_NOTHING = object()  # a text that is no Python literal
_QUOTES = ("'", '"')
# Settings that are paths.
PATHS = ("task.data", "task.test_file", "task.tokenizer", "task.cache", "start")


def read_value(name: str, text: str, task: str | None = None) -> Any:
    """Read a text as the value of a setting: if the setting is a string, the text stays as it is.

    Args:
        name: of a `Run`, ``model.NAME`` or ``task.NAME``; an unknown one is read as Python would.
        text: as given; none and null are None for settings that may be None, quotes make a string of anything.
        task: whose options ``task.NAME`` are.
    """
    declared = _declared(name, task)
    return _as_python(text, name) if declared is None else _read(text, declared)


def _declared(name: str, task: str | None) -> Any:
    """The annotation of a setting, or None where there is none."""
    head, dot, rest = name.partition(".")
    if not dot:
        return typing.get_type_hints(Run).get(name)
    if head == "task" and task is not None:
        from kernelformer_lab.tasks.catalogue import option_types

        return option_types(task).get(rest)
    if head == "model":
        import inspect

        from kernelformer.models.config import KernelformerConfig

        return inspect.get_annotations(KernelformerConfig, eval_str=True).get(rest)
    return None


def _kinds(declared: Any) -> list[Any]:
    """The members of a union; anything else alone."""
    if typing.get_origin(declared) in (typing.Union, types.UnionType):
        return [kind for part in typing.get_args(declared) for kind in _kinds(part)]
    return [declared]


def _read(text: str, declared: Any) -> Any:
    kinds = _kinds(declared)
    origins = [typing.get_origin(x) or x for x in kinds]
    word = text.strip().lower()
    if type(None) in kinds and word in ("none", "null"):
        return None
    if bool in kinds and word in ("true", "false"):
        return word == "true"
    literal = _literal(text)
    if isinstance(literal, str):
        return literal
    if (int in kinds or float in kinds) and isinstance(literal, int | float) and not isinstance(literal, bool):
        return literal
    for kind, origin in zip(kinds, origins, strict=True):
        if origin in (list, tuple, Sequence) and word.startswith(("[", "(")):
            return _read_list(text.strip(), kind, literal)
    if str in kinds or os.PathLike in origins:
        return text
    return text if literal is _NOTHING else literal  # what is wrong with it, the setting says itself


def _read_list(text: str, kind: Any, literal: Any) -> Any:
    """Items as they are declared, without quotes where they are plain words."""
    inside = text[1:-1]
    if any(x in inside for x in (*_QUOTES, "[", "(")) or text[-1] not in "])":
        return text if literal is _NOTHING else literal
    item = (typing.get_args(kind) or (Any,))[0]
    parts = [x.strip() for x in inside.split(",") if x.strip()]
    return [_as_python(x) if item is Any else _read(x, item) for x in parts]


def _as_python(text: str, name: str = "") -> Any:
    """A literal, true and false too, and none where it is not a word of the model's; else the text."""
    plain = {"true": True, "false": False} | ({} if name.startswith("model.") else {"none": None})
    if text.lower() in plain:
        return plain[text.lower()]
    literal = _literal(text)
    return text if literal is _NOTHING else literal


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return _NOTHING


def read_settings(sets: Sequence[str] | None, task: str | None = None, **options: Any) -> dict[str, Any]:
    """Settings of a run by name: those of --set, and those that have options of their own; none twice.

    Args:
        sets: texts name=value.
        task: of the run, which declares what its options are.
        options: values of --steps, --seed, ... by these names; None: not given.
    """
    settings: dict[str, Any] = {}
    for text in sets or ():
        name, sign, value = text.partition("=")
        if not sign:
            raise ValueError(f"--set takes name=value, got {text!r}.")
        if name in settings:
            raise ValueError(f"{name} is set twice, to {settings[name]!r} and {value!r}; give it once.")
        settings[name] = read_value(name, value, task)
    for option, value in options.items():
        name = f"task.{option}" if option in ("data", "length", "skip_bad") else option
        if value is not None and name in settings:
            by = "attention" if option == "decoder_attention" else option  # which is said by A > B
            raise ValueError(f"{name} is given by --{by} and by --set, {value} and {settings[name]!r}; give it once.")
        if value is not None:
            settings[name] = value
    for name in PATHS:
        if isinstance(settings.get(name), str | Path):
            settings[name] = _absolute_path(str(settings[name]))
    return settings


def describe_changes(settings: Mapping[str, Any]) -> str:
    """A sentence with the settings that replace a recipe's, for beside its note; paths are not told."""
    own = [f"{name}={value}" for name, value in settings.items() if name not in PATHS]
    return f"Changed here: {', '.join(own)}." if own else ""


def _absolute_path(text: str) -> str:
    """The absolute path of a file or folder, so that a run finds it from anywhere; a name on the hub stays as it is."""
    from kernelformer_lab.data.sources import HUB

    hub, path = (HUB, text.removeprefix(HUB)) if text.startswith(HUB) else ("", text)
    whole = os.path.abspath(os.path.expanduser(path))
    return text if hub and not os.path.exists(whole) else hub + whole


def read_attention(text: str) -> dict[str, Any]:
    """Settings of a run for ``A`` or ``A > B``; several attentions separated by commas are one for each block."""
    sides = {name: split_names(x) for name, x in attention_settings(text).items() if x is not None}
    return {name: specs[0] if len(specs) == 1 else specs for name, specs in sides.items()}


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
    """Settings that differ from their defaults: by the recipe, or for the model by the task."""
    from kernelformer_lab.tasks import make_task

    own = {x.name: getattr(run, x.name) for x in fields(Run) if x.name not in ("model", "task_options")}
    chosen = {x.name: own[x.name] for x in fields(Run) if x.name in own and own[x.name] != x.default}
    asked = {**make_task(run.task, **run.task_options).settings(), **run.model}
    return {**chosen, **_named("task", run.task_options), **_named("model", asked)}


def _values(run: Run) -> dict[str, Any]:
    from kernelformer.models import KernelformerConfig
    from kernelformer_lab.tasks import TASKS

    own = {x.name: getattr(run, x.name) for x in fields(Run) if x.name not in ("model", "task_options")}
    options = inspect.signature(TASKS[run.task]).parameters.values()
    task = {x.name: UNSET if x.default is inspect.Parameter.empty else x.default for x in options}
    names = [x for x in KernelformerConfig.__annotations__ if x not in (*OWN, "model_type")]
    config = {x.name: x.default for x in fields(KernelformerConfig) if x.name in names and x.default is not MISSING}
    return {**own, **_named("task", task), **_named("model", config), **_given(run)}
