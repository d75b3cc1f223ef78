"""Data sets and their metrics, one file a task."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernelformer.lazy import lazy_names

if TYPE_CHECKING:
    from kernelformer_lab.data.sources import SPLITS
    from kernelformer_lab.tasks.base import Task
    from kernelformer_lab.tasks.catalogue import TASKS, make_task, task_options

__all__ = ["SPLITS", "TASKS", "Task", "make_task", "task_options"]

__getattr__, __dir__ = lazy_names(
    __name__,
    {"SPLITS": "kernelformer_lab.data.sources", "Task": f"{__name__}.base"}
    | dict.fromkeys(("TASKS", "make_task", "task_options"), f"{__name__}.catalogue"),
)
