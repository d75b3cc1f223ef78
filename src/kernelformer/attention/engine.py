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


class Engine(ABC):
    """Sums over keys and reads by queries, chunk by chunk, for N rows (sample, key head) at once.

    A state is a list of tensors (N, ...) with everything that is kept of the keys so far; its size does not depend on
    their number. Gradients of a state are a list too, whose meaning is the engine's own between `grads_in` and
    `grads_out`.

    Args:
        normalize: divide by the sum of the weights.
        work: buffers.
    """

    def __init__(self, normalize: bool, work: Workspace) -> None:
        self.normalize, self.work = normalize, work

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
    def causal_backward(
        self, state: Sequence[Tensor], grads: list[Tensor], inputs: Chunks, g: Tensor, out: Tensor, row_scale: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        """Gradients at xq, xk and v of `causal`, and the state's before the group from those after it."""

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
