"""Random numbers by (seed, draw), and the ways to draw frequencies."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from kernelformer.errors import choice, positive_int

_MASK = (1 << 64) - 1


def generator(seed: int, draw: int) -> Generator:
    """Create a generator that depends on (seed, draw) alone; neighbouring pairs give unrelated streams."""
    state = 0
    for part in (seed, draw):  # splitmix64's finalizer, once per part
        state = (state + (part & _MASK) + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return torch.Generator(device="cpu").manual_seed(state >> 1)


def _randn(*size: int, gen: Generator) -> Tensor:
    return torch.randn(*size, generator=gen, dtype=torch.float64, device="cpu")


def _signs(size: int, gen: Generator) -> Tensor:
    return torch.randint(0, 2, (size,), generator=gen, device="cpu").to(torch.float64).mul_(2).sub_(1)


def haar_block(dim: int, gen: Generator) -> Tensor:
    """Draw a (D, D) orthogonal matrix, uniform (Haar): QR of a Gaussian matrix, the signs of R's diagonal undone."""
    q, r = torch.linalg.qr(_randn(dim, dim, gen=gen))
    signs = torch.where(r.diagonal() < 0, -1.0, 1.0)
    return torch.mul(q, signs)


def simplex_block(dim: int, gen: Generator) -> Tensor:
    """The D vertices of a regular simplex around 0, of norm 1, rotated at random: pairs have the product -1 / (D - 1).

        s_i = sqrt(D / (D - 1)) (u_i - (u_1 + ... + u_D) / D)       u: the rows of `haar_block`

    SimRF writes down one such simplex and rotates it, which is the same distribution. In one dimension there is a
    single vertex and no pair: a random sign, as of an orthogonal draw.
    """
    block = haar_block(dim, gen)
    return (block - block.mean(0)) * math.sqrt(dim / (dim - 1)) if dim > 1 else block


def hadamard(dim: int, dtype: torch.dtype = torch.float64, device: torch.device | str = "cpu") -> Tensor:
    """The Walsh-Hadamard matrix of a power of two in Sylvester's order, entries +-1."""
    h = torch.ones(1, 1, dtype=dtype, device=device)
    while h.shape[0] < dim:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)], 0)
    return h


def hadamard_block(dim: int, gen: Generator) -> Tensor:
    """``H D1 H D2 H D3`` of the next power of two d', its first D columns, rescaled so that rows have norm 1 on
    average.

    Rows of the whole matrix are orthonormal; those of the D columns of d' > D are so only nearly.
    """
    padded = 1 << (dim - 1).bit_length()
    h, (one, two, three) = hadamard(padded) / math.sqrt(padded), (_signs(padded, gen) for _ in range(3))
    block: Tensor = h * one @ h * two @ h * three
    return block[:, :dim] * math.sqrt(padded / dim)


def givens_block(dim: int, gen: Generator) -> Tensor:
    """A product of random rotations in coordinate planes: 2 ceil(log2 D) rounds of D // 2 disjoint planes each."""
    block = torch.eye(dim, dtype=torch.float64, device="cpu") * _signs(dim, gen)
    half = dim // 2
    for _ in range(2 * math.ceil(math.log2(max(dim, 2)))):
        order = torch.randperm(dim, generator=gen, device="cpu")
        angle = torch.rand(half, 1, generator=gen, dtype=torch.float64, device="cpu") * (2 * math.pi)
        cos, sin, one, two = angle.cos(), angle.sin(), block[order[:half]], block[order[half : 2 * half]]
        block[order[:half]], block[order[half : 2 * half]] = cos * one - sin * two, sin * one + cos * two
    return block


_BLOCKS: dict[str, Callable[[int, Generator], Tensor]] = {
    "orthogonal": haar_block,
    "simplex": simplex_block,
    "spherical": haar_block,
    "hadamard": hadamard_block,
    "givens": givens_block,
}
DRAWS = ("iid", *_BLOCKS)
_FIXED = ("spherical", "hadamard", "givens")  # draws with norms of sqrt(D) by default


def draw_frequencies(
    num_features: int, dim: int, gen: Generator, *, draw: str = "orthogonal", norms: str | None = None
) -> Tensor:
    """Draw ``omega`` (M, D) in float64.

    Args:
        num_features: M; more than D means several independent blocks.
        dim: D.
        gen: the source of randomness.
        draw: ``iid`` Gaussian rows; ``orthogonal`` (exactly unbiased, lower variance: Performer, Theorem 2);
            ``simplex``, rows that point away from each other (exactly unbiased; at norms of x and y up to 0.7 less than
            half the orthogonal rows' error, from 1.5 on no less); ``spherical``, orthogonal rows of norm sqrt(D);
            ``hadamard`` and ``givens``, structured and nearly unbiased.
        norms: ``chi``, row norms drawn as those of Gaussian vectors; ``sqrt``, all sqrt(D). Default: chi for iid,
            orthogonal and simplex, else sqrt, which for ``hadamard`` with D not a power of two holds on average only.
            Fixed norms estimate the regularized kernel, some percent below the softmax kernel at D = 8 and less with
            larger D.

    Cost: O(M D^2) once per draw.
    """
    positive_int("num_features", num_features)
    choice("draw", draw, DRAWS)
    exact = norms == "sqrt"
    norms = choice("norms", ("sqrt" if draw in _FIXED else "chi") if norms is None else norms, ("chi", "sqrt"))
    if draw == "iid":
        omega = _randn(num_features, dim, gen=gen)
        return omega if norms == "chi" else math.sqrt(dim) * F.normalize(omega, dim=1)
    blocks: list[Tensor] = []
    rows = 0
    while rows < num_features:
        blocks.append(_BLOCKS[draw](dim, gen))
        rows += blocks[-1].shape[0]
    directions = torch.cat(blocks)[:num_features]
    if norms == "sqrt":
        return (F.normalize(directions, dim=1) if exact else directions) * math.sqrt(dim)
    chi: Tensor = torch.linalg.vector_norm(_randn(num_features, dim, gen=gen), dim=1, keepdim=True)
    return F.normalize(directions, dim=1) * chi
