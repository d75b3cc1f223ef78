"""``kernelformer list | doctor``: methods and their options, and the installation."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.table import Table

from kernelformer.cli.common import Json, console, plain_errors, show_json
from kernelformer.cli.options import attentions
from kernelformer.errors import choice
from kernelformer.lazy import LAYERS

Row = dict[str, Any]


def list_(
    what: Annotated[
        str, typer.Argument(metavar="[METHOD]", help="name of a method; default: all", autocompletion=attentions)
    ] = "",
    as_json: Json = False,
) -> None:
    """Show the methods, or the options of one of them."""
    from kernelformer import list_methods

    with plain_errors():
        methods = list_methods()
        if what in ("", "methods"):
            value: Row = {"methods": show_methods()}
        else:
            name = choice("method", what, list(methods))
            value = show_method(name, methods[name])
        if as_json:
            show_json(value)


def plain_table(*columns: str) -> Table:
    """Table whose first column, of names to copy, is never wrapped."""
    table = Table(*columns)
    table.columns[0].no_wrap = True
    table.caption_justify = "left"
    return table


def print_rows(rows: list[Row], heads: dict[str, str], caption: str | None = None) -> list[Row]:
    """Print rows as a table with these headings, lists between commas; None instead of a row is a line."""
    table = plain_table(*heads.values())
    table.caption = caption
    for row in rows:
        cells = (row[name] for name in heads)
        table.add_row(*(", ".join(x) if isinstance(x, list | tuple) else str(x) for x in cells))
    console.print(table)
    return rows


def show_methods() -> list[Row]:
    """Print all methods with what they are."""
    from kernelformer import list_methods, method_options

    rows = [
        {"method": name, "about": about, "options": list(method_options(name))}
        for name, about in list_methods().items()
    ]
    rows += [{"method": name, "about": x.about, "options": list(x.options)} for name, x in LAYERS.items()]
    return print_rows(rows, {"method": "method", "about": "about", "options": "options"})


def show_method(name: str, about: str) -> Row:
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
        table = plain_table("option", "default", "about")
        table.title, table.title_justify = title, "left"
        for x in given:
            table.add_row(x.name, str(x.default), x.about)
        console.print(table)
        value[part] = [{"name": x.name, "default": x.default, "about": x.about} for x in given]
    console.print(f"as an attention: {name}:{example.name}={example.default}")
    return value


def doctor(as_json: Json = False) -> None:
    """Show versions, what is missing, threads, memory, devices and folders, and check attention against its definition.

    Ends with code 1 if that check fails; an extra that is not installed is no failure.
    """
    from kernelformer.diagnosis import as_lines, diagnose, missing_lines

    with plain_errors():
        found = diagnose()
        for line in (*as_lines(found), *missing_lines(found)):
            console.print(line, soft_wrap=True)
        if as_json:
            show_json(found)
    if not found["self_check"]["passed"]:
        raise typer.Exit(1)
