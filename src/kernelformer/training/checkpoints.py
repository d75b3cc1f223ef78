"""Files of a run that are whole or not there: a process may be killed at any moment, and a disk may be full."""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from accelerate.utils import broadcast_object_list, gather_object  # type: ignore[import-untyped]
from safetensors import SafetensorError
from transformers.trainer_utils import get_last_checkpoint, rotate_checkpoints

from kernelformer.training.run import Result, Run, TrainingError

T = TypeVar("T")
STAGE = ".partial"  # where files grow until they are whole; no checkpoint by Hugging Face's pattern
RUN, METRICS, RESULT, MODEL = "run.json", "metrics.jsonl", "result.json", "model"
WRITING = (OSError, SafetensorError, RuntimeError)  # how the disk, safetensors and torch.save say that they cannot


def write_json(path: Path, record: Mapping[str, Any]) -> None:
    """Write all or nothing."""
    replace_text(path, json.dumps(record, indent=2) + "\n")


def replace_text(path: Path, text: str) -> None:
    """Write all or nothing."""
    part = path.with_name(f".{path.name}{STAGE}")
    try:
        with part.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise
    _sync(path.parent)


def publish(staged: Path, final: Path) -> None:
    """Give a folder its name once all of it is on the disk."""
    for path in staged.rglob("*"):
        _sync(path)
    _sync(staged)
    if final.exists():  # an earlier one of the same name goes only when its successor is whole
        final.rename(staged.parent / f"{final.name}.old")
    staged.rename(final)
    _sync(final.parent)
    shutil.rmtree(staged.parent, ignore_errors=True)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def clear(folder: Path) -> None:
    """Remove what a killed process left unfinished."""
    shutil.rmtree(folder / STAGE, ignore_errors=True)
    for part in folder.glob(f".*.json*{STAGE}"):
        part.unlink(missing_ok=True)


def rotate(folder: Path, keep: int) -> None:
    """Remove all checkpoints but the newest ``keep``."""
    rotate_checkpoints(output_dir=str(folder), save_total_limit=keep)


def checkpoint_of(folder: Path) -> tuple[Path | None, int]:
    """The newest checkpoint and its step, or None and 0."""
    found = get_last_checkpoint(str(folder)) if folder.is_dir() else None
    if found is None:
        return None, 0
    return Path(found), int(re.findall(r"\d+", Path(found).name)[0])


def reason(problem: BaseException) -> str:
    """Why writing failed, in one line."""
    if isinstance(problem, OSError) and problem.strerror:
        return problem.strerror
    return (str(problem).strip().splitlines() or [type(problem).__name__])[0]


def cannot_write(folder: Path, why: str) -> TrainingError:
    """The error for a folder or disk that does not take the run."""
    return TrainingError(
        f"cannot save the run in {folder}: {why}. Earlier checkpoints are as they were; when there is room and "
        f"permission, go on with resume."
    )


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """What the disk does not take in here is said as `cannot_write` does."""
    try:
        yield
    except (OSError, SafetensorError) as problem:
        raise cannot_write(folder, reason(problem)) from None


def read_json(path: Path) -> dict[str, Any]:
    """A file of a run."""
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except OSError as problem:
        raise TrainingError(f"cannot read {path}: {reason(problem)}.") from None
    except ValueError as problem:
        raise TrainingError(f"{path} is not JSON: {problem}; take another folder.") from None
    return found


def metrics(folder: Path) -> list[dict[str, Any]]:
    """All whole lines of ``metrics.jsonl``."""
    path = folder / METRICS
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def cut_metrics(folder: Path, step: int) -> None:
    """Leave out what came after ``step``: the run will say it again."""
    kept = [json.dumps(line) + "\n" for line in metrics(folder) if line["step"] <= step]
    replace_text(folder / METRICS, "".join(kept))


def examine(run: Run, folder: Path, resume: bool) -> tuple[Result | None, Path | None, int]:
    """What there is already: the result of a finished run, or the checkpoint to go on from and its step.

    Raises:
        TrainingError: there is a run, but nobody asked to resume it, or it is another one.
    """
    checkpoint, step = checkpoint_of(folder)
    finished = folder / RESULT
    if not (checkpoint or finished.exists() or metrics(folder)):
        return None, None, 0
    if not resume:
        raise TrainingError(
            f"{folder} holds a run already, {'finished' if finished.exists() else f'saved at step {step}'}; go on with "
            f"resume, or take another folder."
        )
    other = Run.from_json(read_json(folder / RUN)["run"])
    different = other.differences(run)
    if different:
        raise TrainingError(
            f"{folder} holds a run with other settings, there and here: {'; '.join(different)}. Take the same "
            f"settings, or another folder."
        )
    return (Result.from_json(read_json(finished)) if finished.exists() else None), checkpoint, step


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other processes from writing to the folder meanwhile; the system lets go when the process ends."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / ".lock", os.O_CREAT | os.O_RDWR)
    except OSError as problem:
        raise cannot_write(folder, reason(problem)) from None
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise TrainingError(
                f"another process is training in {folder}; wait for it, or take another folder."
            ) from None
        yield
    finally:
        os.close(handle)


def main_does(main: bool, folder: Path, action: Callable[[], T]) -> T:
    """Do it with the folder on the main process alone; all processes get what it returns, or raises."""
    outcome: list[Any] = [None, None]
    if main:
        try:
            outcome[0] = action()
        except (TrainingError, ValueError) as problem:
            outcome[1] = problem
        except (OSError, SafetensorError) as problem:
            clear(folder)
            outcome[1] = cannot_write(folder, reason(problem))
    broadcast_object_list(outcome)
    if outcome[1] is not None:
        raise outcome[1]
    result: T = outcome[0]
    return result


def first_problem(problem: str) -> str:
    """What went wrong on any process, on all of them; empty if nothing did."""
    return next((text for text in gather_object([problem]) if text), "")


def finite(loss: object) -> bool:
    """Whether a loss is a number one can go on from."""
    return isinstance(loss, int | float) and math.isfinite(loss)
