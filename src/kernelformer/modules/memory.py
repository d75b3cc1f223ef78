"""Contexts that are read once and attended to again and again."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from kernelformer.attention import State
from kernelformer.attention.state import MadeBy
from kernelformer.modules.calibration import Calibrated
from kernelformer.modules.call import Call
from kernelformer.modules.checks import check_memory
from kernelformer.modules.context import needs_whole


class Remembering(Calibrated):
    """What an attention core keeps of a whole context: here all of it."""

    method: str
    num_heads: int
    scale: float

    @abstractmethod
    def _accept(self, call: Call) -> Call:
        """Check queries, keys, values and masks."""

    def remember(self, key: Tensor, value: Tensor, *, key_mask: Tensor | None = None) -> State:
        """What `recall` needs of a whole context, (B, G, S, D) and (B, G, S, E); here all of it."""
        needs_whole("remember", "attend to the context over ranks, in one call")
        query = key.new_zeros(key.shape[0], self.num_heads, 1, key.shape[3]) if key.dim() == 4 else key
        call = self._accept(Call(query=query, key=key, value=value, scale=self.scale, key_mask=key_mask))
        length = call.key.shape[2]
        made_by = (*self._maker(), ("remembers", length))
        return State((call.key, call.value, *(() if key_mask is None else (key_mask,))), length, made_by)

    def recall(self, query: Tensor, memory: State) -> Tensor:
        """Attend to a remembered context, without a bias: (B, H, L, D) -> (B, H, L, E)."""
        self._check_memory(memory)
        key, value, *mask = memory.tensors
        real = torch.ones(query.shape[0], query.shape[2], dtype=torch.bool, device=query.device)
        out = self.forward(query, key, value, key_mask=mask[0] if mask else None, query_mask=real)
        assert isinstance(out, Tensor)
        return out

    def _maker(self) -> MadeBy:
        """What makes a memory fit this core."""
        return (("method", self.method),)

    def _check_memory(self, memory: State) -> None:
        check_memory(memory, self.method, dict(self._maker()))
