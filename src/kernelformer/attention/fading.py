"""Maps whose tokens bring a log factor along, as their last coordinate: what a bias that falls with distance needs.

With ``-slope i`` of the query and ``slope j`` of the key, the weight of a pair falls by the slope per token.
"""

from __future__ import annotations

from torch import Tensor

from kernelformer.attention.engine import Engine
from kernelformer.attention.positive import PositiveEngine
from kernelformer.attention.signed import SignedEngine
from kernelformer.contract import PositiveChunks, Role, SignedChunks


def fading(engine: Engine) -> Engine:
    """The same engine for tokens (N, C, D + 1)."""
    if isinstance(engine, PositiveEngine):
        engine.chunks = FadingPositive(engine.chunks)
    elif isinstance(engine, SignedEngine):
        engine.chunks = FadingSigned(engine.chunks)
    return engine


def _inner(x: Tensor) -> Tensor:
    return x[..., :-1].contiguous()


class FadingPositive(PositiveChunks):
    """A positive map of all coordinates but the last, which is added to the log features."""

    def __init__(self, inner: PositiveChunks) -> None:
        self.inner = inner

    def queries(self, x: Tensor, shift: Tensor, out: Tensor) -> Tensor:
        """See `PositiveChunks`."""
        return self.inner.queries(_inner(x), shift, out).add_(x[..., -1:])

    def keys(self, x: Tensor, out: Tensor) -> Tensor:
        """See `PositiveChunks`."""
        return self.inner.keys(_inner(x), out).add_(x[..., -1].unsqueeze(1))

    def vjp_queries(self, x: Tensor, grad: Tensor, out: Tensor) -> Tensor:
        """See `PositiveChunks`; nobody asks for the gradient of the factor."""
        x = _inner(x)
        out[..., :-1] = self.inner.vjp_queries(x, grad, x.new_empty(x.shape))
        out[..., -1] = 0
        return out

    def vjp_keys(self, x: Tensor, grad: Tensor, out: Tensor) -> Tensor:
        """See `PositiveChunks`; nobody asks for the gradient of the factor."""
        x = _inner(x)
        out[..., :-1] = self.inner.vjp_keys(x, grad, x.new_empty(x.shape))
        out[..., -1] = 0
        return out

    def at(self, row: int, head: int = 0) -> PositiveChunks:
        """See `PositiveChunks`."""
        return FadingPositive(self.inner.at(row, head))

    def tensor_grads(self) -> list[Tensor]:
        """See `PositiveChunks`."""
        return self.inner.tensor_grads()


class FadingSigned(SignedChunks):
    """A map by its values, of all coordinates but the last, which is added to the log factor."""

    def __init__(self, inner: SignedChunks) -> None:
        self.inner = inner

    def features(self, x: Tensor, role: Role, out: Tensor) -> Tensor | None:
        """See `SignedChunks`."""
        factor = self.inner.features(_inner(x), role, out)
        return x[..., -1:].clone() if factor is None else factor + x[..., -1:]

    def vjp(self, x: Tensor, role: Role, phi: Tensor, grad: Tensor, log_grad: Tensor | None, out: Tensor) -> Tensor:
        """See `SignedChunks`; nobody asks for the gradient of the factor."""
        x = _inner(x)
        out[..., :-1] = self.inner.vjp(x, role, phi, grad, log_grad, x.new_empty(x.shape))
        out[..., -1] = 0
        return out

    def tensor_grads(self) -> list[Tensor]:
        """See `SignedChunks`."""
        return self.inner.tensor_grads()
