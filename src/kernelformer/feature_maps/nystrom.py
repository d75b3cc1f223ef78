"""Nystrom features: a kernel through its values at landmarks (Skyformer, Sec. 4).

    K(x, y) ~ kappa(x, Z) (M + gamma I)^-1 kappa(Z, y)          M = kappa(Z, Z), kappa the Gaussian kernel    (Eq. 5, 6)

Landmarks Z are chosen from the completed set [Q; K], so that M is positive definite. Queries and keys take half of the
inverse each, ``phi(x) = W^T kappa(Z, x)`` with ``W W^T = (M + gamma I)^-1`` by Cholesky: rounding is multiplied by
1 / sqrt(gamma). By the paper's iteration for the inverse, which has no root, queries take all of it: where tokens are
near each other, rounding is multiplied by up to 1 / gamma. The softmax kernel is ``exp(|x|^2/2) kappa(x, y)
exp(|y|^2/2)`` (Eq. 1): the same features with a log factor per row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kernelformer.contract import Role, SignedSpec, compute_dtype, wide_dtype
from kernelformer.errors import choice, flag, number, positive_int
from kernelformer.feature_maps.base import FIRST, FeatureMap, parameter
from kernelformer.feature_maps.draws import generator
from kernelformer.feature_maps.landmarks import (
    Tokens,
    aligned,
    inverse_root,
    iterated_inverse,
    landmark_gram,
    rank_hash,
    together,
)
from kernelformer.feature_maps.pivots import at, pivots

_ROW = {"gaussian": 0.0, "softmax": 0.5}
CHUNK = 1024  # tokens whose leverage scores are taken at once
# The least ridge: in float32 the kernel's rounding times 1 / sqrt(gamma) stays below 1e-4, and in float64, which the
# landmarks' matrix is always inverted in, it has a factor.
LEAST = {torch.float32: 1e-6, torch.float64: 1e-10}


@dataclass(frozen=True)
class NystromSpec(SignedSpec):
    """``phi(x) = W^T kappa(Z, x) exp(row |x|^2)``; untied: W is the inverse, and keys have ``kappa(Z, x)`` alone.

    Tensors: landmarks Z (B or 1, H, s, D) as the kernel sees them, less their centre; their log weights ``-|z|^2 / 2``
    (B or 1, H, s), -inf for a slot without a token; W (B or 1, H, s, s); the centre (B or 1, H, D), in the units of x.
    The kernel does not notice a centre, but norms and their rounding shrink.
    """

    row: float
    gamma: float
    untied: bool = False

    @property
    def has_factor(self) -> bool:
        """True if rows carry the softmax kernel's ``exp(|x|^2 / 2)``."""
        return self.row != 0

    def length(self, normalize: bool) -> float:
        """Square root of gamma: a weight below gamma is not resolved, so smaller denominators mean nothing."""
        return math.sqrt(self.gamma)

    def feature_dim(self, tensors: Sequence[Tensor], head_dim: int) -> int:
        """One feature per landmark."""
        return tensors[0].shape[-2]

    def features(
        self, x: Tensor, tensors: Sequence[Tensor], scale: float, role: Role, normalize: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Evaluate the formula."""
        landmarks, offset, root, centre = tensors
        x = x.to(landmarks.dtype)
        near = x - centre.unsqueeze(-2)
        norm = near.square().sum(-1, keepdim=True)
        logs = math.sqrt(scale) * near @ landmarks.transpose(-1, -2)
        logs = logs.add_(-0.5 * scale * norm).add_(offset.unsqueeze(-2))
        logs.detach().clamp_max_(0)  # above 0 is rounding; the slope is that of the kernel all the same
        kernel = logs.exp_()
        phi = kernel if self.untied and role == "key" else kernel @ root
        return phi, self.row * scale * x.square().sum(-1, keepdim=True) if self.has_factor else None


class NystromMap(FeatureMap):
    """Skyformer features of the Gaussian or the softmax kernel.

        out = kappa(Q, Z) (M + gamma I)^-1 kappa(Z, K) V           (Skyformer, Eq. 5, 6)

    Half of the landmarks come from the queries and half from the keys, real tokens only (`AttentionCore.forward` says
    which queries are). Without enough tokens all of them are landmarks, and the result is exact up to gamma. Not
    normalized for the Gaussian kernel, as in the paper; normalized for softmax's, where gamma acts on the Gaussian
    part.

    Args:
        num_landmarks: s, the number of landmarks.
        gamma: the ridge; at least 1e-6, with float64 inputs 1e-10. Rounding is multiplied by 1 / sqrt(gamma).
        inverse: ``cholesky``; or ``iterative``, the paper's iteration by matrix products alone
            (`landmarks.iterated_inverse`) for the whole inverse, which queries take. Where tokens are near each other
            it rounds more: for norms of 0.8, D = 64 and 128 landmarks outputs in float32 were off by 3e-4 (4e-7 by
            Cholesky).
        kernel: ``gaussian`` or ``softmax``.
        landmarks: ``uniform``, tokens by a random number that depends on the seed, the draw and the rank among the real
            tokens; ``leverage``, half of them so, and the others with probabilities in proportion to approximate ridge
            leverage scores, which the first half gives; ``pivoted``, one after another, queries or keys, by what those
            before leave to explain (`pivots`); ``segments``, means of stretches of tokens; ``learned``,
            parameters that do not see the sequence, which is what causal attention needs.
        align: softmax kernel only: move and stretch keys and queries towards each other first (`landmarks.aligned`).
            Softmax attention does not notice, but the Gaussian kernel between them grows, and errors fall: keys far
            from all queries are what a ridge cannot resolve. Not in the paper.
        seed: of the draws.
        num_key_heads: of learned landmarks, see `FeatureMap`.

    Cost: O(L s (D + s + E)), and O(s^3) once per sample and head.
    """

    salt: Tensor

    def __init__(
        self,
        *,
        head_dim: int,
        num_heads: int,
        num_landmarks: int = 128,
        gamma: float = 1e-3,
        inverse: str = "cholesky",
        kernel: str = "gaussian",
        landmarks: str = "uniform",
        align: bool = False,
        seed: int = 0,
        num_key_heads: int | None = None,
    ) -> None:
        choice("kernel", kernel, _ROW)
        choice("inverse", inverse, ("cholesky", "iterative"))
        choice("landmarks", landmarks, ("uniform", "leverage", "pivoted", "segments", "learned"))
        num_landmarks = positive_int("num_landmarks", num_landmarks)
        if num_landmarks < 2 and landmarks != "learned":
            raise ValueError("landmarks are taken from queries and from keys, got num_landmarks=1; use at least 2.")
        if flag("align", align) and (kernel != "softmax" or landmarks == "learned"):
            raise ValueError(
                f"align=True uses what softmax attention does not notice, and looks at the whole sequence; got "
                f"kernel={kernel!r} and landmarks={landmarks!r}. Leave it out, or take kernel='softmax' and landmarks "
                f"from tokens."
            )
        if num_key_heads is not None and landmarks != "learned":
            raise ValueError(
                f"num_key_heads is for learned landmarks, got num_key_heads={num_key_heads} and "
                f"landmarks={landmarks!r}: those of tokens are each query head's own. Leave it out."
            )
        gamma = number("gamma", gamma, above=0)  # without a ridge equal tokens have no inverse
        settings: dict[str, object] = {"num_landmarks": num_landmarks, "gamma": gamma, "inverse": inverse}
        settings |= {"kernel": kernel, "landmarks": landmarks, "align": align}
        sizes: dict[str, Any] = {"head_dim": head_dim, "num_heads": num_heads, "num_key_heads": num_key_heads}
        spec = NystromSpec(_ROW[kernel], gamma, untied=inverse == "iterative")
        super().__init__(spec, num_features=0, seed=seed, per_head=True, settings=settings, **sizes)
        self.num_landmarks, self.gamma, self.inverse, self.landmarks = num_landmarks, gamma, inverse, landmarks
        self.normalized, self.aligns = kernel == "softmax", align
        self.is_random, self.sees_sequence = landmarks not in ("segments", "learned"), landmarks != "learned"
        if landmarks == "learned":
            self.Z = parameter(self.heads, num_landmarks, head_dim)
        self._start()

    @property
    def identity(self) -> dict[str, object]:
        """Identity of the map; features by the iteration are none of those by a root of the inverse."""
        return {**super().identity, **({"untied": True} if self.inverse == "iterative" else {})}

    def _draws(self, draw: int) -> dict[str, Tensor]:
        if not self.is_random:
            return {}
        gen = generator(self.seed_number, draw)
        return {"salt": torch.randint(1 << 62, (2,), generator=gen, dtype=torch.int64, device="cpu")}

    def _reset_learned(self) -> None:
        if self.landmarks == "learned":
            gen = generator(self.seed_number, FIRST)
            # As far out as tokens of unit variance are at the default scale.
            points = torch.randn(self.Z.shape, generator=gen, dtype=torch.float64, device="cpu")
            self.Z.copy_(points * self.head_dim**-0.25)

    def _width(self) -> int:
        return self.num_landmarks  # fewer where there are fewer tokens

    def align(
        self, query: Tensor, key: Tensor, key_mask: Tensor | None, query_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Apply `landmarks.aligned`, if asked for."""
        if not self.aligns:
            return query, key
        dtype = compute_dtype(query.dtype)
        query, key = query.to(dtype), key.to(dtype).repeat_interleave(query.shape[1] // key.shape[1], 1)
        return aligned(query, key, query_mask, key_mask)

    def prepare(
        self, query: Tensor, key: Tensor, key_mask: Tensor | None, scale: float, query_mask: Tensor | None = None
    ) -> list[Tensor]:
        """Compute landmarks, log weights, the root of the inverse and the centre, for each sample and head."""
        dtype = compute_dtype(query.dtype)
        if self.gamma < LEAST[dtype]:
            raise ValueError(
                f"gamma must be at least {LEAST[dtype]:g} in {str(dtype).removeprefix('torch.')} arithmetic, which "
                f"cannot resolve less, got {self.gamma:g}; raise it, or give float64 inputs (at least "
                f"{LEAST[torch.float64]:g})."
            )
        if self.landmarks == "learned":
            return self._tensors(self.Z.to(dtype).unsqueeze(0) / math.sqrt(scale), None, scale)
        if query.shape[2] == key.shape[2] == 0:
            nothing = query.new_zeros(*query.shape[:2], 1, query.shape[3], dtype=dtype)
            return self._tensors(nothing, nothing[..., 0].bool(), scale)
        key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
        if self.landmarks == "pivoted":
            return self._tensors(*self._pivoted(query.to(dtype), key.to(dtype), query_mask, key_mask, scale), scale)
        half = self.num_landmarks // 2
        parts = [
            Tokens(x.to(dtype), mask, min(slots, x.shape[2]))
            for x, mask, slots in ((query, query_mask, half), (key, key_mask, self.num_landmarks - half))
        ]
        if self.landmarks == "segments":
            chosen = [t.segments() for t in parts]
        else:
            orders = [rank_hash(t.rank, salt).unsqueeze(1) for t, salt in zip(parts, self.salt, strict=True)]
            if self.landmarks == "leverage":
                orders = self._by_leverage(parts, orders, scale)
            chosen = [t.take(order) for t, order in zip(parts, orders, strict=True)]
        return self._tensors(*together(chosen), scale)

    def _pivoted(
        self, query: Tensor, key: Tensor, query_mask: Tensor | None, key_mask: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Choose landmarks among all rows of [Q; K]; also the mask of slots with one."""
        parts, masks = [], []
        for x, mask in ((query, query_mask), (key, key_mask)):
            parts.append(x if mask is None else x.masked_fill(~mask[:, None, :, None], 0))
            masks.append(x.new_ones(x.shape[0], x.shape[2], dtype=torch.bool) if mask is None else mask)
        rows, real = torch.cat(parts, 2), torch.cat(masks, 1)
        count = min(self.num_landmarks, rows.shape[2])
        index, valid = pivots(math.sqrt(scale) * rows, None, real, self.salt[0], count)
        return at(rows, index, valid), valid

    def _tensors(self, points: Tensor, valid: Tensor | None, scale: float) -> list[Tensor]:
        """Compute the tensors from landmarks in the units of x, (B or 1, H, s, D), and the mask of slots with one."""
        if valid is None:
            centre = points.detach().mean(2)
        else:
            centre = points.detach().sum(2) / valid.sum(2, keepdim=True).clamp_min(1)  # empty slots are 0
        landmarks = (points - centre.unsqueeze(2)) * math.sqrt(scale)
        if valid is not None:
            landmarks = landmarks.masked_fill(~valid.unsqueeze(-1), 0)
        gram = landmark_gram(landmarks.to(wide_dtype(landmarks)), valid, self.gamma)
        offset = -0.5 * landmarks.square().sum(-1)
        if valid is not None:
            offset = offset.masked_fill(~valid, -torch.inf)
        inverse = inverse_root(gram) if self.inverse == "cholesky" else iterated_inverse(gram, self.gamma)
        return [landmarks, offset, inverse.to(points.dtype), centre]

    @torch.no_grad()
    def _scores(self, x: Tensor, landmarks: Tensor, valid: Tensor | None, scale: float) -> Tensor:
        """Estimate leverage scores (B, H, n) of tokens that are not landmarks yet, up to a factor.

            r(x) = 1 - kappa(x, Z) (M + gamma I)^-1 kappa(Z, x) = 1 - phi_q(x) . phi_k(x)

        A token's ridge leverage score ``[K (K + t I)^-1]_xx`` is ``r / (r + t)``, r given all other tokens: given Z it
        is an estimate, and in proportion to r where few landmarks leave much to explain, so that t is large. For a
        landmark itself it would be wrong, r being 0 there however little the others explain of it.
        """
        tensors = self._tensors(landmarks, valid, scale)
        spec, rows = NystromSpec(0.0, self.gamma, self.inverse == "iterative"), []
        for part in x.split(CHUNK, 2):
            phi_k = spec.features(part, tensors, scale, "key")[0]
            phi_q = spec.features(part, tensors, scale, "query")[0] if spec.untied else phi_k
            rows.append(1 - (phi_q * phi_k).sum(-1))
        return torch.cat(rows, 2).clamp_min(self.gamma)

    def _by_leverage(self, parts: Sequence[Tokens], orders: Sequence[Tensor], scale: float) -> list[Tensor]:
        """Order queries and keys (B, H, n): half of the slots by ``orders``, the others by leverage scores.

        Weighted sampling without replacement: the smallest of exponential numbers with the scores as rates.

        Over 48 sets of 512 and 1024 tokens (isotropic, anisotropic and clustered, norms 0.5 to 3, 32 to 128 landmarks)
        the error of Gaussian attention is 0.70 times that of uniform landmarks (geometric mean; clusters 0.14 to 0.7,
        others 0.84 to 1.13). Scores of all tokens by a whole first set that is then given up: 0.91, up to 3.3. The rank
        correlation of the scores with true ones is 0.82, where landmarks among the tokens made it 0.69.
        """
        some = [replace(t, slots=t.slots - t.slots // 2) for t in parts]
        landmarks, valid = together([t.take(order) for t, order in zip(some, orders, strict=True)])
        new_orders = []
        for t, order, salt in zip(some, orders, self.salt, strict=True):
            x = t.x if t.real is None else t.x.masked_fill(~t.real[:, None, :, None], 0)
            # Numbers of their own: those of the first half say which tokens are left.
            uniform = (rank_hash(order, salt).to(wide_dtype(x)) + 0.5) / (1 << 53)
            waiting = -uniform.log() / self._scores(x, landmarks, valid, scale)
            new_orders.append(waiting.masked_fill(t.among_first(order), 0))
        return new_orders
