"""Softmax features of both signs, learned (Hedgehog, arXiv 2402.04347)."""

from __future__ import annotations

import math

import torch

from kernelformer.errors import positive_int
from kernelformer.feature_maps.base import FIRST
from kernelformer.feature_maps.draws import draw_frequencies, generator
from kernelformer.feature_maps.untied import UntiedMap, UntiedSpec


class HedgehogMap(UntiedMap):
    """Softmax over learned projections and over their negatives.

        phi(x) = [softmax(W x), softmax(-W x)]       W of its own for queries and keys, and for each head of both

    M = 2 m features; those of each half sum to 1, so that phi(q) . phi(k) lies between 0 and 2. It is therefore not on
    the scale of exp(q . k): with a window, beta has to learn the factor. As for every map x is sqrt(scale) times a
    query or a key; the paper's is not scaled, which is another unit for W. W starts as the identity where m = D, else
    with orthogonal rows of norm 1, the same for queries and keys.

    Parameters: w_q (H, m, D), w_k (G, m, D); H = G = 1 where the heads share one map.

    Args:
        num_features: m, rows of W; default: D, the paper's choice.
        seed: of the first W where it is not the identity.
        per_head: False shares one map between the heads.
        num_key_heads: G, of grouped queries: maps of keys for each key head. Those of queries stay each query head's
            own.

    The others are those of `FeatureMap`; nothing is redrawn.
    """

    def __init__(
        self,
        *,
        head_dim: int,
        num_heads: int,
        num_features: int | None = None,
        seed: int = 0,
        per_head: bool = True,
        num_key_heads: int | None = None,
    ) -> None:
        rows = positive_int("num_features", head_dim if num_features is None else num_features)
        super().__init__(
            UntiedSpec(query_units=2, key_units=2, mirrored=True),
            head_dim=head_dim,
            num_heads=num_heads,
            rows=rows,
            seed=seed,
            per_head=per_head,
            num_key_heads=num_key_heads,
            settings={"num_features": rows, "per_head": per_head},
        )
        self._start()

    def _reset_learned(self) -> None:
        heads, rows, dim = self.w_k.shape
        if rows == dim:
            self._start_at(torch.eye(dim, device="cpu").expand(heads, dim, dim))
            return
        gen = generator(self.seed_number, FIRST)
        w = torch.stack([draw_frequencies(rows, dim, gen, norms="sqrt") for _ in range(heads)])
        self._start_at(w / math.sqrt(dim))
