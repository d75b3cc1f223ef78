"""One attention whose tokens are on several ranks: inputs of a rank, what it is asked to do, what it sends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from kernelformer.analysis.scaling import Exchange
from kernelformer.attention.families import engine_class
from kernelformer.attention.ranks import Ranks
from kernelformer.contract import compute_dtype, lookup
from kernelformer.measure.harness import Step
from kernelformer.modules import AttentionCore, KernelCore, build_attention, parse_method
from kernelformer.modules.split import Facts
from kernelformer.modules.split_parts import Form, Sent, incoming
from kernelformer.parallel import context_parallel

MERGED = 64  # ranks whose sums are put together where that is measured


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
            facts=len(Facts._fields),
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


def train(attend: Attend, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The output and the gradients of q, k and v."""
    *given, grad = inputs
    leaves = [x.detach().requires_grad_() for x in given]
    out = attend(*leaves)
    return out, *torch.autograd.grad(out, leaves, grad)


def train_split(attend: Attend, inputs: Sequence[Tensor], group: dist.ProcessGroup | None = None) -> None:
    """`train` with the tokens of all ranks of a group."""
    with context_parallel(group):
        train(attend, inputs)


def sent_bytes(case: SplitCase, core: AttentionCore, length: int, rank: int) -> list[int]:
    """Bytes that a rank gives to the others, as they are counted, forward and backward."""
    *given, grad = case.inputs(length, rank)
    leaves = [x.requires_grad_() for x in given]
    with context_parallel() as ranks:
        out = core(*leaves, **case.options(length, rank, ranks.size))
        forward = ranks.sent
        torch.autograd.grad(out, leaves, grad)
        return [forward, ranks.sent - forward]


def merge_step(case: SplitCase, core: AttentionCore) -> Step | None:
    """What a rank does with the sums of `MERGED` ranks, of which half count, forward and backward; None: no sums."""
    if not isinstance(core, KernelCore):
        return None
    spec, dtype = core.feature_map.spec_id, compute_dtype(getattr(torch, case.dtype))
    lead = (MERGED, case.batch, max(case.groups, core.feature_map.heads))
    gen = torch.Generator().manual_seed(0)
    shapes = engine_class(lookup(spec)).state_shapes(core.feature_dim, case.head_dim)
    sums = [torch.randn(*lead, *x, generator=gen, dtype=dtype).requires_grad_() for x in shapes]
    token = torch.zeros(*lead[1:], 1, case.head_dim, dtype=dtype)
    form = Form(token, token, spec=spec)
    links = torch.ones(MERGED, case.batch, dtype=torch.bool)
    middle = cast(Ranks, SimpleNamespace(rank=MERGED // 2, size=MERGED))

    def merge() -> None:
        side = incoming(form, Sent(full=sums), links, middle, range(MERGED + 1), mirror=False)
        trained = [x for x in side.sums if x.requires_grad]  # not a common scale
        torch.autograd.grad(trained, sums, [torch.ones_like(x) for x in trained], allow_unused=True)

    return Step(merge)
