"""A fixed pseudo-random order of any number of samples, computed where it is asked for instead of kept in memory."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Sampler

from kernelformer.data.splits import mix_bits

_ROUNDS = 6
_BLOCK = 4096  # samples whose numbers are computed at once
MOST = 1 << 62  # samples: sums of two halves and of positions stay within 64 bits

Int64 = NDArray[np.int64]
UInt64 = NDArray[np.uint64]


def permute(indices: Int64, size: int, *, seed: int, epoch: int) -> Int64:
    """Where a permutation of 0..size-1, which (seed, epoch) chooses, takes these indices.

    A generalized Feistel network over a x b >= size, a = ceil(sqrt(size)), b = ceil(size / a): with x = l b + r,

        l <- (l + F_i(r)) mod a  for even rounds i,    r <- (r + F_i(l)) mod b  for odd ones,

    F_i being 64 mixed bits of a key of the round. Every round can be undone, so x -> l b + r is one to one. A result
    from size on goes through it again until it is below (cycle walking), which keeps it one to one on 0..size-1; fewer
    than a of the a b values are outside, so that hardly any does.

    Args:
        indices: from 0 to size - 1, any shape.
        size: from 1 to 2^62.
        seed: of all epochs.
        epoch: which permutation.

    Cost: a few tenths of a second for a million indices, no memory but theirs.
    """
    key = mix_bits(mix_bits(np.array([seed], np.uint64)) + np.uint64(epoch))
    keys = mix_bits(key + np.arange(_ROUNDS).astype(np.uint64))
    high = math.isqrt(size - 1) + 1
    low = -(-size // high)
    values = _network(indices.astype(np.uint64), high, low, keys)
    while (outside := values >= size).any():
        values[outside] = _network(values[outside], high, low, keys)
    return values.astype(np.int64)


def _network(x: UInt64, high: int, low: int, keys: UInt64) -> UInt64:
    a, b = np.uint64(high), np.uint64(low)
    left, right = x // b, x % b
    for i in range(len(keys)):
        key = keys[i : i + 1].reshape((1,) * x.ndim)
        if i % 2:
            right = (right + mix_bits(left ^ key) % b) % b
        else:
            left = (left + mix_bits(right ^ key) % a) % a
    return left * b + right


def order_at(positions: Int64, size: int, seed: int) -> Int64:
    """Numbers of the samples at these positions of the endless order: epoch after epoch, each permuted anew.

    Args:
        positions: (N), from 0 on; position p is place p mod size of epoch p // size.
        size: samples of an epoch.
        seed: of the order.
    """
    numbers = np.empty_like(positions)
    epochs = positions // size
    for epoch in np.unique(epochs).tolist():
        there = epochs == epoch
        numbers[there] = permute(positions[there] - epoch * size, size, seed=seed, epoch=epoch)
    return numbers


class PermutedOrder(Sampler[int]):
    """Numbers of samples for a whole run, by `order_at`: sample i of the run is a function of (seed, i) alone.

    Step t of batches of B takes positions t B to (t + 1) B - 1, on however many processes, before and after a resume;
    what a resumed run passes over is numbers, at the cost of `permute`: no sample of it is read.

    Args:
        size: number of samples.
        count: how many are wanted, with repetition.
        seed: of the order.
    """

    def __init__(self, size: int, count: int, seed: int) -> None:
        if not 1 <= size <= MOST:
            raise ValueError(f"an order needs from 1 to 2^62 samples, got {size}.")
        self.size, self.count, self.seed = size, count, seed

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        for start in range(0, self.count, _BLOCK):
            positions = np.arange(start, min(start + _BLOCK, self.count))
            yield from order_at(positions, self.size, self.seed).tolist()
