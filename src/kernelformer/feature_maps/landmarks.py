"""Landmarks: their choice, and the inverse of the kernel between them (Skyformer, Sec. 4.2, 4.4)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernelformer.kernels import squared_distance


def landmark_gram(landmarks: Tensor, valid: Tensor | None, gamma: float) -> Tensor:
    """Compute ``M + gamma I`` of landmarks (..., s, D); where not ``valid`` it has 1 + gamma on its diagonal alone."""
    gram = torch.exp(-0.5 * squared_distance(landmarks, landmarks))
    eye = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    gram = gram * (1 - eye)  # the distance of a point from itself is zero, whatever rounding says
    if valid is not None:
        gram = gram * (valid.unsqueeze(-1) & valid.unsqueeze(-2))
    return gram + (1 + gamma) * eye


def sharper(inverse: Tensor, product: Tensor) -> Tensor:
    """One round, ``V/4 (13 I - A V (15 I - A V (7 I - A V)))``, from V and the product A V; the residual is cubed."""
    eye = torch.eye(product.shape[-1], dtype=product.dtype, device=product.device)
    return 0.25 * inverse @ (13 * eye - product @ (15 * eye - product @ (7 * eye - product)))


def iterated_inverse(matrix: Tensor, ridge: float) -> Tensor:
    """Compute ``matrix^-1``, (..., s, s), by matrix products alone (Skyformer, Sec. 4.4).

        V <- V/4 (13 I - A V (15 I - A V (7 I - A V)))       A = D^-1/2 matrix D^-1/2,  D = diag(matrix 1)

    and ``matrix^-1 = D^-1/2 V D^-1/2``. A's eigenvalues lie in (0, 1], so that V = I is a start for any matrix: it
    shares nothing over the batch, unlike the published one. Each round multiplies small eigenvalues of A V by 13/4 and
    then cubes the residual, so that the rounds that the worst matrix of s landmarks needs, about
    ``log(1 + s / ridge) / 1.18 + 5``, are known beforehand, and no matrix waits for another. The matrix is semidefinite
    with entries in [0, 1], plus the ridge. Cost: four products of (s, s) matrices a round.
    """
    size = matrix.shape[-1]
    root = matrix.sum(-1).rsqrt()
    scale = root.unsqueeze(-1) * root.unsqueeze(-2)
    inverse = torch.eye(size, dtype=matrix.dtype, device=matrix.device).expand_as(matrix)
    for _ in range(math.ceil(math.log1p(size / ridge) / math.log(13 / 4)) + 5):
        inverse = sharper(inverse, (scale * matrix) @ inverse)
    return scale * inverse


def factor(matrix: Tensor) -> Tensor:
    """Compute the Cholesky factor L, ``L L^T = matrix``, (..., s, s); NaN for a matrix without one, not an error."""
    result = torch.linalg.cholesky_ex(matrix)
    lower: Tensor = result.L.masked_fill((result.info != 0)[..., None, None], torch.nan)
    return lower


def inverse_root(matrix: Tensor) -> Tensor:
    """Compute W with ``W W^T = matrix^-1``, (..., s, s), by Cholesky: ``W = L^-T``."""
    eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    root: Tensor = torch.linalg.solve_triangular(factor(matrix), eye, upper=False)
    return root.transpose(-1, -2)


def rank_hash(rank: Tensor, salt: Tensor) -> Tensor:
    """Hash each rank to a pseudorandom number of at least 0 that depends on rank and salt alone."""
    x = rank + salt
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):  # splitmix64's finalizer
        fill = (1 << (64 - shift)) - 1  # the shift of a signed number repeats its sign
        signed = factor - (1 << 64) if factor >> 63 else factor
        x = (x ^ ((x >> shift) & fill)) * signed
    return x & ((1 << 53) - 1)


@dataclass(frozen=True)
class Tokens:
    """Queries or keys of one call, with the mask of the real ones."""

    x: Tensor  # (B, H, n, D)
    real: Tensor | None  # (B, n) bool
    slots: int

    @property
    def rank(self) -> Tensor:
        """Number of real tokens before each, (B or 1, n)."""
        if self.real is None:
            return torch.arange(self.x.shape[2], device=self.x.device).unsqueeze(0)
        return self.real.long().cumsum(1) - 1

    def take(self, order: Tensor) -> tuple[Tensor, Tensor | None]:
        """Select the tokens of least ``order`` (B or 1, 1 or H, n), real ones first, (B, H, slots, D), and a mask."""
        index = self._real_first(order).topk(self.slots, largest=False).indices
        index = index.expand(self.x.shape[0], self.x.shape[1], -1)
        chosen = self.x.gather(2, index.unsqueeze(-1).expand(-1, -1, -1, self.x.shape[3]))
        if self.real is None:
            return chosen, None
        valid = self.real.unsqueeze(1).expand(-1, self.x.shape[1], -1).gather(2, index)
        return chosen.masked_fill(~valid.unsqueeze(-1), 0), valid

    def among_first(self, order: Tensor) -> Tensor:
        """Mask of the real tokens that `take` selects by ``order``, whose numbers differ; undefined for others."""
        order = self._real_first(order)
        return order <= order.topk(self.slots, largest=False).values[..., -1:]

    def _real_first(self, order: Tensor) -> Tensor:
        last = torch.iinfo(order.dtype).max if not order.is_floating_point() else math.inf
        return order if self.real is None else order.masked_fill(~self.real.unsqueeze(1), last)

    @property
    def count(self) -> Tensor | int:
        """Number of real tokens, (B, 1) or one number for all samples."""
        return self.x.shape[2] if self.real is None else self.real.sum(1, keepdim=True)

    def segments(self, number: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Means of ``number`` (B, 1) equal stretches of real tokens, (B, H, slots, D), and a mask of slots with any."""
        count = self.count.clamp_min(1) if isinstance(self.count, Tensor) else self.count
        which = self.rank * (self.slots if number is None else number) // count  # (B or 1, n)
        member = which.unsqueeze(1) == torch.arange(self.slots, device=self.x.device).unsqueeze(-1)
        x = self.x
        if self.real is not None:
            member = member & self.real.unsqueeze(1)
            x = x.masked_fill(~self.real[:, None, :, None], 0)
        size = member.sum(-1, keepdim=True)
        means = (member.to(x.dtype) / size.clamp_min(1)).unsqueeze(1) @ x
        if self.real is None and number is None:
            return means, None
        return means, (size > 0).squeeze(-1).unsqueeze(1).expand(means.shape[:3])


