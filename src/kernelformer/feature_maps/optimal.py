"""Positive features of least variance for queries and keys of known statistics (OPRF and SDERF)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernelformer.contract import PositiveSpec, Role, compute_dtype
from kernelformer.errors import flag, positive_int
from kernelformer.feature_maps.exponential import DENSE
from kernelformer.feature_maps.statistics import CalibratedMap, Statistics


@dataclass(frozen=True)
class OptimalSpec(PositiveSpec):
    """``log phi_i(x) = w_i . x + c_i - |t x|^2 / 2``, with w and t of their own for queries and keys.

    Tensors: w (B or 1, H or 1, M, D) of the queries and of the keys, c (B or 1, H or 1, M), t (B or 1, H or 1, D) of
    the queries and of the keys.
    """

    tied = False  # queries and keys are balanced by inverse factors

    def feature_dim(self, tensors: Sequence[Tensor], head_dim: int) -> int:
        """One feature per frequency."""
        return tensors[0].shape[-2]

    def log_features(self, x: Tensor, tensors: Sequence[Tensor], scale: float, role: Role) -> Tensor:
        """Evaluate the formula."""
        return self._logs(x, tensors, scale, role) + tensors[2].unsqueeze(-2)

    def log_shares(self, x: Tensor, tensors: Sequence[Tensor], scale: float, role: Role) -> Tensor:
        """Formula in which queries take the constants of the keys, whose own summand then is one number per row."""
        logs = self._logs(x, tensors, scale, role)
        return logs + 2 * tensors[2].unsqueeze(-2) if role == "query" else logs

    def _logs(self, x: Tensor, tensors: Sequence[Tensor], scale: float, role: Role) -> Tensor:
        w, t = (tensors[0], tensors[3]) if role == "query" else (tensors[1], tensors[4])
        norm = (x * t.unsqueeze(-2)).square().sum(-1, keepdim=True)
        return torch.add(DENSE.project(x, [w], math.sqrt(scale)), norm, alpha=-0.5 * scale)


class OptimalMap(CalibratedMap):
    """Positive features of the softmax kernel with least variance for queries and keys of known statistics.

        phi(x) = det(I - 4 A)^(1/4) / sqrt(m) [exp(w_i^T A w_i + w_i^T (I - 4 A)^(1/2) x - |x|^2 / 2)]

    Unbiased for every A < 1/8; A = 0 is favor+. From M = mean (q + k)(q + k)^T over pairs of queries and keys:

        favor++   A = a I,             a = a(l) of l = trace(M) / D            (OPRF)
        favor#    A = U diag(a(l)) U^T of M = U diag(l) U^T                    (SDERF), after balancing:
                  q -> t q and k -> k / t with t_l^4 = mean k_l^2 / mean q_l^2, which leaves q . k alone
        a(l) = (1 - 2 l - sqrt((2 l + 1)^2 + 8 l)) / 16

    favor# is SDERF up to the rotation of w_i by U, which has the same law: features then depend on M continuously. The
    means come from `calibrate`, are saved with the map and stay as they are; each head has its own, and with
    ``num_key_heads`` each key head, over all queries of its group. Without calibration A = 0 and t = 1: favor+ with
    ``per_head=True``. Frequencies have the norms of Gaussian vectors, whatever the draw: others would need another A.

    Args:
        dense: A by direction instead of one number.
        balance: give queries and keys one size in each coordinate first.

    The others are those of `FeatureMap`.
    """

    def __init__(
        self,
        *,
        head_dim: int,
        num_heads: int,
        num_features: int = 256,
        dense: bool = False,
        balance: bool = False,
        seed: int = 0,
        draw: str = "orthogonal",
        num_key_heads: int | None = None,
    ) -> None:
        num_features = positive_int("num_features", num_features)
        settings = {"kernel": "softmax", "dense": flag("dense", dense), "balance": flag("balance", balance)}
        super().__init__(
            OptimalSpec(),
            head_dim=head_dim,
            num_heads=num_heads,
            num_features=num_features,
            seed=seed,
            draw=draw,
            norms="chi",
            per_head=True,
            num_key_heads=num_key_heads,
            settings=settings,
        )
        self.statistics = Statistics(self.heads, head_dim, dense=dense, balance=balance)
        self._start()

    def tensors(self, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> list[Tensor]:
        """Frequencies, constants and balance, see `OptimalSpec`; the statistics are evaluated at ``scale``."""
        assert self.statistics is not None
        assert self.omega is not None
        w_q, w_k, constants = self.statistics.features(self.omega, scale)
        constants = constants - 0.5 * math.log(self.num_features)
        t = self.statistics.balance
        return [x.to(dtype).unsqueeze(0) for x in (w_q, w_k, constants, t, 1 / t)]

    def prepare(
        self, query: Tensor, key: Tensor, key_mask: Tensor | None, scale: float, query_mask: Tensor | None = None
    ) -> list[Tensor]:
        """Return the tensors at the scale of the call, which do not depend on tokens."""
        return self.tensors(compute_dtype(query.dtype), scale)
