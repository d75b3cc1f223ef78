"""Landmarks by pivoted Cholesky: tokens that the ones chosen before explain least.

    residual_j = 1 - kappa(x_j, Z) kappa(Z, Z)^-1 kappa(Z, x_j)          kappa(x, y) = exp(-|x - y|^2 / 2)

The next landmark is drawn with probability in proportion to ``residual_j e^(w_j)`` (randomly pivoted Cholesky), or is
the largest (greedy). One at a time every draw would read all columns of the factor for a single new one, S r^2 numbers
in products of a matrix and a vector. So several are proposed from the residuals as they are, and one after another is
accepted with probability ``residual now / residual when proposed``: the same law, and products of matrices.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernelformer.feature_maps.landmarks import rank_hash
from kernelformer.kernels import squared_distance

BLOCK = 32  # proposals at a time
# What is explained up to this, times the squared norm where it is above 1, adds nothing: it is rounding, and in float32
# below the ridge.
FLOOR = {torch.float32: 1e-6, torch.float64: 1e-10}
_NUMBERS = 1 << 24  # of the factors that are built at once: 64 MiB in float32


@torch.library.custom_op("kernelformer::pivots", mutates_args=())
def _pivots(
    x: Tensor, weight: Tensor | None, real: Tensor | None, salt: Tensor | None, count: int
) -> tuple[Tensor, Tensor]:
    index = torch.zeros(x.shape[0], count, dtype=torch.int64, device=x.device)
    valid = torch.zeros(x.shape[0], count, dtype=torch.bool, device=x.device)
    if x.shape[0]:
        rows = max(1, _NUMBERS // (x.shape[1] * (count + BLOCK)))
        for start in range(0, x.shape[0], rows):
            some = slice(start, start + rows)
            weights, tokens = (None if t is None else t[some] for t in (weight, real))
            index[some], valid[some] = _Choice(x[some], weights, tokens, salt, count).run()
    return index, valid


@_pivots.register_fake
def _(x: Tensor, weight: Tensor | None, real: Tensor | None, salt: Tensor | None, count: int) -> tuple[Tensor, Tensor]:
    index = x.new_empty(x.shape[0], count, dtype=torch.int64)
    return index, torch.empty_like(index, dtype=torch.bool)


@torch.no_grad()
def pivots(
    x: Tensor, weight: Tensor | None, real: Tensor | None, salt: Tensor | None, count: int
) -> tuple[Tensor, Tensor]:
    """Choose landmarks among the tokens of each sample and head.

    Args:
        x: (B, H, S, D), as the kernel sees them; those that are not real are finite.
        weight: (B, H, S), logarithms of factors of the residuals; None means 0.
        real: (B, S) bool, tokens to choose from; None means all.
        salt: () int64, says what is drawn; None for the greedy choice.
        count: r, at most S.

    Returns:
        indices (B, H, r) int64, and which of them are landmarks, (B, H, r) bool: where the others explain everything,
        or there are too few real tokens, the last are not. Cost: O(S r (D + r)) time and O(S r) memory per sample and
        head, as many of which are done at once as fit in 64 MiB.
    """
    batch, heads = x.shape[:2]
    rows = None if weight is None else weight.detach().flatten(0, 1)
    tokens = None if real is None else real.repeat_interleave(heads, 0)
    index, valid = _pivots(x.detach().flatten(0, 1), rows, tokens, salt, count)
    return index.view(batch, heads, count), valid.view(batch, heads, count)


def at(x: Tensor, index: Tensor, valid: Tensor) -> Tensor:
    """The chosen tokens (B, H, r, D) of x (B, H, S, D), with zeros where there is none."""
    chosen = x.gather(2, index.unsqueeze(3).expand(-1, -1, -1, x.shape[3]))
    return chosen.masked_fill(~valid.unsqueeze(3), 0)


class _Choice:
    """The choice for some rows: a factor G (N, t, S), ``G^T G ~ kappa(x, x)``, that grows by some rows each round.

    Rounds accept different numbers in different rows of N; where one accepts less, its rows of G are zeros.
    """

    def __init__(self, x: Tensor, weight: Tensor | None, real: Tensor | None, salt: Tensor | None, count: int) -> None:
        self.x, self.salt, self.wanted = x, salt, count
        self.block = 1 if salt is None else BLOCK
        rows, tokens = x.shape[:2]
        self.half = 0.5 * x.square().sum(2)
        logs = x.new_zeros(rows, tokens) if weight is None else weight
        usable = self.half.isfinite()  # nothing is like a token with NaN or an infinity
        self.residual = (usable if real is None else usable & real).to(x.dtype)
        self.weight = logs.double()
        self.factor = x.new_empty(rows, count + self.block, tokens)
        self.used = 0  # rows of the factor
        self.chosen: list[tuple[Tensor, Tensor]] = []  # of each round: tokens, and which are landmarks
        self.room = torch.full((rows,), count, device=x.device)
        self.floor = FLOOR[x.dtype] * (2 * self.half).clamp_min(1)  # (N, S)

    def run(self) -> tuple[Tensor, Tensor]:
        """All rounds; in each the first proposal of a row is accepted or found to be explained."""
        for number in range(self.wanted + self.x.shape[1]):
            if not self._round(number):
                break
        index, accepted = (torch.cat(parts, 1) for parts in zip(*self.chosen, strict=True))
        order = _accepted_first(accepted)[:, : self.wanted]
        index, accepted = index.gather(1, order), accepted.gather(1, order)
        missing = self.wanted - index.shape[1]
        index, accepted = (F.pad(x, (0, missing)) for x in (index, accepted))
        return index.masked_fill(~accepted, 0), accepted

    def _propose(self, number: int) -> tuple[Tensor, Tensor]:
        """Tokens (N, b), and thresholds (b) in [0, 1) for the shares of their residuals that must be left."""
        logs = torch.log(self.residual.double()).add_(self.weight)
        # Relative to the largest that is left: weights of long tokens are beyond any range.
        share = logs.sub_(logs.amax(1, keepdim=True)).exp_().nan_to_num_(0)
        if self.salt is None:
            return share.argmax(1, keepdim=True), share.new_zeros(1)
        numbers = torch.arange(2 * self.block, device=share.device) + 2 * self.block * number
        uniform = (rank_hash(numbers, self.salt).double() + 0.5) / (1 << 53)
        sums = share.cumsum(1)
        targets = uniform[: self.block] * sums[:, -1:]
        tokens = torch.searchsorted(sums, targets, right=True).clamp_max_(sums.shape[1] - 1)
        return tokens, uniform[self.block :]

    def _round(self, number: int) -> bool:
        """Propose, accept, and take off what the accepted ones explain; False where no more are to come."""
        tokens, thresholds = self._propose(number)
        before = self.factor[:, : self.used].gather(2, tokens.unsqueeze(1).expand(-1, self.used, -1))  # (N, t, b)
        points = self.x.gather(1, tokens.unsqueeze(2).expand(-1, -1, self.x.shape[2]))
        rest = torch.baddbmm(torch.exp(-0.5 * squared_distance(points, points)), before.mT, before, alpha=-1)
        need = thresholds.to(rest.dtype) * rest.diagonal(dim1=1, dim2=2)
        # Where nothing is left to explain, any token may have been proposed.
        floor = self.floor.gather(1, tokens)
        need = torch.maximum(need, floor).masked_fill_(self.residual.gather(1, tokens) == 0, torch.inf)
        accepted, lower, left = self._accept(rest, need)
        # Rounding may find something left where nothing is, and would propose it for ever.
        self.residual.scatter_reduce_(1, tokens, torch.where(left > floor, torch.inf, 0).to(left), "amin")
        most = int(accepted.sum(1).max())
        order = _accepted_first(accepted)[:, :most]
        accepted, tokens = accepted.gather(1, order), tokens.gather(1, order)
        self.chosen.append((tokens, accepted))
        if most == 0:
            return self._goes_on()
        lower = lower.gather(1, order.unsqueeze(2).expand(-1, -1, lower.shape[2]))
        lower = lower.gather(2, order.unsqueeze(1).expand(-1, most, -1))
        lower.diagonal(dim1=1, dim2=2).masked_fill_(~accepted, 1)
        points = points.gather(1, order.unsqueeze(2).expand(-1, -1, points.shape[2]))
        self._explain(points, before.gather(2, order.unsqueeze(1).expand(-1, self.used, -1)), lower, accepted)
        # A token is explained by itself, whatever rounding says.
        own = torch.zeros_like(self.residual, dtype=torch.bool).scatter_(1, tokens, accepted)
        self.residual.masked_fill_(own | (self.residual <= self.floor), 0)
        self.room = self.room - accepted.sum(1)
        return self._goes_on()

    def _goes_on(self) -> bool:
        """Whether some row wants more landmarks and has something left to explain."""
        return bool(((self.room > 0) & (self.residual > 0).any(1)).any())

    def _accept(self, rest: Tensor, need: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Which proposals become landmarks (N, b), the factor of ``rest`` (N, b, b) over them, and what is left (N, b).

        One does if more than ``need`` (N, b) of its residual is left.
        """
        lower = torch.zeros_like(rest)
        accepted = torch.zeros(rest.shape[:2], dtype=torch.bool, device=rest.device)
        room = self.room
        for c in range(rest.shape[1]):
            pivot = rest[:, c, c]
            taken = (pivot > need[:, c]) & (room > 0)
            accepted[:, c] = taken
            room = room - taken.long()
            column = rest[:, c] * torch.where(taken, pivot, torch.inf).rsqrt().unsqueeze(1)
            lower[:, c:, c] = column[:, c:]
            rest = torch.baddbmm(rest, column.unsqueeze(2), column.unsqueeze(1), alpha=-1)
        return accepted, lower, rest.diagonal(dim1=1, dim2=2)

    def _explain(self, points: Tensor, before: Tensor, lower: Tensor, accepted: Tensor) -> None:
        """New rows of the factor, ``lower^-1 (kappa(z, x) - before^T G)`` for landmarks z, and the residuals' fall."""
        end = self.used + points.shape[1]
        if end > self.factor.shape[1]:
            self.factor = torch.cat([self.factor, torch.empty_like(self.factor)], 1)
        rows = torch.baddbmm((-0.5 * points.square().sum(2)).unsqueeze(2), points, self.x.mT)
        rows.sub_(self.half.unsqueeze(1)).clamp_max_(0).exp_()
        rows.baddbmm_(before.mT, self.factor[:, : self.used], alpha=-1)
        eye = torch.eye(lower.shape[1], dtype=lower.dtype, device=lower.device)
        inverse = torch.linalg.solve_triangular(lower, eye, upper=False)
        rows = torch.bmm(inverse.masked_fill_(~accepted.unsqueeze(2), 0), rows)
        self.factor[:, self.used : end] = rows
        self.residual.sub_(rows.square_().sum(1)).clamp_min_(0)
        self.used = end


def _accepted_first(accepted: Tensor) -> Tensor:
    """The order of the proposals (N, b) with the accepted ones before the others."""
    return torch.sort(accepted.logical_not().to(torch.uint8), stable=True, dim=1).indices
