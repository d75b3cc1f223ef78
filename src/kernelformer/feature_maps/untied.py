"""Positive maps with separate weights for queries and keys, and for each head of both."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from kernelformer.contract import PositiveChunks, PositiveSpec, Role, intern_formula
from kernelformer.errors import choice, flag, positive_int
from kernelformer.feature_maps.base import FIRST, FeatureMap, parameter
from kernelformer.feature_maps.draws import draw_frequencies, generator
from kernelformer.feature_maps.exponential import AffineChunks, Dense
from kernelformer.feature_maps.statistics import CalibratedMap, Statistics


@dataclass(frozen=True)
class UntiedSpec(PositiveSpec):
    """``log phi(x) = W x + b``, less the log-sum-exp of each part of the features that sums to 1.

    Tensors: w (B or 1, H or 1, m, D) and, where there is one, b (B or 1, H or 1, M) of the queries, then of the keys.
    Where they are grouped, the R query heads of a key head have maps of their own, w (B or 1, G, R, m, D) and b
    (B or 1, G, R, M) of the queries; their rows come head after head, (B, G, R L, D).
    """

    tied = False
    query_units: int = 0  # into how many equal parts the features of a query go, each divided by its sum; 0: none is
    key_units: int = 0  # the same for the features of a key
    mirrored: bool = False  # W is w and -w, one below the other, M = 2 m; else w
    grouped: bool = False

    def feature_dim(self, tensors: Sequence[Tensor], head_dim: int) -> int:
        """One feature per row of W."""
        return self._linear.width(tensors)

    @property
    def _linear(self) -> Dense:
        return Dense(mirrored=self.mirrored)

    def log_features(self, x: Tensor, tensors: Sequence[Tensor], scale: float, role: Role) -> Tensor:
        """Evaluate the formula."""
        w, *bias = _of(role, tensors)
        by_head = role == "query" and self.grouped
        rows: Tensor = x.unflatten(2, (w.shape[2], -1)) if by_head else x  # (B, G, R, L, D)
        logs = self._linear.project(rows, [w], math.sqrt(scale))
        for b in bias:
            logs = logs + b.unsqueeze(-2)
        units = self.query_units if role == "query" else self.key_units
        if units:
            logs = logs.unflatten(-1, (units, -1)).log_softmax(-1).flatten(-2)
        return logs.flatten(2, 3) if by_head else logs

    def bind(self, tensors: Sequence[Tensor], scale: float, normalize: bool, learn: bool) -> PositiveChunks:
        """Bind for chunks; every summand differs from feature to feature, so nothing cancels."""
        (w, *bias), keys = _of("query", tensors), _of("key", tensors)
        group = w.shape[1] if self.grouped else 1
        queries = [x.flatten(0, 1) if self.grouped else x for x in (w, *bias)]
        root = math.sqrt(scale)
        query = self._linear.bind(queries, root, learn, units=self.query_units)
        return AffineChunks(query, self._linear.bind(keys, root, learn, units=self.key_units), normalize, group)


def _of(role: Role, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Select the tensors of one role: the first half is that of the queries."""
    half = len(tensors) // 2
    return list(tensors[:half] if role == "query" else tensors[half:])


class UntiedMap(FeatureMap):
    """Base class of maps with an `UntiedSpec`: the weights of queries and keys, by head.

    Parameters: w_q (H, m, D) of the queries, w_k (G, m, D) of the keys; H = G = 1 where the heads share one map. A
    subclass that learns more names it in `learns`, has a parameter of each role by that name, and sets all in
    `_reset_learned`. Nothing is redrawn.
    """

    learns: ClassVar[tuple[str, ...]] = ("w",)  # without the role, in the order of the spec's tensors
    w_q: nn.Parameter
    w_k: nn.Parameter

    def __init__(
        self, spec: UntiedSpec, *, num_heads: int, rows: int, per_head: bool, num_key_heads: int | None, **common: Any
    ) -> None:
        grouped = replace(spec, grouped=num_key_heads not in (None, num_heads))
        heads: dict[str, Any] = {"num_heads": num_heads, "per_head": per_head, "num_key_heads": num_key_heads}
        super().__init__(grouped, num_features=0, **heads, **common)
        self.spread_spec = spec
        self.spread_spec_id = intern_formula(spec)
        self.query_heads = num_heads if per_head else 1
        self.w_q, self.w_k = (parameter(x, rows, self.head_dim) for x in (self.query_heads, self.heads))

    def _start_at(self, w: Tensor) -> None:
        """Initialize queries and keys with the same w (G, m, D)."""
        self.w_k.copy_(w)
        self.w_q.copy_(w.repeat_interleave(self.query_heads // self.heads, 0))

    @property
    def grouped(self) -> bool:
        """True if several query heads with maps of their own share the map of a key head."""
        return self.num_key_heads != self.num_heads

    def tensors(self, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        """Parameters of the queries, then of the keys."""
        named = [[getattr(self, f"{name}_{role}") for name in self.learns] for role in "qk"]
        queries, keys = ([x.to(dtype).unsqueeze(0) for x in some] for some in named)
        if self.grouped:
            queries = [x.unflatten(1, (self.heads, -1)) for x in queries]
        return [*queries, *keys]

    def for_query_heads(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Repeat the maps of keys; those of queries stay as they are."""
        if not self.grouped:
            return list(tensors)
        repeats = tensors[0].shape[2]
        keys = [x.repeat_interleave(repeats, 1) for x in _of("key", tensors)]
        return [*(x.flatten(1, 2) for x in _of("query", tensors)), *keys]


STARTS = ("favor+", "favor++", "favor#")


class LogLinearMap(CalibratedMap, UntiedMap):
    """Free positive features: exponentials of learned affine functions.

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
        """Initial values of w and b, in the order of `_learned`; ``scale`` is that of the statistics, if any."""
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
        """Raise a ValueError if w and b have been trained, which calibration would overwrite."""
        for x, first in zip(self._learned, self._first_values(scale), strict=True):
            near = max(1e-5, 16 * torch.finfo(x.dtype).eps)  # they are drawn in float32
            if not torch.allclose(x.detach(), first.to(x), rtol=near, atol=near):
                raise ValueError(
                    "calibration sets w and b of a loglinear map, and these have been trained since they started; "
                    "calibrate before training, or start anew with reset_calibration() or reset=True."
                )

    @torch.no_grad()
    def calibrate(self, moments: Tensor, scale: float) -> None:
        """Add more queries and keys, and initialize w and b like the features for all of them."""
        super().calibrate(moments, scale)
        for x, first in zip(self._learned, self._first_values(scale), strict=True):
            x.copy_(first)

    @torch.no_grad()
    def reset_calibration(self) -> None:
        """Clear the statistics and reset w and b."""
        super().reset_calibration()
        self._reset_learned()


class HedgehogMap(UntiedMap):
    """Softmax features over learned projections and over their negatives.

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
