"""Nystrom attention by hand: landmarks token by token, the kernel through them as one matrix (Skyformer, Sec. 4).

Apart from `nystrom` and `landmarks`; only draws, parameters and settings are read off the map.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kernelformer.feature_maps.nystrom import NystromMap
from kernelformer.feature_maps.pivots_reference import choose, gaussian, splitmix


def nystrom_kernel(
    feature_map: NystromMap, query: Tensor, key: Tensor, key_mask: Tensor | None, query_mask: Tensor | None
) -> Tensor:
    """``kappa(Q, Z) (kappa(Z, Z) + gamma I)^-1 kappa(Z, K)``, (B, H, L, S) (Skyformer, Eq. 5 and 6).

    Args:
        feature_map: whose landmarks and gamma are meant.
        query: (B, H, L, D), scaled.
        key: (B, H, S, D), scaled, one for each query head; hidden ones are finite.
        key_mask: (B, S) bool, or None.
        query_mask: (B, L) bool, or None.
    """
    rows = []
    for b, heads in enumerate(landmarks(feature_map, query, key, key_mask, query_mask)):
        for h, Z in enumerate(heads):
            ridge = gaussian(Z, Z) + feature_map.gamma * _eye(Z)
            rows.append(gaussian(query[b, h], Z) @ torch.linalg.inv(ridge) @ gaussian(Z, key[b, h]))
    return torch.stack(rows).view(*query.shape[:2], query.shape[2], key.shape[2])


def landmarks(
    feature_map: NystromMap, query: Tensor, key: Tensor, key_mask: Tensor | None, query_mask: Tensor | None
) -> list[list[Tensor]]:
    """The landmarks of every sample and head, (s, D) each; arguments as `nystrom_kernel`."""
    batch, count = query.shape[:2]
    kind, slots = feature_map.landmarks, feature_map.num_landmarks
    if kind == "learned":
        Z = feature_map.Z.to(query.dtype).repeat_interleave(count // feature_map.Z.shape[0], 0)
        return [list(Z)] * batch
    out = []
    for b in range(batch):
        real_q, real_k = (
            x[b] if mask is None else x[b][:, mask[b]] for x, mask in ((query, query_mask), (key, key_mask))
        )
        tokens = [real_q, real_k]
        numbers = [min(slots // 2, query.shape[2]), min(slots - slots // 2, key.shape[2])]
        if kind == "pivoted":
            out.append([_pivoted(feature_map, x) for x in torch.cat(tokens, 1)])
            continue
        if kind == "segments":
            out.append([_segments([x[h] for x in tokens], numbers) for h in range(count)])
            continue
        hashes = [
            [splitmix(i + int(salt)) for i in range(x.shape[1])]
            for x, salt in zip(tokens, feature_map.salt, strict=True)
        ]
        heads = []
        for h in range(count):
            mine = [x[h] for x in tokens]
            orders: Sequence[Sequence[float]] = hashes
            if kind == "leverage":
                orders = _waiting_times(feature_map, mine, hashes, [n - n // 2 for n in numbers])
            heads.append(_smallest(mine, orders, numbers))
        out.append(heads)
    return out


def _waiting_times(
    feature_map: NystromMap, tokens: Sequence[Tensor], hashes: Sequence[Sequence[int]], kept: Sequence[int]
) -> list[list[float]]:
    """``-log(u) / score``: the smallest are a sample with probabilities in proportion to the scores.

    Scores are what the tokens of the smallest hashes, ``kept`` of queries and of keys, do not explain of a token;
    these tokens themselves are there already, and wait for 0.
    """
    Z = _smallest(tokens, hashes, kept)
    inverse = torch.linalg.inv(gaussian(Z, Z) + feature_map.gamma * _eye(Z))
    times = []
    for x, numbers, salt, count in zip(tokens, hashes, feature_map.salt, kept, strict=True):
        kappa = gaussian(x, Z)
        scores = (1 - (kappa @ inverse * kappa).sum(-1)).clamp_min(feature_map.gamma).tolist()
        last = sorted(numbers)[:count][-1:]
        times.append(
            [
                0.0 if [u] <= last else -math.log((splitmix(u + int(salt)) + 0.5) / 2**53) / r
                for u, r in zip(numbers, scores, strict=True)
            ]
        )
    return times


def _pivoted(feature_map: NystromMap, x: Tensor) -> Tensor:
    """Landmarks among the real queries and keys of one head (n, D) by pivoted Cholesky of their kernel."""
    count, salt = min(feature_map.num_landmarks, len(x)), int(feature_map.salt[0])
    return x[choose(x.detach(), range(len(x)), count, salt, torch.zeros_like(x[:, 0]))]


def _segments(tokens: Sequence[Tensor], numbers: Sequence[int]) -> Tensor:
    return torch.cat([segment_means(x, n) for x, n in zip(tokens, numbers, strict=True)])


def segment_means(x: Tensor, count: int) -> Tensor:
    """Means of ``count`` stretches of tokens (n, D), as equal as can be; without those that have no token."""
    which = torch.tensor([i * count // len(x) for i in range(len(x))], device=x.device)
    means = [x[which == i].mean(0) for i in range(count) if bool((which == i).any())]
    return torch.stack(means) if means else x.new_zeros(0, x.shape[-1])


def _smallest(tokens: Sequence[Tensor], orders: Sequence[Sequence[float]], numbers: Sequence[int]) -> Tensor:
    """Of queries and of keys those with the smallest numbers, (s, D)."""
    parts = []
    for x, order, count in zip(tokens, orders, numbers, strict=True):
        parts.append(x[sorted(range(len(order)), key=lambda i: order[i])[:count]])
    return torch.cat(parts)


def aligned(query: Tensor, key: Tensor, key_mask: Tensor | None, query_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Queries and keys moved towards each other, sample by sample and head by head.

    q' = t q,  k' = (k - mean k) / t + t mean q          t = (var k / var q)^(1/4), each coordinate by itself
    """
    moved_q, moved_k = [], []
    for b in range(query.shape[0]):
        real_q = query[b] if query_mask is None else query[b][:, query_mask[b]]
        real_k = key[b] if key_mask is None else key[b][:, key_mask[b]]
        if real_q.shape[1] == 0 or real_k.shape[1] == 0:
            moved_q.append(query[b])
            moved_k.append(key[b])
            continue
        var_q, var_k = (x.var(1, correction=0, keepdim=True) for x in (real_q, real_k))
        floor = 1e-2 * (var_q + var_k) + torch.finfo(query.dtype).tiny ** 0.5
        t = ((var_k + floor) / (var_q + floor)) ** 0.25
        moved_q.append(query[b] * t)
        moved_k.append((key[b] - real_k.mean(1, keepdim=True)) / t + t * real_q.mean(1, keepdim=True))
    return torch.stack(moved_q), torch.stack(moved_k)


def _eye(x: Tensor) -> Tensor:
    return torch.eye(len(x), dtype=x.dtype, device=x.device)
