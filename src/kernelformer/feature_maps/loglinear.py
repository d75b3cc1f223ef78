"""The free positive map, for fitting what a pretrained model attends to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernelformer.contract import PositiveChunks, PositiveSpec, Role, register
from kernelformer.errors import choice, flag, positive_int
from kernelformer.feature_maps.base import FIRST, parameter
from kernelformer.feature_maps.draws import draw_frequencies, generator
from kernelformer.feature_maps.projection import Dense, Projection
from kernelformer.feature_maps.statistics import CalibratedMap, Statistics

STARTS = ("favor+", "favor++", "favor#")


@dataclass(frozen=True)
class LogLinearSpec(PositiveSpec):
    """``log phi_i(x) = w_i . x + b_i``; tensors: w (B or 1, H or 1, M, D) and b (B or 1, H or 1, M) of the queries,
    then of the keys.

    Args:
        unit_keys: the features of each key are divided by their sum.
        grouped: the R query heads of a key head have maps of their own, w (B or 1, G, R, M, D) and b (B or 1, G, R, M)
            of the queries; their rows come head after head, (B, G, R L, D).
    """

    unit_keys: bool = True
    grouped: bool = False

    def feature_dim(self, tensors: Sequence[Tensor], head_dim: int) -> int:
        """One feature per row of w."""
        return tensors[0].shape[-2]

    @property
    def tied(self) -> bool:
        """Queries and keys have maps of their own."""
        return False

    def log_features(self, x: Tensor, tensors: Sequence[Tensor], scale: float, role: Role) -> Tensor:
        """The formula as it stands."""
        w, b = tensors[:2] if role == "query" else tensors[2:]
        if role == "query" and self.grouped:
            rows: Tensor = x.unflatten(2, (w.shape[2], -1))  # (B, G, R, L, D)
            return (Dense().project(rows, [w], math.sqrt(scale)) + b.unsqueeze(-2)).flatten(2, 3)
        logs = Dense().project(x, [w], math.sqrt(scale)) + b.unsqueeze(-2)
        return logs.log_softmax(-1) if role == "key" and self.unit_keys else logs

    def bind(self, tensors: Sequence[Tensor], scale: float, normalize: bool, learn: bool) -> PositiveChunks:
        """In chunks; every summand differs from feature to feature, so nothing cancels."""
        w_q, b_q, w_k, b_k = tensors
        group = w_q.shape[1] if self.grouped else 1
        if self.grouped:
            w_q, b_q = w_q.flatten(0, 1), b_q.flatten(0, 1)
        parts = [Dense().bind([w], math.sqrt(scale), learn) for w in (w_q, w_k)]
        biases = [b_q, b_k]
        grads = [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in biases] if learn else None
        return LogLinearChunks(parts, biases, grads, self.unit_keys, group)


class LogLinearChunks(PositiveChunks):
    """`LogLinearSpec` on chunks; first of each pair the queries', second the keys'.

    Args:
        group: R, query heads of a row that have maps of their own, N R of them; 1 where they share the row's.
    """

    def __init__(
        self,
        parts: list[Projection],
        biases: list[Tensor],
        grads: list[Tensor] | None,
        unit_keys: bool,
        group: int = 1,
    ) -> None:
        self.parts, self.biases, self.grads, self.unit_keys = parts, biases, grads, unit_keys
        self.group = group

    def _by_head(self, x: Tensor) -> Tensor:
        """Rows (N, R C, X) with a map for each head, (N R, C, X): a view."""
        return x if self.group == 1 else x.view(x.shape[0] * self.group, -1, x.shape[2])

    def queries(self, x: Tensor, shift: Tensor, out: Tensor) -> Tensor:
        """Both summands ride on the product."""
        if self.group > 1:
            shift = shift.repeat_interleave(self.group, 0)
        self.parts[0].rows(self._by_head(x), self._by_head(out), shift + self.biases[0].unsqueeze(1))
        return out

    def keys(self, x: Tensor, out: Tensor) -> Tensor:
        """The bias rides on the product; the features of a key are divided by their sum if they are to be units."""
        self.parts[1].columns(x, out, self.biases[1].unsqueeze(2))
        return out.sub_(out.logsumexp(1, keepdim=True)) if self.unit_keys else out

    def pull_queries(self, x: Tensor, grad: Tensor, out: Tensor) -> Tensor:
        """Multiply the gradient by W."""
        grad = self._by_head(grad)
        if self.grads is not None:
            self.grads[0] += grad.sum(1)
        self.parts[0].pull_rows(self._by_head(x), grad, self._by_head(out))
        return out

    def pull_keys(self, x: Tensor, grad: Tensor, out: Tensor) -> Tensor:
        """The same for a transposed gradient; ``grad - phi sum(grad)`` first where features sum to 1."""
        if self.unit_keys:
            shares = self.parts[1].columns(x, torch.empty_like(grad), self.biases[1].unsqueeze(2)).softmax(1)
            grad = torch.addcmul(grad, shares, grad.sum(1, keepdim=True), value=-1)
        if self.grads is not None:
            self.grads[1] += grad.sum(2)
        return self.parts[1].pull_columns(x, grad, out)

    def at(self, row: int, head: int = 0) -> PositiveChunks:
        """Row ``row`` as views, for the queries of one head."""
        rows = (row * self.group + (head if self.group > 1 else 0), row)
        biases, grads = (
            None if pair is None else [x[i : i + 1] for x, i in zip(pair, rows, strict=True)]
            for pair in (self.biases, self.grads)
        )
        assert biases is not None
        parts = [x.at(i) for x, i in zip(self.parts, rows, strict=True)]
        return LogLinearChunks(parts, biases, grads, self.unit_keys)

    def tensor_grads(self) -> list[Tensor]:
        """Gradients of w and b, in the order of the tensors."""
        assert self.grads is not None
        (w_q,), (w_k,) = (x.tensor_grads() for x in self.parts)
        queries = [w_q, self.grads[0]]
        if self.group > 1:
            queries = [x.unflatten(0, (-1, self.group)) for x in queries]
        return [*queries, w_k, self.grads[1]]


class LogLinearMap(CalibratedMap):
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
            LogLinearSpec(unit_keys, num_key_heads not in (None, num_heads)),
            head_dim=head_dim,
            num_heads=num_heads,
            num_features=0,
            seed=seed,
            draw=draw,
            per_head=per_head,
            num_key_heads=num_key_heads,
            # Absent where it changes nothing, so that weights from before it existed are those of the same map.
            settings={**settings, "start": start} if calibrated else settings,
        )
        dense = start == "favor#"
        self.statistics = Statistics(self.heads, head_dim, dense=dense, balance=dense) if calibrated else None
        self.spread_spec = LogLinearSpec(unit_keys)
        self.spread_spec_id = register(self.spread_spec)
        heads = (num_heads if per_head else 1, self.heads)
        self.w_q, self.w_k = (parameter(x, num_features, head_dim) for x in heads)
        self.b_q, self.b_k = (parameter(x, num_features) for x in heads)
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

    def tensors(self, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        """The parameters w_q, b_q, w_k, b_k."""
        w_q, b_q, w_k, b_k = (x.to(dtype).unsqueeze(0) for x in (self.w_q, self.b_q, self.w_k, self.b_k))
        if self.grouped:
            w_q, b_q = (x.unflatten(1, (self.heads, -1)) for x in (w_q, b_q))
        return [w_q, b_q, w_k, b_k]

    @property
    def grouped(self) -> bool:
        """Whether several query heads with maps of their own share the map of a key head."""
        return self.num_key_heads != self.num_heads

    def for_query_heads(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Maps of keys repeated, those of queries as they are."""
        if not self.grouped:
            return list(tensors)
        w_q, b_q, w_k, b_k = tensors
        keys = [x.repeat_interleave(w_q.shape[2], 1) for x in (w_k, b_k)]
        return [w_q.flatten(1, 2), b_q.flatten(1, 2), *keys]
