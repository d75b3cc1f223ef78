"""The command line and the benchmark, at sizes that take a moment."""

from __future__ import annotations

import json
import os

import pytest
import torch
import typer
from typer.testing import CliRunner

from kernelformer import formatting as units
from kernelformer.cli import common
from kernelformer.cli.app import app
from kernelformer.cli.common import fail, plain_errors, thread_count
from kernelformer.errors import StoppedError, TrainingError
from kernelformer_lab.bench import benchmark as show
from kernelformer_lab.bench.attention import Case, Kernelformer, contender
from kernelformer_lab.bench.benchmark import HEAPS, Row, WorkerError, check, job, run_case
from kernelformer_lab.training.config import everywhere
from samples import change_study

SMALL = ["--heads", "2", "--head-dim", "8", "--features", "16", "--budget", "0.02"]


def test_bench_checks_times_weighs_and_writes(tmp_path):
    options = ["bench", "--lengths", "128", "--modes", "causal", "--passes", "train", "--attention", "favor+"]
    result = CliRunner().invoke(app, [*options, "--peers", "sdpa", "--heaps", "kept", "--out", str(tmp_path), *SMALL])
    assert result.exit_code == 0, result.output
    record = json.loads((tmp_path / "bench.json").read_text())
    assert record["machine"]["device"] == "cpu"
    assert [row["name"] for row in record["rows"]] == ["favor+", "sdpa"]
    for row in record["rows"]:
        assert row["seconds"]["kept"] > 0
        assert row["error"] < 1e-4
        assert row["peak"] is not None
    assert record["environment"]["torch"] == torch.__version__
    assert record["command"].startswith("kernelformer bench --lengths 128 --peers sdpa --modes causal --passes train")
    assert set(SMALL) <= set(record["command"].split())
    assert record["settings"]["attention"] == ["favor+"]
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_decoding_is_timed_for_what_can_decode():
    case = Case("decode", 64, heads=2, head_dim=8, features=16)
    rows = run_case(case, ["favor+", "softmax", "sdpa"], heaps=["default"], threads=1, budget=0.02, memory=True)
    assert rows[0].seconds["default"] > 0
    assert rows[1].note == "keeps all keys; the peer 'sdpa' is timed with them"
    assert not rows[1].seconds
    assert rows[2].seconds["default"] > 0
    (table,) = show.tables(rows, "favor+", ["default"])
    assert table.row_count == 2
    assert table.caption == "softmax: keeps all keys; the peer 'sdpa' is timed with them"


def test_a_contender_that_is_off_its_definition_is_not_timed(monkeypatch):
    case = Case("bidirectional", 64, heads=2, head_dim=8, features=16)
    found = check(case, ["favor+"])["favor+"]
    assert found["error"] < found["tolerance"]
    monkeypatch.setattr(Kernelformer, "definition", lambda self, case, q, k, v: v + 1)
    assert check(case, ["favor+"])["favor+"]["error"] > found["tolerance"]

    def wrong(kind, *args, **more):
        assert kind == "check", "timed although it is wrong"
        return {"favor+": {"error": 0.5, "tolerance": 1e-4}}

    monkeypatch.setattr("kernelformer_lab.bench.benchmark.job", wrong)
    (row,) = run_case(case, ["favor+"], heaps=["default"], threads=1, budget=0.02, memory=True)
    assert "off its definition by 5.0e-01" in row.note


@pytest.mark.parametrize("method", ["softmax", "gaussian", "favor+", "relu", "trigonometric", "elu", "sdpa"])
@pytest.mark.parametrize("task", ["bidirectional", "causal"])
def test_every_contender_of_ours_is_its_definition(method, task):
    case = Case(task, 64, heads=2, head_dim=8, features=16)
    one = contender(method)
    assert one.error(case) < one.tolerance


def test_a_failing_worker_is_reported():
    with pytest.raises(WorkerError, match=r"nothing at causal forward, L = 8: .*unknown method 'nothing'"):
        job("time", Case("causal", 8), ["nothing"], heap="default", threads=1, budget=0.1)
    assert "unknown method" in check(Case("causal", 8), ["nothing"])["nothing"]["problem"]
    assert set(HEAPS) == {"default", "kept"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--attention", "favor"], "unknown method 'favor'; did you mean 'favor+'?"),
        (["--peers", "flash"], "unknown method 'flash'"),
        (["--modes", "causla"], "unknown mode 'causla'; did you mean 'causal'?"),
        (["--heaps", "big"], "unknown heap 'big'"),
        (["--device", "tpu"], "unknown device 'tpu'"),
        (["--passes", "back"], "unknown pass 'back'"),
        (["--lengths", "0"], "--lengths takes integers of at least 1, separated by commas, got '0'"),
        (["--lengths", "abc"], "--lengths takes integers of at least 1, separated by commas, got 'abc'"),
    ],
)
def test_bench_refuses_what_it_does_not_know(options, message):
    result = CliRunner().invoke(app, ["bench", *options])
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize("command", [["study", "positions"], ["bench"]])
def test_a_folder_that_cannot_be_made_is_refused_before_anything_is_measured(command, tmp_path, monkeypatch):
    def measure(*_, **__):
        pytest.fail("measured first")

    monkeypatch.setattr("kernelformer_lab.bench.benchmark.run_case", measure)
    change_study(monkeypatch, "positions", run=measure)
    (tmp_path / "file").write_text("in the way")
    result = CliRunner().invoke(app, [*command, "--out", str(tmp_path / "file" / "x")])
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit)
    assert str(tmp_path / "file") in result.stderr


@pytest.mark.parametrize(("problem", "code"), [(TrainingError("why"), 2), (OSError("why"), 2), (WorkerError("why"), 2)])
def test_errors_of_a_study_are_said_without_a_traceback(problem, code, tmp_path, monkeypatch):
    def fails(*_, **__):
        raise problem

    change_study(monkeypatch, "positions", run=fails)
    result = CliRunner().invoke(app, ["study", "positions", "--out", str(tmp_path)])
    assert (result.exit_code, result.stderr) == (code, "error: why\n")


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


def test_times_and_sizes_read_well():
    assert units.human_time(1.2345) == "1.23 s"
    assert units.human_time(0.0123) == "12.3 ms"
    assert units.human_time(4.5e-5) == "45 µs"
    assert units.human_bytes(3 * 2**20) == "3 MiB"
    assert units.human_bytes(300 * 2**20) == "300 MiB"
    assert units.human_ratio(0.346) == "0.35x"
    assert units.human_ratio(21.94) == "21.9x"
    assert units.human_bytes(None) == ""
    assert Row(Case("causal", 8), "x").as_json()["case"]["length"] == 8
