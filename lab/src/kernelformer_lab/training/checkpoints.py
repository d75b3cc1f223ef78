"""Folders of a run that are whole or not there, and several processes that agree about them."""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from accelerate.utils import broadcast_object_list, gather_object  # type: ignore[import-untyped]
from safetensors import SafetensorError
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints

from kernelformer.errors import TrainingError, reason
from kernelformer.files import PART, naming_full_disk, sync, write_text
from kernelformer_lab.records import METRICS, RUN, read_metrics, resume_command
from kernelformer_lab.training.config import everywhere

T = TypeVar("T")
_locks: set[int] = set()  # handles of folders that this process has locked
STAGE = PART  # the folder in which others grow until they are whole; no checkpoint by Hugging Face's pattern
DAMAGED = "damaged-"  # before the name of a checkpoint that was found so
WRITING = (OSError, SafetensorError, RuntimeError)  # how the disk, safetensors and torch.save say that they cannot


def publish(staged: Path, final: Path) -> None:
    """Give a folder its name once all of it is on the disk."""
    for path in staged.rglob("*"):
        sync(path)
    sync(staged)
    if final.exists():  # an earlier one of the same name goes only when its successor is whole
        final.rename(staged.parent / f"{final.name}.old")
    staged.rename(final)
    sync(final.parent)
    shutil.rmtree(staged.parent, ignore_errors=True)


def clear(folder: Path) -> None:
    """Remove what a killed process left unfinished."""
    shutil.rmtree(folder / STAGE, ignore_errors=True)
    for part in folder.glob(f".*{PART}"):
        part.unlink(missing_ok=True)


def rotate(folder: Path, keep: int) -> None:
    """Remove all checkpoints but the newest ``keep``."""
    rotate_checkpoints(output_dir=str(folder), save_total_limit=keep)


def checkpoints_of(folder: Path) -> list[tuple[Path, int]]:
    """All checkpoints with their steps, the newest first."""
    named = [(path, re.fullmatch(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)", path.name)) for path in folder.glob("*")]
    steps = [(path, int(match[1])) for path, match in named if match and path.is_dir()]
    return sorted(steps, key=lambda x: x[1], reverse=True)


def checkpoint_of(folder: Path) -> tuple[Path | None, int]:
    """The newest checkpoint and its step, or None and 0."""
    return next(iter(checkpoints_of(folder)), (None, 0))


def set_aside(folder: Path, step: int) -> None:
    """Rename the checkpoints after ``step``, which cannot be used: they would count as the newest ones."""
    for path, number in checkpoints_of(folder):
        if number > step:
            aside = folder / f"{DAMAGED}{path.name}"
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)


def cannot_write(folder: Path, why: str) -> TrainingError:
    """The error for a folder or disk that does not take the run."""
    if not os.path.exists(folder / RUN):  # not Path.exists, which raises where it may not look
        return TrainingError(f"cannot write to {folder}: {why}; nothing was saved. Make room, or take another folder.")
    return TrainingError(
        f"cannot save the run in {folder}: {why}. Earlier checkpoints are as they were; when there is room and "
        f"permission, go on with {resume_command(folder)}."
    )


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turn errors of writing into that of `cannot_write`."""
    try:
        with naming_full_disk(folder):
            yield
    except (OSError, SafetensorError) as problem:
        raise cannot_write(folder, reason(problem)) from None


def metrics(folder: Path) -> list[dict[str, Any]]:
    """All whole lines of ``metrics.jsonl``; none where there is no such file."""
    return list(read_metrics(folder)) if (folder / METRICS).exists() else []


def cut_metrics(folder: Path, step: int) -> None:
    """Leave out what came after ``step``: the run will say it again."""
    kept = [json.dumps(line) + "\n" for line in metrics(folder) if line["step"] <= step]
    write_text(folder / METRICS, "".join(kept))


@contextmanager
def locked(folder: Path, doing: str = "is training in") -> Iterator[None]:
    """Keep other processes from writing to the folder meanwhile; the system lets go when the process ends.

    Processes that are forked meanwhile, as those that get batches ready, have no part in the lock: they live on for
    seconds after this one was killed, and its successor is not to wait for them.

    If nothing was written meanwhile, neither the lock nor a folder that was made for it stays.

    Args:
        doing: what the other process does there, for the error.
    """
    new, lock = [x for x in (folder, *folder.parents) if not os.path.exists(x)], folder / ".lock"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(lock, os.O_CREAT | os.O_RDWR)
    except OSError as problem:
        raise cannot_write(folder, reason(problem)) from None
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            ours = os.path.samestat(os.fstat(handle), lock.stat())  # not one that another process has just removed
        except OSError:
            ours = False
        if not ours:
            raise TrainingError(f"another process {doing} {folder}; wait for it, or take another folder.")
        _locks.add(handle)
        yield
    finally:
        with suppress(OSError):
            if handle in _locks and os.listdir(folder) == [lock.name]:
                lock.unlink()
                for path in new:
                    path.rmdir()
        _locks.discard(handle)
        os.close(handle)


def _leave_locks() -> None:
    """Close the copies of handles that a forked process was born with; the lock stays its parent's."""
    for handle in _locks:
        os.close(handle)
    _locks.clear()


os.register_at_fork(after_in_child=_leave_locks)


def main_does(main: bool, folder: Path, action: Callable[[], T]) -> T:
    """Do it with the folder on the main process alone; all processes get what it returns, or raises."""
    outcome: list[Any] = [None, None]
    if main:
        try:
            with naming_full_disk(folder):
                outcome[0] = action()
        except (TrainingError, ValueError) as problem:
            outcome[1] = everywhere(problem)
        except (OSError, SafetensorError) as problem:
            clear(folder)
            outcome[1] = everywhere(cannot_write(folder, reason(problem)))
    broadcast_object_list(outcome)
    if outcome[1] is not None:
        raise outcome[1]
    result: T = outcome[0]
    return result


def first_problem(problem: str) -> str:
    """Share the first problem of any process with all of them; empty if there is none."""
    return next((text for text in gather_object([problem]) if text), "")


def finite(loss: object) -> bool:
    """Return True for a finite number."""
    return isinstance(loss, int | float) and math.isfinite(loss)
