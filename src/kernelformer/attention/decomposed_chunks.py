"""A sequence whose length is a symbol, cut into chunks by plain operations of torch."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from kernelformer.attention.engine import Part

CHUNK = 64  # tokens; a chunk's own keys cost C (M + E) a token, sums of all chunks L / C times M E numbers


class Chunking:
    """A sequence of any length in chunks.

    The number of chunks is read from a tensor, so that it is a symbol of its own in the graph. As a formula of the
    length, which the solver of guards would have to reason about, it ends in a graph for one length.

    Args:
        like: (*, L, X), for its length and device.
    """

    def __init__(self, like: Tensor) -> None:
        self.length = like.shape[-2]
        self.count = cast(int, torch.full((), (self.length + CHUNK - 1) // CHUNK, device=like.device).item())
        torch._check(self.count >= 1)
        torch._check(self.length <= self.count * CHUNK)

    def chunks(self, x: Tensor, fill: float | bool = 0) -> Tensor:
        """(*, L, X) -> (*, n, C, X), the end filled up."""
        rest = x.new_full((*x.shape[:-2], self.count * CHUNK - self.length, x.shape[-1]), fill)
        whole: Tensor = torch.cat([x, rest], -2).unflatten(-2, (self.count, CHUNK))
        return whole

    def by_chunk(self, x: Tensor) -> Tensor:
        """Queries (B, G, R, L, X), those of a key head together: (B, G, n, R C, X)."""
        return self.chunks(x).transpose(2, 3).flatten(3, 4)

    def by_head(self, x: Tensor) -> Tensor:
        """The inverse of `by_chunk`: (B, G, n, R C, X) -> (B, H, L, X)."""
        rows: Tensor = (
            x.clone(memory_format=torch.contiguous_format)
            .unflatten(3, (-1, CHUNK))
            .transpose(2, 3)
            .flatten(3, 4)
            .flatten(1, 2)
        )
        return rows.narrow(2, 0, self.length)

    def rows_by_head(self, part: Part) -> Part:
        """Rows of chunks (B, G, n, R C) as rows of the sequence (B, H, L)."""
        rest = (None if x is None else self.by_head(x.unsqueeze(4)).squeeze(3) for x in part[1:])
        return Part(self.by_head(part.num), *rest)  # type: ignore[arg-type]
