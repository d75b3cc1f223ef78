"""FastFood frequencies with learned diagonals (KL-Transformer, Eq. 6, 12), and the fast Walsh-Hadamard transform.

H_d = H_a (x) H_b for d = a b: a transform of length d is one of length a over one of length b. Taken down to factors
of two that is the textbook butterfly; factors of at most `RADIX`, each one small matrix product, pass over memory
fewer times. Cost: O(d log d) either way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kernelformer.errors import choice, number, positive_int
from kernelformer.feature_maps.draws import generator, hadamard
from kernelformer.feature_maps.exponential import DENSE, Dense
from kernelformer.feature_maps.spectral import Smoothing, SpectralMap

LEARN = {"none": "", "S": "S", "SGB": "SGB"}
RADIX = 16  # fastest factors on a CPU, and flat around it


def padded_dim(dim: int) -> int:
    """Padded dimension d', the next power of two."""
    return 1 << (dim - 1).bit_length()


def _factors(dim: int) -> list[int]:
    """Split ``dim`` into powers of two of at most `RADIX`, as equal as can be."""
    bits = dim.bit_length() - 1
    stages = -(-bits // (RADIX.bit_length() - 1))
    return [1 << (bits // stages + (i < bits % stages)) for i in range(stages)]


def fwht(x: Tensor) -> Tensor:
    """Compute ``H x`` over the last axis but one, (..., d, C) with d a power of two; H unnormalized, so ``H H = d I``.

    Differentiable, without a Python loop over rows. Cost: O(d log d) per column.
    """
    *lead, dim, width = x.shape
    if dim & (dim - 1):
        raise ValueError(f"the transform needs a power of two, got {dim} (shape {tuple(x.shape)}); pad with zeros.")
    inner = 1
    for size in _factors(dim):
        x = hadamard(size, x.dtype, x.device) @ x.reshape(*lead, dim // (inner * size), size, inner * width)
        inner *= size
    return x.reshape(*lead, dim, width)


def fastfood(x: Tensor, scale: Tensor, gauss: Tensor, signs: Tensor, permutation: Tensor) -> Tensor:
    """Compute ``S H G P H B x / sqrt(d')`` of x (..., D, C) block by block (KL-Transformer, Eq. 6, with sigma = 1).

    S, G, B and P are (..., blocks, d'), row i of ``P u`` being row ``permutation[i]`` of u; the result is
    (..., blocks d', C). Cost: O(M log d') per column.
    """
    dim = scale.shape[-1]
    padded = torch.nn.functional.pad(x, (0, 0, 0, dim - x.shape[-2])).unsqueeze(-3)
    u = fwht(padded * signs.unsqueeze(-1))
    index = permutation.long().unsqueeze(-1).expand(u.shape)
    y = fwht(u.gather(-2, index) * gauss.unsqueeze(-1))
    z: Tensor = y * (scale * dim**-0.5).unsqueeze(-1)
    return z.flatten(-3, -2)


@dataclass(frozen=True)
class FastFood(Dense):
    """Transform by `fastfood`; tensors: scale, gauss, signs, permutation, (B or 1, H or 1, blocks, d') each."""

    def width(self, tensors: Sequence[Tensor]) -> int:
        """Number of rows of all blocks, blocks d'."""
        return tensors[0].shape[-2] * tensors[0].shape[-1]

    def project(self, x: Tensor, tensors: Sequence[Tensor], factor: float, row: float = 0.0) -> Tensor:
        """Definition, by the fast transform of the rows."""
        x = x.to(tensors[0].dtype)
        z = fastfood((x * factor).transpose(-1, -2), *tensors).transpose(-1, -2)
        return torch.add(z, (x * x).sum(-1, keepdim=True), alpha=row) if row else z


class FastFoodMap(SpectralMap):
    """Structured matrix of frequencies with learned diagonals.

        V = 1 / (sigma sqrt(d')) S H G P H B      in blocks of d' rows, d' = D padded to a power of two

    H Walsh-Hadamard, unnormalized; B random signs; P a permutation; G ~ N(0, 1); S_ii = chi_d' / |G|_F, which makes
    every row exactly N(0, I / sigma^2). The paper states that M divides d; it means that d' divides M.

    Parameters: of S, G, B (heads, blocks, d') those that are learned. They start at the random draw, so that step 0 is
    an unbiased estimate of the Gaussian kernel.

    Args:
        features: ``rks`` or ``prf``.
        num_features: M, a multiple of d'.
        learn: ``none``, and all is redrawn; ``S``, and P, B and G at its old norm are; ``SGB``, and P alone is.
        sigma: width of the kernel at the start.
        transform: ``dense`` multiplies V out once per call and every row with it, O(M D), which is the faster one on a
            CPU for ordinary heads; ``fwht`` sends every row through the fast transform, O(M log d').
        smoothing: s of RKS features, a number of at least 0 or ``noise``; see `spectral.SpectralMap`.
        per_head: a matrix of its own for each head.

    The others are those of `FeatureMap`.
    """

    S: Tensor
    G: Tensor
    B: Tensor
    P: Tensor

    def __init__(
        self,
        *,
        head_dim: int,
        num_heads: int,
        features: str,
        num_features: int = 256,
        learn: str = "SGB",
        sigma: float = 1.0,
        transform: str = "dense",
        smoothing: Smoothing = 1.0,
        seed: int = 0,
        per_head: bool = True,
        num_key_heads: int | None = None,
    ) -> None:
        choice("learn", learn, LEARN)
        num_features, head_dim = positive_int("num_features", num_features), positive_int("head_dim", head_dim)
        self._check_size(num_features, head_dim)
        sigma = number("sigma", sigma, above=0)
        how = FastFood() if choice("transform", transform, ("fwht", "dense")) == "fwht" else DENSE
        super().__init__(
            features,
            smoothing=smoothing,
            settings={"learn": learn, "sigma": sigma},
            transform=how,
            head_dim=head_dim,
            num_heads=num_heads,
            num_features=num_features,
            seed=seed,
            draw="fastfood",
            per_head=per_head,
            num_key_heads=num_key_heads,
        )
        self.learned, self.sigma, self.by_rows = LEARN[learn], sigma, transform == "fwht"
        for name, x in self._draw(0).items():
            if name in self.learned:
                self.register_parameter(name, nn.Parameter(x))
        self._start()

    @staticmethod
    def _check_size(num_features: int, head_dim: int) -> None:
        dim = padded_dim(head_dim)
        if num_features % dim:
            below = num_features // dim * dim
            near = f"{below} or {below + dim}" if below else f"{dim}"
            why = f"head_dim={head_dim}" + (f", padded to {dim}" if dim != head_dim else "")
            raise ValueError(
                f"FastFood draws its frequencies in blocks of {dim} ({why}), got num_features={num_features}; use "
                f"{near}."
            )

    def _draw(self, draw: int) -> dict[str, Tensor]:
        """Draw all four factors by number, (heads, blocks, d') in float32; P holds the rows' sources."""
        gen = generator(self.seed_number, draw)
        dim = padded_dim(self.head_dim)
        size = (self.heads, self.num_features // dim, dim)
        signs = torch.randint(0, 2, size, generator=gen, device="cpu").mul_(2).sub_(1).float()
        order = torch.rand(size, generator=gen, dtype=torch.float64, device="cpu").argsort(-1)
        gauss = torch.randn(size, generator=gen, dtype=torch.float64, device="cpu")
        lengths = torch.randn(*size, dim, generator=gen, dtype=torch.float64, device="cpu").norm(dim=-1)
        scale = lengths / gauss.norm(dim=-1, keepdim=True)
        return {"S": scale.float(), "G": gauss.float(), "B": signs, "P": order}

    def _draws(self, draw: int) -> dict[str, Tensor]:
        new = self._draw(draw)
        if self.learned == "S" and draw:  # a learned S has the first G's norm in it
            norm = self._draw(0)["G"].norm(dim=-1, keepdim=True)
            new["G"] = torch.nn.functional.normalize(new["G"], dim=-1) * norm
        return {name: x for name, x in new.items() if name not in self.learned}

    def _reset_learned(self) -> None:
        for name, x in self._draw(0).items():
            if name in self.learned:
                self.get_parameter(name).copy_(x)

    def _factors(self, dtype: torch.dtype) -> list[Tensor]:
        return [self.S.to(dtype) / self.sigma, self.G.to(dtype), self.B.to(dtype), self.P]

    def frequencies(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Matrix V, (heads, M, D): the transform of the unit vectors."""
        eye = torch.eye(self.head_dim, dtype=dtype, device=self.S.device)
        return fastfood(eye, *self._factors(dtype))

    def tensors(self, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        """Matrix V, or the diagonals and the permutation if rows are transformed."""
        if not self.by_rows:
            return super().tensors(dtype)
        # One dtype for all tensors of a map: numbers below 2^24 are exact in any.
        return [x.to(dtype).unsqueeze(0) for x in self._factors(dtype)]
