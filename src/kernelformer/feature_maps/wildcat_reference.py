"""Attention to pivoted landmarks by hand: the choice token by token, the kernel through them as one matrix (WildCat).

Apart from `wildcat` and `pivots`; only draws and settings are read off the map.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernelformer.feature_maps.pivots_reference import choose, gaussian
from kernelformer.feature_maps.wildcat import WildcatMap


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
        tau = (3.946 * largest[0] / max(largest[1], 1e-6 / largest[0])) ** 0.5 if largest[0] > 0 else 1.0
    query, scaled = query * tau, key / tau
    tokens = [i for i in range(len(key)) if bool(real[i])]
    salt = int(feature_map.salt) if feature_map.is_random else None
    count = min(feature_map.num_landmarks, len(key))
    Z = scaled[choose(scaled.detach(), tokens, count, salt, scaled.detach().square().sum(1))]
    ridge = gaussian(Z, Z) + 1e-6 * torch.eye(len(Z), dtype=key.dtype, device=key.device)
    half_z, half_k = (0.5 * x.square().sum(-1) for x in (Z, scaled))
    mixed = torch.linalg.inv(ridge) @ gaussian(Z, scaled) * torch.exp(half_k - half_z[:, None])
    away = (query / tau) @ centre
    weights: Tensor = torch.exp(query @ Z.T + away.unsqueeze(-1)) @ mixed
    return weights
