"""Cost of imports: settings and help come without torch, and missing extras are named with their command."""

from __future__ import annotations

import subprocess
import sys

import pytest

import kernelformer
import kernelformer_lab.tasks
import kernelformer_lab.training
from kernelformer.cli.app import Program
from kernelformer.lazy import HF

SLOW = ("torch", "transformers", "accelerate", "datasets", "numpy", "matplotlib")
LIGHT = (
    "kernelformer",
    "kernelformer.cli.app",
    "kernelformer.errors",
    "kernelformer_lab.records",
    "kernelformer_lab.recipes.catalogue",
    "kernelformer_lab.studies",
    "kernelformer_lab.tasks",
    "kernelformer_lab.training",
    "kernelformer_lab.training.config",
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


@pytest.mark.parametrize("module", LIGHT)
def test_settings_are_imported_without_torch(module):
    done = python(f"import sys, {module}; print([x for x in {SLOW!r} if x in sys.modules])")
    assert (done.stdout, done.stderr) == ("[]\n", "")


@pytest.mark.parametrize("words", ["--help", "--version", "convert --help", "train --help", "study --help"])
def test_help_does_not_wait_for_torch(words):
    code = "import sys; from kernelformer.cli.app import app; app(sys.argv[1:], standalone_mode=False)"
    done = python(f"{code}; print([x for x in {SLOW!r} if x in sys.modules])", *words.split())
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


def test_the_table_of_commands_has_their_docstrings():
    for name, entry in Program.entries.items():
        if not entry.is_group:
            about = " ".join(entry.load(name).help.split())
            assert about.startswith(entry.help), (name, about)


def test_the_library_works_without_the_laboratory():
    blocked = (
        BLOCKED.format(names=("kernelformer_lab",))
        + "import importlib.metadata as m; m.entry_points = lambda **_: ()\n"
    )
    done = python(blocked + "from kernelformer.cli import main; main()", "list", "--json")
    assert "favor+" in done.stdout, done.stderr
    done = python(blocked + "from kernelformer.cli import main; main()", "train", "listops")
    assert done.returncode == 2
    assert "error: 'train' is not installed; install the laboratory by pip install kernelformer-lab." in done.stderr


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
    for package in (kernelformer, kernelformer_lab.tasks, kernelformer_lab.training):
        assert all(getattr(package, name) is not None for name in package.__all__)


@pytest.mark.parametrize("module", ["models", "hf", "export", "hf.convert"])
@pytest.mark.parametrize("missing", [("transformers",), HF])
def test_packages_say_what_to_install(module, missing):
    done = python(BLOCKED.format(names=missing) + f"import kernelformer.{module}")
    package = ".".join(f"kernelformer.{module}".split(".")[:2])
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last == (
        f"kernelformer.lazy.MissingExtraError: {package} needs {', '.join(missing)}: pip install 'kernelformer[hf]'"
    )


@pytest.mark.parametrize("missing", ["typer", "rich", "transformers"])
def test_the_command_says_what_to_install(missing):
    done = python(BLOCKED.format(names=(missing,)) + "from kernelformer.cli import main; main()", "--help")
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr == f"the kernelformer command needs {missing}: pip install 'kernelformer[hf]'\n"


def test_the_core_works_without_the_extra():
    code = "import kernelformer as kf; print(kf.build_attention('favor+', head_dim=4, num_heads=1).method)"
    done = python(BLOCKED.format(names=(*HF, "typer", "matplotlib")) + code)
    assert done.stdout == "favor+\n", done.stderr
