"""From a spec to the parallel arithmetic of its family."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from kernelformer.attention.parallel.layout import RowSums
from kernelformer.attention.parallel.positive import PositiveMap
from kernelformer.attention.parallel.signed import SignedMap
from kernelformer.contract import PositiveSpec, SignedSpec, Spec

Mapped = Any  # queries or keys as a family maps them: tensors or tuples of tensors
Kept = Any  # what a family keeps of keys: a tuple of tensors


class ParallelMap(Protocol):
    """A feature map with its tensors, and sums over all of its keys or over those up to each query.

    Shapes: N rows of samples and key heads, L queries of R heads each.
    """

    def queries(self, x: Tensor, groups: int) -> Mapped:
        """Map queries (B, H, L, D) of ``groups`` key heads."""

    def keys(self, x: Tensor, value: Tensor, hidden: Tensor | None) -> Mapped:
        """Map keys (B, G, S, D), of which those at ``hidden`` (B, 1, S, 1) do not count, and take their values."""

    def padded(self, keys: Mapped, before: int, after: int) -> Mapped:
        """Mapped keys with so many that nobody sees around them."""

    def load(self, state: Sequence[Tensor]) -> Kept:
        """Sums from the tensors of a state, (B, G, ...) each, in the dtype of the arithmetic."""

    def store(self, kept: Kept, groups: int) -> list[Tensor]:
        """The tensors of a state from sums."""

    def absorb(self, keys: Mapped, before: Kept | None) -> Kept:
        """Sums of keys and of those before them."""

    def read(self, queries: Mapped, kept: Kept) -> RowSums:
        """What queries get from all keys of the sums."""

    def causal(self, queries: Mapped, keys: Mapped, before: Kept | None, size: int) -> tuple[RowSums, Kept]:
        """What queries get from as many keys up to their own and from earlier sums, in chunks of ``size``."""

    def finish(self, part: RowSums) -> Tensor:
        """Outputs (N, L, R, E)."""


def make_map(spec: Spec, tensors: Sequence[Tensor], scale: float, normalize: bool, parts: bool = False) -> ParallelMap:
    """Bind a spec to its tensors, (B or 1, G or 1, ...) each; with ``parts`` its rows are merged with others."""
    if isinstance(spec, PositiveSpec):
        return PositiveMap(spec, tensors, scale, normalize, parts)
    assert isinstance(spec, SignedSpec)
    return SignedMap(spec, tensors, scale, normalize, parts)
