"""The study of relative positions: errors over norms, times over lengths, one command."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from kernelformer.cli.app import app
from kernelformer.modules import build_attention
from kernelformer_lab.studies import positions
from kernelformer_lab.studies.positions import Result, RowError, row_error, unit_vectors


def test_the_error_of_a_row_is_the_sum_of_its_differences():
    found = row_error(1.5, 16, head_dim=8, keys=20, queries=3, draws=2)
    core = build_attention("favor+", head_dim=8, num_heads=1, num_features=16, draw="iid")
    means = []
    for number in range(2):
        core.resample(number)
        omega = core.feature_map.omega.double()[0]
        both = 1.5 * unit_vectors(23, 8, number)[0, 0].double()
        q, k = both[:3], both[3:]
        weights = torch.exp(q @ omega.T) @ torch.exp(k @ omega.T).T  # all norms are the same and cancel
        gap = weights / weights.sum(-1, keepdim=True) - (q @ k.T).softmax(-1)
        means.append(gap.abs().sum(-1).mean())
    sample = torch.stack(means)
    assert found.mean == pytest.approx(float(sample.mean()), rel=1e-4)
    assert found.standard_error == pytest.approx(float(sample.std() / 2**0.5), rel=1e-3)


def test_vectors_are_on_the_unit_sphere():
    x = unit_vectors(50, 8, 0)
    assert x.shape == (1, 1, 50, 8)
    torch.testing.assert_close(x.norm(dim=-1), torch.ones(1, 1, 50))
    assert not torch.equal(x, unit_vectors(50, 8, 1))


def test_errors_grow_with_the_norm_and_more_features_help_where_it_is_small():
    found = {
        (norm, m): row_error(norm, m, keys=256, queries=8, draws=4) for norm in (0.5, 1.0, 4.0) for m in (16, 1024)
    }
    for m in (16, 1024):
        errors = [found[norm, m].mean for norm in (0.5, 1.0, 4.0)]
        assert errors == sorted(errors)
        assert errors[-1] <= 2
    # For 64 times as many features the error falls by 8 where it is small, and hardly where vectors are long.
    assert found[0.5, 16].mean > 5 * found[0.5, 1024].mean
    assert found[4.0, 16].mean < 1.3 * found[4.0, 1024].mean


def test_the_table_and_the_picture(tmp_path):
    result = Result(
        {(norm, m): RowError(norm / m, 0.01) for norm in (1.0, 2.0) for m in (4, 16)},
        {(label, n): n * 1e-6 for n in (64, 128) for label in positions.FORWARDS},
    )
    errors, times = positions.tables(result)
    assert (errors.row_count, len(errors.columns)) == (2, 3)
    assert (times.row_count, len(times.columns)) == (2, 6)
    positions.picture(result, tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    assert positions.record(result)["errors"][0] == [1.0, 4, 0.25, 0.01]
    assert positions.record(result)["seconds"][0] == ["fft, m = 16", 64, 6.4e-5]


def test_calls_are_interleaved_and_the_first_is_not_counted(monkeypatch):
    calls = []

    class Fake:
        def __init__(self, name):
            self.name = name

        def runner(self, case):
            assert (case.heads, case.head_dim, case.task) == (1, 64, "bidirectional")
            return lambda: calls.append((self.name, case.features, case.bias))

    monkeypatch.setattr(positions, "contender", Fake)
    times = positions.forward_seconds(128, repeats=2)
    assert list(times) == list(positions.FORWARDS)
    assert calls == [*positions.FORWARDS.values()] * 3


def test_the_command(tmp_path, monkeypatch):
    monkeypatch.setattr(positions, "NORMS", (1.0, 2.0))
    monkeypatch.setattr(positions, "FEATURES", (4, 16))
    options = ["--lengths", "64,128", "--draws", "2", "--rounds", "1", "--threads", "1", "--out", str(tmp_path)]
    run = CliRunner().invoke(app, ["study", "positions", *options])
    assert run.exit_code == 0, run.output
    record = json.loads((tmp_path / "positions.json").read_text())
    assert len(record["errors"]) == 4
    assert [x[:2] for x in record["seconds"]] == [[label, n] for n in (64, 128) for label in positions.FORWARDS]
    assert all(x[2] > 0 for x in record["seconds"])
    assert record["environment"]["threads"] == 1
    assert (tmp_path / "positions.png").exists()
    run = CliRunner().invoke(app, ["study", "positions", "--lengths", "0"])
    assert run.exit_code == 2
    assert "--lengths takes integers of at least 1, separated by commas, got '0'" in run.output
