"""Command-line options derived from settings dataclasses."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import MISSING, Field
from functools import cache
from typing import Annotated, Any, get_type_hints

import typer

from kernelformer.cli.common import plain_errors
from kernelformer.lazy import LAYERS
from kernelformer.settings import OPTION, Option, as_text, from_text, given_as, list_type, options

Complete = Callable[[str], list[str]]


@cache
def method_names() -> tuple[str, ...]:
    """Names of all methods and registered layers."""
    from kernelformer.modules import METHODS  # imports torch, which completion alone needs

    return (*METHODS, *LAYERS)


def attentions(incomplete: str) -> list[str]:
    """Names of methods; after a comma further ones."""
    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{x}" for x in starting(last, method_names())]


def one_of(*names: str) -> Complete:
    """A fixed choice; after a comma further ones."""

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        return [f"{before}{comma}{x}" for x in starting(last, names)]

    return complete


def starting(incomplete: str, names: Iterable[str]) -> list[str]:
    """The names that begin with what was typed, sorted."""
    return sorted({x for x in names if x.startswith(incomplete)})


Command = Callable[..., None]


def takes(settings: type[Any]) -> Callable[[Command], Command]:
    """Give a command the options of a settings dataclass.

    The command's first parameter gets the settings; its other ones stay options of its own. Arguments come first, then
    the options of the settings, those of the command last.
    """
    hints = get_type_hints(settings)
    fields = {each.name: each for each, _ in options(settings)}

    def decorate(command: Command) -> Command:
        _, *others = inspect.signature(command).parameters.values()
        annotations = get_type_hints(command, include_extras=True)
        own = [x.replace(annotation=annotations[x.name]) for x in others]

        def run(**given: Any) -> None:
            with plain_errors():
                read = {name: _value(x, hints[name], given.pop(given_as(x))) for name, x in fields.items()}
                chosen = settings(**read)
            command(chosen, **given)

        derived = [_parameter(each, how, hints[each.name]) for each, how in options(settings)]
        parameters = [x.replace(kind=inspect.Parameter.KEYWORD_ONLY) for x in (*derived, *own)]
        parameters.sort(key=_is_argument, reverse=True)
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        run.__annotations__ = {x.name: x.annotation for x in parameters}
        run.__signature__ = inspect.Signature(parameters, return_annotation=None)  # type: ignore[attr-defined]
        return run

    return decorate


def _value(each: Field[Any], hint: Any, given: Any) -> Any:
    if _is_text(each, hint):
        return from_text(each, hint, given)
    return tuple(given) if isinstance(given, list) else given


def _is_text(each: Field[Any], hint: Any) -> bool:
    """Return True if a field is given as one text to parse; a list argument has a word for each item instead."""
    how: Option = each.metadata[OPTION]
    return (list_type(hint) is not None and not how.argument) or how.parse is not None


def _parameter(each: Field[Any], how: Option, hint: Any) -> inspect.Parameter:
    text = _is_text(each, hint)
    item = list_type(hint)
    kind = str if text else hint if item is None else list[item]  # type: ignore[valid-type]
    bound = None if text else how.least
    name = given_as(each)
    complete = attentions if name == "attention" else one_of(*how.choices) if how.choices else None
    info: Any
    if how.argument:
        info = typer.Argument(help=how.help, metavar=how.shown, autocompletion=complete)
    elif how.switch:
        info = typer.Option("--" + name.replace("_", "-"), help=how.help)
    else:
        info = typer.Option(help=how.help or None, min=bound, autocompletion=complete)
    default = inspect.Parameter.empty if each.default is MISSING else as_text(each.default) if text else each.default
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, info])


def _is_argument(parameter: inspect.Parameter) -> bool:
    return any(isinstance(x, typer.models.ArgumentInfo) for x in parameter.annotation.__metadata__)
