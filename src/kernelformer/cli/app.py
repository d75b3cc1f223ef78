"""Commands of ``kernelformer``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from kernelformer import __version__
from kernelformer.cli import benchmark, converting, pictures, results, studies, training, translating
from kernelformer.cli.common import console, plain_errors
from kernelformer.errors import choice
from kernelformer.recipes.catalogue import RECIPES, recipes_of
from kernelformer.recipes.papers import Recipe
from kernelformer.records import RUN, read_head, standing

app = typer.Typer(no_args_is_help=True, add_completion=False)
app.command()(training.train)
app.command()(training.evaluate)
app.command()(training.compare)
app.command()(training.generate)
app.command()(translating.translate)
app.command()(converting.convert)
app.command("continue")(converting.continue_)
app.command()(training.demo)
app.command()(results.results)
app.command()(benchmark.bench)
app.command()(pictures.attention)
app.add_typer(studies.app, name="study")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kernelformer {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Linear-time attention by kernels."""


@app.command("list")
def list_(
    what: Annotated[
        str,
        typer.Argument(
            help="methods, tasks, recipes, the name of a recipe, or the folder of a run; default: all three"
        ),
    ] = "",
) -> None:
    """Show methods, tasks and recipes, all settings of one recipe, or how far a run is."""
    parts = {"methods": _methods, "tasks": _tasks, "recipes": _recipes}
    with plain_errors():
        if what in RECIPES:
            _recipe(RECIPES[what], what)
            return
        if what and (Path(what) / RUN).is_file():
            run = read_head(Path(what))["run"]
            console.print(f"{what}: {run.get('task')}, {run.get('attention')}; {standing(Path(what))}")
            return
        for part in parts if not what else [choice("part of the list, or recipe,", what, [*parts, *RECIPES])]:
            console.print(parts[part]())


def _table(*columns: str) -> Table:
    """A name is never broken: it is there to be copied."""
    table = Table(*columns)
    table.columns[0].no_wrap = True
    return table


def _methods() -> Table:
    from kernelformer import list_methods, method_options

    table = _table("method", "about", "options")
    for name, about in list_methods().items():
        table.add_row(name, about, ", ".join(method_options(name)))
    return table


def _tasks() -> Table:
    from kernelformer.tasks import TASKS, task_options

    table = _table("task", "about", "metric", "recipes", "options (--set task.NAME=VALUE)")
    table.caption = "`train TASK` runs the first of its recipes"
    for name, task in TASKS.items():
        table.add_row(name, task.about, task.metric, ", ".join(recipes_of(name)), ", ".join(task_options(name)))
    return table


def _recipes() -> Table:
    table = _table("recipe", "about", "source", "task")
    table.caption = "by default at the size --size cpu; recipes of papers have --size full too; `list NAME` shows both"
    for name, recipe in RECIPES.items():
        table.add_row(name, recipe.about, recipe.source, recipe.task)
    return table


def _recipe(recipe: Recipe, name: str) -> None:
    """All that a recipe sets, side by side."""
    console.print(f"{recipe.about}\n{recipe.source}\n{recipe.note}".rstrip())
    table = _table(name, *recipe.sizes)
    for setting, values in recipe.settings().items():
        table.add_row(setting, *values)
    console.print(table)
