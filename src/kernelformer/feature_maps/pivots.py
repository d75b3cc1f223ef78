"""Features at pivoted landmarks among the keys (WildCat): softmax attention compressed to r weighted keys.

    e^(q . k) ~ e^(q . Z - |Z|^2/2) (M + gamma I)^-1 kappa(Z, k) e^(|k|^2/2)          M = kappa(Z, Z)

kappa is the Gaussian kernel and Z are keys, which pivoted Cholesky chooses (`pivots`). Keys are centred first and
divided by tau, queries are multiplied by it: softmax does not notice, but keys come closer together, which is all that
the landmarks have to explain. Queries are only compared with landmarks, where nothing is approximated.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernelformer.contract import Role, SignedSpec, compute_dtype, wide_dtype
from kernelformer.errors import choice, positive_int
from kernelformer.feature_maps.base import FeatureMap
from kernelformer.feature_maps.draws import generator
from kernelformer.feature_maps.landmarks import inverse_root, landmark_gram, rank_hash
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
    """Choose ``count`` landmarks among the tokens of each sample and head.

    Args:
        x: (B, H, S, D), as the kernel sees them; those that are not real are finite.
        weight: (B, H, S), logarithms of factors of the residuals; None means 0.
        real: (B, S) bool, tokens to choose from; None means all.
        salt: () int64, says what is drawn; None for the greedy choice.

    Returns:
        indices (B, H, r) int64, and which of them are landmarks, (B, H, r) bool: where the others explain everything,
        or there are too few real tokens, the last are not. Cost: O(S r (D + r)) time and O(S r) memory per head.
    """
    batch, heads = x.shape[:2]
    rows = None if weight is None else weight.detach().flatten(0, 1)
    tokens = None if real is None else real.repeat_interleave(heads, 0)
    index, valid = _pivots(x.detach().flatten(0, 1), rows, tokens, salt, count)
    return index.view(batch, heads, count), valid.view(batch, heads, count)


def at(x: Tensor, index: Tensor, valid: Tensor) -> Tensor:
    """Gather the chosen tokens (B, H, r, D) of x (B, H, S, D), with zeros where there is none."""
    chosen = x.gather(2, index.unsqueeze(3).expand(-1, -1, -1, x.shape[3]))
    return chosen.masked_fill(~valid.unsqueeze(3), 0)


class _Choice:
    """Pivoted Cholesky for a block of rows: a factor G (N, t, S), ``G^T G ~ kappa(x, x)``, that grows in each round.

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
        """Run all rounds; in each the first proposal of a row is accepted or found to be explained."""
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
        """Propose tokens (N, b), with thresholds (b) in [0, 1) for the shares of their residuals that must be left."""
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
        """Propose, accept, and subtract what the accepted ones explain; return False after the last round."""
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
            return self._continues()
        lower = lower.gather(1, order.unsqueeze(2).expand(-1, -1, lower.shape[2]))
        lower = lower.gather(2, order.unsqueeze(1).expand(-1, most, -1))
        lower.diagonal(dim1=1, dim2=2).masked_fill_(~accepted, 1)
        points = points.gather(1, order.unsqueeze(2).expand(-1, -1, points.shape[2]))
        self._explain(points, before.gather(2, order.unsqueeze(1).expand(-1, self.used, -1)), lower, accepted)
        # A token is explained by itself, whatever rounding says.
        own = torch.zeros_like(self.residual, dtype=torch.bool).scatter_(1, tokens, accepted)
        self.residual.masked_fill_(own | (self.residual <= self.floor), 0)
        self.room = self.room - accepted.sum(1)
        return self._continues()

    def _continues(self) -> bool:
        """Return True if some row wants more landmarks and has something left to explain."""
        return bool(((self.room > 0) & (self.residual > 0).any(1)).any())

    def _accept(self, rest: Tensor, need: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Accept proposals: a mask (N, b), the factor of ``rest`` (N, b, b) over them, and the residuals (N, b).

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
        """Append rows to the factor, ``lower^-1 (kappa(z, x) - before^T G)`` for landmarks z; lower the residuals."""
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
    """Order the proposals (N, b) with the accepted ones before the others."""
    return torch.sort(accepted.logical_not().to(torch.uint8), stable=True, dim=1).indices


RIDGE = 1e-6  # gamma
LEAST_PRODUCT = 1e-6  # of max|q| and max|k|
STRETCH = 3.946  # tau^2 max|q| / max|k|, from the paper


@dataclass(frozen=True)
class WildcatSpec(SignedSpec):
    """``phi(x) = W^T e^(x . Z - |Z|^2/2)``, ``W W^T = (M + gamma I)^-1``; keys centred, over tau; queries times tau.

    Rows are relative to their largest logarithm, which is their factor, so that nothing is out of range; a query's also
    has its product with the centre, which centring has taken out of all its weights.

    Tensors: landmarks Z (B, H, r, D), centred and divided by tau; ``-|z|^2 / 2`` (B, H, r), -inf for a slot without a
    token; W (B, H, r, r); the centre of the keys (B, H, D), as they come; tau (B, H, 1).
    """

    has_factor = True
    guarded = False  # a guard by norms would drown queries that are far from all keys; outputs are clipped instead

    def feature_dim(self, tensors: Sequence[Tensor], head_dim: int) -> int:
        """One feature per landmark."""
        return tensors[0].shape[-2]

    def features(
        self, x: Tensor, tensors: Sequence[Tensor], scale: float, role: Role, normalize: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Evaluate the formula."""
        landmarks, offset, root, centre, tau = tensors
        x = x.to(landmarks.dtype)
        centre, tau, offset = centre.unsqueeze(-2), tau.unsqueeze(-1), offset.unsqueeze(-2)
        seen = (x - centre) * (math.sqrt(scale) / tau) if role == "key" else x * (math.sqrt(scale) * tau)
        logs = (seen @ landmarks.transpose(-1, -2)).add_(offset)
        top = _finite(logs.detach().amax(-1, keepdim=True))
        phi = logs.sub_(top).exp_() @ root
        return phi, top if role == "key" else top + scale * (x @ centre.transpose(-1, -2))


def _finite(top: Tensor) -> Tensor:
    """Replace the largest logarithm of a row by 0 if there is no landmark."""
    return top.masked_fill(top == -torch.inf, 0)


class WildcatMap(FeatureMap):
    """Softmax attention to r weighted keys, without any training (WildCat, Sec. 3).

        out = e^(q . Z) (w V) / e^(q . Z) (w 1),     w = (M + gamma I)^-1 kappa(Z, K) e^((|K|^2 - |Z|^2)/2)

    clipped to the range of the values. Landmarks Z are keys that pivoted Cholesky chooses for every sample and
    head; M = kappa(Z, Z), gamma = 1e-6. Keys are centred and divided by tau, queries are multiplied by it,
    ``tau^2 = 3.946 max|k| / max|q|`` over the real tokens of a sample and head. The choice, tau and the range are
    constants for the gradient. With as many landmarks as keys it is exact up to gamma, which shows where keys crowd:
    outputs for values of size 1 were off by 4e-6 for 128 keys at D = 64, by 0.02 for 60 keys at D = 2.

    Args:
        num_landmarks: r, the number of keys that stand for all.
        pivots: ``random``, with probability in proportion to what is left to explain, or ``greedy``, the largest.
        seed: of the draws.

    Cost: O(S r (D + r) + L r (D + r + E)), and O(r^3) once per sample and head; O(S r) memory for the choice.
    """

    salt: Tensor
    sees_sequence = True

    def __init__(
        self, *, head_dim: int, num_heads: int, num_landmarks: int = 128, pivots: str = "random", seed: int = 0
    ) -> None:
        num_landmarks = positive_int("num_landmarks", num_landmarks)
        choice("pivots", pivots, ("random", "greedy"))
        super().__init__(
            WildcatSpec(),
            head_dim=head_dim,
            num_heads=num_heads,
            num_features=0,
            seed=seed,
            per_head=True,
            settings={"num_landmarks": num_landmarks, "pivots": pivots},
        )
        self.num_landmarks, self.pivots = num_landmarks, pivots
        self.is_random = pivots == "random"
        self.has_warned = False  # that all keys are landmarks
        self._start()

    def _draws(self, draw: int) -> dict[str, Tensor]:
        if not self.is_random:
            return {}
        gen = generator(self.seed_number, draw)
        return {"salt": torch.randint(1 << 62, (), generator=gen, dtype=torch.int64, device="cpu")}

    def _width(self) -> int:
        return self.num_landmarks  # fewer where there are fewer keys

    def prepare(
        self, query: Tensor, key: Tensor, key_mask: Tensor | None, scale: float, query_mask: Tensor | None = None
    ) -> list[Tensor]:
        """Compute landmarks, half of their squares, the root of the inverse, the centre and tau, by sample and head."""
        dtype = compute_dtype(query.dtype)
        self._warn(key.shape[2])
        key = key.to(dtype).repeat_interleave(query.shape[1] // key.shape[1], 1)
        if key_mask is not None:
            key = key.masked_fill(~key_mask[:, None, :, None], 0)
        batch, heads, tokens, dim = key.shape
        centre = key.sum(2) / _count(key, key_mask)
        centred = key - centre.unsqueeze(2)
        tau = _tau(query, centred.detach(), query_mask, key_mask, scale)  # (B, H, 1)
        factor = (math.sqrt(scale) / tau).unsqueeze(3)
        if tokens == 0:
            landmarks = key.new_zeros(batch, heads, 1, dim)
            valid = torch.zeros_like(landmarks[..., 0], dtype=torch.bool)
        else:
            x = centred.detach() * factor
            salt = self.salt if self.is_random else None
            index, valid = pivots(x, x.square().sum(3), key_mask, salt, min(self.num_landmarks, tokens))
            landmarks = at(centred, index, valid) * factor
        gram = landmark_gram(landmarks.to(wide_dtype(landmarks)), valid, RIDGE)
        offset = (-0.5 * landmarks.square().sum(3)).masked_fill(~valid, -torch.inf)
        return [landmarks, offset, inverse_root(gram).to(dtype), centre, tau]

    def _warn(self, tokens: int) -> None:
        if self.num_landmarks > tokens > 0 and not self.has_warned and not torch.compiler.is_compiling():
            self.has_warned = True
            warnings.warn(
                f"num_landmarks={self.num_landmarks} of {tokens} keys: all of them are landmarks; 'softmax' is exact "
                f"and cheaper for sequences that short.",
                stacklevel=2,
            )


@contextmanager
def without_landmark_warnings(model: nn.Module) -> Iterator[None]:
    """Suppress warnings about few tokens in calls that only try a model."""
    maps = [x for x in model.modules() if isinstance(x, WildcatMap)]
    before = [x.has_warned for x in maps]
    for x in maps:
        x.has_warned = True
    try:
        yield
    finally:
        for x, warned in zip(maps, before, strict=True):
            x.has_warned = warned


def _count(key: Tensor, mask: Tensor | None) -> Tensor | int:
    return max(1, key.shape[2]) if mask is None else mask.sum(1).clamp_min(1)[:, None, None].to(key)


@torch.no_grad()
def _tau(query: Tensor, key: Tensor, query_mask: Tensor | None, key_mask: Tensor | None, scale: float) -> Tensor:
    """Compute ``sqrt(3.946 max|k| / max|q|)`` over real tokens, (B, H, 1); 1 where all keys are equal.

    Queries count as long enough for products of `LEAST_PRODUCT`: with less all keys are one, whatever tau is.
    """
    largest = []
    for x, mask in ((query, query_mask), (key, key_mask)):
        if x.shape[2] == 0:
            return key.new_ones(*key.shape[:2], 1)
        norms = torch.linalg.vector_norm(x.to(key.dtype), dim=3)
        norms = norms.masked_fill(~norms.isfinite() if mask is None else ~(norms.isfinite() & mask.unsqueeze(1)), 0)
        largest.append(norms.amax(2))
    q, k = largest
    tau = (STRETCH * k / torch.maximum(q, LEAST_PRODUCT / (scale * k))).sqrt()
    return torch.where(k > 0, tau, 1.0).unsqueeze(2)
