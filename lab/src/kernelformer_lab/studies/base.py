"""What a study is, and how one is written.

A study is one file ``studies/NAME.py``, with underscores for hyphens, its settings in `studies.settings` and its entry
in `studies.STUDIES`. The file has five functions, for a ``Result`` of its own:

    def steps(settings) -> int:                            how often `run` calls ``progress``
    def run(settings, folder, log, progress) -> Result:    measure; ``log`` takes a sentence on what is being done,
                                                           ``progress`` is called after each of `steps` steps
    def tables(result) -> list[rich.table.Table]:          for the terminal
    def picture(result, path) -> None:                     the figure
    def record(result) -> dict[str, Any]:                  the figures as plain JSON

``run`` computes with ``torch.get_num_threads()`` threads, in processes that it starts too. A study that takes long
goes on where it was stopped: it reads ``folder/NAME.json`` first (`read_record`), takes what is there if it is of the
same settings, and calls `write_record` after each part. Whatever a study does, `Study.save` writes the whole record.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from kernelformer.environment import environment
from kernelformer.files import read_json, write_json
from kernelformer.settings import Settings, command_words, plain

Log = Callable[[str], None]
Progress = Callable[[], None]


@dataclass(frozen=True)
class Study:
    """A figure or a table, made by one command: ``kernelformer study NAME``. Reading one imports nothing heavy.

    Args:
        name: of the study, its file and its command.
        about: one sentence on what it shows.
        figure: the figure or table of a paper that it stands for, with the arXiv number; "": it has none.
        settings: a frozen dataclass of `kernelformer.settings.option` fields.
        resumes: whether the same call goes on where the study was stopped.
        writes: what is in its folder besides the record and the picture.
        examples: options, and what they do, for the end of its help.
    """

    name: str
    about: str
    figure: str
    settings: type[Settings]
    resumes: bool = False
    writes: str = ""
    examples: tuple[tuple[str, str], ...] = ()

    def steps(self, settings: Any) -> int:
        """How often `run` calls ``progress``."""
        count: int = self._file.steps(settings)
        return count

    def run(self, settings: Any, folder: Path, log: Log = lambda _: None, progress: Progress = lambda: None) -> Any:
        """Measure everything that ``folder`` does not hold yet.

        Args:
            settings: of the type ``self.settings``.
            folder: of the record, and of whatever else the study keeps.
            log: takes a sentence on what is being done.
            progress: called after each of `steps` steps.

        Returns:
            The study's own result, for `tables`, `picture` and `save`.
        """
        return self._file.run(settings, folder, log, progress)

    def tables(self, result: Any) -> list[Any]:
        """The result as tables of rich, for the terminal."""
        tables: list[Any] = self._file.tables(result)
        return tables

    def picture(self, result: Any, path: Path) -> None:
        """Draw the result into a file."""
        self._file.picture(result, path)

    def record(self, result: Any) -> dict[str, Any]:
        """The result as plain JSON."""
        record: dict[str, Any] = self._file.record(result)
        return record

    def save(self, settings: Any, result: Any, folder: Path) -> Path:
        """Write the record with all that it depends on, and return its path."""
        return write_record(folder, self.name, settings, self.record(result))

    @property
    def _file(self) -> Any:
        return import_module(f"kernelformer_lab.studies.{self.name.replace('-', '_')}")


def command(name: str, settings: Any) -> str:
    """The command that runs a study with these settings; defaults are left out."""
    return shlex.join(["kernelformer", "study", name, *command_words(settings)])


def read_record(folder: Path, name: str) -> dict[str, Any] | None:
    """What `write_record` wrote; None: nothing is there."""
    path = folder / f"{name}.json"
    return read_json(path) if path.exists() else None


def write_record(folder: Path, name: str, settings: Any, figures: dict[str, Any]) -> Path:
    """Write ``NAME.json``: the command, the machine and versions, the settings with their seeds, and the figures."""
    import torch

    head = {
        "command": command(name, settings),
        "environment": environment(torch.get_num_threads()),
        "settings": plain(settings),
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    write_json(path, {**head, **figures})
    return path
