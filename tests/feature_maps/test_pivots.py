"""Landmarks by pivoted Cholesky: the law of the choice, what it explains, and who may be chosen."""

from __future__ import annotations

import pytest
import torch

from kernelformer.feature_maps import pivots as module


def tokens(rows=3, count=40, dim=5, seed=0, size=1.0):
    gen = torch.Generator().manual_seed(seed)
    return size * torch.randn(rows, count, dim, generator=gen, dtype=torch.float64)


def pivots(x, weight, real, salt, count):
    """Rows (N, S, D) as samples of one head."""
    index, valid = module.pivots(x[:, None], None if weight is None else weight[:, None], real, salt, count)
    return index[:, 0], valid[:, 0]


def kernel(x, y):
    return torch.exp(-0.5 * (x.unsqueeze(-2) - y.unsqueeze(-3)).square().sum(-1))


def residuals(x, index):
    """Of one row of tokens (S, D), by the definition."""
    cross = kernel(x, x[index])
    return 1 - (cross @ torch.linalg.inv(kernel(x[index], x[index])) * cross).sum(-1)


def salt(number: int) -> torch.Tensor:
    return torch.tensor(number * 0x9E3779B97F4A7C1 % (1 << 62))


def test_the_law_is_that_of_one_choice_after_another():
    """Pairs of landmarks: P(i, j) = p_i p(j | i), both in proportion to residuals, by standard errors."""
    x = tokens(1, 5, 2, size=1.2)
    weight = x.square().sum(2)
    expected = torch.zeros(5, 5, dtype=torch.float64)
    first = (weight[0].exp() / weight[0].exp().sum()).tolist()
    for i in range(5):
        left = residuals(x[0], [i]).clamp_min(0)
        left[i] = 0
        expected[i] = first[i] * left * weight[0].exp() / (left * weight[0].exp()).sum()
    draws = 600
    seen = torch.zeros(5, 5, dtype=torch.float64)
    for number in range(draws):
        index, valid = pivots(x, weight, None, salt(number), 2)
        assert valid.all()
        seen[tuple(index[0])] += 1 / draws
    error = (expected * (1 - expected) / draws).sqrt().clamp_min(1 / draws)
    assert ((seen - expected).abs() / error).max() < 4.5


def test_the_greedy_choice_takes_what_is_explained_least():
    x = tokens()
    index, _ = pivots(x, None, None, None, 10)
    for row, chosen in zip(x, index.tolist(), strict=True):
        for t in range(1, 10):
            left = residuals(row, chosen[:t])
            assert left[chosen[t]] >= left.max() - 1e-9


@pytest.mark.parametrize("number", [None, 3])
def test_only_real_tokens_are_chosen_each_once_and_padding_changes_nothing(number):
    x = tokens(3, 40)
    real = torch.ones(3, 40, dtype=torch.bool)
    real[0, :9], real[1, 5:], real[2] = False, False, False
    drawn = None if number is None else salt(number)
    index, valid = pivots(x, x.square().sum(2), real, drawn, 12)
    assert valid.sum(1).tolist() == [12, 5, 0]
    for row in range(3):
        chosen = index[row][valid[row]].tolist()
        assert len(set(chosen)) == len(chosen)
        assert all(real[row, i] for i in chosen)
    alone, _ = pivots(x[:1, 9:], x[:1, 9:].square().sum(2), None, drawn, 12)
    assert torch.equal(alone[0] + 9, index[0])


def test_equal_tokens_are_explained_by_one():
    x = tokens(2, 3).repeat_interleave(8, 1)
    index, valid = pivots(x, None, None, salt(1), 10)
    assert valid.sum(1).tolist() == [3, 3]
    assert {i // 8 for i in index[0][valid[0]].tolist()} == {0, 1, 2}


def test_rows_are_chosen_alone_however_many_there_are(monkeypatch):
    x = tokens(6, 50, size=0.7)
    together = pivots(x, x.square().sum(2), None, salt(5), 20)
    monkeypatch.setattr(module, "_NUMBERS", 1)
    alone = pivots(x, x.square().sum(2), None, salt(5), 20)
    assert torch.equal(together[0], alone[0])
    assert torch.equal(together[1], alone[1])


def test_more_landmarks_explain_more_and_random_ones_nearly_as_much_as_greedy():
    x = tokens(1, 300, 8, size=0.8)
    left = {}
    for name, number in (("random", 2), ("greedy", None)):
        index, _ = pivots(x, None, None, None if number is None else salt(number), 64)
        left[name] = [float(residuals(x[0], index[0, :t].tolist()).mean()) for t in (8, 16, 32, 64)]
        assert left[name] == sorted(left[name], reverse=True)
    assert left["random"][-1] < 1.3 * left["greedy"][-1]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("number", [None, 3])
@pytest.mark.parametrize("apart", [0.0, 1e-6, 1e-3])
def test_long_tokens_that_are_almost_equal_do_not_end_the_choice(number, apart, dtype):
    x = tokens(2, 64, 8, size=0.3)
    x[0, :4] = 4.0 + apart * tokens(1, 4, 8, seed=1)[0]
    x, drawn = x.to(dtype), None if number is None else salt(number)
    index, valid = pivots(x, x.square().sum(2), None, drawn, 32)
    assert valid.all()
    alone, _ = pivots(x[:1], x[:1].square().sum(2), None, drawn, 32)
    assert torch.equal(alone[0], index[0])
