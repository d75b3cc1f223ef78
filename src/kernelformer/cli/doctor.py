"""``kernelformer doctor``."""

from __future__ import annotations

import typer
from rich.table import Table

from kernelformer.cli.common import Json, console, plain_errors, show_json


def doctor(as_json: Json = False) -> None:
    """Show versions, what is missing, threads, memory, devices and folders, and check attention against its definition.

    Ends with code 1 if that check fails; an extra that is not installed is no failure.
    """
    from kernelformer.diagnosis import as_lines, diagnose

    with plain_errors():
        found = diagnose()
        for line in as_lines(found):
            console.print(line, soft_wrap=True)
        table = Table("extra", "gives", "installed", "missing", "install by")
        for x in found["extras"]:
            installed = ", ".join(f"{name} {version}" for name, version in x["installed"].items())
            table.add_row(x["extra"], x["gives"], installed, ", ".join(x["missing"]), x["install"] or "")
        console.print(table)
        if as_json:
            show_json(found)
    if not found["self_check"]["passed"]:
        raise typer.Exit(1)
