"""Time of attentions and of exact attention, in the same rounds."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernelformer.analysis.crossover import Timing
from kernelformer.modules import AttentionCore, build_attention
from kernelformer.modules.evaluating import evaluating
from kernelformer.modules.options import maps_by_head
from kernelformer.timing import Step, time_rounds

EXACT = "softmax"
ROUNDS = 2
HEADS = 4  # of a smaller shape


@dataclass(frozen=True)
class Shape:
    """Sizes of an attention to time.

    Args:
        num_heads: H.
        num_key_heads: G.
        head_dim: D.
        causal: whether a token sees earlier ones only.
        norm: of sqrt(scale) q and k; some landmarks take longer for long vectors.
    """

    num_heads: int
    num_key_heads: int
    head_dim: int
    causal: bool
    norm: float = 1.0

    def smaller(self) -> Shape:
        """At most 4 heads, in whole groups: time is proportional to them, and ratios stay what they are."""
        groups = self.num_heads // self.num_key_heads
        keys = max(1, min(self.num_key_heads, HEADS // groups))
        return replace(self, num_heads=keys * groups, num_key_heads=keys)


def timed_core(method: str, options: Mapping[str, Any], shape: Shape) -> AttentionCore:
    """Build an attention of this shape; of grouped queries maps are by key head, as a conversion has them."""
    known = {"num_key_heads": shape.num_key_heads} if maps_by_head(method, options) else {}
    return build_attention(method, head_dim=shape.head_dim, num_heads=shape.num_heads, **{**known, **options})


@torch.no_grad()
def time_attentions(cores: Mapping[str, AttentionCore], shape: Shape, length: int) -> dict[str, Timing]:
    """Time attentions and exact attention by SDPA, in turns; one that fails is left out.

    Args:
        cores: by name.
        shape: of their inputs, which are random.
        length: tokens.
    """
    q, k, v = _inputs(shape, length)
    exact = build_attention(EXACT, head_dim=shape.head_dim, num_heads=shape.num_heads)
    steps = {
        name: Step(partial(core, q, k, v, is_causal=shape.causal)) for name, core in {**cores, EXACT: exact}.items()
    }
    with evaluating(*cores.values()):
        figures = time_rounds(steps, ROUNDS, 0.0)
    base = figures[EXACT]["seconds"]
    return {name: Timing(length, x["seconds"], base) for name, x in figures.items() if name != EXACT and "seconds" in x}


def time_curve(
    core: AttentionCore, shape: Shape, lengths: Sequence[int], seconds: float
) -> tuple[list[Timing], list[int]]:
    """Time one attention at lengths that rise, while there is time.

    Args:
        core: to time.
        shape: of its inputs.
        lengths: ascending.
        seconds: in all; a length whose expected time is above what is left is not timed.

    Returns:
        The times, and the lengths that were left out.
    """
    rows: list[Timing] = []
    end = time.monotonic() + seconds
    for place, length in enumerate(lengths):
        if rows:
            growth = length / rows[-1].length
            expected = (ROUNDS + 1) * (rows[-1].exact * growth**2 + rows[-1].seconds * growth)
            if time.monotonic() + expected > end:
                return rows, list(lengths[place:])
        rows += time_attentions({"core": core}, shape, length).values()
    return rows, []


def _inputs(shape: Shape, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Random queries, keys and values of one text; norms are as the default scale, 1 / sqrt(D), makes them."""
    gen = torch.Generator().manual_seed(0)

    def draw(heads: int, norm: float) -> Any:
        return torch.randn(1, heads, length, shape.head_dim, generator=gen) * (norm * shape.head_dim**-0.25)

    return (
        draw(shape.num_heads, shape.norm),
        draw(shape.num_key_heads, shape.norm),
        draw(shape.num_key_heads, shape.head_dim**0.25),
    )
