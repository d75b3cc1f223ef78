"""Commands and groups of typer with panels, examples, and errors of one or two lines."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, ClassVar, NoReturn

import typer
from rich.text import Text
from typer.core import TyperCommand, TyperGroup, TyperOption

from kernelformer.cli.common import console, errors, fail
from kernelformer.commands import program
from kernelformer.errors import unknown

START, MODELS, PRETRAINED, MEASURE = "Start here", "Train and use models", "Pretrained models", "Measure"
INPUT = "Input"
ATTENTION = "Attention"
SIZE = "Size"
TRAINING = "Training"
DISTILLATION = "Distillation"
MEASURING = "Measuring"
WRITING = "Writing text"
RUNNING = "Running"
OUTPUT = "Output"

_PARTS: dict[str, str] = {
    INPUT: "allow_pickle original prompt samples sequence task text",
    ATTENTION: "attention features keep keep_heads layers recall_heads",
    SIZE: "batch heads length use_length",
    TRAINING: "steps",
    DISTILLATION: "distill lora lora_layers minutes repeats tune window_dropout",
    MEASURING: "check judge_minutes no_judge passkey_lengths passkeys probe sample_tokens tolerance",
    WRITING: "temperature tokens top_k",
    RUNNING: "follow_links limits seed threads",
    OUTPUT: "as_json force growing logits prompt_only help out version",
}


def by_option(parts: Mapping[str, str]) -> dict[str, str]:
    """Parts of the help by the names of the options that stand in them."""
    return {name: part for part, names in parts.items() for name in names.split()}


PANELS = by_option(_PARTS)


Example = tuple[str, str]  # the words after the command's name, and what they do


@dataclass(frozen=True)
class Entry:
    """A command that is imported when it is run or its own help is asked for."""

    target: str  # ``package.module:function``, or ``package.module:app`` for a group of commands
    panel: str
    help: str
    examples: tuple[Example, ...] = ()

    @property
    def is_group(self) -> bool:
        """True if it has commands of its own."""
        return self.target.endswith(":app")

    def load(self, name: str) -> Any:
        """Import the command and build it."""
        module, _, attribute = self.target.partition(":")
        found = getattr(import_module(module), attribute)
        if self.is_group:
            group = typer.main.get_group(found)
            group.name, group.help = name, self.help
            return group
        info = typer.models.CommandInfo(name, cls=Command, callback=found, help=found.__doc__)
        command: Any = typer.main.get_command_from_info(info, pretty_exceptions_short=True, rich_markup_mode="rich")
        command.examples = self.examples
        return command


@dataclass(frozen=True)
class CommandSet:
    """Commands of a distribution."""

    commands: Mapping[str, Entry]
    panels: Mapping[str, str] = field(default_factory=dict)


# typer carries its own copy of click from some version on; the class of its usage errors is the base of this one.
UsageError: Any = typer.BadParameter.__mro__[1]
ORDER = list(dict.fromkeys(PANELS.values()))


class Command(TyperCommand):
    """A command whose options stand in the parts of the help that `PANELS` names, with examples at the end."""

    examples: tuple[Example, ...] = ()

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
        if self.examples:
            lines = example_lines(_path(ctx), self.examples)
            console.print(Text.assemble((" Examples\n", "bold"), *(x for line in lines for x in line)), soft_wrap=True)


class Group(TyperGroup):
    """A group of commands that are imported on demand; errors name the nearest command in one or two lines."""

    entries: ClassVar[Mapping[str, Entry]] = {}
    missing: ClassVar[Mapping[str, str]] = {}  # names of commands that other distributions have, and what to install

    def get_params(self, ctx: Any) -> list[Any]:
        """All parameters."""
        return _switches_alone(super().get_params(ctx))

    def list_commands(self, ctx: Any) -> list[str]:
        """Names of the commands, as the help shows them."""
        return [*self.entries, *super().list_commands(ctx)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """A command as the help of the group shows it: `resolve_command` imports it."""
        entry = self.entries.get(cmd_name)
        if entry is None or cmd_name in self.commands:
            return super().get_command(ctx, cmd_name)
        return Command(cmd_name, help=entry.help, rich_help_panel=entry.panel)

    def load(self, name: str) -> Any:
        """Import a command."""
        if name not in self.commands:
            self.commands[name] = self.entries[name].load(name)
        return self.commands[name]

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that is named, or an error with the nearest name, of subcommands too."""
        if not args or args[0].startswith("-"):
            return super().resolve_command(ctx, args)
        if args[0] in self.missing and args[0] not in self.entries:
            ctx.fail(f"{args[0]!r} is not installed; {self.missing[args[0]]}")
        known = self.list_commands(ctx)
        if args[0] not in known:
            for name in [x for x, entry in self.entries.items() if entry.is_group]:
                inner = self.load(name).list_commands(ctx)
                if args[0] in inner:
                    ctx.fail(f"{args[0]!r} is a command of {name!r}; say `{program()} {name} {args[0]}`.")
                known += [f"{name} {x}" for x in inner]
            ctx.fail(str(unknown("command", args[0], known)))
        if args[0] in self.entries:
            self.load(args[0])
        return super().resolve_command(ctx, args)

    def main(self, args: Any = None, prog_name: Any = None, standalone_mode: bool = True, **settings: Any) -> Any:  # type: ignore[override]
        """Run a command; usage errors end without a traceback."""
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


def example_lines(path: str, examples: Iterable[Example]) -> list[tuple[str, tuple[str, str]]]:
    """Examples of a command for the end of its help: each with what it does, which is printed dimly."""
    return [(f"   kernelformer {path} {words}".rstrip(), (f"   # {about}\n", "dim")) for words, about in examples]


def _path(ctx: Any) -> str:
    """Words of a command after the program's name."""
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
    """Print a usage error and end with code 2."""
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
    """Reword a sentence of typer in the style of our own errors."""
    for before, after in (
        ("Invalid value for ", ""),
        ("Input should be ", "it must be "),
        (", unable to parse string as an integer", ""),
        (", unable to parse string as a number", ""),
    ):
        text = text.replace(before, after)
    return text[:1].lower() + text[1:]
