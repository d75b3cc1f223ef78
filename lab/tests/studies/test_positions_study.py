"""The study of relative positions: errors over norms, times over lengths, one command."""

from __future__ import annotations

import pytest
import torch

from kernelformer.modules import build_attention
from kernelformer_lab.studies import positions
from kernelformer_lab.studies.positions import row_error, unit_vectors


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
    assert found[0] == pytest.approx(float(sample.mean()), rel=1e-4)
    assert found[1] == pytest.approx(float(sample.std() / 2**0.5), rel=1e-3)


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
        errors = [found[norm, m][0] for norm in (0.5, 1.0, 4.0)]
        assert errors == sorted(errors)
        assert errors[-1] <= 2
    # For 64 times as many features the error falls by 8 where it is small, and hardly where vectors are long.
    assert found[0.5, 16][0] > 5 * found[0.5, 1024][0]
    assert found[4.0, 16][0] < 1.3 * found[4.0, 1024][0]


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
