"""The fast Walsh-Hadamard transform, and FastFood's product of it with diagonals and a permutation.

H_d = H_a (x) H_b for d = a b: a transform of length d is one of length a over one of length b. Taken down to factors
of two that is the textbook butterfly; factors of at most `RADIX`, each one small matrix product, pass over memory
fewer times. Cost: O(d log d) either way.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from kernelformer.contract import Workspace
from kernelformer.errors import choice, positive_int
from kernelformer.feature_maps.projection import Dense, Projection, Transform

_MASK = (1 << 64) - 1


def generator(seed: int, draw: int) -> Generator:
    """A generator that depends on (seed, draw) alone; neighbouring pairs give unrelated streams."""
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
    """A (D, D) orthogonal matrix, uniform (Haar): QR of a Gaussian matrix with the signs of R's diagonal undone."""
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


def hadamard_matrix(dim: int) -> Tensor:
    """The orthonormal Walsh-Hadamard matrix of a power of two."""
    h = torch.ones(1, 1, dtype=torch.float64, device="cpu")
    while h.shape[0] < dim:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)], 0)
    return h / math.sqrt(dim)


def hadamard_signs(padded: int, gen: Generator) -> Tensor:
    """The diagonals D1, D2 and D3 of a `hadamard_block`, (3, d')."""
    return torch.stack([_signs(padded, gen) for _ in range(3)])


def hadamard_block(dim: int, gen: Generator) -> Tensor:
    """``H D1 H D2 H D3`` of the next power of two d', its first D columns, rescaled so that rows have norm 1 on
    average.

    Rows of the whole matrix are orthonormal; those of the D columns of d' > D are so only nearly.
    """
    padded = 1 << (dim - 1).bit_length()
    h, (one, two, three) = hadamard_matrix(padded), hadamard_signs(padded, gen)
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
_NORMS = {
    "iid": "chi",
    "orthogonal": "chi",
    "simplex": "chi",
    "spherical": "sqrt",
    "hadamard": "sqrt",
    "givens": "sqrt",
}


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
    norms = choice("norms", _NORMS[draw] if norms is None else norms, ("chi", "sqrt"))
    if draw == "iid":
        omega = _randn(num_features, dim, gen=gen)
        if norms == "chi":
            return omega
        return math.sqrt(dim) * F.normalize(omega, dim=1)
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


RADIX = 16  # fastest factors on a CPU, and flat around it


def padded_dim(dim: int) -> int:
    """d', the next power of two."""
    return 1 << (dim - 1).bit_length()


