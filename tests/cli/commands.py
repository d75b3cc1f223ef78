"""All commands of the command line, as it builds them, and what one prints as JSON."""

from __future__ import annotations

import json

import typer
from typer.testing import CliRunner

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


def as_json(*words):
    """Output of a command on stdout with --json, and on stderr."""
    result = CliRunner().invoke(app, [*map(str, words), "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout), result.stderr
