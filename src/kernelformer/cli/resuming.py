"""Resume what a folder holds, which is given in place of a recipe: ``kernelformer train out/x --resume``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from kernelformer.commands import resume_command, typed
from kernelformer.recipes.catalogue import RECIPES, change, recipes_of
from kernelformer.records import PLAN, RUN

if TYPE_CHECKING:
    from kernelformer.pipelines.compare import Plan
    from kernelformer.training.config import Run

Command = Literal["train", "compare"]
FILES: dict[Command, tuple[str, str]] = {"train": (RUN, "run"), "compare": (PLAN, "comparison")}


def goes_on() -> str:
    """Sentence for Ctrl-C on a command that continues from what it has saved."""
    return f"{typed()} goes on from there"


def next_command(folder: Path, command: Command = "train") -> str:
    """Sentence for Ctrl-C on a run or comparison: how to resume it, if it has begun."""
    begun = (folder / FILES[command][0]).is_file()
    return f"go on with {resume_command(folder, command)}" if begun else f"{typed()} starts anew"


def saved_folder(name: str, resume: bool, command: Command) -> Path | None:
    """The folder that is given in the place of a recipe, or None: a name of a recipe or of a task means that.

    Raises:
        ValueError: it holds nothing that the command could go on with, or --resume was not asked for.
    """
    folder, (file, kind) = Path(name), FILES[command]
    path = os.sep in name
    if name in RECIPES or recipes_of(name) or not (path or (folder / file).is_file()):
        return None
    if not (folder / file).is_file():
        for other, (theirs, their_kind) in FILES.items():
            if (folder / theirs).is_file():
                raise ValueError(f"{folder} holds a {their_kind}; go on with {resume_command(folder, other)}.")
        lacks = f"it has no {file}" if folder.is_dir() else "there is no such folder"
        raise ValueError(
            f"{folder} is neither a recipe nor the folder of a {kind}: {lacks}; give the recipe and its options, with "
            f"--out {folder}."
        )
    if not resume:
        raise ValueError(f"{folder} holds a {kind} already; go on with {resume_command(folder, command)}.")
    return folder


def refuse_options(folder: Path, given: Mapping[str, Any]) -> None:
    """Raise for an option that was given, not None, although what is in the folder has it already."""
    for option, value in given.items():
        if value is not None:
            raise ValueError(
                f"what is in {folder} has its settings, got --{option} {value} too; leave it out, or train anew in "
                f"another folder."
            )


def saved_settings(folder: Path) -> tuple[Run, int | None]:
    """The run in a folder and its threads; training refuses options that contradict it."""
    from kernelformer.training.inspection import saved_run

    run, head = saved_run(folder)
    threads = head["environment"].get("threads")
    return run, threads if isinstance(threads, int) and threads > 0 else None


def saved_plan(folder: Path, steps: int | None) -> tuple[Plan, int]:
    """The comparison in a folder, made longer if ``steps`` says so, and its threads."""
    from dataclasses import replace

    from kernelformer.pipelines.compare import read_plan

    plan, threads = read_plan(folder)
    return plan if steps is None else replace(plan, runs=[change(x, {"steps": steps}) for x in plan.runs]), threads
