"""One call of an attention core: its checked inputs by name, in `forward` and in `step`."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kernelformer.attention import State
from kernelformer.attention.relative.bias_view import Layout


@dataclass(frozen=True)
class Bias:
    """A checked relative position bias.

    That of a step is over one query and the W + 1 keys up to its own: ``layout`` is (1, W + 1) with offset W, and the
    window is W.
    """

    table: Tensor  # (H, *layout.table)
    layout: Layout
    algorithm: str | None = None
    window: int | None = None  # the distance beyond which the bias is a straight line
    slope: Tensor | None = None  # (H), the fall of that line per token


@dataclass(frozen=True, kw_only=True)
class Call:
    """The checked inputs of one call of an attention core."""

    query: Tensor  # (B, H, L, D)
    key: Tensor  # (B, G, S, D)
    value: Tensor  # (B, G, S, E)
    scale: float
    is_causal: bool = False
    key_mask: Tensor | None = None  # (B, S)
    query_mask: Tensor | None = None  # (B, L), as the caller gave it; see `real_queries`
    gate: Tensor | None = None  # (B, H, S)
    bias: Bias | None = None
    state: State | None = None
    segment_ids: Tensor | None = None  # (B, L), only until a packed call is taken apart: see `packed`
    streams: bool = False  # whether the state after the keys is wanted
    past: int = 0  # keys before the first query, beside its own
    dropout: float = 0.0  # of the weights
    algorithm: str | None = None  # "chunked", "parallel", or None: chosen; see `attention.parallel.choice`
    fits: tuple[object, ...] = ()  # what the checks of a step have looked at, for the state after it

    @property
    def in_stream(self) -> bool:
        """Whether a state comes before this call or after it."""
        return self.streams or self.state is not None

    @property
    def real_queries(self) -> Tensor | None:
        """The queries that landmarks may come from, (B, L); None means all. The one place that knows the default."""
        if self.query_mask is not None:
            return self.query_mask
        return self.key_mask if self.query.shape[2] == self.key.shape[2] else None
