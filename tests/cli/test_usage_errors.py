"""A call that cannot be understood: one or two lines, the nearest name, code 2, and no traceback."""

from __future__ import annotations

import os
import sys

import pytest
import typer
from typer.testing import CliRunner

from kernelformer.cli.app import app
from kernelformer.cli.common import plain_errors
from kernelformer.lazy import MissingExtraError

WRONG = [
    (["trian"], "unknown command 'trian'; did you mean 'train'?"),
    (["study", "tou"], "unknown command 'tou'; did you mean 'tour'?"),
    (["tour"], "'tour' is a command of 'study'"),
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
    (["study", "overhead", "dmo"], "unknown recipe 'dmo'; did you mean 'demo'?"),
    (["study", "approximation", "--text", "x"], "--model is missing"),
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
