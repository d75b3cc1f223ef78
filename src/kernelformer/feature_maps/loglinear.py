"""The free positive map, for fitting what a pretrained model attends to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernelformer.contract import PositiveChunks, PositiveSpec, Role
from kernelformer.errors import flag, positive_int
from kernelformer.feature_maps.base import FIRST, FeatureMap, parameter
from kernelformer.feature_maps.draws import draw_frequencies, generator
from kernelformer.feature_maps.projection import Dense, Projection


@dataclass(frozen=True)
class LogLinearSpec(PositiveSpec):
    """``log phi_i(x) = w_i . x + b_i``; tensors: w (B or 1, H or 1, M, D) and b (B or 1, H or 1, M) of the queries,
    then of the keys.

    Args:
        unit_keys: the features of each key are divided by their sum.
    """

    unit_keys: bool = True

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
        logs = Dense().project(x, [w], math.sqrt(scale)) + b.unsqueeze(-2)
        return logs.log_softmax(-1) if role == "key" and self.unit_keys else logs

    def bind(self, tensors: Sequence[Tensor], scale: float, normalize: bool, learn: bool) -> PositiveChunks:
        """In chunks; every summand differs from feature to feature, so nothing cancels."""
        parts = [Dense().bind(tensors[i : i + 1], math.sqrt(scale), learn) for i in (0, 2)]
        biases = [tensors[1], tensors[3]]
        grads = [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in biases] if learn else None
        return LogLinearChunks(parts, biases, grads, self.unit_keys)


class LogLinearChunks(PositiveChunks):
    """`LogLinearSpec` on chunks; first of each pair the queries', second the keys'."""

    def __init__(
        self, parts: list[Projection], biases: list[Tensor], grads: list[Tensor] | None, unit_keys: bool
    ) -> None:
        self.parts, self.biases, self.grads, self.unit_keys = parts, biases, grads, unit_keys

    def queries(self, x: Tensor, shift: Tensor, out: Tensor) -> Tensor:
        """Both summands ride on the product."""
        return self.parts[0].rows(x, out, shift + self.biases[0].unsqueeze(1))

    def keys(self, x: Tensor, out: Tensor) -> Tensor:
        """Likewise; what a key's features sum to goes off each."""
        self.parts[1].columns(x, out, self.biases[1].unsqueeze(2))
        return out.sub_(out.logsumexp(1, keepdim=True)) if self.unit_keys else out

    def pull_queries(self, x: Tensor, grad: Tensor, out: Tensor) -> Tensor:
        """``grad W``."""
        if self.grads is not None:
            self.grads[0] += grad.sum(1)
        return self.parts[0].pull_rows(x, grad, out)

    def pull_keys(self, x: Tensor, grad: Tensor, out: Tensor) -> Tensor:
        """The same for a transposed gradient; ``grad - phi sum(grad)`` first where features sum to 1."""
        if self.unit_keys:
            shares = self.parts[1].columns(x, torch.empty_like(grad), self.biases[1].unsqueeze(2)).softmax(1)
            grad = torch.addcmul(grad, shares, grad.sum(1, keepdim=True), value=-1)
        if self.grads is not None:
            self.grads[1] += grad.sum(2)
        return self.parts[1].pull_columns(x, grad, out)

    def at(self, row: int) -> PositiveChunks:
        """Row ``row`` as views."""
        one = slice(row, row + 1)
        grads = None if self.grads is None else [x[one] for x in self.grads]
        return LogLinearChunks([x.at(row) for x in self.parts], [x[one] for x in self.biases], grads, self.unit_keys)

    def tensor_grads(self) -> list[Tensor]:
        """Of w and b, in the order of the tensors."""
        assert self.grads is not None
        (w_q,), (w_k,) = (x.tensor_grads() for x in self.parts)
        return [w_q, self.grads[0], w_k, self.grads[1]]


class LogLinearMap(FeatureMap):
    """Positive features without a tie to a density.

        log phi_i(q) = w_i . q + b_i       w and b of their own for queries and keys, and for each head
        log phi_i(k) = w_i . k + b_i - log sum_j exp(w_j . k + b_j)

    Always positive and exactly stabilized. Each key spreads one unit over the features, so that no key drowns the
    others by its norm alone: the part that exp(-|k|^2 / 2) has in positive random features. It starts like those: w
    drawn, the same for queries and keys, b = -log(M) / 2.

    Parameters: w_q, w_k (heads, M, D), b_q, b_k (heads, M).

    Args:
        draw: of the first w, see `draws.draw_frequencies`.
        per_head: False shares one map between the heads.
        unit_keys: False leaves the sum over j out: log phi_i(k) = w_i . k + b_i.

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
    ) -> None:
        num_features = positive_int("num_features", num_features)
        settings = {"num_features": num_features, "per_head": per_head, "unit_keys": flag("unit_keys", unit_keys)}
        common = {"head_dim": head_dim, "num_heads": num_heads, "seed": seed, "per_head": per_head}
        super().__init__(LogLinearSpec(unit_keys), num_features=0, draw=draw, settings=settings, **common)  # type: ignore[arg-type]
        self.w_q, self.w_k = (parameter(self.heads, num_features, head_dim) for _ in range(2))
        self.b_q, self.b_k = (parameter(self.heads, num_features) for _ in range(2))
        self._start()

    def _reset_learned(self) -> None:
        gen = generator(self.seed_number, FIRST)
        rows, dim = self.w_q.shape[1:]
        w = torch.stack([draw_frequencies(rows, dim, gen, draw=self.draw_kind) for _ in range(self.heads)])
        for x in (self.w_q, self.w_k):
            x.copy_(w)
        for x in (self.b_q, self.b_k):
            x.fill_(-0.5 * math.log(rows))

    def tensors(self, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        """w_q, b_q, w_k, b_k."""
        return [x.to(dtype).unsqueeze(0) for x in (self.w_q, self.b_q, self.w_k, self.b_k)]
