"""One call of near/far attention, and its flat form, which the torch operators take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from torch import Tensor

from kernelformer.attention.blocks import Shapes
from kernelformer.contract import lookup

# The operators' arguments for a call, in the order of `NearFarCall.tensor_arguments` and `NearFarCall.settings`.
TENSORS = (
    "Tensor query, Tensor key, Tensor value, Tensor? key_mask, Tensor? far_mask, Tensor[] sinks, Tensor[] bias, "
    "Tensor? seed, Tensor[] tensors, Tensor? beta, Tensor[] state, Tensor[] right_state"
)
SETTINGS = (
    "str spec, float scale, float far_scale, bool is_causal, SymInt window, SymInt offset, float dropout, "
    "bool own_sinks"
)
NAMES = [x.split(" ")[1] for x in f"{TENSORS}, {SETTINGS}".split(", ")]
NUM_TENSORS = TENSORS.count(", ") + 1


class Sinks(NamedTuple):
    """The first visible tokens of each sample.

    Args:
        key: (B, G, s, D).
        value: (B, G, s, E).
        position: (B, s), among the keys of the call; those before them are negative.
        visible: (B, s) bool; False where a sample has not so many tokens.
    """

    key: Tensor
    value: Tensor
    position: Tensor
    visible: Tensor


class NearBias(NamedTuple):
    """A relative bias of the near part.

    Args:
        band: (H, 2 w - 1) over distances j - i from -(w - 1) to w - 1. Without a window and sinks it may be
            (H, 2 r - 1), the bias of the far pairs.
        tails: (2, H), at distance w or r on the left and, at least 1, on the right, for sinks beyond the window.
        slope: (H), what the tails fall by per token, or None.
    """

    band: Tensor
    tails: Tensor
    slope: Tensor | None = None


def near_blocks(window: int, size: int, is_causal: bool) -> tuple[int, int]:
    """Numbers of blocks of ``size`` keys that a chunk of queries reaches on its left and on its right."""
    left = -(-max(0, window - 1) // size)
    return left, 0 if is_causal else left


@dataclass(frozen=True, kw_only=True)
class NearFarCall:
    """The inputs of one call.

    Args:
        query: (B, H, L, D).
        key: (B, G, S, D), G divides H; query i stands at key i + offset.
        value: (B, G, S, E).
        key_mask: (B, S) bool, True = attend.
        far_mask: the same without the sinks.
        sinks: the fields of `Sinks`, or nothing.
        bias: the fields of `NearBias`, or nothing.
        seed: of the dropped weights, () int64; None: none are dropped.
        tensors: of the map, (B or 1, G or 1, ...) in the dtype of the arithmetic.
        beta: (H), the logarithm of a factor of the far part.
        state: sums of earlier far keys, (B, G, ...) each; nothing: there are none, or no far part. With a slope their
            logarithms are relative to the key that comes ``window`` before the first query.
        right_state: sums of later far keys, mirrored: relative to the key ``max(window, 1)`` after the last query.
        spec: of the map, as `contract.intern_formula` names it; empty: there is no far part.
        scale: of q . k in the near part.
        far_scale: the map sees ``sqrt(far_scale) x``.
        is_causal: key j is visible to query i iff j <= i + offset.
        window: w; 0 for sinks alone.
        offset: keys before the first query.
        dropout: share of the near weights that is dropped.
        own_sinks: the sinks are keys of this call, and what they get goes to those. The gradient of picking them would
            be a tensor as large as the keys.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    key_mask: Tensor | None
    far_mask: Tensor | None
    sinks: Sequence[Tensor]
    bias: Sequence[Tensor]
    seed: Tensor | None
    tensors: Sequence[Tensor]
    beta: Tensor | None
    state: Sequence[Tensor]
    right_state: Sequence[Tensor]
    spec: str
    scale: float
    far_scale: float
    is_causal: bool
    window: int
    offset: int
    dropout: float
    own_sinks: bool

    @property
    def tensor_arguments(self) -> tuple[Any, ...]:
        """The arguments of an operator that `TENSORS` declares."""
        given = [getattr(self, name) for name in NAMES[:NUM_TENSORS]]
        return tuple([list(x) if isinstance(x, list | tuple) else x for x in given])

    @property
    def settings(self) -> tuple[Any, ...]:
        """The arguments of an operator that `SETTINGS` declares."""
        return tuple([getattr(self, name) for name in NAMES[NUM_TENSORS:]])

    @staticmethod
    def of(arguments: Sequence[Any]) -> NearFarCall:
        """The call that an operator's arguments stand for."""
        return NearFarCall(**dict(zip(NAMES, arguments, strict=True)))

    @property
    def reach(self) -> int:
        """Distance beyond which keys are in sums only: the window, or that of the bias where there is no near part."""
        return max(self.window, (self.bias[0].shape[1] + 1) // 2 if self.bias else 0)

    @property
    def is_level(self) -> bool:
        """True if the bias is that of far pairs: it is constant from `reach` on, and there is no near part."""
        return self.reach > self.window

    @cached_property
    def features(self) -> int:
        """M; 0 without a far part."""
        return lookup(self.spec).feature_dim(self.tensors, self.query.shape[3]) if self.spec else 0

    @cached_property
    def shapes(self) -> Shapes:
        """Sizes of the call, by its widest buffer."""
        width = self.sinks[2].shape[1] if self.sinks else 0
        if self.reach:
            size = Shapes.of(self.query, self.key, self.value, max(1, self.features)).causal(1)[0]
            left, right = near_blocks(self.reach, size, self.is_causal)
            width += size * (left + 1 + right)
        return Shapes.of(self.query, self.key, self.value, self.features + width)

    @cached_property
    def blocks(self) -> tuple[int, int]:
        """Queries of a block, and blocks of a group: not so few that mapping the keys around them costs more."""
        s = self.shapes
        size, together = s.causal(s.samples())
        around = near_blocks(self.reach, size, self.is_causal)[0] if self.spec else 0
        return size, min(max(together, min(4 * around, 24)), max(1, -(-max(s.L, s.S) // size)))
