"""Records without what belongs to one machine: no paths of its own, no numbers that JSON does not have."""

from __future__ import annotations

import json
import math
import re
import shlex
from pathlib import Path
from typing import Any

WIDTH = 110
PROSE = ("title", "about", "source", "note")  # keys whose texts are sentences: a path in them ends at a space
_HOME = re.compile(r"(?:[A-Za-z]:)?/(?:home|Users)/[^/]+(?=/|$)|/root(?=/|$)|~[^/]*")
_START = r"(?:file://)?(?:~[\w.-]*[\\/]|[A-Za-z]:[\\/]|/(?!/))"
_VALUE = re.compile(rf"(?:^|(?<=[=:,]))(?:{_START}[^,:]*|~$)")
_NAME = r"[\w.+@%-]+"
_WORD = re.compile(rf"(?<![\w.~/\\<]){_START}{_NAME}(?:[\\/]{_NAME})*/?")


def short_path(path: str) -> str:
    """The last two parts of a path, none of which is the home folder; ``~`` for that folder itself."""
    plain = path.removeprefix("file://").replace("\\", "/")
    home = Path.home().as_posix()
    if len(home) > 1 and (plain == home or plain.startswith(f"{home}/")):
        rest = plain[len(home) :]
    else:
        match = _HOME.match(plain)
        rest = plain[match.end() :] if match else plain
    names = [x for x in rest.split("/") if x not in ("", ".", "..") and not re.fullmatch("[A-Za-z]:", x)]
    return "/".join(names[-2:]) or "~"


def short_paths(text: str, prose: bool = False) -> str:
    """A text with its absolute paths shortened; outside of prose a path may have spaces and ends with the value."""

    def word(match: re.Match[str]) -> str:
        one = match[0][0] == "/" and match[0].count("/") == 1  # such as "and /or": a word rather than a path
        return match[0] if one else short_path(match[0])

    text = text if prose else _VALUE.sub(lambda match: short_path(match[0]), text)
    return _WORD.sub(word, text)


def short_command(command: str) -> str:
    """A command line with its paths shortened, word by word."""
    try:
        words = shlex.split(command)
    except ValueError:  # an open quote
        return short_paths(command, prose=True)
    return shlex.join(short_paths(word) for word in words)


def portable(value: Any, key: str = "") -> Any:
    """A copy of a record that any machine may see; ``key`` is what it is called where it stands."""
    if isinstance(value, dict):
        return {str(name): portable(x, str(name)) for name, x in value.items()}
    if isinstance(value, list | tuple):
        return [portable(x) for x in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, str):
        return short_command(value) if key == "command" else short_paths(value, prose=key in PROSE)
    return value


def rounded(value: Any) -> Any:
    """A copy with seven digits of every number that is not an integer: more than a measurement has."""
    if isinstance(value, dict):
        return {name: rounded(x) for name, x in value.items()}
    if isinstance(value, list):
        return [rounded(x) for x in value]
    return float(f"{value:.7g}") if isinstance(value, float) else value


def as_text(value: Any, indent: str = "") -> str:
    """JSON to read: what fits on a line stands on one, anything else has a line for each of its items."""
    flat = json.dumps(value, allow_nan=False)
    if not isinstance(value, dict | list) or not value or len(indent) + len(flat) <= WIDTH:
        return flat
    inner = f"{indent}  "
    if isinstance(value, dict):
        items = [f"{json.dumps(name)}: {as_text(x, inner)}" for name, x in value.items()]
    else:
        items = [as_text(x, inner) for x in value]
    opened, closed = "{}" if isinstance(value, dict) else "[]"
    return f"{opened}\n" + ",\n".join(inner + item for item in items) + f"\n{indent}{closed}"
