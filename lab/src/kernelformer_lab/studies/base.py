"""`Study` and `Record`, and what tables and pictures of several studies have in common."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from kernelformer.environment import environment
from kernelformer.files import read_json, write_json
from kernelformer.settings import Settings
from kernelformer_lab.records import command_words, plain

Log = Callable[[str], None]
Progress = Callable[[], None]
Row = dict[str, Any]
SPECS = "name or name:option=value, separated by commas"
SCRIPT = "python tools/studies/{}.py"  # the program of a study that is no command


@dataclass(frozen=True)
class Study:
    """A figure or a table, made by one command: ``kernelformer study NAME``.

    Args:
        name: of the study, its file and its command.
        figure: the figure or table of a paper that it reproduces, with the arXiv number; "": none.
        settings: a frozen dataclass of `kernelformer.settings.option` fields, the options of the command.
        steps: number of calls of ``progress`` in a run with these settings.
        run: measures what the record does not have yet, into ``record.figures``. ``log`` takes a sentence on what is
            being done; ``progress`` is called after each step. It computes with ``torch.get_num_threads()`` threads,
            in processes that it starts too.
        picture: draws the figures into a file.
        resumes: whether the same call resumes a study that was stopped: it calls `Record.save` after each part.
        writes: what is in its folder besides the record and the picture.
        examples: options, and what they do, for the end of its help.
        program: the words that start it, with a place for its name.
    """

    name: str
    figure: str
    settings: type[Settings]
    steps: Callable[[Any], int]
    run: Callable[[Record, Log, Progress], None]
    tables: Callable[[Record], list[Table]]
    picture: Callable[[Record, Path], None]
    resumes: bool = False
    writes: str = ""
    examples: tuple[tuple[str, str], ...] = ()
    program: str = "kernelformer study {}"

    def measure(
        self, settings: Any, folder: Path, log: Log = lambda _: None, progress: Progress = lambda: None
    ) -> Record:
        """Measure everything that ``folder`` does not hold yet."""
        record = Record(self, settings, folder)
        self.run(record, log, progress)
        return record

    def command(self, settings: Any) -> str:
        """The command that runs the study with these settings; defaults are left out."""
        return shlex.join([*self.program.format(self.name).split(), *command_words(settings)])


@dataclass
class Record:
    """The figures of a study as plain values, as its file has them.

    Args:
        folder: of the file, and of whatever else the study keeps.
        figures: by name; most studies have ``rows``.
    """

    study: Study
    settings: Any
    folder: Path
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        """The file."""
        return self.folder / f"{self.study.name}.json"

    @property
    def rows(self) -> list[Row]:
        """The rows."""
        rows: list[Row] = self.figures.setdefault("rows", [])
        return rows

    def where(self, **key: Any) -> list[Row]:
        """The rows with these values."""
        return where(self.rows, **key)

    def save(self) -> Path:
        """Write the file: the command, the machine and versions, the settings with their seeds, and the figures."""
        import torch

        head = {
            "command": self.study.command(self.settings),
            "environment": environment(torch.get_num_threads()),
            "settings": plain(self.settings),
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self.path, {**head, **self.figures})
        return self.path

    def earlier(self) -> dict[str, Any]:
        """The file that an earlier call has written; {} if there is none."""
        return read_json(self.path) if self.path.exists() else {}

    def earlier_of_same_settings(self, same_machine: bool = False) -> dict[str, Any]:
        """`earlier`, or {} if it is of other settings, and with ``same_machine`` of another machine or versions."""
        import torch

        kept = self.earlier()
        if kept.get("settings") != plain(self.settings):
            return {}
        here = environment(torch.get_num_threads())
        return {} if same_machine and {**kept["environment"], "date": here["date"]} != here else kept

    def resume(self, about: Mapping[str, Any], **settings: Any) -> None:
        """Begin the figures with the rows that an earlier call has written about the same things.

        Args:
            about: what all rows depend on, by name; it becomes part of the figures.
            settings: of the record, which all rows share.

        Raises:
            ValueError: a record of something else is there.
        """
        kept = self.earlier()
        self.figures = {**about, "rows": []}
        if not kept:
            return
        try:
            before = {**{x: kept.get(x) for x in about}, **{x: kept["settings"].get(x) for x in settings}}
            rows = [dict(x) for x in kept["rows"]]
        except (KeyError, TypeError, ValueError, AttributeError) as problem:
            raise ValueError(
                f"{self.path} is not of this study ({problem!r}); move it away, or choose another --out."
            ) from None
        for name, now in {**about, **settings}.items():
            was = before[name]
            if was == now:
                continue
            if isinstance(was, dict) and isinstance(now, dict):
                was = {key: x for key, x in was.items() if now.get(key) != x}
            what = "model or machine" if name == "about" else name
            raise ValueError(f"{self.path} has figures of another {what} ({was!r:.200}); choose another --out.")
        self.figures["rows"] = rows


def where(rows: Iterable[Row], **key: Any) -> list[Row]:
    """The rows with these values."""
    return [x for x in rows if all(x[name] == value for name, value in key.items())]


def check_named(settings: Settings, *names: str) -> None:
    """Raise ValueError for the first of these settings that names nothing."""
    for name in names:
        if not getattr(settings, name):
            raise ValueError(f"{name} must name at least one, got {getattr(settings, name)!r}.")


def unique(rows: Iterable[Row], *names: str) -> list[Any]:
    """The different values of a column in their order; of several columns tuples."""
    return list(dict.fromkeys(x[names[0]] if len(names) == 1 else tuple(x[name] for name in names) for x in rows))
