"""Data sets and their metrics, one file a task."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernelformer.lazy import lazy_names, require_extra

if TYPE_CHECKING:
    from kernelformer.data.sources import SPLITS
    from kernelformer.tasks.base import Task
    from kernelformer.tasks.catalogue import TASKS, make_task, task_options

__all__ = ["SPLITS", "TASKS", "Task", "make_task", "task_options"]

require_extra(__name__)
__getattr__, __dir__ = lazy_names(
    __name__,
    {"SPLITS": "kernelformer.data.sources", "Task": f"{__name__}.base"}
    | dict.fromkeys(("TASKS", "make_task", "task_options"), f"{__name__}.catalogue"),
)
