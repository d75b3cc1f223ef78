"""The free positive map, for fitting what a pretrained model attends to."""

from __future__ import annotations

import math

import torch

from kernelformer.errors import flag, positive_int
from kernelformer.feature_maps.base import FIRST, parameter
from kernelformer.feature_maps.draws import draw_frequencies, generator
from kernelformer.feature_maps.untied import UntiedMap, UntiedSpec


class LogLinearMap(UntiedMap):
    """Positive features without a tie to a density.

        log phi_i(q) = w_i . q + b_i       w and b of their own for queries and keys, and for each head of both
        log phi_i(k) = w_i . k + b_i - log sum_j exp(w_j . k + b_j)

    Always positive and exactly stabilized. Each key spreads one unit over the features, so that no key drowns the
    others by its norm alone: the part that exp(-|k|^2 / 2) has in positive random features. It starts like those: w
    drawn, the same for queries and keys, b = -log(M) / 2.

    Parameters: w_q (H, M, D) and b_q (H, M), w_k (G, M, D) and b_k (G, M); H = G = 1 where the heads share one map.

    Args:
        draw: how the first w are drawn: ``orthogonal``, ``iid`` and others, see `draws.draw_frequencies`.
        per_head: False shares one map between the heads.
        unit_keys: False leaves the sum over j out: log phi_i(k) = w_i . k + b_i.
        num_key_heads: G, of grouped queries: maps of keys for each key head. Those of queries stay each query head's
            own, so that heads of a group look for different things in one state.

    The others are those of `FeatureMap`; nothing is redrawn.
    """

    learns = ("w", "b")

    def __init__(
        self,
        *,
        head_dim: int,
        num_heads: int,
        num_features: int = 256,
        seed: int = 0,
        draw: str = "orthogonal",
        per_head: bool = True,
        unit_keys: bool = True,
        num_key_heads: int | None = None,
    ) -> None:
        num_features = positive_int("num_features", num_features)
        settings = {"num_features": num_features, "per_head": per_head, "unit_keys": flag("unit_keys", unit_keys)}
        super().__init__(
            UntiedSpec(key_units=int(unit_keys)),
            head_dim=head_dim,
            num_heads=num_heads,
            rows=num_features,
            seed=seed,
            draw=draw,
            per_head=per_head,
            num_key_heads=num_key_heads,
            settings=settings,
        )
        self.b_q, self.b_k = (parameter(x, num_features) for x in (self.query_heads, self.heads))
        self._start()

    def _reset_learned(self) -> None:
        gen = generator(self.seed_number, FIRST)
        rows, dim = self.w_q.shape[1:]
        w = torch.stack([draw_frequencies(rows, dim, gen, draw=self.draw_kind) for _ in range(self.heads)])
        self._start_at(w)
        for x in (self.b_q, self.b_k):
            x.fill_(-0.5 * math.log(rows))
