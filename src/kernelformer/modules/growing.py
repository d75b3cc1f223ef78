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
from kernelformer.modules.bias import Bias, check_step_bias
from kernelformer.modules.checks import check_scale, check_step, check_stream, other_maker
from kernelformer.modules.core import AttentionCore, Call


class GrowingCore(AttentionCore):
    """What exact methods share: a state of all keys (B, G, S, D), values (B, G, S, E) and, once one was hidden, a mask.

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
        if call.state is None and not call.streams:
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
        return replace(call, key=key, value=value, key_mask=mask, bias=bias, past=state.length, query_mask=None)

    def _after(self, joined: Call, call: Call) -> State:
        tensors = (joined.key, joined.value, *(() if joined.key_mask is None else (joined.key_mask,)))
        made_by = self._made_by(call.scale) if call.state is None else call.state.made_by
        return State(tensors, joined.key.shape[2], made_by)

    def extra_repr(self) -> str:
        """The settings, for printing a model."""
        dropout = f", attention_dropout={self.attention_dropout:g}" if self.attention_dropout else ""
        return super().extra_repr() + dropout

    def _made_by(self, scale: float) -> MadeBy:
        return (("method", self.method), ("normalize_qk", self.normalize_qk), ("scale", scale))

    def step(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        state: State | None = None,
        *,
        bias: Tensor | None = None,
        slope: Tensor | None = None,
        scale: float | None = None,
        key_mask: Tensor | None = None,
        gate: Tensor | None = None,
    ) -> tuple[Tensor, State]:
        """One token: (B, H, 1, D), (B, G, 1, D), (B, G, 1, E) -> (B, H, 1, E) and the state after it; None starts.

        The state keeps every key: it grows with the context. A bias is (H, W + 1) over distances 0 to W, beyond which
        it is constant, or falls by ``slope`` (H) per token.
        """
        self._check_gate(gate, key)
        query, key, value = self._accept(query, key, value, key_mask)
        check_step(query, key)
        scale = self.scale if scale is None else check_scale(scale)
        self._check_streaming(query, key, value, True, scale, state)
        past = 0 if state is None else state.length
        checked = None
        if bias is not None:
            if not self.takes_bias:
                raise self._no_bias(f"bias of shape {shape(bias)}")
            checked = Bias(self._spread(bias, slope, past), Layout(1, past + 1, past))
        elif slope is not None:
            raise ValueError("slope goes with a bias, and none was given.")
        dtype = query.dtype
        query, key = self._units(query, key, key_mask)
        value = value.to(query.dtype)
        call = Call(query, key, value, True, key_mask, scale, state, bias=checked, streams=True)
        out, after = self._attend(call)
        assert after is not None
        return out.to(dtype), after

    def _spread(self, table: Tensor, slope: Tensor | None, past: int) -> Tensor:
        """A step's bias (H, W + 1) over distances 0 to W as one over j - i from -past to 0, (H, past + 1)."""
        check_step_bias(table, slope, self.num_heads)
        near = table[:, : past + 1]
        far = past + 1 - near.shape[1]
        near = F.pad(near, (0, far), mode="replicate") if far else near
        if far and slope is not None:
            beyond = torch.arange(1, far + 1, device=near.device, dtype=near.dtype)
            near = torch.cat([near[:, :-far], near[:, -far:] - slope.to(near).unsqueeze(1) * beyond], 1)
        return near.flip(1)

    def _check_streaming(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        is_causal: bool,
        scale: float,
        state: State | None,
        biased: bool = False,
    ) -> None:
        check_stream(query, key, is_causal)
        if state is not None:
            problem = self._misfit(query, key, value, scale, state)
            if problem:
                raise ValueError(f"{problem}; start anew with state=None.")

    def _misfit(self, query: Tensor, key: Tensor, value: Tensor, scale: float, state: State) -> str | None:
        """Why a state cannot be gone on from, or None."""
        if not isinstance(state, State):
            return f"state must be a kernelformer State, got {type(state).__name__}"
        problem = other_maker(dict(state.made_by), dict(self._made_by(scale)))
        if problem:
            return problem
        kept, here = state.tensors[1], (key.shape[0], key.shape[1], state.length, value.shape[-1])
        if tuple(kept.shape) != here:
            return f"the state has shape {shape(kept)}, these inputs need {here}"
        if kept.device != query.device or (kept.dtype != value.dtype and not self.normalize_qk):
            return f"the state is {kept.dtype} on {kept.device}, these inputs need {value.dtype} on {query.device}"
        return None
