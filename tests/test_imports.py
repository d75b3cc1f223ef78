"""What imports bring along: settings and help come without torch, and missing extras are named with their command."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import kernelformer
from kernelformer.cli.app import app
from kernelformer.lazy import TRAIN

SLOW = ("torch", "transformers", "accelerate", "datasets", "numpy", "matplotlib")
LIGHT = (
    "kernelformer",
    "kernelformer.cli.app",
    "kernelformer.errors",
    "kernelformer.records",
    "kernelformer.recipes.catalogue",
    "kernelformer.studies.settings",
    "kernelformer.tasks",
    "kernelformer.training",
    "kernelformer.training.config",
)
# A finder that knows nothing of some modules, as if they were not installed.
BLOCKED = """
import sys
from importlib.machinery import PathFinder
class Others:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return None if name.partition('.')[0] in {names!r} else PathFinder.find_spec(name, path, target)
sys.meta_path = [Others if x is PathFinder else x for x in sys.meta_path]
"""


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)


def commands() -> list[list[str]]:
    """Every command and group, as its words."""
    found: list[list[str]] = [[]]
    for group, words in ((app, []), *((x.typer_instance, [x.name]) for x in app.registered_groups)):
        found += [[*words, x.name or x.callback.__name__] for x in group.registered_commands]
        found += [words] if words else []
    return found


@pytest.mark.parametrize("module", LIGHT)
def test_settings_are_imported_without_torch(module):
    done = python(f"import sys, {module}; print([x for x in {SLOW!r} if x in sys.modules])")
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_no_help_and_no_version_waits_for_torch():
    code = f"""
import json, sys
from kernelformer.cli.app import app
from typer.testing import CliRunner
wrong = []
for words in json.loads(sys.argv[1]):
    for option in ["--help"] + ["--version"] * (not words):
        result = CliRunner().invoke(app, [*words, option])
        here = [x for x in {SLOW!r} if x in sys.modules]
        if result.exit_code or here:
            wrong.append([words, option, result.exit_code, here])
print(wrong)
"""
    every = commands()
    assert ["train"] in every
    assert ["study", "sparsity"] in every
    done = python(code, json.dumps(every))
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_the_version_is_the_package_s():
    done = python("from kernelformer.cli import main; main()", "--version")
    assert (done.returncode, done.stdout) == (0, f"kernelformer {kernelformer.__version__}\n")


def test_names_of_the_package_come_when_they_are_asked_for():
    code = """
import pickle, sys
import kernelformer as kf
assert "torch" not in sys.modules
assert set(kf.__all__) <= set(dir(kf)) and "__version__" in dir(kf)
assert kf.modules.KernelAttention is kf.KernelAttention  # the packages of the core need no import of their own
from kernelformer import *
assert build_attention is kf.build_attention and State is kf.attention.State
core = build_attention("favor+", head_dim=4, num_heads=1, num_features=4)
assert pickle.loads(pickle.dumps(core)).method == "favor+"
for name in ("nothing", "hf"):
    try:
        getattr(kf, name)
    except AttributeError as problem:
        assert str(problem) == f"module 'kernelformer' has no attribute {name!r}", problem
    else:
        raise AssertionError(name)
"""
    assert python(code).stderr == ""


def test_every_public_name_is_there():
    for package in (kernelformer, sys.modules["kernelformer.tasks"], sys.modules["kernelformer.training"]):
        assert all(getattr(package, name) is not None for name in package.__all__)


@pytest.mark.parametrize("module", ["models", "hf", "tasks", "training", "hf.cache", "tasks.bytes", "training.run"])
@pytest.mark.parametrize("missing", [("transformers",), TRAIN])
def test_packages_say_what_to_install(module, missing):
    done = python(BLOCKED.format(names=missing) + f"import kernelformer.{module}")
    package = ".".join(f"kernelformer.{module}".split(".")[:2])
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last == (
        f"kernelformer.lazy.MissingExtraError: {package} needs {', '.join(missing)}: pip install 'kernelformer[train]'"
    )


@pytest.mark.parametrize("missing", ["typer", "rich", "transformers"])
def test_the_command_says_what_to_install(missing):
    done = python(BLOCKED.format(names=(missing,)) + "from kernelformer.cli import main; main()", "--help")
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr == f"the kernelformer command needs {missing}: pip install 'kernelformer[train]'\n"


def test_the_core_works_without_the_extra():
    code = "import kernelformer as kf; print(kf.build_attention('favor+', head_dim=4, num_heads=1).method)"
    done = python(BLOCKED.format(names=(*TRAIN, "typer", "matplotlib")) + code)
    assert done.stdout == "favor+\n", done.stderr
