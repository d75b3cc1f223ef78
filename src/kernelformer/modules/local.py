"""Attention to near tokens alone: what a kernel for the far ones has to be compared with."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kernelformer.attention import State
from kernelformer.attention.parallel.attend import takes_parallel
from kernelformer.attention.state import MadeBy
from kernelformer.contract import no_autocast
from kernelformer.errors import fraction, integer, positive_int
from kernelformer.modules.checks import Call, other_maker, other_tensor
from kernelformer.modules.core import AttentionCore
from kernelformer.modules.split_cores import LocalSplit
from kernelformer.modules.window import NearFarAttention, Stream


class LocalCore(AttentionCore):
    """Exact softmax attention to the tokens nearby and to the first ones; all others are invisible.

        out_i = sum_near e^(s_ij) v_j / sum_near e^(s_ij)          near(i) = { j : |i - j| < window or j < sinks }

    Cost: O(L (window + sinks) (D + E)) time; a stream keeps ``window`` + ``sinks`` keys and values.

    Args:
        window: tokens on each side of a query, its own included, that it sees.
        sinks: number of first visible tokens that every query sees (StreamingLLM's attention sinks).
        attention_dropout: the share of weights that training sets to 0, the others being divided by what is left.

    The others are those of `AttentionCore`.
    """

    splits = LocalSplit
    takes_bias = True
    has_near = True
    takes_dropout = True
    takes_loops = True

    def __init__(
        self, method: str, *, window: int = 64, sinks: int = 4, attention_dropout: float = 0.0, **options: Any
    ) -> None:
        super().__init__(method, **options)
        self.window = positive_int("window", window)
        self.sinks = integer("sinks", sinks, at_least=0)
        self.attention_dropout = fraction("attention_dropout", attention_dropout)

    @property
    def near(self) -> NearFarAttention:
        """The part that attends."""
        dropout = self.attention_dropout if self.training else 0.0
        return NearFarAttention(self.method, window=self.window, sinks=self.sinks, scale=None, dropout=dropout)

    def _attend(self, call: Call) -> tuple[Tensor, State | None]:
        with no_autocast(call.query.device.type):
            near = self.near
            parallel = takes_parallel(call.algorithm, (call.query, call.key, call.value), near.not_parallel)
            out, after = near.attend(call, None, parallel=parallel)
        return out, self._state(after, call) if call.streams and after is not None else None

    def _step(self, call: Call) -> tuple[Tensor, State]:
        with no_autocast(call.query.device.type):
            out, after, near = self.near.step(call, None)
        state = self._state(after, call)
        return out, State(state.tensors, state.length, state.made_by, near=near)

    def _state(self, tensors: tuple[Tensor, ...], call: Call) -> State:
        before, count = call.state, call.key.shape[2]
        if before is not None:
            return State(tensors, before.length + count, before.made_by)
        return State(tensors, count, self._made_by(call.scale) + self.near.made_by(call))

    def _made_by(self, scale: float) -> MadeBy:
        own = {"normalize_qk": self.normalize_qk, "scale": scale, "window": self.window, "sinks": self.sinks}
        return (("method", self.method), *own.items())

    def _stream_refusal(self, what: str) -> ValueError | None:
        return None

    def _forget(self, state: State, samples: Tensor) -> State:
        return self.near.forget(state, samples)

    def _misfit(self, call: Call, state: State) -> str | None:
        ours = self._made_by(call.scale) + self.near.made_by(call)
        problem = other_maker(dict(state.made_by), dict(ours))
        if problem:
            return problem
        kept = Stream.of(state, self.sinks > 0).tokens[1]
        needed = (call.key.shape[0], call.key.shape[1], kept.shape[2], call.value.shape[-1])
        return other_tensor(kept, needed, call.query)

    def extra_repr(self) -> str:
        """The settings, for printing a model."""
        return f"{super().extra_repr()}, window={self.window}, sinks={self.sinks}"
