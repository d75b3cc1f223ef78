"""One vocabulary over all commands: the same name means the same, stands in the same part, and has examples."""

from __future__ import annotations

import re
import shlex
from collections import defaultdict

import pytest
from typer.core import TyperOption
from typer.testing import CliRunner

from cli.commands import COMMANDS
from kernelformer.cli.app import app
from kernelformer.cli.group import PANELS

# Options that are the same thing wherever they stand: their help begins with the same words.
SAME = {
    "--allow-pickle": "read pickled weights of a trusted source",
    "--json": "print JSON on stdout, and all else on stderr",
    "--max-seconds": "seconds of one pass beyond which it is not run",
    "--memory": "measure peak memory too",
    "--out": "folder for ",
    "--records": "folder of the records and ",
    "--seed": "random seed",
    "--seeds": "runs of each, with as many seeds",
    "--skip-bad": "leave bad rows of the data out, and say how many",
    "--threads": "threads to compute with; default: OMP_NUM_THREADS, or all idle cores",
}
DEFAULTS = {"--seed": {0, None}, "--seeds": {1, None}, "--threads": {None}, "--json": {False}, "--task": {"auto"}}


def options(command):
    return [x for x in command.params if isinstance(x, TyperOption) and not x.hidden]


def by_name():
    """Every visible option by its name, with the command that has it."""
    seen = defaultdict(dict)
    for name, command in COMMANDS.items():
        for option in options(command):
            seen[option.opts[0]][name] = option
    return seen


def test_every_option_has_its_part_of_the_help_and_words():
    for name, users in by_name().items():
        for command, option in users.items():
            assert option.name in PANELS, f"{name} of {command}: say in cli/group.py where it stands"
            assert option.help, f"{name} of {command} has no help"


def test_help_names_options_of_its_own_command():
    for name, command in COMMANDS.items():
        own = {x for option in command.params for x in option.opts}
        for option in options(command):
            assert set(re.findall(r"--[a-z][a-z-]*", option.help)) <= own, f"{option.name} of {name}: {option.help}"


@pytest.mark.parametrize("arguments", [["judge"], ["study"], []])
def test_switches_are_shown_without_a_type(arguments):
    shown = CliRunner().invoke(app, [*arguments, "--help"], env={"COLUMNS": "120"}).output
    assert re.search(r"--help\s+Show this message", shown)
    assert "<bool>" not in shown


def test_one_name_is_one_thing():
    every = by_name()
    for name, words in SAME.items():
        assert every[name], name
        for command, option in every[name].items():
            assert option.help.startswith(words), f"{name} of {command}: {option.help}"
    for name, known in DEFAULTS.items():
        for command, option in every[name].items():
            assert option.default in known, f"{name} of {command}: {option.default}"


@pytest.mark.parametrize(
    ("plural", "single"), [("--lengths", "--length"), ("--heaps", "--heap"), ("--seeds", "--seed")]
)
def test_a_list_and_a_single_value_have_names_of_their_own(plural, single):
    every = by_name()
    assert every[plural]
    assert not any(option.opts[0] == single and "," in str(option.default) for option in every[single].values())


def test_every_command_has_examples_that_it_understands(tmp_path):
    for name, command in COMMANDS.items():
        assert command.examples
        for words, about in command.examples:
            assert about
            assert len(f"   kernelformer {name} {words}") < 90, "an example is one line"
            context = COMMANDS[name].make_context(name, shlex.split(words))  # an unknown option would raise
            assert context.params


def test_help_has_parts_and_examples():
    shown = CliRunner().invoke(app, ["convert", "--help"], env={"COLUMNS": "120"}).output
    places = [shown.index(x) for x in ("Arguments", "Input", "Attention", "Distillation", "Output", "Examples")]
    assert places == sorted(places)
    assert "kernelformer convert MODEL linear --distill train.jsonl --minutes 30" in shown
    first = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "120"}).output
    places = [first.index(x) for x in ("─ Start here", "─ Train and use models", "─ Pretrained models", "─ Measure")]
    assert places == sorted(places)
