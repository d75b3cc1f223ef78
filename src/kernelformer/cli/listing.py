"""``kernelformer list``: methods, tasks, recipes, one of them in full, or how far runs are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from kernelformer.cli.common import Json, console, plain_errors, show_json
from kernelformer.cli.options import listed
from kernelformer.errors import choice
from kernelformer.recipes.catalogue import RECIPES, recipes_of
from kernelformer.recipes.papers import Recipe
from kernelformer.records import RUN, read_head, standing

Row = dict[str, Any]
TASK_CAPTION = "`train TASK` runs the first of its recipes"
RECIPE_CAPTION = "by default at the size --size cpu; recipes of papers have --size full too; `list NAME` shows both"
SETTINGS_CAPTION = "above the line what the recipe or its task sets, below it defaults; --set NAME=VALUE changes them"


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
    """Show methods, tasks and recipes, the options of one method, all settings of one recipe, or how far a run is."""
    from kernelformer import list_methods

    with plain_errors():
        if what in (methods := list_methods()):
            value = _method(what, methods[what])
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


def _table(*columns: str) -> Table:
    """Table whose first column, of names to copy, is never wrapped."""
    table = Table(*columns)
    table.columns[0].no_wrap = True
    table.caption_justify = "left"
    return table


def _print(rows: list[Row], heads: dict[str, str], caption: str | None = None) -> list[Row]:
    """Print rows as a table with these headings, lists between commas; None instead of a row is a line."""
    table = _table(*heads.values())
    table.caption = caption
    for row in rows:
        cells = (row[name] for name in heads)
        table.add_row(*(", ".join(x) if isinstance(x, list | tuple) else str(x) for x in cells))
    console.print(table)
    return rows


def _methods() -> list[Row]:
    from kernelformer import list_methods, method_options
    from kernelformer.modules.methods import SPARSE_LAYERS

    rows = [
        {"method": name, "about": about, "options": list(method_options(name))}
        for name, about in list_methods().items()
    ]
    for name, layer in SPARSE_LAYERS.items():
        about = f"{layer.about} ({layer.paper.name}); a layer of transformers, in encoders only"
        rows.append({"method": name, "about": about, "options": list(layer.options)})
    return _print(rows, {"method": "method", "about": "about", "options": "options"})


def _tasks() -> list[Row]:
    from kernelformer.tasks import TASKS, task_options

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
    return _print(rows, {**heads, "options": "options (--set task.NAME=VALUE)"}, TASK_CAPTION)


def _recipes() -> list[Row]:
    rows = [
        {"recipe": name, "about": x.about, "source": x.source, "task": x.task, "sizes": list(x.sizes)}
        for name, x in RECIPES.items()
    ]
    return _print(rows, {x: x for x in ("recipe", "about", "source", "task")}, RECIPE_CAPTION)


PARTS: dict[str, Callable[[], list[Row]]] = {"methods": _methods, "tasks": _tasks, "recipes": _recipes}


def _recipe(recipe: Recipe, name: str) -> Row:
    """Print all settings of a recipe, its sizes side by side."""
    from kernelformer.recipes.overrides import recipe_settings

    console.print("\n".join([recipe.about, recipe.source, *(f"- {line}" for line in recipe.note.splitlines())]))
    table = _table(name, *recipe.sizes)
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


def _method(name: str, about: str) -> Row:
    """Print the options of a method, and those that a model's attention has besides."""
    from kernelformer.modules.spec import describe_options, describe_positions

    console.print(f"{name}: {about}")
    options = describe_options(name)
    example = next((x for x in options if x.name in ("num_features", "num_landmarks", "rank")), options[0])
    value: Row = {"method": name, "about": about}
    for part, title, given in (
        ("options", "", options),
        ("positions", "positions, in a layer or model", describe_positions()),
    ):
        table = _table("option", "default", "about")
        table.title, table.title_justify = title, "left"
        for x in given:
            table.add_row(x.name, str(x.default), x.about)
        console.print(table)
        value[part] = [{"name": x.name, "default": x.default, "about": x.about} for x in given]
    console.print(f"as an attention: {name}:{example.name}={example.default}")
    return value
