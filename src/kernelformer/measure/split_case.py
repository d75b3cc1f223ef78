"""One attention whose tokens are on several ranks: inputs of a rank, what it is asked to do, what it sends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernelformer.analysis.scaling import Exchange
from kernelformer.attention.ranks import HEADER, Ranks
from kernelformer.contract import compute_dtype
from kernelformer.modules import AttentionCore, KernelCore, build_attention
from kernelformer.modules.context import split_over
from kernelformer.modules.spec import parse_method
from kernelformer.parallel import context_parallel


@dataclass(frozen=True)
class SplitCase:
    """An attention whose tokens are on several ranks, and the inputs of one of them.

    Args:
        attention: its spec.
        causal: whether a query sees only what came before it.
        batch: B.
        heads: H.
        key_heads: G; 0: as many as there are heads.
        head_dim: D, of the values too.
        dtype: of the inputs, by torch's name.
        masked: whether some keys are hidden.
        packed: whether rows hold several sequences.
        slope: distance from which on a bias is said to be a straight line, of which it is one everywhere; 0: no bias.
    """

    attention: str
    causal: bool
    batch: int = 1
    heads: int = 8
    key_heads: int = 0
    head_dim: int = 64
    dtype: str = "float32"
    masked: bool = False
    packed: bool = False
    slope: int = 0

    @property
    def groups(self) -> int:
        """G."""
        return self.key_heads or self.heads

    def core(self) -> AttentionCore:
        """The attention."""
        method, options = parse_method(self.attention)
        core = build_attention(method, head_dim=self.head_dim, num_heads=self.heads, **options)
        return core.double() if self.dtype == "float64" else core

    def inputs(self, length: int, rank: int) -> list[Tensor]:
        """q, k and v of a rank, and a gradient of the output, (B, H or G, L, D) each."""
        gen = torch.Generator().manual_seed(rank)
        heads = (self.heads, self.groups, self.groups, self.heads)
        sizes = [(self.batch, h, length, self.head_dim) for h in heads]
        return [torch.randn(x, generator=gen, dtype=getattr(torch, self.dtype)) for x in sizes]

    def options(self, length: int, rank: int, ranks: int) -> dict[str, Any]:
        """Other arguments of a call with the tokens of so many ranks.

        Every third key is hidden, packed sequences have seven tokens and go on over ranks.
        """
        place = torch.arange(rank * length, (rank + 1) * length).expand(self.batch, -1)
        given: dict[str, Any] = {"is_causal": self.causal}
        if self.masked:
            given["key_mask"] = place % 3 > 0
        if self.packed:
            given["segment_ids"] = place // 7
        if self.slope:
            falls = torch.arange(1, self.heads + 1, dtype=getattr(torch, self.dtype)) / self.heads
            distance = torch.arange(1 - ranks * length, ranks * length).abs()
            given |= {"bias": -falls.unsqueeze(1) * distance, "max_distance": self.slope, "slope": falls}
        return given

    def exchange(self, core: AttentionCore) -> Exchange:
        """What its formula for the exchange depends on, from the core itself."""
        phi = core.feature_map if isinstance(core, KernelCore) else None
        return Exchange(
            heads=self.heads if self.slope else self.groups if phi is None else max(self.groups, phi.heads),
            head_dim=self.head_dim,
            value_dim=self.head_dim,
            features=core.feature_dim or 0,
            facts=HEADER,
            window=getattr(core, "window", None) or self.slope,
            sinks=getattr(core, "sinks", 0),
            batch=self.batch,
            item=compute_dtype(getattr(torch, self.dtype)).itemsize,
            signed=phi is not None and phi.spec.family != "positive",
            causal=self.causal,
            masked=self.masked,
            packed=self.packed,
            slope=self.slope > 0,
        )


Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def train(attend: Attend, inputs: Sequence[Tensor]) -> None:
    """Forward, and backward to q, k and v, from these and a gradient of the output."""
    *given, grad = inputs
    leaves = [x.detach().requires_grad_() for x in given]
    attend(*leaves).backward(grad)


class LonelyRanks(Ranks):
    """One of many ranks without the others: it gets what it gave itself, so that all of its work is there to measure.

    Args:
        size: how many ranks there would be. This is one in the middle; of two the first, which has sums to make.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.rank, self.size = (size - 1) // 2, size

    def _all_gather(self, every: list[Tensor], x: Tensor) -> None:
        for copy in every:
            copy.copy_(x)

    def _sum_for_each(self, grads: Tensor) -> Tensor:
        return grads.sum(0)


def train_split(attend: Attend, inputs: Sequence[Tensor]) -> None:
    """`train` with the tokens of all ranks."""
    with context_parallel():
        train(attend, inputs)


def train_lonely(attend: Attend, inputs: Sequence[Tensor], size: int) -> None:
    """`train` as one of so many ranks, without any exchange."""
    with split_over(LonelyRanks(size)):
        train(attend, inputs)


def sent_bytes(case: SplitCase, core: AttentionCore, length: int, rank: int) -> list[int]:
    """Bytes that a rank gives to the others, as they are counted, forward and backward."""
    *given, grad = case.inputs(length, rank)
    leaves = [x.requires_grad_() for x in given]
    with context_parallel() as ranks:
        out = core(*leaves, **case.options(length, rank, ranks.size))
        forward = ranks.sent
        out.backward(grad)
        return [forward, ranks.sent - forward]
