"""``kernelformer doctor``."""

from __future__ import annotations

import typer

from kernelformer.cli.common import Json, console, plain_errors, show_json


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
