"""Commands of ``kernelformer``: a table of commands that are imported on demand.

Other distributions add theirs by an entry point of the group ``kernelformer.commands`` that names a `CommandSet`.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from importlib.metadata import entry_points
from typing import Annotated, ClassVar

import typer

from kernelformer import __version__
from kernelformer.cli.common import plain_errors
from kernelformer.cli.group import MODELS, PANELS, PRETRAINED, START, CommandSet, Entry, Group
from kernelformer.files import set_limit

COMMANDS = {
    "list": Entry(
        "kernelformer.cli.listing:list_",
        START,
        "Show methods, tasks and recipes, the options of one method, all settings of one recipe, or how far a run is.",
        (
            ("", "all methods, tasks and recipes"),
            ("favor+", "the options of a method"),
            ("sky-text", "the settings of a recipe"),
            ("methods --json", "for scripts"),
        ),
    ),
    "doctor": Entry(
        "kernelformer.cli.listing:doctor",
        START,
        "Show versions, what is missing, threads, memory, devices and folders, and check attention against its "
        "definition.",
        (("", "versions, what is missing, threads, devices and a quick self-check"), ("--json", "for a report")),
    ),
    "generate": Entry(
        "kernelformer.cli.generate:generate",
        MODELS,
        "Write text with a trained language model, in constant memory where its attention has a feature map.",
        (('out/bytes --prompt "def " --tokens 2000', "in constant memory"),),
    ),
    "advise": Entry(
        "kernelformer.cli.pretrained:advise",
        PRETRAINED,
        "Advise on converting a pretrained model: errors, times, what to keep exact, and the command to paste.",
        (("MODEL --text test.jsonl --out out/advice", "advice, also as a page"),),
    ),
    "convert": Entry(
        "kernelformer.cli.pretrained:convert",
        PRETRAINED,
        "Make a pretrained model linear: convert its attention, measure, distill, and write it as a folder.",
        (
            ("MODEL linear --text test.jsonl", "without training, and measured"),
            ("MODEL linear --distill train.jsonl --minutes 30", "distilled for half an hour"),
            ("MODEL linear --attention favor+:window=64 --layers 0-3", "another attention, in some layers"),
        ),
    ),
    "judge": Entry(
        "kernelformer.cli.pretrained:judge",
        PRETRAINED,
        "Judge a converted model beside its original: parts, recall, samples; into its report and model card.",
        (("linear --original MODEL --text test.jsonl", "parts, recall and samples, beside the original"),),
    ),
    "export": Entry(
        "kernelformer.cli.pretrained:export",
        PRETRAINED,
        "Write a model as ONNX, compared with torch, with a script that runs it without torch.",
        (("out/bytes exported", "a finished run as ONNX, with a script that generates without torch"),),
    ),
    "continue": Entry(
        "kernelformer.cli.generate:continue_",
        PRETRAINED,
        "Continue a text with a converted decoder, in constant memory.",
        (('linear --prompt "Once upon a time" --tokens 200', "with a converted decoder"),),
    ),
}
LABORATORY: tuple[str, ...] = ("demo", "prepare", "train", "evaluate", "compare", "translate", "bench", "attention")
LABORATORY += ("reproduce", "results", "study")


def _entries() -> dict[str, Entry]:
    """All commands; plugged-in ones replace those of the same name."""
    found = dict(COMMANDS)
    for point in entry_points(group="kernelformer.commands"):
        plugged: CommandSet = point.load()
        found |= plugged.commands
        PANELS.update(plugged.panels)
    return found


class Program(Group):
    """The commands of this distribution and of those that plug in."""

    entries = _entries()
    missing: ClassVar[dict[str, str]] = dict.fromkeys(
        LABORATORY, "install the laboratory by pip install kernelformer-lab"
    )


app = typer.Typer(
    cls=Program,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_show_locals=False,
    epilog="`kernelformer COMMAND --help` has the options of a command, and examples.",
)


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
    modules: Annotated[
        list[str] | None,
        typer.Option("--import", metavar="MODULE", help="import a module, which registers methods of its own"),
    ] = None,
    follow_links: Annotated[
        bool, typer.Option("--follow-links", help="let links lead out of a folder of data or of a model")
    ] = False,
) -> None:
    """Linear-time attention by kernels."""
    with plain_errors():
        for module in modules or ():
            sys.path[:0] = [x for x in (os.getcwd(),) if x not in sys.path]  # a script installed by pip leaves it out
            try:
                import_module(module)
            except ImportError as problem:
                raise ValueError(f"--import {module}: {problem}.") from None
        for text in limits or ():
            name, _, value = text.partition("=")
            if not value.isdecimal():
                raise ValueError(f"--limit takes NAME=NUMBER, got {text!r}.")
            set_limit(name, int(value))
        if follow_links:
            set_limit("follow_links", 1)