def hadamard(dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The unnormalized Walsh-Hadamard matrix of a power of two, entries +-1, in Sylvester's order."""
    signs = [[-1.0 if (i & j).bit_count() % 2 else 1.0 for j in range(dim)] for i in range(dim)]
    return torch.tensor(signs, dtype=dtype, device=device)


def _factors(dim: int) -> list[int]:
    """Powers of two of at most `RADIX`, as equal as can be, with product ``dim``."""
    bits = dim.bit_length() - 1
    stages = -(-bits // (RADIX.bit_length() - 1))
    return [1 << (bits // stages + (i < bits % stages)) for i in range(stages)]


def fwht(x: Tensor) -> Tensor:
    """``H x`` over the last axis but one, (..., d, C) with d a power of two; H unnormalized, so ``H H = d I``.

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


class FastHadamard:
    """`fwht` between two buffers of the caller, for chunks.

    Args:
        dim: d', a power of two.
        like: dtype and device.
    """

    def __init__(self, dim: int, like: Tensor) -> None:
        self.stages = [hadamard(size, like.dtype, like.device) for size in _factors(dim)]

    def __call__(self, x: Tensor, spare: Tensor) -> tuple[Tensor, Tensor]:
        """``H x`` over the axis before the last; the result is in one of the two buffers, the other is spare."""
        inner = x.shape[-1]
        for h in self.stages:
            size = h.shape[0]
            stage, into = x.view(-1, size, inner), spare.view(-1, size, inner)
            torch.bmm(h.expand(stage.shape[0], size, size), stage, out=into)
            x, spare = spare, x
            inner *= size
        return x, spare


def fastfood(x: Tensor, scale: Tensor, gauss: Tensor, signs: Tensor, permutation: Tensor) -> Tensor:
    """``S H G P H B x / sqrt(d')`` block by block (KL-Transformer, Eq. 6, with sigma = 1).

    Args:
        x: (..., D, C).
        scale: S, (..., blocks, d').
        gauss: G, likewise.
        signs: B, likewise.
        permutation: P, likewise: row i of ``P u`` is row ``permutation[i]`` of u.

    Returns:
        (..., blocks d', C).

    Cost: O(M log d') per column.
    """
    dim = scale.shape[-1]
    padded = torch.nn.functional.pad(x, (0, 0, 0, dim - x.shape[-2])).unsqueeze(-3)
    u = fwht(padded * signs.unsqueeze(-1))
    index = permutation.long().unsqueeze(-1).expand(u.shape)
    y = fwht(u.gather(-2, index) * gauss.unsqueeze(-1))
    z: Tensor = y * (scale * dim**-0.5).unsqueeze(-1)
    return z.flatten(-3, -2)


@dataclass(frozen=True)
class FastFood(Transform):
    """`fastfood` as a transform; tensors: scale, gauss, signs, permutation, (B or 1, H or 1, blocks, d') each."""

    def width(self, tensors: Sequence[Tensor], head_dim: int) -> int:
        """The number of rows of all blocks, blocks d'."""
        return tensors[0].shape[-2] * tensors[0].shape[-1]

    def project(
        self, x: Tensor, tensors: Sequence[Tensor], factor: float, offset: Tensor | None = None, weight: float = 1.0
    ) -> Tensor:
        """The definition, by the fast transform of the rows."""
        x = (x.to(tensors[0].dtype) * factor).transpose(-1, -2)
        z = fastfood(x, *tensors).transpose(-1, -2)
        return z if offset is None else torch.add(z, offset, alpha=weight)

    def bind(self, tensors: Sequence[Tensor], factor: float, learn: bool) -> Projection:
        """The same for chunks, with buffers of their own for the passes."""
        grads = None
        if learn:
            grads = [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in tensors]
        return FastFoodProjection(tensors, factor, grads)


class FastFoodProjection(Projection):
    """`FastFood` on chunks, in columns, so that every pass runs along contiguous memory."""

    def __init__(self, tensors: Sequence[Tensor], factor: float, grads: list[Tensor] | None) -> None:
        self.tensors, self.grads = list(tensors), grads
        self.scale, self.gauss, self.signs = (x.unsqueeze(-1) for x in tensors[:3])  # (N, blocks, d', 1)
        self.factor = factor * self.dim**-0.5
        self.work = Workspace(self.scale.dtype, self.scale.device)

    @property
    def dim(self) -> int:
        """The length of a padded row, d'."""
        return self.tensors[0].shape[-1]

    def _take(self, name: str, width: int) -> Tensor:
        """A buffer (N, blocks, d', C)."""
        return self.work.take(name, *self.scale.shape[:3], width)

    def _over_all(self, order: Tensor) -> Tensor:
        """Orders within the blocks as one index over all rows (N blocks d')."""
        first = torch.arange(0, order.numel(), self.dim, device=order.device).view(*order.shape[:-1], 1)
        return (order + first).reshape(-1)

    @functools.cached_property
    def _hadamard(self) -> FastHadamard:
        return FastHadamard(self.dim, self.scale)

    @functools.cached_property
    def _index(self) -> Tensor:
        return self._over_all(self.tensors[3].long())

    @functools.cached_property
    def _inverse(self) -> Tensor:
        return self._over_all(self.tensors[3].argsort(-1))

    def _forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``y = H G P H B x`` and, where G learns, ``p = P H B x``, (N, blocks, d', C), and a spare buffer."""
        width, depth = x.shape[1], x.shape[2]
        u, spare = self._take("a", width), self._take("b", width)
        torch.mul(x.transpose(1, 2).unsqueeze(1), self.signs[:, :, :depth], out=u[:, :, :depth])
        u[:, :, depth:].zero_()
        u, p = self._hadamard(u, spare)
        torch.index_select(u.view(-1, width), 0, self._index, out=p.view(-1, width))
        t = torch.mul(p, self.gauss, out=u)
        y, spare = self._hadamard(t, p if self.grads is None else self._take("c", width))
        return y, p, spare

    def columns(self, x: Tensor, out: Tensor, shift: Tensor | None = None) -> Tensor:
        """Two transforms, a gather and three diagonals."""
        y, _, _ = self._forward(x)
        torch.mul(y, self.scale * self.factor, out=out.view(y.shape))
        return out if shift is None else out.add_(shift)

    def rows(self, x: Tensor, out: Tensor, shift: Tensor | None = None) -> Tensor:
        """The same as `columns`, transposed in the last pass."""
        y, _, _ = self._forward(x)
        z = y.mul_(self.scale * self.factor).flatten(1, 2).transpose(1, 2)
        return out.copy_(z) if shift is None else torch.add(z, shift, out=out)

    def pull_columns(self, x: Tensor, grad: Tensor, out: Tensor) -> Tensor:
        """The same backwards: ``B H P^T G H S``; H is symmetric. y and p are computed again where a diagonal learns."""
        width, depth = x.shape[1], x.shape[2]
        grad = grad.reshape(*self.scale.shape[:3], width)
        if self.grads is None:
            y, p, spare = self._take("a", width), None, self._take("b", width)
        else:
            y, p, spare = self._forward(x)
            self.grads[0] += y.mul_(grad).sum(-1).mul_(self.factor)
        g, spare = self._hadamard(torch.mul(grad, self.scale * self.factor, out=y), spare)
        if self.grads is not None and p is not None:
            self.grads[1] += torch.mul(g, p, out=spare).sum(-1)
        torch.index_select(g.mul_(self.gauss).view(-1, width), 0, self._inverse, out=spare.view(-1, width))
        g = self._hadamard(spare, g)[0][:, :, :depth]
        if self.grads is not None:
            self.grads[2][..., :depth] += (g * x.transpose(1, 2).unsqueeze(1)).sum(-1)
        return out.copy_(g.mul_(self.signs[:, :, :depth]).sum(1).transpose(1, 2))

    def pull_rows(self, x: Tensor, grad: Tensor, out: Tensor) -> Tensor:
        """The same for a transposed gradient."""
        return self.pull_columns(x, grad.transpose(1, 2).contiguous(), out)

    def at(self, row: int) -> Projection:
        """Row ``row`` as views."""
        one = slice(row, row + 1)
        grads = None if self.grads is None else [x[one] for x in self.grads]
        return FastFoodProjection([x[one] for x in self.tensors], self.factor * self.dim**0.5, grads)

    def tensor_grads(self) -> list[Tensor]:
        """Gradients of scale, gauss and signs; a permutation has none."""
        assert self.grads is not None
        return list(self.grads)


# From which D on three transforms of every row beat one product with the matrix: measured on a CPU, in float32.
FAST_FROM = 512


def dense_or_fast(draw: str, num_features: int, head_dim: int) -> Dense:
    """The transform of drawn frequencies: `FastDraw` for ``hadamard`` draws of whole blocks from `FAST_FROM` on."""
    if draw != "hadamard" or positive_int("head_dim", head_dim) < FAST_FROM:
        return Dense()
    whole = head_dim & (head_dim - 1) == 0 and num_features % head_dim == 0
    return FastDraw() if whole else Dense()


def hadamard_factors(
    seed: int, draw: int, *, heads: int, num_features: int, dim: int, norms: str | None
) -> list[Tensor]:
    """What a ``hadamard`` draw is made of, in float32: omega (heads, M, D), and the signs (heads, 3, M / D, D)."""
    gen, replay = generator(seed, draw), generator(seed, draw)
    omega, signs = [], []
    for _ in range(heads):
        omega.append(draw_frequencies(num_features, dim, gen, draw="hadamard", norms=norms))
        signs.append(torch.stack([hadamard_signs(dim, replay) for _ in range(num_features // dim)], 1))
        replay.set_state(gen.get_state())  # past the norms, where they are drawn
    return [torch.stack(omega).float(), torch.stack(signs).float()]


@dataclass(frozen=True)
class FastDraw(Dense):
    """`Dense`, whose chunks go through fast transforms if omega is what was drawn.

    Tensors: omega (B or 1, H or 1, M, D) and, where they are known, those of `hadamard_factors`. Omega alone says what
    W is: one that was written or learned, or comes from elsewhere, is not the drawn one, and is multiplied with.
    """

    def bind(self, tensors: Sequence[Tensor], factor: float, learn: bool) -> Projection:
        """Compare, then bind to the signs or to omega."""
        omega, *drawn = (x[:1] if x.stride(0) == 0 else x for x in tensors)
        if learn or not drawn or not torch.equal(omega, drawn[0]):
            return super().bind(tensors[:1], factor, learn)
        signs = drawn[1].unsqueeze(-1)  # (1 or N, 3, blocks, D, 1)
        lengths = torch.linalg.vector_norm(omega, dim=-1).view_as(signs[:, 0])
        return FastProjection(signs, lengths * (factor / omega.shape[-1] ** 1.5))


class FastProjection(Projection):
    """``z = L H D1 H D2 H D3 x`` on chunks, H unnormalized; in columns, so that passes run along contiguous memory.

    Args:
        signs: D1, D2 and D3, (1 or N, 3, blocks, D, 1).
        lengths: L, (1 or N, blocks, D, 1).

    Cost: O(M log D) per row.
    """

    def __init__(self, signs: Tensor, lengths: Tensor) -> None:
        self.signs, self.lengths = signs, lengths
        self.work = Workspace(signs.dtype, signs.device)
        self.hadamard = FastHadamard(signs.shape[-2], signs)

    def _buffers(self, x: Tensor) -> list[Tensor]:
        return [self.work.take(name, x.shape[0], *self.lengths.shape[1:3], x.shape[1]) for name in "ab"]

    def _forward(self, x: Tensor) -> Tensor:
        """``H D1 H D2 H D3 x``, (N, blocks, D, C)."""
        u, spare = self._buffers(x)
        one, two, three = self.signs.unbind(1)
        u, spare = self.hadamard(torch.mul(x.transpose(1, 2).unsqueeze(1), three, out=u), spare)
        u, spare = self.hadamard(u.mul_(two), spare)
        return self.hadamard(u.mul_(one), spare)[0]

    def columns(self, x: Tensor, out: Tensor, shift: Tensor | None = None) -> Tensor:
        """Three transforms and four diagonals."""
        y = self._forward(x)
        torch.mul(y, self.lengths, out=out.view(y.shape))
        return out if shift is None else out.add_(shift)

    def rows(self, x: Tensor, out: Tensor, shift: Tensor | None = None) -> Tensor:
        """The same as `columns`, transposed in the last pass."""
        z = self._forward(x).mul_(self.lengths).flatten(1, 2).transpose(1, 2)
        return out.copy_(z) if shift is None else torch.add(z, shift, out=out)

    def pull_columns(self, x: Tensor, grad: Tensor, out: Tensor) -> Tensor:
        """The same backwards, ``D3 H D2 H D1 H L``; H is symmetric."""
        u, spare = self._buffers(x)
        one, two, three = self.signs.unbind(1)
        u, spare = self.hadamard(torch.mul(grad.reshape(u.shape), self.lengths, out=u), spare)
        u, spare = self.hadamard(u.mul_(one), spare)
        u, _ = self.hadamard(u.mul_(two), spare)
        return out.copy_(u.mul_(three).sum(1).transpose(1, 2))

    def pull_rows(self, x: Tensor, grad: Tensor, out: Tensor) -> Tensor:
        """The same for a transposed gradient."""
        return self.pull_columns(x, grad.transpose(1, 2), out)

    def at(self, row: int) -> Projection:
        """Row ``row`` as views."""
        one = slice(row, row + 1)
        return self if self.signs.shape[0] == 1 else FastProjection(self.signs[one], self.lengths[one])
