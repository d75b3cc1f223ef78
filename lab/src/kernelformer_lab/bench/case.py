"""The cases of the benchmark with the inputs that all contenders share, and the base class of contenders."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from kernelformer.errors import choice, positive_int
from kernelformer_lab.bench.settings import BIASES, Task

Attention = Callable[..., Tensor]  # of q, k, v, and of the bias where the case has one
SMALL = 256  # length at which contenders are checked


@dataclass(frozen=True)
class Case:
    """One size of one task; ``length`` is the context for decoding.

    ``bias`` is the relative position bias: None; ``full``, a random number for every distance and head; or ``window``,
    the same up to the distance ``window`` and constant beyond it on each side. Inputs are made on the CPU: their
    numbers are the same on every ``device``.
    """

    task: Task
    length: int
    backward: bool = False
    batch: int = 1
    heads: int = 8
    head_dim: int = 64
    features: int = 256
    bias: str | None = None
    window: int = 128
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.bias is not None:
            choice("bias", self.bias, BIASES)
        positive_int("window", self.window)

    @property
    def causal(self) -> bool:
        """True if a query sees only keys up to its own position."""
        return self.task != "bidirectional"

    @property
    def device_kind(self) -> str:
        """Its device without the number."""
        return self.device.partition(":")[0]

    @property
    def positions(self) -> str:
        """Words on the bias, after a comma; empty if there is none."""
        words = {None: "", "full": ", bias over all distances", "window": f", bias within {self.window}"}
        return words[self.bias]

    @property
    def title(self) -> str:
        """Name of the case in tables and messages."""
        if self.task == "decode":
            return f"decode one token, context {self.length}{self.positions}"
        return f"{self.task} forward{' + backward' if self.backward else ''}, L = {self.length}{self.positions}"

    def inputs(self, length: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k, v (B, H, L, D), the same for every contender."""
        gen = torch.Generator().manual_seed(0)
        size = (self.batch, self.heads, length or self.length, self.head_dim)
        q, k, v = (torch.randn(size, generator=gen).to(self.device) for _ in range(3))
        return q, k, v

    def bias_table(self, length: int | None = None) -> Tensor:
        """Return the bias (H, 2L-1), uniform in [-1, 1], the same for every contender.

        Entry t is that of distance t - (L-1). A window's numbers are the same at every length.
        """
        if self.bias is None:
            raise ValueError(f"{self.title!r} has no bias; give the case bias='full' or bias='window'.")
        length = length or self.length
        gen = torch.Generator().manual_seed(2)
        reach = self.window if self.bias == "window" else length - 1
        table = torch.rand(self.heads, 2 * reach + 1, generator=gen) * 2 - 1
        distance = torch.arange(1 - length, length).clamp(-reach, reach)
        return table[:, distance + reach].to(self.device)

    def past_bias(self) -> Tensor:
        """Return the bias for decoding, (H, W+1): entry d is that of a key d tokens ago, and beyond W the last one.

        W is the window, or the whole context where every distance counts.
        """
        reach = self.window if self.bias == "window" else self.length - 1
        return self.bias_table(reach + 1)[:, : reach + 1].flip(1)

    def bias_matrix(self, length: int) -> Tensor:
        """Return the whole matrix ``b_{j-i}``, (H, L, L) in float64, for definitions; the number 0 without a bias."""
        if self.bias is None:
            return torch.zeros((), dtype=torch.float64)
        index = torch.arange(length)
        return self.bias_table(length).cpu().double()[:, index - index.unsqueeze(1) + length - 1]


class Contender(ABC):
    """One way to compute attention, which is checked against its definition and timed."""

    tolerance = 1e-4
    layout: Literal["heads", "tokens"] = "heads"  # (B, H, L, D), or (B, L, H, D)
    takes_bias = False
    trains_bias = True  # whether it gives a bias its gradient

    def __init__(self, name: str) -> None:
        self.name = name

    def refuses(self, case: Case) -> str | None:
        """Return why it cannot run a case, or None if it can."""
        if case.bias is not None and not self.takes_bias:
            return "takes no relative position bias"
        return self._refuses(case)

    def _refuses(self, case: Case) -> str | None:
        return "decodes by recomputing" if case.task == "decode" else None

    @abstractmethod
    def build(self, case: Case) -> Attention:
        """Build the attention function, in its own layout: of q, k, v and, if the case has one, the bias (H, 2L-1)."""

    @abstractmethod
    def definition(self, case: Case, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return what the function last built should give, (B, H, L, D), from float64 inputs and the case's bias."""

    def error(self, case: Case) -> float:
        """Return the worst relative error of an output row against the definition, at a small length."""
        q, k, v = (x.cpu().double() for x in case.inputs(SMALL))  # not every device has double precision
        with torch.no_grad():
            got = self._heads(self.build(case)(*self._given(case, SMALL))).cpu().double()
            want = self.definition(case, q, k, v)
        return float(((got - want).norm(dim=-1) / want.norm(dim=-1)).max())

    def _given(self, case: Case, length: int | None = None) -> list[Tensor]:
        """Arguments of its function: q, k, v in its layout, and the bias where there is one."""
        bias = [] if case.bias is None else [case.bias_table(length)]
        return [*(self._own(x) for x in case.inputs(length)), *bias]

    def _own(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2).contiguous() if self.layout == "tokens" else x

    def _heads(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2) if self.layout == "tokens" else x

    def runner(self, case: Case) -> Callable[[], Any]:
        """Return a call that runs the case once, on inputs made here: the output, and in training all gradients."""
        call = self.build(case)
        given = self._given(case)
        if not case.backward:

            def forward() -> Tensor:
                with torch.no_grad():
                    return call(*given)

            return forward
        grad = torch.randn(given[0].shape, generator=torch.Generator().manual_seed(1)).to(case.device)

        def train() -> tuple[Tensor, ...]:
            leaves = [x.detach().requires_grad_() for x in given[: None if self.trains_bias else 3]]
            out = call(*leaves, *given[len(leaves) :])
            return out, *torch.autograd.grad(out, leaves, grad)

        return train
