"""Inspection of a run folder: its run, its data, and its checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_pt_utils import safe_globals
from transformers.utils import SAFE_WEIGHTS_NAME

from kernelformer.errors import TrainingError
from kernelformer.files import HASHES, check_archive, check_hash, check_regular, read_hashes, read_json
from kernelformer.models.saved import DAMAGE
from kernelformer.modules.spec import parse_attention
from kernelformer.weight_headers import check_contained, check_sizes, weight_files
from kernelformer_lab.records import METRICS, RESULT, RUN, Result, read_head, read_result, reading, resume_command
from kernelformer_lab.training.checkpoints import DAMAGED, checkpoint_of, checkpoints_of, metrics
from kernelformer_lab.training.config import Run
from kernelformer_lab.training.meter import Meter
from kernelformer_lab.training.selection import check_best

# What the trainer takes from its files; of random numbers there is one file for each process.
PARTS: dict[str, dict[str, type]] = {
    OPTIMIZER_NAME: {"state": dict, "param_groups": list},
    SCHEDULER_NAME: {"last_epoch": int},
    "rng_state*.pth": {"python": tuple, "numpy": tuple, "cpu": torch.Tensor},
}


class DamagedError(TrainingError):
    """A checkpoint that cannot be used.

    Args:
        fact: which file, and what is wrong with it.
    """

    def __init__(self, fact: str, way: str) -> None:
        super().__init__(f"{fact}; {way}.")
        self.fact = fact


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
    run: Run, folder: Path, resume: bool, data: Callable[[], str], start: Callable[[], str | None] = lambda: None
) -> tuple[Result | None, Path | None, int, list[str]]:
    """Return the result of a finished run, or the checkpoint to resume from, its step, and remarks.

    Args:
        resume: whether to resume what is there.
        data: gives the fingerprint of the task, which a finished run does not need.
        start: gives the hash of the weights to start from, which a run with a checkpoint does not need.

    Raises:
        TrainingError: there is a run that was not to be resumed, or is another one, or is damaged.
    """
    checkpoint, step = checkpoint_of(folder)
    finished, lines = (folder / RESULT).exists(), folder / METRICS
    if not (checkpoint or finished or (lines.exists() and lines.stat().st_size)):
        return None, None, 0, []
    if not resume:
        state, way = f"saved at step {step}", f"go on with {resume_command(folder)}"
        if finished:
            state, way = "finished", f"make it longer with {resume_command(folder, more='--steps MORE')}"
        raise TrainingError(f"{folder} holds a run already, {state}; {way}, or take another folder.")
    result = read_result(folder) if finished else None
    done = result is not None and (result.diverged or result.steps >= run.steps)
    check_same(run, folder, None if done else data())
    if done:
        return result, checkpoint, step, []
    if result is not None and checkpoint is None:
        raise TrainingError(
            f"{folder} is finished after {result.steps} steps, and no checkpoint is left to go on from to {run.steps}; "
            f"train anew in another folder."
        )
    remarks: list[str] = []
    if checkpoint is not None:
        checkpoint, step, remarks = newest_whole(folder)
        with reading(folder / RUN):  # before features are drawn that the checkpoint cannot have
            check_sizes([parse_attention(x)[1] for x in run.specs], weight_files(checkpoint))
    else:
        _check_start(run, folder, start())
    metrics(folder)
    return None, checkpoint, step, remarks


def newest_whole(folder: Path) -> tuple[Path, int, list[str]]:
    """The newest checkpoint that can be used, its step, and what is wrong with those after it.

    Raises:
        DamagedError: there is none.
    """
    damaged: list[tuple[Path, DamagedError]] = []
    for checkpoint, step in checkpoints_of(folder):
        try:
            check_checkpoint(checkpoint, step)
        except DamagedError as problem:
            damaged.append((checkpoint, problem))
            continue
        way = f"going back to {checkpoint.name}; {DAMAGED}{{name}} is what it is called now"
        return checkpoint, step, [f"{x.fact}; {way.format(name=path.name)}" for path, x in damaged]
    if len(damaged) == 1:
        raise damaged[0][1]
    raise DamagedError(damaged[0][1].fact, "nor is one before it whole; remove all, and the run starts again")


def check_same(run: Run, folder: Path, data: str | None) -> None:
    """Raise if the run in a folder is not this one, or not on this data (None: any); it may get longer."""
    other, head = saved_run(folder)
    different = replace(other, steps=max(other.steps, run.steps)).differences(run)
    if different:
        raise TrainingError(
            f"{folder} holds a run with other settings, there and here: {'; '.join(different)}. Take the same "
            f"settings, or another folder; {resume_command(folder)} takes those that are there."
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
    """Turn any problem with a checkpoint's file into an error with its name and the way out."""
    try:
        yield
    except DAMAGE as problem:
        folder = file.parent
        others = [x for x in folder.parent.glob("checkpoint-*") if x != folder]
        rest = "goes on from the checkpoint before it" if others else "starts again"
        raise DamagedError(f"{file} is damaged: {_why(problem)}", f"remove {folder}, and the run {rest}") from None


def _why(problem: BaseException) -> str:
    """One line that says why a checkpoint cannot be used."""
    if isinstance(problem, FileNotFoundError):
        return "it is missing"
    text = " ".join(str(problem).split())[:200].rstrip(".")
    return f"it has no {text}" if isinstance(problem, KeyError) else text or type(problem).__name__


def check_checkpoint(folder: Path, step: int) -> None:
    """Raise `DamagedError` if a file is missing, cut off, not what was saved, or would do more than give tensors."""
    check_contained(folder)  # not a damage that a checkpoint is set aside for: links may be allowed
    with whole(folder / SAFE_WEIGHTS_NAME):
        weights = [x.name for x in weight_files(folder)]
    numbers = sorted(x.name for x in folder.glob("rng_state*.pth")) or ["rng_state.pth"]
    for name in (TRAINER_STATE_NAME, *weights, OPTIMIZER_NAME, SCHEDULER_NAME, *numbers):
        with whole(folder / name):
            _check(check_regular(folder / name), step)
    with whole(folder / TRAINER_STATE_NAME):
        check_best(folder)
    with whole(folder / HASHES):
        hashes = read_hashes(folder)
    for name, expected in hashes.items():
        with whole(folder / name):
            check_hash(folder / name, expected)
    for pattern, parts in PARTS.items():
        for file in sorted(folder.glob(pattern)):
            with whole(file):
                _check_parts(file, parts)


def _check_parts(file: Path, parts: Mapping[str, type]) -> None:
    """Raise if a file of `torch.save` lacks what the trainer takes from it: without hashes only that tells."""
    with safe_globals():
        state = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    if not isinstance(state, dict):
        raise ValueError(f"it holds a value of type {type(state).__name__}, not a dict with {', '.join(parts)}")
    for name, kind in parts.items():
        if not isinstance(state[name], kind):
            raise ValueError(f"its {name!r} must be of type {kind.__name__}, got {type(state[name]).__name__}")


def _check(file: Path, step: int) -> None:
    if file.suffix == ".safetensors":
        with safe_open(file, framework="pt"):
            return
    if file.suffix == ".json":
        state = read_json(file)
        if file.name == TRAINER_STATE_NAME:
            if state["global_step"] != step:
                raise ValueError(f"it says global_step {state['global_step']}, in the folder of step {step}")
            state["stateful_callbacks"][Meter.__name__]["attributes"]
        return
    check_archive(file)
    with safe_globals():
        others = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    if others:
        raise ValueError(f"it asks for {', '.join(sorted(others)[:3])}, which no state of a run needs; nothing was run")
