"""What a folder holds already: which run, on which data, and whether its checkpoint is whole."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from kernelformer.records import METRICS, RESULT, RUN, Result, read_head, read_result, reading
from kernelformer.training.checkpoints import checkpoint_of, metrics
from kernelformer.training.meter import Meter
from kernelformer.training.run import Run, TrainingError

# How files say that they are not what they should be: the system, JSON, zip archives, safetensors, torch.
DAMAGE = (OSError, ValueError, KeyError, TypeError, EOFError, RuntimeError, zipfile.BadZipFile, SafetensorError)


def saved_run(folder: Path) -> tuple[Run, dict[str, Any]]:
    """The settings of the run in a folder, and all that ``run.json`` says."""
    check_run_folder(folder)
    head = read_head(folder)
    with reading(folder / RUN):
        return Run.from_json(head["run"]), head


def check_run_folder(folder: Path) -> None:
    """Raise if this cannot be the folder of a run: there is none, or it holds several, as that of a comparison."""
    if not folder.is_dir():
        kind = "it is a file" if folder.exists() else "there is no such folder"
        raise ValueError(f"{folder} is not the folder of a run: {kind}; `kernelformer train` makes one.")
    runs = sorted(x.parent.name for x in folder.glob(f"*/{RUN}"))
    if runs and not (folder / RUN).exists():
        more = f" and {len(runs) - 5} more" if len(runs) > 5 else ""
        raise ValueError(
            f"{folder} holds several runs, as the folder of a comparison does; give one of them: "
            f"{', '.join(str(folder / x) for x in runs[:5])}{more}."
        )


def examine(
    run: Run,
    folder: Path,
    resume: bool,
    data: Callable[[], str],
    start: Callable[[], str | None] = lambda: None,
) -> tuple[Result | None, Path | None, int]:
    """What there is already: the result of a finished run, or the checkpoint to go on from and its step.

    Args:
        run: what is to be trained.
        folder: its place.
        resume: whether to go on with what is there.
        data: gives the fingerprint of the task, which a finished run does not need.
        start: gives the hash of the weights to start from, which a run with a checkpoint does not need.

    Raises:
        TrainingError: there is a run, but nobody asked to resume it, or it is another one, or it is damaged.
    """
    checkpoint, step = checkpoint_of(folder)
    finished, lines = (folder / RESULT).exists(), folder / METRICS
    if not (checkpoint or finished or (lines.exists() and lines.stat().st_size)):
        return None, None, 0
    if not resume:
        raise TrainingError(
            f"{folder} holds a run already, {'finished' if finished else f'saved at step {step}'}; go on with resume, "
            f"or take another folder."
        )
    check_same(run, folder, None if finished else data())
    if finished:
        return read_result(folder), checkpoint, step
    if checkpoint is not None:
        check_checkpoint(checkpoint, step)
    else:
        _check_start(run, folder, start())
    metrics(folder)
    return None, checkpoint, step


def check_same(run: Run, folder: Path, data: str | None) -> None:
    """Raise if the run in a folder is not this one, or not on this data (None: whatever it was)."""
    other, head = saved_run(folder)
    different = other.differences(run)
    if different:
        raise TrainingError(
            f"{folder} holds a run with other settings, there and here: {'; '.join(different)}. Take the same "
            f"settings, or another folder."
        )
    before = head.get("data")  # older runs did not say
    if data is not None and before is not None and before != data:
        raise TrainingError(
            f"{folder} holds a run on other data of task {run.task!r}: {before}, now {data}. Bring the data back, or "
            f"take another folder."
        )


def _check_start(run: Run, folder: Path, now: str | None) -> None:
    """Raise if the run in a folder has started from other weights than there are now."""
    before = read_head(folder).get("start")  # older runs did not say
    if before not in (None, now):
        raise TrainingError(
            f"{folder} holds a run that started from other weights than {run.start} has: {before}, now {now}. "
            f"Bring them back, or take another folder."
        )


@contextmanager
def whole(file: Path) -> Iterator[None]:
    """Whatever is wrong with a checkpoint's file in here is said with its name and the way out."""
    try:
        yield
    except DAMAGE as problem:
        folder = file.parent
        others = [x for x in folder.parent.glob("checkpoint-*") if x != folder]
        rest = "goes on from the checkpoint before it" if others else "starts again"
        raise TrainingError(f"{file} is damaged: {_why(problem)}; remove {folder}, and the run {rest}.") from None


def _why(problem: BaseException) -> str:
    """In one line."""
    if isinstance(problem, FileNotFoundError):
        return "it is missing"
    text = " ".join(str(problem).split())[:200].rstrip(".")
    return f"it has no {text}" if isinstance(problem, KeyError) else text or type(problem).__name__


def check_checkpoint(folder: Path, step: int) -> None:
    """Raise if a file is missing or cut off: the trainer would stop half way, or go on without it."""
    weights = SAFE_WEIGHTS_INDEX_NAME if (folder / SAFE_WEIGHTS_INDEX_NAME).exists() else SAFE_WEIGHTS_NAME
    numbers = sorted(x.name for x in folder.glob("rng_state*.pth")) or ["rng_state.pth"]
    for name in (TRAINER_STATE_NAME, weights, OPTIMIZER_NAME, SCHEDULER_NAME, *numbers):
        with whole(folder / name):
            _check(folder / name, step)


def _check(file: Path, step: int) -> None:
    if file.suffix == ".safetensors":
        with safe_open(file, framework="pt"):
            return
    if file.suffix == ".json":
        state = json.loads(file.read_bytes())
        if file.name == TRAINER_STATE_NAME:
            if state["global_step"] != step:
                raise ValueError(f"it says global_step {state['global_step']}, in the folder of step {step}")
            state["stateful_callbacks"][Meter.__name__]["attributes"]
        return
    with zipfile.ZipFile(file) as archive:  # as torch.save writes
        broken = archive.testzip()
    if broken is not None:
        raise ValueError(f"{broken} in it has another checksum")
