"""Commands of ``kernelformer``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from kernelformer import __version__
from kernelformer.cli import advise as advising
from kernelformer.cli import bench as benchmark
from kernelformer.cli import convert as converting
from kernelformer.cli import judge as judging
from kernelformer.cli import pictures, reproduce, results, studies, training
from kernelformer.cli import prepare as preparing
from kernelformer.cli import translate as translating
from kernelformer.cli.common import console, plain_errors
from kernelformer.errors import choice
from kernelformer.limits import set_limit
from kernelformer.recipes.catalogue import RECIPES, recipes_of
from kernelformer.recipes.papers import Recipe
from kernelformer.records import RUN, read_head, standing

app = typer.Typer(no_args_is_help=True, add_completion=False)
app.command()(preparing.prepare)
app.command()(training.train)
app.command()(training.evaluate)
app.command()(training.compare)
app.command()(training.generate)
app.command()(translating.translate)
app.command()(advising.advise)
app.command()(converting.convert)
app.command()(judging.judge)
app.command("continue")(converting.continue_)
app.command()(training.demo)
app.command()(reproduce.reproduce)
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
    limits: Annotated[
        list[str] | None,
        typer.Option("--limit", help="raise a bound on what files may ask for, as the error says: max_layers=5000"),
    ] = None,
    follow_links: Annotated[
        bool, typer.Option("--follow-links", help="let links lead out of a folder of data")
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


@app.command("list")
def list_(
    what: Annotated[
        str,
        typer.Argument(
            help="methods, tasks, recipes, the name of a method or a recipe, or a folder with a run or several; "
            "default: all three"
        ),
    ] = "",
) -> None:
    """Show methods, tasks and recipes, the options of one method, all settings of one recipe, or how far a run is."""
    from kernelformer import list_methods

    parts = {"methods": _methods, "tasks": _tasks, "recipes": _recipes}
    with plain_errors():
        if what in (methods := list_methods()):
            _method(what, methods[what])
            return
        if what in RECIPES:
            _recipe(RECIPES[what], what)
            return
        if recipes := recipes_of(what):  # a task's name means its first recipe here as it does to `train`
            console.print(f"task {what}: {', '.join(recipes)}; `train {what}` runs the first")
            _recipe(RECIPES[recipes[0]], recipes[0])
            return
        if what and what not in parts and Path(what).is_dir():
            _runs(Path(what))
            return
        known = [*parts, *methods, *RECIPES]
        for part in parts if not what else [choice("part of the list, method or recipe,", what, known)]:
            console.print(parts[part]())


def _runs(folder: Path) -> None:
    """Print how far a run is, or each run of a comparison."""
    folders = [x for x in (folder, *sorted(folder.iterdir())) if (x / RUN).is_file()]
    if not folders:
        raise ValueError(f"{folder} holds no run: neither it nor a folder in it has a {RUN}.")
    for x in folders:
        run = read_head(x)["run"]
        console.print(f"{x}: {run.get('task')}, {run.get('attention')}; {standing(x)}")


def _table(*columns: str) -> Table:
    """Table whose first column, of names to copy, is never wrapped."""
    table = Table(*columns)
    table.columns[0].no_wrap = True
    return table


def _methods() -> Table:
    from kernelformer import list_methods, method_options
    from kernelformer.modules.sparse_layers import SPARSE_LAYERS

    table = _table("method", "about", "options")
    for name, about in list_methods().items():
        table.add_row(name, about, ", ".join(method_options(name)))
    table.add_section()
    for name, layer in SPARSE_LAYERS.items():
        about = f"{layer.about} ({layer.paper.name}); a layer of transformers, in encoders only"
        table.add_row(name, about, ", ".join(layer.options))
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
    table.caption_justify = "left"
    table.caption = "by default at the size --size cpu; recipes of papers have --size full too; `list NAME` shows both"
    for name, recipe in RECIPES.items():
        table.add_row(name, recipe.about, recipe.source, recipe.task)
    return table


def _recipe(recipe: Recipe, name: str) -> None:
    """Print all settings of a recipe, its sizes side by side."""
    from kernelformer.recipes.listing import recipe_settings

    console.print("\n".join([recipe.about, recipe.source, *(f"- {line}" for line in recipe.note.splitlines())]))
    table = _table(name, *recipe.sizes)
    table.caption_justify = "left"
    table.caption = "above the line what the recipe or its task sets, below it defaults; --set NAME=VALUE changes them"
    chosen, default = recipe_settings(recipe)
    for setting, values in chosen.items():
        table.add_row(setting, *values)
    table.add_row("compared", *(", ".join(recipe.attentions(size)) for size in recipe.sizes), end_section=True)
    for setting, values in default.items():
        table.add_row(setting, *values)
    console.print(table)


def _method(name: str, about: str) -> None:
    """Print the options of a method, and those that a model's attention has besides."""
    from kernelformer.modules.options import describe_options, describe_positions

    console.print(f"{name}: {about}")
    options = describe_options(name)
    example = next((x for x in options if x.name in ("num_features", "num_landmarks", "rank")), options[0])
    for title, rows in (("", options), ("positions, in a layer or model", describe_positions())):
        table = _table("option", "default", "about")
        table.title, table.title_justify = title, "left"
        for x in rows:
            table.add_row(x.name, str(x.default), x.about)
        console.print(table)
    console.print(f"as an attention: {name}:{example.name}={example.default}")
