"""``kernelformer bench`` and ``study``, at sizes that take a moment."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
import torch
from typer.testing import CliRunner

from kernelformer.cli.app import app
from kernelformer.errors import TrainingError
from kernelformer_lab.bench import benchmark as show
from kernelformer_lab.bench.attention import Case, Kernelformer, contender
from kernelformer_lab.bench.benchmark import HEAPS, WorkerError, check, job, measure, run_case
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


def test_decoding_is_timed_for_what_can_decode(monkeypatch):
    def here(kind, case, names, *, budget, **_):
        return measure(kind, asdict(case), names, budget)

    monkeypatch.setattr(show, "job", here)  # instead of a process for each kind
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
    assert row.as_json()["case"]["length"] == 64


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


def test_texts_to_learn_from_and_to_measure_on_are_named_as_in_convert(tmp_path, monkeypatch):
    seen = []

    def stop(record, *_):
        seen.append((record.settings.text.name, record.settings.held_out.name))
        raise ValueError("enough")

    change_study(monkeypatch, "conversion", run=stop)
    command = ["study", "conversion", "m", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, [*command, "--distill", "a", "--text", "b"])
    assert "enough" in result.stderr
    assert seen == [("a", "b")]
    result = CliRunner().invoke(app, [*command, "--text", "b"])
    assert result.exit_code == 2
    assert "missing option '--distill'" in result.stderr


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["study", "positions", "--lengths", "12,abc"], "--lengths takes integers of at least 1"),
        (["study", "encoder", "--depths", "1.5"], "--depths takes integers of at least 1"),
        (["study", "normalized", "--features", "16,"], "--features takes integers of at least 1"),
        (["study", "lengths", "x", "--lengths", "-1"], "--lengths takes integers of at least 1"),
        (["study", "sparsity", "--relevances", "abc"], "--relevances takes numbers separated by commas, got 'abc'"),
    ],
)
def test_a_list_that_is_none_of_numbers_is_named_with_its_option(command, said, tmp_path):
    result = CliRunner().invoke(app, [*command, "--out", str(tmp_path)])
    assert result.exit_code == 2
    assert said in result.stderr
