"""Frequencies drawn as ``H D1 H D2 H D3`` (`draws.hadamard_block`), applied by fast transforms where that is faster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernelformer.contract import Workspace
from kernelformer.errors import positive_int
from kernelformer.feature_maps.draws import draw_frequencies, generator, hadamard_signs
from kernelformer.feature_maps.hadamard import FastHadamard
from kernelformer.feature_maps.projection import Dense, Projection

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
