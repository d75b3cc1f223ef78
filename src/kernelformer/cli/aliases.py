"""Names and forms of options that older versions had: they go on working, are not in --help, and warn."""

from __future__ import annotations

import copy
import functools
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

from typer.models import OptionInfo

from kernelformer.cli.common import plain_errors, target, warn

Command = TypeVar("Command", bound=Callable[..., None])
PICTURES = (".png", ".pdf", ".svg", ".jpg")


def renamed(**names: str) -> Callable[[Command], Command]:
    """Let a command take options by their former names too.

    A former name that is another option's name by now, as when ``--text`` and ``--held-out`` have become ``--distill``
    and ``--text``, is a former name only beside one that is nothing else: all of them change at once.

    Args:
        names: parameters of the command by the names that they had before, as Python writes both.
    """
    gone = [x for x in names if x not in names.values()]

    def decorate(command: Command) -> Command:
        hints, signature = get_type_hints(command, include_extras=True), inspect.signature(command)
        needed = [x for x in names.values() if signature.parameters[x].default is inspect.Parameter.empty]

        @functools.wraps(command)
        def run(**given: Any) -> None:
            with plain_errors():
                asked = [old for old in gone if given[old] is not None]
                former = {x: given.pop(x) for x in gone}
                former |= {x: given[x] for x in names if x not in gone and asked}
                kept = {x: None if x in former else given[x] for x in names.values()}
                for old, value in former.items():
                    if value is None:
                        continue
                    new = names[old]
                    if kept[new] not in (None, signature.parameters[new].default):
                        raise ValueError(f"{_option(old)} is the former name of {_option(new)}; give one of them.")
                    warn(f"{_option(old)} is called {_option(new)} now; the old name will go.")
                    given[new] = value
                for name in needed:
                    if given[name] is None:
                        raise ValueError(f"{_option(name)} is missing; --help says what it is.")
            command(**given)

        for old in gone:
            kind, info = get_args(hints[names[old]])
            hints[old] = Annotated[kind | None, _hidden(info, _option(old))]
        for name in needed:  # typer would ask for the new name although the former one was given
            kind, info = get_args(hints[name])
            hints[name] = Annotated[kind | None, info]
        run.__annotations__ = hints
        parameters = [
            x.replace(annotation=hints[x.name], default=None if x.name in needed else x.default)
            for x in signature.parameters.values()
        ]
        parameters += [
            inspect.Parameter(x, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=hints[x]) for x in gone
        ]
        run.__signature__ = signature.replace(parameters=parameters, return_annotation=None)  # type: ignore[attr-defined]
        return run  # type: ignore[return-value]

    return decorate


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _hidden(info: OptionInfo, name: str) -> OptionInfo:
    """The same option by another name: within `Annotated` the first of its names stands where a default would."""
    other = copy.copy(info)
    other.default, other.param_decls, other.hidden = name, (), True
    return other


def literal_text(prompt: str | None, text: str | None) -> str | None:
    """The prompt as it was written, or read from a file; None where neither was given.

    Args:
        prompt: value of --prompt.
        text: value of --text, a file in UTF-8, whose last line break is not part of the prompt. What is not there
            was a prompt in older versions, and counts as one.
    """
    if prompt is not None and text is not None:
        raise ValueError(f"--prompt {prompt!r:.40} and --text {text!r:.40} both say what to read; give one of them.")
    if text is None:
        return prompt
    if not os.path.isfile(text):
        if os.path.exists(text):
            raise ValueError(f"{text} is not a regular file; --text takes one, --prompt a text.")
        warn(f"there is no file {text!r:.60}: it counts as the prompt. --text takes a file, --prompt a text.")
        return text
    try:
        return Path(text).read_text("utf-8-sig").removesuffix("\n")
    except UnicodeDecodeError as problem:
        raise ValueError(f"{text} is not UTF-8: {problem.reason}; save it as UTF-8.") from None


def picture_in(out: Path, name: str) -> Path:
    """The picture's path in the folder --out; older versions took the path of the picture, which still works."""
    if out.suffix.lower() in PICTURES and not out.is_dir():
        warn(
            f"--out is a folder, in which the picture is {name}; the path of a picture, as {out}, will not do for long."
        )
        return target(out)
    return target(out / name)
