"""The command line: errors, threads, lists."""

from __future__ import annotations

import os

import pytest
import torch
import typer
from typer.testing import CliRunner

from kernelformer import formatting as units
from kernelformer.cli import common
from kernelformer.cli.app import app
from kernelformer.cli.common import fail, plain_errors, thread_count
from kernelformer.cli.listing import list_
from kernelformer.errors import StoppedError, TrainingError
from kernelformer_lab.training.config import everywhere


@pytest.mark.parametrize("problem", [StoppedError("stopped after step 3."), KeyboardInterrupt()])
def test_what_was_stopped_ends_as_the_shell_expects_and_is_no_error(problem, capsys):
    with pytest.raises(typer.Exit) as end, plain_errors():
        raise problem
    assert end.value.exit_code == 130
    assert capsys.readouterr().err.startswith("stopped ")


def test_an_error_is_said_whole_and_once_if_all_processes_have_it(monkeypatch, capsys):
    path = "/a/" + "long/" * 60 + "path:smile:[x]"
    for rank, problem, said in [
        ("0", ValueError(path), f"error: {path}\n"),
        ("1", ValueError(path), f"error on process 1: {path}\n"),
        ("0", everywhere(TrainingError("x")), "error: x\n"),
        ("1", everywhere(TrainingError("x")), ""),
    ]:
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(typer.Exit):
            fail(problem)
        assert capsys.readouterr() == ("", said)


def test_threads_are_those_that_the_machine_the_launcher_or_the_user_gives(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)), raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    for idle, expected in ((None, 6), (5.9, 6), (3.6, 4), (0.2, 1)):
        monkeypatch.setattr(common, "free_cores", lambda idle=idle: idle)
        assert thread_count(None) == expected
    assert thread_count(3) == 3
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert thread_count(None) == 1
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "9")
    assert thread_count(None) == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    torch.set_num_threads(2)
    assert thread_count(None) == 2


def test_list_names_every_method():
    result = CliRunner().invoke(app, ["list"])
    assert result.exit_code == 0
    assert "favor+hyperbolic" in result.output


def test_the_list_of_the_library_alone_has_methods_and_their_options(capsys):
    list_()
    assert "favor+hyperbolic" in capsys.readouterr().out
    list_("favor+")
    assert capsys.readouterr().out.startswith("favor+: ")
    with pytest.raises(typer.Exit):
        list_("favr+")
    assert "unknown method 'favr+'; did you mean 'favor+'?" in capsys.readouterr().err


def test_times_and_sizes_read_well():
    assert units.human_time(1.2345) == "1.23 s"
    assert units.human_time(0.0123) == "12.3 ms"
    assert units.human_time(4.5e-5) == "45 µs"
    assert units.human_bytes(3 * 2**20) == "3 MiB"
    assert units.human_bytes(300 * 2**20) == "300 MiB"
    assert units.human_ratio(0.346) == "0.35x"
    assert units.human_ratio(21.94) == "21.9x"
    assert units.human_bytes(None) == ""
