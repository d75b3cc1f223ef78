"""A call that cannot be understood: one or two lines, the nearest name, code 2, and no traceback."""

from __future__ import annotations

import errno
import os
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from kernelformer.cli import _lacks_memory
from kernelformer.cli.app import app
from kernelformer.cli.common import plain_errors
from kernelformer.lazy import MissingExtraError

WRONG = [
    (["trian"], "unknown command 'trian'; did you mean 'train'?"),
    (["study", "rank"], "unknown command 'rank'; did you mean 'ranks'?"),
    (["ranks"], "'ranks' is a command of 'study'"),
    (["train", "bytes", "--lenght", "3"], "unknown option '--lenght'; did you mean '--length'?"),
    (["--verison"], "unknown option '--verison'; did you mean '--version'?"),
    (["train"], "missing argument 'RECIPE'"),
    (["train", "bytes", "--steps", "x"], "'--steps': it must be a valid integer"),
    (["bench", "--heads", "0"], "'--heads': it must be greater than or equal to 1"),
    (["evaluate", "a", "b"], "got unexpected extra argument"),
    (["results", "--date"], "'--date' requires an argument"),
    (["train", "byts"], "unknown recipe 'byts'; did you mean 'bytes'?"),
    (["train", "bytes", "--attention", "favr+"], "unknown method 'favr+'; did you mean 'favor+'?"),
    (["train", "bytes", "--set", "learning_rat=1"], "did you mean 'learning_rate'?"),
    (["list", "metods"], "did you mean 'methods'?"),
    (["reproduce", "varance"], "unknown item 'varance'; did you mean 'variance'?"),
    (["study", "approximation", "--text", "x"], "missing option '--model'"),
    (["bench", "--modes", "cau"], "unknown mode 'cau'; did you mean 'causal'?"),
    (["evaluate", "nowhere/at/all"], "nowhere/at/all"),
]


@pytest.mark.parametrize(("words", "said"), WRONG, ids=lambda x: " ".join(x) if isinstance(x, list) else "")
def test_what_is_wrong_is_said_in_two_lines_with_the_nearest_name(words, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["kernelformer", *words])
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit)
    lines = result.stderr.splitlines()
    assert lines[0].startswith("error: ")
    assert said in lines[0]
    assert len(lines) <= 2
    assert result.stdout == ""


def test_a_missing_extra_is_an_error_of_one_line(capsys):
    with pytest.raises(typer.Exit), plain_errors():
        raise MissingExtraError("x needs y: pip install 'kernelformer[y]'")
    assert capsys.readouterr().err == "error: x needs y: pip install 'kernelformer[y]'\n"


def test_a_reader_that_has_enough_is_no_error(monkeypatch, capfd):
    ours, theirs = os.pipe()
    os.close(ours)
    with os.fdopen(theirs, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        pipe.write("x")
        with pytest.raises(typer.Exit) as end, plain_errors():
            pipe.flush()
    assert end.value.exit_code == 141
    assert capfd.readouterr().err == ""


def test_no_command_shows_the_help():
    result = CliRunner().invoke(app, [])
    assert result.exit_code == 2
    assert "Start here" in result.output
    assert "error" not in result.stderr


def test_a_process_with_too_little_memory_to_import_says_so_in_one_line():
    code = (
        "import resource\nresource.setrlimit(resource.RLIMIT_AS, (200 << 20, resource.RLIM_INFINITY))\n"
        "from kernelformer.cli import main\nmain()"
    )
    done = subprocess.run([sys.executable, "-c", code, "list"], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == (
        "error: there is not enough memory; this process may have 200 MiB, raise that by ulimit -v unlimited.\n"
    )


def test_an_error_is_one_of_memory_only_where_it_says_so():
    for limited in (False, True):
        assert _lacks_memory(MemoryError(), limited)
        assert _lacks_memory(ImportError("libtorch_cpu.so: failed to map segment from shared object"), limited)
        assert _lacks_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), limited)
        assert not _lacks_memory(ImportError("no module named x"), limited)
        assert _lacks_memory(SystemError("error return without exception set"), limited) == limited
        problem = ImportError("a module could not be imported")
        problem.__context__ = MemoryError()
        assert _lacks_memory(problem, limited)


def test_a_full_disk_is_named_by_every_command(capsys):
    for problem, where in ((OSError(errno.ENOSPC, "x", "a/b"), "a/b"), (OSError(errno.EDQUOT, "x"), "standard output")):
        with pytest.raises(typer.Exit) as end, plain_errors():
            raise problem
        assert end.value.exit_code == 2
        assert f"error: the disk is full: {where}" in capsys.readouterr().err
