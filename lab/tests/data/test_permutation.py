"""The order of training windows: a permutation in every epoch, a function of (seed, position), without a list."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest

from kernelformer_lab.data.shards import MOST, PermutedOrder, order_at, permute


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 16, 17, 99, 100, 101, 1009, 4096, 65537])
def test_every_epoch_has_every_sample_once(size):
    for seed, epoch in ((0, 0), (0, 1), (5, 0)):
        assert sorted(permute(np.arange(size), size, seed=seed, epoch=epoch).tolist()) == list(range(size))
    three = order_at(np.arange(3 * size), size, seed=1).reshape(3, size)
    assert all(sorted(row.tolist()) == list(range(size)) for row in three)


def test_orders_differ_by_seed_and_epoch_and_places_do_not_depend_on_who_asks():
    size = 1000
    orders = [permute(np.arange(size), size, seed=s, epoch=e) for s in (0, 1) for e in (0, 1)]
    for i, one in enumerate(orders):
        for two in orders[:i]:
            equal = int((one == two).sum())  # 1 place in expectation, variance 1
            assert equal <= 1 + 5
    positions = np.random.default_rng(0).integers(0, 10 * size, 64)
    alone = [int(order_at(positions[i : i + 1], size, 7)[0]) for i in range(64)]
    assert order_at(positions, size, 7).tolist() == alone


def test_places_are_uniform_and_neighbours_are_torn_apart():
    size, bins = 100_000, 20
    first = permute(np.arange(size // 10), size, seed=3, epoch=0)  # a tenth of the epoch lies anywhere in the corpus
    counts = np.bincount(first * bins // size, minlength=bins)
    mean = len(first) / bins
    assert np.abs(counts - mean).max() < 5 * np.sqrt(mean * (1 - 1 / bins) * 0.9)  # without replacement
    steps = np.diff(first)
    assert int((np.abs(steps) == 1).sum()) <= 5  # 0.2 in expectation
    # Mean distance of two random places is size / 3 with a standard deviation of size / sqrt(18).
    assert abs(np.abs(steps).mean() - size / 3) < 5 * size / np.sqrt(18 * len(steps) / 2)


def test_seeds_choose_among_all_places():
    size, seeds = 12, 6000
    counts = np.bincount([int(permute(np.array([4]), size, seed=s, epoch=2)[0]) for s in range(seeds)], minlength=size)
    assert np.abs(counts - seeds / size).max() < 5 * np.sqrt(seeds / size)


def test_the_largest_number_of_samples_has_an_order():
    some = permute(np.array([0, 1, MOST - 1]), MOST, seed=0, epoch=0)
    assert len(set(some.tolist())) == 3
    assert some.min() >= 0
    assert some.max() < MOST
    for size in (0, MOST + 1):
        with pytest.raises(ValueError, match=f"from 1 to 2\\^62 samples, got {size}"):
            PermutedOrder(size, 1, 0)


def test_a_sampler_is_the_order_and_goes_on_over_epochs():
    sampler = PermutedOrder(10, 10_000, seed=2)
    assert len(sampler) == 10_000
    assert list(sampler) == order_at(np.arange(10_000), 10, 2).tolist()
    far = PermutedOrder(1 << 40, 1 << 50, seed=2)
    assert list(islice(far, 5)) == order_at(np.arange(5), 1 << 40, 2).tolist()
