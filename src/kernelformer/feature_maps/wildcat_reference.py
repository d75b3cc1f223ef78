"""Attention to pivoted landmarks by hand: the choice token by token, the kernel through them as one matrix (WildCat).

Apart from `wildcat` and `pivots`; only draws and settings are read off the map.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernelformer.feature_maps.nystrom_reference import gaussian, splitmix
from kernelformer.feature_maps.wildcat import WildcatMap

BLOCK = 32  # proposals from the same residuals


def wildcat_kernel(
    feature_map: WildcatMap, query: Tensor, key: Tensor, key_mask: Tensor | None, query_mask: Tensor | None
) -> Tensor:
    """``e^(q . Z) (kappa(Z, Z) + gamma I)^-1 kappa(Z, k) e^((|k|^2 - |Z|^2)/2)`` for centred keys, times
    ``e^(q . centre)``, which makes it that of the keys as they are.

    Args:
        feature_map: whose landmarks are meant.
        query: (B, H, L, D), scaled.
        key: (B, H, S, D), scaled, one for each query head; hidden ones are finite.
        key_mask: (B, S) bool, or None.
        query_mask: (B, L) bool, or None.

    Returns:
        (B, H, L, S).
    """
    rows = []
    for b in range(query.shape[0]):
        real, asked = (
            torch.ones(x.shape[2], dtype=torch.bool, device=x.device) if mask is None else mask[b]
            for x, mask in ((key, key_mask), (query, query_mask))
        )
        for h in range(query.shape[1]):
            centre = key[b, h][real].mean(0) if bool(real.any()) else key.new_zeros(key.shape[3])
            rows.append(_head(feature_map, query[b, h], key[b, h] - centre, centre, query[b, h][asked], real))
    return torch.stack(rows).view(*query.shape[:2], query.shape[2], key.shape[2])


def _head(feature_map: WildcatMap, query: Tensor, key: Tensor, centre: Tensor, asked: Tensor, real: Tensor) -> Tensor:
    """One head: queries (L, D), centred keys (S, D), the real queries (n, D), and which keys are real."""
    with torch.no_grad():
        largest = [float(x.norm(dim=-1).max()) if x.numel() else 0.0 for x in (key[real], asked)]
        tau = (3.946 * largest[0] / largest[1]) ** 0.5 if min(largest) > 0 else 1.0
    query, scaled = query * tau, key / tau
    tokens = [i for i in range(len(key)) if bool(real[i])]
    Z = scaled[choose(scaled.detach(), tokens, feature_map)]
    ridge = gaussian(Z, Z) + 1e-6 * torch.eye(len(Z), dtype=key.dtype, device=key.device)
    half_z, half_k = (0.5 * x.square().sum(-1) for x in (Z, scaled))
    mixed = torch.linalg.inv(ridge) @ gaussian(Z, scaled) * torch.exp(half_k - half_z[:, None])
    away = (query / tau) @ centre
    weights: Tensor = torch.exp(query @ Z.T + away.unsqueeze(-1)) @ mixed
    return weights


def choose(x: Tensor, tokens: list[int], feature_map: WildcatMap) -> list[int]:
    """The landmarks of one head: x (S, D) as the kernel sees it, real tokens by their indices.

    Proposals with probability in proportion to ``residual e^(|x|^2)`` as it was before them, accepted with probability
    ``residual now / residual then``; the greedy choice takes the largest.
    """
    weight = (x.square().sum(1) - x[tokens].square().sum(1).max()).exp() if tokens else x[:, 0]
    count = min(feature_map.num_landmarks, len(x))
    chosen: list[int] = []
    number = 0
    while len(chosen) < count:
        before = _residuals(x, tokens, chosen)
        if not before or max(before.values()) <= 1e-10:
            break
        if not feature_map.is_random:
            chosen.append(max(before, key=lambda i: before[i] * float(weight[i])))
            continue
        for c in range(BLOCK):
            token = _draw(before, weight, _uniform(feature_map, 2 * BLOCK * number + c))
            left = _residuals(x, tokens, chosen)[token]
            need = _uniform(feature_map, 2 * BLOCK * number + BLOCK + c) * before[token]
            if left > max(need, 1e-10) and len(chosen) < count:
                chosen.append(token)
        number += 1
    return chosen


def _uniform(feature_map: WildcatMap, number: int) -> float:
    return (splitmix(number + int(feature_map.salt)) + 0.5) / 2**53


def _draw(residuals: dict[int, float], weight: Tensor, uniform: float) -> int:
    """The token at which the sum of the weights first exceeds its share ``uniform`` of the whole."""
    shares = {i: x * float(weight[i]) for i, x in residuals.items()}
    left = uniform * sum(shares.values())
    for token, share in shares.items():
        left -= share
        if left < 0:
            return token
    return max(token for token, share in shares.items() if share > 0)


def _residuals(x: Tensor, tokens: list[int], chosen: list[int]) -> dict[int, float]:
    """``1 - kappa(x_j, Z) kappa(Z, Z)^-1 kappa(Z, x_j)`` of the tokens that are not landmarks, and 0 of those."""
    if not chosen:
        return dict.fromkeys(tokens, 1.0)
    Z, rest = x[chosen], x[tokens]
    cross = gaussian(rest, Z)
    left = 1 - (cross @ torch.linalg.inv(gaussian(Z, Z)) * cross).sum(1)
    return {i: 0.0 if i in chosen else max(0.0, float(y)) for i, y in zip(tokens, left, strict=True)}
