"""``kernelformer study``: a command for each study, with the options that its settings have."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer

from kernelformer.cli.common import (
    Json,
    Threads,
    console,
    following,
    goes_on,
    plain_errors,
    show_json,
    starts_anew,
    use_threads,
)
from kernelformer.cli.group import MEASURE, Command, Entry, Group
from kernelformer.cli.options import takes
from kernelformer.files import read_json
from kernelformer.settings import Settings
from kernelformer_lab.cli.pictures import picture_in
from kernelformer_lab.records import target
from kernelformer_lab.studies import STUDIES, Study, find_study

# Without postponed annotations: those of a command below are made from its study.


@dataclass(frozen=True)
class StudyEntry(Entry):
    """A study that is imported when it is run or its own help is asked for."""

    def load(self, name: str) -> Any:
        """Import the study and build its command."""
        return build(find_study(name), self.help)


class Studies(Group):
    """All studies."""

    entries: ClassVar = {name: StudyEntry("", MEASURE, about) for name, about in STUDIES.items()}


app = typer.Typer(cls=Studies, help="Small studies of the papers, at a size for a CPU.", no_args_is_help=True)


def build(study: Study, about: str) -> Any:
    """The command that runs a study, shows its tables and writes its record and picture."""
    again = " The same call resumes it where it was stopped." if study.resumes else ""
    stands_for = f"Stands for {study.figure}." if study.figure else "Stands for no figure of a paper."
    info = typer.models.CommandInfo(
        study.name, cls=Command, callback=_callback(study), help=f"{about}{again}\n\n{stands_for}"
    )
    command: Any = typer.main.get_command_from_info(info, pretty_exceptions_short=True, rich_markup_mode="rich")
    command.examples = study.examples
    return command


def main(study: Study, about: str) -> None:
    """Run a study that is a script of its own."""
    build(study, about)()


def _callback(study: Study) -> Callable[..., None]:
    files = [f"{study.name}.json", f"{study.name}.png", *([study.writes] if study.writes else [])]

    @takes(study.settings)
    def run(
        settings: Settings,
        threads: Threads = None,
        out: Annotated[Path, typer.Option(help=f"folder for {', '.join(files[:-1])} and {files[-1]}")] = Path("out"),
        as_json: Json = False,
    ) -> None:
        use_threads(threads)
        with plain_errors(goes_on if study.resumes else starts_anew):
            picture = picture_in(out, f"{study.name}.png")
            folder = target(picture.with_name(f"{study.name}.json")).parent
            with following(study.steps(settings)) as job:
                record = study.measure(settings, folder, job.log, job.advance)
            for table in study.tables(record):
                console.print(table)
            path = record.save()
            study.picture(record, picture)
            console.print(f"figures: {path}   picture: {picture}")
            if as_json:
                show_json(read_json(path))

    run.__name__ = study.name
    return run
