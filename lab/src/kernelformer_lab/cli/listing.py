"""``kernelformer list``: methods, tasks, recipes, one of them in full, or how far runs are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from kernelformer import list_methods
from kernelformer.cli.common import Json, console, plain_errors, show_json
from kernelformer.cli.listing import Row, plain_table, print_rows, show_method, show_methods
from kernelformer.cli.options import method_names, starting
from kernelformer.errors import choice
from kernelformer_lab.recipes.catalogue import RECIPES, recipes_of
from kernelformer_lab.recipes.overrides import recipe_settings
from kernelformer_lab.recipes.papers import Recipe
from kernelformer_lab.records import RUN, read_head, standing
from kernelformer_lab.tasks import TASKS, task_options

TASK_CAPTION = "`train TASK` runs the first of its recipes"
RECIPE_CAPTION = "by default at the size --size cpu; recipes of papers have --size full too; `list NAME` shows both"
SETTINGS_CAPTION = "above the line what the recipe or its task sets, below it defaults; --set NAME=VALUE changes them"


def listed(incomplete: str) -> list[str]:
    """Names that ``kernelformer list`` takes."""
    return starting(incomplete, (*PARTS, *method_names(), *RECIPES, *TASKS))


def list_(
    what: Annotated[
        str,
        typer.Argument(
            metavar="[NAME]",
            help="methods, tasks, recipes, the name of a method or a recipe, or a folder with a run or several; "
            "default: all three",
            autocompletion=listed,
        ),
    ] = "",
    as_json: Json = False,
) -> None:
    """Show methods, tasks and recipes, a method's options, a recipe's settings, or the progress of a run."""
    with plain_errors():
        if what in (methods := list_methods()):
            value = show_method(what, methods[what])
        elif what in RECIPES:
            value = _recipe(RECIPES[what], what)
        elif recipes := recipes_of(what):  # a task's name means its first recipe here as it does to `train`
            console.print(f"task {what}: {', '.join(recipes)}; `train {what}` runs the first")
            value = {"task": what, "recipes": recipes, **_recipe(RECIPES[recipes[0]], recipes[0])}
        elif what and what not in PARTS and Path(what).is_dir():
            value = {"runs": _runs(Path(what))}
        else:
            known = [*PARTS, *methods, *RECIPES]
            names = PARTS if not what else [choice("part of the list, method or recipe,", what, known)]
            value = {name: PARTS[name]() for name in names}
        if as_json:
            show_json(value)


def _runs(folder: Path) -> list[Row]:
    """Print how far a run is, or each run of a comparison."""
    folders = [x for x in (folder, *sorted(folder.iterdir())) if (x / RUN).is_file()]
    if not folders:
        raise ValueError(f"{folder} holds no run: neither it nor a folder in it has a {RUN}.")
    rows = []
    for x in folders:
        run = read_head(x)["run"]
        rows.append({"folder": str(x), "task": run.get("task"), "attention": run.get("attention"), "is": standing(x)})
        console.print(f"{x}: {run.get('task')}, {run.get('attention')}; {rows[-1]['is']}")
    return rows


def _tasks() -> list[Row]:
    rows = [
        {
            "task": name,
            "about": task.about,
            "metric": task.metric,
            "recipes": list(recipes_of(name)),
            "options": list(task_options(name)),
        }
        for name, task in TASKS.items()
    ]
    heads = {"task": "task", "about": "about", "metric": "metric", "recipes": "recipes"}
    return print_rows(rows, {**heads, "options": "options (--set task.NAME=VALUE)"}, TASK_CAPTION)


def _recipes() -> list[Row]:
    rows = [
        {"recipe": name, "about": x.about, "source": x.source, "task": x.task, "sizes": list(x.sizes)}
        for name, x in RECIPES.items()
    ]
    return print_rows(rows, {x: x for x in ("recipe", "about", "source", "task")}, RECIPE_CAPTION)


PARTS: dict[str, Callable[[], list[Row]]] = {"methods": show_methods, "tasks": _tasks, "recipes": _recipes}


def _recipe(recipe: Recipe, name: str) -> Row:
    """Print all settings of a recipe, its sizes side by side."""
    console.print("\n".join([recipe.about, recipe.source, *(f"- {line}" for line in recipe.note.splitlines())]))
    table = plain_table(name, *recipe.sizes)
    table.caption = SETTINGS_CAPTION
    chosen, default = recipe_settings(recipe)
    compared = {size: list(recipe.attentions(size)) for size in recipe.sizes}
    for setting, values in chosen.items():
        table.add_row(setting, *values)
    table.add_row("compared", *(", ".join(x) for x in compared.values()), end_section=True)
    for setting, values in default.items():
        table.add_row(setting, *values)
    console.print(table)
    both = {x: dict(zip(recipe.sizes, values, strict=True)) for x, values in {**chosen, **default}.items()}
    about = {"recipe": name, "about": recipe.about, "source": recipe.source, "note": recipe.note}
    return {**about, "compared": compared, "settings": both}
