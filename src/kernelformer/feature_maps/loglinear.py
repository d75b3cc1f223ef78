"""The free positive map, for fitting what a pretrained model attends to."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kernelformer.errors import choice, flag, positive_int
from kernelformer.feature_maps.base import FIRST, parameter
from kernelformer.feature_maps.draws import draw_frequencies, generator
from kernelformer.feature_maps.statistics import CalibratedMap, Statistics
from kernelformer.feature_maps.untied import UntiedMap, UntiedSpec

STARTS = ("favor+", "favor++", "favor#")


class LogLinearMap(CalibratedMap, UntiedMap):
    """Positive features without a tie to a density.

        log phi_i(q) = w_i . q + b_i       w and b of their own for queries and keys, and for each head of both
        log phi_i(k) = w_i . k + b_i - log sum_j exp(w_j . k + b_j)

    Always positive and exactly stabilized. Each key spreads one unit over the features, so that no key drowns the
    others by its norm alone: the part that exp(-|k|^2 / 2) has in positive random features. It starts like those: w
    drawn, the same for queries and keys, b = -log(M) / 2.

    It can start like calibrated features too, see `OptimalMap`: `calibrate`, before any training, then sets w and b to
    their frequencies and constants for the statistics, with the draw that it has. What is quadratic in x is left out as
    ever: a query's cancels, and a key's sum over j takes its place. For favor+ the two agree on average; for the others
    that sum is the larger one, so that long keys count a little less than in those features.

    Parameters: w_q (H, M, D) and b_q (H, M), w_k (G, M, D) and b_k (G, M); H = G = 1 where the heads share one map.

    Args:
        draw: how the first w are drawn: ``orthogonal``, ``iid`` and others, see `draws.draw_frequencies`.
        per_head: False shares one map between the heads.
        unit_keys: False leaves the sum over j out: log phi_i(k) = w_i . k + b_i.
        start: features to start like: ``favor+``, or ``favor++`` or ``favor#`` once it is calibrated.
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
        start: str = "favor+",
    ) -> None:
        num_features = positive_int("num_features", num_features)
        settings = {"num_features": num_features, "per_head": per_head, "unit_keys": flag("unit_keys", unit_keys)}
        calibrated = choice("start", start, STARTS) != STARTS[0]
        super().__init__(
            UntiedSpec(key_units=int(unit_keys)),
            head_dim=head_dim,
            num_heads=num_heads,
            rows=num_features,
            seed=seed,
            draw=draw,
            per_head=per_head,
            num_key_heads=num_key_heads,
            # Absent where it changes nothing, so that weights from before it existed are those of the same map.
            settings={**settings, "start": start} if calibrated else settings,
        )
        dense = start == "favor#"
        self.statistics = Statistics(self.heads, head_dim, dense=dense, balance=dense) if calibrated else None
        self.b_q, self.b_k = (parameter(x, num_features) for x in (self.query_heads, self.heads))
        self._start()

    def _reset_learned(self) -> None:
        for x, first in zip(self._learned, self._first_values(1.0), strict=True):
            x.copy_(first)

    @property
    def _learned(self) -> tuple[Tensor, ...]:
        return self.w_q, self.b_q, self.w_k, self.b_k

    def _first_values(self, scale: float) -> list[Tensor]:
        """What w and b start from, in the order of `_learned`; the scale is of the statistics, if there are any."""
        gen = generator(self.seed_number, FIRST)
        rows, dim = self.w_q.shape[1:]
        norms = None if self.statistics is None else "chi"  # see `OptimalMap`
        w = [draw_frequencies(rows, dim, gen, draw=self.draw_kind, norms=norms) for _ in range(self.heads)]
        w_q = w_k = torch.stack(w)
        b = w_k.new_zeros(w_k.shape[:2])
        if self.statistics is not None:
            w_q, w_k, b = self.statistics.features(w_k, scale)
        b = b - 0.5 * math.log(rows)
        groups = self.w_q.shape[0] // self.heads
        return [w_q.repeat_interleave(groups, 0), b.repeat_interleave(groups, 0), w_k, b]

    def check_calibration(self, scale: float) -> None:
        """Refuse to overwrite what was learned."""
        for x, first in zip(self._learned, self._first_values(scale), strict=True):
            near = max(1e-5, 16 * torch.finfo(x.dtype).eps)  # they are drawn in float32
            if not torch.allclose(x.detach(), first.to(x), rtol=near, atol=near):
                raise ValueError(
                    "calibration sets w and b of a loglinear map, and these have been trained since they started; "
                    "calibrate before training, or start anew with reset_calibration() or reset=True."
                )

    @torch.no_grad()
    def calibrate(self, moments: Tensor, scale: float) -> None:
        """Count in more queries and keys, and start like the features for all of them."""
        super().calibrate(moments, scale)
        for x, first in zip(self._learned, self._first_values(scale), strict=True):
            x.copy_(first)

    @torch.no_grad()
    def reset_calibration(self) -> None:
        """Begin anew, having seen nothing and learned nothing."""
        super().reset_calibration()
        self._reset_learned()
