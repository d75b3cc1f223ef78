"""Frequencies: their distribution, their geometry, and that they depend on (seed, draw) alone."""

from __future__ import annotations

import math

import pytest
import torch

from kernelformer.feature_maps.draws import DRAWS, draw_frequencies, generator, hadamard
from sampling import SIGMAS, pair, within

every = pytest.mark.parametrize("draw", DRAWS)


def draw_many(draw, m, d, count, **more):
    return torch.stack([draw_frequencies(m, d, generator(0, t), draw=draw, **more) for t in range(count)])


@every
@pytest.mark.parametrize("norms", [None, "chi", "sqrt"])
@pytest.mark.parametrize(("m", "d"), [(3, 8), (8, 8), (20, 8), (7, 6), (1, 5), (13, 1)])
def test_any_number_of_features_and_any_dimension(draw, norms, m, d):
    omega = draw_frequencies(m, d, generator(1, 0), draw=draw, norms=norms)
    assert omega.shape == (m, d)
    assert omega.dtype == torch.float64
    assert omega.isfinite().all()


@every
def test_a_draw_is_a_function_of_seed_and_number(draw):
    def one(seed, number):
        return draw_frequencies(9, 6, generator(seed, number), draw=draw)

    assert torch.equal(one(5, 2), one(5, 2))
    for other in ((5, 3), (6, 2), (2, 5), (-5, 2)):
        assert (one(*other) - one(5, 2)).abs().max() > 1e-3


@pytest.mark.parametrize("draw", ["orthogonal", "spherical", "givens"])
def test_rows_of_a_block_are_orthogonal_and_blocks_are_not(draw):
    omega = draw_frequencies(16, 8, generator(0, 0), draw=draw)
    for block in (omega[:8], omega[8:]):
        gram = block @ block.T
        assert (gram - torch.diag(gram.diagonal())).abs().max() < 1e-10
    assert (omega[:8] @ omega[8:].T).abs().max() > 0.1


@pytest.mark.parametrize("d", [2, 3, 8])
def test_rows_of_a_simplex_point_away_from_each_other(d):
    omega = draw_frequencies(2 * d, d, generator(0, 0), draw="simplex", norms="sqrt") / math.sqrt(d)
    for block in (omega[:d], omega[d:]):
        want = torch.full((d, d), -1 / (d - 1), dtype=torch.float64).fill_diagonal_(1)
        torch.testing.assert_close(block @ block.T, want)
    assert (omega[:d] @ omega[d:].T).std() > 0.1  # blocks are independent


def test_a_simplex_in_one_dimension_is_a_random_sign():
    rows = draw_frequencies(40, 1, generator(0, 0), draw="simplex", norms="sqrt")
    assert sorted(set(rows.flatten().tolist())) == [-1, 1]


def test_simplex_draws_are_unbiased_and_better_than_orthogonal_ones_at_small_norms():
    x, y = pair(0.5, 8)
    exact = (x @ y).exp()
    # One stream of random numbers for both: the same rotations and norms, so that the errors are compared in pairs.
    features = {draw: (draw_many(draw, 8, 8, 600) @ (x + y) - 0.25).exp() for draw in ("orthogonal", "simplex")}
    within(features["simplex"][:, 3], exact)  # one row alone
    within(features["simplex"].mean(1), exact)
    errors = {draw: (rows.mean(1) - exact).square() for draw, rows in features.items()}
    gain = errors["orthogonal"] - errors["simplex"]
    assert gain.mean() > SIGMAS * gain.std() / math.sqrt(len(gain))


def test_hadamard_rows_are_orthogonal_where_the_dimension_is_a_power_of_two():
    omega = draw_frequencies(8, 8, generator(0, 0), draw="hadamard")
    torch.testing.assert_close(omega @ omega.T, 8 * torch.eye(8, dtype=torch.float64))
    h = hadamard(16) / 4
    torch.testing.assert_close(h @ h.T, torch.eye(16, dtype=torch.float64))


@pytest.mark.parametrize("draw", ["iid", "orthogonal", "simplex", "spherical", "givens"])
def test_sqrt_norms_are_exact(draw):
    omega = draw_frequencies(11, 6, generator(0, 0), draw=draw, norms="sqrt")
    torch.testing.assert_close(omega.norm(dim=1), torch.full((11,), math.sqrt(6), dtype=torch.float64))


@every
@pytest.mark.parametrize("d", [8, 6])
def test_the_mean_is_zero_and_the_covariance_one(draw, d):
    omega = draw_many(draw, d, d, 2000, norms="chi")[:, 0]  # one row of each independent draw
    count = len(omega)
    products = torch.einsum("ti,tj->tij", omega, omega)
    for sample, want in ((omega, torch.zeros(d)), (products, torch.eye(d))):
        error = (sample.mean(0) - want).abs() / (sample.std(0) / math.sqrt(count))
        # hadamard and givens are only nearly isotropic, so they get what a structured matrix of this size leaves
        assert error.max() < (5 if draw not in ("hadamard", "givens") else 8), error.max()


def test_chi_norms_have_the_distribution_of_gaussian_norms():
    squared = draw_many("orthogonal", 4, 6, 3000).square().sum(-1).flatten()  # chi^2 with 6 degrees of freedom
    assert abs(squared.mean() - 6) < 5 * math.sqrt(12 / len(squared))
    fourth = (squared - 6).square()
    assert abs(fourth.mean() - 12) < 5 * fourth.std() / math.sqrt(len(squared))


def test_unknown_names_and_sizes_are_refused():
    with pytest.raises(ValueError, match=r"unknown draw 'orthogonl'; did you mean 'orthogonal'\?"):
        draw_frequencies(3, 4, generator(0, 0), draw="orthogonl")
    with pytest.raises(ValueError, match="unknown norms 'unit'"):
        draw_frequencies(3, 4, generator(0, 0), norms="unit")
    with pytest.raises(ValueError, match="num_features must be an integer of at least 1, got 0"):
        draw_frequencies(0, 4, generator(0, 0))
