"""Commands of ``kernelformer``."""

from __future__ import annotations

from typing import Annotated

import typer

from kernelformer import __version__
from kernelformer.cli import advise as advising
from kernelformer.cli import bench as benchmark
from kernelformer.cli import convert as converting
from kernelformer.cli import doctor as diagnosing
from kernelformer.cli import export as exporting
from kernelformer.cli import judge as judging
from kernelformer.cli import listing, pictures, reproduce, results, studies, training
from kernelformer.cli import prepare as preparing
from kernelformer.cli import translate as translating
from kernelformer.cli.common import plain_errors
from kernelformer.cli.group import Command, Group
from kernelformer.files import set_limit

START, MODELS, PRETRAINED, MEASURE = "Start here", "Train and use models", "Pretrained models", "Measure"

app = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_show_locals=False,
    epilog="`kernelformer COMMAND --help` has the options of a command, and examples.",
)
for _panel, _commands in {
    START: (("list", listing.list_), ("demo", training.demo), ("doctor", diagnosing.doctor)),
    MODELS: (
        ("prepare", preparing.prepare),
        ("train", training.train),
        ("evaluate", training.evaluate),
        ("compare", training.compare),
        ("generate", training.generate),
        ("translate", translating.translate),
    ),
    PRETRAINED: (
        ("advise", advising.advise),
        ("convert", converting.convert),
        ("judge", judging.judge),
        ("export", exporting.export),
        ("continue", converting.continue_),
        ("attention", pictures.attention),
    ),
    MEASURE: (("bench", benchmark.bench), ("reproduce", reproduce.reproduce), ("results", results.results)),
}.items():
    for _name, _command in _commands:
        app.command(_name, cls=Command, rich_help_panel=_panel)(_command)
app.add_typer(studies.app, name="study", rich_help_panel=MEASURE)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kernelformer {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
    limits: Annotated[
        list[str] | None,
        typer.Option("--limit", help="raise a bound on what files may ask for, as the error says: max_layers=5000"),
    ] = None,
    follow_links: Annotated[
        bool, typer.Option("--follow-links", help="let links lead out of a folder of data or of a model")
    ] = False,
) -> None:
    """Linear-time attention by kernels."""
    with plain_errors():
        for text in limits or ():
            name, _, value = text.partition("=")
            if not value.isdecimal():
                raise ValueError(f"--limit takes NAME=NUMBER, got {text!r}.")
            set_limit(name, int(value))
        if follow_links:
            set_limit("follow_links", 1)
