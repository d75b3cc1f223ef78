"""Streams of exact methods: every key and value is kept, so that the state grows with the context."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernelformer.attention import State
from kernelformer.attention.recurrent import MadeBy
from kernelformer.attention.relative.bias_view import Layout
from kernelformer.errors import fraction, shape
from kernelformer.modules.call import Bias, Call
from kernelformer.modules.checks import other_maker
from kernelformer.modules.core import AttentionCore


class GrowingCore(AttentionCore):
    """Base class of exact methods, which attend to every key.

    Their state holds all keys (B, G, S, D), values (B, G, S, E) and, once one was hidden, a mask (B, S).
    Cost of a stream: O(S) time and memory per token.

    Args:
        attention_dropout: the share of weights that training sets to 0, the others being divided by what is left;
            torch forms the whole (L, S) matrix then. The others are those of `AttentionCore`.
    """

    takes_dropout = True

    def __init__(self, method: str, *, attention_dropout: float = 0.0, **options: Any) -> None:
        super().__init__(method, **options)
        self.attention_dropout = fraction("attention_dropout", attention_dropout)

    def _exact(self, call: Call) -> Tensor:
        """The method itself: query i sees keys up to ``call.past + i`` where it is causal."""
        raise TypeError(f"{type(self).__name__} does not say how it attends.")

    def _attend(self, call: Call) -> tuple[Tensor, State | None]:
        if self.attention_dropout and self.training:
            call = replace(call, dropout=self.attention_dropout)
        if not call.in_stream:
            return self._exact(call), None
        joined = self._join(call)
        after = self._after(joined, call)
        return self._exact(joined), after

    @staticmethod
    def _join(call: Call) -> Call:
        """The call with the keys of the state before its own."""
        state = call.state
        if state is None or state.length == 0:
            return call
        key, value = (torch.cat([a, b], 2) for a, b in zip(state.tensors[:2], (call.key, call.value), strict=True))
        mask = None
        if len(state.tensors) > 2 or call.key_mask is not None:
            visible = key.new_ones(key.shape[0], key.shape[2], dtype=torch.bool)
            old = state.tensors[2] if len(state.tensors) > 2 else visible[:, : state.length]
            new = visible[:, state.length :] if call.key_mask is None else call.key_mask
            mask = torch.cat([old, new], 1)
        bias = call.bias
        if bias is not None:
            bias = replace(bias, layout=Layout(call.query.shape[2], key.shape[2], state.length))
        return replace(call, key=key, value=value, key_mask=mask, bias=bias, past=state.length)

    def _after(self, joined: Call, call: Call) -> State:
        """The state with the keys of a call and those before them."""
        tensors = (joined.key, joined.value, *(() if joined.key_mask is None else (joined.key_mask,)))
        made_by = self._made_by(call.scale) if call.state is None else call.state.made_by
        return State(tensors, joined.key.shape[2], made_by)

    def _forget(self, state: State, samples: Tensor) -> State:
        """Keys stay where they are, for the sake of distances, and are hidden."""
        key, value, *mask = state.tensors
        visible = (~samples).unsqueeze(1).expand(-1, key.shape[2])
        return replace(state, tensors=(key, value, visible & mask[0] if mask else visible))

    def extra_repr(self) -> str:
        """The settings, for printing a model."""
        dropout = f", attention_dropout={self.attention_dropout:g}" if self.attention_dropout else ""
        return super().extra_repr() + dropout

    def _made_by(self, scale: float) -> MadeBy:
        return (("method", self.method), ("normalize_qk", self.normalize_qk), ("scale", scale))

    def _step(self, call: Call) -> tuple[Tensor, State]:
        if call.bias is not None:
            past = 0 if call.state is None else call.state.length
            call = replace(call, bias=_over_past(call.bias, past))
        return super()._step(call)

    def _stream_refusal(self, what: str) -> ValueError | None:
        return None

    def _misfit(self, call: Call, state: State) -> str | None:
        problem = other_maker(dict(state.made_by), dict(self._made_by(call.scale)))
        if problem:
            return problem
        key, value = call.key, call.value
        kept, here = state.tensors[1], (key.shape[0], key.shape[1], state.length, value.shape[-1])
        if tuple(kept.shape) != here:
            return f"the state has shape {shape(kept)}, these inputs need {here}"
        if kept.device != key.device or (kept.dtype != value.dtype and not self.normalize_qk):
            return f"the state is {kept.dtype} on {kept.device}, these inputs need {value.dtype} on {key.device}"
        return None


def _over_past(bias: Bias, past: int) -> Bias:
    """A step's bias over distances 0 to W as one over all keys: j - i from -past to 0, (H, past + 1)."""
    near = bias.table[:, -(past + 1) :]
    far = past + 1 - near.shape[1]
    table = F.pad(near, (far, 0), mode="replicate") if far else near
    if far and bias.slope is not None:
        beyond = torch.arange(far, 0, -1, device=near.device, dtype=near.dtype)
        table = torch.cat([table[:, :far] - bias.slope.to(near).unsqueeze(1) * beyond, near], 1)
    return Bias(table, Layout(1, past + 1, past))
