"""Checkpoints of a distillation, and target folders that are written completely or not at all."""

from __future__ import annotations

import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kernelformer.files import PART, check_archive, check_inside, naming_full_disk, replacing, sync
from kernelformer.hf.save import KIND, model_type

FILE = "progress.pt"
SECONDS = 60.0  # between two of them
SHARE = 0.05  # of the time that may go into writing them


@dataclass
class Checkpoint:
    """State of a distillation, kept in a folder."""

    folder: Path
    identity: dict[str, str]
    last: float = 0.0  # when the last one was written, or the run began
    cost: float = 0.0  # seconds that it took

    @staticmethod
    def folder_for(target: Path) -> Path:
        """Name the folder that keeps the state of an unfinished target."""
        return target.with_name(target.name + PART)

    @classmethod
    def of(cls, target: Path, identity: dict[str, str], force: bool) -> Checkpoint:
        """Find or begin the checkpoint of a target."""
        checkpoint = cls(cls.folder_for(target), identity, time.monotonic())
        if checkpoint.folder.exists():
            other = checkpoint._other()
            if other and not (force and (checkpoint.folder / FILE).is_file()):
                raise ValueError(
                    f"{checkpoint.folder} is of another call ({other}); repeat that one, choose another name, or give "
                    f"--force to begin anew."
                )
            if other:
                checkpoint.remove()
        return checkpoint

    def _read(self) -> dict[str, Any]:
        check_inside(self.folder, [self.folder / FILE])
        state: dict[str, Any] = torch.load(self.folder / FILE, weights_only=True, mmap=True)
        return state

    def _other(self) -> str:
        """Name the differences from the checkpoint on disk; empty if there are none."""
        try:
            check_archive(self.folder / FILE)
            left = self._read()["identity"]
        except Exception as problem:  # missing, damaged or of another program: torch has many errors for it
            first = (str(problem).strip().splitlines() or [type(problem).__name__])[0]
            return f"it has no readable {FILE}: {first.rstrip('.')}"
        return ", ".join(sorted(x for x in {*left, *self.identity} if left.get(x) != self.identity.get(x)))

    def stages(self) -> list[str]:
        """Name the stages that have begun."""
        return list(self._read()["losses"]) if (self.folder / FILE).is_file() else []

    def load(self, model: Any) -> tuple[dict[str, list[float]], Any, dict[str, Any]]:
        """Load the saved weights into a model; returns losses by stage, the optimizer state and the notes."""
        if not (self.folder / FILE).is_file():
            return {}, None, {}
        kept = self._read()
        model.load_state_dict(kept["weights"])
        return kept["losses"], kept["optimizer"], kept["noted"]

    def save(
        self,
        model: Any,
        losses: dict[str, list[float]],
        state: Callable[[], Any] = lambda: None,
        noted: dict[str, Any] | None = None,
        *,
        now: bool = False,
    ) -> None:
        """Write a checkpoint, if it is due (or ``now``) and anything was learned.

        Args:
            state: gives the state of the last stage, see `Progress.state`.
            noted: of stages before it, plain values.
        """
        begin = time.monotonic()
        early = begin - self.last < max(SECONDS, self.cost / SHARE)
        if not any(losses.values()) or (early and not now):
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        with replacing(self.folder / FILE) as part:
            record = {"identity": self.identity, "losses": losses, "optimizer": state(), "noted": noted or {}}
            torch.save({**record, "weights": model.state_dict()}, part)
        self.last = time.monotonic()
        self.cost = self.last - begin

    def remove(self) -> None:
        """Remove the checkpoint: the run is done, or begins anew."""
        shutil.rmtree(self.folder, ignore_errors=True)


def check_target(source: str | Path, target: Path, force: bool) -> None:
    """Check that a folder can be written: not that of the source, and not there, or a converted model and ``force``."""
    folder, resolved = Path(source), target.resolve()
    if folder.is_dir():
        original = folder.resolve()
        if resolved == original or original in resolved.parents or resolved in original.parents:
            raise ValueError(
                f"{target} and {source} are within one another; the original is never changed: write aside."
            )
        if Checkpoint.folder_for(resolved) == original:
            raise ValueError(f"{source} has the name that an unfinished {target} would have; choose another name.")
    if not target.exists() and not target.is_symlink():
        return
    if not force:
        raise ValueError(f"{target} is there already; give another folder, or --force to replace it.")
    ours = target.is_dir() and not target.is_symlink() and (not any(target.iterdir()) or model_type(target) == KIND)
    if not ours:
        raise ValueError(f"{target} is not a converted model, so that --force does not remove it; do it by hand.")


@contextmanager
def appearing(target: Path) -> Iterator[Path]:
    """Write a folder atomically: it replaces ``target`` if the block succeeds."""
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.{uuid.uuid4().hex}{PART}")
    part.mkdir()
    old = part.with_name(part.name + ".old")
    try:
        with naming_full_disk(target):
            yield part
        if target.exists():
            target.rename(old)
        part.rename(target)
        sync(target.parent)
    finally:
        shutil.rmtree(part, ignore_errors=True)
        if old.exists():
            if target.exists():
                shutil.rmtree(old, ignore_errors=True)
            else:
                old.rename(target)
