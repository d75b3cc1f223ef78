"""Pivoted Cholesky by hand: residuals from whole matrices, one token after another; apart from `pivots`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

BLOCK = 32  # proposals from the same residuals
FLOOR = 1e-10  # what is explained up to this, times the squared norm where it is above 1, is explained


def choose(x: Tensor, tokens: Sequence[int], count: int, salt: int | None, logs: Tensor) -> list[int]:
    """The landmarks of one head.

    Proposals with probability in proportion to ``residual e^w`` as it was before them, accepted with probability
    ``residual now / residual then``; the greedy choice takes the largest.

    Args:
        x: (S, D), as the kernel sees it.
        tokens: the real ones.
        count: of landmarks, at most.
        salt: says what is drawn; None for the greedy choice.
        logs: w, (S).
    """
    floor = (FLOOR * x.square().sum(1).clamp_min(1)).tolist()
    chosen: list[int] = []
    number = 0
    while len(chosen) < count:
        before = {i: y for i, y in _residuals(x, tokens, chosen).items() if y > floor[i]}
        if not before:
            break
        if salt is None:
            chosen.append(max(before, key=lambda i: math.log(before[i]) + float(logs[i])))
            continue
        for c in range(BLOCK):
            token = _draw(before, logs, _uniform(salt, 2 * BLOCK * number + c))
            left = _residuals(x, tokens, chosen)[token]
            need = _uniform(salt, 2 * BLOCK * number + BLOCK + c) * before[token]
            if left > max(need, floor[token]) and len(chosen) < count:
                chosen.append(token)
        number += 1
    return chosen


def _uniform(salt: int, number: int) -> float:
    return (splitmix(number + salt) + 0.5) / 2**53


def _draw(residuals: dict[int, float], logs: Tensor, uniform: float) -> int:
    """The token at which the sum of the weights first exceeds its share ``uniform`` of the whole."""
    weights = {i: math.log(x) + float(logs[i]) for i, x in residuals.items()}
    shares = {i: math.exp(x - max(weights.values())) for i, x in weights.items()}
    left = uniform * sum(shares.values())
    for token, share in shares.items():
        left -= share
        if left < 0:
            return token
    return max(token for token, share in shares.items() if share > 0)


def _residuals(x: Tensor, tokens: Sequence[int], chosen: list[int]) -> dict[int, float]:
    """``1 - kappa(x_j, Z) kappa(Z, Z)^-1 kappa(Z, x_j)`` of the tokens that are not landmarks, and 0 of those."""
    if not chosen:
        return dict.fromkeys(tokens, 1.0)
    Z, rest = x[chosen], x[list(tokens)]
    cross = gaussian(rest, Z)
    left = 1 - (cross @ torch.linalg.inv(gaussian(Z, Z)) * cross).sum(1)
    return {i: 0.0 if i in chosen else max(0.0, float(y)) for i, y in zip(tokens, left, strict=True)}


def splitmix(x: int) -> int:
    """The last step of splitmix64, in 64 bits, of which 53 are kept."""
    mask = (1 << 64) - 1
    x = ((x & mask) ^ ((x & mask) >> 30)) * 0xBF58476D1CE4E5B9 & mask
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & mask
    return (x ^ (x >> 31)) & ((1 << 53) - 1)


def gaussian(x: Tensor, y: Tensor) -> Tensor:
    """``exp(-|x_i - y_j|^2 / 2)`` by differences: (*, L, D), (*, S, D) -> (*, L, S)."""
    return torch.exp(-0.5 * (x.unsqueeze(-2) - y.unsqueeze(-3)).square().sum(-1))
