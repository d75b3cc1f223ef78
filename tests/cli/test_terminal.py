"""Nothing that is printed is obeyed by the terminal: names, data and texts may hold anything."""

from __future__ import annotations

import ast
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.progress import Progress
from rich.table import Table
from rich.text import Text
from typer.testing import CliRunner

import kernelformer
from kernelformer.cli.app import app
from kernelformer.cli.common import VisibleConsole, text_column
from kernelformer.formatting import visible

ROOT = Path(kernelformer.__file__).parent
# Colours, a window's title, the clipboard, a bell, the cursor, C1 controls, overrides of direction, half a pair.
HOSTILE = (
    "\x1b[31mred",
    "\x1b]0;title\x07",
    "\x1b]52;c;cm0=\x1b\\",
    "\x1b[2J",
    "over\rwritten",
    "\x08\x08",
    "\x9b31m",
    "\u202egnp.exe",
    "\u2066x\u2069",
    "\udc80",
    "a\x00b",
    "line\u2028end",
)
MARKUP = ("[red]x[/red]", "[/]", "[link=file:///etc]y[/link]", ":bomb:", "[bold]")


def printed(what: object, **settings: object) -> str:
    out = io.StringIO()
    VisibleConsole(file=out, width=200, **settings).print(what)
    return out.getvalue()


def obeyed(text: str) -> list[str]:
    """Text that a terminal would act on."""
    return [hex(ord(x)) for x in text if x != "\n" and visible(x) != x]


@pytest.mark.parametrize("kind", ["text", "cell", "title", "heading", "caption"])
def test_what_is_printed_is_seen_whole(kind):
    for text in (*HOSTILE, *MARKUP):
        table = Table(text if kind == "heading" else "name")
        table.title, table.caption = (text if kind == x else None for x in ("title", "caption"))
        table.add_row(text if kind == "cell" else "value")
        said = printed(text if kind == "text" else table)
        assert not obeyed(said), text
        assert "".join(visible(text).split()) in "".join(said.split()), text


def test_texts_that_were_made_elsewhere_are_not_obeyed_either():
    for text in HOSTILE:
        if text != "\udc80":  # which rich cannot hold
            assert not obeyed(printed(Text(text))), text


def test_a_progress_bar_shows_names_and_keeps_its_own_control_codes():
    out = io.StringIO()
    console = VisibleConsole(file=out, width=120, force_terminal=True, color_system=None)
    with Progress(text_column("{task.description}"), console=console) as progress:
        progress.add_task(visible("\x1b]0;t\x07[red]"), total=1)
    said = out.getvalue()
    assert "<U+001B>]0;t<U+0007>[red]" in said
    assert "\x1b]" not in said
    assert "\x1b[?25l" in said  # rich hides the cursor meanwhile


@pytest.mark.parametrize("command", ["evaluate", "generate", "translate", "list", "compare", "train"])
def test_errors_show_names_as_they_are(tmp_path, command):
    for name in ("no\x1b]0;title\x07\rsuch", "[red]none[/red]", "\u202efdp"):
        given = name if command in ("list", "compare", "train") else str(tmp_path / name)
        result = CliRunner().invoke(app, [command, given])
        assert result.exit_code == 2
        assert not obeyed(result.output)
        inner = result.stderr.encode("unicode_escape").decode()
        assert visible(name) in result.stderr or repr(name)[1:-1] in result.stderr, inner


def test_results_of_a_folder_with_a_hostile_name(tmp_path):
    folder = tmp_path / "re\x1b[31msults[red]"
    result = CliRunner().invoke(app, ["results", "--records", str(folder)])
    assert not obeyed(result.output)
    assert "re<U+001B>[31msults[red]" in "".join(result.output.splitlines())


def test_what_a_model_writes_is_seen_in_a_pipe_and_on_a_terminal():
    text = "a\tb\n\x1b[31m\r\u202e[red]\n"
    code = f"from kernelformer.cli.common import write; write({text!r})"
    env = {**os.environ, "PYTHONIOENCODING": "utf-8"}
    piped = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, env=env).stdout
    assert piped == b"a\tb\n<U+001B>[31m<U+000D><U+202E>[red]\n"
    ours, theirs = os.openpty()
    with subprocess.Popen([sys.executable, "-c", code], stdout=theirs, env=env):
        os.close(theirs)
        shown = b""
        try:
            while block := os.read(ours, 1000):
                shown += block
        except OSError:  # how Linux ends a terminal
            pass
    os.close(ours)
    assert shown == b"a\tb\r\n<U+001B>[31m<U+000D><U+202E>[red]\r\n"


def test_a_warning_is_shown_by_the_command():
    code = (
        "import warnings\nfrom kernelformer.cli import main\n"
        "try: main()\nexcept SystemExit: warnings.warn('model \\x1b[2Jname')"
    )
    done = subprocess.run([sys.executable, "-c", code, "--version"], capture_output=True, text=True, check=True)
    assert done.stderr == "warning: model <U+001B>[2Jname\n"


def test_everything_is_printed_by_one_kind_of_console():
    """Workers print into pipes, and what starts them shows it; the version is our own."""
    wrong = []
    for path in ROOT.rglob("*.py"):
        name = path.relative_to(ROOT).as_posix()
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            call = ast.unparse(node.func)
            if call in ("Console", "rich.print", "RichHandler", "sys.stdout.write", "sys.stderr.write", "typer.secho"):
                wrong.append(f"{name}: {call}")
            if call == "print" and not name.endswith("worker.py"):
                wrong.append(f"{name}: {call}")
    assert wrong == ["cli/common.py: sys.stdout.write"]
