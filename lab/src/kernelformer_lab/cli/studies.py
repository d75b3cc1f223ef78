"""``kernelformer study``: a command for each study, with the options that its settings have."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from kernelformer.cli.common import (
    Json,
    Threads,
    console,
    following,
    goes_on,
    picture_in,
    plain_errors,
    show_json,
    starts_anew,
    target,
    use_threads,
)
from kernelformer.cli.group import Command, Group
from kernelformer.cli.options import takes
from kernelformer.files import read_json
from kernelformer.settings import Settings
from kernelformer_lab.studies import STUDIES, Study

# Without postponed annotations: those of a command below are made from its study.


app = typer.Typer(cls=Group, help="Small studies of the papers, at a size for a CPU.", no_args_is_help=True)


def _command(study: Study) -> Callable[..., None]:
    """The command that runs a study, shows its tables and writes its record and picture."""
    files = [f"{study.name}.json", f"{study.name}.png", *([study.writes] if study.writes else [])]

    @takes(study.settings)
    def run(
        settings: Settings,
        threads: Threads = None,
        out: Annotated[Path, typer.Option(help=f"folder for {_listed(files)}")] = Path("out"),
        as_json: Json = False,
    ) -> None:
        use_threads(threads)
        with plain_errors(goes_on if study.resumes else starts_anew):
            picture = picture_in(out, f"{study.name}.png")
            folder = target(picture.with_name(f"{study.name}.json")).parent
            with following(study.steps(settings)) as job:
                result = study.run(settings, folder, job.log, job.advance)
            for table in study.tables(result):
                console.print(table)
            record = study.save(settings, result, folder)
            study.picture(result, picture)
            console.print(f"figures: {record}   picture: {picture}")
            if as_json:
                show_json(read_json(record))

    run.__name__, run.__doc__ = study.name, _help(study)
    return run


def _listed(words: list[str]) -> str:
    """Words as people list them: a, b and c."""
    return f"{', '.join(words[:-1])} and {words[-1]}"


def _help(study: Study) -> str:
    again = "; goes on where it was stopped" if study.resumes else ""
    stands_for = f"Stands for {study.figure}." if study.figure else "Stands for no figure of a paper."
    return f"{study.about}{again}.\n\n{stands_for}"


for _study in STUDIES.values():
    _class = type("StudyCommand", (Command,), {"examples": _study.examples})
    app.command(_study.name, cls=_class)(_command(_study))
