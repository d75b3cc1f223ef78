"""All tasks by name, and their options."""

from __future__ import annotations

import inspect
import typing
from dataclasses import is_dataclass
from typing import Any

from kernelformer.errors import choice, unknown
from kernelformer_lab.tasks.base import Task
from kernelformer_lab.tasks.bytes import Bytes
from kernelformer_lab.tasks.images import Grey, Images, Pixels
from kernelformer_lab.tasks.listops import ListOps
from kernelformer_lab.tasks.masked import Masked
from kernelformer_lab.tasks.pathfinder import Pathfinder
from kernelformer_lab.tasks.proteins import MaskedProteins, Proteins
from kernelformer_lab.tasks.recall import Recall
from kernelformer_lab.tasks.retrieval import Retrieval
from kernelformer_lab.tasks.sentences import Sentences
from kernelformer_lab.tasks.series import RealSeries
from kernelformer_lab.tasks.shards import Shards
from kernelformer_lab.tasks.sparsity import Sparsity
from kernelformer_lab.tasks.text import Text
from kernelformer_lab.tasks.translation import Translation
from kernelformer_lab.tasks.words import Words

TASKS: dict[str, type[Task]] = {
    task.name: task
    for task in (
        Bytes,
        Grey,
        Images,
        ListOps,
        Masked,
        MaskedProteins,
        Pathfinder,
        Pixels,
        Proteins,
        Recall,
        Retrieval,
        Sentences,
        RealSeries,
        Shards,
        Sparsity,
        Text,
        Translation,
        Words,
    )
}


def task_options(name: str) -> list[str]:
    """The options that `make_task` takes for a task."""
    make = TASKS[choice("task", name, TASKS)]
    return sorted(inspect.signature(make).parameters)


def option_types(name: str) -> dict[str, Any]:
    """The declared types of a task's options, by name."""
    make = TASKS[choice("task", name, TASKS)]
    # Inherited fields of a dataclass are declared in other modules, whose names its constructor does not know.
    types = typing.get_type_hints(make if is_dataclass(make) else make.__init__)
    return {option: types[option] for option in task_options(name) if option in types}


def make_task(name: str, **options: Any) -> Task:
    """Make a task by its name.

    Args:
        name: of `TASKS`.
        options: by task; `task_options` lists them, the task's class and `tasks.base` explain them.

    Raises:
        ValueError: unknown task or option, with the known ones.
    """
    known = task_options(name)
    for option in options:
        if option not in known:
            raise unknown(f"option for task {name!r},", option, known)
    return TASKS[name](**options)
