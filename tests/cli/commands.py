"""All commands of the command line, as it builds them."""

from __future__ import annotations

import typer

from kernelformer.cli.app import app


def every_command() -> dict[str, object]:
    """Commands by their words, those of groups too."""
    commands, program = {}, typer.main.get_command(app)
    for name in program.list_commands(None):
        command = program.load(name)
        if hasattr(command, "list_commands"):
            commands |= {f"{name} {x}": command.load(x) for x in command.list_commands(None)}
        else:
            commands[name] = command
    return commands


COMMANDS = every_command()