def together(parts: Sequence[tuple[Tensor, Tensor | None]]) -> tuple[Tensor, Tensor | None]:
    """Concatenate landmarks of queries and of keys, (B, H, s, D), and the mask of slots with a token."""
    landmarks = torch.cat([z for z, _ in parts], 2)
    if all(valid is None for _, valid in parts):
        return landmarks, None
    some = [z.new_ones(z.shape[:3], dtype=torch.bool) if valid is None else valid for z, valid in parts]
    return landmarks, torch.cat(some, 2)


def aligned(query: Tensor, key: Tensor, query_mask: Tensor | None, key_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Move q (B, H, L, D) and k (B, H, S, D) towards each other without changing softmax attention.

        q' = t q,  k' = (k - mean k) / t + t mean q          t = (var k / var q)^(1/4), each coordinate by itself

    ``q' . k'`` is ``q . k`` and a number per query, which the normalization takes away. Means are over real tokens, by
    masks (B, n).
    """
    if key_mask is not None:
        key = key.masked_fill(~key_mask[:, None, :, None], 0)
    (mean_q, var_q), (mean_k, var_k) = _moments(query, query_mask), _moments(key, key_mask)
    floor = 1e-2 * (var_q + var_k) + torch.finfo(query.dtype).tiny ** 0.5  # a single token does not vary
    stretch = ((var_k + floor) / (var_q + floor)) ** 0.25
    return stretch * query, (key - mean_k) / stretch + stretch * mean_q


def _moments(x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Mean and variance of the real tokens, (B, H, 1, D) each."""
    count = torch.tensor(x.shape[2]) if mask is None else mask.sum(1)[:, None, None, None]
    hidden = None if mask is None else ~mask[:, None, :, None]
    x = x if hidden is None else x.masked_fill(hidden, 0)  # here, too: a gradient of 0 times NaN is NaN
    count = count.clamp_min(1).to(x)

    def average(x: Tensor) -> Tensor:
        return (x if hidden is None else x.masked_fill(hidden, 0)).sum(2, keepdim=True) / count

    mean = average(x)
    return mean, average((x - mean).square())
