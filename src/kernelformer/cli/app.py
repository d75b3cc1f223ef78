"""Commands of ``kernelformer``."""

from __future__ import annotations

import typer
from rich.table import Table

from kernelformer import list_methods, method_options
from kernelformer.cli import benchmark, studies, training
from kernelformer.cli.common import console
from kernelformer.recipes.catalogue import RECIPES
from kernelformer.tasks import TASKS, task_options

app = typer.Typer(help="Linear-time attention by kernels.", no_args_is_help=True, add_completion=False)
for command in (training.train, training.evaluate, training.compare, training.generate, training.demo, benchmark.bench):
    app.command()(command)
app.add_typer(studies.app, name="study")


@app.command("list")
def list_() -> None:
    """Show methods, tasks and recipes, with their options."""
    methods = Table("method", "about", "options")
    for name, about in list_methods().items():
        methods.add_row(name, about, ", ".join(method_options(name)))
    tasks = Table("task", "about", "metric", "options (--set task.NAME=VALUE)")
    for name, task in TASKS.items():
        tasks.add_row(name, task.about, task.metric, ", ".join(task_options(name)))
    recipes = Table("recipe", "about", "source", "compares")
    for name, recipe in RECIPES.items():
        recipes.add_row(name, recipe.about, recipe.source, ", ".join(recipe.attentions))
    for table in (methods, tasks, recipes):
        console.print(table)
