"""What the drivers (`linear`, `causal`) ask of the chunk arithmetic of a family of maps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from kernelformer.contract import Workspace


class Chunks(NamedTuple):
    """Inputs of c consecutive chunks for each of N rows, queries of R heads to each key head.

    Args:
        xq: (N c, R C, D) queries.
        xk: (N c, C, D) keys; hidden ones are 0.
        v: (N c, C, E) values; hidden ones are 0.
        hidden: (N c, C) bool, or None.
        mask: (R C, C) of ones and zeros, 1 = visible.
    """

    xq: Tensor
    xk: Tensor
    v: Tensor
    hidden: Tensor | None
    mask: Tensor


class Part(NamedTuple):
    """What some keys give to c chunks of queries, to be merged with what other keys give (`merge`).

    Args:
        num: (N c, R C, E), ``exp(-log) sum_j w_ij v_j``.
        log: (N c, R C), the scale of the row's sums; EMPTY where it sees no key.
        den: (N c, R C), ``exp(-log) sum_j w_ij``; None means 1.
        guard: (N c, R C), ``exp(-log) |phi(q_i)| sum_j |phi(k_j)|``; None: the same as den.
    """

    num: Tensor
    log: Tensor
    den: Tensor | None = None
    guard: Tensor | None = None


class Merged(NamedTuple):
    """What the rows of a part were divided by in the end, with other parts: the backward pass asks for it.

    Args:
        total: (N c, R C), the logarithm of the denominator, on the scale of the part's weights.
        guarded: (N c, R C) bool, whether the guard is the denominator; None means nowhere.
    """

    total: Tensor
    guarded: Tensor | None = None


class CausalGrads(NamedTuple):
    """Gradients of a causal group: of queries, keys, values, the state before it, and the rows' log scale (N c, R C).

    The last one is for parts only.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    state: list[Tensor]
    log: Tensor | None = None


class Engine(ABC):
    """Sums over keys and reads by queries, chunk by chunk, for N rows (sample, key head) at once.

    A state is a list of tensors (N, ...) with everything that is kept of the keys so far; its size does not depend on
    their number. Gradients of a state are a list too, whose meaning is the engine's own between `grads_in` and
    `grads_out`.

    Args:
        normalize: divide by the sum of the weights.
        work: buffers.
        parts: its causal groups are parts of a larger sum (`causal_part`), so that the map is bound without leaving out
            what would cancel under normalization.
    """

    def __init__(self, normalize: bool, work: Workspace, parts: bool = False) -> None:
        self.normalize, self.work, self.parts = normalize, work, parts

    @abstractmethod
    def absorb(self, state: list[Tensor], x: Tensor, v: Tensor, hidden: Tensor | None) -> None:
        """Take keys x (N, C, D) and values v (N, C, E) into the state, in place; hidden (N, C) ones do not count."""

    @abstractmethod
    def read(self, state: Sequence[Tensor], x: Tensor) -> Tensor:
        """Outputs (N, C, E) of queries x (N, C, D)."""

    @abstractmethod
    def read_backward(self, state: Sequence[Tensor], grads: list[Tensor], x: Tensor, g: Tensor, out: Tensor) -> Tensor:
        """Gradient at x of `read` from that of its output, g (N, C, E); adds to the state's, in place."""

    @abstractmethod
    def absorb_backward(
        self, state: Sequence[Tensor], grads: Sequence[Tensor], x: Tensor, v: Tensor, hidden: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Gradients at x and v of `absorb`; state and gradients are those after the last chunk."""

    @abstractmethod
    def causal(self, state: Sequence[Tensor], inputs: Chunks) -> tuple[Tensor, Tensor, list[Tensor]]:
        """A group of c consecutive chunks per row; the bound map has N c rows, the state before the group N.

        Returns:
            outputs (N c, R C, E); a row scale (N c, R C), which the backward pass takes; the state after the group.
        """

    @abstractmethod
    def causal_part(self, state: Sequence[Tensor], inputs: Chunks) -> tuple[Part, Tensor, list[Tensor]]:
        """As `causal`, with the sums of a row in place of its output."""

    @abstractmethod
    def causal_backward(
        self,
        state: Sequence[Tensor],
        grads: list[Tensor],
        inputs: Chunks,
        g: Tensor,
        out: Tensor,
        row_scale: Tensor,
        merged: Merged | None = None,
    ) -> CausalGrads:
        """Gradients of `causal`, from those of the output and of the state after the group.

        Those of `causal_part` where ``merged`` says what its rows were divided by; ``out`` is the whole output then.
        """

    @staticmethod
    @abstractmethod
    def state_shapes(features: int, width: int) -> list[tuple[int, int]]:
        """The last two sizes of the state's tensors, after (B, G) or (N)."""

    @staticmethod
    @abstractmethod
    def empty(lead: tuple[int, ...], features: int, width: int, like: Tensor) -> list[Tensor]:
        """The state of no keys."""

    @staticmethod
    @abstractmethod
    def zero_grads(state: Sequence[Tensor]) -> list[Tensor]:
        """Gradients of a state, all zero."""

    @staticmethod
    @abstractmethod
    def grads_in(state: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Tensor]:
        """From the gradients of a state's tensors to the engine's own."""

    @staticmethod
    @abstractmethod
    def grads_out(state: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Tensor]:
        """The inverse of `grads_in`."""
