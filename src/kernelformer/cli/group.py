"""Commands and groups as typer builds them, with help in parts, examples, and errors of one or two lines."""

from __future__ import annotations

import sys
from typing import Any, NoReturn

import typer
from rich.text import Text
from typer.core import TyperCommand, TyperGroup, TyperOption

from kernelformer.cli.common import console, errors, fail
from kernelformer.cli.examples import EXAMPLES
from kernelformer.cli.vocabulary import PANELS
from kernelformer.commands import program
from kernelformer.errors import unknown

# typer carries its own copy of click from some version on; the class of its usage errors is the base of this one.
UsageError: Any = typer.BadParameter.__mro__[1]
ORDER = list(dict.fromkeys(PANELS.values()))


class Command(TyperCommand):
    """A command whose options stand in the parts of the help that `PANELS` names, with examples at the end."""

    def get_params(self, ctx: Any) -> list[Any]:
        """All parameters, those of one part of the help after another."""
        params = _switches_alone(super().get_params(ctx))
        for option in params:  # that for the help is there only now
            if isinstance(option, TyperOption) and option.rich_help_panel is None:
                option.rich_help_panel = PANELS.get(str(option.name))
        return sorted(params, key=lambda x: _place(getattr(x, "rich_help_panel", None)))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help, with the examples of this command."""
        super().format_help(ctx, formatter)
        lines = examples(_path(ctx))
        if lines:
            console.print(Text.assemble((" Examples\n", "bold"), *(x for line in lines for x in line)), soft_wrap=True)


class Group(TyperGroup):
    """A group of commands that names the nearest one, and says what is wrong with a call in one or two lines."""

    def get_params(self, ctx: Any) -> list[Any]:
        """All parameters."""
        return _switches_alone(super().get_params(ctx))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that is named, or an error with the nearest name, of the studies too."""
        if args and not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            known = [x for x in self.commands if not self.commands[x].hidden]
            for name, other in self.commands.items():
                if isinstance(other, TyperGroup):
                    known += [f"{name} {x}" for x in other.commands]
                    if args[0] in other.commands:
                        ctx.fail(f"{args[0]!r} is a command of {name!r}; say `{program()} {name} {args[0]}`.")
            ctx.fail(str(unknown("command", args[0], known)))
        return super().resolve_command(ctx, args)

    def main(self, args: Any = None, prog_name: Any = None, standalone_mode: bool = True, **settings: Any) -> Any:  # type: ignore[override]
        """Run a command; a call that it does not understand ends without a traceback and without a frame."""
        if not standalone_mode:
            return super().main(args, prog_name, standalone_mode=False, **settings)
        try:
            code = super().main(args, prog_name, standalone_mode=False, **settings)
        except UsageError as problem:
            _end(problem)
        except typer.Abort:
            errors.print("stopped")
            sys.exit(130)
        finally:
            console.stderr = False  # a command with --json has changed that, and there may be a next one
        sys.exit(code if isinstance(code, int) else 0)


def examples(path: str) -> list[tuple[str, tuple[str, str]]]:
    """Examples of a command for the end of its help: each with what it does, which is printed dimly."""
    return [
        (f"   kernelformer {path} {words}".rstrip(), (f"   # {about}\n", "dim"))
        for words, about in EXAMPLES.get(path, ())
    ]


def _path(ctx: Any) -> str:
    """Words of a command after the program's name, which may be ``python -m kernelformer``."""
    words: list[str] = []
    while ctx.parent is not None:
        words.insert(0, ctx.info_name)
        ctx = ctx.parent
    return " ".join(words)


def _switches_alone(params: list[Any]) -> list[Any]:
    """Let the help show switches without a type: they take no value."""
    for option in params:
        if getattr(option, "is_flag", False):
            option.metavar = ""
    return params


def _place(panel: str | None) -> int:
    return ORDER.index(panel) if panel in ORDER else -1


def _end(problem: Any) -> NoReturn:
    """Say what is wrong with a call, in one wording, and end with code 2."""
    if type(problem).__name__ == "NoArgsIsHelpError":  # the help has been printed
        sys.exit(2)
    path = "" if problem.ctx is None else _path(problem.ctx)
    name = getattr(problem, "option_name", None)
    text = str(problem.format_message()).rstrip(".")
    if type(problem).__name__ == "NoSuchOption":
        known = [
            x for option in problem.ctx.command.params if not getattr(option, "hidden", False) for x in option.opts
        ]
        options = [x for x in known if x.startswith("--")] + ["--help"]
        text = str(unknown("option", name, options)).rstrip(".")
    try:
        fail(
            ValueError(f"{_plain(text)}.\n{' '.join(filter(None, (program(), path)))} --help shows what can be given.")
        )
    except typer.Exit as end:
        sys.exit(end.exit_code)


def _plain(text: str) -> str:
    """A sentence of typer as the others are: without capitals at its start, and an option by its name alone."""
    for before, after in (
        ("Invalid value for ", ""),
        ("Input should be ", "it must be "),
        (", unable to parse string as an integer", ""),
        (", unable to parse string as a number", ""),
    ):
        text = text.replace(before, after)
    return text[:1].lower() + text[1:]
