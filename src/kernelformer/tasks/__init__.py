"""Data sets and their metrics, one file a task."""

from __future__ import annotations

import inspect
from typing import Any

from kernelformer.errors import choice, unknown
from kernelformer.tasks.base import SPLITS, Task
from kernelformer.tasks.bytes import Bytes
from kernelformer.tasks.listops import ListOps

TASKS: dict[str, type[Task]] = {task.name: task for task in (Bytes, ListOps)}

__all__ = ["SPLITS", "TASKS", "Task", "make_task", "task_options"]


def task_options(name: str) -> list[str]:
    """The options that `make_task` takes for a task."""
    make = TASKS[choice("task", name, TASKS)]
    return sorted(inspect.signature(make).parameters)


def make_task(name: str, **options: Any) -> Task:
    """Make a task by its name.

    Args:
        name: of `TASKS`.
        options: by task; `task_options` lists them, and the task's class explains them.

    Raises:
        ValueError: unknown task or option, with the known ones.
    """
    known = task_options(name)
    for option in options:
        if option not in known:
            raise unknown(f"option for task {name!r},", option, known)
    return TASKS[name](**options)
